"""Whether the guard is called once an optimizer step: the two mistakes of training loops, noticed from outside."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor, nn

from trimtab.monitors.optimizers import OptimizerWatch

__all__ = ["Cadence"]

# More micro-batches than anybody accumulates, and few enough to speak up early in a run.
_MANY_STEPS = 20


class Cadence:
    """Compares calls of ``guard.step`` with what the optimizer does.

    Args:
        watch: Counts the optimizer's steps.
    """

    def __init__(self, watch: OptimizerWatch) -> None:
        self._watch = watch
        self._optimizer_steps_at_call = 0
        self._calls = 0
        self._before: tuple[weakref.ref[nn.Parameter], int, weakref.ref[Tensor]] | None = None

    def on_call(self, parameters: Sequence[nn.Parameter]) -> str | None:
        """``guard.step`` is being called; returns what is wrong, or None."""
        self._calls += 1
        sample = next((p for p in parameters if p.grad is not None), None)
        before, self._before = self._before, None
        steps, self._optimizer_steps_at_call = self._optimizer_steps_at_call, self._watch.num_steps
        if sample is None or sample.grad is None:
            return None
        self._before = (weakref.ref(sample), sample._version, weakref.ref(sample.grad))
        if before is None or self._watch.num_steps != steps:
            return None
        # No optimizer stepped, the parameter was not written to, and the gradient is still the same tensor, which
        # zero_grad would have replaced: the second call sees the first one's gradients once more.
        if before[0]() is sample and before[1] == sample._version and before[2]() is sample.grad:
            return (
                "guard.step was called twice without an optimizer step between them, on gradients that were not "
                "cleared. It belongs once before each optimizer.step(), after the last micro-batch; called for every "
                "micro-batch it sees growing gradients and counts too many steps."
            )
        return None

    def on_optimizer_step(self) -> str | None:
        """Asked after an optimizer step; returns what is wrong, or None."""
        if self._calls == 0 and self._watch.num_steps == _MANY_STEPS:
            return (
                f"The optimizer has stepped {_MANY_STEPS} times and guard.step was never called, so nothing is "
                "watched. Call guard.step(max_norm=...) between backward and optimizer.step()."
            )
        return None
