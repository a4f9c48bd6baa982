"""What monitors read, as the record holds it: a value a place, the places by name."""

from __future__ import annotations

import json
import sqlite3

import numpy as np
from numpy.typing import NDArray

from trimtab.trace import encoding
from trimtab.trace.schema import READING_TABLES
from trimtab.trace.segments import Segment, live_where
from trimtab.trace.table import DamagedRowError, meeting_damage

__all__ = ["decode_reading", "has_readings", "read_names", "read_reading", "reading_keys"]

PlacesKey = tuple[int, str, str, int]
"""Segment, monitor, metric, and the number of the names there."""


def has_readings(connection: sqlite3.Connection) -> bool:
    """Whether the file has the tables; a live writer may bring an older file up to date."""
    (found,) = connection.execute(
        f"SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name IN ({', '.join('?' * len(READING_TABLES))})",
        READING_TABLES,
    ).fetchone()
    return bool(found == len(READING_TABLES))


def read_names(
    connection: sqlite3.Connection, monitor: str | None = None, metric: str | None = None
) -> dict[PlacesKey, tuple[str, ...]]:
    """The names of places, of all metrics or of one.

    Raises:
        DamagedRowError: A row is not whole.
    """
    one = "" if monitor is None else " WHERE monitor = ? AND metric = ?"
    with meeting_damage():
        return {
            (segment, of, what, num): tuple(json.loads(names))
            for segment, of, what, num, names in connection.execute(
                f"SELECT segment, monitor, metric, num, names FROM places{one}",
                () if monitor is None else (monitor, metric),
            )
        }


def decode_reading(blob: bytes, num_places: int) -> NDArray[np.float32]:
    """Undo the writer's encoding.

    Raises:
        DamagedRowError: The row is not whole.
    """
    with meeting_damage():
        values = encoding.unpack_scores(blob)
    if len(values) != num_places:
        raise DamagedRowError(f"a reading of {len(values)} values for {num_places} places")
    return values


def read_reading(
    connection: sqlite3.Connection, segments: tuple[Segment, ...], monitor: str, metric: str
) -> tuple[NDArray[np.int64], NDArray[np.float32], tuple[str, ...]]:
    """The readings of one metric along the live line; see ``Run.readings``."""
    rows: list[tuple[int, NDArray[np.float32], tuple[str, ...]]] = []
    if has_readings(connection):
        names = read_names(connection, monitor, metric)
        with meeting_damage():
            for segment in segments:
                for step, num, blob in connection.execute(
                    f"SELECT step, places, vals FROM readings WHERE {live_where(segment)} AND monitor = ? "
                    "AND metric = ? ORDER BY step, id",
                    (monitor, metric),
                ):
                    places = names.get((segment.id, monitor, metric, num))
                    if places is None:
                        raise DamagedRowError(f"a reading of {monitor}/{metric} whose places are not named")
                    rows.append((step, decode_reading(blob, len(places)), places))
    places = rows[-1][2] if rows else ()
    column = {name: i for i, name in enumerate(places)}
    values = np.full((len(rows), len(places)), np.nan, np.float32)
    for t, (_, row, names_then) in enumerate(rows):
        if names_then == places:
            values[t] = row
        else:
            for name, value in zip(names_then, row, strict=True):
                if name in column:
                    values[t, column[name]] = value
    return np.array([step for step, _, _ in rows], np.int64), values, places


def reading_keys(connection: sqlite3.Connection, segments: tuple[Segment, ...]) -> tuple[tuple[str, str], ...]:
    """Every monitor and metric with a reading on the live line, sorted."""
    if not has_readings(connection):
        return ()
    found: set[tuple[str, str]] = set()
    with meeting_damage():
        for segment in segments:
            found.update(
                connection.execute(f"SELECT DISTINCT monitor, metric FROM readings WHERE {live_where(segment)}")
            )
    return tuple(sorted(found))
