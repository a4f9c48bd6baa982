"""Claims about inputs that no recipe hopes for: zeros, NaN, infinities, huge numbers, no tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from trimtab.testing.layer_runs import QUANTITIES, LayerRun, Operands, difference, run_alone, same
from trimtab.testing.recipe_hooks import ConvertedPair, RecipeHooks

__all__ = ["BadInputClaims"]

HUGE = 1e30
"""Within float32, but not when squared."""


class BadInputClaims(RecipeHooks):
    """What a layer makes of hard input, on each path. Nothing here may raise."""

    def test_zeros_stay_zeros(self) -> None:
        """A token of zeros, and an input of nothing else, give the bias; gradients of zeros give zeros."""
        with self.pair() as pair:
            for where, name, layer in _layers_on_paths(pair):
                given = self.operands_alone(layer)
                given.input[1] = 0
                bias = getattr(layer, "bias", None)
                for what, x in (("a token of zeros", given.input), ("zeros", torch.zeros_like(given.input))):
                    run = run_alone(layer, Operands(input=x, output_gradient=given.output_gradient))
                    _assert_is_bias(
                        run.output[1], bias, f"{where}, {name} makes of {what} something else than its bias"
                    )
                    if what == "zeros":
                        _assert_zero(run.weight_gradient, f"{where}, zeros give {name} a weight gradient")
                nothing = Operands(input=given.input, output_gradient=torch.zeros_like(given.output_gradient))
                run = run_alone(layer, nothing)
                for quantity in QUANTITIES[1:]:
                    _assert_zero(getattr(run, quantity), f"{where}, a gradient of zeros gives {name} a {quantity}")

    def test_what_is_not_finite_in_the_plain_layer_is_not_finite(self) -> None:
        """NaN and infinities, in the input and in the gradient of the output; never made numbers again."""
        for value in (float("nan"), float("inf"), float("-inf")):
            for place in ("input", "output_gradient"):
                with self.pair() as pair:
                    for where, name, layer in _layers_on_paths(pair):
                        given = self.operands_alone(layer)
                        getattr(given, place)[1, 2] = value
                        expected = run_alone(pair.plain_layers[name], given)
                        got = run_alone(layer, given)
                        _assert_visible(expected, got, f"{where}, {value} in the {place} of {name}")

    def test_huge_numbers_raise_nothing_and_hide_nothing(self) -> None:
        """Whatever they give, what overflows in the plain layer is not finite here either."""
        with self.pair() as pair:
            for where, name, layer in _layers_on_paths(pair):
                given = self.operands_alone(layer)
                for place in ("input", "output_gradient"):
                    parts = {"input": given.input, "output_gradient": given.output_gradient}
                    parts[place] = parts[place] * HUGE
                    huge = Operands(**parts)
                    expected, got = run_alone(pair.plain_layers[name], huge), run_alone(layer, huge)
                    _assert_visible(expected, got, f"{where}, a huge {place} of {name}")
                    if self.high_is_exact and "recovery" in where:
                        for quantity in QUANTITIES:
                            one, other = getattr(expected, quantity), getattr(got, quantity)
                            assert same(one, other), (
                                f"{where}, a huge {place} gives {name} another {quantity}: {difference(one, other)}"
                            )

    def test_no_tokens_give_no_outputs_and_no_gradients(self) -> None:
        """As an expert to which nothing is routed has it."""
        with self.pair() as pair:
            for where, name, layer in _layers_on_paths(pair):
                given = self.operands_alone(layer, tokens=0)
                expected, got = run_alone(pair.plain_layers[name], given), run_alone(layer, given)
                for quantity in QUANTITIES:
                    one, other = getattr(expected, quantity), getattr(got, quantity)
                    assert (one is None) == (other is None), (
                        f"{where}, no tokens: the {quantity} of {name} came or went"
                    )
                    if one is None:
                        continue
                    assert one.shape == other.shape, (
                        f"{where}, no tokens: the {quantity} of {name} has shape {tuple(other.shape)}, "
                        f"and {tuple(one.shape)} in the plain layer"
                    )
                    _assert_zero(other, f"{where}, no tokens give {name} a {quantity}")

    def test_a_batch_without_tokens_passes_through_the_model(self) -> None:
        """Forward and backward."""
        with self.pair() as pair:
            for where, active in pair.routes().items():
                pair.conversion.route(active)
                for name, gradient in self.gradients(pair.model, self.batch(pair.model, tokens=0)).items():
                    _assert_zero(gradient, f"{where}, a batch without tokens gives {name} a gradient")


def _layers_on_paths(pair: ConvertedPair) -> Iterator[tuple[str, str, nn.Module]]:
    """Every converted layer on both paths: ``(the path, its name, the layer)``."""
    for where, active in list(pair.routes().items())[:2]:
        pair.conversion.route(active)
        for name, layer in pair.layers.items():
            yield where, name, layer


def _assert_zero(tensor: Tensor | None, where: str) -> None:
    if tensor is not None:
        assert not tensor.count_nonzero(), f"{where}: {tensor.count_nonzero().item()} entries are not zero"


def _assert_is_bias(row: Tensor, bias: Tensor | None, where: str) -> None:
    if bias is None:
        _assert_zero(row, where)
        return
    # A library may add the bias in bfloat16, whose rounding is 2**-9; that and no more.
    assert torch.allclose(row.float(), bias.detach().float(), rtol=2.0**-8, atol=0), where


def _assert_visible(expected: LayerRun, got: LayerRun, where: str) -> None:
    for quantity in QUANTITIES:
        one, other = getattr(expected, quantity), getattr(got, quantity)
        if one is not None and other is not None:
            hidden = ~torch.isfinite(one) & torch.isfinite(other)
            assert not hidden.any(), (
                f"{where}: {hidden.sum().item()} entries of the {quantity} look finite that are not in the plain layer"
            )
