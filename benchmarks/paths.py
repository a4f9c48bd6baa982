"""Speed of the precision paths, as ratios in one run: layers, statistics of quantizers, and a switch of all units.

Run: python benchmarks/paths.py
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import trimtab
from trimtab.formats import fake_quantize, fake_quantize_with_stats, get, per_tile
from trimtab.precision import QuantizedGemm, SavedActivations
from trimtab.precision.quantizer_stats import most_tokens_of
from trimtab.precision.stored_copy import encode, encode_with_stats

REPEATS = 15
TOKENS, INPUTS, OUTPUTS = 1024, 1024, 1024
NUM_LAYERS = 32


def seconds(
    *acts: Callable[[], object], clock: Callable[[], float] = time.perf_counter, repeats: int = REPEATS
) -> list[float]:
    """The fastest run of each, taking turns, so that the machine's other work slows all alike."""
    best = [float("inf")] * len(acts)
    for _ in range(repeats):
        for i, act in enumerate(acts):
            start = clock()
            act()
            best[i] = min(best[i], clock() - start)
    return best


def float8_layer(dtype: torch.dtype) -> nn.Module | None:
    """Float8Linear of torchao, emulated; its default, a scale a tensor."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        print("torchao is not installed: no comparison with it")
        return None
    model = nn.Sequential(nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=dtype))
    return convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))


def layers() -> None:
    print(f"Forward and backward of a linear layer, {TOKENS} tokens, {INPUTS} by {OUTPUTS}; the plain layer = 1")
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(TOKENS, INPUTS, dtype=dtype, requires_grad=True)
        grad = torch.randn(TOKENS, OUTPUTS, dtype=dtype)
        recipes = {"saved activations 4/8": SavedActivations(4, 8), "quantized gemm e3m2/fp8": QuantizedGemm()}
        acts = {"plain": run(nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=dtype), x, grad)}
        for name, recipe in recipes.items():
            for path in ("low", "high"):
                model = nn.Sequential(nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=dtype))
                guard = trimtab.attach(model, recipe, units=["0"])
                guard.route(["0"] if path == "high" else [])
                acts[f"{name}, {path}"] = run(model, x, grad)
        if (float8 := float8_layer(dtype)) is not None:
            acts["torchao Float8Linear, emulated"] = run(float8, x, grad)
        times = dict(zip(acts, seconds(*acts.values()), strict=True))
        print(f"  {str(dtype)[6:]}: " + ", ".join(f"{n} {t / times['plain']:.2f}" for n, t in times.items()))
        if float8 is not None:
            ours, theirs = times["quantized gemm e3m2/fp8, high"], times["torchao Float8Linear, emulated"]
            print(f"    FP8 path of quantized gemm against torchao's emulated layer: {ours / theirs:.2f}")


def run(model: nn.Module, x: Tensor, grad: Tensor) -> Callable[[], object]:
    return lambda: model(x).backward(grad)


def quantizers(x: Tensor) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Each kind of quantizer of ``x``, without and with its statistics."""
    most, tiles = most_tokens_of(x), per_tile()
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        name: (partial(encode, x, bits), partial(encode_with_stats, x, bits, most_tokens=most))
        for name, bits in (("saved activations 4", 4), ("int8 base", 8))
    }
    for name, kind in (("e3m2", "float32"), ("e3m2", "e8m0"), ("e2m1", "float32")):
        args = (x, get(name), tiles, kind)
        pairs[f"{name} {kind}"] = (
            partial(fake_quantize, *args),
            partial(fake_quantize_with_stats, *args, most_tokens=most),
        )
    return pairs


def quantizer_statistics() -> None:
    print(f"What the statistics of a quantizer add to it, as a share of its own time on the CPU, {INPUTS} channels")
    for dtype in (torch.float32, torch.bfloat16):
        for tokens in (512, 2048, 8192):
            pairs = quantizers(torch.randn(tokens, INPUTS, dtype=dtype))
            # The thread's own time: what else runs on the machine does not count.
            times = seconds(*(act for pair in pairs.values() for act in pair), clock=time.thread_time, repeats=40)
            shares = (
                f"{name} {observed / plain - 1:.2f}"
                for name, plain, observed in zip(pairs, times[::2], times[1::2], strict=True)
            )
            print(f"  {str(dtype)[6:]}, {tokens} tokens: {', '.join(shares)}")
        x = torch.randn(TOKENS, INPUTS, dtype=dtype, requires_grad=True)
        grad = torch.randn(TOKENS, OUTPUTS, dtype=dtype)
        model, watched = (nn.Sequential(nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=dtype)) for _ in range(2))
        trimtab.attach(model, QuantizedGemm(), units=["0"])
        trimtab.attach(watched, QuantizedGemm(), units=["0"], quantizer_stats=True)
        plain, observed = seconds(run(model, x, grad), run(watched, x, grad), clock=time.thread_time)
        print(f"  {str(dtype)[6:]}, {TOKENS} tokens: a whole layer, forward and backward, {observed / plain - 1:.2f}")


def switching() -> None:
    blocks = [
        nn.ModuleDict(
            {
                name: nn.Linear(8, 8)
                for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
            }
        )
        for _ in range(NUM_LAYERS)
    ]
    guard = trimtab.attach(nn.ModuleDict({"layers": nn.ModuleList(blocks)}), QuantizedGemm())
    every, none = list(guard.units), []
    on, off = seconds(lambda: guard.route(every), lambda: guard.route(none))
    flags = [True] * len(every)
    [conversion] = seconds(lambda: guard.conversion.route(flags))
    print(
        f"Switching all {len(every)} units of {NUM_LAYERS} layers: {1e3 * on:.3f} ms on, {1e3 * off:.3f} ms off, by a"
    )
    print(f"  decision {1e3 * conversion:.3f} ms")


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers()
    quantizer_statistics()
    switching()


if __name__ == "__main__":
    main()
