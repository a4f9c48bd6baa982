"""The end of a record, read again and again without reading the whole of it each time."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.errors import RecordError
from trimtab.trace import Event, Segment, encoding
from trimtab.trace.schema import connect_read_only, refusal, require_record
from trimtab.trace.segments import live_segment, live_where, read_segments
from trimtab.trace.table import DamagedRowError, RawRow, decode_row, meeting_damage, selected_columns

__all__ = ["RecordTail", "active_names", "read_tail", "steps_per_second"]

_MOST_EVENTS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordTail:
    """The latest rows of a record's live line, oldest first."""

    segment: Segment
    """The start of the run that the latest row is from, or the last one."""
    num_starts: int
    finished: bool
    reason: str | None
    num_rows: int
    """Rows of the live line."""
    rows: tuple[tuple[Segment, RawRow], ...]
    """Each with the segment that wrote it."""
    alarms: tuple[Event, ...]
    """The latest ones."""
    warnings: tuple[Event, ...]


def read_tail(path: Path, most_rows: int = 120) -> RecordTail | None:
    """Read the end of the record at ``path``, in one moment of it; the file is opened anew, and never written to.

    Returns: None when there is no record: no file, an empty one, or one without a segment.

    Raises:
        RecordError: It is no record, of a newer schema, damaged, or locked.
    """
    try:
        if not path.is_file() or path.stat().st_size == 0:
            return None
        with closing(connect_read_only(path, timeout_s=2.0)) as connection:
            connection.execute("BEGIN")
            require_record(connection, path)
            segments = read_segments(connection, {})
            return _tail(connection, segments, most_rows) if segments else None
    except (sqlite3.Error, DamagedRowError) as error:
        if not path.is_file():  # it was taken away meanwhile
            return None
        raise RecordError(refusal(path, error)) from None


def _tail(connection: sqlite3.Connection, segments: tuple[Segment, ...], most_rows: int) -> RecordTail:
    rows: list[tuple[Segment, RawRow]] = []
    num_rows = 0
    events: dict[str, list[Event]] = {"alarm": [], "warning": []}
    with meeting_damage():
        names = selected_columns(connection)
        for segment in reversed(segments):
            where = live_where(segment)
            num_rows += connection.execute(f"SELECT count(*) FROM steps WHERE {where}").fetchone()[0]
            for columns in connection.execute(
                f"SELECT {names} FROM steps WHERE {where} ORDER BY step DESC, id DESC LIMIT ?", (most_rows - len(rows),)
            ):
                rows.append((segment, decode_row(columns, len(segment.units))))
            for kind, found in events.items():
                for step, place, data in connection.execute(
                    f"SELECT step, place, data FROM events WHERE {where} AND kind = ? ORDER BY id DESC LIMIT ?",
                    (kind, _MOST_EVENTS - len(found)),
                ):
                    details: dict[str, Any] = encoding.from_json_object(data)
                    found.append(Event(kind=kind, step=step, place=place, data=details, segment=segment.id))
    return RecordTail(
        segment=rows[0][0] if rows else live_segment(segments),
        num_starts=len(segments),
        finished=segments[-1].finished,
        reason=segments[-1].reason,
        num_rows=num_rows,
        rows=tuple(reversed(rows)),
        alarms=tuple(reversed(events["alarm"])),
        warnings=tuple(reversed(events["warning"])),
    )


def active_names(segment: Segment, row: RawRow) -> list[str]:
    """The units that the row's decision put on the recovery path."""
    if row.active is None:
        return []
    return [segment.units[i].name for i in np.flatnonzero(row.active) if segment.units[i].recoverable]


def steps_per_second(tail: RecordTail) -> float | None:
    """Over the rows of the last start that were read; None with fewer than two."""
    times = [
        (row.step, row.scalars["elapsed_s"])
        for segment, row in tail.rows
        if segment.id == tail.segment.id and np.isfinite(row.scalars["elapsed_s"])
    ]
    if len(times) < 2 or times[-1][1] <= times[0][1]:
        return None
    return (times[-1][0] - times[0][0]) / (times[-1][1] - times[0][1])
