"""Codes of whole arrays: the bit patterns that name grid points, in any array-API library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from array_api_compat import array_namespace, device

from trimtab.formats.arrays import namespace_of
from trimtab.formats.rounding import binade, work_dtype
from trimtab.formats.scalar import encode_scalar

if TYPE_CHECKING:
    from trimtab.formats.format import Format

__all__ = ["decode", "encode_grid"]


def encode_grid(fmt: Format, rounded: Any) -> Any:
    """The codes of grid points and NaNs; see ``Format.encode``."""
    xp = array_namespace(rounded)
    rounded = xp.astype(rounded, work_dtype(rounded))
    is_nan = xp.isnan(rounded)
    zero = xp.zeros((), dtype=rounded.dtype, device=device(rounded))
    values = xp.where(is_nan, zero, rounded)
    if fmt.layout == "integer":
        return xp.astype(values, xp.int8)
    sizes = xp.abs(values)
    power, index = binade(sizes, fmt.min_exponent, fmt.max_exponent - fmt.min_exponent + 1)
    steps = xp.astype(sizes / (power * 2.0**-fmt.mantissa_bits), xp.int32)
    # A normal number's leading step count, 2**mantissa_bits, carries into the exponent field by itself.
    magnitude = (index << fmt.mantissa_bits) + steps
    signed = magnitude + (xp.astype(xp.signbit(values), xp.int32) << (fmt.bits - 1))
    nan_code = xp.full((), encode_scalar(fmt, float("nan")), dtype=xp.int32, device=device(rounded))
    return xp.astype(xp.where(is_nan, nan_code, signed), xp.uint8)


def decode(fmt: Format, codes: Any, dtype: Any = None) -> Any:
    """The numbers that codes name; see ``Format.decode``."""
    xp = namespace_of(codes)
    dtype = xp.float32 if dtype is None else dtype
    if fmt.layout == "integer":
        return xp.astype(codes, dtype)
    codes = xp.astype(codes, xp.int32)  # signed or not, masks and shifts now mean the same
    sign_bit = 1 << (fmt.bits - 1)
    magnitude = codes & (sign_bit - 1)
    exponent = magnitude >> fmt.mantissa_bits
    # Subnormals, exponent field 0, share the scale of field 1 and lack its leading one.
    index = xp.where(exponent > 0, exponent - 1, exponent)
    steps = magnitude - (index << fmt.mantissa_bits)
    one = xp.ones((), dtype=xp.int32, device=device(codes))
    values = xp.astype(steps, xp.float32) * (xp.astype(one << index, xp.float32) * fmt.smallest_step)
    top = (sign_bit >> fmt.mantissa_bits) - 1
    if fmt.specials == "ieee":
        infinity = xp.full((), float("inf"), dtype=xp.float32, device=device(codes))
        values = xp.where(exponent == top, infinity, values)
    if fmt.specials != "none":
        largest_number = sign_bit - 2 if fmt.specials == "nan" else top << fmt.mantissa_bits
        nan = xp.full((), float("nan"), dtype=xp.float32, device=device(codes))
        values = xp.where(magnitude > largest_number, nan, values)
    return xp.astype(xp.where((codes & sign_bit) != 0, -values, values), dtype)
