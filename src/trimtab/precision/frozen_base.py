"""What all paths of a frozen base under adapters have in common: two products, and nothing kept for backward.

    forward          Y  = X W' + b             W as the path in force has it
    input gradient   dX = dY W                 the same W, dY as it is
    bias gradient    db = sum over tokens dY   where the bias is trained

Shapes: x (..., in), weight (out, in), grad (..., out).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from trimtab.precision.conversion_plan import Planned
from trimtab.precision.converted_class import plain_tensor, warn_about_replicas, weights_of
from trimtab.precision.convertible import why_not_plain_linear
from trimtab.precision.linear_conversion import LinearConversion, Switch, as_autocast_would, look_up
from trimtab.precision.recipe import PathCost

__all__ = ["WEIGHTS_ONLY", "FrozenBaseConversion", "plain_weight", "why_not_frozen_base"]

WEIGHTS_ONLY = "this one quantizes weights only: the activations that it multiplies by are as they were"
"""The ``why_unobserved`` of a conversion whose low-cost path quantizes no activations."""


def why_not_frozen_base(module: nn.Module, under_fsdp: frozenset[int]) -> str | None:
    """Why ``module`` is no plain linear layer with a frozen weight, or None when it is one."""
    reason = why_not_plain_linear(module, under_fsdp)
    weight: Any = module.weight if reason is None else None
    if reason is None and weight.requires_grad:
        return "its weight is trained, and this path gives it no gradient: freeze it, as an adapter's base is"
    return reason


class FrozenBaseConversion(LinearConversion):
    """A model whose frozen layers multiply by something else than their weight on the low-cost path.

    The layer is one operator for a compiler, so that a switch leaves the graph as it is. A recipe says what the
    low-cost product is, and which weight it comes down to, by which backward multiplies.

    Args:
        model: The model.
        planned: Each unit with the layers of it that are converted.
    """

    needs_weight_gradient = False

    def __init__(self, model: nn.Module, planned: Sequence[Planned]) -> None:
        operators = [layers for _, layers in planned]
        super().__init__(model, [unit for unit, _ in planned], [_cost(layers) for layers in operators], operators)
        self._numbers = {id(layer): k for k, layer in enumerate(self.layers)}

    @abstractmethod
    def low_product(self, number: int, x: Tensor, bias: Tensor | None, index: int) -> Tensor:
        """The output of a layer of unit ``index`` on the low-cost path; no gradient is recorded."""

    @abstractmethod
    def low_weight(self, number: int, dtype: torch.dtype) -> Tensor:
        """What the low-cost path multiplies a layer's input by, shape (out, in), in ``dtype``."""

    def high_weight(self, number: int, dtype: torch.dtype) -> Tensor:
        """The same for the recovery path."""
        return plain_weight(self.layers[number]).to(dtype)

    def recovers_by_itself(self, number: int) -> bool:
        """Whether the recovery path is the layer's own forward."""
        return True

    def note(self, number: int, x: Tensor, index: int) -> None:
        """A layer of unit ``index``, which is on the recovery path, reads ``x``."""

    def run(self, module: nn.Module, x: Tensor, index: int) -> Tensor | None:
        """The layer's output on the path in force; None where that is the plain layer's."""
        number = self._numbers.get(id(module))
        if number is None:
            warn_about_replicas()
            return None
        if self.is_active(index) and self.recovers_by_itself(number):
            self.note(number, x, index)
            return None
        return self.trace(module, x, module.__dict__["_trimtab_switch"])

    def trace(self, module: nn.Module, x: Tensor, switch: Switch) -> Tensor | None:
        """The layer's output; which path is in force is looked up below, out of a compiler's sight."""
        layer: Any = module
        if layer.weight.requires_grad:
            return None  # unfrozen since; the plain layer gives it its gradient
        is_cast = torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64
        x, weight, bias = as_autocast_would(module, x, keep_weight=True)
        if not is_cast and weight.is_floating_point() and x.dtype != weight.dtype:
            return None  # the plain layer says what is wrong
        bias = None if bias is None else bias.to(x.dtype)
        outputs = int(layer.out_features if isinstance(module, nn.Linear) else weight.shape[1])
        output: Tensor = _FrozenLinear.apply(x, plain_tensor(weight), bias, outputs, switch.key)
        return output

    @torch.no_grad()
    def product(
        self, number: int, x: Tensor, weight: Tensor | None, bias: Tensor | None, index: int, active: bool
    ) -> Tensor:
        """The output of a layer of unit ``index`` with this ``weight``, or with its own where it is None."""
        # What is multiplied has been cast already, and an emulated product must not be.
        with torch.autocast(x.device.type, enabled=False), weights_of(self.layers[number], weight, None):
            if not active:
                return self.low_product(number, x.detach(), bias, index)
            self.note(number, x, index)
            return F.linear(x, self.high_weight(number, x.dtype), bias)

    @torch.no_grad()
    def input_gradient(self, number: int, grad: Tensor, given: Tensor | None, active: bool) -> Tensor:
        """The gradient of a layer's input, from that of its output and the weight that its forward was given."""
        with torch.autocast(grad.device.type, enabled=False), weights_of(self.layers[number], given, None):
            weight = self.high_weight(number, grad.dtype) if active else self.low_weight(number, grad.dtype)
            return (grad.reshape(-1, grad.shape[-1]) @ weight).reshape(*grad.shape[:-1], weight.shape[-1])


