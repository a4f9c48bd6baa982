"""Runs one part: the healthy base of a seed, or one scenario from its checkpoint. A finished part is not run again."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from trimtab._version import __version__
from trimtab.experiments.console import single_thread
from trimtab.experiments.faults.models import ModelKind, WatchedPlan
from trimtab.experiments.faults.scenarios import NUDGE, SCENARIOS, Scenario
from trimtab.experiments.faults.training import WatchedRun
from trimtab.experiments.parts import finished_figures, keep_part
from trimtab.experiments.text import Corpus

__all__ = ["BASE", "Part", "checkpoint_of", "corpus_digest", "finished_part", "part_identity", "record_of", "run_part"]

BASE = "base"
"""The part that all scenarios of a model and seed begin from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One piece of the experiment.

    Args:
        model: The kind of model.
        seed: Of its weights and data order.
        scenario: Name of the scenario, or ``BASE``.
        start_step: Healthy steps before the fault.
        num_steps: Steps from the fault's first one on.
        plan: Model and schedule.
    """

    model: ModelKind
    seed: int
    scenario: str
    start_step: int
    num_steps: int
    plan: WatchedPlan

    @property
    def name(self) -> str:
        """The part in one word."""
        return f"{self.model}-seed{self.seed}-{self.scenario}"

    @property
    def length(self) -> int:
        """How many steps it takes."""
        return self.start_step if self.scenario == BASE else self.num_steps


def run_part(part: Part, corpus: Corpus, folder: Path) -> dict[str, Any]:
    """Run a part, unless it is finished with the same settings and text; a scenario needs its base to be finished.

    Args:
        part: Which.
        corpus: The text.
        folder: Of the whole experiment.

    Returns: Its figures; see ``_figures``.
    """
    identity = part_identity(part, corpus_digest(corpus))
    found = finished_part(part, identity, folder)
    if found is not None:
        return found
    record = record_of(part, folder)
    # What an unfinished start has left would be rows of another run.
    shutil.rmtree(record, ignore_errors=True)
    with single_thread():
        figures = _run_base(part, corpus, folder) if part.scenario == BASE else _run_scenario(part, corpus, folder)
    return keep_part(_part_path(part, folder), identity, figures)


def finished_part(part: Part, identity: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """The figures of a part that is finished with these settings; None where it has to be run."""
    if part.scenario == BASE and not checkpoint_of(part, folder).exists():
        return None
    return finished_figures(_part_path(part, folder), identity)


def part_identity(part: Part, text_sha256: str) -> dict[str, Any]:
    """All that the figures of a part depend on; JSON-able."""
    identity = asdict(part) | {"text_sha256": text_sha256, "trimtab": __version__, "torch": torch.__version__}
    return json.loads(json.dumps(identity))


def corpus_digest(corpus: Corpus) -> str:
    """A hash of the training and held-out tokens."""
    tokens = (corpus.train, corpus.validation)
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tokens)).hexdigest()


def record_of(part: Part, folder: Path) -> Path:
    """Where the run record of a part is."""
    return folder / "records" / part.model / f"seed{part.seed}" / part.scenario


def checkpoint_of(part: Part, folder: Path) -> Path:
    """Where the healthy checkpoint of a part's model and seed is."""
    return folder / "checkpoints" / f"{part.model}-seed{part.seed}.pt"


def _run_base(part: Part, corpus: Corpus, folder: Path) -> dict[str, Any]:
    began = time.perf_counter()
    checkpoint = checkpoint_of(part, folder)
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    run = WatchedRun(part.model, part.plan, corpus, part.seed, record=record_of(part, folder))
    run.train(part.start_step)
    figures = _figures(part, run, time.perf_counter() - began)
    run.save(checkpoint)
    run.close()
    return figures


def _run_scenario(part: Part, corpus: Corpus, folder: Path) -> dict[str, Any]:
    began = time.perf_counter()
    scenario = _called(part.scenario)
    record = record_of(part, folder) if scenario.watched else None
    run = WatchedRun(part.model, part.plan, corpus, part.seed, record=record, watched=scenario.watched)
    run.load(checkpoint_of(part, folder))
    if scenario.nudged:
        run.nudge(NUDGE, part.seed)
    run.train(part.start_step + part.num_steps, scenario.faults(run, part.start_step + 1, part.num_steps))
    run.close()
    return _figures(part, run, time.perf_counter() - began)


def _figures(part: Part, run: WatchedRun, seconds: float) -> dict[str, Any]:
    """What came of a part; alarms and notices are those of its own steps."""
    first_step = 1 if part.scenario == BASE else part.start_step + 1
    alarms, notices = (run.guard.alarms, run.guard.notices) if run.guard is not None else ((), ())
    return {
        "alarms": [alarm.to_dict() for alarm in alarms if alarm.step >= first_step],
        "notices": [notice.to_dict() for notice in notices if notice.step >= first_step],
        "held_out": [list(pair) for pair in run.held_out],
        "digest": run.digest(),
        "num_parameters": sum(p.numel() for p in run.model.parameters()),
        "seconds": seconds,
        "step_seconds": seconds / part.length,
    }


def _called(name: str) -> Scenario:
    return next(scenario for scenario in SCENARIOS if scenario.name == name)


def _part_path(part: Part, folder: Path) -> Path:
    return folder / "parts" / f"{part.name}.json"
