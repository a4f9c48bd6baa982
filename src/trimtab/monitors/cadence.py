"""Whether the guard is called once an optimizer step, and before it: mistakes of loops, noticed from outside."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor, nn

from trimtab.monitors.backward_norms import has_backward_hooks
from trimtab.monitors.optimizers import OptimizerWatch

__all__ = ["Cadence"]

# More micro-batches than anybody accumulates, and few enough to speak up early in a run.
_MANY_STEPS = 20

_TWICE = (
    "guard.step was called twice without an optimizer step between them, on gradients that were not cleared. It "
    "belongs once before each optimizer.step(), after the last micro-batch; called for every micro-batch it sees "
    "growing gradients and counts too many steps."
)
_NEVER = (
    "The optimizer has stepped {num_steps} times and guard.step was never called, so nothing is watched. Call "
    "guard.step(max_norm=...) between backward and optimizer.step()."
)
_NO_GRADIENT = (
    "guard.step was called twice and found no gradient, so it watches nothing. It belongs between backward and "
    "optimizer.step(), before gradients are cleared; an optimizer that steps inside backward leaves none to read: "
    "attach with optimizer_in_backward=True then."
)
_IN_BACKWARD = (
    "guard.step found no gradient, and hooks on the parameters that run when one has come in: an optimizer that steps "
    "inside backward leaves none to read, so nothing is watched. Attach with optimizer_in_backward=True, and the norms "
    "are taken before those hooks run."
)
_TOO_LATE = (
    "guard.step was called after optimizer.step() on gradients that were used already, so it clips nothing and decides "
    "one step late. Call it between backward and optimizer.step()."
)


class Cadence:
    """Compares calls of ``guard.step`` with what the optimizer does.

    Args:
        watch: Counts the optimizer's steps.
    """

    def __init__(self, watch: OptimizerWatch) -> None:
        self._watch = watch
        self._optimizer_steps_at_call = 0
        self._calls = 0
        self._calls_without_gradient = 0
        self._used: tuple[weakref.ref[Tensor], int] | None = None
        self._before: tuple[weakref.ref[nn.Parameter], int, weakref.ref[Tensor]] | None = None

    def on_call(self, parameters: Sequence[nn.Parameter]) -> str | None:
        """``guard.step`` is being called; returns what is wrong, or None."""
        self._calls += 1
        sample = next((p for p in parameters if p.grad is not None), None)
        before, self._before = self._before, None
        steps, self._optimizer_steps_at_call = self._optimizer_steps_at_call, self._watch.num_steps
        if sample is None or sample.grad is None:
            self._calls_without_gradient += 1
            if has_backward_hooks(parameters):
                return _IN_BACKWARD
            # Once may be an odd step; a loop that has it wrong has it wrong each time.
            return _NO_GRADIENT if self._calls_without_gradient == 2 else None
        self._calls_without_gradient = 0
        # The optimizer has stepped on this very gradient, and nothing was written to it since.
        if self._used is not None and self._used[0]() is sample.grad and self._used[1] == sample.grad._version:
            return _TOO_LATE
        self._before = (weakref.ref(sample), sample._version, weakref.ref(sample.grad))
        if before is None or self._watch.num_steps != steps:
            return None
        # No optimizer stepped, the parameter was not written to, and the gradient is still the same tensor, which
        # zero_grad would have replaced: the second call sees the first one's gradients once more.
        if before[0]() is sample and before[1] == sample._version and before[2]() is sample.grad:
            return _TWICE
        return None

    def on_optimizer_step(self, parameters: Sequence[nn.Parameter]) -> str | None:
        """Asked after an optimizer step; returns what is wrong, or None."""
        grad = next((p.grad for p in parameters if p.grad is not None), None)
        self._used = None if grad is None else (weakref.ref(grad), grad._version)
        # Where each parameter has an optimizer of its own, all of them step in one step of the loop.
        if self._calls == 0 and self._watch.num_steps >= _MANY_STEPS * self._watch.num_optimizers:
            return _NEVER.format(num_steps=_MANY_STEPS)
        return None

    def on_end(self) -> str | None:
        """Asked when watching ends; returns what was wrong, or None."""
        if self._calls or not self._watch.num_steps:
            return None
        return _NEVER.format(num_steps=-(-self._watch.num_steps // self._watch.num_optimizers))
