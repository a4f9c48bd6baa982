"""Quantize and dequantize in one go: what a low-precision GEMM multiplies, as numbers in the tensor's own dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab.formats.format import Format
from trimtab.formats.granularity import BLOCK_AXES, Granularity
from trimtab.formats.rounding import check_noise
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
        most_tokens: Estimate the flushed share and the channel error from this many tokens (rows), or a few more,
            evenly spaced; None reads all.

    Returns: ``(values, stats)``.

    Example:
        >>> from trimtab.formats import get, per_tensor
        >>> x = torch.tensor([7.9, 1.0, 0.1, 0.0])
        >>> values, stats = fake_quantize_with_stats(x, get("e2m1"), per_tensor(), "e8m0")
        >>> values.tolist(), f"{stats.flushed_share.item():.2f} {stats.saturated_share.item():.2f}"
        ([6.0, 1.0, 0.0, 0.0], '0.33 0.33')
    """
    scaled, scale, amax = _scaled(x, fmt, granularity, scale_kind)
    saturated_share = amax.new_zeros(())
    if scale_kind == "e8m0":
        half_a_step = 2.0 ** (fmt.max_exponent - fmt.mantissa_bits - 1)
        num_saturated = torch.count_nonzero(scaled.abs() > fmt.max_value + half_a_step)
        saturated_share = num_saturated / torch.count_nonzero(x.detach()).clamp(min=1)
    values = _back(scaled, scale, x, fmt, granularity, noise)
    some, some_values = evenly_spaced(x.detach(), most_tokens), evenly_spaced(values, most_tokens)
    stats = QuantizationStats(
        amax=amax.amax() if amax.numel() else amax.new_zeros(()),
        flushed_share=flushed_share(some, some_values),
        saturated_share=saturated_share,
        channel_error=channel_error(some, some_values),
    )
    return values, stats


def evenly_spaced(x: Tensor, most_tokens: int | None) -> Tensor:
    """``most_tokens`` of the rows of ``x``, or up to twice as many, as a view of two dimensions; None is all."""
    x = x.reshape(-1, x.shape[-1] if x.dim() else 1)
    return x if most_tokens is None else x[:: max(1, len(x) // most_tokens)]


def flushed_share(x: Tensor, quantized: Tensor) -> Tensor:
    """Share of the non-zero entries that became zero; 0 when there are none."""
    num_nonzero = torch.count_nonzero(x)
    return (num_nonzero - torch.count_nonzero(quantized)) / num_nonzero.clamp(min=1)


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
    work = work_of(x.dtype)
    x, quantized = (t.reshape(-1, x.shape[-1] if x.dim() else 1).to(work) for t in (x, quantized))
    if not x.numel():
        return x.new_zeros(())
    # Sums of squares, as they take a fraction of the time of norms; the factor keeps them within the range.
    lowest, highest = torch.aminmax(x)
    factor = 1 / torch.maximum(highest, -lowest).clamp(min=torch.finfo(work).tiny)
    size = (x * factor).square_().sum(0)
    error = x.sub(quantized).mul_(factor).square_().sum(0)
    total: Tensor = torch.where(size == 0, 0.0, error / size).sqrt_().sum()
    return total / torch.count_nonzero(size).clamp(min=1)


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
