"""Claims about what a conversion says that its units cost."""

from __future__ import annotations

import dataclasses
import math

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from trimtab.precision import Conversion, PathCost, measure_saved_bytes
from trimtab.testing.layer_runs import run_alone
from trimtab.testing.recipe_hooks import RecipeHooks, skip

__all__ = ["CostClaims"]


class CostClaims(RecipeHooks):
    """The ``PathCost`` of each unit: a plan and a policy weigh units by it."""

    def test_costs_are_finite_and_none_is_negative(self) -> None:
        """Whatever they are measured or estimated from."""
        with self.converted(self.model()) as conversion:
            for unit, cost in zip(conversion.units, _costs_of(conversion), strict=True):
                for field in dataclasses.fields(PathCost):
                    value = getattr(cost, field.name)
                    is_cost = isinstance(value, int | float) and math.isfinite(value) and value >= 0
                    assert is_cost, (
                        f"the {field.name} of {unit.name} is {value!r}, and a cost is a finite number of 0 or more"
                    )

    def test_costs_are_the_bytes_that_are_kept(self) -> None:
        """One unit by itself, measured, a token."""
        if not self.has_costs_of_saved_bytes:
            why = self.why_no_costs_of_saved_bytes
            assert why, "has_costs_of_saved_bytes = False needs a reason, why_no_costs_of_saved_bytes"
            skip(why)
        with self.pair() as pair:
            for active in (False, True):
                pair.conversion.route([active] * len(pair.conversion.units))
                for i, (unit, cost) in enumerate(zip(pair.conversion.units, _costs_of(pair.conversion), strict=True)):
                    layers = [pair.layers[n] for n, unit_of in pair.unit_of.items() if unit_of == i]
                    # What a forward keeps once, however many tokens there are, is no cost of a token.
                    few, many = self.token_multiple, 3 * self.token_multiple
                    kept = [self._bytes_kept(pair.model, layers, tokens) for tokens in (few, many)]
                    measured = (kept[1] - kept[0]) / (many - few)
                    said = cost.high_saved_bytes if active else cost.low_saved_bytes
                    assert measured == said, (
                        f"{unit.name} keeps {measured:g} bytes a token on the {'recovery' if active else 'low-cost'} "
                        f"path, and is said to keep {said:g}"
                    )

    def test_costs_are_the_flops_of_the_products(self) -> None:
        """Of the plain layers, forward and backward, a token, as torch counts them: the sizes of a path's are those."""
        if not self.has_costs_of_flops:
            assert self.why_no_costs_of_flops, "has_costs_of_flops = False needs a reason, why_no_costs_of_flops"
            skip(self.why_no_costs_of_flops)
        with self.pair() as pair:
            for i, (unit, cost) in enumerate(zip(pair.conversion.units, _costs_of(pair.conversion), strict=True)):
                counted = 0.0
                for name in (n for n, unit_of in pair.unit_of.items() if unit_of == i):
                    given = self.operands_alone(pair.plain_layers[name])
                    with FlopCounterMode(display=False) as counter:
                        run_alone(pair.plain_layers[name], given)
                    counted += counter.get_total_flops() / given.input.shape[0]
                assert counted == cost.flops, (
                    f"{unit.name} multiplies and adds {counted:g} times a token, and is said to do so {cost.flops:g} "
                    "times"
                )

    def _bytes_kept(self, model: nn.Module, layers: list[nn.Module], tokens: int) -> int:
        inputs = [self.operands_alone(layer, tokens).input.requires_grad_() for layer in layers]
        with measure_saved_bytes(model, ()) as counts:
            outputs = [layer(x) for layer, x in zip(layers, inputs, strict=True)]
        del outputs
        return counts.model


def _costs_of(conversion: Conversion) -> list[PathCost]:
    """The costs, which are to be ones."""
    for unit, cost in zip(conversion.units, conversion.costs, strict=False):
        assert isinstance(cost, PathCost), (
            f"the cost of {unit.name} is {cost!r}. Give a trimtab.precision.PathCost for each unit"
        )
    assert len(conversion.costs) == len(conversion.units), (
        f"{len(conversion.costs)} costs are reported for {len(conversion.units)} units"
    )
    return list(conversion.costs)
