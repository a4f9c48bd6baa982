"""Time of a layer's attention update spectra, and its ratio to the dense decompositions of the same matrices.

    python benchmarks/spectrum.py [--width 2048] [--heads 32] [--kv-heads 32] [--dense-heads 1] [--threads 1]

One dense decomposition a matrix and head (D1, D2, D3 of width x width) is timed on a few heads and scaled to all.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from trimtab.monitors.spectrum import qk_increment, spectral_entropy

RELATIVE_UPDATE = 1e-3


def seconds(run: Callable[[], object], repeats: int) -> float:
    """The fastest of a few runs; slower ones measure the machine's other work."""
    elapsed_s = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        elapsed_s.append(time.perf_counter() - start)
    return min(elapsed_s)


def dense(wq_old: Tensor, wk_old: Tensor, wq_new: Tensor, wk_new: Tensor) -> dict[str, Tensor]:
    """The entropies of one head's increments from the matrices themselves."""
    dwq, dwk, width = wq_new - wq_old, wk_new - wk_old, wq_old.shape[-1]
    d2, d3 = dwq @ wk_old.mT + wq_old @ dwk.mT, dwq @ dwk.mT
    ranks = {"d1": (d2 + d3, 2 * width), "d2": (d2, 2 * width), "d3": (d3, width)}
    return {name: spectral_entropy(torch.linalg.svdvals(matrix)[:rank]) for name, (matrix, rank) in ranks.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=32)
    parser.add_argument("--dense-heads", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    groups, d_head = options.kv_heads, options.width // options.heads
    wq_old = 0.02 * torch.randn(groups, options.heads // groups, options.width, d_head)
    wk_old = 0.02 * torch.randn(groups, 1, options.width, d_head)
    wq_new, wk_new = (w + 0.02 * RELATIVE_UPDATE * torch.randn_like(w) for w in (wq_old, wk_old))
    weights = [wq_old, wk_old, wq_new, wk_new]

    found = {name: spectral_entropy(values) for name, values in qk_increment(*weights).items()}
    ours_s = seconds(lambda: {name: spectral_entropy(v) for name, v in qk_increment(*weights).items()}, 3)
    one_head = [w[0, 0] for w in weights]
    expected = dense(*(w.double() for w in one_head))
    error = max(float((found[name][0, 0].double() - value).abs()) for name, value in expected.items())
    dense_s = sum(seconds(lambda i=i: dense(*(w[i, 0] for w in weights)), 1) for i in range(options.dense_heads))
    dense_s *= options.heads / options.dense_heads
    print(
        f"width {options.width}, {options.heads} heads of {d_head}, {groups} key heads, {options.threads} threads, "
        f"torch {torch.__version__}\n"
        f"  all five spectra of a layer  {ours_s:8.2f} s\n"
        f"  D1, D2, D3 decomposed dense  {dense_s:8.2f} s = {dense_s / ours_s:.0f} times as long\n"
        f"  entropies differ from those of dense matrices in float64 by {error:.1e} at most"
    )


if __name__ == "__main__":
    main()
