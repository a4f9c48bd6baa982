"""``trimtab bench``: measures, and says what it found."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trimtab._version import __version__
from trimtab.experiments.bench.figures import Figure
from trimtab.experiments.bench.settings import BenchSettings

__all__ = ["figures_table", "run_bench"]


def run_bench(settings: BenchSettings) -> dict[str, list[Figure]]:
    """Measure what the settings name, and print it: as tables while it is measured, or as one JSON object at the end.

    Returns: The figures, by what was measured.

    Raises: MissingExtraError: when a step is to be timed and transformers is not installed.
    """
    console = Console(stderr=settings.json)
    found: dict[str, list[Figure]] = {}
    with _threads(settings.threads):
        about = {
            "trimtab": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "processors": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "device": "cpu",
            "quick": settings.quick,
        }
        if not settings.json:
            console.print(
                f"torch {about['torch']}, {about['threads']} threads on {about['processors']} processors. Times are of "
                "this machine; ratios travel better."
            )
        for name in settings.measures:
            with console.status(f"measuring: {name}"):
                found[name] = _measure(name, settings.quick)
            if not settings.json:
                console.print(figures_table(name, found[name]))
    if settings.json:
        print(
            json.dumps(about | {"figures": {name: [asdict(f) for f in own] for name, own in found.items()}}, indent=1)
        )
    return found


def figures_table(title: str, figures: list[Figure]) -> Table:
    """Figures as a table."""
    table = Table(title=escape(title), title_justify="left", box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for figure in figures:
        spread = "" if figure.low is None or figure.high is None else f" ({figure.low:.3g} to {figure.high:.3g})"
        table.add_row(escape(figure.name), f"{figure.value:.3g}", figure.unit + spread)
    return table


def _measure(name: str, quick: bool) -> list[Figure]:
    from trimtab.experiments.bench.decision import measure_decision
    from trimtab.experiments.bench.formats import measure_formats
    from trimtab.experiments.bench.monitors import measure_monitors
    from trimtab.experiments.bench.step import measure_step

    small: Mapping[str, Callable[[], list[Figure]]] = {
        "decision": lambda: measure_decision(5_000, 100),
        "step": lambda: measure_step(1, num_steps=6),
        "formats": lambda: measure_formats(128, 1024, repeats=3),
        "monitors": lambda: measure_monitors(1, num_steps=6),
    }
    whole: Mapping[str, Callable[[], list[Figure]]] = {
        "decision": measure_decision,
        "step": measure_step,
        "formats": measure_formats,
        "monitors": measure_monitors,
    }
    return (small if quick else whole)[name]()


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Torch's number of threads, for as long as the block runs."""
    before: Any = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
