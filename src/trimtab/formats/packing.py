"""Dense storage of codes of 2, 4, 6 or 8 bits along the last axis.

Shapes: ``d`` codes a row, ``p = ceil(d * bits / 8)`` bytes a row. A byte holds codes of different *slices* of the row,
not neighbours: slices are contiguous, so packing and unpacking are a few whole-array shifts.
"""

from __future__ import annotations

from typing import Any

from trimtab.errors import ConfigError
from trimtab.formats.arrays import library_of, padded

__all__ = ["pack", "packed_size", "unpack"]

WIDTHS = (2, 4, 6, 8)


def packed_size(size: int, bits: int) -> int:
    """Bytes that a row of ``size`` codes takes.

    Example:
        >>> packed_size(7, 4), packed_size(8, 4), packed_size(8, 6), packed_size(8, 8)
        (4, 4, 6, 8)
    """
    return -(-size * bits // 8)


def pack(codes: Any, bits: int) -> Any:
    """Pack codes; bits of a code above the lowest ``bits`` are ignored.

    2 and 4 bits: byte ``i`` holds code ``i`` of each of the ``8 / bits`` equal slices, the first slice in the lowest
    bits. 6 bits: the first ``p`` codes take the low six bits of one byte each, and the two bits above them hold the
    last ``d // 4`` codes, two bits of each in every third of the bytes.

    Args:
        codes: int8 (signed) or uint8 (unsigned) array, shape (..., d).
        bits: 2, 4, 6 or 8.

    Returns: Array of the codes' dtype, shape (..., p); bit patterns, whose sign means nothing.
    Raises: ConfigError: when ``bits`` is another number, or ``codes`` have no axis.

    Example:
        >>> import numpy as np
        >>> codes = np.array([[-7, 7, 0, 3, -1]], dtype=np.int8)
        >>> all((unpack(pack(codes, bits), bits, 5) == codes).all() for bits in (4, 6, 8))
        True
    """
    _check(bits, "codes", codes)
    if bits == 8:
        return codes
    if bits == 6:
        return _pack6(codes)
    num_slices = 8 // bits
    width = packed_size(codes.shape[-1], bits)
    codes = padded(codes, -1, width * num_slices)
    mask = 2**bits - 1
    packed = codes[..., :width] & mask
    for i in range(1, num_slices):
        field = codes[..., i * width : (i + 1) * width]
        # The last slice needs no mask: its upper bits are shifted out.
        packed |= (field if i == num_slices - 1 else field & mask) << (bits * i)
    return packed


def unpack(packed: Any, bits: int, size: int) -> Any:
    """Undo ``pack``.

    Args:
        packed: int8 array, shape (..., p), whose codes come back signed, or uint8, whose codes come back unsigned.
        bits: The width it was packed with.
        size: ``d``, the number of codes of a row.

    Returns: Array of the same dtype, shape (..., d).
    Raises: ConfigError: when ``bits`` is none of 2, 4, 6 and 8, or ``packed`` has no axis.
    """
    _check(bits, "packed", packed)
    if bits == 8:
        return packed
    xp = library_of(packed)
    if bits == 6:
        num_high = size // 4
        high = packed[..., : 3 * num_high] >> 6 & 3
        last = high[..., :num_high] | high[..., num_high : 2 * num_high] << 2 | high[..., 2 * num_high :] << 4
        codes = xp.concat([packed, last], axis=-1)
        codes <<= 2
        codes >>= 2
        return codes
    num_slices = 8 // bits
    mask, sign_bit = 2**bits - 1, 2 ** (bits - 1)
    fields = []
    for i in range(num_slices - 1):
        field = (packed >> (bits * i) if i else packed) & mask
        if packed.dtype == xp.int8:
            # The sign without another pair of shifts, which are slower.
            field ^= sign_bit
            field -= sign_bit
        fields.append(field)
    # The right shift of a signed byte brings copies of the sign, that of an unsigned one zeros.
    codes = xp.concat([*fields, packed >> (8 - bits)], axis=-1)
    return codes[..., :size] if codes.shape[-1] != size else codes


def _pack6(codes: Any) -> Any:
    """``pack`` for 6 bits."""
    xp = library_of(codes)
    num_high = codes.shape[-1] // 4
    width = codes.shape[-1] - num_high
    last = codes[..., width:]
    high = xp.concat([last >> (2 * i) << 6 for i in range(3)], axis=-1)
    return codes[..., :width] & 63 | padded(high, -1, width)


def _check(bits: int, setting: str, array: Any) -> None:
    """Refuse a width that has no layout, and what has no last axis."""
    if bits not in WIDTHS:
        raise ConfigError("bits", bits, "codes are packed in 2, 4, 6 or 8 bits.", "Use the format's own bits.")
    if not getattr(array, "shape", ()):
        allowed = "codes are packed along the last axis of an array, and this has none."
        raise ConfigError(setting, array, allowed, "Pass an int8 or uint8 array of one or more axes.")
