"""Rounding torch tensors onto a grid in a few passes, most of them in place; the same bits as ``rounding``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trimtab.errors import ConfigError
from trimtab.formats.rounding import check_noise

if TYPE_CHECKING:
    from trimtab.formats.format import Format

__all__ = ["WORK", "round_values", "round_work"]

WORK = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}
"""The dtype that values of a dtype are computed in."""

# (integer of the same width, mantissa bits, exponent bias, mask of the exponent field)
_FIELDS = {
    torch.float32: (torch.int32, 23, 127, 0x7F80_0000),
    torch.float64: (torch.int64, 52, 1023, 0x7FF0_0000_0000_0000),
}

# Mantissa bits: a torch dtype with as many, and the exponent of its smallest normal number.
_CASTS = {3: (torch.float8_e4m3fn, -6), 2: (torch.float8_e5m2, -14)}


def round_values(fmt: Format, x: Tensor, noise: Tensor | None = None) -> Tensor:
    """``Format.round`` for torch; no gradient flows through it."""
    check_noise(x, noise)
    x = x.detach()
    work = work_of(x.dtype)
    rounded = round_work(fmt, x.to(work, copy=True), noise)
    # inf - inf is NaN and 0 is 0; subtracting, unlike adding, keeps a negative zero.
    return rounded.sub_(x - x).to(x.dtype)


def round_work(fmt: Format, y: Tensor, noise: Tensor | None = None) -> Tensor:
    """Round ``y``, which is overwritten; use what is returned.

    An infinity saturates here, a NaN stays: whoever calls has made the infinities visible in another way.

    Args:
        fmt: The format.
        y: float32 or float64 tensor, any shape.
        noise: None or a tensor of ``y``'s shape.
    """
    y.clamp_(-fmt.max_value, fmt.max_value)
    if fmt.layout == "integer":
        return _whole(y, noise)
    # On a GPU two casts are fewer kernels; on a CPU they are slower, and a compiler fuses the passes below anyway
    # (and cannot generate these casts for every GPU).
    if noise is None and y.is_cuda and has_cast(fmt, y.dtype) and not torch.compiler.is_compiling():
        return round_by_cast(fmt, y)
    integer, digits, bias, mask = _FIELDS[y.dtype]
    power = y.view(integer).bitwise_and(mask).clamp_(min=(fmt.min_exponent + bias) << digits)
    step = power.sub_(fmt.mantissa_bits << digits).view(y.dtype)
    return _whole(y.div_(step), noise).mul_(step)


def has_cast(fmt: Format, dtype: torch.dtype) -> bool:
    """Whether ``round_by_cast`` serves; not from float64, which torch may take through float32, rounding twice."""
    return fmt.layout == "float" and fmt.mantissa_bits in _CASTS and dtype == torch.float32


def round_by_cast(fmt: Format, y: Tensor) -> Tensor:
    """Round ``y``, within the range, to nearest through torch's own cast to a float8 with as many mantissa bits.

    The shift lays the format's smallest binade onto that of the float8, so that subnormals meet subnormals.
    """
    dtype, min_exponent = _CASTS[fmt.mantissa_bits]
    shift = min_exponent - fmt.min_exponent
    if shift == 0:
        return y.to(dtype).to(y.dtype)
    return y.mul_(2.0**shift).to(dtype).to(y.dtype).mul_(2.0**-shift)


def _whole(y: Tensor, noise: Tensor | None) -> Tensor:
    """Round to whole numbers, overwriting ``y``."""
    if noise is None:
        return y.round_()
    size = y.abs()
    whole = size.floor()
    return whole.add_(noise < size.sub_(whole)).copysign_(y)


def work_of(dtype: torch.dtype) -> torch.dtype:
    """``WORK`` of ``dtype``, or a ConfigError."""
    if dtype not in WORK:
        allowed = ", ".join(str(d)[6:] for d in WORK)
        raise ConfigError("dtype", str(dtype)[6:], f"a number format rounds {allowed}.", "Convert the tensor first.")
    return WORK[dtype]
