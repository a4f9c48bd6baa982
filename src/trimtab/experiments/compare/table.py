"""What a comparison shows on the console: one row an arm, means over the seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from trimtab.experiments.compare.measures import TOLERANCE_STEPS
from trimtab.experiments.compare.signals import SIGNALS

__all__ = ["LEGEND", "comparison_table"]

_Column = tuple[str, Callable[[Mapping[str, Any]], str]]

LEGEND = (
    "Mean±sd over the seeds; (2/3) where only two of three seeds have the figure. over low-cost: against the low-cost "
    "path under the same faults. repaired: share of the loss that the faults, or without faults the low-cost path, "
    "cost, as a ratio of means, with its 95% interval (Student's t, paired seeds). recovered: unit-steps on "
    "the recovery path. promoted: entries into it a unit-step. triggered: observed unit-steps with a risk above 1. "
    "full: steps with no budget left.",
    "caught: faults whose unit was on the recovery path while they lasted; after: how many steps after their start. "
    "covered: faulty unit-steps on it, from each fault's second step on. captured: of the gaps measured, what was "
    "recovered, over the most possible.",
    "recall: faulty unit-steps with a risk above 1; of faults: faults with one at least once. precision: risks above 1 "
    f"that lie in a fault or up to {TOLERANCE_STEPS} steps after it. All from one first step on, the same for all. "
    "Beside the arms they are of runs that recover: a recovered unit's gradient is healthy and shows no fault, while "
    "its channel error does. Only what the signals see is measured on one and the same run, the low-cost path's.",
    "kept: bytes kept for backward, measured. step time: median processor time of a step on one thread, against "
    "unquantized, which is under a guard too, so that what watching costs is in both. Under faults the low-cost path "
    "also observes its quantizers, which is in its time.",
)


def comparison_table(summary: Mapping[str, Any]) -> list[Table]:
    """Loss, recovery, detection, reasons and cost; a column, or a table, that says nothing of any arm is left out.

    Args:
        summary: What ``summary.json`` holds.

    Example:
        >>> comparison_table({"title": "none yet", "seeds": [], "arms": {}})[0].title
        'none yet: loss, 0 seeds'
    """
    groups: Sequence[tuple[str, Sequence[_Column]]] = (
        (
            "loss",
            (
                ("validation loss", lambda arm: _number(arm["val_loss"], ".4f", missing="diverged")),
                ("over low-cost", lambda arm: _number(arm["loss_over_static_low"], "+.4f", ".4f")),
                ("repaired", _repaired),
            ),
        ),
        (
            "recovery",
            (
                ("recovered", lambda arm: _number(arm["recovered_share"], ".1%")),
                ("switches", lambda arm: _number(arm["switches"], ".0f")),
                ("promoted", lambda arm: _number(arm["promotion_ratio"], ".1%")),
                ("triggered", lambda arm: _number(arm["trigger_rate"], ".1%")),
                ("full", lambda arm: _number(arm["full_share"], ".0%")),
                ("damped", lambda arm: _number(arm["damped_unit_steps"], ".0f")),
            ),
        ),
        (
            "faults and gaps",
            (
                ("caught", _caught),
                ("after", lambda arm: _number(arm["mean_latency_steps"], ".1f")),
                ("covered", lambda arm: _number(arm["faulty_recovered_share"], ".0%")),
                ("recall", lambda arm: _number(arm["recall"], ".0%") if arm["scores_decide"] else ""),
                ("of faults", lambda arm: _number(arm["event_recall"], ".0%") if arm["scores_decide"] else ""),
                ("precision", lambda arm: _number(arm["precision"], ".0%") if arm["scores_decide"] else ""),
                ("captured", lambda arm: _number(arm["capture"], ".2f")),
            ),
        ),
        ("reasons", (("unit-steps over all seeds", _reasons),)),
        (
            "cost",
            (
                ("budget", lambda arm: "" if arm["budget"] is None else str(arm["budget"])),
                ("kept, units", lambda arm: _mebibytes(arm["projection_saved_bytes"], 2)),
                ("kept, model", lambda arm: _mebibytes(arm["model_saved_bytes"], 1)),
                ("s/step", lambda arm: _number(arm["step_seconds"], ".3f", None)),
                ("step time", lambda arm: _number(arm["step_time_ratio"], ".2f", None, unit="x")),
            ),
        ),
    )
    seeds = len(summary["seeds"])
    heading = f"{seeds} seed{'' if seeds == 1 else 's'}"
    tables: list[Table] = []
    for title, columns in groups:
        cells = {name: [text(arm) for arm in summary["arms"].values()] for name, text in columns}
        cells = {name: column for name, column in cells.items() if any(column)}
        if cells or not tables:
            tables.append(_table(f"{summary['title']}: {title}, {heading}", cells, summary["arms"]))
    if summary.get("signals"):
        tables.append(_signals_table(f"{summary['title']}: what the signals see, {heading}", summary["signals"]))
    return tables


def _signals_table(title: str, signals: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("signal")
    columns = {"recall": "recall", "of faults": "event_recall", "precision": "precision"}
    for name in (*columns, "flagged", "faulty"):
        table.add_column(name, justify="right")
    for signal, found in signals.items():
        shares = [_number(found[key], ".0%") for key in columns.values()]
        counts = [_number(found[f"{name}_unit_steps"], ".0f") for name in ("flagged", "faulty")]
        table.add_row(SIGNALS[signal], *shares, *counts)
    return table


def _table(title: str, cells: Mapping[str, Sequence[str]], arms: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("arm", overflow="fold")
    for name, column in cells.items():
        is_text = any(cell[:1].isalpha() and "," in cell for cell in column)
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text)
    for number, arm in enumerate(arms.values()):
        table.add_row(arm["title"], *(column[number] for column in cells.values()))
    return table


def _number(value: Mapping[str, Any], form: str, spread: str | None = "", *, unit: str = "", missing: str = "") -> str:
    """The mean, with its standard deviation where there is one, in a form of its own or the same; None leaves it out.

    Where not all seeds have the figure, how many of them do; ``missing`` where none has.

    Example:
        >>> _number({"mean": 1.5, "sd": 0.25, "n": 3}, ".2f"), _number({"mean": None, "sd": None, "n": 0}, ".2f")
        ('1.50±0.25', '')
        >>> _number({"mean": 0.5, "sd": 0.25, "n": 3}, ".0%")
        '50±25%'
        >>> _number({"mean": 0.5, "sd": None, "n": 1, "of": 3}, ".0%")
        '50% (1/3)'
    """
    if value["mean"] is None:
        return missing
    mean, of = f"{value['mean']:{form}}", value.get("of", value["n"])
    some = f" ({value['n']}/{of})" if value["n"] < of else ""
    if spread is None or value["sd"] is None:
        return mean + unit + some
    return f"{mean.removesuffix('%')}±{value['sd']:{spread or form}}{unit}{some}"


def _repaired(arm: Mapping[str, Any]) -> str:
    """The share with its interval, or why there is none.

    Example:
        >>> diverged = {"low": 0, "clean": 0, "arm": 1}
        >>> _repaired({"repaired": {"share": None, "did_harm": True, "num_seeds": 3, "num_diverged": diverged}})
        'diverged (1/3)'
    """
    found = arm["repaired"]
    if found is None:
        return ""
    diverged, seeds = found["num_diverged"], found["num_seeds"]
    if most := max(diverged["low"], diverged["clean"]):
        return f"unknown: harm diverged ({most}/{seeds})"
    if diverged["arm"]:
        return f"diverged ({diverged['arm']}/{seeds})"
    if found["did_harm"] is None:
        return "unknown: one seed"
    if found["share"] is None:
        return "no harm to repair"
    if found["interval"] is None:
        return f"{found['share']:.0%}"
    low, high = found["interval"]
    return f"{found['share']:.0%} ({low:.0%} to {high:.0%})"


def _caught(arm: Mapping[str, Any]) -> str:
    caught, faults = arm["faults_caught"]["mean"], arm["num_faults"]["mean"]
    return f"{caught:.1f}/{faults:.1f}" if faults and arm["recovered_share"]["mean"] else ""


def _reasons(arm: Mapping[str, Any]) -> str:
    """How often each reason made a risk or held a unit, over all seeds."""
    if not arm["scores_decide"]:
        return ""
    return ", ".join(f"{name} {count}" for name, count in arm["reasons"].items() if count)


def _mebibytes(value: Mapping[str, Any], digits: int) -> str:
    return "" if value["mean"] is None else f"{value['mean'] / 2**20:.{digits}f} MiB"
