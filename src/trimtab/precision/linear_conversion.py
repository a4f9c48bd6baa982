"""Layers converted in place: the switch of each unit, the route it asks for, and what counts micro-batches.

What a converted layer computes is up to the recipe, which derives from ``LinearConversion`` and gives ``run``, and
``trace`` where a compiler can have it in one graph. A graph must not know the route, or each switch would compile it
anew: it calls an operator of ours with a key, and that looks the route up when it runs. The key is a tensor, and so an
input of the graph: numbers would be part of it, and blocks that are compiled one by one could not share theirs.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.precision.converted_class import converted_class, converted_experts_class, give_back_class
from trimtab.precision.convertible import is_dtensor
from trimtab.precision.recipe import PathCost
from trimtab.precision.units import Unit, is_linear

__all__ = ["LinearConversion", "Switch", "as_autocast_would", "in_backward", "input_size", "look_up"]

_handles = itertools.count(1)
_by_handle: weakref.WeakValueDictionary[int, LinearConversion] = weakref.WeakValueDictionary()


class LinearConversion(ABC):
    """Base of the recipes that convert linear layers; see ``trimtab.precision.recipe.Conversion`` for what it offers.

    Args:
        model: The model.
        units: The units.
        costs: What each costs.
        operators: The layers of each unit whose forward is to ask the switch; its modules when left out.

    Attributes:
        handle: Number by which compiled code finds this conversion again.
        layers: The converted layers, each once, from the input to the loss.
        needs_weight_gradient: Whether a layer with a frozen weight is left to run plainly.
        has_run: Whether a layer has asked for its route since the step began.
    """

    needs_weight_gradient = True

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        costs: Sequence[PathCost],
        operators: Sequence[Sequence[nn.Module]] | None = None,
    ) -> None:
        self.units = tuple(units)
        self.costs = tuple(costs)
        self.operators = tuple(tuple(o) for o in operators or [u.modules for u in self.units])
        self.handle = next(_handles)
        _by_handle[self.handle] = self
        self.pull: Callable[[], None] | None = None
        self._pulling = threading.RLock()
        self._is_pulling = False
        self._active = [False] * len(self.units)
        self._step = 1
        self._micro_batch = 0
        self._calls = [0] * len(self.units)
        self.has_run = False
        found: list[nn.Module] = []
        for index, layers in enumerate(self.operators):
            for module in layers:
                if "_trimtab_switch" in module.__dict__:
                    continue  # experts are one module for many units
                to_class = converted_class if is_linear(module) else converted_experts_class
                module.__dict__["_trimtab_switch"] = Switch(self, index, len(found))
                module.__class__ = to_class(type(module))
                found.append(module)
        self.layers = tuple(found)
        self._hooks = [
            model.register_forward_pre_hook(_BeginForward(self)),
            model.register_forward_hook(_EndForward(self), always_call=True),
        ]

    @abstractmethod
    def run(self, module: nn.Module, x: Tensor, index: int) -> Tensor | None:
        """The output of a layer of unit ``index``, or None where the plain layer is to run."""

    def trace(self, module: nn.Module, x: Tensor, switch: Switch) -> Tensor | None:
        """As ``run``, while a compiler traces; only called where ``is_traceable``.

        It may read nothing that changes between steps, or that differs between layers of one shape but ``switch.key``.
        """
        raise NotImplementedError

    def run_experts(
        self, module: nn.Module, switch: Switch, hidden: Tensor, chosen: Tensor, shares: Tensor
    ) -> Tensor | None:
        """The output of a module of stacked experts, or None where the plain module is to run; also while tracing.

        Args:
            module: The module.
            switch: Its switch.
            hidden: Its input, shape (tokens, model).
            chosen: The experts of each token, shape (tokens, experts a token).
            shares: Their weights, of the same shape.
        """
        raise NotImplementedError

    @property
    def is_traceable(self) -> bool:
        """Whether a compiler can have the converted layers in one graph, through ``trace``."""
        return type(self).trace is not LinearConversion.trace

    def end_forward(self) -> None:  # noqa: B027 - most recipes keep nothing
        """A forward of the whole model is over; not called under a compiler."""

    def route(self, active: Sequence[bool]) -> None:
        """Put the units flagged in ``active`` on the recovery path, the rest on the low-cost path."""
        self._active = [bool(flag) for flag in active]

    def begin_step(self, step: int) -> None:
        """Optimizer step ``step`` begins: micro-batches are counted anew."""
        self._step, self._micro_batch = step, 0
        self.has_run = False
        self._calls = [0] * len(self.units)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: random numbers are seeded from the step, and the route is the controller's."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Nothing to take back."""

    def undo(self) -> None:
        """Give every layer its class back, and the model its hooks."""
        for hook in self._hooks:
            hook.remove()
        for layers in self.operators:
            for module in layers:
                module.__dict__.pop("_trimtab_switch", None)
                give_back_class(module)

    def is_active(self, index: int) -> bool:
        """Whether unit ``index`` is on the recovery path now; asks for the route first, where one is due."""
        # Never in a backward: a forward that checkpointing recomputes there must store what the first one stored.
        if self.pull is not None and not in_backward():
            self._take_route()
        self.has_run = True
        return self._active[index]

    def _take_route(self) -> None:
        """Ask for the route that is due; other threads wait until it is here."""
        # nn.DataParallel runs a replica a thread. Were ``pull`` cleared first, the second replica would go on with the
        # old route while the first still waits for the new one.
        with self._pulling:
            pull = self.pull
            if pull is None or self._is_pulling:
                return
            self._is_pulling = True
            try:
                pull()
            finally:
                self._is_pulling = False
                if self.pull is pull:
                    self.pull = None

    def input_size(self, index: int) -> int:
        """Number of input channels of unit ``index``."""
        return input_size(self.operators[index][0])

    def count_micro_batch(self, module: nn.Module) -> None:
        """A forward of the whole model begins."""
        # Reentrant checkpointing of a whole model runs this forward without gradients; a recomputation is no new one.
        # nn.DataParallel counts once a replica: noise then differs from replica to replica, which is as good.
        # A count that compiled code keeps would compile it anew each time: ``count_call`` serves there.
        if not torch.compiler.is_compiling() and module.training and not in_backward():
            self._micro_batch += 1

    def count_call(self, index: int) -> int:
        """The micro-batch that compiled code is at: how often unit ``index`` has run in this step.

        A forward that is recomputed in backward gets the number of the last one.
        """
        if not in_backward():
            self._calls[index] += 1
        return self._calls[index]


