"""A linear layer whose three products are those of its unit's path: the autograd function, and operators of ours.

A compiler sees the two operators only; which path a forward took travels to its backward in a tensor on the host, so
that both agree whatever is routed in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trimtab.precision.linear_conversion import look_up

if TYPE_CHECKING:
    from trimtab.precision.quantized_gemm import QuantizedGemmConversion

__all__ = ["QuantizedLinear"]


class QuantizedLinear(torch.autograd.Function):
    """``apply(x, weight, bias, key)``: the output of a linear layer on the path that its unit is on.

    Keeps for backward what the plain layer keeps: the input where the weight has a gradient, and the weight.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, key: Tensor) -> Tensor:
        """The output, in ``x``'s dtype."""
        # Looked at while tracing, the path would become part of the graph.
        call = torch.ops.trimtab.quantized_linear if torch.compiler.is_compiling() else _forward
        output, path = call(x, weight, bias, key)
        # A guard may be detached, and let go, before the backward.
        ctx.conversion = None if torch.compiler.is_compiling() else _look_up(key)[0]
        ctx.shape = x.shape
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, path, key)
        # It ends in a view, and autograd forbids in-place operations (an inplace ReLU) on a view made in here.
        return output if torch.compiler.is_compiling() else output.data

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients."""
        x: Tensor | None
        x, weight, path, key = ctx.saved_tensors
        flat_x = None if x is None else x.reshape(-1, x.shape[-1])
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        flat = grad.reshape(-1, grad.shape[-1])
        grad_x: Any = None
        grad_weight = grad_bias = None
        if needs_x or needs_weight:
            call = torch.ops.trimtab.quantized_linear_backward if torch.compiler.is_compiling() else _backward
            grad_x, grad_weight = call(flat, flat_x, weight, path, needs_x, key)
        if needs_bias:
            grad_bias = flat.sum(0)
        return (
            grad_x.reshape(ctx.shape) if needs_x else None,
            grad_weight if needs_weight else None,
            grad_bias,
            None,
        )


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, key: Tensor) -> tuple[Tensor, Tensor]:
    conversion, unit = _look_up(key)
    active = conversion.is_active(unit)
    output = conversion.forward_product(x, weight, bias, unit, active)
    return output, torch.tensor(active, device="cpu")


def _backward(
    grad: Tensor, x: Tensor | None, weight: Tensor, path: Tensor, needs_x: bool, key: Tensor
) -> tuple[Tensor, Tensor]:
    conversion, unit = _look_up(key)
    grad_x, grad_weight = conversion.gradient_products(grad, x, weight if needs_x else None, bool(path), unit)
    none = grad.new_empty((0,))
    return none if grad_x is None else grad_x, none if grad_weight is None else grad_weight.to(weight.dtype)


_forward_op = torch.library.custom_op(
    "trimtab::quantized_linear", _forward, mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
_backward_op = torch.library.custom_op(
    "trimtab::quantized_linear_backward", _backward, mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)


@_forward_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, key: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty((*x.shape[:-1], weight.shape[0])), torch.empty((), dtype=torch.bool, device="cpu")


@_backward_op.register_fake
def _(
    grad: Tensor, x: Tensor | None, weight: Tensor, path: Tensor, needs_x: bool, key: Tensor
) -> tuple[Tensor, Tensor]:
    grad_x = grad.new_empty((grad.shape[0], weight.shape[1])) if needs_x else grad.new_empty((0,))
    return grad_x, weight.new_empty(weight.shape) if x is not None else grad.new_empty((0,))


def _look_up(key: Tensor) -> tuple[QuantizedGemmConversion, int]:
    conversion, unit, _ = look_up(key)
    return conversion, unit
