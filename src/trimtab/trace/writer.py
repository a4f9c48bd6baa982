"""Writing the record while training goes on: rows are copied, queued, and committed by a thread of their own."""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from trimtab.errors import TrimtabWarning
from trimtab.trace import encoding
from trimtab.trace.outbox import Outbox
from trimtab.trace.rows import QUANTIZER_COLUMNS, Event, StepRow, UnitRow
from trimtab.trace.schema import record_path
from trimtab.trace.statements import Item, Note, OpenSegment
from trimtab.trace.store import Store

__all__ = ["RunWriter"]

_ARRAYS = {
    "norms": np.float64,
    "gnmr": np.float64,
    "delta": np.float64,
    "risk": np.float64,
    "errors": np.float64,
    "active": np.bool_,
    "lock": np.int64,
    "reason": np.int8,
}
_SCALARS = ("loss", "lr", "grad_norm", "alpha", "beta", "elapsed_s")


class RunWriter:
    """Write one run's record; training never waits for the disk and never fails because of it.

    Rows are committed every 50 steps or every second by a background thread, so a kill loses no more than that. What
    cannot be written (disk full, file locked or gone) waits in memory up to a bound; then the oldest rows are dropped.
    The first such failure becomes one ``TrimtabWarning``, issued by the next call in the caller's thread, and the
    record gets an event of kind ``gap`` once it can be written again: its data name the dropped steps, ``num_steps`` is
    0 when all could be caught up.

    Opening an existing record adds a segment; a record of an older schema is brought up to this one first. A script
    that ends without ``close`` loses nothing, but its segment is not marked as finished.

    Args:
        path: A file ending in .sqlite or .db, or a folder that will hold ``run.sqlite``.
        config: The resolved config; anything JSON has no word for is kept as text.
        units: The watched units, in the order of the arrays in each row.
        start_step: The last step already done; rows of earlier segments after it no longer count.
        versions: Versions of the packages in use.
        state: The controller's ``state_dict`` at ``start_step``, when one was loaded; replay starts from it.

    Raises:
        ConfigError: The place cannot be written, or another live writer has the record.
        RecordError: The file exists and is no record, is damaged or of a newer schema. It is left untouched.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with RunWriter(folder, config={"policy": {"alpha": 1.5}}, units=[UnitRow(name="q_proj")]) as writer:
        ...     writer.write_step(StepRow(step=1, norms=[0.5], active=[True], loss=2.0))
        >>> from trimtab.trace import open_run
        >>> with open_run(folder) as run:
        ...     run.finished, run.steps().norms.tolist()
        (True, [[0.5]])
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        config: Mapping[str, Any],
        units: Sequence[UnitRow | Mapping[str, Any]],
        start_step: int = 0,
        versions: Mapping[str, str] | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.path: Path = record_path(path)
        rows = tuple(unit if isinstance(unit, UnitRow) else UnitRow(**unit) for unit in units)
        if len({row.name for row in rows}) != len(rows):
            raise ValueError("two units of one record have the same name")
        self._segment = OpenSegment(
            start_step=int(start_step),
            config=encoding.to_json(dict(config)),
            versions=encoding.to_json(dict(versions or {})),
            state=None if state is None else encoding.to_json(state),
            units=rows,
        )
        self._num_rows = 0
        self._last_step = int(start_step)
        self._opened_at = time.monotonic()
        self._pid = os.getpid()
        self._said_closed = False
        store = Store(self.path)
        store.open(self._segment)
        self._outbox = Outbox(store, self._segment)
        # At exit, and when the writer is dropped: keep what is queued, claim nothing about how the run ended.
        self._finalizer = weakref.finalize(self, self._outbox.stop, finished=False, reason=None, pid=self._pid)
        if store.wal_refusal is not None:
            self._warn(
                f"{self.path} cannot use a write-ahead log ({store.wal_refusal}); it uses a rollback journal, and a "
                "reader may make the writer wait. Put the record on a local disk to avoid that."
            )

    def write_step(self, row: StepRow) -> None:
        """Queue one step's row; its arrays are copied, so the caller may reuse them.

        A row whose step is not after the last one starts a new segment: a checkpoint was loaded in between.

        Raises:
            ValueError: An array is not of one value per unit, a reading not of one per place, or ``quantizer`` has a
                key that the record does not keep.
        """
        ready = self._ready_row(row)
        if row.step < self._last_step or (row.step == self._last_step and not row.skipped):
            self.resume(row.step - 1)
        self._num_rows += 1
        self._last_step = ready.step
        self._put(ready)

    def write_event(self, kind: str, step: int, place: str = "", data: Mapping[str, Any] | None = None) -> None:
        """Queue an event, usually of a kind in ``EventKind``; ``data`` is kept as JSON."""
        self._put(Event(kind=str(kind), step=int(step), place=str(place), data=_snapshot(data)))

    def annotate_step(
        self,
        step: int,
        *,
        loss: float | None = None,
        lr: float | None = None,
        grad_norm: float | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Add values that arrive after a step's row was queued or written; a step without a row is left alone."""
        given = {"loss": loss, "lr": lr, "grad_norm": grad_norm}
        columns = {name: float(value) for name, value in given.items() if value is not None}
        if columns or extra:
            self._put(Note(int(step), columns, _snapshot(extra)))

    def resume(self, start_step: int, state: Mapping[str, Any] | None = None) -> None:
        """Say that training goes on after ``start_step``, because a checkpoint was loaded.

        Begins a new segment, or corrects the present one while it has no row yet.

        Args:
            start_step: The last step already done.
            state: The controller's ``state_dict``, when it was loaded.
        """
        text = None if state is None else encoding.to_json(state)
        if self._num_rows:
            old = self._segment
            self._segment = OpenSegment(int(start_step), old.config, old.versions, text, old.units)
            self._num_rows = 0
        else:
            self._segment.start_step, self._segment.state = int(start_step), text
            self._segment.num_changes += 1
        self._last_step = int(start_step)
        self._put(None)

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until everything queued so far is written; False when it could not be.

        Args:
            timeout_s: Longest wait.
        """
        if self._foreign:
            return False
        written = self._outbox.flush(timeout_s)
        self._say_warnings()
        return written

    def close(self, finished: bool = True, reason: str | None = None) -> None:
        """Write what is left, note how the run ended, and fold the record into one file. A second call does nothing.

        Args:
            finished: Whether training ran to its end.
            reason: Why it ended, as a clause.
        """
        if self._foreign or not self._finalizer.detach():
            return
        self._outbox.stop(finished=finished, reason=reason, pid=self._pid)
        self._say_warnings()

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return not self._finalizer.alive

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self.close(finished=error is None, reason=None if kind is None else f"{kind.__name__}: {error}")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("A RunWriter holds an open file and cannot be copied or pickled. Copy the model without it.")

    @property
    def _foreign(self) -> bool:
        """In a forked child: the thread and the file stay with the parent."""
        return os.getpid() != self._pid

    def _ready_row(self, row: StepRow) -> StepRow:
        changes: dict[str, Any] = {"step": int(row.step), "skipped": bool(row.skipped)}
        for name, dtype in _ARRAYS.items():
            values = getattr(row, name)
            if values is not None:
                changes[name] = self._one_a_unit(name, row.step, values, dtype)
        if row.quantizer is not None:
            for name in row.quantizer:
                if name not in QUANTIZER_COLUMNS:
                    known = ", ".join(QUANTIZER_COLUMNS)
                    raise ValueError(f"quantizer of step {row.step} has {name!r}, the record keeps {known}")
            changes["quantizer"] = {
                name: self._one_a_unit(name, row.step, values, np.float64) for name, values in row.quantizer.items()
            }
        for name in _SCALARS:
            value = getattr(row, name)
            if value is not None:
                changes[name] = float(value)
        if row.elapsed_s is None:
            changes["elapsed_s"] = time.monotonic() - self._opened_at
        if row.extra is not None:
            changes["extra"] = _snapshot(row.extra)
        if row.readings is not None:
            changes["readings"] = {
                str(monitor): {str(k): _ready_reading(f"{monitor}/{k}", row.step, *v) for k, v in by_metric.items()}
                for monitor, by_metric in row.readings.items()
            }
        return replace(row, **changes)

    def _one_a_unit(self, name: str, step: int, values: Any, dtype: Any) -> NDArray[Any]:
        """A copy of ``values``, if there is one for each unit."""
        array = np.array(values, dtype=dtype)
        num_units = len(self._segment.units)
        if array.shape != (num_units,):
            raise ValueError(f"{name} of step {step} has shape {array.shape}, the record has {num_units} units")
        return array

    def _put(self, item: Item) -> None:
        if self._foreign:
            return
        if self.closed:
            if not self._said_closed:
                self._said_closed = True
                self._warn(f"The run record {self.path} is closed; what comes after that is not kept.")
            return
        self._outbox.put(self._segment, item)
        if self._outbox.warnings:
            self._say_warnings()

    def _say_warnings(self) -> None:
        while self._outbox.warnings:
            self._warn(self._outbox.warnings.popleft())

    def _warn(self, message: str) -> None:
        warnings.warn(TrimtabWarning(message), stacklevel=4)


def _ready_reading(name: str, step: int, places: Sequence[str], values: Any) -> tuple[tuple[str, ...], Any]:
    """A copy of a reading, if it has a value for each place."""
    array = np.array(values, dtype=np.float64)
    names = tuple(str(place) for place in places)
    if array.shape != (len(names),):
        raise ValueError(f"{name} of step {step} has shape {array.shape}, and {len(names)} places are named")
    return names, array


def _snapshot(data: Mapping[str, Any] | None) -> dict[str, Any]:
    """Plain copy of ``data``, so that what the caller changes later is not what is written."""
    return encoding.plain_object(data) if data else {}
