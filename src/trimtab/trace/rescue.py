"""Opening a record that SQLite refuses: cut short, damaged, or in a folder where its log cannot be read in place."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from contextlib import closing, suppress
from pathlib import Path

from trimtab.errors import RecordError
from trimtab.trace.readings import decode_reading, has_readings, read_names
from trimtab.trace.schema import DDL, refusal, require_record
from trimtab.trace.table import COLUMNS, DamagedRowError, decode_row, selected_columns

__all__ = ["rescue"]


def rescue(path: Path, cause: Exception) -> tuple[sqlite3.Connection, str | None]:
    """Copy what can be read of a record, from a copy of its file, into memory.

    Args:
        path: The record; it is only read.
        cause: Why it could not be read in place.

    Returns:
        A connection to the copy, and a sentence that says what is lost; None when nothing is.

    Raises:
        RecordError: Not even its segments and units can be read.
    """
    memory = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    memory.executescript(DDL)
    with tempfile.TemporaryDirectory(prefix="trimtab-") as folder:
        try:
            copy = _copy(path, Path(folder))
            with closing(sqlite3.connect(copy, isolation_level=None)) as source:
                source.execute("PRAGMA writable_schema = ON")  # reads on although the file is shorter than it says
                require_record(source, path)
                whole = _copy_rows(source, memory)
        except (sqlite3.Error, OSError, ValueError, MemoryError) as error:
            memory.close()
            reason = error if "not a database" in str(error) else cause
            raise RecordError(refusal(path, reason)) from None
        except RecordError:
            memory.close()
            raise
    if whole:
        return memory, None
    (last,) = memory.execute("SELECT max(step) FROM steps").fetchone()
    read = f"it was read up to step {last}" if last is not None else "no step of it could be read"
    return memory, f"{path} is damaged or cut short: {read}, what follows is lost."


def _copy(path: Path, folder: Path) -> Path:
    copy = folder / path.name
    shutil.copyfile(path, copy)
    for suffix in ("-wal", "-journal"):
        companion = path.with_name(path.name + suffix)
        with suppress(FileNotFoundError):
            shutil.copyfile(companion, copy.with_name(copy.name + suffix))
    return copy


def _copy_rows(source: sqlite3.Connection, memory: sqlite3.Connection) -> bool:
    """Copy row by row, in the order written, up to the first that is not whole; whether all of them were."""
    num_units: dict[int, int] = {}
    # Without its segments and units no row means anything, so these must be whole.
    for table in ("segments", "units"):
        for row in source.execute(f"SELECT * FROM {table}"):
            memory.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
            if table == "segments":
                num_units[row[0]] = 0
            else:
                num_units[row[0]] += 1
    if not num_units:
        raise ValueError("no segment can be read")
    columns = ", ".join(COLUMNS)
    whole = True
    try:
        for row in source.execute(f"SELECT {selected_columns(source)} FROM steps NOT INDEXED ORDER BY id"):
            decode_row(row, num_units[row[0]])
            memory.execute(f"INSERT INTO steps ({columns}) VALUES ({', '.join('?' * len(row))})", row)
    except (sqlite3.DatabaseError, DamagedRowError, KeyError, UnicodeDecodeError, MemoryError):
        whole = False
    try:
        for row in source.execute("SELECT segment, step, kind, place, data FROM events NOT INDEXED ORDER BY id"):
            memory.execute("INSERT INTO events (segment, step, kind, place, data) VALUES (?, ?, ?, ?, ?)", row)
    except (sqlite3.DatabaseError, UnicodeDecodeError, MemoryError):
        whole = False
    return _copy_readings(source, memory) and whole


def _copy_readings(source: sqlite3.Connection, memory: sqlite3.Connection) -> bool:
    """Copy the monitors' readings in the order written, up to the first that is not whole; whether all of them were."""
    try:
        if not has_readings(source):
            return True
        for row in source.execute("SELECT segment, monitor, metric, num, names FROM places"):
            memory.execute("INSERT INTO places (segment, monitor, metric, num, names) VALUES (?, ?, ?, ?, ?)", row)
        num_places = {key: len(names) for key, names in read_names(memory).items()}
        columns = "segment, step, monitor, metric, places, vals"
        for row in source.execute(f"SELECT {columns} FROM readings NOT INDEXED ORDER BY id"):
            decode_reading(row[5], num_places[row[0], row[2], row[3], row[4]])
            memory.execute(f"INSERT INTO readings ({columns}) VALUES (?, ?, ?, ?, ?, ?)", row)
    except (sqlite3.DatabaseError, DamagedRowError, KeyError, UnicodeDecodeError, MemoryError):
        return False
    return True
