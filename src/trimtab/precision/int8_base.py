"""A frozen base under adapters in INT8 ([G] section 5.3).

    forward          Y  = Qa(X) Qw(W)' + b     Qw: one scale an output channel, Qa: one scale a token
    input gradient   dX = dY Qw(W)             dY as it is
    bias gradient    db = sum over tokens dY   where the bias is trained

A frozen weight has no gradient, so nothing of X is kept for backward on either path.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trimtab.errors import ConfigError
from trimtab.precision.conversion_plan import Planned, plan_conversion
from trimtab.precision.frozen_base import FrozenBaseConversion, plain_weight, why_not_frozen_base
from trimtab.precision.grouping import Grouping, check_unit
from trimtab.precision.linear_conversion import as_autocast_would, in_backward
from trimtab.precision.outlier_channels import SuffersOutliers
from trimtab.precision.quantizer_stats import ObservesQuantizers, most_tokens_of, stats_row
from trimtab.precision.stored_copy import encode, encode_with_stats
from trimtab.precision.units import Unit
from trimtab.precision.weight_copies import WeightCopies

__all__ = ["Int8Base", "Int8BaseConversion", "dequantized"]

Products = Literal["int_mm", "emulated", "mixed"]
"""How int8 operands are multiplied: by ``torch._int_mm``, as the same numbers in float32, or some so, some so."""


@dataclass(frozen=True, slots=True)
class Int8Base:
    """Multiply by the frozen base in INT8, and as it is while the unit is on the recovery path.

    Both operands of the forward product are symmetric int8: weights with one scale an output channel, activations with
    one a token. The gradient of the output is not quantized. What is watched are the adapters around the base, or, with
    ``unit="layer"``, those of a whole decoder layer, whose frozen projections without adapters are switched along.

    The product is ``torch._int_mm`` where that runs, on a GPU for more than 16 tokens and channels in multiples of 8,
    and otherwise the same numbers multiplied in float32; ``products`` of the conversion says which ran. Outside
    training (evaluation without gradients) the layers are the plain ones.

    The plain weight stays, since the recovery path multiplies by it: with ``cache_weights`` the int8 copy takes half
    as many bytes again as a bf16 weight. It is made anew when the weight is replaced, moved or changed, or peft
    merges adapters into it; another change through ``.data`` is noticed in the first forward of the next step.

    Args:
        unit: What is switched as one: a projection, an attention or MLP half, or a decoder layer ("block" is the same).
        cache_weights: Keep the int8 weights. If not, and for weights that FSDP2 shards, whose whole copy no rank has
            room for, they are quantized in each forward and backward.

    Raises: ConfigError: when a setting is none of these.

    Source: Kong et al. 2026, section 5.3.

    Example:
        >>> from trimtab.precision import find_units
        >>> model = nn.Sequential(nn.Linear(8, 4)).requires_grad_(False)
        >>> conversion = Int8Base().convert(model, find_units(model))
        >>> x = torch.randn(3, 8, requires_grad=True)
        >>> low = model(x)
        >>> conversion.route([True])
        >>> high = model(x)
        >>> bool(torch.equal(high, nn.functional.linear(x, model[0].weight, model[0].bias))), conversion.products
        (True, 'int_mm')
        >>> bool(0 < (high - low).norm() < 0.02 * high.norm())
        True
    """

    unit: Grouping = field(default="projection", kw_only=True)
    cache_weights: bool = field(default=True, kw_only=True)

    name = "int8-base"

    def __post_init__(self) -> None:
        check_unit(self.unit)
        if not isinstance(self.cache_weights, bool):
            raise ConfigError("cache_weights", self.cache_weights, "it is True or False.", "Choose one of the two.")

    def to_dict(self) -> dict[str, Any]:
        """The resolved configuration, JSON-able."""
        return {"name": self.name, **dataclasses.asdict(self)}

    def convert(self, model: nn.Module, units: Sequence[Unit]) -> Int8BaseConversion:
        """Convert the frozen linear layers of ``units`` in place; all start on the low-cost path.

        Raises: ConfigError: when none of the units can be converted; the model is then untouched.
        """
        return Int8BaseConversion(self, model, plan_conversion(model, units, self.name, why_not_frozen_base))


class Int8BaseConversion(SuffersOutliers, ObservesQuantizers, FrozenBaseConversion):
    """A model whose frozen layers multiply in int8; made by ``Int8Base.convert``.

    Args:
        recipe: The settings.
        model: The model.
        planned: Each unit with the layers of it that are converted.
    """

    def __init__(self, recipe: Int8Base, model: nn.Module, planned: Sequence[Planned]) -> None:
        self.recipe = recipe
        self._products: set[Products] = set()
        self._weights = WeightCopies(model, lambda layer: encode(plain_weight(layer), 8))
        super().__init__(model, planned)
        self._unit_of = [layer.__dict__["_trimtab_switch"].index for layer in self.layers]

    @property
    def products(self) -> Products | None:
        """How the low-cost path has multiplied until now; None before it has."""
        return "mixed" if len(self._products) == 2 else next(iter(self._products), None)

    def low_product(self, number: int, x: Tensor, bias: Tensor | None, index: int) -> Tensor:
        """``Qa(X) Qw(W)' + b``."""
        codes, scale = self._activations(x, index)
        weight_codes, weight_scale = self._quantized_weight(number)
        flat = codes.reshape(-1, codes.shape[-1]).contiguous()
        work = torch.float64 if x.dtype == torch.float64 else torch.float32
        if runs_int_mm(flat.shape[0], flat.shape[1], weight_codes.shape[0], x.device):
            self._products.add("int_mm")
            total = torch._int_mm(flat, weight_codes.t())
        else:
            self._products.add("emulated")
            total = flat.to(work) @ weight_codes.to(work).t()
        output = total * scale.reshape(-1, 1).to(work) * weight_scale.reshape(1, -1).to(work)
        if bias is not None:
            output += bias
        return output.to(x.dtype).reshape(*x.shape[:-1], weight_codes.shape[0])

    def low_weight(self, number: int, dtype: torch.dtype) -> Tensor:
        """``Qw(W)``; under outlier channels ``Qw(W / s) s``, so that the input gradient is that of ``x``."""
        weight = dequantized(*self._quantized_weight(number), dtype)
        outliers = self.outliers_of(self._unit_of[number])
        return weight if outliers is None else outliers.enlarged(weight)

    def begin_step(self, step: int) -> None:
        """Optimizer step ``step`` begins: outlier channels of the last end, and weights are looked at for changes."""
        super().begin_step(step)
        self.heal()
        self._weights.begin_step()

    def undo(self) -> None:
        """Give the model back, and let go of the int8 weights."""
        super().undo()
        self._weights.clear()

    @torch.no_grad()
    def note(self, number: int, x: Tensor, index: int) -> None:
        """Keep what the low-cost path would have done to ``x``."""
        if self._stats is not None and self._shadow and not in_backward():
            x, _, _ = as_autocast_would(self.operators[index][0], x, keep_weight=True)
            _, _, stats = encode_with_stats(self._as_quantized(x.detach(), index), 8, most_tokens=most_tokens_of(x))
            self._stats.note(index, stats_row(stats, x))

    def _activations(self, x: Tensor, index: int) -> tuple[Tensor, Tensor]:
        x = self._as_quantized(x, index)
        # A forward that is recomputed in backward has been seen before.
        if self._stats is None or in_backward():
            return encode(x, 8)
        codes, scale, stats = encode_with_stats(x, 8, most_tokens=most_tokens_of(x))
        self._stats.note(index, stats_row(stats, x))
        return codes, scale

    def _as_quantized(self, x: Tensor, index: int) -> Tensor:
        """``x`` as the quantizer is to see it."""
        outliers = self.outliers_of(index)
        return x if outliers is None else outliers.enlarged(x)

    def _quantized_weight(self, number: int) -> tuple[Tensor, Tensor]:
        layer = self.layers[number]
        outliers = self.outliers_of(self._unit_of[number])
        if outliers is not None:
            return encode(outliers.reduced(plain_weight(layer)), 8)
        return self._weights.get(layer) if self.recipe.cache_weights else self._weights.make(layer)


def dequantized(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes (out, in) times scales (out, 1), rounded once to ``dtype``."""
    work = torch.float64 if dtype == torch.float64 else torch.float32
    return (codes * scale.to(work)).to(dtype)


def runs_int_mm(tokens: int, inputs: int, outputs: int, device: torch.device) -> bool:
    """Whether ``torch._int_mm`` multiplies int8 matrices (tokens, inputs) and (inputs, outputs) on ``device``.

    Source: the checks of ``torch._int_mm``; that it adds up in int32, which more inputs could overflow, is ours.
    """
    if min(tokens, inputs, outputs) == 0 or inputs * 127**2 >= 2**31:
        return False
    if device.type == "cpu":
        return True
    return tokens > 16 and inputs % 8 == 0 and outputs % 8 == 0 and _has_int_mm(device)


@functools.cache
def _has_int_mm(device: torch.device) -> bool:
    """Whether ``device`` has the kernel at all."""
    # Which GPUs have it depends on the build of torch; asking is surer than a table.
    ones = torch.ones((32, 32), dtype=torch.int8, device=device)
    try:
        return bool((torch._int_mm(ones, ones.t()) == 32).all())
    except (RuntimeError, NotImplementedError):
        return False
