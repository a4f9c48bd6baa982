"""Runs one part: an arm on a seed, or the base of a seed. A finished part is not run again."""

from __future__ import annotations

import contextlib
import functools
import math
import shutil
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from trimtab.control import Decision
from trimtab.control.theory import capture, oracle_set
from trimtab.errors import TrimtabWarning
from trimtab.experiments.arms import Trained, catches, train_arm
from trimtab.experiments.compare.arms import ArmName, read_arm
from trimtab.experiments.compare.comparison import Comparison
from trimtab.experiments.compare.faults import PlannedFaults, plan_faults
from trimtab.experiments.compare.measures import (
    detection,
    fault_steps,
    full_share,
    reason_counts,
    switches,
    trigger_rate,
)
from trimtab.experiments.compare.models import earlier_and_later, model_maker, pretrain_base, switchable_units
from trimtab.experiments.compare.signals import first_scored_step, signals_of
from trimtab.experiments.console import single_thread
from trimtab.experiments.faults.run import corpus_digest
from trimtab.experiments.parts import figures_of, finished_figures, keep_part
from trimtab.experiments.recipes import make_recipe
from trimtab.experiments.source import source_digest, source_of
from trimtab.experiments.text import Corpus
from trimtab.experiments.versions import package_versions
from trimtab.guard import Guard
from trimtab.precision.recovery_gap import measure_recovery_gaps

__all__ = ["BASE", "Part", "record_of", "run_part"]

BASE = "base"
"""The part that trains the base that the arms of a seed put adapters on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One piece of a comparison.

    Args:
        comparison: Of which.
        arm: The arm as written, or ``BASE``.
        seed: Of its weights, data order and faults.
        data: Text files.
    """

    comparison: Comparison
    arm: str
    seed: int
    data: tuple[Path, ...] = ()

    @property
    def name(self) -> str:
        """The part in one word."""
        return f"{self.arm}-seed{self.seed}"


def run_part(part: Part, corpus: Corpus, folder: Path) -> dict[str, Any]:
    """Run a part, unless it is finished with the same settings and text. Those that it needs have to be finished.

    Args:
        part: Which.
        corpus: The text, whole.
        folder: Of the comparison.

    Returns: Its figures.
    """
    if part.comparison.model == "lora":
        earlier, later = earlier_and_later(part.data, part.comparison.plan.sequence)
        corpus = earlier if part.arm == BASE else later
    identity = _identity(part, corpus)
    found = _finished(part, identity, folder)
    if found is not None:
        return found
    record = record_of(part, folder)
    # What an unfinished start has left would be rows of another run.
    shutil.rmtree(record, ignore_errors=True)
    began = time.perf_counter()
    with single_thread(), _heard() as said:
        figures = _train_base(part, corpus, folder) if part.arm == BASE else _train(part, corpus, folder)
    figures["warnings"] = list(dict.fromkeys(said))
    figures |= {"seconds": time.perf_counter() - began, "source": _source()}
    return keep_part(_part_path(part, folder), identity, figures)


def record_of(part: Part, folder: Path) -> Path:
    """Where the run record of a part is."""
    return folder / "records" / f"seed{part.seed}" / _file_name(part.arm)


def _train_base(part: Part, corpus: Corpus, folder: Path) -> dict[str, Any]:
    return {"val_loss": pretrain_base(part.comparison.plan_of(part.seed), corpus, _base_path(part, folder))}


