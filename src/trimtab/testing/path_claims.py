"""Claims about what is computed on which path."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from trimtab.testing.layer_runs import QUANTITIES, LayerRun, Operands, capture, difference, replay, same
from trimtab.testing.recipe_hooks import ConvertedPair, RecipeHooks, assert_same, skip, subsets_that_part

__all__ = ["PathClaims"]


class PathClaims(RecipeHooks):
    """The two paths of a unit, and which unit is on which."""

    def test_the_low_cost_path_changes_what_is_documented_and_nothing_else(self) -> None:
        """Each layer on its own operands against the plain layer on the same."""
        with self.pair() as pair:
            self._assert_low_is_as_documented(pair, None)

    def test_the_recovery_path_computes_what_the_plain_layers_do(self) -> None:
        """Exactly, or to the rounding that the recipe states."""
        with self.pair() as pair:
            self._assert_high_is_plain(pair, None)

    def test_the_recovery_path_of_all_units_trains_as_the_plain_model(self) -> None:
        """Loss and gradients of the whole model, where the recovery path is exact."""
        if not self.high_is_exact:
            skip("the recovery path rounds")
        with self.pair() as pair:
            batch = self.batch(pair.plain)
            pair.conversion.route([True] * len(pair.conversion.units))
            expected, got = (self.gradients(model, batch) for model in (pair.plain, pair.model))
            assert_same(expected, got, "a model with all units on the recovery path is not the plain model")

    def test_all_units_start_on_the_low_cost_path(self) -> None:
        """Before anybody routes."""
        with self.pair() as pair:
            operands = self.operands(pair)
            started = self._run(pair, operands)
            pair.conversion.route([False] * len(pair.conversion.units))
            _assert_same_runs(self._run(pair, operands), started, "units do not start on the low-cost path")

    def test_a_route_may_come_before_any_forward(self) -> None:
        """Right after the conversion, as a guard that resumes does."""
        with self.pair() as first:
            operands = self.operands(first)
            n = len(first.conversion.units)
            first.conversion.route([True] * n)
            early = self._run(first, operands)
        with self.pair() as second:
            self._run(second, operands)
            second.conversion.route([True] * n)
            _assert_same_runs(self._run(second, operands), early, "a route before the first forward was lost")

    def test_a_subset_of_the_units_switches_those_units_alone(self) -> None:
        """Every layer computes what it does where all units are on its path."""
        with self.pair() as pair:
            operands = self.operands(pair)
            low, high = self._on_each_path(pair, operands)
            for active in subsets_that_part(len(pair.conversion.units)):
                pair.conversion.route(active)
                expected = {n: (high if active[pair.unit_of[n]] else low)[n] for n in pair.layers}
                names = [u.name for u, flag in zip(pair.conversion.units, active, strict=True) if flag]
                _assert_same_runs(expected, self._run(pair, operands), f"with {', '.join(names)} on the recovery path")

    def test_layers_that_follow_one_another_compute_what_each_does_by_itself(self) -> None:
        """In a forward as it comes, with units on both paths: what layers share must be right for each of them."""
        if self.is_stochastic:
            skip("a layer's noise depends on which layers share what it reads")
        with self.pair() as pair:
            batch = self.batch(pair.model)
            for where, active in pair.routes().items():
                pair.conversion.route(active)
                operands, got = capture(pair.layers, lambda: self.loss(pair.model, batch))
                low, high = self._on_each_path(pair, operands)
                for name, run in got.items():
                    expected = (high if active[pair.unit_of[name]] else low)[name]
                    for quantity in ("output", "weight_gradient", "bias_gradient"):
                        one, other = getattr(expected, quantity), getattr(run, quantity)
                        assert same(one, other), (
                            f"{where}: the {quantity} of {name} is not what the layer gives alone; "
                            f"{difference(one, other)}"
                        )

    def test_any_number_of_tokens_is_taken(self) -> None:
        """Ragged ones, and one."""
        counts = (1, 3, 7) if self.token_multiple == 1 else (self.token_multiple, 3 * self.token_multiple)
        with self.pair() as pair:
            for tokens in counts:
                self._assert_low_is_as_documented(pair, tokens)
                self._assert_high_is_plain(pair, tokens)

    def test_odd_feature_sizes_are_taken(self) -> None:
        """Neither a multiple of a tile, nor of what fills a byte."""
        if not self.odd_features:
            skip("the recipe takes no odd feature sizes")
        with self.pair(self.odd_model()) as pair:
            self._assert_low_is_as_documented(pair, None)
            self._assert_high_is_plain(pair, None)

    def _run(self, pair: ConvertedPair, operands: Mapping[str, Operands], tokens: int | None = None) -> Runs:
        pair.conversion.begin_step(1)
        return replay(pair.layers, operands, self.forward(pair.model, tokens))

    def _on_each_path(
        self, pair: ConvertedPair, operands: Mapping[str, Operands], tokens: int | None = None
    ) -> tuple[Runs, Runs]:
        runs = []
        for active in (False, True):
            pair.conversion.route([active] * len(pair.conversion.units))
            runs.append(self._run(pair, operands, tokens))
        return runs[0], runs[1]

    def _assert_low_is_as_documented(self, pair: ConvertedPair, tokens: int | None) -> None:
        operands = self.operands(pair, tokens)
        plain = replay(pair.plain_layers, operands, self.forward(pair.plain, tokens))
        low, _ = self._on_each_path(pair, operands, tokens)
        for name, expected in plain.items():
            for quantity in QUANTITIES:
                one, other = getattr(expected, quantity), getattr(low[name], quantity)
                is_same = same(one, other)
                where = f"on the low-cost path the {quantity} of {name}"
                if quantity in self.documented_changes:
                    assert one is None or not is_same, (
                        f"{where} is documented to change, and is that of the plain layer"
                    )
                    _assert_same_kind(one, other, where)
                else:
                    assert is_same, f"{where} is not documented to change, and does: {difference(one, other)}"

    def _assert_high_is_plain(self, pair: ConvertedPair, tokens: int | None) -> None:
        operands = self.operands(pair, tokens)
        plain = replay(pair.plain_layers, operands, self.forward(pair.plain, tokens))
        _, high = self._on_each_path(pair, operands, tokens)
        for name, expected in plain.items():
            bounds = {} if self.high_is_exact else self._bounds(pair.plain_layers[name], operands[name])
            for quantity in QUANTITIES:
                one, other = getattr(expected, quantity), getattr(high[name], quantity)
                where = f"on the recovery path the {quantity} of {name}"
                if self.high_is_exact or quantity not in self.documented_changes or one is None or other is None:
                    assert same(one, other), f"{where} is not that of the plain layer: {difference(one, other)}"
                    continue
                _assert_same_kind(one, other, where)
                within = (one - other).abs() <= bounds[quantity]
                assert bool(within.all()), (
                    f"{where} is further from that of the plain layer than high_rtol={self.high_rtol} of |A| |B|: "
                    f"{difference(one, other)}"
                )

    def _bounds(self, layer: nn.Module, given: Operands) -> dict[str, Tensor]:
        """How far each quantity may be from the plain layer's: ``high_rtol`` times the product of the magnitudes."""
        is_linear = isinstance(layer, nn.Linear)
        weight: Tensor = layer.weight.detach()  # type: ignore[operator,union-attr,assignment]
        x, gradient, weight = map(
            self._magnitude, (given.input, given.output_gradient, weight if is_linear else weight.t())
        )
        bias = getattr(layer, "bias", None)
        flat_x, flat = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        by_weight = flat.t() @ flat_x
        bounds = {
            "output": x @ weight.t() + (0 if bias is None else bias.detach().abs()),
            "input_gradient": gradient @ weight,
            "weight_gradient": by_weight if is_linear else by_weight.t(),
            "bias_gradient": flat.sum(0),
        }
        return {name: self.high_rtol * bound for name, bound in bounds.items()}

    def _magnitude(self, operand: Tensor) -> Tensor:
        """What an operand's rounding errors are relative to."""
        size = operand.abs()
        return size if self.high_rtol_of == "entry" else size.amax(-1, keepdim=True).expand_as(size)


Runs = dict[str, LayerRun]


def _assert_same_kind(one: Tensor | None, other: Tensor | None, where: str) -> None:
    """Assert that a result that may differ has the shape and dtype that it had, and is finite."""
    if one is None:
        return
    assert other is not None, f"{where} is missing"
    assert (one.shape, one.dtype) == (other.shape, other.dtype), (
        f"{where} is not of the kind that it was: {difference(one, other)}"
    )
    assert bool(torch.isfinite(other).all()), f"{where} is not finite"


def _assert_same_runs(expected: Runs, got: Runs, where: str) -> None:
    for name, run in expected.items():
        for quantity in QUANTITIES:
            one, other = getattr(run, quantity), getattr(got[name], quantity)
            assert same(one, other), f"{where}: the {quantity} of {name} is another, {difference(one, other)}"
