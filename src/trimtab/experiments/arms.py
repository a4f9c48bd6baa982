"""One arm of a demo: a model, a data order, perhaps faults, and one way to train; and the arms of saved activations."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

import trimtab
from trimtab.control import Decision, MatchedRandom, Policy, PolicyLike, robust
from trimtab.experiments.exercise import EXERCISE_EVERY, Exercise, Observable
from trimtab.experiments.recipes import make_recipe
from trimtab.experiments.text import Corpus, TextBatches, validation_batches
from trimtab.faults import Fault, StoredCopyBurst, StoredCopyFaults
from trimtab.guard import Guard
from trimtab.precision import Recipe, find_units, measure_saved_bytes

__all__ = [
    "ARMS",
    "EXERCISED",
    "Arm",
    "ArmResult",
    "Trained",
    "TrainingPlan",
    "build_model",
    "burst_schedule",
    "catches",
    "run_arm",
    "train_arm",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPlan:
    """Model, optimizer and schedule of one arm; the same for every arm of a run.

    The defaults are those of the prototype whose figures the README quotes.
    """

    num_steps: int = 250
    """Optimizer steps."""
    seed: int = 0
    """Seed of the weights, the data order and the faults."""
    hidden: int = 128
    """Width of the model."""
    ffn: int = 256
    """Width of its MLPs."""
    num_layers: int = 4
    """Decoder layers, of seven projections each."""
    num_heads: int = 4
    """Attention heads."""
    sequence: int = 64
    """Tokens of a sequence."""
    batch: int = 8
    """Sequences of a batch."""
    learning_rate: float = 3e-3
    """Peak learning rate of AdamW."""
    weight_decay: float = 0.1
    """Weight decay."""
    max_norm: float = 1.0
    """Clip the total gradient norm to this. Without it the faults do little harm and recovery has little to repair."""
    num_validation: int = 1024
    """Held-out sequences that the validation loss is measured on."""

    @property
    def warmup_steps(self) -> int:
        """Steps of linear warm-up: 40 of 250."""
        return max(1, round(0.16 * self.num_steps))

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a tenth."""
        if step <= self.warmup_steps:
            return self.learning_rate * step / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)
        return self.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))

    def policy(self, *, max_active: int | float | None = None, damping: bool = False) -> Policy:
        """The ``robust`` preset, with its waiting times shortened where the run itself is very short."""
        burn_in = min(20, max(1, round(0.08 * self.num_steps)))
        act_from = min(40, max(1, round(0.16 * self.num_steps)))
        preset = robust(damping=damping) if max_active is None else robust(damping=damping, max_active=max_active)
        return dataclasses.replace(preset, burn_in_steps=burn_in, act_from_step=act_from)


