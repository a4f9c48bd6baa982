"""The slow truth of scaled quantization: one block, one number at a time, to be read rather than to be fast."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from trimtab.formats.format import Format
from trimtab.formats.granularity import Granularity
from trimtab.formats.scalar import round_scalar
from trimtab.formats.scaling import ScaleKind

__all__ = ["fake_quantize_slowly", "scale_of_block"]


def fake_quantize_slowly(
    x: Any, fmt: Format, granularity: Granularity, scale_kind: ScaleKind = "float32", noise: Any = None
) -> tuple[Any, Any]:
    """``fake_quantize`` of a NumPy array in the work dtype, and the scales.

    Args:
        x: float32 or float64 NumPy array, any shape.
        fmt: The format.
        granularity: Which entries share a scale.
        scale_kind: How a scale is made.
        noise: None or an array of ``x``'s shape.

    Returns: ``(values, scales)``: of ``x``'s shape and dtype, and float32 of ``granularity.scale_shape(x.shape)``.
    """
    matrices = x.reshape((1, 1, x.size) if granularity.rows is None else _as_matrices(x.shape))
    noises = None if noise is None else noise.reshape(matrices.shape)
    num_matrices, num_rows, num_columns = matrices.shape
    rows, columns = granularity.rows or 1, granularity.columns or max(num_columns, 1)
    values, scales = matrices.copy(), []
    for m in range(num_matrices):
        for top in range(0, num_rows, rows):
            for left in range(0, max(num_columns, 1), columns):
                block = np.s_[m, top : top + rows, left : left + columns]
                scale = scale_of_block(matrices[block].ravel().tolist(), fmt, scale_kind)
                scales.append(scale)
                for i, j in np.ndindex(matrices[block].shape):
                    with np.errstate(invalid="ignore"):
                        scaled = float(matrices[block][i, j] / x.dtype.type(scale))
                    code = round_scalar(fmt, scaled, None if noises is None else float(noises[block][i, j]))
                    values[block][i, j] = x.dtype.type(code) * x.dtype.type(scale)
    shape = granularity.scale_shape(x.shape)
    return values.reshape(x.shape), np.array(scales, dtype=np.float32).reshape(shape)


def scale_of_block(block: list[float], fmt: Format, scale_kind: ScaleKind) -> Any:
    """The scale of one block; a NaN when one of its numbers is not finite or is beyond float32."""
    limit = float(np.finfo(np.float32).max)
    if any(math.isnan(v) or abs(v) > limit for v in block):
        return np.float32(math.nan)
    amax = max((abs(v) for v in block), default=0.0)
    if scale_kind == "e8m0":
        exponent = math.frexp(amax)[1] - 1 - fmt.max_exponent if amax else -127
        return np.float32(2.0 ** max(-127, min(127, exponent)))
    # Twice rounded (float64, float32) is once rounded: 53 bits are more than 2 * 24 + 1.
    scale = max(np.float32(amax / fmt.max_value), np.finfo(np.float32).smallest_normal)
    while float(scale) * fmt.max_value > limit:
        scale = np.nextafter(scale, np.float32(0))
    return scale


def _as_matrices(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The shape of an array seen as a list of matrices."""
    *leading, num_rows, num_columns = (1, *shape) if len(shape) == 1 else (shape or (1, 1))
    return math.prod(leading), num_rows, num_columns
