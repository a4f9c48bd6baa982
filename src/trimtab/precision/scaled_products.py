"""FP8 products of the device, through ``torch._scaled_mm``, where the recipe's scales are those that it takes.

| product | scales in tiles | scales per token |
| --- | --- | --- |
| ``Y = X W'`` | 1x128 by 128x128 | row by row |
| ``dX = dY W`` | 1x128 by 128x128 | no: a weight's scales lie along the sum |
| ``dW = dY' X`` | no: all scales lie along the sum | no: the same |

A product multiplies codes and applies the scales itself, so it is exact where the emulation rounds code times scale to
the dtype of ``x``. Before a device is trusted with a kind of product, one small problem is solved both ways on it;
where it refuses or differs, all products of that kind are emulated, and the reason is kept.

Layouts, for A (M, K) by B (K, N) with B stored by columns: scales per token (M, 1) and (1, N); in tiles (M, K/128) with
strides (1, M), and (L, N/128) with strides (1, L), where L is K/128 rounded up to a multiple of 4 (cuBLAS, "Scaling
factors layouts"; torch checks neither everywhere).
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.formats import Format, Granularity, ScaleKind, fake_quantize, per_block, per_tile, per_token, quantize

__all__ = ["multiplies_fp8", "scaled_product", "why_emulated"]

_FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_TILE = 128

# By device, scaling and grids: None where the device multiplies, or else why it does not.
_verdicts: dict[tuple[torch.device, str, str, str], str | None] = {}


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
    key = (a.device, scaling, a_grid.name, b_grid.name)
    if key not in _verdicts:
        _verdicts[key] = _try(a.device, scaling, a_grid, b_grid)
    return _verdicts[key]


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
        b_scale = padded
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


def _try(device: torch.device, scaling: str, a_grid: Format, b_grid: Format) -> str | None:
    """Solve one small problem both ways."""
    grid = torch.arange(256 * 640, dtype=torch.float32, device=device).reshape(256, 640)
    a, b = torch.sin(grid).bfloat16(), torch.cos(grid * 0.7).bfloat16()
    rows, blocks = _granularities(scaling)
    expected = fake_quantize(a.float(), a_grid, rows) @ fake_quantize(b.float(), b_grid, blocks).t()
    try:
        found = scaled_product(a, b, scaling, a_grid, b_grid).float()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return f"the device refuses: {str(error).splitlines()[0]}"
    # The result is rounded to bfloat16; twice its step leaves room for the order of the sum.
    difference = ((found - expected).abs().amax() / expected.abs().amax()).item()
    return None if difference < 2.0**-7 else f"the device's product differs by {difference:.3g}"
