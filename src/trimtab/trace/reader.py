"""Reading a record, also while it is being written."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from trimtab.errors import RecordError
from trimtab.trace import encoding
from trimtab.trace.find import find_runs
from trimtab.trace.readings import read_reading, reading_keys
from trimtab.trace.rescue import rescue
from trimtab.trace.rows import Event, UnitRow
from trimtab.trace.schema import RECORD_NAME, connect_read_only, record_path, refusal, require_record
from trimtab.trace.segments import Segment, count_live_rows, live_segment, live_where, read_segments
from trimtab.trace.table import (
    DamagedRowError,
    RawRow,
    StepTable,
    TableBuilder,
    decode_row,
    meeting_damage,
    selected_columns,
)

__all__ = ["Run", "open_run", "records_below"]

T = TypeVar("T")
F = TypeVar("F", bound="RowFold")


class RowFold(Protocol):
    """Takes rows one by one."""

    def add(self, segment: Segment, row: RawRow) -> None:
        """Take the next row of the live line."""
        ...


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open a record for reading; it may be in the middle of being written.

    Args:
        path: The record's file, or its folder.

    Raises:
        RecordError: There is no record, it is none, of a newer schema, or damaged beyond its first step.

    Example:
        >>> open_run("no/such/folder")
        Traceback (most recent call last):
        trimtab.errors.RecordError: There is no run record at no/such/folder/run.sqlite. Check the path.
    """
    return Run(record_path(path))


