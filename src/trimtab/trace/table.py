"""The record's rows as arrays."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.trace import encoding
from trimtab.trace.routed import RoutedSets
from trimtab.trace.rows import QUANTIZER_COLUMNS
from trimtab.trace.schema import STEP_COLUMNS_SINCE

__all__ = [
    "COLUMNS",
    "DamagedRowError",
    "RawRow",
    "StepTable",
    "TableBuilder",
    "decode_row",
    "meeting_damage",
    "selected_columns",
]

COLUMNS = (
    "segment", "step", "skipped", "loss", "lr", "grad_norm", "alpha", "beta", "elapsed_s", "extra",
    "norms", "gnmr", "delta", "risk", "active", "lock", "errors", *QUANTIZER_COLUMNS, "reason",
)  # fmt: skip
"""Columns of ``steps`` in the order in which they are read."""
_SCALARS = ("loss", "lr", "grad_norm", "alpha", "beta", "elapsed_s")


class DamagedRowError(ValueError):
    """A row that is not whole; internal, it becomes a ``RecordError`` or the end of what is read."""


def selected_columns(connection: sqlite3.Connection) -> str:
    """``COLUMNS`` as SQL for the schema that the file has now; a live writer may bring an older one up to date."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    missing = {name for since, names in STEP_COLUMNS_SINCE.items() if since > version for name in names}
    return ", ".join("NULL" if name in missing else name for name in COLUMNS)


@contextmanager
def meeting_damage() -> Iterator[None]:
    """Name what else SQLite and JSON raise over damaged pages: text that is no text, lengths beyond all memory."""
    try:
        yield
    except (UnicodeDecodeError, MemoryError, TypeError, ValueError) as error:
        raise DamagedRowError(f"{type(error).__name__}: {error}") from None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepTable:
    """Steps of a run as arrays, oldest first. T: rows, U: units.

    ``active[t]`` is the set decided from the norms of row t: it routes the step after it. ``routed[t]`` is the set that
    the step of row t ran under.
    """

    units: tuple[str, ...]
    """Columns of the two-dimensional arrays."""
    step: NDArray[np.int64]
    """Optimizer step. (T,)"""
    segment: NDArray[np.int64]
    """Segment that wrote the row. (T,)"""
    skipped: NDArray[np.bool_]
    """The loss scaler skipped the step. (T,)"""
    loss: NDArray[np.float64]
    """NaN where not given; so too the next ones. (T,)"""
    lr: NDArray[np.float64]
    """Learning rate. (T,)"""
    grad_norm: NDArray[np.float64]
    """Total norm before clipping. (T,)"""
    alpha: NDArray[np.float64]
    """Threshold of GNMR in force. (T,)"""
    beta: NDArray[np.float64]
    """Threshold of Delta in force. (T,)"""
    elapsed_s: NDArray[np.float64]
    """Seconds since the segment started. (T,)"""
    extra: tuple[Mapping[str, Any] | None, ...]
    """Further inputs of the decision. (T,)"""
    known: NDArray[np.bool_]
    """Whether the row holds a norm of the unit; False for a unit the segment did not have. (T, U)"""
    norms: NDArray[np.float64]
    """Exactly as observed; NaN also where not ``known``. (T, U)"""
    gnmr: NDArray[np.floating[Any]]
    """NaN where not observed or not known; so too delta and risk. (T, U)"""
    delta: NDArray[np.floating[Any]]
    """(T, U)"""
    risk: NDArray[np.floating[Any]]
    """(T, U)"""
    active: NDArray[np.bool_]
    """The units decided onto the recovery path for the next step; one routed by hand runs under another set. (T, U)"""
    routed: NDArray[np.bool_]
    """The units on the recovery path while the step ran: the set forced by hand where its ``extra`` has one as
    ``"routed_by_hand"``, or else what the row before decided. None in the first row; where rows are missing, the last
    decision before them. (T, U)"""
    lock: NDArray[np.int64]
    """Steps for which the unit stays a candidate. (T, U)"""
    errors: NDArray[np.float64]
    """Channel errors, exactly as the decision had them; NaN where not known, as in the next ones. (T, U)"""
    flushed_share: NDArray[np.float32]
    """Share of the values that the quantizer flushed to zero. (T, U)"""
    saturated_share: NDArray[np.float32]
    """Share of the values that it clipped. (T, U)"""
    amax: NDArray[np.float32]
    """Largest magnitude of its operand, exactly as the decision had it. (T, U)"""
    reason: NDArray[np.int8]
    """What made the risk or holds the unit, codes of ``trimtab.control.REASONS``; 0 also where not recorded. (T, U)"""

    def __len__(self) -> int:
        return len(self.step)


@dataclass(slots=True, eq=False)
class RawRow:
    """One row, in the units of its own segment."""

    segment: int
    step: int
    skipped: bool
    scalars: dict[str, float]
    loss_given: bool
    extra: dict[str, Any] | None
    norms: NDArray[np.float64] | None
    gnmr: NDArray[np.floating[Any]] | None
    delta: NDArray[np.floating[Any]] | None
    risk: NDArray[np.floating[Any]] | None
    active: NDArray[np.bool_] | None
    lock: NDArray[np.int64] | None
    errors: NDArray[np.float64] | None
    flushed_share: NDArray[np.float32] | None
    saturated_share: NDArray[np.float32] | None
    amax: NDArray[np.float32] | None
    reason: NDArray[np.int8] | None


