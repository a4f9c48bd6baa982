"""Claims about what a layer is given: numbers of tokens, sizes, layouts, dtypes, autocast."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from trimtab.errors import ConfigError
from trimtab.testing.layer_runs import Operands, run_alone
from trimtab.testing.path_checks import PathChecks
from trimtab.testing.recipe_hooks import skip

__all__ = ["OperandClaims"]


class OperandClaims(PathChecks):
    """Both paths, on all that a plain layer takes."""

    def test_any_number_of_tokens_is_taken(self) -> None:
        """Ragged ones, and one."""
        counts = (1, 3, 7) if self.token_multiple == 1 else (self.token_multiple, 3 * self.token_multiple)
        with self.pair() as pair:
            for tokens in counts:
                self._assert_paths_hold(pair, tokens, f", {tokens} tokens,")

    def test_odd_feature_sizes_are_taken(self) -> None:
        """Neither a multiple of a tile, nor of what fills a byte."""
        if not self.odd_features:
            skip("the recipe takes no odd feature sizes")
        with self.pair(self.odd_model()) as pair:
            self._assert_paths_hold(pair, None, ", odd sizes,")

    def test_operands_of_any_shape_and_layout_are_taken(self) -> None:
        """One token without a dimension of its own, four dimensions, transposed, expanded."""
        with self.pair() as pair:
            for active in (False, True):
                pair.conversion.route([active] * len(pair.conversion.units))
                for name, layer in pair.layers.items():
                    plain = pair.plain_layers[name]
                    for what, given in self._layouts(self.operands_alone(layer)):
                        where = f" of {name}, {what},"
                        expected = run_alone(plain, given)
                        try:
                            got = run_alone(layer, given)
                        except (RuntimeError, ValueError, IndexError) as error:
                            path = "recovery" if active else "low-cost"
                            raise AssertionError(
                                f"{name} on the {path} path does not take {what}, which the plain layer takes: {error}"
                            ) from error
                        if active:
                            self._assert_high(plain, given, expected, got, where, generic=False)
                        else:
                            self._assert_low(plain, given, expected, got, where, generic=False)

    def test_what_holds_of_both_paths_holds_under_autocast(self) -> None:
        """In bfloat16 on the CPU: the same claims, to the rounding of bfloat16 where a path is not exact."""
        with self.pair() as pair:
            self._assert_paths_hold(pair, None, ", under autocast,", autocast=True, changes=False)

    def test_a_model_in_bfloat16_trains_on_both_paths_or_is_refused(self) -> None:
        """At conversion, not in a forward."""
        try:
            with self.pair(self.model().to(torch.bfloat16)) as pair:
                try:
                    self._assert_paths_hold(pair, None, ", in bfloat16,", changes=False)
                except (RuntimeError, ConfigError) as error:
                    raise AssertionError(
                        f"a model in bfloat16 is converted, and then does not train: {error}"
                    ) from error
        except ConfigError as error:
            skip(f"the recipe refuses a model in bfloat16: {error}")

    def _layouts(self, given: Operands) -> Iterator[tuple[str, Operands]]:
        """The same numbers in other shapes, and others where that takes them."""
        x, gradient = given.input, given.output_gradient
        if self.token_multiple == 1:
            yield "a token of one dimension", Operands(input=x[0], output_gradient=gradient[0])
        yield (
            "four dimensions",
            Operands(input=x[None, :, None], output_gradient=gradient[None, :, None]),
        )
        yield (
            "transposed operands",
            Operands(input=x.t().contiguous().t(), output_gradient=gradient.t().contiguous().t()),
        )
        yield (
            "expanded operands",
            Operands(input=x[:1].expand_as(x), output_gradient=gradient[:1].expand_as(gradient)),
        )
