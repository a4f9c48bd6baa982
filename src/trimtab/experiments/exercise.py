"""Exercising the switch: all units on the recovery path by hand in every so many steps, and whether that did anything.

That a unit was ordered onto the recovery path says little; what is looked at is what changes physically:

- its layers' outputs, where the two paths compute different ones: each output of the exercised step is compared with
  what the layer makes of the same input on the low-cost path;
- else what its low-cost quantizers report: something in the steps before, and nothing in the exercised one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trimtab.guard import Guard
from trimtab.precision import Conversion, QuantizerObserver
from trimtab.precision.linear_conversion import in_backward
from trimtab.trace import Run

__all__ = ["EXERCISE_EVERY", "Exercise", "Observable", "exercise_sentence", "exercise_summary"]

EXERCISE_EVERY = 10
"""Steps from one exercise to the next, in the demos."""

Observable = Literal["outputs", "quantizers"]
"""By what a unit is seen to be on the recovery path."""

_NOTE = "exercise"
_MOST_NAMES = 5


class Exercise:
    """Puts all recoverable units on the recovery path by hand in every ``every``-th step, and looks at the effect.

    ``begin_step`` before the step's first forward, ``end_step`` after its ``guard.step``. The effect of each exercised
    step goes into the record as an event of kind "note". Gradients and random numbers stay as they are without it.

    Args:
        guard: The guard.
        every: Steps from one exercise to the next. >= 1.
        observable: By what a unit is seen to be on the recovery path. "quantizers" watches them in every step.
    """

    def __init__(self, guard: Guard, every: int, observable: Observable = "outputs") -> None:
        self.guard = guard
        self.every = every
        self.observable = observable
        self.num_forced = 0
        self.num_seen = 0
        self._outputs: _OutputComparison | None = None
        self._was_quantized = torch.zeros(0)
        if observable == "quantizers":
            observer = guard.conversion
            assert isinstance(observer, QuantizerObserver)
            observer.observe_quantizers(shadow=False)

    def begin_step(self, step: int) -> None:
        """Optimizer step ``step`` (from 1) begins: exercise the switch, if it is due."""
        conversion = self.guard.conversion
        assert conversion is not None
        if step % self.every:
            return
        self.guard.route([unit.name for unit in conversion.units])
        if self.observable == "outputs":
            self._outputs = _OutputComparison(conversion)
        else:
            self._was_quantized = ~self._take_errors(conversion).isnan()

    def end_step(self, step: int) -> None:
        """Optimizer step ``step`` is over: note what the exercise did."""
        conversion = self.guard.conversion
        if step % self.every or conversion is None:
            return
        if self._outputs is not None:
            changes = self._outputs.take()
            self._outputs = None
            seen = [change > 0 for change in changes]
            extra = {"smallest_change": min(changes), "largest_change": max(changes)}
        else:
            seen = (self._was_quantized & self._take_errors(conversion).isnan()).tolist()
            extra = {}
        not_seen = [unit.name for unit, s in zip(conversion.units, seen, strict=True) if not s]
        self.num_forced += len(seen)
        self.num_seen += sum(seen)
        # Guard.note falls on the step observed last, and this on the one that was forced.
        self.guard._journal.event(
            "note",
            {
                "about": _NOTE,
                "observable": self.observable,
                "units_forced": len(seen),
                "units_seen_on_recovery_path": sum(seen),
                "not_seen": not_seen[:_MOST_NAMES],
                **extra,
            },
            step=step,
        )

    @staticmethod
    def _take_errors(conversion: Conversion) -> Tensor:
        """Each unit's channel error on the low-cost path since the last call, NaN where it was not on it."""
        assert isinstance(conversion, QuantizerObserver)
        stats = conversion.take_quantizer_stats()
        return torch.full((len(conversion.units),), torch.nan) if stats is None else stats[:, 0].cpu()


