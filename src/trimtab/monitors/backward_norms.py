"""Gradient norms where each parameter's optimizer steps inside backward, and frees the gradient before ``guard.step``.

Such a loop puts a hook on each parameter that runs when its gradient has come in: it steps an optimizer of that
parameter alone, and clears the gradient. Its gradients are never there all at once, which is the point: they take no
memory. So each norm is taken by a hook of ours that runs before it, and the norms wait for ``guard.step``.

What is left of a guard there: norms, scores, decisions, routing, monitors, the record. What is not, because it would
have to change a gradient by what is known of all of them, or because it is too late: damping, clipping, a loss scaler,
and accumulation over micro-batches, for each backward is an optimizer step.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.errors import ConfigError
from trimtab.monitors.gradient_norms import GradientNorms, NormReading, norms_of
from trimtab.precision.convertible import is_dtensor
from trimtab.precision.units import Unit

__all__ = ["BackwardCadence", "BackwardNorms", "has_backward_hooks", "refuse_in_backward"]

_SEVERAL = (
    "guard.step was called after several backward passes, and each of them was an optimizer step: the optimizer steps "
    "inside backward. Of each parameter only the last gradient was observed. Call guard.step once after each backward."
)
_NOTHING = (
    "guard.step was called twice and no gradient had come in since the call before, so it watches nothing. With "
    "optimizer_in_backward=True it belongs once after each backward."
)
_SHARDED = (
    "Gradients of DTensors are not observed where the optimizer steps inside backward: a norm over all shards would "
    "need a collective inside backward for each parameter. Their units have no score. Step the optimizer after "
    "backward to have them watched."
)
_MANY_STEPS = 20
_NEVER = (
    "The optimizer has stepped inside {num_steps} backward passes and guard.step was never called, so nothing is "
    "decided or recorded. Call guard.step() once after each backward."
)


def refuse_in_backward(
    model: nn.Module, *, damping: bool = False, max_norm: float | None = None, scaler: Any = None
) -> None:
    """Refuse what cannot be done to gradients that are gone by ``guard.step``.

    Raises: ConfigError: when any of it is asked for, with the reason.

    Example:
        >>> refuse_in_backward(nn.Linear(2, 2), max_norm=1.0)
        Traceback (most recent call last):
        trimtab.errors.ConfigError: max_norm=1.0: the optimizer steps inside backward, parameter by parameter, before \
the total norm is known. Leave it out, or step the optimizer after backward.
    """
    remedy = "Leave it out, or step the optimizer after backward."
    if isinstance(model, nn.parallel.DistributedDataParallel):
        allowed = "DistributedDataParallel adds the gradients of the ranks up after these hooks have run."
        raise ConfigError("optimizer_in_backward", True, allowed, remedy)
    if damping:
        allowed = "the optimizer steps inside backward, before the guard decides what is to be scaled down."
        raise ConfigError("damping", True, allowed, "Use a policy without it, or step the optimizer after backward.")
    if max_norm is not None:
        allowed = "the optimizer steps inside backward, parameter by parameter, before the total norm is known."
        raise ConfigError("max_norm", max_norm, allowed, remedy)
    if scaler is not None and scaler.is_enabled():
        allowed = "it unscales gradients between backward and the optimizer's step, and here there is no such moment."
        raise ConfigError("scaler", type(scaler).__name__, allowed, "Train in bfloat16, or step after backward.")


def has_backward_hooks(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether some parameter has a hook that runs when its gradient has come in, as a step inside backward needs.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> handle = layer.weight.register_post_accumulate_grad_hook(lambda p: None)
        >>> has_backward_hooks(list(layer.parameters())), has_backward_hooks([layer.bias])
        (True, False)
    """
    return any(getattr(p, "_post_accumulate_grad_hooks", None) for p in parameters)


