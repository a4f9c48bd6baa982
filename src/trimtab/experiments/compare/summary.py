"""From the parts of a comparison to what ``summary.json`` holds: every arm's figures over the seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trimtab.experiments.compare.arms import read_arm
from trimtab.experiments.compare.comparison import FAULT_KINDS, MODELS, Comparison
from trimtab.experiments.compare.measures import mean_of_lines, over_seeds, repair, repaired_share

__all__ = ["FIGURES", "TIMES", "summarise"]

TIMES = ("step_seconds", "wall_step_seconds", "step_time_ratio", "seconds", "worker_seconds")
"""Figures that are not the same in a repeated run."""

FIGURES = (
    "val_loss",
    "val_nats_per_byte",
    "val_perplexity",
    "final_train_loss",
    "loss_over_static_low",
    "repaired_share",
    "recovered_share",
    "switches",
    "promotion_ratio",
    "trigger_rate",
    "full_share",
    "damped_unit_steps",
    "num_faults",
    "faults_caught",
    "mean_latency_steps",
    "faulty_recovered_share",
    "recall",
    "event_recall",
    "precision",
    "capture",
    "projection_saved_bytes",
    "model_saved_bytes",
    "step_seconds",
    "wall_step_seconds",
    "step_time_ratio",
    "seconds",
)
"""Those that have a mean, a standard deviation and a number of seeds."""

_OF_SIGNALS = ("recall", "event_recall", "precision", "flagged_unit_steps", "faulty_unit_steps")
_SERIES = ("train_losses", "active_counts", "routed_counts")
_LOW, _CLEAN, _PLAIN = "static-low", "static-low-clean", "unquantized-clean"


def summarise(
    comparison: Comparison, data: Sequence[Path], parts: Mapping[tuple[str, int], Mapping[str, Any]]
) -> dict[str, Any]:
    """What ``summary.json`` holds, but for versions and the time it all took.

    Args:
        comparison: What was compared.
        data: Its text files.
        parts: The figures of each arm and seed.
    """
    seeds = comparison.seeds
    rows = {text: [_row(comparison, parts, text, seed) for seed in seeds] for text in comparison.arms}
    harm = _harm(comparison, rows)
    arms = {text: _arm(comparison, text, rows, seeds) for text in comparison.arms}
    first = parts[comparison.arms[0], seeds[0]]
    return {
        "name": comparison.name,
        "title": comparison.title,
        "recipe": {"name": comparison.recipe, **comparison.recipe_settings},
        "model": comparison.model,
        "faults": comparison.faults,
        "fault_settings": dict(comparison.fault_settings),
        "max_active": comparison.max_active,
        "error_limit": comparison.limit,
        "gaps_every": comparison.gaps_every,
        "seeds": list(seeds),
        "steps": comparison.plan.num_steps,
        "data": [str(path) for path in data] or "sotu",
        "tokenizer": "bytes",
        "bytes_per_token": first["bytes_per_token"],
        "num_parameters": first["num_parameters"],
        "num_units": first["num_units"],
        "max_grad_norm": comparison.plan.max_norm,
        "plan": {name: value for name, value in asdict(comparison.plan).items() if name != "seed"},
        "notes": _notes(comparison, harm),
        "warnings": _warnings(parts),
        "harm": harm,
        "signals": _signals(rows),
        "arms": arms,
        "faults_by_seed": {str(seed): _faults(comparison, parts, seed) for seed in seeds},
    }


def _row(
    comparison: Comparison, parts: Mapping[tuple[str, int], Mapping[str, Any]], text: str, seed: int
) -> dict[str, Any]:
    """The figures of an arm and seed, with those that take another arm of the same seed."""
    row = dict(parts[text, seed])
    low, plain = (parts.get((other, seed)) for other in (_LOW, _PLAIN))
    row["loss_over_static_low"] = _difference(row["val_loss"], None if low is None else low["val_loss"])
    row["repaired_share"] = None
    between = _harmed_and_reference(comparison)
    # Of a loss that is no number, nothing is known.
    if between is not None and _is_repairable(comparison, text):
        losses = [*(parts[other, seed]["val_loss"] for other in between), row["val_loss"]]
        row["repaired_share"] = None if None in losses else repaired_share(*losses)
    row["step_time_ratio"] = None
    if plain is not None and row["step_seconds"] is not None and plain["step_seconds"]:
        row["step_time_ratio"] = row["step_seconds"] / plain["step_seconds"]
    return row


def _arm(
    comparison: Comparison, text: str, rows: Mapping[str, list[dict[str, Any]]], seeds: Sequence[int]
) -> dict[str, Any]:
    arm, own = read_arm(text), rows[text]
    found, between = None, _harmed_and_reference(comparison)
    if between is not None and _is_repairable(comparison, text):
        found = repair(*(_losses(rows[name]) for name in (*between, text)))
        # Without harm, or with one seed, a share may be of next to nothing.
        if not found["did_harm"]:
            for row in own:
                row["repaired_share"] = None
    reasons = [row["reasons"] or {} for row in own]
    return {
        "title": arm.title,
        "policy": arm.name,
        "settings": dict(arm.changes),
        "budget": own[0]["budget"],
        "has_faults": arm.kind.has_faults and comparison.faults != "none",
        "has_budget": arm.kind.has_budget,
        "scores_decide": arm.kind.scores_decide,
        **{name: over_seeds(row[name] for row in own) for name in FIGURES},
        "most_active": max((row["most_active"] for row in own if row["most_active"] is not None), default=None),
        "reasons": {name: sum(one.get(name, 0) for one in reasons) for name in reasons[0]},
        "repaired": found,
        "by_seed": {
            str(seed): {
                key: value
                for key, value in row.items()
                if key not in (*_SERIES, "faults", "title", "warnings", "bytes_per_token", "signals", "source")
            }
            for seed, row in zip(seeds, own, strict=True)
        },
        "series": {
            "train_loss": mean_of_lines([row["train_losses"] for row in own]),
            "active": mean_of_lines([row["routed_counts"] for row in own]),
        },
    }


def _harmed_and_reference(comparison: Comparison) -> tuple[str, str] | None:
    """The two arms whose losses say what the harm is; None where no two do.

    Of injected faults it is what they cost the low-cost path. Where none are injected it is the low-cost path's own:
    over the unquantized model on the same weights and data.
    """
    arms = comparison.arms
    if comparison.faults != "none":
        return (_LOW, _CLEAN) if _LOW in arms and _CLEAN in arms else None
    low = next((arm for arm in (_LOW, _CLEAN) if arm in arms), None)
    reference = next((arm for arm in (_PLAIN, _CLEAN) if arm in arms and arm != low), None)
    return None if low is None or reference is None else (low, reference)


def _is_repairable(comparison: Comparison, text: str) -> bool:
    """Whether the arm suffers what the low-cost path does, and is not that path itself."""
    kind = read_arm(text).kind
    if comparison.faults == "none":
        return kind.is_quantized and text not in (_LOW, _CLEAN)
    return kind.has_faults and text != _LOW


def _harm(comparison: Comparison, rows: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any] | None:
    """What the low-cost path lost; None where no arm tells."""
    between = _harmed_and_reference(comparison)
    if between is None:
        return None
    low, clean = (_losses(rows[name]) for name in between)
    found = repair(low, clean, low)
    diverged = {name: found["num_diverged"][name] for name in ("low", "clean")}
    told = {name: found[name] for name in ("mean_harm", "harm_interval", "did_harm", "num_seeds")}
    return {**told, "num_diverged": diverged, "low": between[0], "reference": between[1]}


def _signals(rows: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """What each signal saw of the faults in the untreated runs, over the seeds; empty without such runs."""
    runs = [row["signals"] for row in rows.get(_LOW, ())]
    names = dict.fromkeys(name for run in runs for name in run)
    return {
        name: {figure: over_seeds(run.get(name, {}).get(figure) for run in runs) for figure in _OF_SIGNALS}
        for name in names
    }


def _harm_note(harm: Mapping[str, Any], is_injected: bool) -> str | None:
    """What is to be said where no share is told of any arm."""
    low, clean = harm["num_diverged"]["low"], harm["num_diverged"]["clean"]
    if low or clean:
        title, reference = (read_arm(harm[name]).title for name in ("low", "reference"))
        return (
            f"Of {harm['num_seeds']} seeds, {low} diverged in the arm {title!r} and {clean} in {reference!r}: how much "
            "harm was done cannot be put into a number, and nothing is said of repair."
        )
    if harm["did_harm"] is None:
        return "With one seed nothing tells harm from chance: no repaired share is told."
    if not harm["did_harm"]:
        cost = "the faults cost the low-cost path" if is_injected else "the low-cost path costs"
        return f"No harm to repair: what {cost} is not above 0 on every seed, or no more than twice its standard error."
    return None


def _notes(comparison: Comparison, harm: Mapping[str, Any] | None) -> list[str]:
    notes = []
    if comparison.faults == "none":
        notes.append("No faults are injected.")
        if harm is not None and harm["reference"] == _PLAIN:
            notes.append("Repaired is of what the low-cost path itself costs, over the unquantized model.")
    else:
        notes.append(f"This is fault injection: {FAULT_KINDS[comparison.faults]}. They are the same for every arm.")
    said = None if harm is None else _harm_note(harm, comparison.faults != "none")
    if said is not None:
        notes.append(said)
    notes.append(
        f"The model is {MODELS[comparison.model]}; validation is measured with plain layers, without any guard."
    )
    if comparison.gaps_every > 1:
        notes.append(
            f"Gaps are measured in every {comparison.gaps_every}th step, and captured counts these alone; the oracle "
            "holds its set in between, and captures all by construction."
        )
    if len(comparison.seeds) < 5:
        count = len(comparison.seeds)
        plural = "seed" if count == 1 else "seeds"
        notes.append(f"With {count} {plural}, means and intervals are rough: repeat with more before you believe them.")
    return notes


def _faults(
    comparison: Comparison, parts: Mapping[tuple[str, int], Mapping[str, Any]], seed: int
) -> list[dict[str, Any]]:
    hit = [text for text in comparison.arms if read_arm(text).kind.has_faults]
    return list(parts[hit[0], seed]["faults"]) if hit else []


def _warnings(parts: Mapping[tuple[str, int], Mapping[str, Any]]) -> dict[str, int]:
    """What was warned of, and in how many parts; in the order of the parts, whichever ended first."""
    counts: dict[str, int] = {}
    for key in sorted(parts):
        for text in parts[key]["warnings"]:
            counts[text] = counts.get(text, 0) + 1
    return counts


def _difference(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else value - other


def _losses(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Of each seed; a loss that is no number is written as null."""
    return [float("nan") if row["val_loss"] is None else row["val_loss"] for row in rows]
