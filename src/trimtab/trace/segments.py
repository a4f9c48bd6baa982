"""A record's segments, and which of their rows count."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from typing import Any

from trimtab.trace import encoding
from trimtab.trace.live import last_live_steps
from trimtab.trace.rows import UnitRow
from trimtab.trace.table import meeting_damage

__all__ = ["Segment", "count_live_rows", "live_segment", "live_where", "read_segments"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """One start of a run."""

    id: int
    """Counts from 1, in the order written."""
    started_at: str
    """ISO 8601, UTC."""
    start_step: int
    """The last step already done when it starts; 0 for a fresh run."""
    config: dict[str, Any]
    """The resolved config."""
    versions: dict[str, str]
    """Versions of the packages in use."""
    finished: bool
    """Whether it ended on purpose; False while it goes on, or when it was killed."""
    reason: str | None
    """Why it ended, when that is known."""
    ended_at: str | None
    """ISO 8601, UTC; None when it goes on or was killed."""
    num_rows: int
    """Rows it wrote, whether they count or not."""
    last_live_step: int | None
    """Its later rows were superseded by a resume; None when all of its rows count."""
    units: tuple[UnitRow, ...] = field(repr=False)
    """The watched units, in the order of its arrays."""


def read_segments(connection: sqlite3.Connection, known_units: dict[int, tuple[UnitRow, ...]]) -> tuple[Segment, ...]:
    """All segments, oldest first; units are read once and kept in ``known_units``, because they never change."""
    with meeting_damage():
        rows = connection.execute(
            "SELECT id, started_at, start_step, config, versions, finished, reason, ended_at, "
            "(SELECT count(*) FROM steps WHERE segment = segments.id), "
            "(SELECT min(step) FROM steps WHERE segment = segments.id AND skipped = 0) FROM segments ORDER BY id"
        ).fetchall()
        # A row at or before its segment's start replaces the earlier one of that step, so that no step counts twice.
        starts = [None if r[8] == 0 else min(r[2], r[2] if r[9] is None else r[9] - 1) for r in rows]
        for r in rows:
            if r[0] not in known_units:
                known_units[r[0]] = _read_units(connection, r[0])
        return tuple(
            Segment(
                id=r[0],
                started_at=r[1],
                start_step=r[2],
                config=encoding.from_json_object(r[3]),
                versions=encoding.from_json_object(r[4]),
                finished=bool(r[5]),
                reason=r[6],
                ended_at=r[7],
                num_rows=r[8],
                last_live_step=last,
                units=known_units[r[0]],
            )
            for r, last in zip(rows, last_live_steps(starts), strict=True)
        )


def live_segment(segments: tuple[Segment, ...]) -> Segment:
    """The last segment with a row, or the last of all when none has."""
    return next((segment for segment in reversed(segments) if segment.num_rows), segments[-1])


def live_where(segment: Segment) -> str:
    """The SQL condition of the rows of ``segment`` that count."""
    until = "" if segment.last_live_step is None else f" AND step <= {segment.last_live_step}"
    return f"segment = {segment.id}{until}"


def count_live_rows(connection: sqlite3.Connection, segments: tuple[Segment, ...]) -> int:
    """Rows of the live line."""
    return sum(
        connection.execute(f"SELECT count(*) FROM steps WHERE {live_where(segment)}").fetchone()[0]
        for segment in segments
    )


def _read_units(connection: sqlite3.Connection, segment_id: int) -> tuple[UnitRow, ...]:
    return tuple(
        UnitRow(name=n, recoverable=bool(r), num_parameters=p, costs=encoding.from_json_object(c))
        for n, r, p, c in connection.execute(
            "SELECT name, recoverable, num_parameters, costs FROM units WHERE segment = ? ORDER BY idx", (segment_id,)
        )
    )