def _train(part: Part, corpus: Corpus, folder: Path) -> dict[str, Any]:
    comparison, arm = part.comparison, read_arm(part.arm)
    plan = comparison.plan_of(part.seed)
    make_model = model_maker(comparison.model, plan, corpus, _base_path(part, folder))
    # Before the model that is trained: where the faults fall is the same for every arm.
    recipe: Any = make_recipe(comparison.recipe, **comparison.recipe_settings)
    units, can_observe = switchable_units(make_model(), recipe)
    planned = plan_faults(comparison, units, part.seed) if arm.kind.has_faults else PlannedFaults()
    policy = comparison.policy(arm, part.seed, units=units, counts=_counts(part, arm, folder))
    watch = _Watch(comparison, arm, planned, arm.budget(comparison.max_active, len(units)))
    model = make_model()
    # The untreated run under faults is the one that all signals are read off.
    is_measured = arm.name == "static-low" and bool(planned.windows)
    trained = train_arm(
        model,
        recipe if arm.kind.is_quantized else None,
        policy,
        plan,
        corpus,
        faults=planned.faults,
        record=record_of(part, folder),
        recovers_always=arm.kind.route == "all",
        quantizer_stats=True if is_measured and can_observe else None,
        before_step=watch.before_step if arm.kind.is_quantized and comparison.gaps_every else None,
        on_decision=watch.on_decision,
    )
    return {
        "title": arm.title,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "num_units": len(units),
        **_cost_and_loss(trained, corpus, on_cpu=next(model.parameters()).device.type == "cpu"),
        **watch.figures(trained),
        "signals": signals_of(comparison, record_of(part, folder), planned.windows, units) if is_measured else {},
        "train_losses": trained.losses,
        "active_counts": trained.active_counts,
        "routed_counts": trained.routed[1:].sum(axis=1).tolist(),
        "faults": [dict(one) for one in planned.settings],
    }


class _Watch:
    """What a part's decisions and gaps are while it trains, and what they amount to.

    Args:
        comparison: Of which.
        arm: The arm.
        planned: The faults that fall on it.
        budget: The most units that it may have on the recovery path.
    """

    def __init__(self, comparison: Comparison, arm: ArmName, planned: PlannedFaults, budget: int) -> None:
        self.comparison, self.arm, self.planned, self.budget = comparison, arm, planned, budget
        self._rows: dict[str, list[np.ndarray]] = {"gnmr": [], "risk": [], "reason": []}
        self._gaps: dict[int, dict[str, float]] = {}
        self._held: list[str] = []

    def before_step(self, step: int, guard: Guard, batch: Tensor) -> None:
        """Measure the gaps where they are due, of this very step's batch under its faults; the oracle goes by them."""
        if (step - 1) % self.comparison.gaps_every == 0:
            model = guard.model

            def loss_of(_: int) -> Tensor:
                # Measuring begins the step anew, and what the faults did to stored copies ends with that.
                for fault in self.planned.faults:
                    fault.begin_step(step, guard.conversion)
                return model(input_ids=batch, labels=batch).loss

            rate = self.comparison.plan.learning_rate_at(step)
            found = measure_recovery_gaps(model, guard, loss_of, eta=rate)
            self._gaps[step] = {name: one.gap if math.isfinite(one.gap) else math.nan for name, one in found.items()}
            if self.arm.kind.route == "oracle":
                names, values = list(self._gaps[step]), list(self._gaps[step].values())
                chosen = oracle_set(values, self.budget)
                self._held = [name for name, one in zip(names, chosen.tolist(), strict=True) if one]
        if self.arm.kind.route == "oracle":
            guard.route(self._held)

    def on_decision(self, step: int, decision: Decision) -> None:
        """Keep what the decision says."""
        for name, rows in self._rows.items():
            rows.append(np.array(getattr(decision, name)))

    def figures(self, trained: Trained) -> dict[str, Any]:
        """What the decisions amount to. A model that is not quantized has none."""
        routed = trained.routed[1:][:, list(trained.recoverable)]
        if not self.arm.kind.is_quantized:
            return dict.fromkeys(_OF_DECISIONS)
        names = [name for name, can in zip(trained.units, trained.recoverable, strict=True) if can]
        gnmr, risk, reason = (np.array(rows) for rows in self._rows.values())
        num_steps, windows = len(routed), self.planned.windows
        caught, latencies = catches(windows, trained.routed, trained.units, num_steps)
        first_step = first_scored_step(self.comparison)
        found = detection(risk[:, list(trained.recoverable)], windows, names, first_step=first_step)
        # What a step's gradient shows can recover the next step at the earliest.
        faulty = fault_steps(windows, names, num_steps, after=1)
        faulty[:first_step] = False
        reasons = reason_counts(reason) if reason.dtype != object else {}
        return {
            "budget": self.budget,
            "most_active": int(routed.sum(axis=1).max()),
            "recovered_share": float(routed.mean()),
            "switches": switches(routed),
            "promotion_ratio": switches(routed) / routed.size,
            "trigger_rate": trigger_rate(gnmr, risk),
            "full_share": full_share(routed, self.budget) if self.arm.kind.has_budget else None,
            "damped_unit_steps": trained.num_damped,
            "num_faults": sum(window.start_step <= num_steps for window in windows),
            "faults_caught": caught,
            "mean_latency_steps": float(np.mean(latencies)) if latencies else None,
            "faulty_recovered_share": float(routed[faulty].mean()) if faulty.any() else None,
            **found,
            "reasons": reasons,
            "capture": self._capture(trained),
        }

    def _capture(self, trained: Trained) -> float | None:
        """Of the gaps measured, those of units that were on the recovery path, over the most that the budget allows."""
        if not self._gaps or self.arm.kind.route == "all":
            return None
        steps = sorted(self._gaps)
        names = [name for name, can in zip(trained.units, trained.recoverable, strict=True) if can]
        gaps = np.array([[self._gaps[step].get(name, math.nan) for name in names] for step in steps])
        budget = self.budget or read_arm("oracle").budget(self.comparison.max_active, len(names))
        active = trained.routed[steps][:, list(trained.recoverable)]
        return capture(gaps, active, budget).of_run


