"""Speed of packing, rounding and scaled quantization, as ratios to a copy and to torch's own float8 cast in one run."""

from __future__ import annotations

import torch

from trimtab.experiments.bench.figures import Figure, best_ms
from trimtab.formats import (
    FORMATS,
    fake_quantize,
    pack,
    per_block,
    per_group,
    per_tensor,
    per_tile,
    per_token,
    unpack,
)
from trimtab.formats.rounding import round_values

__all__ = ["measure_formats"]

_GRANULARITIES = {
    "tensor": per_tensor(),
    "token": per_token(),
    "1x128": per_tile(),
    "128x128": per_block(),
    "group of 32": per_group(32),
}
_COPY = "of a copy"


def measure_formats(rows: int = 1024, columns: int = 4096, repeats: int = 25) -> list[Figure]:
    """Packing, rounding and quantizing a matrix, the time of a copy of it = 1.

    Args:
        rows: Of the matrix.
        columns: Of the matrix; a multiple of 128.
        repeats: Of each, of which the fastest counts.
    """
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    figures = _packing(rows, columns, repeats)
    for dtype in (torch.float32, torch.bfloat16):
        figures += _rounding(x.to(dtype), repeats) + _quantization(x.to(dtype), repeats)
    return figures


def _packing(rows: int, columns: int, repeats: int) -> list[Figure]:
    figures = []
    for bits in (2, 4, 6):
        codes = torch.randint(-1, 2, (rows, columns), dtype=torch.int8)
        packed = pack(codes, bits)
        copy, packing, unpacking = best_ms(
            codes.clone,
            lambda c=codes, b=bits: pack(c, b),  # type: ignore[misc]
            lambda p=packed, b=bits: unpack(p, b, columns),  # type: ignore[misc]
            repeats=repeats,
        )
        figures += [
            Figure(name=f"packing into {bits} bits", value=packing / copy, unit=_COPY),
            Figure(name=f"unpacking {bits} bits", value=unpacking / copy, unit=_COPY),
        ]
    return figures


def _rounding(x: torch.Tensor, repeats: int) -> list[Figure]:
    figures = []
    dtype = str(x.dtype).removeprefix("torch.")
    for name, fmt in FORMATS.items():
        copy, fast, generic = best_ms(
            x.clone,
            lambda f=fmt: f.round(x),  # type: ignore[misc]
            lambda f=fmt: round_values(f, x),  # type: ignore[misc]
            repeats=repeats,
        )
        figures += [
            Figure(name=f"rounding {dtype} to {name}", value=fast / copy, unit=_COPY),
            Figure(name=f"rounding {dtype} to {name}, the generic way", value=generic / copy, unit=_COPY),
        ]
    return figures


def _quantization(x: torch.Tensor, repeats: int) -> list[Figure]:
    figures = []
    dtype = str(x.dtype).removeprefix("torch.")
    for name in ("int8", "e2m1", "e3m2", "e4m3"):
        acts = [lambda n=name, g=g: fake_quantize(x, FORMATS[n], g) for g in _GRANULARITIES.values()]  # type: ignore[misc]
        copy, cast, *ours = best_ms(x.clone, lambda: _torch_cast(x), *acts, repeats=repeats)
        if name == "int8":
            figures.append(Figure(name=f"torch's cast of {dtype} to e4m3 per token", value=cast / copy, unit=_COPY))
        figures += [
            Figure(name=f"fake_quantize of {dtype} to {name}, per {granularity}", value=ms / copy, unit=_COPY)
            for granularity, ms in zip(_GRANULARITIES, ours, strict=True)
        ]
    return figures


def _torch_cast(x: torch.Tensor) -> torch.Tensor:
    """e4m3 per token with torch's own cast, as one would write it by hand."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=2.0**-126) / 448
    return ((x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)
