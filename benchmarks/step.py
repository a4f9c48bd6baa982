"""What watching and routing cost a training step, as ratios measured in one run, arms interleaved step by step.

    python benchmarks/step.py [--parameters 60] [--steps 12] [--threads 2]

Arms: untouched training that clips; the same, watched (norms, decision, record); static 4-bit; GNMR 4/8; static 8-bit.
"""

from __future__ import annotations

import argparse

import torch
from rich.console import Console

from trimtab.experiments.bench.run import figures_table
from trimtab.experiments.bench.step import SHAPES, measure_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=60, choices=sorted(SHAPES))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures = measure_step(options.parameters, options.steps, options.batch, options.sequence)
    title = f"{options.threads} threads, torch {torch.__version__}, medians of {options.steps} interleaved steps"
    Console().print(figures_table(title, figures))


if __name__ == "__main__":
    main()
