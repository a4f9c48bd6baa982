"""The record's one schema, where the file lies, and what a file must show to be taken for a record."""

from __future__ import annotations

import os
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Literal

from trimtab.errors import RecordError

__all__ = [
    "APPLICATION_ID",
    "READING_TABLES",
    "SCHEMA_VERSION",
    "EventKind",
    "connect_read_only",
    "record_path",
    "require_record",
    "upgrade",
]

APPLICATION_ID = 0x5472_696D  # "Trim"; `file` and SQLite tools show it
SCHEMA_VERSION = 2
STEP_COLUMNS_SINCE = {2: ("errors", "flushed_share", "saturated_share", "amax", "reason")}
"""Columns of ``steps`` that came with a version; what an older file lacks is read as not given."""
READINGS_SINCE = 2
READING_TABLES = ("places", "readings")
"""Tables that came with ``READINGS_SINCE``; what an older file lacks is read as empty."""
RECORD_NAME = "run.sqlite"
_FILE_SUFFIXES = (".sqlite", ".db")

EventKind = Literal["alarm", "fault", "forced", "gap", "note", "notice", "resume", "skip", "warning"]
"""The kinds that trimtab writes; a record holds any other kind just as well."""

# What the monitors read, place by place. The names of the places are kept once a segment, and once more when they
# change in it; `num` tells these apart, and is a checksum of the names, so that nobody has to count them.
_READINGS_DDL = (
    """
CREATE TABLE places (
    segment INTEGER NOT NULL REFERENCES segments(id),
    monitor TEXT NOT NULL,
    metric TEXT NOT NULL,
    num INTEGER NOT NULL,
    names TEXT NOT NULL,                  -- JSON, a list
    PRIMARY KEY (segment, monitor, metric, num)
) WITHOUT ROWID
""",
    """
CREATE TABLE readings (
    id INTEGER PRIMARY KEY,
    segment INTEGER NOT NULL REFERENCES segments(id),
    step INTEGER NOT NULL,
    monitor TEXT NOT NULL,
    metric TEXT NOT NULL,
    places INTEGER NOT NULL,              -- `num` of its places
    vals BLOB NOT NULL                    -- float32, little-endian, one a place; NaN: the place has none
)
""",
    "CREATE INDEX readings_by_metric ON readings (segment, monitor, metric, step)",
)
_READINGS_SQL = "; ".join(_READINGS_DDL)