def decode_row(columns: tuple[Any, ...], num_units: int) -> RawRow:
    """Undo the writer's encoding.

    Raises:
        DamagedRowError: The row is not whole: a blob does not fit the number of units, or is no blob.
    """
    values = dict(zip(COLUMNS, columns, strict=True))
    with meeting_damage():
        row = RawRow(
            segment=int(values["segment"]),
            step=int(values["step"]),
            skipped=bool(values["skipped"]),
            scalars={name: encoding.scalar_value(values[name]) for name in _SCALARS},
            loss_given=values["loss"] is not None,
            extra=None if values["extra"] is None else encoding.from_json_object(values["extra"]),
            norms=None if values["norms"] is None else encoding.unpack_norms(values["norms"]),
            gnmr=None if values["gnmr"] is None else encoding.unpack_scores(values["gnmr"]),
            delta=None if values["delta"] is None else encoding.unpack_scores(values["delta"]),
            risk=None if values["risk"] is None else encoding.unpack_scores(values["risk"]),
            active=None if values["active"] is None else encoding.unpack_active(values["active"], num_units),
            lock=None if values["lock"] is None else encoding.unpack_locks(values["lock"], num_units),
            errors=None if values["errors"] is None else encoding.unpack_norms(values["errors"]),
            **{
                name: None if values[name] is None else encoding.unpack_scores(values[name])
                for name in QUANTIZER_COLUMNS
            },
            reason=None if values["reason"] is None else encoding.unpack_reasons(values["reason"], num_units),
        )
    floats = (row.norms, row.gnmr, row.delta, row.risk, row.errors, row.flushed_share, row.saturated_share, row.amax)
    for array in floats:
        if array is not None and len(array) != num_units:
            raise DamagedRowError(f"a row of {len(array)} values for {num_units} units")
    return row


class TableBuilder:
    """Fill a ``StepTable`` row by row.

    Args:
        units: Names of its columns.
        num_rows: Rows there will be.
        score_dtype: float32 as recorded, float64 as replayed.
    """

    def __init__(self, units: tuple[str, ...], num_rows: int, score_dtype: type[np.floating[Any]] = np.float32) -> None:
        self.units = units
        shape = (num_rows, len(units))
        self._num_rows = 0
        self._step = np.zeros(num_rows, np.int64)
        self._segment = np.zeros(num_rows, np.int64)
        self._skipped = np.zeros(num_rows, np.bool_)
        self._scalars = {name: np.full(num_rows, np.nan) for name in _SCALARS}
        self._extra: list[Mapping[str, Any] | None] = []
        self._known = np.zeros(shape, np.bool_)
        self._arrays: dict[str, NDArray[Any]] = {
            "norms": np.full(shape, np.nan),
            "gnmr": np.full(shape, np.nan, score_dtype),
            "delta": np.full(shape, np.nan, score_dtype),
            "risk": np.full(shape, np.nan, score_dtype),
            "active": np.zeros(shape, np.bool_),
            "routed": np.zeros(shape, np.bool_),
            "lock": np.zeros(shape, np.int64),
            "errors": np.full(shape, np.nan),
            **{name: np.full(shape, np.nan, np.float32) for name in QUANTIZER_COLUMNS},
            "reason": np.zeros(shape, np.int8),
        }
        self._sets = RoutedSets()
        self._places: dict[tuple[str, ...], tuple[Any, Any]] = {units: (slice(None), slice(None))}

    def add(self, row: RawRow, units: tuple[str, ...]) -> None:
        """Append ``row``, whose arrays are in the order of ``units``."""
        source, target = self._match(units)
        t = self._num_rows
        self._step[t], self._segment[t], self._skipped[t] = row.step, row.segment, row.skipped
        for name, value in row.scalars.items():
            self._scalars[name][t] = value
        self._extra.append(row.extra)
        if row.norms is not None:
            self._known[t, target] = True
        routed = self._sets.take(row, units)
        for name, table in self._arrays.items():
            values = routed if name == "routed" else getattr(row, name)
            if values is not None:
                table[t, target] = values[source]
        self._num_rows += 1

    def build(self) -> StepTable:
        """The table of the rows added."""
        end = self._num_rows
        return StepTable(
            units=self.units,
            step=self._step[:end],
            segment=self._segment[:end],
            skipped=self._skipped[:end],
            extra=tuple(self._extra),
            known=self._known[:end],
            **{name: values[:end] for name, values in self._scalars.items()},
            **{name: values[:end] for name, values in self._arrays.items()},
        )

    def _match(self, units: tuple[str, ...]) -> tuple[Any, Any]:
        if units not in self._places:
            columns = {name: index for index, name in enumerate(self.units)}
            pairs = [(i, columns[name]) for i, name in enumerate(units) if name in columns]
            source, target = np.array(pairs, dtype=np.intp).reshape(-1, 2).T
            self._places[units] = (source, target)
        return self._places[units]
