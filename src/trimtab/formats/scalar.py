"""The specification: rounding, encoding and decoding one number, to be read rather than to be fast."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trimtab.formats.format import Format

__all__ = ["decode_scalar", "encode_scalar", "round_scalar"]


def round_scalar(fmt: Format, value: float, noise: float | None = None) -> float:
    """Round one number onto the grid of ``fmt``; the specification of ``Format.round``.

    Example:
        >>> from trimtab.formats import get
        >>> [round_scalar(get("e2m1"), v) for v in (0.25, 0.75, 2.5, 5.0, -7.0)]
        [0.0, 1.0, 2.0, 4.0, -6.0]
        >>> [round_scalar(get("int4"), -2.25, noise) for noise in (0.2, 0.25)]
        [-3.0, -2.0]
    """
    if not math.isfinite(value):
        return math.nan
    size = min(abs(value), fmt.max_value)
    step = 2.0 ** (_exponent(fmt, size) - fmt.mantissa_bits)
    steps = size / step  # exact: the divisor is a power of two and the quotient is not small
    if noise is None:
        whole = round(steps)  # ties to even
    else:
        whole = math.floor(steps)
        whole += noise < steps - whole
    return math.copysign(whole * step, value)


def encode_scalar(fmt: Format, value: float) -> int:
    """The code of a grid point, or of NaN; the specification of ``Format.encode`` after rounding.

    Example:
        >>> from trimtab.formats import get
        >>> encode_scalar(get("e4m3"), 448.0), encode_scalar(get("e4m3"), -0.0), encode_scalar(get("int8"), -3.0)
        (126, 128, -3)
    """
    if math.isnan(value):
        # All exponent bits, with all mantissa bits ("nan") or the highest of them ("ieee").
        largest = (1 << (fmt.bits - 1)) - 1
        return {"none": 0, "nan": largest, "ieee": largest - (1 << fmt.mantissa_bits >> 1) + 1}[fmt.specials]
    if fmt.layout == "integer":
        return int(value)
    exponent = _exponent(fmt, value)
    steps = int(abs(value) / 2.0 ** (exponent - fmt.mantissa_bits))
    # A normal number's leading step count, 2**mantissa_bits, carries into the exponent field by itself.
    magnitude = ((exponent - fmt.min_exponent) << fmt.mantissa_bits) + steps
    return magnitude + ((1 << (fmt.bits - 1)) if math.copysign(1.0, value) < 0 else 0)


def decode_scalar(fmt: Format, code: int) -> float:
    """The number that one code names; the specification of ``Format.decode``.

    Example:
        >>> from trimtab.formats import get
        >>> decode_scalar(get("e4m3"), 0b0_0000_001) == 2.0**-9, decode_scalar(get("e4m3"), 0b0_1111_110)
        (True, 448.0)
    """
    if fmt.layout == "integer":
        return float(code)
    sign_bit = 1 << (fmt.bits - 1)
    sign, magnitude = (-1.0 if code & sign_bit else 1.0), code & (sign_bit - 1)
    exponent, mantissa = magnitude >> fmt.mantissa_bits, magnitude & ((1 << fmt.mantissa_bits) - 1)
    if fmt.specials == "nan" and magnitude == sign_bit - 1:
        return math.nan
    if fmt.specials == "ieee" and exponent == (sign_bit >> fmt.mantissa_bits) - 1:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * mantissa * fmt.smallest_step
    return sign * ((1 << fmt.mantissa_bits) + mantissa) * fmt.smallest_step * 2.0 ** (exponent - 1)


def _exponent(fmt: Format, value: float) -> int:
    """The exponent of the binade whose spacing holds at ``value``."""
    return max(math.frexp(value)[1] - 1, fmt.min_exponent) if value else fmt.min_exponent
