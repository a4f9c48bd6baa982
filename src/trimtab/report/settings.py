"""What the commands that show records can be told, checked once. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from trimtab.errors import ConfigError

__all__ = ["ReportSettings", "WatchSettings"]


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

    def __post_init__(self) -> None:
        if not (math.isfinite(self.interval) and self.interval >= 0.1):
            raise ConfigError("interval", self.interval, "at least 0.1 seconds are needed.", "Set it to 1, say.")
