"""Claims about what is computed on which path."""

from __future__ import annotations

from trimtab.testing.layer_runs import QUANTITIES, capture, difference, replay, same
from trimtab.testing.path_checks import PathChecks, Runs
from trimtab.testing.recipe_hooks import assert_same, skip, subsets_that_part

__all__ = ["PathClaims"]


class PathClaims(PathChecks):
    """The two paths of a unit, and which unit is on which."""

    def test_the_low_cost_path_changes_what_is_documented_and_nothing_else(self) -> None:
        """Each layer on its own operands against the plain layer on the same, in a first step and in a later one."""
        with self.pair() as pair:
            operands = self.operands(pair)
            plain = replay(pair.plain_layers, operands, self.forward(pair.plain))
            for step in (1, 3):
                for name, got in self._run(pair, operands, step=step).items():
                    where = f" of {name}, step {step},"
                    self._assert_low(pair.plain_layers[name], operands[name], plain[name], got, where)

    def test_the_recovery_path_computes_what_the_plain_layers_do(self) -> None:
        """Exactly, or to the rounding that the recipe states; in any step, micro-batch and mode."""
        with self.pair() as pair:
            operands = self.operands(pair)
            pair.conversion.route([True] * len(pair.conversion.units))
            for step, micro_batches, training in ((1, 1, True), (3, 2, True), (1, 1, False)):
                pair.plain.train(training)
                pair.model.train(training)
                expected = replay(pair.plain_layers, operands, self.forward(pair.plain))
                got = self._run(pair, operands, step=step, micro_batches=micro_batches)
                mode = "" if training else ", in eval mode"
                for name, run in got.items():
                    where = f" of {name}, step {step}, micro-batch {micro_batches}{mode},"
                    self._assert_high(pair.plain_layers[name], operands[name], expected[name], run, where)

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


def _assert_same_runs(expected: Runs, got: Runs, where: str) -> None:
    for name, run in expected.items():
        for quantity in QUANTITIES:
            one, other = getattr(run, quantity), getattr(got[name], quantity)
            assert same(one, other), f"{where}: the {quantity} of {name} is another, {difference(one, other)}"
