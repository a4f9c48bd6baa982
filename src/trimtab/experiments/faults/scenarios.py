"""What is injected: one scenario a fault, its healthy twins and its controls. Torch is loaded by what makes one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trimtab.experiments.faults.training import WatchedRun
    from trimtab.faults import Fault

__all__ = ["HEALTHY", "NUDGED", "SCENARIOS", "UNWATCHED", "Scenario", "scenarios_of"]

NUDGE = 1e-6
"""What the weights of the second healthy twin are moved by, relative to their size."""

_MakeFaults = Callable[["WatchedRun", int, int], "list[Fault]"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One way on from the healthy checkpoint.

    Args:
        name: Key in ``summary.json``.
        title: What the table calls it.
        expected: Diagnoses that name what was injected; empty where none of them does.
        faults: Makes the faults of a run, from its first faulty step on, for a number of steps.
        models: The kinds of model that it is run on.
        watched: Whether the monitors go on watching.
        nudged: Whether the weights are moved by a millionth first.
        harmless: Whether nothing that it does should harm, so that every alarm is false.
    """

    name: str
    title: str
    expected: tuple[str, ...]
    faults: _MakeFaults
    models: tuple[str, ...] = ("dense", "moe")
    watched: bool = True
    nudged: bool = False
    harmless: bool = False


def _none(run: WatchedRun, first: int, num: int) -> list[Fault]:
    return []


def _attention(mantissa_bits: int | None = None, rounding: str = "truncate", bias: float = 0.0) -> _MakeFaults:
    def make(run: WatchedRun, first: int, num: int) -> list[Fault]:
        from trimtab.faults import BiasedAttentionBackward

        return [
            BiasedAttentionBackward(
                run.model,
                start_step=first,
                num_steps=num,
                mantissa_bits=mantissa_bits,
                rounding=rounding,  # type: ignore[arg-type]
                bias=bias,
            )
        ]

    return make


def _rate(factor: float) -> _MakeFaults:
    def make(run: WatchedRun, first: int, num: int) -> list[Fault]:
        from trimtab.faults import LargeLearningRate

        return [LargeLearningRate(run.optimizer, factor=factor, start_step=first, num_steps=num)]

    return make


def _small_batch(run: WatchedRun, first: int, num: int) -> list[Fault]:
    from trimtab.faults import SmallBatch

    return [SmallBatch(num_samples=1, start_step=first, num_steps=num)]


def _no_aux_loss(run: WatchedRun, first: int, num: int) -> list[Fault]:
    from trimtab.faults import RouterFault

    return [RouterFault(run.model, "no_aux_loss", start_step=first, num_steps=num)]


def _all(*makers: _MakeFaults) -> _MakeFaults:
    def make(run: WatchedRun, first: int, num: int) -> list[Fault]:
        return [fault for maker in makers for fault in maker(run, first, num)]

    return make


_BIASED, _INEXACT = "biased attention backward", "inexact attention backward"
_DYNAMICS, _ROUTER = "attention dynamics", "router"

HEALTHY = Scenario("healthy", "healthy twin", ("healthy",), _none, harmless=True)
UNWATCHED = Scenario("unwatched", "healthy, unwatched", (), _none, watched=False, harmless=True)
NUDGED = Scenario("nudged", "healthy, weights nudged", ("healthy",), _none, ("dense",), nudged=True, harmless=True)

SCENARIOS = (
    HEALTHY,
    UNWATCHED,
    NUDGED,
    Scenario("truncated", "O truncated to 1 bit", (_BIASED, _INEXACT), _attention(1)),
    Scenario(
        "rounded", "O rounded to 1 bit (control)", ("healthy",), _attention(1, "nearest"), ("dense",), harmless=True
    ),
    Scenario("bias_0.1%", "delta bias 0.1%", (_BIASED,), _attention(bias=0.001), ("dense",)),
    Scenario("bias_1%", "delta bias 1%", (_BIASED,), _attention(bias=0.01), ("dense",)),
    Scenario("rate_x10", "learning rate x10", (_DYNAMICS, _ROUTER), _rate(10.0)),
    Scenario("small_batch", "1 of 8 sequences", (_ROUTER,), _small_batch),
    Scenario("no_aux_loss", "router without aux loss", (_ROUTER,), _no_aux_loss, ("moe",)),
    Scenario("no_aux_rate_x10", "no aux loss, rate x10", (_ROUTER,), _all(_no_aux_loss, _rate(10.0)), ("moe",)),
    Scenario("truncated_rate_x10", "truncation and rate x10", ("combined",), _all(_attention(1), _rate(10.0))),
)
"""In the order of the table."""


def scenarios_of(model: str) -> tuple[Scenario, ...]:
    """Those that are run on a kind of model."""
    return tuple(scenario for scenario in SCENARIOS if model in scenario.models)
