"""The SQLite side of writing: one connection, used by one thread at a time."""

from __future__ import annotations

import contextlib
import gc
import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from trimtab.errors import ConfigError, RecordError
from trimtab.trace.lock import WriterLock
from trimtab.trace.rows import StepRow
from trimtab.trace.schema import DDL, check_header, refusal, upgrade
from trimtab.trace.statements import Gap, Item, OpenSegment, insert_segment, now, write_gap, write_item

__all__ = ["Store"]

BUSY_TIMEOUT_S = 1.0


class FileGoneError(OSError):
    """The record's file, or its folder, was deleted or replaced while it was being written."""


class Store:
    """One record, open for writing.

    Args:
        path: The file. Its folder is made when it is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.wal_refusal: str | None = None
        self._lock = WriterLock(path)
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None
        self._segments: dict[OpenSegment, tuple[int, int]] = {}
        self._kept: dict[OpenSegment, Gap] = {}

    def _acquire_lock(self) -> bool:
        if self._lock.acquire():
            return True
        # A writer that nobody can reach any more may be waiting in a reference cycle, as after an interrupted cell.
        gc.collect()
        return self._lock.acquire()

    def open(self, segment: OpenSegment) -> None:
        """Make or open the file and write the first segment's row.

        Raises:
            ConfigError: The place cannot be written, or another writer is live.
            RecordError: The file exists and is no record, is damaged, or of a newer schema. It is left untouched.
                (One of an older schema gets the columns of this one.)
        """
        try:
            if self.path.is_dir():
                raise ConfigError(
                    "record", str(self.path), "this is a folder, a record with this ending is a file.", "Name another."
                )
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not self._acquire_lock():
                raise ConfigError(
                    "record",
                    str(self.path),
                    "another run is writing this record, and a record has one writer.",
                    "Give each run its own folder, or wait until the other one has ended.",
                )
            self._connect()
            self.write([(segment, None)], {})
        except (OSError, sqlite3.Error) as error:
            self.close()
            raise ConfigError(
                "record",
                str(self.path),
                f"a record must be in a folder that can be written ({error}).",
                "Choose a folder that can be written, or free the file.",
            ) from None
        except BaseException:
            self.close()
            raise

    def write(self, batch: Iterable[tuple[OpenSegment, Item]], gaps: dict[OpenSegment, Gap], reason: str = "") -> None:
        """Write all of ``batch`` in one transaction, or nothing.

        Raises:
            sqlite3.Error: SQLite could not write.
            OSError: The file is gone.
        """
        connection = self._ready()
        before = dict(self._segments), {key: Gap(g.first, g.last, g.num_steps) for key, g in self._kept.items()}
        try:
            connection.execute("BEGIN IMMEDIATE")
            for segment, gap in gaps.items():
                write_gap(connection, self._segment_id(connection, segment), gap, reason)
            for segment, item in batch:
                write_item(connection, self._segment_id(connection, segment), item)
                if isinstance(item, StepRow) and not item.skipped:
                    kept = self._kept.setdefault(segment, Gap(item.step, item.step))
                    kept.last, kept.num_steps = item.step, kept.num_steps + 1
            connection.execute("COMMIT")
        except BaseException as error:
            self._segments, self._kept = before
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            # After "full" and "locked" a connection is as good as new; after anything else a fresh one is safer.
            if not any(word in str(error) for word in ("full", "locked")):
                self._disconnect()
            raise

    def finish(self, segment: OpenSegment, finished: bool, reason: str | None) -> None:
        """Note how the segment ended."""
        connection = self._ready()
        connection.execute(
            "UPDATE segments SET finished = ?, reason = ?, ended_at = ? WHERE id = ?",
            (int(finished), reason, now(), self._segments[segment][0]),
        )

    def fold(self) -> None:
        """Bring the write-ahead log into the file, so that one file is left; a live reader may forbid that."""
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("PRAGMA busy_timeout = 200")
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                self._connection.execute("PRAGMA journal_mode = DELETE")

    def close(self) -> None:
        """Let go of the file and of the lock; never raises."""
        self._disconnect()
        self._lock.release()

    def _ready(self) -> sqlite3.Connection:
        """The connection, to the file that lies at the path now."""
        if self._connection is not None and _identity(self.path) != self._identity:
            # An unlinked file takes rows without complaint, and they are lost with it.
            self._disconnect()
        if self._connection is None:
            if not self.path.parent.is_dir():
                raise FileGoneError(f"the folder {self.path.parent} is gone")
            if not self._lock.held and not self._lock.acquire():
                raise FileGoneError("another run has taken the record over")
            self._connect()
        assert self._connection is not None
        return self._connection

    def _connect(self) -> None:
        if not self.path.exists() or self.path.stat().st_size == 0:
            _create(self.path)
        else:
            check_header(self.path)
        connection = sqlite3.connect(
            self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, cached_statements=32
        )
        try:
            self.wal_refusal = _use_wal(connection)
            upgrade(connection)
            there = dict(connection.execute("SELECT id, started_at FROM segments"))
        except (sqlite3.DatabaseError, UnicodeDecodeError, MemoryError) as error:
            connection.close()
            if isinstance(error, sqlite3.OperationalError):
                raise
            raise RecordError(refusal(self.path, error)) from None
        self._connection = connection
        self._identity = _identity(self.path)
        if any(there.get(row_id) != segment.started_at for segment, (row_id, _) in self._segments.items()):
            self._segments.clear()  # another file lies there now

    def _disconnect(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None

    def _segment_id(self, connection: sqlite3.Connection, segment: OpenSegment) -> int:
        """Id of the segment's row, which is made or corrected when needed."""
        row_id, num_changes = self._segments.get(segment, (0, -1))
        if num_changes == segment.num_changes:
            return row_id
        if row_id:
            connection.execute(
                "UPDATE segments SET start_step = ?, state = ? WHERE id = ?",
                (segment.start_step, segment.state, row_id),
            )
            self._segments[segment] = (row_id, segment.num_changes)
            return row_id
        # Steps that went down with a file that was deleted are a gap of the file that takes its place.
        gone = self._kept.pop(segment, None)
        row_id = insert_segment(connection, segment, gone.last if gone else segment.start_step)
        self._segments[segment] = (row_id, segment.num_changes)
        if gone:
            write_gap(connection, row_id, gone, "the file was deleted or replaced")
        return row_id


def _create(path: Path) -> None:
    """Make an empty record beside ``path`` and move it there, so that a record is there whole or not at all."""
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    connection = sqlite3.connect(new, isolation_level=None)
    try:
        connection.execute("PRAGMA journal_mode = MEMORY")
        connection.executescript(f"BEGIN; {DDL} COMMIT;")
    finally:
        connection.close()
    os.replace(new, path)


def _use_wal(connection: sqlite3.Connection) -> str | None:
    """Switch to a write-ahead log; why not, where that cannot be."""
    try:
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        reason = f"SQLite keeps the journal mode {mode!r}"
    except sqlite3.OperationalError as error:  # no shared memory there, or somebody reads the file just now
        mode, reason = "", str(error)
    if mode.lower() == "wal":
        # Enough for a killed process; only a power cut may take the last second.
        connection.execute("PRAGMA synchronous = NORMAL")
        return None
    connection.execute("PRAGMA synchronous = FULL")
    return reason


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