def burst_schedule(num_steps: int) -> dict[str, Any]:
    """How many bursts fall on a run of this length, and when: 30 in 250 steps, as dense in others; for random_bursts.

    Example:
        >>> burst_schedule(250)
        {'num_bursts': 30, 'first_step': 50, 'last_step': 210}
    """
    return {
        "num_bursts": max(1, round(30 * num_steps / 250)),
        "first_step": max(1, round(0.2 * num_steps)),
        "last_step": max(1, round(0.84 * num_steps)),
    }


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to train.

    Args:
        name: Key in ``summary.json``.
        title: What the table calls it.
        recipe: Makes its recipe; gives None where nothing is quantized.
        faults: Whether the bursts fall on it. Where every copy has 8 bits or more there is no low-width copy to hit.
        policy: Makes its policy from the plan and from the number of active units that the GNMR arm had at each step.
        exercise_every: Steps from one exercise of the switch to the next; 0 never exercises it.
        observable: By what an exercised unit is seen to be on the recovery path.
        recovers_always: Whether every unit is put on the recovery path by hand in every step.
    """

    name: str
    title: str
    recipe: Callable[[], Recipe | None]
    faults: bool
    policy: Callable[[TrainingPlan, Sequence[int]], PolicyLike]
    exercise_every: int = 0
    observable: Observable = "outputs"
    recovers_always: bool = False


def _stored(low_bits: int, high_bits: int) -> Callable[[], Recipe | None]:
    return partial(make_recipe, "saved-activations", low_bits=low_bits, high_bits=high_bits)


def _no_recipe() -> None:
    return None


ARMS = (
    Arm("unquantized_clean", "unquantized, no faults", _no_recipe, False, lambda plan, _: plan.policy()),
    Arm(
        "static_4bit_clean", "static 4-bit, no faults", _stored(4, 8), False, lambda plan, _: plan.policy(max_active=0)
    ),
    Arm("static_4bit", "static 4-bit", _stored(4, 8), True, lambda plan, _: plan.policy(max_active=0)),
    Arm("gnmr", "GNMR 4/8", _stored(4, 8), True, lambda plan, _: plan.policy()),
    Arm("random", "random, same counts", _stored(4, 8), True, lambda plan, counts: MatchedRandom(counts, plan.seed)),
    Arm("damping", "damping only", _stored(4, 8), True, lambda plan, _: plan.policy(max_active=0, damping=True)),
    Arm("gnmr_damping", "GNMR 4/8 + damping", _stored(4, 8), True, lambda plan, _: plan.policy(damping=True)),
    Arm("static_8bit", "static 8-bit", _stored(8, 8), False, lambda plan, _: plan.policy(max_active=0)),
)
"""The arms of saved activations."""

EXERCISED = Arm(
    "exercised",
    "exercised by hand",
    _stored(4, 8),
    False,
    lambda plan, _: plan.policy(max_active=0),
    exercise_every=EXERCISE_EVERY,
    observable="quantizers",
)
"""Of saved activations too. Not an arm to compare: what shows its effect is watched in every step, which takes time."""


@dataclass(slots=True)
class ArmResult:
    """What one arm gave."""

    name: str
    title: str
    val_loss: float
    """Nats per token on held-out text."""
    val_nats_per_byte: float
    val_perplexity: float
    final_train_loss: float
    recovered_share: float
    """Share of unit-steps on the recovery path."""
    switches: int
    """How often a unit entered the recovery path."""
    damped_unit_steps: int
    num_faults: int
    faults_caught: int
    """Bursts during which their unit was on the recovery path at least once."""
    mean_latency_steps: float | None
    """Steps from a caught burst's start until its unit was on the recovery path."""
    projection_saved_bytes: int
    """Bytes that the projections keep for backward, measured and averaged over the run."""
    model_saved_bytes: int
    """Bytes that the whole model keeps for backward, likewise."""
    step_seconds: float
    """Median time of a step."""
    active_counts: list[int] = field(default_factory=list)
    """Units on the recovery path after each step's decision."""
    seconds: float = 0.0
    units_forced: int = 0
    """Unit-steps in which the switch was exercised."""
    units_seen_on_recovery_path: int = 0
    """Those of them in which that had an effect."""


