"""Linear layers converted in place: the switch of each unit, the route it asks for, and what counts micro-batches.

What a converted layer computes is up to the recipe, which derives from ``LinearConversion`` and gives ``run``.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.precision.converted_class import converted_class, give_back_class
from trimtab.precision.convertible import is_dtensor
from trimtab.precision.recipe import PathCost
from trimtab.precision.units import Unit

__all__ = ["LinearConversion", "as_autocast_would", "input_size"]


class LinearConversion(ABC):
    """Base of the recipes that convert linear layers; see ``trimtab.precision.recipe.Conversion`` for what it offers.

    Args:
        model: The model.
        units: Units of convertible linear layers.
        costs: What each costs.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], costs: Sequence[PathCost]) -> None:
        self.units = tuple(units)
        self.costs = tuple(costs)
        self.pull: Callable[[], None] | None = None
        self._pulling = threading.RLock()
        self._is_pulling = False
        self._active = [False] * len(self.units)
        self._step = 1
        self._micro_batch = 0
        for index, unit in enumerate(self.units):
            for module in unit.modules:
                module.__dict__["_trimtab_switch"] = _Switch(self, index)
                module.__class__ = converted_class(type(module))
        self._hooks = [
            model.register_forward_pre_hook(_ModelHook(self._begin_forward)),
            model.register_forward_hook(_ModelHook(self._end_forward), always_call=True),
        ]

    @abstractmethod
    def run(self, module: nn.Module, x: Tensor, index: int) -> Tensor | None:
        """The output of a layer of unit ``index``, or None where the plain layer is to run."""

    @abstractmethod
    def end_forward(self) -> None:
        """A forward of the whole model is over."""

    def route(self, active: Sequence[bool]) -> None:
        """Put the units flagged in ``active`` on the recovery path, the rest on the low-cost path."""
        self._active = [bool(flag) for flag in active]

    def begin_step(self, step: int) -> None:
        """Optimizer step ``step`` begins: micro-batches are counted anew."""
        self._step, self._micro_batch = step, 0

    def undo(self) -> None:
        """Give every layer its class back, and the model its hooks."""
        for hook in self._hooks:
            hook.remove()
        for unit in self.units:
            for module in unit.modules:
                module.__dict__.pop("_trimtab_switch", None)
                give_back_class(module)

    def is_active(self, index: int) -> bool:
        """Whether unit ``index`` is on the recovery path now; asks for the route first, where one is due."""
        # Never in a backward: a forward that checkpointing recomputes there must store what the first one stored.
        if self.pull is not None and not _in_backward():
            self._take_route()
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
        return input_size(self.units[index].modules[0])

    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        # Reentrant checkpointing of a whole model runs this forward without gradients; a recomputation is no new one.
        # nn.DataParallel counts once a replica: noise then differs from replica to replica, which is as good.
        if module.training and not _in_backward():
            self._micro_batch += 1

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self.end_forward()


class _Switch:
    """What a converted layer asks in its forward."""

    def __init__(self, conversion: LinearConversion, index: int) -> None:
        self.conversion = conversion
        self.index = index

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied model is a plain model: nothing steers it."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    # A route that changes cannot be traced as it stands; the layer runs eagerly between two compiled parts.
    @torch.compiler.disable(recursive=True)
    def __call__(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """The layer's output, or None where the plain layer is to run."""
        if x.is_inference() or not x.is_floating_point():
            return None
        # FSDP2 has gathered a plain weight by now. What is still distributed is tensor parallelism's, which may also
        # have come after conversion: products of local shards would be the wrong gradient.
        if is_dtensor(module.weight) or is_dtensor(x):
            return None
        return self.conversion.run(module, x, self.index)


def as_autocast_would(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """``x`` and the module's weight and bias, cast to autocast's dtype where it is on and would cast them."""
    weight: Any = module.weight
    bias: Any = module.bias
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return x, weight, bias


class _ModelHook:
    """A hook on the whole model that a copy of the model does not inherit."""

    def __init__(self, call: Callable[..., None]) -> None:
        self.call = call

    def __call__(self, *args: Any) -> None:
        self.call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _no_hook

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _make_no_hook, ()


def _no_hook(*args: Any) -> None:
    return None


def _make_no_hook() -> Callable[..., None]:
    return _no_hook


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def input_size(module: nn.Module) -> int:
    """Number of input channels of a linear layer."""
    weight: Any = module.weight
    return int(weight.shape[1] if isinstance(module, nn.Linear) else weight.shape[0])
