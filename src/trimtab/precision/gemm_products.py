"""The three products of a linear layer on quantized operands.

    forward          Y  = Qf(X) Qf(W)' + b
    input gradient   dX = Qb(dY) Qf(W)
    weight gradient  dW = Qb(dY)' Qf(X)
    bias gradient    db = sum over tokens dY      not quantized

Shapes: x (..., in), weight (out, in), grad (..., out). Each operand is quantized with the scales of its own layout, and
the same values enter both products that read it.

Products of FP8 operands are the device's where it has them (``scaled_products``). All others are emulated: an operand
is rounded in float32, from the master weight where there is one, and then cast to ``x``'s dtype, in which
the product is taken. In bfloat16 that rounds code times scale once more (2**-9, where E4M3 itself rounds by
2**-4); with scales that are powers of two nothing is lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from trimtab.formats import (
    Format,
    Granularity,
    QuantizationStats,
    ScaleKind,
    fake_quantize,
    fake_quantize_with_stats,
    per_block,
    per_tile,
    per_token,
)
from trimtab.precision.quantizer_stats import most_tokens_of
from trimtab.precision.scaled_products import attempt

__all__ = ["GemmPath", "Ran", "Scaling", "forward_product", "gradient_products", "quantized"]

_NO_SUCH_DEVICE = "no device has products of this grid"
_ALONG_THE_SUM = "no device takes scales that vary along the sum"

Scaling = Literal["tile", "token"]
"""Which entries share a scale: "tile" is 1x128 of activations and gradients and 128x128 of weights, "token" a row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmPath:
    """The grids of one precision path.

    Args:
        forward: Grid of activations and weights, in all products.
        backward: Grid of the gradients of outputs.
        scaling: Which entries share a scale.
        scale_kind: How a scale is made.
    """

    forward: Format
    backward: Format
    scaling: Scaling
    scale_kind: ScaleKind

    @property
    def is_fp8(self) -> bool:
        """Whether a device may have products of these grids."""
        return self.forward.name == "e4m3" and self.backward.name in ("e4m3", "e5m2")

    @property
    def row_blocks(self) -> Granularity:
        """Blocks of activations and gradients."""
        return per_tile() if self.scaling == "tile" else per_token()

    @property
    def weight_blocks(self) -> Granularity:
        """Blocks of weights."""
        return per_block() if self.scaling == "tile" else per_token()


def quantized(x: Tensor, path: GemmPath) -> tuple[Tensor, QuantizationStats]:
    """An activation on the path's grid, and what that did to it."""
    return fake_quantize_with_stats(x, path.forward, path.row_blocks, path.scale_kind, most_tokens=most_tokens_of(x))


@dataclass(slots=True)
class Ran:
    """Which of the two ran, by product: "scaled_mm", or "emulated" with the reason.

    Args:
        products: The last of each.
    """

    products: dict[str, str] = field(default_factory=dict)

    def note(self, product: str, why_emulated: str | None) -> None:
        """A product was taken by the device, or emulated for a reason."""
        self.products[product] = "scaled_mm" if why_emulated is None else f"emulated: {why_emulated}"


def forward_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, path: GemmPath, ran: Ran, qx: Tensor | None = None
) -> Tensor:
    """``Qf(X) Qf(W)' + b``.

    Args:
        x: Shape (..., in).
        weight: Shape (out, in); any floating dtype.
        bias: Shape (out,), in ``x``'s dtype.
        path: The grids.
        ran: Told which of the two ran.
        qx: ``Qf(x)``, where the caller has it already; an emulated product uses it.

    Returns: Shape (..., out), in ``x``'s dtype.
    """
    if path.is_fp8:
        flat = x.reshape(-1, x.shape[-1])
        output, reason = attempt(flat, weight, path.scaling, path.forward, path.forward, path.scale_kind)
        ran.note("forward", reason)
        if output is not None:
            output = output.view(*x.shape[:-1], weight.shape[0])
            return output if bias is None else output + bias
    else:
        ran.note("forward", _NO_SUCH_DEVICE)
    qx = fake_quantize(x, path.forward, path.row_blocks, path.scale_kind) if qx is None else qx
    return F.linear(qx, _weight(weight, path, x.dtype), bias)


def gradient_products(
    grad: Tensor, x: Tensor | None, weight: Tensor | None, path: GemmPath, ran: Ran
) -> tuple[Tensor | None, Tensor | None]:
    """``(dX, dW)``, each None where its other operand is.

    Args:
        grad: Gradient of the output, shape (tokens, out).
        x: Input, shape (tokens, in), or None where the weight gradient is not needed.
        weight: Shape (out, in), or None where the input gradient is not needed.
        path: The grids.
        ran: Told which of the two ran.
    """
    qg = None
    grad_x = grad_weight = None
    if weight is not None:
        grad_x, reason = _input_gradient_of_device(grad, weight, path)
        ran.note("input_gradient", reason)
        if grad_x is None:
            qg = _gradient(grad, path)
            grad_x = qg.mm(_weight(weight, path, grad.dtype))
    if x is not None:
        ran.note("weight_gradient", _ALONG_THE_SUM if path.is_fp8 else _NO_SUCH_DEVICE)
        qg = _gradient(grad, path) if qg is None else qg
        grad_weight = qg.t().mm(fake_quantize(x, path.forward, path.row_blocks, path.scale_kind))
    return grad_x, grad_weight


def _input_gradient_of_device(grad: Tensor, weight: Tensor, path: GemmPath) -> tuple[Tensor | None, str | None]:
    """The device's product, or None and why it is to be emulated."""
    if not path.is_fp8:
        return None, _NO_SUCH_DEVICE
    if path.scaling != "tile":
        return None, _ALONG_THE_SUM
    return attempt(grad, weight.t(), path.scaling, path.backward, path.forward, path.scale_kind)


def _gradient(grad: Tensor, path: GemmPath) -> Tensor:
    rounded: Tensor = fake_quantize(grad, path.backward, path.row_blocks, path.scale_kind)
    return rounded


def _weight(weight: Tensor, path: GemmPath, dtype: torch.dtype) -> Tensor:
    rounded: Tensor = fake_quantize(weight.detach(), path.forward, path.weight_blocks, path.scale_kind)
    return rounded.to(dtype)
