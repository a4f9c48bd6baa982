"""Claims about what a conversion tells of its quantizers, where it tells it; see ``recipe.QuantizerObserver``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trimtab.precision import QUANTIZER_STATS, QuantizerObserver
from trimtab.testing.compile_claims import compiled
from trimtab.testing.layer_runs import Operands, replay, run_alone, same
from trimtab.testing.recipe_hooks import ConvertedPair, RecipeHooks, assert_same, skip

__all__ = ["QuantizerClaims"]


class QuantizerClaims(RecipeHooks):
    """Statistics of the low-cost path's quantizers."""

    def test_statistics_have_a_row_a_unit_and_are_nan_where_nothing_ran(self) -> None:
        """They begin anew whenever they are taken."""
        with self._observed(shadow=False) as (pair, take):
            assert take() is None, "statistics are there before anything ran"
            name = next(iter(pair.layers))
            run_alone(pair.layers[name], self.operands_alone(pair.layers[name]))
            stats = take()
            expected = (len(pair.conversion.units), len(QUANTIZER_STATS))
            assert stats is not None, "nothing was seen of a unit that ran"
            assert tuple(stats.shape) == expected, f"statistics have shape {tuple(stats.shape)}, not {expected}"
            assert stats.dtype == torch.float32, f"statistics are {stats.dtype}, not torch.float32"
            for i, row in enumerate(stats):
                if i == pair.unit_of[name]:
                    assert bool((row >= 0).all()), f"statistics of a unit that ran are {row.tolist()}"
                else:
                    assert bool(row.isnan().all()), f"statistics of a unit that did not run are {row.tolist()}"
            assert take() is None, "statistics that were taken are still there"

    def test_an_operand_that_is_not_finite_has_an_infinite_error(self) -> None:
        """It is known to be broken."""
        for value in (float("nan"), float("inf")):
            with self._observed(shadow=False) as (pair, take):
                for name, layer in pair.layers.items():
                    given = self.operands_alone(layer)
                    given.input[1, 2] = value
                    run_alone(layer, given)
                    stats = take()
                    assert stats is not None, f"nothing was seen of {name}, whose input held {value}"
                    row = stats[pair.unit_of[name]]
                    assert row[0] == torch.inf, f"{value} in the input of {name} has an error of {row[0].item()}"
                    assert not row.isnan().any(), f"{value} in the input of {name} has statistics {row.tolist()}"

    def test_an_operand_of_zeros_has_no_error(self) -> None:
        """Nor is an operand without tokens anything but harmless."""
        with self._observed(shadow=False) as (pair, take):
            for name, layer in pair.layers.items():
                for tokens in (None, 0):
                    given = self.operands_alone(layer, tokens)
                    run_alone(layer, Operands(input=given.input * 0, output_gradient=given.output_gradient))
                    stats = take()
                    if stats is not None:
                        row = stats[pair.unit_of[name]]
                        assert not row.nan_to_num(nan=0.0).any(), f"zeros in {name} have statistics {row.tolist()}"

    def test_statistics_are_the_maximum_over_micro_batches(self) -> None:
        """One bad micro-batch is not hidden by the rest."""
        with self._observed(shadow=False) as (pair, take):
            batches = [self.batch(pair.model, seed=seed) for seed in range(3)]
            pair.conversion.begin_step(1)
            each = []
            for batch in batches:
                self.gradients(pair.model, batch)
                each.append(take())
            pair.conversion.begin_step(1)
            self.gradients(pair.model, *batches)
            together = take()
            assert together is not None, "nothing was seen of a step"
            assert all(map(_knows_all, each)), "nothing was seen of a unit in a micro-batch"
            expected = torch.stack([stats for stats in each if stats is not None]).amax(0)
            assert same(expected, together), "statistics of three micro-batches are not the maximum of each one's"

    def test_observing_changes_no_result(self) -> None:
        """Bit for bit, on each path."""
        expected = {}
        with self.pair() as pair:
            batch = self.batch(pair.model)
            for where, active in pair.routes().items():
                pair.conversion.begin_step(1)
                pair.conversion.route(active)
                expected[where] = self.gradients(pair.model, batch)
        for shadow in (False, True):
            with self._observed(shadow) as (pair, take):
                for where, active in pair.routes().items():
                    pair.conversion.begin_step(1)
                    pair.conversion.route(active)
                    assert_same(
                        expected[where], self.gradients(pair.model, batch), f"observed, shadow={shadow}, {where}"
                    )
                    take()

    def test_units_on_the_recovery_path_are_judged_by_their_low_cost_path_where_that_is_asked_for(self) -> None:
        """And only there."""
        for shadow in (False, True):
            with self._observed(shadow) as (pair, take):
                operands = self.operands(pair)
                rows = []
                for active in (False, True):
                    pair.conversion.begin_step(1)
                    pair.conversion.route([active] * len(pair.conversion.units))
                    replay(pair.layers, operands, self.forward(pair.model))
                    rows.append(take())
                low, high = rows
                assert _knows_all(low), "nothing was seen of a unit on the low-cost path"
                if not shadow:
                    seen = high is not None and not bool(high.isnan().all())
                    assert not seen, "units on the recovery path were observed, and nobody asked for it"
                    continue
                assert _knows_all(high), "a unit on the recovery path was not observed"
                # Stochastic rounding too: it is seeded by the step, and both runs are its first micro-batch.
                assert same(low, high), "a unit on the recovery path is not judged by its low-cost path"

    def test_an_evaluation_is_not_looked_at(self) -> None:
        """Its operands are no step's."""
        with self._observed(shadow=True) as (pair, take):
            pair.model.eval()
            with torch.no_grad():
                pair.model(self.batch(pair.model))
            assert take() is None, "an evaluation without gradients was observed"

    def test_statistics_are_the_same_with_checkpointing(self) -> None:
        """Of the first forward or of the one that is recomputed, but never of none."""
        with self._observed(shadow=True) as (pair, take):
            batch = self.batch(pair.model)
            expected = {}
            for where, active in pair.routes().items():
                pair.conversion.begin_step(1)
                pair.conversion.route(active)
                self.gradients(pair.model, batch)
                expected[where] = take()
            for use_reentrant in (True, False):
                self.checkpoint_blocks(pair.model, use_reentrant)
                for where, active in pair.routes().items():
                    pair.conversion.begin_step(1)
                    pair.conversion.route(active)
                    self.gradients(pair.model, batch)
                    got = take()
                    assert got is not None, f"checkpointing, use_reentrant={use_reentrant}, {where}: nothing was seen"
                    assert same(expected[where], got), (
                        f"checkpointing, use_reentrant={use_reentrant}, {where}: the statistics are others"
                    )

    def test_statistics_are_the_same_under_a_compiler(self) -> None:
        """Of units on both paths; stochastic rounding draws what it draws in eager mode."""
        if not self.compiles_in_one_graph:
            skip(self.why_not_one_graph)
        with self._observed(shadow=True) as (pair, take), compiled(pair.model) as (model, _):
            for where, active in pair.routes().items():
                found = []
                for one in (pair.model, model):
                    pair.conversion.begin_step(1)
                    pair.conversion.route(active)
                    self.gradients(one, self.batch(pair.model))
                    found.append(take())
                assert found[0] is not None, f"{where}: nothing was seen in eager mode"
                assert same(*found), f"compiled, {where}: the statistics are not those of eager mode"

    @contextmanager
    def _observed(self, shadow: bool) -> Iterator[tuple[ConvertedPair, Any]]:
        """A converted model whose quantizers are observed, and what takes the statistics."""
        with self.pair() as pair:
            conversion = pair.conversion
            if not self.observes_quantizers or not isinstance(conversion, QuantizerObserver):
                skip("the conversion has no quantizers to observe")
            conversion.observe_quantizers(shadow)  # type: ignore[attr-defined]

            def take() -> Tensor | None:
                stats: Tensor | None = conversion.take_quantizer_stats()  # type: ignore[attr-defined]
                return stats

            yield pair, take


def _knows_all(stats: Tensor | None) -> bool:
    return stats is not None and not bool(stats.isnan().any())
