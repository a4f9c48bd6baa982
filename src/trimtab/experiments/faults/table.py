"""What the fault experiment shows on the console: a table a kind of model, one row a scenario, means over the seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

__all__ = ["MODEL_TITLES", "SIGNALS", "fault_tables", "markdown_table"]

MODEL_TITLES = {"dense": "Dense (LLaMA)", "moe": "Mixture of experts (Mixtral)", "qk_norm": "QK-norm (Qwen3)"}

SIGNALS = {
    "shift_residual/residual": "inexact",
    "shift_residual/coherence": "coherence",
    "attention_spectrum/d2_entropy": "D2",
    "attention_spectrum/dwq_layer_entropy": "dWq",
    "attention_spectrum/dwk_layer_entropy": "dWk",
    "router/entropy_mean": "routing",
    "residual_stream/growth": "residual",
    "signals/loss_excess": "loss spike",
    "signals/loss_rise": "loss rise",
}
"""Metrics that have an alarm rule, and what the table calls them."""

_OF_MIXTURES = "router/entropy_mean"


_NUM_OUTCOMES = 3
_WIDE = 150


def fault_tables(summary: Mapping[str, Any], width: int) -> list[Table]:
    """A table a kind of model where the terminal is wide enough, or else one of alarms and one of what came of them."""
    tables = []
    for model, scenarios in summary["models"].items():
        headings, rows = _cells(model, scenarios)
        if width >= _WIDE:
            tables.append(_table(MODEL_TITLES[model], headings, rows))
            continue
        alarms = [[*cells[:-_NUM_OUTCOMES], ""] for cells in [headings, *rows]]
        outcomes = [[cells[0], *cells[-_NUM_OUTCOMES:]] for cells in [headings, *rows]]
        tables.append(_table(f"{MODEL_TITLES[model]}: first alarms", alarms[0], alarms[1:]))
        tables.append(_table(f"{MODEL_TITLES[model]}: what came of it", outcomes[0], outcomes[1:]))
    return tables


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if 0 < i < len(headings) - 1 else "left", no_wrap=i == 0)
    for row in rows:
        table.add_row(*row)
    return table


def markdown_table(model: str, scenarios: Mapping[str, Any]) -> str:
    """The same for a document."""
    headings, rows = _cells(model, scenarios)
    rule = ["---", *["---:"] * (len(headings) - 2), "---"]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [headings, rule, *rows])


def _cells(model: str, scenarios: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    signals = {metric: short for metric, short in SIGNALS.items() if model == "moe" or metric != _OF_MIXTURES}
    headings = ["injected", *signals.values(), "loss leaves", "lead", "said"]
    rows = [
        [
            scenario["title"],
            *(_steps(scenario["first_alarms"].get(metric), scenario["num_seeds"]) for metric in signals),
            _steps(scenario["loss_leaves"], scenario["num_seeds"]),
            _steps(scenario["lead_steps"], scenario["num_seeds"]),
            _said(scenario["said"]),
        ]
        for scenario in scenarios.values()
        if scenario["watched"]
    ]
    return headings, rows


def _steps(value: Mapping[str, Any] | None, num_seeds: int) -> str:
    """The mean, with its spread, and how many of the seeds have one where not all do.

    Example:
        >>> _steps({"mean": 451.0, "sd": 0.0, "num": 3, "of": 3}, 3), _steps(None, 3)
        ('451±0', '-')
        >>> _steps({"mean": 451.0, "sd": None, "num": 1, "of": 3}, 3)
        '451 (1/3)'
    """
    if value is None or value["mean"] is None:
        return "-"
    text = f"{value['mean']:.0f}" + ("" if value["sd"] is None else f"±{value['sd']:.0f}")
    return text if value["num"] == num_seeds else f"{text} ({value['num']}/{num_seeds})"


def _said(said: Sequence[str]) -> str:
    """What was diagnosed, with how many seeds said so where they differ.

    Example:
        >>> _said(["router", "router"]), _said(["router", "combined", "router"])
        ('router', 'router 2, combined 1')
    """
    counts = {mechanism: list(said).count(mechanism) for mechanism in dict.fromkeys(said)}
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{mechanism} {count}" for mechanism, count in counts.items())
