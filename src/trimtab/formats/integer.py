"""The symmetric integer formats: int2, int4 and int8 without their most negative code.

Leaving that code out makes the grid symmetric, so that a sign flip of the input is a sign flip of the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from array_api_compat import array_namespace, device

from trimtab.errors import ConfigError, nearest_names

__all__ = ["FORMATS", "IntegerFormat", "get"]


@dataclass(frozen=True, kw_only=True, slots=True)
class IntegerFormat:
    """A symmetric two's-complement grid of ``bits`` bits: every integer from ``-max_value`` to ``max_value``.

    Args:
        name: Name by which ``get`` finds it.
        bits: Storage bits of a code.
    """

    name: str
    bits: int

    @property
    def max_value(self) -> int:
        """The largest value of the grid: 1, 7 or 127."""
        return (1 << (self.bits - 1)) - 1

    def round(self, array: Any) -> Any:
        """Round onto the unscaled grid: to nearest, ties to even, saturating.

        A value that is not finite comes back as NaN, never as a number.

        Args:
            array: Floating array of NumPy, torch or any array-API library, any shape.

        Returns: An array of the same shape, library and dtype, whose values are grid points or NaN.

        Example:
            >>> import numpy as np
            >>> get("int4").round(np.array([0.5, 1.5, -2.4, 99.0, float("inf")])).tolist()
            [0.0, 2.0, -2.0, 7.0, nan]
        """
        xp = array_namespace(array)
        rounded = xp.clip(xp.round(array), -float(self.max_value), float(self.max_value))
        return xp.where(xp.isfinite(array), rounded, xp.full((), float("nan"), dtype=array.dtype, device=device(array)))


def round_scalar(value: float, bits: int) -> float:
    """Round one number onto the grid of ``bits`` bits; the specification of ``IntegerFormat.round``.

    Example:
        >>> [round_scalar(v, 2) for v in (0.5, 0.500001, -7.0)]
        [0.0, 1.0, -1.0]
    """
    if value != value or value in (float("inf"), float("-inf")):
        return float("nan")
    limit = 2 ** (bits - 1) - 1
    return float(max(-limit, min(limit, round(value))))


FORMATS = {f"int{bits}": IntegerFormat(name=f"int{bits}", bits=bits) for bits in (2, 4, 8)}
"""Every known format by name."""


def get(name: str) -> IntegerFormat:
    """The format called ``name``.

    Raises: ConfigError: when there is no such format.
    """
    try:
        return FORMATS[name]
    except KeyError:
        near = nearest_names(name, FORMATS) or sorted(FORMATS)
        raise ConfigError("format", name, f"the formats are {', '.join(FORMATS)}.", f"Use {near[0]!r}.") from None
