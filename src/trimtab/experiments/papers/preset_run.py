"""The paper's own model sizes: each arm through ``trimtab train``, one after the other, also under torchrun.

Nothing is injected there: what the low-cost path does is what happens. The models, lengths and policies are those of
``RUN_PRESETS``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from trimtab.control import MatchedRandom, PolicyLike, preset
from trimtab.control.policy import budget_in_units
from trimtab.errors import ConfigError, MissingExtraError
from trimtab.experiments.compare.measures import full_share, over_seeds, switches, trigger_rate
from trimtab.experiments.paper_settings import PapersSettings
from trimtab.experiments.papers.layout import Layout, Row
from trimtab.experiments.papers.published import (
    GNMR_4BIT,
    PUBLISHED_COLUMNS,
    PUBLISHED_NOTE,
    STATIC_4BIT,
    STATIC_8BIT,
    UNQUANTIZED,
)
from trimtab.experiments.papers.tables import make_table, markdown_table, rich_tables
from trimtab.experiments.presets import RunPreset, run_preset
from trimtab.experiments.settings import TrainSettings, prepare_folder, write_whole
from trimtab.experiments.source import source_of, source_text
from trimtab.experiments.versions import package_versions
from trimtab.trace import open_run

__all__ = ["PresetArm", "arms_of", "run_preset_arms", "scaled"]

_COLUMNS = (
    *("val_nats_per_byte", "val_perplexity", "over_unquantized", "trigger_rate", "promotion_ratio", "recovered_share"),
    *("full_share", "wall_step_seconds"),
)
_LEFT_OUT = (
    "Left out here: the two-stage policy where the preset's is another, other budgets, ADAPT-style and fixed sets, "
    "channel errors, and random recovery beside any arm but the one named gnmr. x unquantized is of a token of the "
    "tokenizer named, and the wall time of a step holds whatever else the device did."
)
_WARM_UP = (
    " The high-fidelity warm-up of {share:.0%} of the steps is in the arms gnmr and random alone: static-low has none, "
    "so that what they gain over it is of the policy and the warm-up together."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PresetArm:
    """One way to train.

    Args:
        name: Of its folder.
        title: What the table calls it.
        changes: Settings of ``trimtab train`` that are its own.
        reference: The arm whose number of active units it has in each step, at random; empty for none.
        recovers_all: Whether every unit is put on the recovery path by hand in every step.
        published: The paper's figures, by the keys of columns.
    """

    name: str
    title: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    reference: str = ""
    recovers_all: bool = False
    published: Mapping[str, Any] = field(default_factory=dict)


def arms_of(experiment: str, known: RunPreset) -> tuple[PresetArm, ...]:
    """The arms of an experiment at a preset, in the order in which they run.

    Example:
        >>> [arm.name for arm in arms_of("moe", run_preset("moe-3.7b"))]
        ['unquantized-clean', 'static-low', 'static-high', 'gnmr', 'random']
    """
    recipe: dict[str, Any] = {"recipe": known.recipe, **known.recipe_settings, "preset": known.policy}
    # The table of the paper that we know is that of LLaMA 60M.
    has_table = experiment == "activations" and known.name == "llama-60m"

    def of_paper(figures: Mapping[str, Any]) -> Mapping[str, Any]:
        return figures if has_table else {}

    if experiment == "deepseek":
        recipe = {"recipe": "quantized-gemm", "unit": "block", "preset": "paper-deepseek"}
    static = recipe | {"max_active": 0}
    arms = [
        PresetArm(
            name="unquantized-clean",
            title="unquantized",
            changes={"recipe": "none", "preset": recipe["preset"]},
            published=of_paper(UNQUANTIZED),
        ),
        PresetArm(name="static-low", title="low-cost path", changes=static, published=of_paper(STATIC_4BIT)),
        PresetArm(
            name="static-high",
            title="recovery path",
            changes=static,
            recovers_all=True,
            published=of_paper(STATIC_8BIT),
        ),
        PresetArm(name="gnmr", title=f"GNMR, {recipe['preset']}", changes=recipe, published=of_paper(GNMR_4BIT)),
    ]
    if experiment == "activations":
        arms += [
            PresetArm(
                name=f"gnmr-{name}",
                title=f"GNMR, {name}",
                changes=recipe | {"preset": name},
                published=of_paper(GNMR_4BIT),
            )
            for name in ("paper-2.0", "paper-3.0")
        ]
    return (*arms, PresetArm(name="random", title="random, as many as GNMR", changes=recipe, reference="gnmr"))


def scaled(known: RunPreset, steps: int | None) -> RunPreset:
    """The preset with another length, its warm-up in proportion; itself where there is none.

    Example:
        >>> short = scaled(run_preset("llama-60m"), 500)
        >>> short.steps, short.warmup_steps
        (500, 50)
    """
    if steps is None:
        return known
    return dataclasses.replace(known, steps=steps, warmup_steps=round(known.warmup_steps * steps / known.steps))


def run_preset_arms(settings: PapersSettings, console: Console, known: RunPreset | None = None) -> dict[str, Any]:
    """Train every arm that is not finished, and report.

    Each arm and seed has a folder below OUT/PRESET, as ``trimtab train`` writes it; a run that was killed goes on from
    its last checkpoint. Under torchrun every rank calls this; the folder must be one that all of them see.

    Args:
        settings: Which experiment and preset; where, how long, which text.
        console: Where rank 0 prints.
        known: The preset; the one that ``settings`` names when left out.

    Returns: What ``summary.json`` holds.

    Raises:
        ConfigError: when a setting cannot be meant, or a device's batch does not divide the preset's.
        MissingExtraError: when transformers, or what the recipe needs, is not installed.
    """
    assert settings.preset is not None
    is_first = os.environ.get("RANK", "0") == "0"
    known = scaled(run_preset(settings.preset) if known is None else known, settings.steps)
    if settings.batch is not None:
        known = dataclasses.replace(known, batch=settings.batch)
    began, folder = time.perf_counter(), settings.folder / known.name
    prepare_folder(folder)
    model = _model_of(settings, known, folder)
    arms, source = arms_of(settings.name, known), source_of()
    figures: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
    for seed in settings.all_seeds:
        for arm in arms:
            if is_first:
                console.print(f"[bold]{known.name}[/bold]: {arm.title}, seed {seed}", highlight=False)
            out = folder / f"seed{seed}" / arm.name
            train = _train_settings(settings, known, arm, seed, model, out)
            figures[arm.name].append(_train(arm, train, known, folder / f"seed{seed}"))
    summary: dict[str, Any] = {
        "experiment": settings.name,
        "preset": known.name,
        "title": f"{known.name}, {known.steps} steps",
        "base": "random weights" if settings.model is None else str(settings.model),
        "seeds": list(settings.all_seeds),
        "steps": known.steps,
        "run": _plain(known),
        "tokenizer": settings.tokenizer,
        "faults": "none",
        "data": [str(path) for path in settings.data],
        "arms": {arm.name: _over_seeds(arm, settings.all_seeds, figures[arm.name]) for arm in arms},
        "source": source,
        "versions": package_versions(),
        "seconds": time.perf_counter() - began,
    }
    layouts = _layouts(known, arms, settings.tokenizer)
    summary["tables"] = [table for one in layouts if (table := make_table(one, {known.name: summary})) is not None]
    if is_first:
        write_whole(folder / "summary.json", summary)
        parts = [f"# {summary['title']}", f"source: {source_text(source)}", *map(markdown_table, summary["tables"])]
        (folder / "table.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
        for table in summary["tables"]:
            for shown in rich_tables(table, console.width):
                console.print(shown)
            console.print(f"{table['note']}\n", highlight=False, markup=False)
        console.print(f"Tables: {folder / 'table.md'}   Figures: {folder / 'summary.json'}", highlight=False)
    return summary


def _plain(known: RunPreset) -> dict[str, Any]:
    """The preset as JSON takes it."""
    values = {item.name: getattr(known, item.name) for item in dataclasses.fields(known)}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}


def _model_of(settings: PapersSettings, known: RunPreset, folder: Path) -> Path:
    """The checkpoint to begin from, or the preset's config, written."""
    if settings.model is not None:
        return settings.model
    path = folder / "config.json"
    text = json.dumps(dict(known.config), indent=1)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        # Whole or not at all, whichever rank is the first: all of them write the same.
        part = path.with_name(f"config.json.{os.getpid()}")
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    return path


