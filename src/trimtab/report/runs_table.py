"""What the records of a folder hold, as a table."""

from __future__ import annotations

from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from trimtab.errors import ConfigError, RecordError
from trimtab.trace import RunSummary, find_runs, open_run, summarize
from trimtab.trace.schema import RECORD_NAME

__all__ = ["runs_table", "summaries"]


def summaries(path: Path) -> tuple[list[RunSummary], dict[Path, str]]:
    """A summary of each record at or under ``path``, and of those that cannot be read the reason.

    Raises:
        ConfigError: when the path does not exist or holds no record.
        RecordError: when none can be read.
    """
    if not path.exists():
        raise ConfigError(
            "path", str(path), "there is no such file or folder.", "Name a record or a folder of records."
        )
    found = [path] if path.is_file() else sorted({*find_runs(path), *_empty_files(path)})
    if not found:
        raise ConfigError("path", str(path), "no run record is in it.", "Pass record=... to attach to write one.")
    result = []
    refused: dict[Path, str] = {}
    for record in found:
        try:
            with open_run(record) as run:
                result.append(summarize(run))
        except RecordError as error:
            refused[record] = str(error)
    if not result:
        raise RecordError(" ".join(refused.values()))
    return result, refused


def _empty_files(folder: Path) -> list[Path]:
    """Records that were stopped before they held anything; to SQLite they are a database of no program."""
    return [one for one in folder.rglob(RECORD_NAME) if one.is_file() and one.stat().st_size == 0]


def runs_table(found: list[RunSummary], folder: Path) -> RenderableType:
    """One row a record; with one record alone, a line a fact."""
    if len(found) == 1:
        facts = Table(box=None, show_header=False, pad_edge=False)
        facts.add_column(style="bold")
        facts.add_column(overflow="fold")
        for name, value in _facts(found[0]):
            facts.add_row(name, escape(value))
        return facts
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    # Its names can be folded, figures cannot: where the width is short, it is this column that gives way.
    table.add_column("run", overflow="fold")
    table.add_column("state", no_wrap=True)
    has_alarms = any(s.num_alarms for s in found)
    is_forced = any(s.num_forced_steps for s in found)
    by_hand, alarms = ["by hand"] if is_forced else [], ["alarms"] if has_alarms else []
    for heading in ("steps", "units", "recovered", *by_hand, "switches", "faults", *alarms, "loss"):
        table.add_column(heading, justify="right", no_wrap=True)
    for s in found:
        table.add_row(
            escape(str(_home(s).relative_to(folder)) if _home(s).is_relative_to(folder) else str(_home(s))),
            "damaged" if s.damage else "finished" if s.finished else "unfinished",
            str(s.num_steps),
            str(s.num_units),
            f"{s.recovered_share:.1%}",
            *([f"{s.forced_share:.1%}" if s.num_forced_steps else ""] if is_forced else []),
            str(s.num_switches),
            str(s.num_faults),
            *([str(s.num_alarms)] if has_alarms else []),
            "" if s.last_loss is None else f"{s.last_loss:.4f}",
        )
    return table


def _home(s: RunSummary) -> Path:
    # A run's name is its folder's; the file inside it is always called the same.
    return s.path.parent if s.path.name == "run.sqlite" else s.path


def _state(s: RunSummary) -> str:
    state = "finished" if s.finished else "unfinished"
    if s.num_segments > 1:
        state += f", {s.num_segments} starts"
    return state + (", damaged" if s.damage else "")


def _by_hand(s: RunSummary) -> str:
    steps = f"{s.num_forced_steps} step{'' if s.num_forced_steps == 1 else 's'} routed by hand"
    return f"{steps}, {s.forced_share:.2%} of recoverable unit-steps"


def _facts(s: RunSummary) -> list[tuple[str, str]]:
    steps = str(s.num_steps)
    if s.first_step is not None:
        steps += f" (from {s.first_step} to {s.last_step})"
    if s.num_missing:
        steps += f", {s.num_missing} missing"
    if s.num_skipped:
        steps += f", {s.num_skipped} skipped by the loss scaler"
    return [
        ("run", str(_home(s))),
        ("started", s.started_at),
        ("state", _state(s) + (f": {s.damage}" if s.damage else "")),
        ("recipe", s.recipe or "none, watch only"),
        ("policy", s.policy),
        ("steps", steps),
        ("units", f"{s.num_units}, {s.num_recoverable} of them recoverable"),
        ("recovered", f"{s.recovered_share:.2%} of recoverable unit-steps, {s.num_switches} switches"),
        *([("by hand", _by_hand(s))] if s.num_forced_steps else []),
        ("norms", f"{s.num_failed} failed, {s.num_unobserved} not observed"),
        ("faults", str(s.num_faults)),
        ("alarms", str(s.num_alarms)),
        ("last loss", "not recorded" if s.last_loss is None else f"{s.last_loss:.4f}"),
    ]
