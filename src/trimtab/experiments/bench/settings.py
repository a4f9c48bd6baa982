"""What ``trimtab bench`` can be told. No torch here."""

from __future__ import annotations

import os
from dataclasses import dataclass

from trimtab.errors import ConfigError, nearest_names

__all__ = ["MEASURES", "BenchSettings"]

MEASURES = ("decision", "step", "formats", "monitors")
"""What can be measured, in the order in which it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchSettings:
    """Measure on this machine what trimtab costs: a decision, a step with and without it, its formats, its monitors.

    Everything is timed on the CPU, as ratios in one run; the more else the machine does, the wider the quartiles. About
    two minutes on two cores, a quarter of one with --quick.

    Example: trimtab bench --only decision,step
    """

    only: tuple[str, ...] = ()
    """Measure these alone: decision, step, formats, monitors; apart by spaces or commas. All when left out."""
    quick: bool = False
    """Small sizes and few repeats: whether it works, and the order of magnitude."""
    threads: int | None = None
    """Threads of torch; as torch has it when left out."""
    json: bool = False
    """Print JSON for machines."""

    def __post_init__(self) -> None:
        for name in self._named:
            if name not in MEASURES:
                near = nearest_names(name, MEASURES)
                remedy = f"Did you mean {near[0]!r}?" if near else "Name some of these, or none for all."
                raise ConfigError("only", name, f"it is of {', '.join(map(repr, MEASURES))}.", remedy)
        if self.only and not self._named:
            raise ConfigError("only", self.only, "it names what to measure.", "Name one, or leave it out for all.")
        if self.threads is not None and not 1 <= self.threads <= 4 * (os.cpu_count() or 1):
            allowed = f"at least 1, and no more than 4 for each of the {os.cpu_count() or 1} processors."
            raise ConfigError("threads", self.threads, allowed, "Leave it out for torch's own number.")

    @property
    def measures(self) -> tuple[str, ...]:
        """What is to be measured.

        Example:
            >>> BenchSettings(only=("step,decision",)).measures
            ('decision', 'step')
        """
        return tuple(name for name in MEASURES if name in self._named) or MEASURES

    @property
    def _named(self) -> list[str]:
        return [name for word in self.only for name in word.split(",") if name]