def _train_settings(
    settings: PapersSettings, known: RunPreset, arm: PresetArm, seed: int, model: Path, out: Path
) -> TrainSettings:
    import torch

    adapters: dict[str, Any] = {}
    if known.lora_rank:
        adapters = {"lora_rank": known.lora_rank, "lora_alpha": known.lora_alpha}
    given: dict[str, Any] = dict(arm.changes)
    return TrainSettings(
        model=str(model),
        data=settings.data,
        out=out,
        tokenizer=settings.tokenizer,
        steps=known.steps,
        batch=known.batch,
        accumulation=known.accumulation(int(os.environ.get("WORLD_SIZE", "1"))),
        sequence=known.sequence,
        learning_rate=known.learning_rate,
        warmup_steps=known.warmup_steps,
        seed=seed,
        bf16=torch.accelerator.is_available(),
        save_every=max(100, known.steps // 20),
        log_every=max(10, known.steps // 1000),
        **adapters,
        **given,
    )


def _train(arm: PresetArm, train: TrainSettings, known: RunPreset, folder: Path) -> dict[str, Any]:
    """The figures of an arm and seed, which is trained unless it is finished."""
    try:
        from trimtab.experiments.papers.by_hand import RecoverAll
        from trimtab.experiments.train import run_train
    except ImportError:
        raise MissingExtraError("A preset's run", "transformers", "hf") from None
    num_by_hand = known.steps if arm.recovers_all else 0
    if arm.changes.get("max_active") != 0 and arm.changes["recipe"] != "none":
        num_by_hand = known.high_fidelity_steps
    identity = {"arm": arm.name, "steps_by_hand": num_by_hand, "run": known.name}
    finished = _finished(train, identity)
    if finished is None:
        policy: PolicyLike | None = None
        if arm.reference:
            with open_run(folder / arm.reference) as run:
                counts = [int(count) for count in run.steps().active.sum(axis=1)]
            policy = MatchedRandom(counts, train.seed, scores=preset(train.preset, total_steps=train.steps))
        finished = run_train(
            train,
            policy=policy,
            further=lambda watch: [RecoverAll(watch, num_by_hand)] if num_by_hand else [],
            identity=identity,
        )
    losses = {key: finished[key] for key in ("val_loss", "val_perplexity", "val_nats_per_byte")}
    return losses | _of_record(train, num_by_hand)


def _finished(train: TrainSettings, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """The summary of a whole run with these settings, or None.

    Raises: ConfigError: when the folder holds a whole run with other settings.
    """
    path = train.out / "summary.json"
    if not path.exists():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    if found.get("settings") != {**train.identity(), **identity}:
        allowed = "it holds a whole run with other settings."
        raise ConfigError("out", str(train.out), allowed, "Choose another folder for the results.")
    return found


def _of_record(train: TrainSettings, num_by_hand: int) -> dict[str, float | None]:
    """What the run record says: how much was recovered, triggered and promoted, and how long a step took."""
    with open_run(train.out) as run:
        table = run.steps()
        can = np.array([unit.recoverable for unit in run.unit_table], dtype=np.bool_)
    times = np.diff(table.elapsed_s)[table.segment[1:] == table.segment[:-1]]
    found: dict[str, float | None] = {"wall_step_seconds": float(np.median(times)) if len(times) else None}
    if not can.any() or not len(table):
        return found | dict.fromkeys(("recovered_share", "trigger_rate", "promotion_ratio", "full_share"))
    # A row's set is that of the step after it.
    routed = np.vstack([np.zeros_like(table.active[:1]), table.active[:-1]])[:, can]
    routed[:num_by_hand] = True
    budget = _budget(train, int(can.sum()))
    gnmr, risk = (values[:, can].astype(np.float64) for values in (table.gnmr, table.risk))
    return found | {
        "recovered_share": float(routed.mean()),
        "trigger_rate": trigger_rate(gnmr, risk),
        "promotion_ratio": switches(routed) / routed.size,
        # By hand there is no budget.
        "full_share": None if num_by_hand >= len(routed) else full_share(routed[num_by_hand:], budget),
    }


def _budget(train: TrainSettings, num_units: int) -> int:
    policy = preset(train.preset, total_steps=train.steps)
    return budget_in_units(policy.max_active if train.max_active is None else train.max_active, num_units)


def _over_seeds(arm: PresetArm, seeds: Sequence[int], figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    keys = dict.fromkeys(key for one in figures for key in one)
    by_seed = {str(seed): dict(one) for seed, one in zip(seeds, figures, strict=True)}
    return {
        "title": arm.title,
        **{key: over_seeds(one.get(key) for one in figures) for key in keys},
        "by_seed": by_seed,
    }


def _layouts(known: RunPreset, arms: Sequence[PresetArm], tokenizer: str) -> list[Layout]:
    """Ours, and what the paper reports where it is known."""
    rows = [Row(scenario=known.name, arm=arm.name, title=arm.title, published=arm.published) for arm in arms]
    note = f"{_LEFT_OUT} Tokenizer: {tokenizer}."
    if known.high_fidelity_share:
        note += _WARM_UP.format(share=known.high_fidelity_share)
    published = [row for row in rows if row.published]
    if not published:
        note += " The paper's figures for this run are not known to us."
    layouts = [Layout(title=f"{known.name}: quality and triggers", columns=_COLUMNS, rows=tuple(rows), note=note)]
    if published:
        title = "What the paper reports, by its own tokenizer"
        layouts.append(Layout(title=title, columns=PUBLISHED_COLUMNS, rows=tuple(published), note=PUBLISHED_NOTE))
    return layouts
