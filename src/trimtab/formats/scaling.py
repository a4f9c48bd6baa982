"""Scales and scaled quantization, in any array-API library.

A *scale* multiplies: ``x ~ decode(codes) * scale``. One scale serves one block (see ``granularity``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from array_api_compat import array_namespace, device

from trimtab.errors import ConfigError
from trimtab.formats.arrays import namespace_of
from trimtab.formats.format import Format
from trimtab.formats.granularity import BLOCK_AXES, Granularity
from trimtab.formats.rounding import binade, check_noise, work_dtype

__all__ = ["FLOAT32_MAX", "Quantized", "ScaleKind", "dequantize", "quantize", "scale_bounds", "scales_of"]

FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127

ScaleKind = Literal["float32", "e8m0"]
"""How a scale is made of a block's largest magnitude ``amax``.

``"float32"``: amax / max_value of the format, so that the largest entry meets the largest value.
``"e8m0"``: the power of two with exponent floor(log2(amax)) - max_exponent of the format, within [-127, 127].

Source: OCP Microscaling Formats (MX) v1.0, section 6.3. By that rule entries whose scaled magnitude lies between
    max_value and 2**(max_exponent + 1) saturate. An integer format's grid is that of whole numbers, so the factor 2**-6
    that MXINT8 implies is part of the scale here.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantized:
    """An array as codes and scales.

    Args:
        codes: int8 or uint8, the shape of the array; ``pack(codes, fmt.bits)`` stores them densely.
        scale: float32, shape ``granularity.scale_shape(codes.shape)``. NaN where a block held a value that is not
            finite or is beyond float32.
        fmt: The format of the codes.
        granularity: Which codes share a scale.
    """

    codes: Any
    scale: Any
    fmt: Format
    granularity: Granularity


def quantize(
    x: Any, fmt: Format, granularity: Granularity, scale_kind: ScaleKind = "float32", noise: Any = None
) -> Quantized:
    """Quantize an array to codes and one scale a block.

    A block of zeros stays exactly zero. A NaN, an infinity, or more than float32 holds makes its whole block NaN, by
    its scale. Entries are divided by the scale in float32 (float64 for float64 input) and rounded once.

    Args:
        x: float16, bfloat16, float32 or float64 array of any array-API library, any shape.
        fmt: Format of the codes.
        granularity: Which entries share a scale.
        scale_kind: How a scale is made.
        noise: None for rounding to nearest, or numbers uniform on [0, 1) of ``x``'s shape.

    Raises: ConfigError: when a dtype, ``scale_kind`` or the shape of ``noise`` is none of the allowed.

    Example:
        >>> import numpy as np
        >>> from trimtab.formats import get, per_token
        >>> x = np.array([[0.0, 0.0], [14.0, -3.0]], dtype=np.float32)
        >>> quantize(x, get("int4"), per_token()).codes.tolist()
        [[0, 0], [7, -2]]
    """
    xp = namespace_of(x)
    check_noise(x, noise)
    blocks = granularity.split(xp.astype(x, work_dtype(x)))
    scale = scales_of(xp.max(xp.abs(blocks), axis=BLOCK_AXES, keepdims=True), fmt, scale_kind)
    scaled = granularity.join(blocks / xp.astype(scale, blocks.dtype), x.shape)
    return Quantized(
        codes=fmt.encode(scaled, noise),
        scale=xp.reshape(scale, granularity.scale_shape(x.shape)),
        fmt=fmt,
        granularity=granularity,
    )


def dequantize(quantized: Quantized, dtype: Any = None) -> Any:
    """The values that codes and scales stand for.

    Args:
        quantized: As ``quantize`` gave it.
        dtype: A floating dtype of the library; float32 when None. Rounding to it is the last step.

    Returns: An array of the codes' shape.

    Example:
        >>> import numpy as np
        >>> from trimtab.formats import get, per_group
        >>> x = np.array([6.0, -3.0, 0.5, 448.0, 0.0], dtype=np.float32)
        >>> bool((dequantize(quantize(x, get("e2m1"), per_group(3), "e8m0")) == [6, -3, 0.5, 384, 0]).all())
        True
    """
    xp = array_namespace(quantized.codes)
    dtype = xp.float32 if dtype is None else dtype
    shape = quantized.codes.shape
    work = xp.float64 if dtype == xp.float64 else xp.float32
    blocks = quantized.granularity.split(quantized.fmt.decode(quantized.codes, work))
    scale = xp.astype(quantized.scale, blocks.dtype)[..., :, None, :, None]
    return xp.astype(quantized.granularity.join(blocks * scale, shape), dtype)


def scales_of(amax: Any, fmt: Format, scale_kind: ScaleKind) -> Any:
    """The scale of each block of largest magnitude ``amax``.

    A scale is never zero or subnormal, but for the smallest of E8M0, 2**-127: a block of zeros, and one whose scale
    would be smaller, takes the smallest, so that nothing is divided by zero. A scale is never so large that its product
    with the format's largest value overflows.

    Args:
        amax: float32 or float64 array, any shape; a magnitude beyond float32 counts as infinite.
        fmt: The format.
        scale_kind: How a scale is made.

    Returns: float32 array of the same shape; NaN where ``amax`` is not finite.
    Raises: ConfigError: when ``scale_kind`` is unknown.
    """
    xp = array_namespace(amax)
    lowest, highest = scale_bounds(fmt, scale_kind)
    if scale_kind == "float32":
        scale = xp.clip(amax / fmt.max_value, lowest, highest)
    else:
        # In float64 neither 2**128 nor the shift by the format's exponent leaves the range.
        shifted = xp.clip(xp.astype(amax, xp.float64) * 2.0**-fmt.max_exponent, lowest, highest)
        scale, _ = binade(shifted, -127, 255)
    nan = xp.full((), float("nan"), dtype=xp.float32, device=device(amax))
    return xp.where(amax <= FLOAT32_MAX, xp.astype(scale, xp.float32), nan)


def encode_e8m0(scale: Any) -> Any:
    """The E8M0 codes of power-of-two scales: exponent + 127, and 255 for NaN.

    Args:
        scale: float32 scales of kind ``"e8m0"``, any shape.

    Returns: uint8 array of the same shape.
    """
    xp = array_namespace(scale)
    _, exponent = binade(xp.astype(scale, xp.float64), -127, 255)
    nan_code = xp.full((), 255, dtype=xp.int32, device=device(scale))
    return xp.astype(xp.where(xp.isnan(scale), nan_code, exponent), xp.uint8)


def scale_bounds(fmt: Format, scale_kind: ScaleKind) -> tuple[float, float]:
    """The smallest and the largest scale.

    Raises: ConfigError: when ``scale_kind`` is unknown.
    """
    if scale_kind == "e8m0":
        return 2.0**-127, 2.0**127
    if scale_kind != "float32":
        raise ConfigError("scale_kind", scale_kind, "a scale is 'float32' or 'e8m0'.", "Use 'float32'.")
    # From the smallest normal number, below which a scale would lose bits, to the largest float32 whose product with
    # the format's largest value is one.
    fraction, exponent = math.frexp(FLOAT32_MAX / fmt.max_value)
    return 2.0**-126, math.floor(fraction * 2.0**24) * 2.0 ** (exponent - 24)
