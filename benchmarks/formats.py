"""Speed of packing, rounding and scaled quantization, as ratios to a copy and to torch's own float8 cast in one run.

Run: python benchmarks/formats.py
"""

from __future__ import annotations

import torch
from rich.console import Console

from trimtab.experiments.bench.formats import measure_formats
from trimtab.experiments.bench.run import figures_table

if __name__ == "__main__":
    torch.set_num_threads(1)
    Console().print(figures_table("Time of packing, rounding and quantizing a matrix", measure_formats()))
