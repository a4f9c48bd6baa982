"""Time of one decision: the vectorised controller, and its ratio to the plain-Python specification.

Run: python benchmarks/decision.py
"""

from __future__ import annotations

from rich.console import Console

from trimtab.experiments.bench.decision import measure_decision
from trimtab.experiments.bench.run import figures_table

if __name__ == "__main__":
    Console().print(figures_table("Time of one decision", measure_decision()))
