"""What faults on channels of one unit have in common: where and when a burst falls, and how bursts are drawn."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from trimtab.errors import ConfigError, nearest_names
from trimtab.faults.window import check_whole
from trimtab.precision.recipe import Conversion

__all__ = ["BurstFaults", "ChannelBurst", "draw_bursts"]

B = TypeVar("B", bound="ChannelBurst")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelBurst:
    """For ``num_steps`` steps, channels of one unit have a factor; what of them has it is up to the subclass.

    Args:
        unit: Name of the unit.
        start_step: First optimizer step that suffers it; at least 1.
        num_steps: How long it lasts; at least 1.
        factor: What the channels are multiplied by.
        num_channels: How many channels.
        seed: Which channels.
    """

    unit: str
    start_step: int
    num_steps: int
    factor: float
    num_channels: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for setting, least in (("start_step", 1), ("num_steps", 1), ("num_channels", 1), ("seed", 0)):
            check_whole(setting, getattr(self, setting), least)
        if not isinstance(self.factor, int | float) or not math.isfinite(self.factor):
            raise ConfigError("factor", self.factor, "a finite number is needed.", "Use one between 50 and 1000, say.")

    @property
    def end_step(self) -> int:
        """The first step that no longer suffers it."""
        return self.start_step + self.num_steps

    def channels(self, size: int) -> list[int]:
        """The channels it falls on, of ``size``; the same for the same seed."""
        rng = np.random.default_rng([self.seed, self.start_step])
        return sorted(rng.choice(size, size=min(self.num_channels, size), replace=False).tolist())


class BurstFaults(ABC, Generic[B]):
    """A set of bursts, for ``guard.inject``.

    Where two bursts of one unit overlap, the later one holds.

    Args:
        bursts: The bursts, in any order.
    """

    kind: ClassVar[str]
    """What the record calls it."""

    def __init__(self, bursts: Sequence[B]) -> None:
        self.bursts = tuple(sorted(bursts, key=lambda b: b.start_step))

    @abstractmethod
    def check_conversion(self, conversion: Conversion | None) -> Conversion:
        """The conversion, when it can suffer this.

        Raises: ConfigError: when it cannot, with what could.
        """

    @abstractmethod
    def apply(self, burst: B, index: int, conversion: Conversion) -> None:
        """Have unit ``index`` suffer ``burst`` until the step ends."""

    def check(self, conversion: Conversion | None) -> None:
        """Raises: ConfigError: when the conversion cannot suffer it, or has no such unit."""
        known = [unit.name for unit in self.check_conversion(conversion).units]
        for burst in self.bursts:
            if burst.unit not in known:
                near = ", ".join(nearest_names(burst.unit, known) or known[:3])
                raise ConfigError("unit", burst.unit, "no converted unit has that name.", f"Nearest: {near}.")

    def begin_step(self, step: int, conversion: Conversion | None) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Apply what is suffered in ``step``, after the conversion has begun it; returns the bursts that start."""
        assert conversion is not None
        index = {unit.name: i for i, unit in enumerate(conversion.units)}
        for burst in self.bursts:
            if burst.start_step <= step < burst.end_step:
                self.apply(burst, index[burst.unit], conversion)
        return [(b.unit, {"fault": self.kind, **asdict(b)}) for b in self.bursts if b.start_step == step]


def draw_bursts(
    make: type[B],
    units: Sequence[str],
    *,
    num_bursts: int,
    first_step: int,
    last_step: int,
    seed: int,
    num_steps: tuple[int, int],
    factor: tuple[float, float],
    num_channels: int,
) -> list[B]:
    """Bursts at random units, starts, lengths and strengths; the same for the same seed.

    Args:
        make: The kind of burst.
        units: Names of the units to choose from.
        num_bursts: How many.
        first_step: Earliest start.
        last_step: Latest start.
        seed: Seed of all choices.
        num_steps: Shortest and longest length.
        factor: Weakest and strongest factor, drawn evenly in its logarithm.
        num_channels: Channels that each falls on.

    Returns: The bursts, by start.

    Raises: ConfigError: when there is no unit or no burst to choose, or a range is empty.
    """
    if isinstance(units, str) or not units:
        raise ConfigError("units", units, "at least one name to choose from is needed.", "Pass guard.units.")
    if num_bursts < 1:
        raise ConfigError("num_bursts", num_bursts, "at least one burst is needed.", "Set it to 1 or more.")
    for setting, low, high, least in (
        ("last_step", first_step, last_step, 1),
        ("num_steps", *num_steps, 1),
        ("factor", *factor, math.ulp(0.0)),
    ):
        if not least <= low <= high < math.inf:
            raise ConfigError(
                setting, (low, high), "a range runs from above 0 to no less than its start.", "Swap or widen it."
            )
    rng = np.random.default_rng(seed)
    bursts = [
        make(
            unit=units[int(rng.integers(len(units)))],
            start_step=int(rng.integers(first_step, last_step + 1)),
            num_steps=int(rng.integers(num_steps[0], num_steps[1] + 1)),
            factor=float(np.exp(rng.uniform(np.log(factor[0]), np.log(factor[1])))),
            num_channels=num_channels,
            seed=int(rng.integers(2**31)),
        )
        for _ in range(num_bursts)
    ]
    return sorted(bursts, key=lambda b: b.start_step)