def plain_weight(layer: nn.Module) -> Tensor:
    """The weight of a linear layer as (out, in), contiguous, without its history."""
    weight: Any = layer.weight
    weight = weight.detach()
    return weight if isinstance(layer, nn.Linear) else weight.t().contiguous()  # type: ignore[no-any-return]


def _cost(layers: Sequence[nn.Module]) -> PathCost:
    weights: list[Any] = [layer.weight for layer in layers]
    # Two products: a frozen weight has no gradient, and asks for nothing to be kept.
    return PathCost(low_saved_bytes=0, high_saved_bytes=0, flops=4.0 * sum(weight.numel() for weight in weights))


class _FrozenLinear(torch.autograd.Function):
    """``apply(x, weight, bias, outputs, key)``, with the layer's key as its switch has it. Keeps no input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, outputs: int, key: Tensor) -> Tensor:
        """The output, in ``x``'s dtype."""
        ctx.inputs = x.shape[-1]
        ctx.conversion = None
        if torch.compiler.is_compiling():
            # Looked at while tracing, the path would become part of the graph.
            output, path = torch.ops.trimtab.frozen_linear(x, weight, bias, outputs, key)
            ctx.save_for_backward(weight, path, key)
            return output  # type: ignore[no-any-return]
        # Saved, a weight that is changed before the backward is noticed.
        ctx.save_for_backward(weight)
        ctx.conversion, unit, ctx.number = _look_up(key)  # the guard may have let go of the conversion by then
        ctx.active = ctx.conversion.is_active(unit)
        # It may end in a view, and autograd forbids in-place operations on a view made in here.
        return ctx.conversion.product(ctx.number, x, weight, bias, unit, ctx.active).data  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients."""
        grad_x = None
        if ctx.needs_input_grad[0]:
            if ctx.conversion is None:
                grad_x = torch.ops.trimtab.frozen_linear_backward(grad, *ctx.saved_tensors, ctx.inputs)
            else:
                grad_x = ctx.conversion.input_gradient(ctx.number, grad, *ctx.saved_tensors, ctx.active)
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, None, grad_bias, None, None


@torch.library.custom_op("trimtab::frozen_linear", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _frozen_linear(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, outputs: int, key: Tensor
) -> tuple[Tensor, Tensor]:
    conversion, unit, number = _look_up(key)
    active = conversion.is_active(unit)
    output = conversion.product(number, x, weight, bias, unit, active)
    return output.contiguous(), torch.tensor(active, device="cpu")


@_frozen_linear.register_fake
def _(x: Tensor, weight: Tensor | None, bias: Tensor | None, outputs: int, key: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty((*x.shape[:-1], outputs)), torch.empty((), dtype=torch.bool, device="cpu")


@torch.library.custom_op("trimtab::frozen_linear_backward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _frozen_linear_backward(grad: Tensor, weight: Tensor | None, path: Tensor, key: Tensor, inputs: int) -> Tensor:
    conversion, _, number = _look_up(key)
    return conversion.input_gradient(number, grad, weight, bool(path)).contiguous()


@_frozen_linear_backward.register_fake
def _(grad: Tensor, weight: Tensor | None, path: Tensor, key: Tensor, inputs: int) -> Tensor:
    return grad.new_empty((*grad.shape[:-1], inputs))


def _look_up(key: Tensor) -> tuple[FrozenBaseConversion, int, int]:
    return look_up(key)