def build_model(plan: TrainingPlan, vocab_size: int) -> nn.Module:
    """A small LLaMA with random weights from the plan's seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(plan.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=plan.hidden,
            intermediate_size=plan.ffn,
            num_hidden_layers=plan.num_layers,
            num_attention_heads=plan.num_heads,
            max_position_embeddings=max(256, plan.sequence),
            use_cache=False,
        )
    )


def run_arm(
    arm: Arm,
    plan: TrainingPlan,
    corpus: Corpus,
    bursts: Sequence[StoredCopyBurst] = (),
    *,
    make_model: Callable[[], nn.Module] | None = None,
    counts: Sequence[int] = (),
    record: Path | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> ArmResult:
    """Train one arm and measure it.

    Args:
        arm: Which arm.
        plan: Model and schedule.
        corpus: The text.
        bursts: The faults; applied only where ``arm.faults``.
        make_model: Makes the model; the plan's, with random weights, when left out.
        counts: Active units of the GNMR arm at each step, for the arm that matches them.
        record: Where its run record goes.
        on_step: Called with the step and the loss after each step.

    Returns: Its figures.
    """
    began = time.perf_counter()
    model = build_model(plan, corpus.vocab_size) if make_model is None else make_model()
    faults = list(bursts) if arm.faults else []
    trained = train_arm(
        model,
        arm.recipe(),
        arm.policy(plan, counts),
        plan,
        corpus,
        faults=[StoredCopyFaults(faults)] if faults else [],
        record=record,
        recovers_always=arm.recovers_always,
        exercise_every=arm.exercise_every,
        observable=arm.observable,
        on_step=on_step,
    )
    val_loss, routed = trained.val_loss, trained.routed
    caught, latencies = catches(faults, routed, trained.units, plan.num_steps)
    entered = routed[1:] & ~routed[:-1]
    return ArmResult(
        name=arm.name,
        title=arm.title,
        val_loss=val_loss,
        val_nats_per_byte=val_loss / corpus.bytes_per_token,
        val_perplexity=math.exp(min(val_loss, 700.0)),
        final_train_loss=trained.final_train_loss,
        recovered_share=float(routed[1:].mean()),
        switches=int(entered.sum()),
        damped_unit_steps=trained.num_damped,
        num_faults=len([b for b in faults if b.start_step <= plan.num_steps]),
        faults_caught=caught,
        mean_latency_steps=float(np.mean(latencies)) if latencies else None,
        projection_saved_bytes=trained.projection_saved_bytes,
        model_saved_bytes=trained.model_saved_bytes,
        step_seconds=trained.median_step_seconds,
        active_counts=trained.active_counts,
        seconds=time.perf_counter() - began,
        units_forced=trained.units_forced,
        units_seen_on_recovery_path=trained.units_seen_on_recovery_path,
    )


@dataclass(slots=True)
class Trained:
    """What one training left behind, step by step. T: steps, U: units."""

    units: tuple[str, ...]
    """Names of the watched units."""
    recoverable: tuple[bool, ...]
    """Which of them the recipe can switch. (U,)"""
    losses: list[float]
    """Training loss of each step, in nats a token. (T,)"""
    step_seconds: list[float]
    """Of each step whose bytes were not counted, by the clock on the wall."""
    saved_bytes: list[tuple[int, int]]
    """Bytes kept for backward by the projections and by the whole model, of the others."""
    active_counts: list[int]
    """Units that each step's decision put on the recovery path. (T,)"""
    routed: np.ndarray
    """Which units were on the recovery path: row t in step t, row 0 is empty. bool, (T + 1, U)"""
    num_damped: int
    """Unit-steps whose gradient was scaled down."""
    units_forced: int = 0
    """Unit-steps in which the switch was exercised."""
    units_seen_on_recovery_path: int = 0
    """Those of them in which that had an effect."""
    val_loss: float = float("nan")
    """Nats per token on held-out text, without the guard."""
    processor_seconds: list[float] = field(default_factory=list)
    """What these steps took of the processor, all threads of the process together; nothing of what a device does."""

    @property
    def final_train_loss(self) -> float:
        """Mean of the last ten steps."""
        return float(np.mean(self.losses[-10:]))

    @property
    def median_step_seconds(self) -> float:
        """Median time of a step; NaN where none was timed."""
        return float(np.median(self.step_seconds)) if self.step_seconds else float("nan")

    @property
    def median_processor_seconds(self) -> float:
        """Median processor time of a step, which other programs on the machine hardly change; NaN likewise."""
        return float(np.median(self.processor_seconds)) if self.processor_seconds else float("nan")

    @property
    def projection_saved_bytes(self) -> int:
        """Bytes that the projections keep for backward, averaged over the run."""
        return int(np.mean([kept[0] for kept in self.saved_bytes])) if self.saved_bytes else 0

    @property
    def model_saved_bytes(self) -> int:
        """Bytes that the whole model keeps for backward, likewise."""
        return int(np.mean([kept[1] for kept in self.saved_bytes])) if self.saved_bytes else 0


