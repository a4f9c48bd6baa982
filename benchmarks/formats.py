"""Speed of packing, rounding and scaled quantization, as ratios to a copy and to torch's own float8 cast in one run.

Run: python benchmarks/formats.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

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

ROWS, COLUMNS, REPEATS = 1024, 4096, 25
GRANULARITIES = {
    "tensor": per_tensor(),
    "token": per_token(),
    "1x128": per_tile(),
    "128x128": per_block(),
    "group of 32": per_group(32),
}


def milliseconds(*acts: Callable[[], object]) -> list[float]:
    """The fastest run of each, taking turns, so that the machine's other work slows all alike."""
    best = [float("inf")] * len(acts)
    for _ in range(REPEATS):
        for i, act in enumerate(acts):
            start = time.perf_counter()
            act()
            best[i] = min(best[i], 1e3 * (time.perf_counter() - start))
    return best


def packing() -> None:
    print("Speed of packing codes, a copy of the unpacked codes = 1")
    for bits in (2, 4, 6):
        codes = torch.randint(-1, 2, (ROWS, COLUMNS), dtype=torch.int8)
        packed = pack(codes, bits)
        copy, packing, unpacking = milliseconds(
            codes.clone, lambda c=codes, b=bits: pack(c, b), lambda p=packed, b=bits: unpack(p, b, COLUMNS)
        )
        print(f"  {bits} bits: pack {copy / packing:.2f}, unpack {copy / unpacking:.2f}")


def torch_cast(x: torch.Tensor) -> torch.Tensor:
    """e4m3 per token with torch's own cast, as one would write it by hand."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=2.0**-126) / 448
    return ((x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def rounding(x: torch.Tensor) -> None:
    print(f"Time of rounding {str(x.dtype)[6:]}, a copy = 1")
    for name, fmt in FORMATS.items():
        copy, fast, generic = milliseconds(x.clone, lambda f=fmt: f.round(x), lambda f=fmt: round_values(f, x))
        print(f"  {name}: {fast / copy:.1f}, by the generic way {generic / copy:.1f}")


def quantization(x: torch.Tensor) -> None:
    print(f"Time of fake_quantize on {str(x.dtype)[6:]}, a copy = 1; torch's own cast to e4m3 per token in brackets")
    for name in ("int8", "e2m1", "e3m2", "e4m3"):
        acts = [lambda n=name, g=g: fake_quantize(x, FORMATS[n], g) for g in GRANULARITIES.values()]
        copy, cast, *ours = milliseconds(x.clone, lambda: torch_cast(x), *acts)
        told = ", ".join(f"{g} {ms / copy:.1f}" for g, ms in zip(GRANULARITIES, ours, strict=True))
        print(f"  {name}: {told} [{cast / copy:.1f}]")


def main() -> None:
    torch.set_num_threads(1)
    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    packing()
    for dtype in (torch.float32, torch.bfloat16):
        rounding(x.to(dtype))
        quantization(x.to(dtype))


if __name__ == "__main__":
    main()
