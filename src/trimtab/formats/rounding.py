"""Rounding whole arrays onto a grid, in any array-API library.

The standard has no access to a float's bits, so the binade of a value is found by comparisons with powers of two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from array_api_compat import array_namespace, device

from trimtab.errors import ConfigError
from trimtab.formats.arrays import namespace_of

if TYPE_CHECKING:
    from trimtab.formats.format import Format

__all__ = ["binade", "check_noise", "round_values", "work_dtype"]

# Widening is exact, so that rounding in the wider type is still one rounding of the input.
_WORK = {"float16": "float32", "bfloat16": "float32", "float32": "float32", "float64": "float64"}


def round_values(fmt: Format, array: Any, noise: Any = None) -> Any:
    """``Format.round`` for any array-API library."""
    xp = namespace_of(array)
    check_noise(array, noise)
    work = work_dtype(array)
    exact = xp.astype(array, work)
    is_finite = xp.isfinite(exact)
    nan, zero = (xp.full((), v, dtype=work, device=device(array)) for v in (float("nan"), 0.0))
    # Zeros in place of NaNs, because NumPy warns about arithmetic with a signalling one.
    clipped = xp.clip(xp.where(is_finite, exact, zero), -fmt.max_value, fmt.max_value)
    power, _ = binade(xp.abs(clipped), fmt.min_exponent, fmt.max_exponent - fmt.min_exponent + 1)
    step = power * 2.0**-fmt.mantissa_bits
    steps = clipped / step
    if noise is None:
        whole = xp.round(steps)
    else:
        # Comparing keeps grid points fixed; floor(steps + noise) would not, because that sum is rounded.
        size = xp.abs(steps)
        whole = xp.floor(size)
        up = xp.astype(noise, work_dtype(noise)) < size - whole
        whole = xp.copysign(whole + xp.astype(up, work), steps)
    return xp.astype(xp.where(is_finite, whole * step, nan), array.dtype)


def binade(sizes: Any, min_exponent: int, num_binades: int) -> tuple[Any, Any]:
    """The binade that each size lies in, the first one holding all that is smaller.

    Args:
        sizes: Non-negative float32 or float64 array, any shape, below 2**(min_exponent + num_binades). A NaN counts as
            small.
        min_exponent: Exponent of the first binade.
        num_binades: How many there are, >= 1.

    Returns: ``(power, index)``: the power of two at which the binade begins, in ``sizes``' dtype, and the number of
        the binade from 0, int32.
    """
    xp = array_namespace(sizes)
    power = xp.full(sizes.shape, 2.0**min_exponent, dtype=sizes.dtype, device=device(sizes))
    index = xp.zeros(sizes.shape, dtype=xp.int32, device=device(sizes))
    for bit in reversed(range((num_binades - 1).bit_length())):
        higher = power * 2.0 ** (1 << bit)
        is_higher = sizes >= higher
        power = xp.where(is_higher, higher, power)
        index = index + (xp.astype(is_higher, xp.int32) << bit)
    return power, index


def work_dtype(array: Any) -> Any:
    """The dtype of ``array``'s library that its values are computed in: float64 for float64, else float32.

    Raises: ConfigError: when ``array`` is of none of the four floating dtypes.
    """
    name = str(array.dtype).rpartition(".")[2]
    if not getattr(array.dtype, "isnative", True):
        allowed = f"a number format rounds {', '.join(_WORK)} in the machine's native byte order."
        raise ConfigError("dtype", name, allowed, "Convert it: array.astype(array.dtype.newbyteorder('=')).")
    if name not in _WORK:
        raise ConfigError("dtype", name, f"a number format rounds {', '.join(_WORK)}.", "Convert the array first.")
    return getattr(array_namespace(array), _WORK[name])


def check_noise(array: Any, noise: Any) -> None:
    """Refuse noise that would be broadcast: entries that share their noise are no longer independent."""
    shape = getattr(noise, "shape", None)
    if noise is not None and (shape is None or tuple(shape) != tuple(array.shape)):
        wanted = tuple(array.shape)
        raise ConfigError(
            "noise.shape",
            None if shape is None else tuple(shape),
            f"noise has the array's shape, here {wanted}.",
            "Draw one number per entry.",
        )
