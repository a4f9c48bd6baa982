"""The healthy runs: plain ones of each kind of model, a learning rate that falls to zero, and one that is restarted."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trimtab._version import __version__
from trimtab.experiments.console import single_thread
from trimtab.experiments.faults.models import ModelKind, WatchedPlan
from trimtab.experiments.faults.run import corpus_digest
from trimtab.experiments.faults.training import WatchedRun
from trimtab.experiments.parts import finished_figures, keep_part
from trimtab.experiments.text import Corpus

__all__ = ["CASES", "Case", "HealthyRun", "run_healthy_part"]


@dataclass(frozen=True, slots=True)
class Case:
    """One way to be healthy.

    Args:
        name: Key in ``summary.json``.
        title: What the table calls it.
        model: The kind of model.
        cosine: Whether the learning rate falls along a cosine to zero at the last step.
        restarts: Whether the run is saved in the middle and goes on in a new model with new monitors.
    """

    name: str
    title: str
    model: ModelKind
    cosine: bool = False
    restarts: bool = False


CASES = (
    Case("dense", "LLaMA", "dense"),
    Case("moe", "Mixtral", "moe"),
    Case("qk_norm", "Qwen3 (QK-norm)", "qk_norm"),
    Case("cosine", "LLaMA, cosine to zero", "dense", cosine=True),
    Case("restart", "LLaMA, restarted", "dense", restarts=True),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthyRun:
    """One case with one seed.

    Args:
        case: Which case.
        seed: Of the weights and the data order.
        num_steps: Optimizer steps.
        plan: Model and schedule.
    """

    case: Case
    seed: int
    num_steps: int
    plan: WatchedPlan

    @property
    def name(self) -> str:
        """The run in one word."""
        return f"{self.case.name}-seed{self.seed}"


def run_healthy_part(part: HealthyRun, corpus: Corpus, folder: Path) -> dict[str, Any]:
    """Run a part, unless it is finished with the same settings and text.

    Args:
        part: Which.
        corpus: The text.
        folder: Of the whole study.

    Returns: Its alarms, held-out losses, a hash of its weights, its time.
    """
    path = folder / "parts" / f"{part.name}.json"
    about = asdict(part) | {"text": corpus_digest(corpus), "trimtab": __version__, "torch": torch.__version__}
    identity = json.loads(json.dumps(about))
    found = finished_figures(path, identity)
    if found is not None:
        return found
    with single_thread():
        figures = _run(part, corpus, folder)
    return keep_part(path, identity, figures)


def _run(part: HealthyRun, corpus: Corpus, folder: Path) -> dict[str, Any]:
    began = time.perf_counter()
    record = folder / "records" / part.case.name / f"seed{part.seed}"
    shutil.rmtree(record, ignore_errors=True)
    plan = replace(part.plan, cosine_steps=part.num_steps) if part.case.cosine else part.plan
    run = WatchedRun(part.case.model, plan, corpus, part.seed, record=record)
    if part.case.restarts:
        run.train(part.num_steps // 2)
        checkpoint = folder / f"{part.name}.pt"
        run.save(checkpoint)
        run.close(finished=False)
        run = WatchedRun(part.case.model, plan, corpus, part.seed, record=record)
        run.load(checkpoint)
        checkpoint.unlink()
    run.train(part.num_steps)
    assert run.guard is not None
    alarms = [alarm.to_dict() for alarm in run.guard.alarms]
    run.close()
    return {
        "alarms": alarms,
        "held_out": [list(pair) for pair in run.held_out],
        "digest": run.digest(),
        "num_parameters": sum(p.numel() for p in run.model.parameters()),
        "seconds": time.perf_counter() - began,
    }
