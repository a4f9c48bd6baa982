"""Where arrays live: any array-API namespace, any device, always float64."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device, is_array_api_obj, is_cupy_array, is_torch_array

__all__ = ["LARGEST", "Array", "Place", "place_of", "to_array", "to_numpy"]

Array = Any
"""An array of NumPy, torch or any other array-API library."""

LARGEST = sys.float_info.max
"""Where a score that would overflow stops: +inf is kept for units that failed."""

_NUM_CODES = 8


@dataclass(frozen=True, eq=False)
class Place:
    """A namespace and a device, with the constants that are needed there.

    The constants are 0-d arrays: dividing by a Python number is a multiplication by its rounded reciprocal on some
    devices, and not every library takes a Python number in ``where`` and ``minimum``.
    """

    xp: Any
    device: Any
    zero: Array = field(init=False)
    one: Array = field(init=False)
    largest: Array = field(init=False)
    inf: Array = field(init=False)
    nan: Array = field(init=False)
    codes: tuple[Array, ...] = field(init=False)
    """The int8 numbers from 0 up, for choices among a few."""

    def __post_init__(self) -> None:
        values = {"zero": 0.0, "one": 1.0, "largest": LARGEST, "inf": float("inf"), "nan": float("nan")}
        for name, value in values.items():
            object.__setattr__(self, name, self.number(value))
        codes = tuple(self.xp.full((), code, dtype=self.xp.int8, device=self.device) for code in range(_NUM_CODES))
        object.__setattr__(self, "codes", codes)

    def number(self, value: float) -> Array:
        """A 0-d float64 array, filled on the device so that nothing is copied there."""
        return self.xp.full((), value, dtype=self.xp.float64, device=self.device)

    def floats(self, values: Any) -> Array:
        """A float64 array of its own from anything NumPy reads."""
        return self.xp.asarray(np.array(values, dtype=np.float64), device=self.device)

    def integers(self, values: Any) -> Array:
        """An int64 array of its own from anything NumPy reads."""
        return self.xp.asarray(np.array(values, dtype=np.int64), device=self.device)

    def bools(self, values: Any) -> Array:
        """A bool array of its own from anything NumPy reads."""
        return self.xp.asarray(np.array(values, dtype=np.bool_), device=self.device)

    def widen(self, norms: Array) -> Array:
        """``norms`` as float64."""
        return self.xp.astype(norms, self.xp.float64, copy=False)

    def is_home_of(self, array: Array) -> bool:
        """Whether ``array`` lives here."""
        return array_namespace(array) is self.xp and device(array) == self.device


def place_of(array: Array) -> Place:
    """The place in which ``array`` lives."""
    return Place(array_namespace(array), device(array))


def to_array(values: Array | Sequence[float | None], missing: float = 0.0) -> Array:
    """``values`` as an array: arrays as they are, a list through NumPy, with ``missing`` for each None."""
    if is_torch_array(values):
        return values.detach()  # the state would keep every step's graph alive otherwise
    if is_array_api_obj(values):
        return values
    return np.asarray([missing if value is None else value for value in values], dtype=np.float64)


def to_numpy(array: Array) -> np.ndarray[Any, Any]:
    """A copy of ``array`` in NumPy; waits for the device."""
    if is_torch_array(array):
        return np.array(array.detach().cpu().numpy())
    if is_cupy_array(array):
        return np.array(array.get())
    return np.array(array)
