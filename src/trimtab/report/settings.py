"""What the commands that show records can be told, checked once. No torch here."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from trimtab.errors import ConfigError

__all__ = ["CalibrateSettings", "ReplaySettings", "ReportSettings", "RunsSettings", "WatchSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportSettings:
    """Write what one run or several did as one HTML page: loss, risk of every unit, alarms, faults, costs.

    The page needs no network. Runs that are still going on are shown as far as they have come.

    Example: trimtab report runs/mine runs/other -o report.html
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Records, or folders that are searched for records."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("report.html")
    """The page; one of that name is written over."""
    json: bool = False
    """Print where the page is and a summary of each run as JSON for machines."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ConfigError("runs", (), "at least one record is needed.", "Name a record or a folder of records.")
        # A record named here by mistake must not be written over.
        if self.out.suffix.lower() not in (".html", ".htm"):
            raise ConfigError("out", str(self.out), "a page's name ends in .html.", "Add .html to it.")


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchSettings:
    """Follow a run in the terminal: loss, gradient norm, units on the recovery path, switches, alarms, budget.

    Only reads the record. Waits for a run that has not begun, goes on when it is started again; Ctrl-C ends it.

    Example: trimtab watch runs/mine
    """

    run: Annotated[Path, tyro.conf.Positional]
    """The record, or its folder."""
    once: bool = False
    """Print the present state and exit."""
    interval: float = 1.0
    """Seconds between two looks at the record."""
    json: bool = False
    """Print JSON for machines: a line for each look at which there was something new."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.interval) and self.interval >= 0.1):
            raise ConfigError("interval", self.interval, "at least 0.1 seconds are needed.", "Set it to 1, say.")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunsSettings:
    """Say what the run records in a folder hold: model, units, recovered share, switches, faults, alarms.

    Example: trimtab runs runs/demo
    """

    path: Annotated[Path, tyro.conf.Positional]
    """A record, or a folder that is searched for records."""
    json: bool = False
    """Print JSON for machines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaySettings:
    """Say what another policy would have decided on the norms of a recorded run, or verify the recorded decisions.

    With no preset, setting or sweep, the decisions are taken again with the recorded policy: the exit status is 0 if
    they are exactly the recorded ones, and 1 if not. What another policy would have done to the norms themselves, no
    record can tell.

    Example: trimtab replay runs/mine --sweep alpha=1.5,2,3 max_active=2,4,8 --plot sweep.html
    """

    path: Annotated[Path, tyro.conf.Positional]
    """A record, or its folder."""
    preset: str | None = None
    """Start from this preset: robust, paper, paper-2.0, paper-3.0, paper-deepseek, paper-lora or paper-moe. From the
    recorded policy when left out."""
    alpha: float | None = None
    """A GNMR above it is a risk. This and what follows: as the preset or the record has it when left out."""
    beta: float | None = None
    """A Delta above it is a risk."""
    error_limit: float | None = None
    """A channel error above it is a risk; 0 judges norms alone."""
    error_history: Literal["absolute", "ema"] | None = None
    """What error_limit holds: the error itself, or its ratio to the unit's own earlier errors."""
    amax_limit: float | None = None
    """A largest magnitude of the operand above so many times the mean of the unit's earlier ones is a risk; 0 judges
    none."""
    window_steps: int | None = None
    """Recent GNMR values that Delta compares with."""
    lock_steps: int | None = None
    """Decisions for which a unit stays a candidate after its risk has fallen."""
    max_active: int | float | None = None
    """Budget: a count of units, or a share of them such as 0.2."""
    history: Literal["mean", "ema", "window"] | None = None
    """What a norm is compared with."""
    sweep: tuple[str, ...] = ()
    """Try every combination of some values: alpha=1.5,2,3 max_active=2,4,8. Any setting of a policy will do."""
    json: bool = False
    """Print JSON for machines."""
    plot: Path | None = None
    """Draw a picture into this file: .html, .svg, .png or .pdf. Needs the extra "report"."""

    def __post_init__(self) -> None:
        from trimtab.trace.what_if_picture import check_picture

        for name in self.grid:
            if self.changes.get(name) is not None:
                raise ConfigError(name, self.changes[name], "it is swept too.", "Leave one of the two out.")
        if self.plot is not None:
            if self.verifies:
                remedy = "Name a preset, a setting or a sweep, or leave it out."
                raise ConfigError("plot", str(self.plot), "a verification is one sentence.", remedy)
            check_picture(self.plot)

    @property
    def changes(self) -> dict[str, Any]:
        """The settings of the policy that were given."""
        names = ("alpha", "beta", *_LIMITS, "error_history", "window_steps", "lock_steps", "max_active", "history")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return given | {name: None for name in _LIMITS if given.get(name) == 0}

    @property
    def grid(self) -> dict[str, list[Any]]:
        """The values of each setting that is swept."""
        grid: dict[str, list[Any]] = {}
        for word in self.sweep:
            name, _, values = word.partition("=")
            if not name or not values or name in grid:
                remedy = "Write alpha=1.5,2,3 for instance, each setting once."
                raise ConfigError("sweep", word, "a sweep is settings and their values.", remedy)
            grid[name] = [_value_of(value) for value in values.split(",")]
            for value in grid[name]:
                if isinstance(value, str) and name in _NUMBERS:
                    raise ConfigError(name, value, "it is a number.", f"Write --sweep {name}=1,2, say.")
        return grid

    @property
    def verifies(self) -> bool:
        """Whether no other policy is asked for."""
        return self.preset is None and not self.changes and not self.sweep


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrateSettings:
    """Find thresholds from the record of a healthy run: alpha, beta, and those of its monitors' alarms.

    Prints what each would have given in that run, and code to paste.

    Example: trimtab calibrate runs/healthy --false-per-1000 1
    """

    path: Annotated[Path, tyro.conf.Positional]
    """The record of a run without faults, or its folder."""
    false_per_1000: float = 1.0
    """Wanted false triggers in 1,000 unit-steps, and false alarms of each rule in 1,000 steps."""
    json: bool = False
    """Print JSON for machines."""


_LIMITS = ("error_limit", "amax_limit")
"""Settings of a policy that 0 switches off on the command line."""

_NUMBERS = ("alpha", "beta", *_LIMITS, "window_steps", "lock_steps", "max_active")
"""Settings of a policy that no text can be meant for."""


def _value_of(word: str) -> Any:
    """A value of a sweep: a number, none, true, false, or else text."""
    words = {"none": None, "true": True, "false": False}
    if word.lower() in words:
        return words[word.lower()]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(word)
    return word
