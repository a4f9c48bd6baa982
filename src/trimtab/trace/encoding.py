"""How arrays and settings become columns of the record, and back.

Norms, channel errors and amaxes are kept exactly, because replay starts from them; an amax is a float32 as it comes.
Scores follow from these, so float32 is enough for them: they are there to be looked at.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.control import REASONS

__all__ = [
    "from_json_object",
    "pack_active",
    "pack_locks",
    "pack_norms",
    "pack_reasons",
    "pack_risk",
    "pack_scores",
    "plain_object",
    "scalar_column",
    "scalar_value",
    "to_json",
    "unpack_active",
    "unpack_locks",
    "unpack_norms",
    "unpack_reasons",
    "unpack_scores",
]

_FLOAT32_MAX = np.finfo(np.float32).max
_JUST_ABOVE_ONE = np.nextafter(np.float32(1), np.float32(2))


def pack_norms(norms: NDArray[np.float64]) -> bytes:
    """Exact little-endian float64.

    Example:
        >>> values = np.array([0.1, np.nan, -np.inf])
        >>> unpack_norms(pack_norms(values)).tobytes() == values.tobytes()
        True
    """
    return norms.astype("<f8", copy=False).tobytes()


def unpack_norms(blob: bytes) -> NDArray[np.float64]:
    """Undo ``pack_norms``; the array is read-only."""
    return np.frombuffer(blob, dtype="<f8").astype(np.float64, copy=False)


def pack_scores(scores: NDArray[np.float64]) -> bytes:
    """Little-endian float32 in which a finite score stays finite, so that +inf still means *failed*."""
    return _as_float32(scores).tobytes()


def pack_risk(risk: NDArray[np.float64]) -> bytes:
    """Like ``pack_scores``, and a risk above 1 stays above 1, so that the record never contradicts its decision."""
    packed = _as_float32(risk)
    packed[(packed == 1) & (risk > 1)] = _JUST_ABOVE_ONE
    return packed.tobytes()


def unpack_scores(blob: bytes) -> NDArray[np.float32]:
    """Undo ``pack_scores`` and ``pack_risk``; the array is read-only."""
    return np.frombuffer(blob, dtype="<f4").astype(np.float32, copy=False)


def pack_active(active: NDArray[np.bool_]) -> bytes:
    """One bit a unit, the first unit in the lowest bit of the first byte."""
    return np.packbits(active, bitorder="little").tobytes()


def unpack_active(blob: bytes, num_units: int) -> NDArray[np.bool_]:
    """Undo ``pack_active``."""
    bits = np.frombuffer(blob, dtype=np.uint8)
    if len(bits) != (num_units + 7) // 8:
        raise ValueError(f"{len(bits)} bytes of active bits for {num_units} units")
    return np.unpackbits(bits, count=num_units, bitorder="little").astype(np.bool_)


def pack_locks(lock: NDArray[np.int64]) -> bytes:
    """Unsigned integers of 1, 2, 4 or 8 bytes, the narrowest that holds them all; the blob's length says which."""
    top = int(lock.max(initial=0))
    width = next(w for w in (1, 2, 4, 8) if top < 256**w)
    return lock.astype(f"<u{width}").tobytes()


def unpack_locks(blob: bytes, num_units: int) -> NDArray[np.int64]:
    """Undo ``pack_locks``."""
    width = len(blob) // num_units if num_units else 1
    if width not in (1, 2, 4, 8) or width * num_units != len(blob):
        raise ValueError(f"{len(blob)} bytes of locks for {num_units} units")
    return np.frombuffer(blob, dtype=f"<u{width}").astype(np.int64)


def pack_reasons(reason: NDArray[np.int8]) -> bytes:
    """Of each unit with a reason 8 * unit + code, in the narrowest unsigned integers that hold it for every unit.

    Example:
        >>> len(pack_reasons(np.array([0, 0, 3, 0, 6], np.int8)))
        2
    """
    (units,) = np.nonzero(reason)
    return (8 * units + reason[units]).astype(f"<u{_reason_width(len(reason))}").tobytes()


def unpack_reasons(blob: bytes, num_units: int) -> NDArray[np.int8]:
    """Undo ``pack_reasons``."""
    packed = np.frombuffer(blob, dtype=f"<u{_reason_width(num_units)}")
    reason = np.zeros(num_units, np.int8)
    if len(packed):
        if packed.max() >= 8 * num_units or (packed % 8).max() >= len(REASONS):
            raise ValueError(f"reasons of units or of kinds that there are not, for {num_units} units")
        reason[packed // 8] = packed % 8
    return reason


def _reason_width(num_units: int) -> int:
    return next(w for w in (1, 2, 4, 8) if 8 * num_units <= 256**w)


def scalar_column(value: float | None) -> float | str | None:
    """A float as SQLite can hold it; SQLite turns NaN into NULL, which here means *not given*."""
    if value is None:
        return None
    value = float(value)
    return "nan" if math.isnan(value) else value


def scalar_value(column: float | str | None) -> float:
    """Undo ``scalar_column``; NaN also where nothing was given."""
    return math.nan if column is None else float(column)


def to_json(value: object) -> str:
    """Any settings as JSON text; what JSON has no word for becomes the nearest plain value, at worst its ``repr``.

    Example:
        >>> to_json({"bits": np.int64(4), "folder": PurePath("runs"), "units": ("a", "b")})
        '{"bits": 4, "folder": "runs", "units": ["a", "b"]}'
    """
    try:
        return json.dumps(_plain(value))
    except (RecursionError, ValueError):  # a structure that holds itself
        return json.dumps(repr(value))


def plain_object(data: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``data`` that holds plain values only."""
    try:
        return {str(key): _plain(item) for key, item in data.items()}
    except RecursionError:
        return {"value": repr(data)}


def from_json_object(text: str | None) -> dict[str, Any]:
    """A JSON object as a dictionary; empty where there is none."""
    value = json.loads(text) if text else {}
    return value if isinstance(value, dict) else {"value": value}


def _plain(value: object) -> Any:
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(_plain(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(item) for item in value), key=repr)
    if isinstance(value, (np.generic, np.ndarray)):
        return _plain(value.tolist())
    if isinstance(value, PurePath):
        return str(value)
    return repr(value)


def _as_float32(values: NDArray[np.float64]) -> NDArray[np.float32]:
    with np.errstate(over="ignore", invalid="ignore"):
        packed = values.astype("<f4")
    overflowed = np.isinf(packed) & np.isfinite(values)
    if overflowed.any():
        packed[overflowed] = np.copysign(_FLOAT32_MAX, values[overflowed])
    return packed