_OF_DECISIONS = (
    "budget",
    "most_active",
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
    "faulty_unit_steps",
    "faulty_and_flagged",
    "flagged_unit_steps",
    "flagged_in_fault",
    "reasons",
    "capture",
)


def _cost_and_loss(trained: Trained, corpus: Corpus, on_cpu: bool) -> dict[str, Any]:
    diverged = not math.isfinite(trained.val_loss)
    wall = trained.median_step_seconds
    return {
        "val_loss": trained.val_loss,
        "val_nats_per_byte": trained.val_loss / corpus.bytes_per_token,
        "bytes_per_token": corpus.bytes_per_token,
        "val_perplexity": math.nan if diverged else math.exp(min(trained.val_loss, 700.0)),
        "final_train_loss": trained.final_train_loss,
        "projection_saved_bytes": trained.projection_saved_bytes,
        "model_saved_bytes": trained.model_saved_bytes,
        # A processor knows nothing of what another device does for it.
        "step_seconds": trained.median_processor_seconds if on_cpu else wall,
        "wall_step_seconds": wall,
    }


@contextlib.contextmanager
def _heard() -> Iterator[list[str]]:
    """What trimtab warns of inside: for the summary, once, and not between the bars of the progress."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TrimtabWarning)
        yield said
    for one in caught:
        if issubclass(one.category, TrimtabWarning):
            said.append(str(one.message))
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


def _counts(part: Part, arm: ArmName, folder: Path) -> tuple[int, ...]:
    """Active units after each step of the arm that this one matches, which has ended."""
    if arm.reference is None:
        return ()
    reference = Part(comparison=part.comparison, arm=arm.reference, seed=part.seed, data=part.data)
    return tuple(figures_of(_part_path(reference, folder))["active_counts"])


def _finished(part: Part, identity: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """The figures of a part that is finished with these settings; None where it has to be run."""
    if part.arm == BASE and not _base_path(part, folder).exists():
        return None
    return finished_figures(_part_path(part, folder), identity)


def _identity(part: Part, corpus: Corpus) -> dict[str, Any]:
    """All that the figures of a part depend on; JSON-able."""
    digests = {"text_sha256": corpus_digest(corpus), "source_sha256": source_digest()}
    part_of = {"arm": part.arm, "seed": part.seed, "versions": package_versions()}
    return {**part.comparison.identity(), **part_of, **digests}


@functools.cache
def _source() -> dict[str, Any]:
    return source_of()


def _part_path(part: Part, folder: Path) -> Path:
    return folder / "parts" / f"{_file_name(part.name)}.json"


def _base_path(part: Part, folder: Path) -> Path:
    return folder / "bases" / f"seed{part.seed}.pt"


def _file_name(text: str) -> str:
    """The text as a file may be called anywhere."""
    return "".join(c if c.isalnum() or c in "-._@=" else "+" for c in text)
