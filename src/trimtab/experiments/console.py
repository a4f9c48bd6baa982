"""What a demo shows on the console: progress while its arms train one after another, then their figures as a table."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

from trimtab.experiments.arms import Arm, ArmResult, TrainingPlan, run_arm
from trimtab.experiments.text import Corpus
from trimtab.faults import StoredCopyBurst

__all__ = ["Column", "arm_table", "run_arms", "single_thread"]

Column = tuple[str, Callable[[dict[str, Any]], str]]
"""A table's column: its heading, and what it says of an arm."""


def run_arms(
    arms: Sequence[Arm],
    plan: TrainingPlan,
    corpus: Corpus,
    folder: Path,
    console: Console,
    *,
    bursts: Sequence[StoredCopyBurst] = (),
    make_model: Callable[[], nn.Module] | None = None,
) -> dict[str, ArmResult]:
    """Train the arms one after another, with a bar each.

    Args:
        arms: The arms; one called "gnmr" comes before those that need to know its active units.
        plan: Model and schedule.
        corpus: The text.
        folder: Where a record an arm goes, below ``records``.
        console: Where the bars go.
        bursts: The faults of the arms that have some.
        make_model: Makes each arm's model; the plan's, with random weights, when left out.

    Returns: The figures of each, by its name.
    """
    results: dict[str, ArmResult] = {}
    columns = (
        TextColumn("{task.description:<30}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    with single_thread(), Progress(*columns, console=console) as progress:
        for arm in arms:
            task = progress.add_task(arm.title, total=plan.num_steps, loss=float("nan"))
            counts = results["gnmr"].active_counts if "gnmr" in results else ()
            results[arm.name] = run_arm(
                arm,
                plan,
                corpus,
                bursts,
                make_model=make_model,
                counts=counts,
                record=folder / "records" / arm.name,
                on_step=partial(_advance, progress, task),
            )
    return results


@contextlib.contextmanager
def single_thread() -> Iterator[None]:
    """One thread inside.

    Operators this small gain little from a second thread and lose much when something else runs beside them; and the
    figures then do not depend on how many cores the machine has.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def arm_table(title: str, columns: list[Column], arms: Iterable[dict[str, Any]]) -> Table:
    """A row an arm; that of GNMR is set off."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("arm", no_wrap=True)
    for heading, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for result in arms:
        style = "bold" if result["title"].startswith("GNMR") else None
        table.add_row(result["title"], *(text(result) for _, text in columns), style=style)
    return table


def _advance(progress: Progress, task: TaskID, step: int, loss: float) -> None:
    progress.update(task, completed=step, loss=loss)