class BackwardNorms(GradientNorms):
    """Takes each gradient's norm in backward, before any other hook of its parameter, and gives them out together.

    The norms have the bits that ``GradientNorms`` would read after a backward that leaves the gradients in place.

    Args:
        model: The model.
        units: The units, in the order of the controller.

    Attributes:
        num_passes: Backward passes since the norms were read last: how often the gradient of one parameter came in.
        met_sharded: Whether a DTensor's gradient came in, which is not observed.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> def free(parameter):
        ...     parameter.grad = None
        >>> handle = model.weight.register_post_accumulate_grad_hook(free)
        >>> norms = BackwardNorms(model, [])
        >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
        >>> model.weight.grad is None, norms.read().norms.tolist()
        (True, [5.0])
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self._handles: list[Any] = []
        # An attach that fails further on has nobody to call stop.
        weakref.finalize(self, _remove, self._handles).atexit = False
        self._taken: dict[nn.Parameter, Tensor] = {}
        self._times: dict[nn.Parameter, int] = {}
        self.num_passes = 0
        self.met_sharded = False
        super().__init__(model, units)

    def _collect(self) -> None:
        super()._collect()
        self.stop()
        self._trained = [p.requires_grad for p in self.parameters]
        trained = [p for p in self.parameters if p.requires_grad]
        # torch takes norms of float32 alone in another way than of mixed kinds; what the others will be is known now.
        self._all_float32 = len({p.device for p in trained}) == 1 and all(p.dtype == torch.float32 for p in trained)
        stacked = {id(self.parameters[i]) for i in self._stacked}
        # Kept by the parameter, so it must keep neither the parameters nor the model.
        myself = weakref.ref(self)
        for parameter in trained:
            has_experts = id(parameter) in stacked

            def take(parameter: nn.Parameter, has_experts: bool = has_experts) -> None:
                norms = myself()
                if norms is not None:
                    norms._take(parameter, has_experts)

            self._handles.append(parameter.register_post_accumulate_grad_hook(take))
            _run_first(parameter, self._handles[-1].id)

    @torch.no_grad()
    def _take(self, parameter: nn.Parameter, has_experts: bool) -> None:
        grad = parameter.grad
        if grad is None:
            return
        if is_dtensor(grad):
            self.met_sharded = True
            return
        plain = self._all_float32 and grad.dtype == torch.float32 and not grad.is_sparse
        times = self._times[parameter] = self._times.get(parameter, 0) + 1
        self.num_passes = max(self.num_passes, times)
        self._taken[parameter] = norms_of([grad], plain, [0] if has_experts else [])

    @torch.no_grad()
    def read(self) -> NormReading:
        """The norm of every gradient that has come in since the last call; device work only."""
        self.refresh()
        taken, self._taken = self._taken, {}
        self._times, self.num_passes = {}, 0
        thawed = [p.requires_grad for p in self.parameters] != self._trained
        if thawed or len(taken) != self._num_grads:
            if thawed or self._has_grown():
                self._collect()
            self._num_grads = len(taken)
        indices = [i for i, p in enumerate(self.parameters) if p in taken]
        if not indices:
            return NormReading(indices, torch.zeros(0), True)
        found = [taken[self.parameters[i]] for i in indices]
        device = found[0].device
        dtype = torch.float64 if any(norms.dtype == torch.float64 for norms in found) else torch.float32
        # Those of whole parameters first, then those of the experts' rows: the order of a reading.
        parts = [norms[:1] for norms in found] + [norms[1:] for norms in found if len(norms) > 1]
        return NormReading(indices, torch.cat([part.to(device, dtype) for part in parts]), self._all_float32)

    def stop(self) -> None:
        """Take the hooks away; the others stay, in their order."""
        _remove(self._handles)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def _run_first(parameter: nn.Parameter, hook_id: int) -> None:
    """Have a hook that was just registered run before those that were there: one of them frees the gradient."""
    hooks: Any = parameter._post_accumulate_grad_hooks
    if len(hooks) > 1:
        others = [(key, hook) for key, hook in hooks.items() if key != hook_id]
        ours = hooks[hook_id]
        # Not move_to_end: autograd walks the plain dict below an OrderedDict, whose order that leaves as it was.
        hooks.clear()
        hooks[hook_id] = ours
        hooks.update(others)


class BackwardCadence:
    """Compares calls of ``guard.step`` with the gradients that came in; stands in for ``Cadence``.

    Args:
        norms: Sees them come in.
    """

    def __init__(self, norms: BackwardNorms) -> None:
        self._norms = norms
        self._calls = 0
        self._calls_without_gradient = 0

    def on_call(self, parameters: Sequence[nn.Parameter]) -> str | None:
        """``guard.step`` is being called; returns what is wrong, or None."""
        self._calls += 1
        num_passes = self._norms.num_passes
        if self._norms.met_sharded:
            return _SHARDED
        self._calls_without_gradient = 0 if num_passes else self._calls_without_gradient + 1
        if self._calls_without_gradient == 2:
            return _NOTHING
        # Before the first call there may have been steps that nobody wanted to be watched.
        return _SEVERAL if num_passes > 1 and self._calls > 1 else None

    def on_optimizer_step(self, parameters: Sequence[nn.Parameter]) -> str | None:
        """Asked after an optimizer step; returns what is wrong, or None."""
        if self._calls == 0 and self._norms.num_passes == _MANY_STEPS:
            return _NEVER.format(num_steps=_MANY_STEPS)
        return None

    def on_end(self) -> str | None:
        """Asked when watching ends; returns what was wrong, or None."""
        num_passes = self._norms.num_passes
        return _NEVER.format(num_steps=num_passes) if self._calls == 0 and num_passes else None
