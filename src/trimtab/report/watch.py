"""A run in the terminal, while it goes on."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trimtab.errors import RecordError
from trimtab.report.budget import budget_of
from trimtab.report.for_machines import tail_summary
from trimtab.report.settings import WatchSettings
from trimtab.report.watch_data import RecordTail, active_names, read_tail, steps_per_second
from trimtab.trace import record_path
from trimtab.trace.reader import records_below
from trimtab.trace.routed import forced_units

__all__ = ["frame", "watch"]

_BARS = "▁▂▃▄▅▆▇█"
_MOST_UNITS = 12
_MOST_SWITCHES = 6
_NOT_YET = "There is no record yet. Waiting for the run to begin …"
_GONE = "The record has gone."
_QUIET_S = 60.0
"""Without a new row for so long, a run that is not finished is said to be quiet."""


def watch(
    settings: WatchSettings, console: Console | None = None, sleep: Callable[[float], None] | None = None
) -> None:
    """Show the run until the user stops it; once, when that is asked for. A finished run may be started again.

    Where no terminal is watching, each look at which there was something new is a line.

    Raises:
        RecordError: when the folder holds no record, but others are below it; and with ``once``, when the file is no
            record that can be read. Otherwise that is said in the frame, and looked at again: a writer may be about to
            put it right.
    """
    path = record_path(settings.run)
    below = None if path.exists() else records_below(path)
    if below is not None:
        raise RecordError(f"There is no run record at {path.as_posix()}. {below}")
    if settings.json:
        _watch_for_machines(settings, path, sleep or time.sleep)
        return
    console = console or Console()
    if settings.once:
        console.print(frame(read_tail(path), str(settings.run), 0.0))
        return
    if not console.is_terminal:
        _watch_in_lines(settings, path, console, sleep or time.sleep)
        return
    last: tuple[int, int] | None = None
    changed_at = time.monotonic()
    seen = False
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            try:
                tail, problem = read_tail(path), None
            except RecordError as error:
                tail, problem = None, str(error)
            seen = seen or tail is not None
            if seen and tail is None and problem is None:
                problem = _GONE
            now = None if tail is None else (tail.num_starts, tail.num_rows)
            if now != last:
                last, changed_at = now, time.monotonic()
            live.update(frame(tail, str(settings.run), time.monotonic() - changed_at, problem), refresh=True)
            (sleep or time.sleep)(settings.interval)


def _watch_in_lines(settings: WatchSettings, path: Path, console: Console, sleep: Callable[[float], None]) -> None:
    """A plain line for the present state, and another each time that it is another one: for a pipe or a file."""
    last: str | None = None
    seen = False
    while True:
        try:
            tail = read_tail(path)
            now = _GONE if tail is None and seen else _line(tail)
            seen = seen or tail is not None
        except RecordError as error:
            now = str(error)
        if now != last:
            console.print(now, markup=False, highlight=False, soft_wrap=True)
            console.file.flush()
        last = now
        sleep(settings.interval)


def _line(tail: RecordTail | None) -> str:
    """The run in one line."""
    if tail is None:
        return _NOT_YET
    if not tail.rows:
        return f"{_state(tail, 0.0)}, in its first step"
    segment, row = tail.rows[-1]
    parts = [f"step {row.step}"]
    for label, column in (("loss", "loss"), ("grad norm", "grad_norm")):
        value = row.scalars[column]
        if not math.isnan(value) or (column == "loss" and row.loss_given):
            parts.append(f"{label} {value:.5g}")
    budget = budget_of(segment.config, sum(unit.recoverable for unit in segment.units))
    parts.append(f"recovered {_of_budget(len(active_names(segment, row)), budget)}")
    if forced := _forced_steps(tail):
        parts.append(f"{_steps(len(forced))} routed by hand, the latest step {forced[-1]}")
    parts.append(_state(tail, 0.0))
    for kind, events in (("alarm", tail.alarms), ("warning", tail.warnings)):
        if events:
            said = events[-1].data.get("sentence") or events[-1].data.get("message") or events[-1].place
            parts.append(f"latest {kind}, step {events[-1].step}: {said}")
    return "; ".join(parts)


def _watch_for_machines(settings: WatchSettings, path: Path, sleep: Callable[[float], None]) -> None:
    """A line of JSON for the present state, and another each time that it is another one."""
    last: str | None = None
    seen = False
    while True:
        try:
            tail = read_tail(path)
            now = json.dumps(tail_summary(tail, settings.run, gone=seen and tail is None))
            seen = seen or tail is not None
        except RecordError as error:
            if settings.once:
                raise
            now = json.dumps(tail_summary(None, settings.run, str(error)))
        if now != last:
            print(now, flush=True)
        if settings.once:
            return
        last = now
        sleep(settings.interval)


def frame(tail: RecordTail | None, name: str, quiet_s: float, problem: str | None = None) -> RenderableType:
    """One picture of the run.

    Args:
        tail: The end of the record; None while there is none.
        name: What the user calls the run.
        quiet_s: Seconds since the record last grew.
        problem: Why it cannot be read at present.
    """
    if problem is not None:
        return Panel(Text(f"{problem} Looking again …"), title=Text(name))
    if tail is None:
        return Panel(Text(_NOT_YET), title=Text(name))
    if not tail.rows:
        return Panel(Text(f"{_state(tail, quiet_s)}. In its first step: no row yet."), title=Text(name))
    parts: list[RenderableType] = [_numbers(tail, quiet_s)]
    for heading, lines in (
        ("On the recovery path next", _active(tail)),
        ("Latest switches", _switches(tail)),
        ("Latest alarms", [f"step {e.step}: {e.data.get('sentence') or e.place}" for e in tail.alarms]),
        ("Latest warnings", [f"step {e.step}: {e.data.get('message', '')}" for e in tail.warnings]),
    ):
        if lines:
            parts.append(Text(heading, style="bold"))
            # Text, not markup: what is in square brackets in a name stays a name.
            parts += [Text(f"  {line}", overflow="fold") for line in lines]
    return Panel(Group(*parts), title=Text(name))


def _numbers(tail: RecordTail, quiet_s: float) -> Table:
    facts = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="ellipsis", no_wrap=True)
    _, last = tail.rows[-1]
    observed = [row for _, row in tail.rows if not row.skipped]
    rate = steps_per_second(tail)
    facts.add_row("state", _state(tail, quiet_s), "")
    facts.add_row("step", f"{last.step:,}", f"{rate:.2f} steps/s" if rate else "")
    for label, column in (("loss", "loss"), ("grad norm", "grad_norm")):
        values = [row.scalars[column] for _, row in tail.rows]
        given = [value for value in values if not math.isnan(value)]
        facts.add_row(label, f"{given[-1]:.5g}" if given else "not given", _spark(values))
    counts = [0 if row.active is None else len(active_names(s, row)) for s, row in tail.rows if not row.skipped]
    if observed:
        budget = budget_of(tail.segment.config, sum(unit.recoverable for unit in tail.segment.units))
        facts.add_row("recovered", _of_budget(counts[-1], budget), _spark(counts, 0, budget or None))
        if forced := _forced_steps(tail):
            facts.add_row(
                "by hand", _steps(len(forced)), f"of the last {len(observed)}; the latest is step {forced[-1]}"
            )
        if observed[-1].norms is not None:
            with np.errstate(invalid="ignore"):
                failed = int(np.count_nonzero(~(np.isfinite(observed[-1].norms) & (observed[-1].norms >= 0))))
            if failed:
                facts.add_row("failed norms", f"{failed}", "")
    return facts


def _of_budget(num_units: int, budget: int | None) -> str:
    units = f"{num_units} unit{'' if num_units == 1 else 's'}"
    return units if budget is None else f"{units}, of at most {budget}"


def _forced_steps(tail: RecordTail) -> list[int]:
    """Steps that were routed by hand, of those that were read."""
    return [row.step for _, row in tail.rows if not row.skipped and forced_units(row.extra) is not None]


def _steps(number: int) -> str:
    return f"{number} step{'' if number == 1 else 's'}"


def _state(tail: RecordTail, quiet_s: float) -> str:
    if tail.finished:
        state = "finished"
    elif tail.reason:
        state = f"ended: {tail.reason}"
    elif quiet_s > _QUIET_S:
        state = f"quiet for {quiet_s:.0f} s"
    else:
        state = "not finished"
    return state + (f", start number {tail.num_starts}" if tail.num_starts > 1 else "")


def _active(tail: RecordTail) -> list[str]:
    segment, row = tail.rows[-1]
    names = active_names(segment, row)
    shown = names[:_MOST_UNITS]
    return shown + ([f"and {len(names) - _MOST_UNITS} more"] if len(names) > _MOST_UNITS else [])


def _switches(tail: RecordTail) -> list[str]:
    """Units that entered or left, the latest step last; from the rows that were read."""
    found = []
    before: set[str] | None = None
    for segment, row in tail.rows:
        if row.skipped:
            continue
        now = set(active_names(segment, row))
        if before is not None:
            found += [f"step {row.step}: {name} on" for name in sorted(now - before)]
            found += [f"step {row.step}: {name} off" for name in sorted(before - now)]
        before = now
    return found[-_MOST_SWITCHES:]


def _spark(values: Sequence[float], low: float | None = None, high: float | None = None, width: int = 40) -> str:
    """The last values as bars; ``x`` where one is not finite.

    Example:
        >>> _spark([0, 1, 2, 3]), _spark([1.0, float("nan")])
        ('▁▃▆█', '▁x')
    """
    shown: list[Any] = list(values[-width:])
    finite = [value for value in shown if math.isfinite(value)]
    if not finite:
        return ""
    low = min(finite) if low is None else low
    high = max(finite) if high is None else high
    span = high - low or 1.0
    top = len(_BARS) - 1
    return "".join(
        _BARS[min(top, max(0, round((value - low) / span * top)))] if math.isfinite(value) else "x" for value in shown
    )
