"""Quantize and dequantize in one go: what a low-precision GEMM multiplies, as numbers in the tensor's own dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab.errors import ConfigError
from trimtab.formats.format import Format
from trimtab.formats.granularity import BLOCK_AXES, Granularity
from trimtab.formats.rounding import check_noise
from trimtab.formats.sampling import num_rows, rows_of, spread_rows
from trimtab.formats.scaling import FLOAT32_MAX, ScaleKind, dequantize, quantize, scale_bounds
from trimtab.formats.torch_rounding import round_work, work_of

__all__ = ["QuantizationStats", "channel_error", "fake_quantize", "fake_quantize_with_stats"]


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationStats:
    """What quantization did to a tensor, as tensors of no dimension on its device; reading them is up to the caller.

    Args:
        amax: Largest magnitude; NaN or infinite when an entry was.
        flushed_share: Share of the non-zero entries that became zero. 0 when there are none.
        saturated_share: Share of the non-zero entries that lay more than half a step beyond the largest value, so that
            saturating, not rounding, made their error. Entries of a NaN block do not count.
        channel_error: See ``channel_error``.
    """

    amax: Tensor
    flushed_share: Tensor
    saturated_share: Tensor
    channel_error: Tensor


def fake_quantize(
    x: Any, fmt: Format, granularity: Granularity, scale_kind: ScaleKind = "float32", noise: Any = None
) -> Any:
    """``dequantize(quantize(...), x.dtype)`` without the codes; fast for torch.

    The values are the same to the last bit, but that torch keeps the sign of a zero, which integer codes cannot.
    For torch it reads nothing back to the host, has no data-dependent shape or branch, and compiles into one graph.
    No gradient flows through it.

    Args:
        x: float16, bfloat16, float32 or float64 array of any array-API library, any shape.
        fmt: Format whose grid the scaled entries are rounded to.
        granularity: Which entries share a scale.
        scale_kind: How a scale is made.
        noise: None for rounding to nearest, or numbers uniform on [0, 1) of ``x``'s shape.

    Returns: An array of ``x``'s shape and dtype. Blocks that held a NaN or an infinity are NaN.
    Raises: ConfigError: as ``quantize``.

    Example:
        >>> from trimtab.formats import get, per_token
        >>> x = torch.tensor([[0.0, 0.0], [14.0, -3.0]], dtype=torch.bfloat16)
        >>> fake_quantize(x, get("int4"), per_token()).tolist()
        [[0.0, 0.0], [14.0, -4.0]]
    """
    if not isinstance(x, Tensor):
        return dequantize(quantize(x, fmt, granularity, scale_kind, noise), x.dtype)
    scaled, scale, _ = _scaled(x, fmt, granularity, scale_kind)
    return _back(scaled, scale, x, fmt, granularity, noise)


def fake_quantize_with_stats(
    x: Tensor,
    fmt: Format,
    granularity: Granularity,
    scale_kind: ScaleKind = "float32",
    noise: Tensor | None = None,
    most_tokens: int | None = None,
) -> tuple[Tensor, QuantizationStats]:
    """``fake_quantize`` of a torch tensor, and what it did to it.

    A function of its own, so that who does not ask pays nothing. ``amax`` is taken from the blocks' own, and costs
    nothing; that nothing saturates under scales of float32 is known beforehand.

    Args:
        x: As for ``fake_quantize``.
        fmt: The format.
        granularity: Which entries share a scale.
        scale_kind: How a scale is made.
        noise: As for ``fake_quantize``.
        most_tokens: Estimate the shares and the channel error from this many tokens (rows), spread over all; None
            reads all. ``amax`` is that of all tokens in any case.

    Returns: ``(values, stats)``.
    Raises: ConfigError: as ``quantize``; and when ``x`` is no torch tensor, or ``most_tokens`` below 1.

    Example:
        >>> from trimtab.formats import get, per_tensor
        >>> x = torch.tensor([7.9, 1.0, 0.1, 0.0])
        >>> values, stats = fake_quantize_with_stats(x, get("e2m1"), per_tensor(), "e8m0")
        >>> values.tolist(), f"{stats.flushed_share.item():.2f} {stats.saturated_share.item():.2f}"
        ([6.0, 1.0, 0.0, 0.0], '0.33 0.33')
    """
    if not isinstance(x, Tensor):
        raise ConfigError("x", x, "statistics are taken of torch tensors.", "Convert it with torch.as_tensor.")
    rows = spread_rows(num_rows(x), most_tokens, x.device)
    scaled, scale, amax = _scaled(x, fmt, granularity, scale_kind)
    num_saturated = None
    if scale_kind == "e8m0":
        half_a_step = 2.0 ** (fmt.max_exponent - fmt.mantissa_bits - 1)
        # Of a copy, as rounding overwrites what it rounds.
        sizes = rows_of(granularity.join(scaled, tuple(x.shape)), rows).abs()
        num_saturated = sizes.gt_(fmt.max_value + half_a_step).sum()
    values = _back(scaled, scale, x, fmt, granularity, noise)
    largest = amax.amax() if amax.numel() else amax.new_zeros(())
    return values, stats_of(rows_of(x.detach(), rows), rows_of(values, rows), largest, num_saturated)


def stats_of(x: Tensor, quantized: Tensor, amax: Tensor, num_saturated: Tensor | None = None) -> QuantizationStats:
    """The statistics of a quantization from some of its rows.

    Args:
        x: Shape (rows, channels).
        quantized: The same rows after quantization.
        amax: Largest magnitude of all rows.
        num_saturated: How many entries of ``x`` saturated; None is none.
    """
    x, difference = _scaled_and_difference(x, quantized, amax)
    # Counted as ones of a float, because adding up booleans takes several times as long, as count_nonzero does.
    ones = torch.empty_like(x)
    num_zero = torch.eq(x, 0, out=ones).sum()
    num_now_zero = torch.eq(x, difference, out=ones).sum()
    num_nonzero = (x.numel() - num_zero).clamp_(min=1)
    return QuantizationStats(
        amax=amax,
        flushed_share=(num_now_zero - num_zero) / num_nonzero,
        saturated_share=amax.new_zeros(()) if num_saturated is None else num_saturated / num_nonzero,
        channel_error=_error_of(x, difference),
    )


def channel_error(x: Tensor, quantized: Tensor) -> Tensor:
    """The mean over channels of ``|x_c - q(x)_c| / |x_c|``, each norm taken over all tokens.

    The relative error of the whole tensor would not do: with outlier channels it falls, while every other channel
    flushes to zero.

    Args:
        x: Shape (..., channels).
        quantized: The same, after quantization.

    Returns: No dimension, float32 (float64 for float64 input). Channels of zeros are left out; 0 when all are. Not
        finite when ``x`` is not.

    Example:
        >>> x = torch.tensor([[100.0, 1.0], [100.0, -1.0]])
        >>> channel_error(x, torch.tensor([[100.0, 0.0], [100.0, 0.0]])).item()
        0.5
    """
    x, quantized = (rows_of(t.detach(), None) for t in (x, quantized))
    if not x.numel():
        return x.new_zeros((), dtype=work_of(x.dtype))
    lowest, highest = torch.aminmax(x)
    return _error_of(*_scaled_and_difference(x, quantized, torch.maximum(highest, -lowest)))


def _scaled_and_difference(x: Tensor, quantized: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """``(x, x - quantized)``, new, times a factor that keeps sums of squares within the range.

    A power of two: it rounds nothing, so that what is equal differs by zero. Entries down to ``amax * 2**-113`` have
    squares.
    """
    work = work_of(x.dtype)
    factor = 2.0**50 / _power_of_two_below(amax.to(work)).clamp_(min=2.0**-77)
    x = x.to(work) * factor
    return x, torch.addcmul(x, quantized.to(work), factor, value=-1)


def _error_of(x: Tensor, difference: Tensor) -> Tensor:
    """The channel error from matrices (tokens, channels), which are overwritten."""
    # Sums of squares, as they take a fraction of the time of norms.
    size, error = (t.square_().sum(0) for t in (x, difference))
    total: Tensor = torch.where(size == 0, 0.0, error / size).sqrt_().sum()
    return total / size.ne_(0).sum().clamp_(min=1)


def _scaled(x: Tensor, fmt: Format, granularity: Granularity, scale_kind: ScaleKind) -> tuple[Tensor, Tensor, Tensor]:
    """``(scaled, scale, amax)``, all in the blocked view; ``scaled`` is new, in the work dtype."""
    work = work_of(x.dtype)
    lowest, highest = scale_bounds(fmt, scale_kind)
    # A CPU is slow at reductions in half precision, a GPU at the copy that avoids them.
    blocks = granularity.split(x.detach().to(work) if x.device.type == "cpu" else x.detach())
    # Two reductions read x twice; abs() first would read it once, but write and read a copy.
    amax = torch.maximum(_reduced(blocks, torch.amax), -_reduced(blocks, torch.amin)).to(work)
    scale = amax / fmt.max_value if scale_kind == "float32" else _power_of_two_below(amax) * 2.0**-fmt.max_exponent
    # Selected, not computed as 0 * inf: a compiler may take a product with zero for zero.
    scale = torch.where(amax <= FLOAT32_MAX, scale.clamp_(lowest, highest).float(), math.nan)
    return blocks / scale, scale, amax


def _back(
    scaled: Tensor, scale: Tensor, x: Tensor, fmt: Format, granularity: Granularity, noise: Tensor | None
) -> Tensor:
    """Round ``scaled``, which is overwritten, and undo the scale, the blocked view and the dtype."""
    check_noise(x, noise)
    noise = None if noise is None else granularity.split(noise)
    values: Tensor = granularity.join(round_work(fmt, scaled, noise).mul_(scale), tuple(x.shape))
    return values.to(x.dtype)


def _reduced(blocks: Tensor, reduction: Callable[..., Tensor]) -> Tensor:
    """Reduce each block, first along its rows: that is contiguous, and leaves little for the second axis."""
    for axis in reversed(BLOCK_AXES):
        blocks = reduction(blocks, axis, keepdim=True)
    return blocks


def _power_of_two_below(amax: Tensor) -> Tensor:
    """2**floor(log2(amax)) by masking the exponent field; 0 for zeros and subnormals."""
    integer, mask = (torch.int64, 0x7FF0_0000_0000_0000) if amax.dtype == torch.float64 else (torch.int32, 0x7F80_0000)
    return amax.view(integer).bitwise_and(mask).view(amax.dtype)
