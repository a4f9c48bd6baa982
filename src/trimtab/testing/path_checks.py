"""What is held of each path wherever a layer runs on it: what every claim about paths and about operands asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from trimtab.testing.layer_runs import QUANTITIES, LayerRun, Operands, difference, replay, same
from trimtab.testing.operand_rounding import OPERANDS_OF, OperandRounding, magnitude, product_sizes
from trimtab.testing.recipe_hooks import ConvertedPair, RecipeHooks

__all__ = ["PathChecks", "Runs"]

Runs = dict[str, LayerRun]
"""What each layer made, by its name."""

_EXACT = OperandRounding(rtol=0.0)

_NUM_ROUNDINGS = 8
"""Roundings to the dtype that is computed in: of both operands and the result in the plain layer, and in a path of both
operands before it rounds them itself, of both afterwards, and of the result."""


class PathChecks(RecipeHooks):
    """Each layer on its own operands, against the plain layer on the same."""

    def _run(
        self,
        pair: ConvertedPair,
        operands: Mapping[str, Operands],
        tokens: int | None = None,
        *,
        step: int = 1,
        micro_batches: int = 1,
        autocast: bool = False,
    ) -> Runs:
        """The last of some micro-batches of a step."""
        pair.conversion.begin_step(step)
        for _ in range(micro_batches):
            runs = replay(pair.layers, operands, self._forward(pair.model, tokens, autocast))
        return runs

    def _on_each_path(
        self,
        pair: ConvertedPair,
        operands: Mapping[str, Operands],
        tokens: int | None = None,
        *,
        autocast: bool = False,
    ) -> tuple[Runs, Runs]:
        """On the low-cost path, and on the recovery path."""
        runs = []
        for active in (False, True):
            pair.conversion.route([active] * len(pair.conversion.units))
            runs.append(self._run(pair, operands, tokens, autocast=autocast))
        return runs[0], runs[1]

    def _assert_paths_hold(
        self, pair: ConvertedPair, tokens: int | None, where: str, *, autocast: bool = False, changes: bool = True
    ) -> None:
        """Assert that the low-cost path is as documented, and the recovery path the plain layer."""
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            operands = self.operands(pair, tokens)
        plain = replay(pair.plain_layers, operands, self._forward(pair.plain, tokens, autocast))
        low, high = self._on_each_path(pair, operands, tokens, autocast=autocast)
        for name, expected in plain.items():
            layer, given = pair.plain_layers[name], operands[name]
            self._assert_low(layer, given, expected, low[name], f"{where} of {name}", changes=changes)
            self._assert_high(layer, given, expected, high[name], f"{where} of {name}")

    def _assert_low(
        self,
        layer: nn.Module,
        given: Operands,
        expected: LayerRun,
        got: LayerRun,
        where: str,
        *,
        changes: bool = True,
        generic: bool = True,
    ) -> None:
        """Assert that a layer on the low-cost path changes what is documented, by its rounding, and nothing else.

        Args:
            layer: The plain layer.
            given: Its operands.
            expected: What it made of them.
            got: What the layer on the path made of them.
            where: Of what, as part of a sentence: "the {quantity}{where}".
            changes: Whether what is documented must change. In few bits the low-cost path may round nothing more.
            generic: Whether the operands are. Entries that are equal may lie on the grid, or all be off by the same;
                and in another layout another kernel may add up in another order.
        """
        for quantity in QUANTITIES:
            one, other = getattr(expected, quantity), getattr(got, quantity)
            is_same = same(one, other)
            what = f"on the low-cost path the {quantity}{where}"
            rounding = self.low_rounding
            if quantity not in self.documented_changes:
                rounding = {}
                assert is_same or not generic, f"{what} is not documented to change, and does: {difference(one, other)}"
            elif changes and generic:
                assert one is None or not is_same, f"{what} is documented to change, and is that of the plain layer"
            _assert_same_kind(one, other, what)
            if not is_same and rounding is not None:
                _assert_rounded(layer, given, expected, got, quantity, what, rounding, independent=generic)

    def _assert_high(
        self, layer: nn.Module, given: Operands, expected: LayerRun, got: LayerRun, where: str, *, generic: bool = True
    ) -> None:
        """Assert that a layer on the recovery path is the plain one, or within what the recipe states.

        Args are those of ``_assert_low``.
        """
        for quantity in QUANTITIES:
            one, other = getattr(expected, quantity), getattr(got, quantity)
            what = f"on the recovery path the {quantity}{where}"
            is_documented = quantity in self.documented_changes
            if self.high_is_exact or one is None or other is None or (generic and not is_documented):
                assert same(one, other), f"{what} is not that of the plain layer: {difference(one, other)}"
                continue
            rtol = self.high_rtol if is_documented else 0.0
            _assert_same_kind(one, other, what)
            rounding = OperandRounding(rtol=0.0, floor=float(self.high_rtol_of == "row"))
            sizes = product_sizes(layer, given, lambda _, operand: magnitude(operand, rounding))[quantity]  # noqa: B023
            within = _apart(one, other) <= _with_dtype(rtol, expected.output.dtype, given) * sizes
            assert bool(within.all()), (
                f"{what} is further from that of the plain layer than high_rtol={rtol} of |A| |B|: "
                f"{difference(one, other)}"
            )

    def _forward(self, model: nn.Module, tokens: int | None, autocast: bool) -> Callable[[], Tensor]:
        forward = self.forward(model, tokens)

        def run() -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return forward()

        return run


def _assert_rounded(
    layer: nn.Module,
    given: Operands,
    expected: LayerRun,
    got: LayerRun,
    quantity: str,
    what: str,
    roundings: Mapping[str, OperandRounding],
    *,
    independent: bool,
) -> None:
    """Assert that a quantity is as far from the plain one as the rounding of its operands explains, no further."""
    one, other = getattr(expected, quantity), getattr(got, quantity)
    rtol = 1.0
    for operand in OPERANDS_OF[quantity]:
        rtol *= 1 + roundings.get(operand, _EXACT).rtol
    rtol = _with_dtype(rtol - 1, expected.output.dtype, given)

    def size(power: int) -> Tensor:
        found = product_sizes(layer, given, lambda n, t: magnitude(t, roundings.get(n, _EXACT)), power)
        return rtol * found[quantity]

    apart = _apart(one, other)
    beyond = apart > size(1)
    assert not bool(beyond.any()), (
        f"{what} is further from that of the plain layer than the rounding of its operands explains: "
        f"{int(beyond.sum())} of {beyond.numel()} entries are; {difference(one, other)}"
    )
    # An error of all entries in one direction, such as a wrong factor, hides in a bound that all of them may meet.
    # Errors of rounding are independent, and add up in squares.
    found, allowed = apart.norm().item(), size(2).norm().item()
    assert found <= allowed or not independent, (
        f"{what} is further from that of the plain layer than independent errors of rounding add up to: "
        f"a norm of {found:.3g} apart, where {allowed:.3g} is allowed and the plain one is {one.norm().item():.3g}"
    )


def _apart(one: Tensor, other: Tensor) -> Tensor:
    """How far two results are apart, flat where they are of tokens."""
    return (one.float() - other.float()).abs().reshape(-1, one.shape[-1]).squeeze(0)


def _with_dtype(rtol: float, dtype: torch.dtype, given: Operands) -> float:
    """``rtol``, and what ``dtype``, in which a layer computes, rounds besides; relative to ``|A| |B|``."""
    unit = torch.finfo(dtype).eps / 2
    # Both products add up in float32, which rounds with each term.
    terms = max(*given.input.reshape(-1, given.input.shape[-1]).shape, given.output_gradient.shape[-1])
    return (1 + rtol) * (1 + unit) ** _NUM_ROUNDINGS * (1 + 2.0**-24) ** (2 * terms) - 1


def _assert_same_kind(one: Tensor | None, other: Tensor | None, where: str) -> None:
    """Assert that a result that may differ has the shape and dtype that it had, and is finite."""
    if one is None:
        assert other is None, f"{where} is there, and the plain layer has none"
        return
    assert other is not None, f"{where} is missing"
    assert (one.shape, one.dtype) == (other.shape, other.dtype), (
        f"{where} is not of the kind that it was: {difference(one, other)}"
    )
    assert bool(torch.isfinite(other).all()), f"{where} is not finite"
