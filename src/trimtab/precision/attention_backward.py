"""A low-precision attention backward, emulated: what its error adds to the gradients of queries and keys.

    exact backward    dS = P ∘ (dP - delta)    delta = rowsum(dO ∘ O)
    low-cost path     delta' = rowsum(dO ∘ round(O)) + bias rowsum|dO ∘ O|,  e = delta' - delta
    its error         dQ' - dQ = -scale e ∘ (P K),    dK' - dK = -scale P' (e ∘ Q)

P K is the attention with the keys in the place of the values, and P' G is the gradient of those values. So the error
comes from the model's own attention function, whatever its kernel, mask, or sharing of key heads, and the rest of the
backward stays that function's own: where e is 0 the gradients are the exact ones, bit for bit.

A legend of shapes: query (batch, heads, tokens, d_head), key (batch, key heads, tokens, d_head); the output and its
gradient (batch, tokens, heads, d_head), as the attention functions of transformers return it.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from trimtab.errors import ConfigError, TrimtabWarning
from trimtab.precision.attention_calls import Attention, attention_modules, place_around
from trimtab.precision.conversion_plan import Planned
from trimtab.precision.linear_conversion import LinearConversion
from trimtab.precision.recipe import PathCost
from trimtab.precision.units import Unit, clean_fqn

__all__ = [
    "AttentionBackward",
    "AttentionBackwardConversion",
    "MantissaRounding",
    "keep_mantissa",
]

MantissaRounding = Literal["truncate", "nearest"]
"""Towards zero, which is biased, or to nearest, ties to even, which is not."""


@dataclass(frozen=True, slots=True)
class AttentionBackward:
    """Let attention's backward work with an output of few mantissa bits, and exactly while the unit is recovered.

    Low-precision attention kernels compute ``delta = rowsum(dO ∘ O)`` from a rounded output O. Rounded to nearest that
    is noise; cut off towards zero, as by an arithmetic that drops bits, it is a bias that grows from step to step. Here
    the forward is that of the model's own attention function, exactly, and so is the backward but for what this error
    adds to the gradients of queries and keys, in the arithmetic of the attention function.

    The unit is an attention module of transformers whose softmax is a plain one (attention sinks are, too; a soft-cap
    on the logits is not). Dropout is as in the exact backward. On the low-cost path backward runs the attention
    function once more, forward and backward: this emulates an arithmetic, it saves no time.

    Under ``torch.compile`` the graph breaks at each converted attention, which then runs eagerly.

    Args:
        mantissa_bits: Bits behind the leading one that are left of O, 1 to 51; None leaves O as it is.
        rounding: Whether O is cut off towards zero, or rounded to nearest: the control, which does no harm.
        bias: This times ``rowsum |dO ∘ O|`` is added to delta.
        unit: "half": each attention module by itself. Nothing else is switched as one.

    Raises: ConfigError: when a setting is none of these.

    Source: Qiu and Yao 2025; Huang et al. 2026.

    Example:
        >>> AttentionBackward(mantissa_bits=1).rounding
        'truncate'
    """

    mantissa_bits: int | None = 1
    rounding: MantissaRounding = field(default="truncate", kw_only=True)
    bias: float = field(default=0.0, kw_only=True)
    unit: Literal["half"] = field(default="half", kw_only=True)

    name = "attention-backward"

    def __post_init__(self) -> None:
        bits = self.mantissa_bits
        if bits is not None and (not isinstance(bits, int) or isinstance(bits, bool) or not 1 <= bits <= 51):
            raise ConfigError(
                "mantissa_bits", bits, "a whole number from 1 to 51 is needed, or None.", "Set it to 1, say."
            )
        if self.rounding not in get_args(MantissaRounding):
            raise ConfigError("rounding", self.rounding, "it is 'truncate' or 'nearest'.", "Choose one of the two.")
        if isinstance(self.bias, bool) or not isinstance(self.bias, int | float) or not math.isfinite(self.bias):
            raise ConfigError("bias", self.bias, "a finite number is needed.", "Set it to 0 for none.")
        if self.unit != "half":
            raise ConfigError("unit", self.unit, "an attention module is the half of a block.", "Set it to 'half'.")

    def to_dict(self) -> dict[str, Any]:
        """The resolved configuration, JSON-able."""
        return {"name": self.name, **dataclasses.asdict(self)}

    def convert(self, model: nn.Module, units: Sequence[Unit]) -> AttentionBackwardConversion:
        """Place this backward at the attention modules of ``units``; all start on the low-cost path.

        Units without one, such as the MLP half of a block, are left out.

        Raises: ConfigError: when there is none in any unit; the model is then untouched.
        """
        return AttentionBackwardConversion(self, model, _plan(model, units))

    def error_of_delta(self, output: Tensor, grad: Tensor) -> Tensor:
        """What the low-cost path has ``rowsum(dO ∘ O)`` too much.

        Args:
            output: O. Shape (..., d_head).
            grad: dO, of the same shape.

        Returns: Shape (..., 1), in float32, or float64 where an argument is.
        """
        dtype = torch.promote_types(torch.promote_types(output.dtype, grad.dtype), torch.float32)
        output, grad = output.to(dtype), grad.to(dtype)
        error = torch.zeros_like(output[..., :1])
        if self.mantissa_bits is not None:
            rounded = keep_mantissa(output, self.mantissa_bits, self.rounding)
            error = error + (grad * (rounded - output)).sum(-1, keepdim=True)
        if self.bias:
            error = error + self.bias * (grad * output).abs().sum(-1, keepdim=True)
        return error

    def around(self, attention: Attention, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """``attention``, with the backward of the low-cost path."""
        output, weights = attention(module, *args, **kwargs)
        query, key, _, *rest = args
        if not torch.is_grad_enabled() or not (output.requires_grad and (query.requires_grad or key.requires_grad)):
            return output, weights
        scale = kwargs.get("scaling")
        # Dropout falls on the weights after the softmax: it is in dO ∘ O, and not in the P that the error is spread by.
        again = _Again(attention, module, rest, kwargs | ({"dropout": 0.0} if "dropout" in kwargs else {}))
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return _WithError.apply(output, query, key, scale, self, again), weights


class AttentionBackwardConversion(LinearConversion):
    """A model whose attention modules have a backward of low precision; made by ``AttentionBackward.convert``."""

    def __init__(self, recipe: AttentionBackward, model: nn.Module, planned: Sequence[Planned]) -> None:
        self.recipe = recipe
        self.attentions = tuple(modules for _, modules in planned)
        self._faults: dict[int, AttentionBackward] = {}
        costs = [_cost(unit, modules) for unit, modules in planned]
        # A route that changes cannot be traced as it stands: attention runs eagerly between two compiled parts. As a
        # decorator this would load the compiler wherever trimtab is imported.
        self.attend_eagerly = torch.compiler.disable(self.attend, recursive=True)
        # No layer asks a switch of its own; what is placed around the attention does.
        super().__init__(model, [unit for unit, _ in planned], costs, [() for _ in planned])
        self._take_away = [
            place_around(module, _Placed(self, index), innermost=True)
            for index, modules in enumerate(self.attentions)
            for module in modules
        ]

    def run(self, module: nn.Module, x: Tensor, index: int) -> None:
        """No layer is converted."""

    def attend(
        self, attention: Attention, index: int, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        """The attention of a module of unit ``index``, on the path in force."""
        if (torch.is_grad_enabled() or module.training) and not self.is_active(index):
            return self._faults.get(index, self.recipe).around(attention, module, *args, **kwargs)
        return attention(module, *args, **kwargs)

    def begin_step(self, step: int) -> None:
        """Optimizer step ``step`` begins; faults of the step before are over."""
        super().begin_step(step)
        self._faults.clear()

    def corrupt(self, index: int, backward: AttentionBackward) -> None:
        """Fault on purpose: have this ``backward`` on the low-cost path of unit ``index`` until the next step."""
        self._faults[index] = backward

    def undo(self) -> None:
        """Take away what was placed around attention, and the model's hooks."""
        super().undo()
        for take_away in self._take_away:
            take_away()


