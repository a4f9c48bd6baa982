"""A pair of paths of your own: multiply in float32 by inputs that are rounded to bfloat16, or leave the layer plain."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from trimtab.precision import Grouping, PathCost, Unit
from trimtab.precision.conversion_plan import Planned, plan_conversion
from trimtab.precision.convertible import why_not_plain_linear
from trimtab.precision.linear_conversion import LinearConversion, as_autocast_would
from trimtab.testing import OperandRounding, RecipeContract


@dataclass(frozen=True, slots=True)
class RoundedInputs:
    """The recipe: settings, and how a model is converted."""

    unit: Grouping = "projection"

    name = "rounded-inputs"

    def to_dict(self) -> dict[str, Any]:
        """What goes into the run record."""
        return {"name": self.name, **dataclasses.asdict(self)}

    def convert(self, model: nn.Module, units: Sequence[Unit]) -> "RoundedInputsConversion":
        """Convert in place what can be converted, and refuse a model in which nothing can."""
        return RoundedInputsConversion(model, plan_conversion(model, units, self.name, why_not_plain_linear))


class RoundedInputsConversion(LinearConversion):
    """The switch of each unit. ``LinearConversion`` has the route, the hooks and the undoing; ``run`` is ours."""

    def __init__(self, model: nn.Module, planned: Sequence[Planned]) -> None:
        units = [unit for unit, _ in planned]
        super().__init__(model, units, [cost_of(layers) for _, layers in planned], [layers for _, layers in planned])

    def run(self, module: nn.Module, x: Tensor, index: int) -> Tensor | None:
        """The output on the low-cost path; None where the plain layer is to run."""
        # A product of two dtypes, which autocast is not there to mend: the plain layer says what is wrong.
        x, weight, bias = as_autocast_would(module, x)
        if self.is_active(index) or x.dtype != weight.dtype:
            return None
        rounded = x.detach().bfloat16().to(x.dtype)
        # Straight through: the value is the rounded one, the gradient that of x. Infinity minus itself would be NaN.
        straight = x + (rounded - x.detach()).nan_to_num(0.0, 0.0, 0.0)
        return F.linear(straight, weight, bias)


def cost_of(layers: Sequence[nn.Module]) -> PathCost:
    """Both paths keep the input in float32 here, so recovery costs no memory; a real path would save some."""
    sizes = [tuple(layer.weight.shape) for layer in layers]
    saved = float(sum(4 * inputs for _, inputs in sizes))
    return PathCost(low_saved_bytes=saved, high_saved_bytes=saved, flops=float(sum(6 * a * b for a, b in sizes)))


# bfloat16 has 7 mantissa bits, so that to nearest it is off by 2**-8 of an entry at most.
ROUNDING = {"input": OperandRounding(rtol=2**-8)}


class TestRoundedInputs(RecipeContract):
    """The contract: what the low-cost path changes is what is written down here, and nothing else."""

    documented_changes = frozenset({"output", "weight_gradient"})
    low_rounding = ROUNDING
    observes_quantizers = False
    compiles_in_one_graph = False
    why_not_one_graph = "run reads the route; a recipe that compilers can trace gives LinearConversion.trace too"

    def recipe(self) -> RoundedInputs:
        """Called often, so that each claim has its own."""
        return RoundedInputs()
