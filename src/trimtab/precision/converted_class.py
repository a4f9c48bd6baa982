"""The class of a converted layer or module of experts: the plain one, but that its forward asks a switch first."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.errors import TrimtabWarning

__all__ = [
    "converted_class",
    "converted_experts_class",
    "give_back_class",
    "own_forward",
    "plain_tensor",
    "warn_about_replicas",
    "weights_of",
]

_converted_classes: dict[type[nn.Module], type[nn.Module]] = {}


def converted_class(base: type[nn.Module]) -> type[nn.Module]:
    """The subclass of ``base`` whose forward asks the switch. One per base, so that conversions of one model agree."""
    if base not in _converted_classes:

        def run(self: nn.Module, x: Tensor) -> Tensor:
            switch = self.__dict__.get("_trimtab_switch")
            # Reentrant checkpointing runs the forward of training without gradients, and recomputes it in backward; a
            # route that is due must arrive before that. A parametrization (spectral norm) that came after conversion
            # runs at each look at the weight and may change its state, so only the plain layer may look then.
            if (
                switch is not None
                and "parametrizations" not in self._modules
                and (torch.is_grad_enabled() or self.training)
            ):
                output = switch(self, x)
                if output is not None:
                    return output
            return base.forward(self, x)

        # The argument keeps the name it has in the plain layer, for those who pass it by name.
        def forward_linear(self: nn.Module, input: Tensor) -> Tensor:
            return run(self, input)

        def forward_conv1d(self: nn.Module, x: Tensor) -> Tensor:
            return run(self, x)

        forward = forward_linear if issubclass(base, nn.Linear) else forward_conv1d
        _converted_classes[base] = _class_with(base, forward)
    return _converted_classes[base]


def converted_experts_class(base: type[nn.Module]) -> type[nn.Module]:
    """The subclass of ``base``, a module of stacked experts, whose forward asks the switch."""
    if base not in _converted_classes:
        names = [name for name in inspect.signature(base.forward).parameters if name != "self"]

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            switch = self.__dict__.get("_trimtab_switch")
            if switch is not None and (torch.is_grad_enabled() or self.training):
                by_name = [kwargs[name] for name in names[len(args) :] if name in kwargs]
                output = switch.experts(self, (*args, *by_name))
                if output is not None:
                    return output
            return base.forward(self, *args, **kwargs)

        _converted_classes[base] = _class_with(base, forward)
    return _converted_classes[base]


def _class_with(base: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    def reduce_as_plain(self: nn.Module, protocol: int) -> tuple[Any, ...]:
        # A pickled or copied layer is a plain layer: readable without trimtab, and steered by nothing.
        state = {k: v for k, v in self.__dict__.items() if k != "_trimtab_switch"}
        return object.__new__, (base,), state

    members = {"forward": forward, "__reduce_ex__": reduce_as_plain, "__module__": base.__module__}
    return type(base.__name__, (base,), members)


def own_forward(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """The forward that a converted layer would have by itself."""
    for c in type(module).__mro__:
        if c in _converted_classes.values():
            return functools.partial(c.__mro__[1].forward, module)  # type: ignore[attr-defined]
    return module.forward


@contextmanager
def weights_of(module: nn.Module, weight: Tensor | None, bias: Tensor | None) -> Iterator[None]:
    """Have ``module`` read this weight and bias inside the block: those that its forward was given.

    They differ from its own under ``torch.func.functional_call``, and where compiled code was.
    """
    found = {name: module._parameters.get(name) for name in ("weight", "bias")}
    given = {"weight": weight, "bias": bias}
    try:
        for name, tensor in given.items():
            if tensor is not None and tensor is not found[name]:
                module._parameters[name] = tensor  # type: ignore[assignment]
        yield
    finally:
        for name, tensor in given.items():
            if tensor is not None and tensor is not found[name]:
                module._parameters[name] = found[name]


def plain_tensor(tensor: Any) -> Tensor | None:
    """``tensor``, or None where it is of a class of a library's own, which an operator cannot be handed."""
    return tensor if type(tensor) in (Tensor, nn.Parameter) else None


def give_back_class(module: nn.Module) -> None:
    """Undo ``module.__class__ = converted_class(...)``."""
    # A wrapper that came later (FSDP2) has put its own class on top; without its switch ours is inert.
    if type(module) in _converted_classes.values():
        module.__class__ = type(module).__mro__[1]


@functools.cache
def warn_about_replicas() -> None:
    """Say once that copies of converted layers stay as they are."""
    warnings.warn(
        "A layer ran as a copy of the one that was converted, as nn.DataParallel makes one for each device: such copies"
        " compute as by themselves. Use DistributedDataParallel instead.",
        TrimtabWarning,
        stacklevel=2,
    )
