"""Dense storage of signed codes of 2, 4 or 8 bits along the last axis.

Shapes: ``d`` codes a row, ``p = ceil(d * bits / 8)`` bytes a row. A byte holds one code of each of the ``8 / bits``
equal *slices* of the row, not neighbours: slices are contiguous, so packing and unpacking are a few whole-array shifts.
"""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

__all__ = ["pack", "packed_size", "unpack"]


def packed_size(size: int, bits: int) -> int:
    """Bytes that a row of ``size`` codes takes.

    Example:
        >>> packed_size(7, 4), packed_size(8, 4), packed_size(8, 8)
        (4, 4, 8)
    """
    return -(-size * bits // 8)


def pack(codes: Any, bits: int) -> Any:
    """Pack signed codes.

    Args:
        codes: int8 array, shape (..., d), each value in the two's-complement range of ``bits`` bits.
        bits: 2, 4 or 8.

    Returns: int8 array, shape (..., p); bit patterns, whose sign means nothing.

    Example:
        >>> import numpy as np
        >>> codes = np.array([[-7, 7, 0, 3, -1]], dtype=np.int8)
        >>> bool((unpack(pack(codes, 4), 4, 5) == codes).all())
        True
    """
    if bits == 8:
        return codes
    xp = array_namespace(codes)
    num_slices = 8 // bits
    width = packed_size(codes.shape[-1], bits)
    missing = width * num_slices - codes.shape[-1]
    if missing:
        padding = xp.zeros((*codes.shape[:-1], missing), dtype=codes.dtype, device=codes.device)
        codes = xp.concat([codes, padding], axis=-1)
    mask = 2**bits - 1
    packed = codes[..., :width] & mask
    for i in range(1, num_slices):
        field = codes[..., i * width : (i + 1) * width]
        # The last slice needs no mask: its sign bits are shifted out.
        packed = packed | ((field if i == num_slices - 1 else field & mask) << (bits * i))
    return packed


def unpack(packed: Any, bits: int, size: int) -> Any:
    """Undo ``pack``.

    Args:
        packed: int8 array, shape (..., p).
        bits: The width it was packed with.
        size: ``d``, the number of codes of a row.

    Returns: int8 array, shape (..., d).
    """
    if bits == 8:
        return packed
    xp = array_namespace(packed)
    num_slices = 8 // bits
    # The arithmetic right shift restores the sign.
    fields = [(packed << (8 - bits * (i + 1))) >> (8 - bits) for i in range(num_slices)]
    codes = xp.concat(fields, axis=-1)
    return codes[..., :size] if codes.shape[-1] != size else codes