class _OutputComparison:
    """Compares, for one step, each output of the converted layers with that of the low-cost path.

    Args:
        conversion: A conversion all of whose units are on the recovery path.
    """

    def __init__(self, conversion: Conversion) -> None:
        self._conversion = conversion
        layers: Any = conversion
        self._changes: list[list[float]] = [[] for _ in conversion.units]
        self._is_comparing = False
        self._hooks = [
            layer.register_forward_hook(self._compare_for(index), with_kwargs=True)
            for index, operators in enumerate(layers.operators)
            for layer in operators
        ]

    def take(self) -> list[float]:
        """Of each unit the smallest change of an output, relative to its norm; 0 where there was none. Ends it."""
        for hook in self._hooks:
            hook.remove()
        return [min(changes, default=0.0) for changes in self._changes]

    def _compare_for(self, index: int) -> Any:
        def compare(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
            # Checkpointing runs a forward again in backward; it has been looked at before.
            if self._is_comparing or not module.training or in_backward():
                return
            num_units = len(self._conversion.units)
            self._is_comparing = True
            self._conversion.route([False] * num_units)
            try:
                with torch.no_grad():
                    low = module.forward(*args, **kwargs)
            finally:
                self._conversion.route([True] * num_units)
                self._is_comparing = False
            self._changes[index].append(_relative_change(output.detach(), low))

        return compare


def _relative_change(output: Tensor, reference: Tensor) -> float:
    if torch.equal(output, reference):
        return 0.0
    change = (output.float() - reference.float()).norm() / reference.float().norm()
    # Where numbers are not finite, nothing is known to have changed.
    return float(change) if torch.isfinite(change) else 0.0


def exercise_summary(run: Run) -> dict[str, Any]:
    """What a record says of its exercised steps, over all starts of the run; counts are sums over the steps."""
    notes = [event for event in run.events("note") if event.data.get("about") == _NOTE]
    summary: dict[str, Any] = {
        "steps": [event.step for event in notes],
        "units_forced": sum(event.data["units_forced"] for event in notes),
        "units_seen_on_recovery_path": sum(event.data["units_seen_on_recovery_path"] for event in notes),
        "observable": notes[-1].data["observable"] if notes else None,
    }
    for name, choose in (("smallest_change", min), ("largest_change", max)):
        known = [event.data[name] for event in notes if event.data.get(name) is not None]
        summary[name] = choose(known, default=None)
    return summary


def exercise_sentence(exercise: Mapping[str, Any], every: int, where: str = "") -> str:
    """What came of exercising the switch, for people.

    Args:
        exercise: What ``exercise_summary`` gave.
        every: Steps from one exercise to the next.
        where: What these are steps of, with a space before it, where that is not clear.

    Example:
        >>> done = {"steps": [10], "units_forced": 7, "units_seen_on_recovery_path": 0, "observable": "outputs"}
        >>> exercise_sentence(done | {"smallest_change": 0.0, "largest_change": 0.0}, 10)[:71]
        'Exercised by hand in 1 step, 7 unit-steps: it took effect in none of th'
    """
    forced, seen = exercise["units_forced"], exercise["units_seen_on_recovery_path"]
    if not forced:
        return f"The switch was not exercised: that takes {every} steps."
    num_steps = len(exercise["steps"])
    steps = f"{num_steps} step{'' if num_steps == 1 else 's'}{where}"
    said = f"Exercised by hand in {steps}, {forced} unit-steps: it took effect in "
    if not seen:
        return f"{said}none of them. Either both paths do the same, or the units do not follow their route."
    if exercise["observable"] == "quantizers":
        how = "the low-cost path's quantizers, which report in other steps, had nothing to do in these"
    else:
        how = (
            f"on the same input, outputs of layers differ by {exercise['smallest_change']:.2g} to "
            f"{exercise['largest_change']:.2g} of their norm from those of the low-cost path"
        )
    return f"{said}{'all' if seen == forced else seen} of them ({how})."
