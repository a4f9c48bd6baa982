"""A linear layer whose backward reads its input from a stored copy."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from trimtab.precision.stored_copy import decode

__all__ = ["LinearFromStoredCopy", "conv1d", "corrupted"]


class LinearFromStoredCopy(torch.autograd.Function):
    """A linear layer whose backward reads its input from a stored copy."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        packed: Tensor,
        scale: Tensor,
        bits: int,
        transposed: bool,
        corruption: tuple[Tensor, float] | None,
    ) -> Tensor:
        """The plain layer's output."""
        output = conv1d(x, weight, bias) if transposed else F.linear(x, weight, bias)
        # Both end in a view, and autograd forbids in-place operations (an inplace ReLU) on a view made in here.
        return output.data

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the stored copy, and not the input."""
        x, weight, _, packed, scale, ctx.bits, ctx.transposed, ctx.corruption = inputs
        ctx.size, ctx.dtype = x.shape[-1], x.dtype
        # Which kernels the plain layer's backward takes depends on the input's layout; so does its rounding.
        ctx.column_major = _is_column_major(x)
        ctx.fused_bias = x.dim() == 2 or x.is_contiguous()
        ctx.save_for_backward(weight, packed, scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The plain layer's gradients, but for the weight's, which reads the copy."""
        weight, packed, scale = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        flat = grad.reshape(-1, grad.shape[-1])
        if ctx.needs_input_grad[0]:
            by_input = weight.t() if ctx.transposed else weight
            flat_grad_x = by_input.t().mm(flat.t()).t() if ctx.column_major else flat.mm(by_input)
            grad_x = flat_grad_x.reshape(*grad.shape[:-1], ctx.size)
        if ctx.needs_input_grad[1]:
            stored = decode(packed, scale, bits=ctx.bits, size=ctx.size, dtype=ctx.dtype)
            if ctx.corruption is not None:
                corrupted(stored, ctx.corruption)
            stored = stored.reshape(-1, ctx.size)
            grad_weight = stored.t().mm(flat) if ctx.transposed else flat.t().mm(stored)
        if ctx.needs_input_grad[2]:
            grad_bias = flat.sum(0) if ctx.fused_bias else grad.sum_to_size(grad.shape[-1])
        return grad_x, grad_weight, grad_bias, None, None, None, None, None


def corrupted(stored: Tensor, corruption: tuple[Tensor, float]) -> Tensor:
    """``stored`` itself, with the channels of the corruption scaled by its factor."""
    channels, factor = corruption
    channels = channels.to(stored.device)  # a replica of nn.DataParallel lives on another
    stored[..., channels] = stored[..., channels] * factor
    return stored


def _is_column_major(x: Tensor) -> bool:
    """Whether the rows of ``x``, taken together, are the transpose of a contiguous matrix."""
    if x.dim() < 2 or x.is_contiguous():
        return False
    return x.stride(-1) == x.numel() // x.shape[-1] and x.select(-1, 0).is_contiguous()


def conv1d(x: Tensor, weight: Tensor, bias: Any) -> Tensor:
    """The transposed linear layer of GPT-2, as transformers computes it."""
    return torch.addmm(bias, x.view(-1, x.size(-1)), weight).view(*x.shape[:-1], weight.shape[1])
