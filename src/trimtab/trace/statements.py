"""What is written, and the SQL that writes it."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import lru_cache
from typing import Any

import numpy as np

from trimtab.trace import encoding
from trimtab.trace.rows import QUANTIZER_COLUMNS, Event, StepRow, UnitRow

__all__ = ["Gap", "Item", "Note", "OpenSegment", "insert_segment", "now", "write_gap", "write_item"]


def now() -> str:
    """This moment, ISO 8601, UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


@dataclass(eq=False, slots=True)
class OpenSegment:
    """A segment that is being written; its row is made or corrected when the next row of it is written."""

    start_step: int
    config: str
    versions: str
    state: str | None
    units: tuple[UnitRow, ...]
    started_at: str = field(default_factory=now)
    num_changes: int = 0


@dataclass(frozen=True, slots=True)
class Note:
    """Values of a step that arrive after its row."""

    step: int
    columns: dict[str, float]
    extra: dict[str, Any]


@dataclass(slots=True)
class Gap:
    """Steps of one segment that could not be kept."""

    first: int
    last: int
    num_steps: int = 0
    num_events: int = 0


Item = StepRow | Event | Note | None
"""What is written; None only brings the segment's own row up to date."""


_STEP_COLUMNS = (
    "segment", "step", "skipped", "loss", "lr", "grad_norm", "alpha", "beta", "elapsed_s", "num_active", "extra",
    "norms", "gnmr", "delta", "risk", "active", "lock", "errors", *QUANTIZER_COLUMNS, "reason",
)  # fmt: skip
_INSERT_EVENT = "INSERT INTO events (segment, step, kind, place, data) VALUES (?, ?, ?, ?, ?)"
_INSERT_PLACES = "INSERT OR IGNORE INTO places (segment, monitor, metric, num, names) VALUES (?, ?, ?, ?, ?)"
_INSERT_READING = "INSERT INTO readings (segment, step, monitor, metric, places, vals) VALUES (?, ?, ?, ?, ?, ?)"
_INSERT_STEP = f"INSERT INTO steps ({', '.join(_STEP_COLUMNS)}) VALUES ({', '.join('?' * len(_STEP_COLUMNS))})"


def _step_columns(row_id: int, row: StepRow) -> Sequence[object]:
    scalars = [encoding.scalar_column(v) for v in (row.loss, row.lr, row.grad_norm, row.alpha, row.beta, row.elapsed_s)]
    return (
        row_id,
        row.step,
        int(row.skipped),
        *scalars,
        None if row.active is None else int(np.count_nonzero(row.active)),
        None if row.extra is None else encoding.to_json(row.extra),
        _packed(row.norms, encoding.pack_norms),
        _packed(row.gnmr, encoding.pack_scores),
        _packed(row.delta, encoding.pack_scores),
        _packed(row.risk, encoding.pack_risk),
        _packed(row.active, encoding.pack_active),
        _packed(row.lock, encoding.pack_locks),
        _packed(row.errors, encoding.pack_norms),
        *(_packed((row.quantizer or {}).get(name), encoding.pack_scores) for name in QUANTIZER_COLUMNS),
        _packed(row.reason, encoding.pack_reasons),
    )


def _packed(values: Any, pack: Callable[[Any], bytes]) -> bytes | None:
    return None if values is None else pack(values)


def insert_segment(connection: sqlite3.Connection, segment: OpenSegment, start_step: int) -> int:
    """Write a segment and its units; the id of its row."""
    row_id = connection.execute(
        "INSERT INTO segments (started_at, start_step, config, versions, state) VALUES (?, ?, ?, ?, ?)",
        (segment.started_at, start_step, segment.config, segment.versions, segment.state),
    ).lastrowid
    assert row_id is not None
    connection.executemany(
        "INSERT INTO units (segment, idx, name, recoverable, num_parameters, costs) VALUES (?, ?, ?, ?, ?, ?)",
        [
            (row_id, idx, unit.name, int(unit.recoverable), int(unit.num_parameters), encoding.to_json(unit.costs))
            for idx, unit in enumerate(segment.units)
        ],
    )
    return row_id


def write_item(connection: sqlite3.Connection, row_id: int, item: Item) -> None:
    """Write one item of the segment in row ``row_id``."""
    if isinstance(item, StepRow):
        connection.execute(_INSERT_STEP, _step_columns(row_id, item))
        _write_readings(connection, row_id, item)
    elif isinstance(item, Event):
        connection.execute(_INSERT_EVENT, (row_id, item.step, item.kind, item.place, encoding.to_json(item.data)))
    elif isinstance(item, Note):
        _write_note(connection, row_id, item)


def write_gap(connection: sqlite3.Connection, row_id: int, gap: Gap, reason: str) -> None:
    """Mark an outage and what was lost in it, which may be nothing."""
    data = {"reason": reason, "num_steps": gap.num_steps, "num_events": gap.num_events}
    if gap.num_steps:
        data |= {"first_step": gap.first, "last_step": gap.last}
    connection.execute(_INSERT_EVENT, (row_id, gap.first, "gap", "", encoding.to_json(data)))


def _write_readings(connection: sqlite3.Connection, row_id: int, row: StepRow) -> None:
    for monitor, by_metric in (row.readings or {}).items():
        for metric, (places, values) in by_metric.items():
            num, names = _named(tuple(places))
            connection.execute(_INSERT_PLACES, (row_id, monitor, metric, num, names))
            blob = encoding.pack_scores(np.asarray(values))
            connection.execute(_INSERT_READING, (row_id, row.step, monitor, metric, num, blob))


@lru_cache(maxsize=1024)
def _named(places: tuple[str, ...]) -> tuple[int, str]:
    """The number under which a segment keeps these names of places, and the names."""
    text = encoding.to_json(places)
    return zlib.crc32(text.encode()), text


def _write_note(connection: sqlite3.Connection, row_id: int, note: Note) -> None:
    found = connection.execute(
        "SELECT id, extra FROM steps WHERE segment = ? AND step = ? ORDER BY id DESC LIMIT 1", (row_id, note.step)
    ).fetchone()
    if found is None:  # its step is in a gap
        return
    columns: dict[str, object] = {name: encoding.scalar_column(value) for name, value in note.columns.items()}
    if note.extra:
        columns["extra"] = encoding.to_json({**encoding.from_json_object(found[1]), **note.extra})
    settings = ", ".join(f"{name} = ?" for name in columns)
    connection.execute(f"UPDATE steps SET {settings} WHERE id = ?", (*columns.values(), found[0]))
