"""A linear layer whose backward reads its input from a stored copy, and the class that a converted layer takes on."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from trimtab.precision.stored_copy import decode

__all__ = ["LinearFromStoredCopy", "converted_class", "give_back_class"]


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
        output = _conv1d(x, weight, bias) if transposed else F.linear(x, weight, bias)
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
                channels, factor = ctx.corruption
                stored[..., channels] = stored[..., channels] * factor
            stored = stored.reshape(-1, ctx.size)
            grad_weight = stored.t().mm(flat) if ctx.transposed else flat.t().mm(stored)
        if ctx.needs_input_grad[2]:
            grad_bias = flat.sum(0) if ctx.fused_bias else grad.sum_to_size(grad.shape[-1])
        return grad_x, grad_weight, grad_bias, None, None, None, None, None


def _is_column_major(x: Tensor) -> bool:
    """Whether the rows of ``x``, taken together, are the transpose of a contiguous matrix."""
    if x.dim() < 2 or x.is_contiguous():
        return False
    return x.stride(-1) == x.numel() // x.shape[-1] and x.select(-1, 0).is_contiguous()


def _conv1d(x: Tensor, weight: Tensor, bias: Any) -> Tensor:
    """The transposed linear layer of GPT-2, as transformers computes it."""
    return torch.addmm(bias, x.view(-1, x.size(-1)), weight).view(*x.shape[:-1], weight.shape[1])


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
                and self.weight.requires_grad
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

        def reduce_as_plain(self: nn.Module, protocol: int) -> tuple[Any, ...]:
            # A pickled or copied layer is a plain layer: readable without trimtab, and steered by nothing.
            state = {k: v for k, v in self.__dict__.items() if k != "_trimtab_switch"}
            return object.__new__, (base,), state

        forward = forward_linear if issubclass(base, nn.Linear) else forward_conv1d
        _converted_classes[base] = type(
            base.__name__,
            (base,),
            {"forward": forward, "__reduce_ex__": reduce_as_plain, "__module__": base.__module__},
        )
    return _converted_classes[base]


def give_back_class(module: nn.Module) -> None:
    """Undo ``module.__class__ = converted_class(...)``."""
    # A wrapper that came later (FSDP2) has put its own class on top; without its switch ours is inert.
    if type(module) in _converted_classes.values():
        module.__class__ = type(module).__mro__[1]
