"""The stored copy of an activation: per-token symmetric codes of 2, 4 or 8 bits, really packed, and one scale a token.

Shapes: ``x`` (..., d); ``packed`` int8 (..., p) with p = ceil(d * bits / 8); ``scale`` float32 (..., 1).
A *scale* multiplies: ``x ~ codes * scale``.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from trimtab.formats import QuantizationStats, get, pack, packed_size, unpack
from trimtab.formats.fake_quantization import stats_of
from trimtab.formats.sampling import num_rows, rows_of, spread_rows

__all__ = ["decode", "encode", "encode_with_stats", "stored_bytes_per_token"]


def encode(x: Tensor, bits: int, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize each token (row) of ``x`` by its largest magnitude and pack the codes.

    A row of zeros stays exactly zero; a row that holds a NaN, an infinity or more than float32 holds comes back as NaN.

    Args:
        x: Floating tensor, shape (..., d).
        bits: 2, 4 or 8.
        noise: None for rounding to nearest (ties to even), or uniform numbers in [0, 1) of ``x``'s shape for
            stochastic rounding.

    Returns: ``(packed, scale)``.

    Example:
        >>> x = torch.tensor([[0.0, 0.0], [7.0, -3.0]])
        >>> bool((decode(*encode(x, 4), bits=4, size=2, dtype=x.dtype) == x).all())
        True
    """
    codes, scale, _ = _codes(x, bits, noise)
    return pack(codes.to(torch.int8), bits), scale


def encode_with_stats(
    x: Tensor, bits: int, noise: Tensor | None = None, most_tokens: int | None = None
) -> tuple[Tensor, Tensor, QuantizationStats]:
    """``encode``, and what it did to ``x``; a function of its own, so that who does not ask pays nothing.

    Args:
        x: As for ``encode``.
        bits: As for ``encode``.
        noise: As for ``encode``.
        most_tokens: As for ``trimtab.formats.fake_quantize_with_stats``.

    Returns: ``(packed, scale, stats)``. Nothing saturates, since the largest entry of a row meets the largest code.

    Example:
        >>> _, _, stats = encode_with_stats(torch.tensor([[70.0, 1.0]]), 4)
        >>> stats.amax.item(), stats.flushed_share.item(), stats.channel_error.item()
        (70.0, 0.5, 0.5)
    """
    codes, scale, amax = _codes(x, bits, noise)
    packed = pack(codes.to(torch.int8), bits)  # first: all codes are in the cache now
    rows = spread_rows(num_rows(x), most_tokens, x.device)
    values = rows_of(codes, rows).mul_(rows_of(scale, rows))
    stats = stats_of(rows_of(x.detach(), rows), values, amax.amax() if amax.numel() else amax.new_zeros(()))
    return packed, scale, stats


def _codes(x: Tensor, bits: int, noise: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """``(codes, scale, amax)``, all float32; codes of a row that is not finite are anything."""
    limit = get(f"int{bits}").max_value
    x = x.float()
    amax = x.abs().amax(dim=-1, keepdim=True) if x.shape[-1] else x.new_zeros((*x.shape[:-1], 1))
    # An infinite scale would leave it to the device which codes, and so whether NaN, come back. Selected, and not made
    # by arithmetic such as 0 * inf, which a compiler may fold away; NaN is not below infinity either.
    scale = torch.where(amax < torch.inf, (amax / limit).clamp_(max=_largest_scale(limit)), torch.nan)
    # A scale of zero (a row of zeros, or one so small that amax/limit underflows) must give codes of zero, not 0/0.
    codes = x / torch.where(scale == 0, torch.ones_like(scale), scale)
    if noise is None:
        codes.round_()
    else:
        whole = codes.floor()
        # Compared, not added: floor(codes + noise) would move codes that are whole, because that sum is rounded.
        codes = whole.add_(noise >= 1 - codes.sub_(whole))
    return codes.clamp_(-limit, limit), scale, amax


@cache
def _largest_scale(limit: int) -> float:
    """The largest float32 whose product with ``limit`` does not overflow."""
    largest = torch.finfo(torch.float32).max
    scale = np.float32(largest / limit)
    return float(scale if float(scale) * limit <= largest else np.nextafter(scale, np.float32(0)))


def decode(packed: Tensor, scale: Tensor, *, bits: int, size: int, dtype: torch.dtype) -> Tensor:
    """Undo ``encode`` up to rounding.

    Args:
        packed: Codes as ``encode`` gave them.
        scale: Scales as ``encode`` gave them.
        bits: The width they were stored in.
        size: ``d``.
        dtype: Dtype of the result.

    Returns: Tensor of shape (..., d).
    """
    return unpack(packed, bits, size).to(scale.dtype).mul_(scale).to(dtype)


def stored_bytes_per_token(size: int, bits: int, element_bytes: int) -> int:
    """Bytes that one token's copy takes: its codes and its float32 scale, or the plain row when ``bits`` is 16.

    Example:
        >>> stored_bytes_per_token(128, 4, 2), stored_bytes_per_token(128, 16, 2)
        (68, 256)
    """
    return size * element_bytes if bits == 16 else packed_size(size, bits) + 4
