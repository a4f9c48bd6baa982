"""DeepSeek-style low-precision pre-training: all three products of a projection on quantized operands ([G] 5.2, E.2).

The products are those of ``gemm_products``. Master weights, embeddings, norms, routers, attention and the output head
stay as they are. Outside training (evaluation without gradients) the layers are the plain ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from trimtab.errors import ConfigError
from trimtab.formats import ScaleKind, get
from trimtab.precision.conversion_plan import Planned, plan_conversion
from trimtab.precision.convertible import why_not_plain_linear
from trimtab.precision.gemm_products import GemmPath, Ran, Scaling, forward_product, gradient_products, quantized
from trimtab.precision.grouping import Grouping, check_unit
from trimtab.precision.linear_conversion import (
    LinearConversion,
    Switch,
    as_autocast_would,
    in_backward,
    input_size,
    look_up,
)
from trimtab.precision.outlier_channels import SuffersOutliers
from trimtab.precision.quantized_experts import expert_weights, run_experts, why_not_experts
from trimtab.precision.quantized_linear import QuantizedLinear
from trimtab.precision.quantizer_stats import ObservesQuantizers, stats_row
from trimtab.precision.recipe import PathCost
from trimtab.precision.units import Unit, is_linear, num_experts

__all__ = ["QuantizedGemm", "QuantizedGemmConversion"]

LowFormat = Literal["e3m2", "e2m3", "e2m1"]
HighFormat = Literal["fp8", "bf16"]


@dataclass(frozen=True, slots=True)
class QuantizedGemm:
    """Multiply on a 6-bit or 4-bit grid, and in FP8 or unquantized while the unit is on the recovery path.

    Args:
        low: Grid of activations, weights and gradients on the low-cost path: E3M2, E2M3 or E2M1.
        high: The recovery path: "fp8" is E4M3 for activations and weights and E5M2 for gradients; "bf16" is the plain
            layer in whatever dtype it runs.
        unit: What is switched as one: a projection, an attention or MLP half, or a block ("layer" is the same).
        scaling: Which entries share a scale: "tile" is 1x128 of activations and gradients and 128x128 of weights,
            "token" a row of each.
        scale_kind: Scales of float32, or powers of two ("e8m0").

    Raises: ConfigError: when a setting is none of these.

    Source: Kong et al. 2026, section 5.2 and appendix E.2, after DeepSeek-V3 Technical Report, section 3.3. There the
        weight gradient reads activations quantized anew in 128x1 tiles; here it reads the values of the forward
        product, so that each operand has one quantization error.

    Example:
        >>> QuantizedGemm("e2m1", "bf16", unit="block").to_dict()["low"]
        'e2m1'
    """

    low: LowFormat = "e3m2"
    high: HighFormat = "fp8"
    unit: Grouping = "projection"
    scaling: Scaling = field(default="tile", kw_only=True)
    scale_kind: ScaleKind = field(default="float32", kw_only=True)

    name = "quantized-gemm"

    def __post_init__(self) -> None:
        for setting, allowed in (
            ("low", get_args(LowFormat)),
            ("high", get_args(HighFormat)),
            ("scaling", get_args(Scaling)),
            ("scale_kind", get_args(ScaleKind)),
        ):
            value = getattr(self, setting)
            if value not in allowed:
                raise ConfigError(setting, value, f"it is one of {', '.join(map(repr, allowed))}.", "Use one of them.")
        check_unit(self.unit)

    def to_dict(self) -> dict[str, Any]:
        """The resolved configuration, JSON-able."""
        return {"name": self.name, **dataclasses.asdict(self)}

    def convert(self, model: nn.Module, units: Sequence[Unit]) -> QuantizedGemmConversion:
        """Convert the linear layers of ``units`` in place; all start on the low-cost path.

        Raises: ConfigError: when none of the units can be converted; the model is then untouched.
        """
        return QuantizedGemmConversion(self, model, plan_conversion(model, units, self.name, _why_not))


class QuantizedGemmConversion(SuffersOutliers, ObservesQuantizers, LinearConversion):
    """A model whose projections multiply quantized operands; made by ``QuantizedGemm.convert``.

    Args:
        recipe: The settings.
        model: The model.
        planned: Each unit with the layers of it that are converted.
    """

    needs_weight_gradient = False

    def __init__(self, recipe: QuantizedGemm, model: nn.Module, planned: Sequence[Planned]) -> None:
        self.recipe = recipe
        low = get(recipe.low)
        self._low = GemmPath(forward=low, backward=low, scaling=recipe.scaling, scale_kind=recipe.scale_kind)
        self._high = None
        if recipe.high == "fp8":
            self._high = GemmPath(
                forward=get("e4m3"), backward=get("e5m2"), scaling=recipe.scaling, scale_kind=recipe.scale_kind
            )
        self._ran = {False: Ran(), True: Ran()}
        units = [unit for unit, _ in planned]
        operators = [layers for _, layers in planned]
        super().__init__(model, units, [_cost(unit, layers) for unit, layers in planned], operators)
        self._units_of_experts = _units_of_experts(planned, self.layers)

    @property
    def products(self) -> dict[str, str]:
        """Which of the two ran last, by path and product: "scaled_mm", or "emulated" with the reason."""
        paths = (("low", self._ran[False]), ("high", self._ran[True]))
        return {f"{path}_{product}": what for path, ran in paths for product, what in ran.products.items()}

    def run(self, module: nn.Module, x: Tensor, index: int) -> Tensor | None:
        """The layer's output on the path in force; None where that is the plain layer's."""
        if self._high is None and self.is_active(index):
            self._note(x, index, active=True)
            return None
        return self.trace(module, x, module.__dict__["_trimtab_switch"])

    def trace(self, module: nn.Module, x: Tensor, switch: Switch) -> Tensor | None:
        """The layer's output; which path is in force is looked up below, out of a compiler's sight."""
        x, weight, bias = as_autocast_would(module, x, keep_weight=True)
        if not torch.is_autocast_enabled(x.device.type) and x.dtype != weight.dtype:
            return None  # the plain layer says what is wrong
        weight = weight if isinstance(module, nn.Linear) else weight.t()
        output: Tensor = QuantizedLinear.apply(x, weight, bias, switch.key)
        return output

    def run_experts(
        self, module: nn.Module, switch: Switch, hidden: Tensor, chosen: Tensor, shares: Tensor
    ) -> Tensor | None:
        """The output of stacked experts, each on the path that its unit is on; None where all run plainly."""
        if getattr(module, "_is_expert_parallel", False):
            return None
        if self._high is None and not torch.compiler.is_compiling():
            units = self.units_of_experts(look_up(switch.key)[2])
            if all(unit is None or self.is_active(unit) for unit in units) and not (self._stats and self._shadow):
                return None
        return run_experts(module, hidden, chosen, shares, switch.key)

    def begin_step(self, step: int) -> None:
        """Optimizer step ``step`` begins: micro-batches are counted anew; outlier channels of the last end."""
        super().begin_step(step)
        self.heal()

    def units_of_experts(self, number: int) -> list[int | None]:
        """The unit of each expert of layer ``number``; None for one that is in no unit, and runs plainly."""
        return self._units_of_experts[number]

    def forward_product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, index: int | None, active: bool
    ) -> Tensor:
        """The forward product of a layer of unit ``index``, or of what is in no unit."""
        path = self._path(index, active)
        qx = None if index is None else self._note(x, index, active)
        if path is None:
            return F.linear(x, weight.to(x.dtype), bias)
        outliers = self.outliers_of(index)
        if outliers is not None:
            x, weight = outliers.enlarged(x), outliers.reduced(weight)
        return forward_product(x, weight, bias, path, self._ran[active], qx)

    def gradient_products(
        self, grad: Tensor, x: Tensor | None, weight: Tensor | None, active: bool, index: int | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The input's and the weight's gradient, each None where its other operand is."""
        path = self._path(index, active)
        if path is not None:
            outliers = self.outliers_of(index)
            if outliers is None:
                return gradient_products(grad, x, weight, path, self._ran[active])
            x, weight = x if x is None else outliers.enlarged(x), weight if weight is None else outliers.reduced(weight)
            grad_x, grad_weight = gradient_products(grad, x, weight, path, self._ran[active])
            grad_x = grad_x if grad_x is None else outliers.enlarged(grad_x)
            return grad_x, grad_weight if grad_weight is None else outliers.reduced(grad_weight)
        grad_x = None if weight is None else grad.mm(weight.to(grad.dtype))
        return grad_x, None if x is None else grad.t().mm(x)

    def _path(self, index: int | None, active: bool) -> GemmPath | None:
        """The grids of a path; None multiplies plainly."""
        return None if index is None else self._high if active else self._low

    @torch.no_grad()
    def _note(self, x: Tensor, index: int, active: bool) -> Tensor | None:
        """Keep what the low-cost path does to ``x``; what it makes of it, where that is what is multiplied."""
        # A forward that is recomputed in backward has been seen before.
        if self._stats is None or (active and not self._shadow) or in_backward():
            return None
        outliers = self.outliers_of(index)
        qx, stats = quantized(x if outliers is None else outliers.enlarged(x), self._low)
        self._stats.note(index, stats_row(stats, x))
        return None if active else qx


