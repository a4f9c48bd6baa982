"""What the monitors cost a training step of a LLaMA and of a Mixtral: their own processor time over that of the step.

    python benchmarks/monitors.py [--parameters 60] [--steps 12] [--batch 2] [--sequence 128] [--threads 1]

Shares are of a step that gradient norms alone are read of. Each monitor at its default cadence; a reading that comes
less often than the steps of this run is spread over that cadence. With more than one thread, processor time has in it
what threads without work spend waiting.
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
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures = measure_monitors(options.parameters, options.steps, options.batch, options.sequence)
    title = f"{options.threads} thread(s), torch {torch.__version__}, {options.steps} steps"
    Console().print(figures_table(title, figures))


if __name__ == "__main__":
    main()
