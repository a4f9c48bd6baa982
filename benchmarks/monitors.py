"""What the monitors cost a training step, as ratios measured in one run, arms interleaved step by step.

    python benchmarks/monitors.py [--parameters 60] [--steps 12] [--threads 2]

Arms: watched by gradient norms alone; with each monitor at its default cadence; with all three.
"""

from __future__ import annotations

import argparse

import torch
from rich.console import Console

from trimtab.experiments.bench.monitors import measure_monitors
from trimtab.experiments.bench.run import figures_table
from trimtab.experiments.bench.step import SHAPES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=60, choices=sorted(SHAPES))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures = measure_monitors(options.parameters, options.steps, options.batch, options.sequence)
    title = f"{options.threads} threads, torch {torch.__version__}, medians of {options.steps} interleaved steps"
    Console().print(figures_table(title, figures))


if __name__ == "__main__":
    main()