def _why_not(module: nn.Module, under_fsdp: frozenset[int]) -> str | None:
    """Why this recipe cannot convert a layer or a module of experts, or None when it can."""
    return why_not_plain_linear(module, under_fsdp) if num_experts(module) is None else why_not_experts(module)


def _units_of_experts(planned: Sequence[Planned], layers: Sequence[nn.Module]) -> dict[int, list[int | None]]:
    """The unit of each expert, by the number of the module that stacks them."""
    numbers = {id(module): number for number, module in enumerate(layers)}
    units: dict[int, list[int | None]] = {}
    for index, (unit, of_unit) in enumerate(planned):
        for module in of_unit:
            if (count := num_experts(module)) is not None:
                rows = units.setdefault(numbers[id(module)], [None] * count)
                for e in range(count) if unit.expert is None else [unit.expert]:
                    rows[e] = index
    return units


def _cost(unit: Unit, layers: Sequence[nn.Module]) -> PathCost:
    """Both paths keep what the plain layer keeps."""
    saved = num_elements = 0
    for module in layers:
        weights: list[Any] = [module.weight] if is_linear(module) else list(expert_weights(module))
        num_elements += sum(w.numel() // (1 if unit.expert is None else w.shape[0]) for w in weights)
        if is_linear(module):
            saved += input_size(module) * weights[0].element_size() * weights[0].requires_grad
        else:
            side = -2 if module.is_transposed else -1
            saved += sum(w.shape[side] * w.element_size() for w in weights)
    return PathCost(low_saved_bytes=saved, high_saved_bytes=saved, flops=6.0 * num_elements)