class Run:
    """A record. What it tells is its *live line*: the rows that no later resume has superseded.

    Every property reads the file anew, so a record that is being written shows its latest rows.

    Args:
        path: The record's file.

    Raises:
        RecordError: See ``open_run``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage: str | None = None
        """What is lost of a damaged or cut-short record; None for a whole one. Known once the rows were read."""
        self._units: dict[int, tuple[UnitRow, ...]] = {}
        self._rescued = False
        if not path.is_file():
            hint = records_below(path) or "Check the path."
            raise RecordError(f"There is no run record at {path.as_posix()}. {hint}")
        if path.stat().st_size == 0:
            raise RecordError(f"{path} is an empty file. The run was stopped before it wrote anything.")
        try:
            self._connection = connect_read_only(path)
        except sqlite3.Error as error:
            raise RecordError(refusal(path, error)) from None
        try:
            self._read(lambda connection: require_record(connection, path))
            if not self.segments:
                raise RecordError(f"{path} holds no segment. The run was stopped before it wrote anything.")
        except BaseException:
            self.close()
            raise

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Every start of the run, oldest first."""
        return self._read(self._read_segments)

    @property
    def live_segment(self) -> Segment:
        """The last segment with a row, or the last of all when none has."""
        return live_segment(self.segments)

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config of the live segment."""
        return self.live_segment.config

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the packages in use, of the live segment."""
        return self.live_segment.versions

    @property
    def unit_table(self) -> tuple[UnitRow, ...]:
        """The watched units of the live segment."""
        return self.live_segment.units

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the watched units of the live segment: the columns of ``steps()``."""
        return tuple(unit.name for unit in self.unit_table)

    @property
    def finished(self) -> bool:
        """Whether the last start of the run ended on purpose."""
        return self.segments[-1].finished

    @property
    def num_steps(self) -> int:
        """Rows of the live line, skipped steps included: ``len(run.steps())``."""
        return self._read(lambda connection: count_live_rows(connection, self._read_segments(connection)))

    @property
    def last_step(self) -> int:
        """The last step done: of the live line, or the start of the run when it has no row."""

        def query(connection: sqlite3.Connection) -> int:
            segments = self._read_segments(connection)
            lasts = [
                connection.execute(f"SELECT max(step) FROM steps WHERE {live_where(s)}").fetchone()[0] for s in segments
            ]
            return max((last for last in lasts if last is not None), default=live_segment(segments).start_step)

        return self._read(query)

    def steps(self) -> StepTable:
        """The live line as arrays, in the units of the live segment; earlier segments' units are matched by name."""

        def query(connection: sqlite3.Connection) -> StepTable:
            segments = self._read_segments(connection)
            names = {segment.id: tuple(unit.name for unit in segment.units) for segment in segments}
            table = TableBuilder(names[live_segment(segments).id], count_live_rows(connection, segments))
            for segment, row in _rows(connection, segments):
                table.add(row, names[segment.id])
            return table.build()

        return self._read(query)

    def events(self, kind: str | None = None) -> list[Event]:
        """Events of the live line in the order written, or only those of one kind."""

        def query(connection: sqlite3.Connection) -> list[Event]:
            events: list[Event] = []
            for segment in self._read_segments(connection):
                rows = connection.execute(
                    f"SELECT kind, step, place, data FROM events WHERE {live_where(segment)}"
                    + (" AND kind = ?" if kind is not None else "")
                    + " ORDER BY id",
                    () if kind is None else (kind,),
                )
                with meeting_damage():
                    events.extend(
                        Event(kind=k, step=s, place=p, data=encoding.from_json_object(d), segment=segment.id)
                        for k, s, p, d in rows
                    )
            return events

        return self._read(query)

    def readings(self, monitor: str, metric: str) -> tuple[NDArray[np.int64], NDArray[np.float32], tuple[str, ...]]:
        """What a monitor read along the live line, place by place; rank 0's values in a run of several. T: readings.

        Returns:
            The optimizer steps, shape (T,); the values, shape (T, places), NaN where a place has none; and the names of
            the places, those of the latest reading. Values of earlier ones are matched by name. All three are empty
            when the record holds none.
        """
        return self._read(lambda c: read_reading(c, self._read_segments(c), monitor, metric))

    @property
    def reading_keys(self) -> tuple[tuple[str, str], ...]:
        """Every monitor and metric that ``readings`` has values of, sorted."""
        return self._read(lambda c: reading_keys(c, self._read_segments(c)))

    def fold(self, start: Callable[[], F]) -> tuple[F, tuple[Segment, ...]]:
        """Add each row of the live line, in the units of its own segment, to a fold, without holding them all.

        Args:
            start: Makes the fold. Called again when a damaged record has to be read from its beginning.

        Returns:
            The fold, and the segments as they were while the rows were read.
        """

        def query(connection: sqlite3.Connection) -> tuple[F, tuple[Segment, ...]]:
            segments = self._read_segments(connection)
            fold = start()
            for segment, row in _rows(connection, segments):
                fold.add(segment, row)
            return fold, segments

        return self._read(query)

    def start_state(self, segment: Segment) -> dict[str, Any] | None:
        """The controller's state with which ``segment`` started; None when it went on from the one before."""

        def query(connection: sqlite3.Connection) -> dict[str, Any] | None:
            with meeting_damage():
                (text,) = connection.execute("SELECT state FROM segments WHERE id = ?", (segment.id,)).fetchone()
                return None if text is None else encoding.from_json_object(text)

        return self._read(query)

    def close(self) -> None:
        """Let go of the file. A second call does nothing."""
        with suppress(sqlite3.Error):
            self._connection.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def _read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        try:
            if self._connection.in_transaction:  # asked from within a query: the same moment of the file
                return query(self._connection)
            return self._in_snapshot(query)
        except sqlite3.ProgrammingError:
            raise RecordError(f"{self.path} was closed. Open it again with open_run.") from None
        except (sqlite3.DatabaseError, DamagedRowError) as error:
            if self._connection.in_transaction:
                raise
            if self._rescued or "locked" in str(error):
                raise RecordError(refusal(self.path, error)) from None
            cause = error
        connection, self.damage = rescue(self.path, cause)
        self._connection.close()
        self._connection, self._rescued = connection, True
        self._units.clear()
        return self._read(query)

    def _in_snapshot(self, query: Callable[[sqlite3.Connection], T]) -> T:
        self._connection.execute("BEGIN")  # one moment of the file, although the writer goes on
        try:
            return query(self._connection)
        finally:
            with suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")

    def _read_segments(self, connection: sqlite3.Connection) -> tuple[Segment, ...]:
        return read_segments(connection, self._units)


def _rows(connection: sqlite3.Connection, segments: tuple[Segment, ...]) -> Iterator[tuple[Segment, RawRow]]:
    with meeting_damage():  # of the rows; what their taker raises does not come by here
        names = selected_columns(connection)
        for segment in segments:
            for columns in connection.execute(
                f"SELECT {names} FROM steps WHERE {live_where(segment)} ORDER BY step, id"
            ):
                yield segment, decode_row(columns, len(segment.units))


def records_below(path: Path) -> str | None:
    """Where the records are, in a sentence, when ``path`` has none but its folder has others; None when it has not."""
    folder = path.parent
    found = find_runs(folder) if folder.is_dir() else []
    names = [one.parent.as_posix() if one.name == RECORD_NAME else one.as_posix() for one in found]
    if not names:
        return None
    if len(names) == 1:
        return f"There is one at {names[0]}."
    return f"{len(names)} records are below {folder.as_posix()}: name one, such as {names[0]}."