# Row t of `steps` holds the decision taken from step t's norms: its active set routes step t+1.
# There is no uniqueness over (segment, step): a step that the loss scaler skips leaves the step counter where it is,
# so a skipped row may carry the number of an observed one. Order is (step, id).
DDL = f"""
CREATE TABLE segments (
    id INTEGER PRIMARY KEY,
    started_at TEXT NOT NULL,             -- ISO 8601, UTC
    start_step INTEGER NOT NULL,          -- the last step already done when the segment starts; 0 for a fresh run
    config TEXT NOT NULL,                 -- JSON, resolved
    versions TEXT NOT NULL,               -- JSON
    state TEXT,                           -- JSON, the controller's at start_step; NULL: as the segment before left it
    finished INTEGER NOT NULL DEFAULT 0,
    reason TEXT,
    ended_at TEXT
);
CREATE TABLE units (
    segment INTEGER NOT NULL REFERENCES segments(id),
    idx INTEGER NOT NULL,                 -- column of the unit in the arrays of `steps`
    name TEXT NOT NULL,
    recoverable INTEGER NOT NULL,
    num_parameters INTEGER NOT NULL,
    costs TEXT NOT NULL,                  -- JSON, what each path costs
    PRIMARY KEY (segment, idx)
) WITHOUT ROWID;
CREATE TABLE steps (
    id INTEGER PRIMARY KEY,
    segment INTEGER NOT NULL REFERENCES segments(id),
    step INTEGER NOT NULL,
    skipped INTEGER NOT NULL,             -- 1: the loss scaler skipped the step, nothing was observed
    loss REAL, lr REAL, grad_norm REAL,   -- NULL: not given; the text 'nan': not a number
    alpha REAL, beta REAL,                -- in force at this step
    elapsed_s REAL,                       -- since the segment started
    num_active INTEGER,
    extra TEXT,                           -- JSON, further inputs of the decision
    norms BLOB,                           -- float64, little-endian, one a unit
    gnmr BLOB, delta BLOB, risk BLOB,     -- float32, little-endian
    active BLOB,                          -- one bit a unit, lowest bit first
    lock BLOB,                            -- unsigned, little-endian, 1/2/4/8 bytes a unit
    errors BLOB,                          -- float64, little-endian: channel errors, an input of the decision
    flushed_share BLOB,                   -- float32, little-endian; so too the next ones
    saturated_share BLOB,
    amax BLOB,
    reason BLOB                           -- 8 * unit + code of each unit that has one; unsigned, little-endian
);
CREATE INDEX steps_by_step ON steps (segment, step, skipped);
CREATE TABLE events (
    id INTEGER PRIMARY KEY,
    segment INTEGER NOT NULL REFERENCES segments(id),
    step INTEGER NOT NULL,
    kind TEXT NOT NULL,
    place TEXT NOT NULL,                  -- a unit, a layer, a head; empty: the whole run
    data TEXT NOT NULL                    -- JSON
);
CREATE INDEX events_by_kind ON events (kind, step);
{_READINGS_SQL};
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""


def record_path(path: str | os.PathLike[str]) -> Path:
    """The record's file: ``path`` itself when it ends in .sqlite or .db, otherwise ``run.sqlite`` in that folder.

    Example:
        >>> record_path("runs/mine").as_posix(), record_path("runs/mine.db").as_posix()
        ('runs/mine/run.sqlite', 'runs/mine.db')
    """
    path = Path(path)
    return path if path.suffix.lower() in _FILE_SUFFIXES else path / RECORD_NAME


def connect_read_only(path: Path, *, look: bool = False, timeout_s: float = 5.0) -> sqlite3.Connection:
    """Open ``path`` so that nothing is ever written to it.

    ``look`` is for the header of a file that may be anybody's: it takes no lock and leaves no companion file behind.
    A file with a log beside it is opened with that log all the same: after a kill the two may only be whole together.
    The file is never opened past SQLite: closing a plain handle would drop the locks that this process's own writer
    holds on it (POSIX locks belong to the process, not to the handle).
    """
    alone = look and not any(path.with_name(path.name + end).exists() for end in ("-wal", "-journal"))
    uri = path.absolute().as_uri() + ("?mode=ro&immutable=1" if alone else "?mode=ro")
    return sqlite3.connect(uri, uri=True, timeout=timeout_s, isolation_level=None, check_same_thread=False)


def require_record(connection: sqlite3.Connection, path: Path) -> None:
    """Check that an open database is a record of a schema that this version reads.

    Raises:
        RecordError: It is another program's database, or of a newer schema.
        sqlite3.DatabaseError: It is no database, or damaged.
    """
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application_id != APPLICATION_ID:
        raise RecordError(f"{path} is no run record: it is a database of another program. It was left as it is.")
    if version > SCHEMA_VERSION:
        raise RecordError(
            f"{path} was written by a newer trimtab: its schema is version {version}, this one reads up to "
            f"{SCHEMA_VERSION}. Upgrade trimtab to open it."
        )


def upgrade(connection: sqlite3.Connection) -> None:
    """Give a record of an older schema the columns and tables of this one, in one transaction; its rows stay."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version >= SCHEMA_VERSION:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        for since, names in STEP_COLUMNS_SINCE.items():
            for name in names if since > version else ():
                connection.execute(f"ALTER TABLE steps ADD COLUMN {name} BLOB")
        for statement in _READINGS_DDL if version < READINGS_SINCE else ():
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


def check_header(path: Path) -> None:
    """Look at an existing file's header without touching the file.

    Raises:
        RecordError: The file is no record, of a newer schema, or damaged.
    """
    try:
        connection = connect_read_only(path, look=True)
        try:
            require_record(connection, path)
        finally:
            connection.close()
    except sqlite3.DatabaseError as error:
        raise RecordError(refusal(path, error)) from None


def refusal(path: Path, error: Exception) -> str:
    """One sentence for a file that SQLite refuses."""
    text = str(error)
    if "not a database" in text:
        return f"{path} is no run record: it is not an SQLite file. It was left as it is."
    if "locked" in text or "busy" in text:
        return f"{path} is locked by another program. Close that program, then try again."
    if "unable to open" in text:
        return f"{path} cannot be opened for reading. Check its permissions."
    return f"{path} is damaged or cut short ({text}). Restore it from a copy, or move it away."