class _Placed:
    """What is placed around the attention of one module."""

    def __init__(self, conversion: AttentionBackwardConversion, index: int) -> None:
        self.conversion, self.index = conversion, index

    def __call__(self, attention: Attention, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        return self.conversion.attend_eagerly(attention, self.index, module, *args, **kwargs)


class _Again:
    """Calls an attention function once more on the same operands, with other values.

    Args:
        attention: The function.
        module: Its module.
        rest: Its positional arguments behind the values: the mask.
        kwargs: Its settings.
    """

    def __init__(self, attention: Attention, module: nn.Module, rest: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.attention, self.module, self.rest, self.kwargs = attention, module, rest, kwargs

    def __call__(self, query: Tensor, key: Tensor, values: Tensor) -> Tensor:
        return self.attention(self.module, query, key, values, *self.rest, **self.kwargs)[0]


class _WithError(torch.autograd.Function):
    """``apply(output, query, key, scale, recipe, again)``: the output; queries and keys get the error's gradient."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, query: Tensor, key: Tensor, scale: float, recipe: AttentionBackward, again: _Again
    ) -> Tensor:
        """The output, as it is."""
        ctx.save_for_backward(output, query, key)
        ctx.scale, ctx.recipe, ctx.again = scale, recipe, again
        device = query.device.type
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        return output.view_as(output)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The output's gradient, which the exact backward takes from there, and what the error adds."""
        output, query, key = ctx.saved_tensors
        error = (-ctx.scale * ctx.recipe.error_of_delta(output, grad)).to(query.dtype)
        device, dtype, enabled = ctx.autocast
        with torch.enable_grad(), torch.autocast(device, dtype=dtype, enabled=enabled):
            values = key.detach().requires_grad_()
            attended_keys = ctx.again(query.detach(), key.detach(), values)
        d_query = (error * attended_keys.detach()).transpose(1, 2) if ctx.needs_input_grad[1] else None
        d_key = None
        if ctx.needs_input_grad[2]:
            (d_key,) = torch.autograd.grad(
                attended_keys, values, (error * query.transpose(1, 2)).to(attended_keys.dtype)
            )
        return grad, d_query, d_key, None, None, None


def keep_mantissa(x: Tensor, mantissa_bits: int, rounding: MantissaRounding) -> Tensor:
    """``x`` with that many bits of its significand behind the leading one.

    Subnormal numbers of the dtype keep as many bits of theirs, counted from the same place. What is not finite stays as
    it is; rounded to nearest, a number beyond the largest becomes infinite.

    Args:
        x: float32 or float64.
        mantissa_bits: From 1 to the 23 or 52 that x has; with more, it stays as it is.
        rounding: Towards zero, or to nearest, ties to even.

    Example:
        >>> x = torch.tensor([1.75, -1.75, 1.25])
        >>> keep_mantissa(x, 1, "truncate").tolist(), keep_mantissa(x, 1, "nearest").tolist()
        ([1.5, -1.5, 1.0], [2.0, -2.0, 1.0])
    """
    codes, bits = (torch.int64, 52) if x.dtype == torch.float64 else (torch.int32, 23)
    num_dropped = bits - mantissa_bits
    if num_dropped <= 0:
        return x
    code = x.contiguous().view(codes)
    if rounding == "nearest":
        # Half a step less one, and one more where the last bit that stays is odd; a carry runs on into the exponent.
        code = code + ((1 << (num_dropped - 1)) - 1) + ((code >> num_dropped) & 1)
    rounded = (code & -(1 << num_dropped)).view(x.dtype)
    return torch.where(x.isfinite(), rounded, x)


def _plan(model: nn.Module, units: Sequence[Unit]) -> list[Planned]:
    """Each unit that has attention modules, with these.

    Raises: ConfigError: when none has.
    """
    attentions = {id(module): (name, module) for name, module in attention_modules(model).items()}
    planned: list[Planned] = []
    refused: dict[str, str] = {}
    for unit in units:
        found = [attentions[id(m)] for m in _modules_of(model, unit) if id(m) in attentions]
        refused |= {name: why for name, module in found if (why := _why_not(module)) is not None}
        if able := tuple(module for name, module in found if name not in refused):
            planned.append((unit, able))
    if not planned:
        nothing = {u.name: "it holds no attention of transformers" for u in units} or {"it": "there is no unit"}
        name, reason = next(iter((refused or nothing).items()))
        raise ConfigError(
            "units",
            [u.name for u in units][:3],
            f"attention-backward can convert none of them ({name}: {reason}).",
            "Leave units out, or choose another recipe.",
        )
    if refused:
        name, reason = next(iter(refused.items()))
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        warnings.warn(f"attention-backward leaves {name}{more} as it is: {reason}.", TrimtabWarning, stacklevel=4)
    return planned


def _modules_of(model: nn.Module, unit: Unit) -> list[nn.Module]:
    """The modules at and below the one that the unit is named as, or is."""
    named = {clean_fqn(name): module for name, module in model.named_modules()}
    roots = [named[unit.name]] if unit.name in named and unit.name not in unit.module_names else list(unit.modules)
    return [m for root in roots for m in root.modules()]


def _why_not(module: nn.Module) -> str | None:
    """Why the backward of an attention module cannot be replaced, or None."""
    if any(getattr(module, name, None) is not None for name in ("softcap", "attn_logit_softcapping")):
        return "a soft-cap on its logits comes between them and the softmax"
    return None


def _cost(unit: Unit, modules: Sequence[nn.Module]) -> PathCost:
    """What the unit's projections compute; what attention itself does depends on how long a sequence is."""
    return PathCost(low_saved_bytes=0.0, high_saved_bytes=0.0, flops=6.0 * unit.num_parameters)