def train_arm(
    model: nn.Module,
    recipe: Recipe | None,
    policy: PolicyLike,
    plan: TrainingPlan,
    corpus: Corpus,
    *,
    faults: Sequence[Fault] = (),
    record: Path | None = None,
    recovers_always: bool = False,
    exercise_every: int = 0,
    observable: Observable = "outputs",
    quantizer_stats: bool | None = None,
    before_step: Callable[[int, Guard, Tensor], None] | None = None,
    on_decision: Callable[[int, Decision], None] | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> Trained:
    """Train a model under a guard, and measure it on held-out text without one: the loop of every arm.

    Args:
        model: The model; trained in place.
        recipe: Its recipe, if any.
        policy: Its policy.
        plan: The schedule.
        corpus: The text.
        faults: What is injected.
        record: Where the run record goes.
        recovers_always: Whether every unit is put on the recovery path by hand in every step.
        exercise_every: Steps from one exercise of the switch to the next; 0 never exercises it.
        observable: By what an exercised unit is seen to be on the recovery path.
        quantizer_stats: See ``trimtab.attach``.
        before_step: Called with the step, the guard and the step's batch before its forward; it may route by hand. Its
            time is not counted.
        on_decision: Called with the step and its decision; only where there is a recipe.
        on_step: Called with the step and the loss after each step.

    Returns: What it left behind.
    """
    units = find_units(model)
    batches = TextBatches(corpus.train, plan.batch, plan.sequence, plan.seed)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=plan.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=plan.weight_decay,
    )
    guard = trimtab.attach(model, recipe, policy=policy, record=record, quantizer_stats=quantizer_stats)
    exercise = Exercise(guard, exercise_every, observable) if exercise_every else None
    switchable = set() if guard.conversion is None else {unit.name for unit in guard.conversion.units}
    trained = Trained(
        units=guard.units,
        recoverable=tuple(name in switchable for name in guard.units),
        losses=[],
        step_seconds=[],
        saved_bytes=[],
        active_counts=[],
        routed=np.zeros((plan.num_steps + 2, len(guard.units)), dtype=bool),
        num_damped=0,
    )
    routed = trained.routed
    with guard:
        for fault in faults:
            guard.inject(fault)
        for step in range(1, plan.num_steps + 1):
            batch = batches[step]
            for group in optimizer.param_groups:
                group["lr"] = plan.learning_rate_at(step)
            # Counting bytes costs time, so the steps that are counted are left out of the step time.
            counted = step % 10 == 5
            if before_step is not None:
                before_step(step, guard, batch)
            start, processor_start = time.perf_counter(), time.process_time()
            if recovers_always and guard.conversion is not None:
                guard.route([unit.name for unit in guard.conversion.units])
            if exercise is not None:
                exercise.begin_step(step)
            if recovers_always or exercise is not None or before_step is not None:
                routed[step] = [unit in guard.active for unit in guard.units]
            if counted:
                with measure_saved_bytes(model, units) as bytes_kept:
                    loss = model(input_ids=batch, labels=batch).loss
                trained.saved_bytes.append((bytes_kept.units, bytes_kept.model))
            else:
                loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            decision = guard.step(max_norm=plan.max_norm)
            optimizer.step()
            optimizer.zero_grad()
            if exercise is not None:
                exercise.end_step(step)
            if not counted:
                trained.step_seconds.append(time.perf_counter() - start)
                trained.processor_seconds.append(time.process_time() - processor_start)
            trained.losses.append(float(loss.detach()))
            if guard.conversion is not None:
                routed[step + 1] = decision.active
                trained.active_counts.append(int(decision.active.sum()))
                if getattr(guard.policy, "damping", False):
                    trained.num_damped += int((decision.scale != 1.0).sum())
                if on_decision is not None:
                    on_decision(step, decision)
            if on_step is not None:
                on_step(step, trained.losses[-1])
    if exercise is not None:
        trained.units_forced, trained.units_seen_on_recovery_path = exercise.num_forced, exercise.num_seen
    trained.val_loss = _validation_loss(model, corpus, plan)
    trained.routed = routed[: plan.num_steps + 1]
    return trained


class _Burst(Protocol):
    @property
    def unit(self) -> str: ...

    @property
    def start_step(self) -> int: ...

    @property
    def end_step(self) -> int: ...


def catches(
    bursts: Sequence[_Burst], routed: np.ndarray, units: Sequence[str], num_steps: int
) -> tuple[int, list[int]]:
    """How many bursts had their unit on the recovery path while they lasted, and how long after their start it came.

    Args:
        bursts: The faults; each has a ``unit``, a ``start_step`` and an ``end_step``.
        routed: As in ``Trained``.
        units: The units of its columns.
        num_steps: Steps of the run.

    Example:
        >>> burst = StoredCopyBurst(unit="q", start_step=2, num_steps=3, factor=100.0)
        >>> catches([burst], np.array([[False], [False], [False], [True], [True]]), ["q"], num_steps=4)
        (1, [1])
    """
    latencies = []
    for burst in bursts:
        during = routed[burst.start_step : min(burst.end_step, num_steps + 1), units.index(burst.unit)]
        if during.any():
            latencies.append(int(during.argmax()))
    return len(latencies), latencies


@torch.no_grad()
def _validation_loss(model: nn.Module, corpus: Corpus, plan: TrainingPlan) -> float:
    model.eval()
    # A mixture's balancing loss is no part of what is measured.
    plain = {"output_router_logits": False} if hasattr(model.config, "output_router_logits") else {}
    total, count = 0.0, 0
    for batch in validation_batches(
        corpus.validation, batch=64, sequence=plan.sequence, num_sequences=plan.num_validation
    ):
        total += float(model(input_ids=batch, labels=batch, **plain).loss) * len(batch)
        count += len(batch)
    model.train()
    return total / count
