"""Stacked experts on quantized operands: each expert's products are those of its own unit's path.

Shapes: T tokens, k experts a token, S = T k selected pairs, E experts, d model, f inner. Weights are stacked as
(E, out, in), or (E, in, out) where the module says that they are transposed. Pairs are sorted by expert, so that each
expert's rows lie together; how many each has is read on the host, which waits for the device once a product, as
eager loops over experts do too.

What a module must have to be understood are the attributes that transformers gives to its experts (``has_gate``,
``has_bias``, ``is_transposed``, ``has_post_expert_norm``, ``_apply_gate``).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trimtab.precision.convertible import why_not_weight
from trimtab.precision.linear_conversion import look_up

if TYPE_CHECKING:
    from trimtab.precision.quantized_gemm import QuantizedGemmConversion

__all__ = ["expert_weights", "run_experts", "why_not_experts"]

_NEEDED = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm", "_apply_gate", "down_proj", "act_fn")


def why_not_experts(module: nn.Module) -> str | None:
    """Why the products of ``module`` cannot be told apart by expert, or None when they can."""
    missing = [name for name in _NEEDED if name != "act_fn" and not hasattr(module, name)]
    if missing:
        return f"its class {type(module).__name__} computes its experts in its own way"
    if "_trimtab_switch" in module.__dict__:
        return "another recipe has converted it already"
    if "forward" in module.__dict__:
        return "something else has already replaced its forward"
    return next((reason for w in expert_weights(module) if (reason := why_not_weight(w)) is not None), None)


def expert_weights(module: Any) -> tuple[Tensor, Tensor]:
    """The stacked weights of the first and of the second product."""
    return module.gate_up_proj if module.has_gate else module.up_proj, module.down_proj


def run_experts(module: Any, hidden: Tensor, chosen: Tensor, shares: Tensor, key: Tensor) -> Tensor:
    """The output of all experts.

    Args:
        module: The experts.
        hidden: Input, shape (T, d).
        chosen: The experts of each token, shape (T, k).
        shares: Their weights, shape (T, k).
        key: The module's, as its switch has it.

    Returns: Shape (T, d).
    """
    num_chosen = chosen.shape[-1]
    expert, order = torch.sort(chosen.reshape(-1), stable=True)
    first, second = expert_weights(module)
    ends = (expert.unsqueeze(0) <= torch.arange(first.shape[0], device=expert.device).unsqueeze(1)).sum(1)
    name = "gate_up_proj" if module.has_gate else "up_proj"
    x = hidden[order // num_chosen]
    x = _product(module, x, first, name, expert, ends, key)
    x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    x = _product(module, x, second, "down_proj", expert, ends, key)
    if module.has_post_expert_norm:
        x = module.post_expert_norm(x)
    x = x * shares.reshape(-1)[order].unsqueeze(-1)
    back = torch.argsort(order)
    return x[back].view(*chosen.shape, x.shape[-1]).sum(-2).to(hidden.dtype)


def _product(module: Any, x: Tensor, weight: Tensor, name: str, expert: Tensor, ends: Tensor, key: Tensor) -> Tensor:
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(x.device.type))
    weight = weight.transpose(-2, -1) if module.is_transposed else weight
    output: Tensor = _GroupedLinear.apply(x, weight, ends, key)
    if module.has_bias:
        output = output + getattr(module, f"{name}_bias")[expert].to(output.dtype)
    return output


class _GroupedLinear(torch.autograd.Function):
    """``apply(x, weight, ends, key)``: rows up to ``ends[e]`` times the transpose of ``weight[e]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, key: Tensor) -> Tensor:
        """The output, shape (S, out)."""
        call = torch.ops.trimtab.grouped_linear if torch.compiler.is_compiling() else _forward
        output, paths = call(x, weight, ends, key)
        ctx.conversion = None if torch.compiler.is_compiling() else _look_up(key)[0]  # alive until the backward
        ctx.save_for_backward(x, weight, ends, paths, key)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients."""
        x, weight, ends, paths, key = ctx.saved_tensors
        call = torch.ops.trimtab.grouped_linear_backward if torch.compiler.is_compiling() else _backward
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_x, grad_weight = call(grad, x, weight, ends, paths, needs_x, needs_weight, key)
        return grad_x if needs_x else None, grad_weight if needs_weight else None, None, None


def _forward(x: Tensor, weight: Tensor, ends: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    conversion, units = _look_up(key)
    paths = [unit is not None and conversion.is_active(unit) for unit in units]
    # Rows past the last end belong to no expert here; they must not hold what memory held.
    output = x.new_zeros((x.shape[0], weight.shape[1]))
    for e, rows in _rows_of(ends):
        output[rows] = conversion.forward_product(x[rows], weight[e], None, units[e], paths[e])
    return output, torch.tensor(paths, device="cpu")


def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    paths: Tensor,
    needs_x: bool,
    needs_weight: bool,
    key: Tensor,
) -> tuple[Tensor, Tensor]:
    conversion, units = _look_up(key)
    active = paths.tolist()
    grad_x = x.new_zeros(x.shape) if needs_x else x.new_empty((0,))
    # An expert without tokens has a gradient of exactly zero: it is not observed.
    grad_weight = weight.new_zeros(weight.shape) if needs_weight else weight.new_empty((0,))
    for e, rows in _rows_of(ends):
        part_x, part_weight = conversion.gradient_products(
            grad[rows], x[rows] if needs_weight else None, weight[e] if needs_x else None, active[e], units[e]
        )
        if part_x is not None:
            grad_x[rows] = part_x
        if part_weight is not None:
            grad_weight[e] = part_weight
    return grad_x, grad_weight


def _rows_of(ends: Tensor) -> list[tuple[int, slice]]:
    """The experts that have rows, each with its rows."""
    bounds: list[int] = [0, *ends.tolist()]
    return [(e, slice(a, b)) for e, (a, b) in enumerate(itertools.pairwise(bounds)) if b > a]


_forward_op = torch.library.custom_op(
    "trimtab::grouped_linear", _forward, mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
_backward_op = torch.library.custom_op(
    "trimtab::grouped_linear_backward", _backward, mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)


@_forward_op.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty((x.shape[0], weight.shape[1])), torch.empty((weight.shape[0],), dtype=torch.bool, device="cpu")


@_backward_op.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    paths: Tensor,
    needs_x: bool,
    needs_weight: bool,
    key: Tensor,
) -> tuple[Tensor, Tensor]:
    grad_x = x.new_empty(x.shape) if needs_x else x.new_empty((0,))
    return grad_x, weight.new_empty(weight.shape) if needs_weight else weight.new_empty((0,))


def _look_up(key: Tensor) -> tuple[QuantizedGemmConversion, list[int | None]]:
    """The conversion, and the unit of each expert."""
    conversion, _, number = look_up(key)
    return conversion, conversion.units_of_experts(number)