class Switch:
    """What a converted layer asks in its forward.

    Args:
        conversion: The conversion.
        index: Number of the layer's unit; of experts, of the first.
        number: Number of the layer among those that the conversion has converted.

    Attributes:
        key: The conversion's handle, ``index`` and ``number``, on the host: what compiled code hands to operators.
        scope: What the layers of the same parent share while a compiler traces; see ``compiled_copy``.
    """

    def __init__(self, conversion: LinearConversion, index: int, number: int) -> None:
        self.conversion = conversion
        self.index = index
        self.key = torch.tensor([conversion.handle, index, number], device="cpu")
        self.scope: Any = None
        self._run_outside = self.run
        if not conversion.is_traceable:
            # A route that changes cannot be traced as it stands: the layer runs eagerly between two compiled parts.
            # As a decorator this would load the compiler, which takes seconds, wherever trimtab is imported.
            self._run_outside = torch.compiler.disable(self.run, recursive=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied model is a plain model: nothing steers it."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """The layer's output, or None where the plain layer is to run."""
        if torch.compiler.is_compiling() and self.conversion.is_traceable:
            return self.conversion.trace(module, x, self) if self._fits(module, x) else None
        return self._run_outside(module, x)

    def run(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """The same, outside compiled code."""
        if x.is_inference() or not self._fits(module, x):
            return None
        return self.conversion.run(module, x, self.index)

    def experts(self, module: nn.Module, args: tuple[Any, ...]) -> Tensor | None:
        """The output of a module of stacked experts, or None where the plain one is to run."""
        hidden = args[0]
        if hidden.dim() != 2 or len(args) != 3 or any(is_dtensor(p) for p in module.parameters()):
            return None
        if not torch.compiler.is_compiling() and hidden.is_inference():
            return None
        return self.conversion.run_experts(module, self, *args)

    def _fits(self, module: nn.Module, x: Tensor) -> bool:
        """Whether this forward is one that can be converted."""
        # FSDP2 has gathered a plain weight by now. What is still distributed is tensor parallelism's, which may also
        # have come after conversion: products of local shards would be the wrong gradient.
        if not x.is_floating_point() or is_dtensor(module.weight) or is_dtensor(x):
            return False
        return bool(module.weight.requires_grad) or not self.conversion.needs_weight_gradient


def as_autocast_would(
    module: nn.Module, x: Tensor, *, keep_weight: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``x`` and the module's weight and bias, cast to autocast's dtype where it is on and would cast them.

    Args:
        module: The layer.
        x: Its input.
        keep_weight: Leave the weight as it is, for a recipe that quantizes it.
    """
    weight: Any = module.weight
    bias: Any = module.bias
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        return x.to(dtype), weight if keep_weight else weight.to(dtype), None if bias is None else bias.to(dtype)
    return x, weight, bias


class _ModelHook:
    """A hook on the whole model that a copy of the model does not inherit."""

    def __init__(self, conversion: LinearConversion) -> None:
        self.conversion = conversion

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _no_hook

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _make_no_hook, ()


# Two classes, each with code of its own: a compiler that met both in one function would compile it twice.
class _BeginForward(_ModelHook):
    def __call__(self, module: nn.Module, args: Any) -> None:
        self.conversion.count_micro_batch(module)


class _EndForward(_ModelHook):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self.conversion.end_forward()


def _no_hook(*args: Any) -> None:
    return None


def _make_no_hook() -> Callable[..., None]:
    return _no_hook


def look_up(key: Tensor) -> tuple[Any, int, int]:
    """What a switch's key stands for: its conversion, the number of its unit and that of its layer."""
    handle, unit, number = key.tolist()
    conversion = _by_handle.get(handle)
    if conversion is None:
        raise RuntimeError("a backward of compiled code ran after its guard was detached. Detach between steps.")
    return conversion, unit, number


def in_backward() -> bool:
    """Whether a backward pass runs on this thread: a forward that runs in it is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def input_size(module: nn.Module) -> int:
    """Number of input channels of a linear layer."""
    weight: Any = module.weight
    return int(weight.shape[1] if isinstance(module, nn.Linear) else weight.shape[0])
