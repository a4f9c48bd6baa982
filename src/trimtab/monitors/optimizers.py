"""Which optimizers step the model's parameters, when, and at which learning rate: seen from outside, untold.

A guard is not given the optimizer. torch's global step hook shows each one as it steps; before the first step, when a
loss scaler already has to be served, the live objects of the process are looked through once.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from trimtab.errors import ConfigError

__all__ = ["OptimizerWatch", "unscale"]


class OptimizerWatch:
    """Sees every ``torch.optim.Optimizer`` that steps a parameter of the model.

    Args:
        parameters: Gives the model's parameters; asked anew for each optimizer not seen before.

    Attributes:
        num_steps: Optimizer steps seen so far.
        learning_rate: That of the first parameter group at the last step; None before it.
        on_step: Called after each of them, if it is not None.
    """

    def __init__(self, parameters: Callable[[], Sequence[nn.Parameter]]) -> None:
        self.num_steps = 0
        self.learning_rate: float | None = None
        self.on_step: Callable[[], None] | None = None
        self._parameters = parameters
        self._ours: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._looked = False
        myself = weakref.ref(self)

        def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            watch = myself()
            if watch is not None:
                watch._after_step(optimizer)

        # torch keeps this hook for the whole process, so it must not keep the watch, and through it the model.
        self._handle = register_optimizer_step_post_hook(after_step)
        weakref.finalize(self, self._handle.remove)

    def _after_step(self, optimizer: Optimizer) -> None:
        if self.is_ours(optimizer):
            self.num_steps += 1
            rate = optimizer.param_groups[0].get("lr")
            # A capturable optimizer keeps its rate in a tensor; reading it could wait for the device.
            self.learning_rate = rate if isinstance(rate, float | int) else None
            if self.on_step is not None:
                self.on_step()

    @property
    def num_optimizers(self) -> int:
        """Optimizers of the model that are known so far, at least 1."""
        return max(1, len(self._ours))

    def is_ours(self, optimizer: Optimizer) -> bool:
        """Whether ``optimizer`` steps a parameter of the model."""
        if optimizer not in self._ours:
            ids = {id(p) for p in self._parameters()}
            # One that is not ours is asked again: it may be given a parameter of the model later.
            if any(id(p) in ids for group in optimizer.param_groups for p in group["params"]):
                self._ours.add(optimizer)
        return optimizer in self._ours

    def optimizers(self) -> list[Optimizer]:
        """Every optimizer of the model, unwrapped: those that have stepped, and those alive when first asked.

        Raises: ConfigError: when none is found, or two hold the same parameter, so that it is unclear which one steps.
        """
        if not self._looked or not self._found():
            self._looked = True
            # type() and not isinstance: a foreign object's __class__ may run code.
            for candidate in [o for o in gc.get_objects() if issubclass(type(o), Optimizer)]:
                self.is_ours(candidate)
        found = _outer(list({id(o): o for o in map(_unwrapped, self._found())}.values()))
        if _overlap(found):
            # A forgotten optimizer may be waiting in a reference cycle.
            gc.collect()
            found = _outer(list({id(o): o for o in map(_unwrapped, self._found())}.values()))
        if not found or _overlap(found):
            raise ConfigError(
                "scaler",
                f"{len(found)} optimizers",
                "a loss scaler needs one optimizer for each of the model's parameters, to unscale their gradients.",
                "Make it before the first guard.step, delete others that hold the same parameters, or unscale yourself "
                "and leave scaler out.",
            )
        return found

    def _found(self) -> list[Optimizer]:
        return list(self._ours)

    def stop(self) -> None:
        """Stop watching, and let go of what was watched."""
        self._handle.remove()
        self.on_step = None
        self._parameters = tuple


def _unwrapped(optimizer: Optimizer) -> Optimizer:
    # accelerate's optimizer is an Optimizer that holds the real one, and the scaler is given the real one.
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def _outer(optimizers: list[Optimizer]) -> list[Optimizer]:
    # ZeroRedundancyOptimizer holds a local one, and the scaler is given the outer one.
    inner = {id(getattr(o, "optim", None)) for o in optimizers}
    return [o for o in optimizers if id(o) not in inner]


def _overlap(optimizers: Sequence[Optimizer]) -> bool:
    ids = [id(p) for o in optimizers for group in o.param_groups for p in group["params"]]
    return len(ids) != len(set(ids))


def unscale(scaler: GradScaler, optimizers: Sequence[Optimizer]) -> bool:
    """Unscale the gradients of ``optimizers``, unless that was done already; say whether ``scaler`` will skip a step.

    Reading the answer waits for the device, as ``scaler.step`` itself does a moment later.

    Returns: True when ``scaler.step`` will leave all parameters alone, because each optimizer has a gradient that is
        NaN or infinite. Where one of several will still step, its gradients are to be seen and clipped.
    """
    skips = []
    for optimizer in optimizers:
        # The scaler has no public way to ask for these two. A plain look-up would insert an entry.
        state = scaler._per_optimizer_states.get(id(optimizer))
        if state is None or state["stage"] is OptState.READY:
            if not any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                continue
            scaler.unscale_(optimizer)
            state = scaler._per_optimizer_states[id(optimizer)]
        skips.append(any(float(found) > 0 for found in state["found_inf_per_device"].values()))
    return bool(skips) and all(skips)
