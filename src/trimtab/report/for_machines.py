"""What ``trimtab report`` and ``trimtab watch`` say with ``--json``: plain values that JSON takes, NaN as null."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trimtab.errors import RecordError
from trimtab.report.budget import budget_of
from trimtab.report.watch_data import RecordTail, active_names, steps_per_second
from trimtab.trace import Event, RunSummary, open_run, summarize
from trimtab.trace.routed import forced_units

__all__ = ["page_summary", "plain_summary", "tail_summary"]


def plain_summary(summary: RunSummary) -> dict[str, Any]:
    """What one record holds, as values that JSON takes: a loss that is no number becomes None."""
    return {name: _plain(value) for name, value in (asdict(summary) | {"path": str(summary.path)}).items()}


def page_summary(page: Path, records: Sequence[Path]) -> dict[str, Any]:
    """Where a page is, and what the runs on it amount to.

    Args:
        page: The page.
        records: The records that it was made of; those that cannot be read are listed with the reason.

    Returns: ``page``, ``runs`` (a ``RunSummary`` each, as a dict) and ``refused``.
    """
    runs, refused = [], []
    for record in records:
        try:
            with open_run(record) as run:
                summary = summarize(run)
        except RecordError as error:
            refused.append({"path": str(record), "reason": str(error)})
            continue
        runs.append(plain_summary(summary))
    return {"page": str(page), "runs": runs, "refused": refused}


def tail_summary(
    tail: RecordTail | None, run: Path, problem: str | None = None, *, gone: bool = False
) -> dict[str, Any]:
    """The present state of a run.

    Args:
        tail: The end of its record; None while there is none.
        run: What the user calls the run.
        problem: Why the record cannot be read at present.
        gone: Whether there was a record before.

    Returns: Always the same keys; None where nothing is known. ``active`` is decided for the next step;
        ``routed_by_hand`` is the set that the latest step ran under by hand, None where it did not.

    Example:
        >>> tail_summary(None, Path("runs/mine"))["state"]
        'no record yet'
    """
    found: dict[str, Any] = {"run": str(run), "state": "no record yet", "problem": problem}
    found |= dict.fromkeys(("step", "loss", "lr", "grad_norm", "steps_per_second", "active", "budget", "num_starts"))
    found["routed_by_hand"] = None
    found |= {"alarms": [], "warnings": []}
    if problem is not None:
        return found | {"state": "unreadable"}
    if tail is None:
        return found | {"state": "the record has gone"} if gone else found
    state = "finished" if tail.finished else f"ended: {tail.reason}" if tail.reason else "not finished"
    found |= {"state": state, "num_starts": tail.num_starts}
    found |= {"alarms": _events(tail.alarms), "warnings": _events(tail.warnings)}
    if not tail.rows:
        return found
    segment, row = tail.rows[-1]
    forced = forced_units(row.extra)
    found |= {name: _plain(row.scalars.get(name, math.nan)) for name in ("loss", "lr", "grad_norm")}
    return found | {
        "step": row.step,
        "steps_per_second": _plain(steps_per_second(tail)),
        "active": active_names(segment, row),
        "routed_by_hand": None if forced is None else [unit.name for unit in segment.units if unit.name in forced],
        "budget": budget_of(segment.config, sum(unit.recoverable for unit in segment.units)),
    }


def _events(events: Sequence[Event]) -> list[dict[str, Any]]:
    return [
        {"step": e.step, "place": e.place, "text": e.data.get("sentence") or e.data.get("message", "")} for e in events
    ]


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
