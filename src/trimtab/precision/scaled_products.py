"""FP8 products of the device, through ``torch._scaled_mm``, where the recipe's scales are those that it takes.

| product | scales in tiles | scales per token |
| --- | --- | --- |
| ``Y = X W'`` | 1x128 by 128x128 | row by row |
| ``dX = dY W`` | 1x128 by 128x128 | no: a weight's scales lie along the sum |
| ``dW = dY' X`` | no: all scales lie along the sum | no: the same |

A product multiplies codes and applies the scales itself, so it is exact where the emulation rounds code times scale to
the dtype of ``x``. Before a device is trusted with a kind of product, one small problem is solved both ways on it;
where it refuses or differs, all products of that kind are emulated, and the reason is kept. One that it refuses for its
sizes is emulated from then on.

Layouts, for A (M, K) by B (K, N) with B stored by columns: scales per token (M, 1) and (1, N); in tiles (M, K/128) with
strides (1, M), and (K/128, N/128) with strides (1, L), where L is K/128 rounded up to a multiple of 4. cuBLAS reads the
latter so ("Scaling factors layouts"); whether torch passes them on where L is not K/128 depends on its version, so that
is a kind of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.formats import Format, Granularity, ScaleKind, fake_quantize, per_block, per_tile, per_token, quantize

__all__ = ["attempt", "multiplies_fp8", "scaled_product", "why_emulated"]

_FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_TILE = 128
_REFUSALS = (RuntimeError, ValueError, NotImplementedError)

# By device, scaling, grids and whether scales are padded: None where the device multiplies, or else why it does not.
_verdicts: dict[tuple[torch.device, str, str, str, bool], str | None] = {}
# Why it refused some numbers of tokens all the same, by device, scaling, grids, K and N.
_refused: dict[tuple[torch.device, str, str, str, int, int], dict[int, str]] = {}
_MOST_REFUSALS = 8
"""Refusals of so many numbers of tokens have another reason than that number."""


def multiplies_fp8(device: torch.device) -> bool:
    """Whether the device has FP8 products: CUDA from compute capability 8.9."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def why_emulated(a: Tensor, b: Tensor, scaling: str, a_grid: Format, b_grid: Format) -> str | None:
    """Why ``a`` (M, K) by the transpose of ``b`` (N, K) is emulated, or None where the device multiplies it."""
    if not multiplies_fp8(a.device):
        return "the device has no FP8 products"
    if a.dtype != torch.bfloat16:
        return f"the device's FP8 products end in bfloat16, and the layer's in {str(a.dtype)[6:]}"
    if (reason := _why_not_these_sizes(a, b, scaling)) is not None:
        return reason
    is_padded = scaling == "tile" and a.shape[1] % (4 * _TILE) != 0
    key = (a.device, scaling, a_grid.name, b_grid.name, is_padded)
    if key not in _verdicts:
        _verdicts[key] = _try(a.device, scaling, a_grid, b_grid, is_padded)
    if (verdict := _verdicts[key]) is not None:
        return verdict
    refused = _refused.get(_sizes(a, b, scaling, a_grid, b_grid), {})
    return next(iter(refused.values())) if len(refused) >= _MOST_REFUSALS else refused.get(a.shape[0])


def attempt(
    a: Tensor, b: Tensor, scaling: str, a_grid: Format, b_grid: Format, scale_kind: ScaleKind
) -> tuple[Tensor | None, str | None]:
    """``scaled_product`` where the device multiplies, or None and why it is to be emulated."""
    reason = why_emulated(a, b, scaling, a_grid, b_grid)
    if reason is not None:
        return None, reason
    try:
        return scaled_product(a, b, scaling, a_grid, b_grid, scale_kind), None
    except torch.OutOfMemoryError:
        raise
    except _REFUSALS as error:
        # A trial of one size does not tell of all, and training is not to stop for it.
        reason = _as_reason(error)
        _refused.setdefault(_sizes(a, b, scaling, a_grid, b_grid), {})[a.shape[0]] = reason
        return None, reason


def scaled_product(
    a: Tensor, b: Tensor, scaling: str, a_grid: Format, b_grid: Format, scale_kind: ScaleKind = "float32"
) -> Tensor:
    """``Q(a) Q(b)'``, multiplied in FP8.

    Args:
        a: Shape (M, K); quantized in tiles or by token.
        b: Shape (N, K), a weight or, in tiles, its transpose; quantized in blocks or by row.
        scaling: "tile" or "token".
        a_grid: E4M3 or E5M2.
        b_grid: E4M3.
        scale_kind: How a scale is made.

    Returns: Shape (M, N), bfloat16.
    """
    rows, blocks = _granularities(scaling)
    qa, qb = quantize(a, a_grid, rows, scale_kind), quantize(b, b_grid, blocks, scale_kind)
    a_scale, b_scale = qa.scale, qb.scale
    if scaling == "tile":
        a_scale = a_scale.t().contiguous().t()
        summed = b_scale.shape[1]
        padded = b_scale.new_ones((b_scale.shape[0], -(-summed // 4) * 4))
        padded[:, :summed] = b_scale
        b_scale = padded[:, :summed]
    return torch._scaled_mm(
        qa.codes.view(_FLOAT8[a_grid.name]).contiguous(),
        qb.codes.view(_FLOAT8[b_grid.name]).contiguous().t(),
        scale_a=a_scale,
        scale_b=b_scale.t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=False,  # it keeps 14 bits of a sum (DeepSeek-V3 Technical Report, section 3.5.2)
    )


def _granularities(scaling: str) -> tuple[Granularity, Granularity]:
    return (per_tile(), per_block()) if scaling == "tile" else (per_token(), per_token())


def _why_not_these_sizes(a: Tensor, b: Tensor, scaling: str) -> str | None:
    (m, k), n = a.shape, b.shape[0]
    multiple = _TILE if scaling == "tile" else 16
    if k % multiple or n % multiple:
        return f"the device multiplies channels in multiples of {multiple}, and these are {k} by {n}"
    if scaling == "tile" and m % 4:
        return f"the device multiplies tokens in multiples of 4, and these are {m}"
    return "there are no tokens" if not m else None


def _sizes(
    a: Tensor, b: Tensor, scaling: str, a_grid: Format, b_grid: Format
) -> tuple[torch.device, str, str, str, int, int]:
    return a.device, scaling, a_grid.name, b_grid.name, a.shape[1], b.shape[0]


def _as_reason(error: Exception) -> str:
    return f"the device refuses: {(str(error).splitlines() or [type(error).__name__])[0]}"


def _try(device: torch.device, scaling: str, a_grid: Format, b_grid: Format, is_padded: bool) -> str | None:
    """Solve one small problem both ways."""
    channels = 5 * _TILE if is_padded else 4 * _TILE
    grid = torch.arange(256 * channels, dtype=torch.float32, device=device).reshape(256, channels)
    a, b = torch.sin(grid).bfloat16(), torch.cos(grid * 0.7).bfloat16()
    rows, blocks = _granularities(scaling)
    expected = fake_quantize(a.float(), a_grid, rows) @ fake_quantize(b.float(), b_grid, blocks).t()
    try:
        found = scaled_product(a, b, scaling, a_grid, b_grid).float()
    except _REFUSALS as error:
        return _as_reason(error)
    # The result is rounded to bfloat16; twice its step leaves room for the order of the sum.
    difference = ((found - expected).abs().amax() / expected.abs().amax()).item()
    return None if difference < 2.0**-7 else f"the device's product differs by {difference:.3g}"
