"""How far a product of rounded operands may be from the plain one: what follows from the rounding of each operand.

Shapes: x (..., in), weight (out, in), output gradient (..., out).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from trimtab.testing.layer_runs import Operands

__all__ = ["OPERANDS_OF", "OperandRounding", "magnitude", "product_sizes"]

OPERANDS_OF = {
    "output": ("input", "weight"),
    "input_gradient": ("output_gradient", "weight"),
    "weight_gradient": ("output_gradient", "input"),
    "bias_gradient": ("output_gradient",),
}
"""What each quantity of ``layer_runs.QUANTITIES`` is a product or a sum of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperandRounding:
    """How far rounding moves an entry of an operand at most: ``rtol * max(|entry|, floor * amax)``.

    Args:
        rtol: Relative to the entry. To nearest on a floating grid of m mantissa bits it is 2**-(m + 1), and on an
            integer grid whose largest code is c, with ``floor=1``, 0.5 / c; stochastic rounding doubles it.
        floor: The share of ``amax`` below which errors do not shrink with the entry any more. On a floating grid it is
            the smallest normal number over the largest, on an integer grid 1.
        over: What ``amax`` is the largest magnitude of: the entry's "row" (token, or output channel of a weight), or
            the "tensor", which also holds for tiles, columns and blocks of it.

    Example:
        >>> int8, e4m3 = OperandRounding(rtol=0.5 / 127, floor=1.0), OperandRounding(rtol=2**-4, floor=2**-6 / 448)
        >>> int8.rtol < e4m3.rtol
        True
    """

    rtol: float
    floor: float = 0.0
    over: Literal["row", "tensor"] = "row"


def magnitude(operand: Tensor, rounding: OperandRounding) -> Tensor:
    """What the error of each entry is relative to: ``max(|entry|, floor * amax)``, in float32."""
    size = operand.detach().float().abs()
    amax = size.amax(-1, keepdim=True) if rounding.over == "row" else size.amax()
    return torch.maximum(size, rounding.floor * amax)


def product_sizes(
    layer: nn.Module, given: Operands, magnitude_of: Callable[[str, Tensor], Tensor], power: int = 1
) -> dict[str, Tensor]:
    """``|A| |B|`` of each quantity ``A B`` that a layer computes, entry by entry.

    Errors of entries that all add up are of that size; those that are independent add up in squares (``power=2``).

    Args:
        layer: The plain layer.
        given: What it is given.
        magnitude_of: The magnitude of an operand, ``magnitude_of(name, operand)``, of its shape.
        power: Of the magnitudes, of whose product the root is taken.

    Returns: Float32 tensors of each quantity's shape, but for those of tokens, which are flat: (tokens, features).
    """
    is_linear = isinstance(layer, nn.Linear)
    weight: Tensor = layer.weight.detach()  # type: ignore[operator,union-attr,assignment]
    bias = getattr(layer, "bias", None)
    x, gradient, size = (
        magnitude_of(name, operand).reshape(-1, operand.shape[-1]) ** power
        for name, operand in (
            ("input", given.input),
            ("output_gradient", given.output_gradient),
            ("weight", weight if is_linear else weight.t()),
        )
    )
    by_weight = gradient.t() @ x
    sizes = {
        "output": x @ size.t() + (0 if bias is None else bias.detach().float().abs() ** power),
        "input_gradient": gradient @ size,
        "weight_gradient": by_weight if is_linear else by_weight.t(),
        "bias_gradient": gradient.sum(0),
    }
    return {name: product ** (1 / power) for name, product in sizes.items()}
