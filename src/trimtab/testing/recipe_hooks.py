"""What a contract asks of whoever subclasses it: the recipe, a model for it, and what the recipe says that it does."""

from __future__ import annotations

import copy
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trimtab.precision import Conversion, Recipe, Unit, find_units, operators_of
from trimtab.testing.layer_runs import Operands, capture, difference, same
from trimtab.testing.models import VOCABULARY, adapted_tiny_model, nothing_to_convert, tiny_model
from trimtab.testing.operand_rounding import OperandRounding
from trimtab.testing.snapshots import switches

__all__ = ["ConvertedPair", "RecipeHooks", "assert_same", "skip", "subsets_that_part"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertedPair:
    """A plain model, its converted copy, and the layers of both.

    Args:
        plain: The model as it was.
        model: Its copy, converted.
        conversion: The conversion.
        plain_layers: The plain model's layers that belong to the units, by name.
        layers: The converted model's.
        unit_of: Of which unit each layer is, by the number of the unit.
    """

    plain: nn.Module
    model: nn.Module
    conversion: Conversion
    plain_layers: Mapping[str, nn.Module]
    layers: Mapping[str, nn.Module]
    unit_of: Mapping[str, int]

    def routes(self) -> dict[str, list[bool]]:
        """The assignments that most claims are checked under, by what to call them."""
        n = len(self.conversion.units)
        return {
            "on the low-cost path": [False] * n,
            "on the recovery path": [True] * n,
            "with every second unit on the recovery path": [i % 2 == 1 for i in range(n)],
        }


class RecipeHooks:
    """What a contract's subclass gives; everything but ``recipe`` has a default.

    Attributes:
        token_multiple: The number of tokens is to be a multiple of this.
        needs_adapters: Whether the recipe is one of frozen layers with adapters.
        documented_changes: What the low-cost path of a layer computes in another way than the plain layer, of
            ``layer_runs.QUANTITIES``; on generic data it must, and the rest must stay as it is, bit for bit.
        high_is_exact: Whether the recovery path is the plain layer, bit for bit.
        high_rtol: Where it is not: how far it may be off in what ``documented_changes`` names, relative to the
            operands. Every entry of a product ``A B`` is to be within ``high_rtol * |A| |B|`` of the plain layer's.
            Derive it beside the value, from the rounding of the operands.
        high_rtol_of: What an operand's error is relative to, and so what ``|A|`` stands for: its own "entry", as in a
            floating format, or the largest one of its "row" (token, or output of a weight), as in an integer format.
        low_rounding: How far the low-cost path rounds each operand, by "input", "weight" and "output_gradient"; what is
            left out is not rounded. What ``documented_changes`` names is then held to what that can move it by. Derive
            it beside the value, from the format. None holds it to be finite and another: a wrong factor passes.
        is_stochastic: Whether a layer's noise depends on which other layers run on its path.
        odd_features: Whether feature sizes may be odd.
        has_costs_of_saved_bytes: Whether the saved bytes of a ``PathCost`` are what is kept, byte for byte.
        why_no_costs_of_saved_bytes: The reason where they are not.
        has_costs_of_flops: Whether the flops of a ``PathCost`` are those of the plain layer's products.
        why_no_costs_of_flops: The reason where they are not.
        evaluates_as_plain: Whether an evaluation without gradients runs the plain layers. Units on the recovery path,
            where that is exact, do so in any case.
        observes_quantizers: Whether the conversion, as configured here, has quantizers to observe.
        rebuilds_from_dict: Whether ``type(recipe)(**settings)`` is the recipe again, ``settings`` being ``to_dict()``
            without its name.
        compiles_in_one_graph: Whether a compiled model stays one graph when units are switched.
        why_not_one_graph: The reason where it does not, or where it is not to be tried.
    """

    token_multiple: int = 1
    needs_adapters: bool = False
    documented_changes: frozenset[str] = frozenset({"output", "input_gradient", "weight_gradient"})
    high_is_exact: bool = True
    high_rtol: float = 0.0
    high_rtol_of: Literal["entry", "row"] = "entry"
    low_rounding: Mapping[str, OperandRounding] | None = None
    is_stochastic: bool = False
    odd_features: bool = True
    has_costs_of_saved_bytes: bool = True
    why_no_costs_of_saved_bytes: str = ""
    has_costs_of_flops: bool = True
    why_no_costs_of_flops: str = ""
    evaluates_as_plain: bool = True
    observes_quantizers: bool = True
    rebuilds_from_dict: bool = True
    compiles_in_one_graph: bool = True
    why_not_one_graph: str = ""

    def recipe(self) -> Recipe:
        """The recipe; called often, so that each test has its own."""
        raise NotImplementedError("A contract needs to know its recipe: def recipe(self): return MyRecipe()")

    def model(self) -> nn.Module:
        """A model that it can convert, in training mode; the same weights at each call.

        Each projection is to be called once in a forward, and its parameters to be no other's.
        """
        return self.adapted_model() if self.needs_adapters else tiny_model()

    def adapted_model(self) -> nn.Module:
        """The model where adapters are needed."""
        return adapted_tiny_model()

    def odd_model(self) -> nn.Module:
        """A model with odd feature sizes."""
        return (adapted_tiny_model if self.needs_adapters else tiny_model)(33, 45, num_blocks=1)

    def unconvertible_model(self) -> nn.Module:
        """A model in which the recipe finds nothing to convert."""
        return nothing_to_convert()

    def batch(self, model: nn.Module, tokens: int | None = None, seed: int = 0) -> Tensor:
        """An input of ``model`` that has ``tokens`` tokens; ``num_tokens`` of them when left out."""
        tokens = self.num_tokens if tokens is None else tokens
        sequences = 2 if tokens % 2 == 0 else 1
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, VOCABULARY, (sequences, tokens // sequences), generator=generator)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """The loss of a forward; a sum over tokens, so that no token is none of a hard case."""
        output: Tensor = model(batch)
        return output.float().square().sum()

    def checkpoint_blocks(self, model: nn.Module, use_reentrant: bool) -> None:
        """Have ``model`` forget its activations and compute them again in backward."""

        def run(block: nn.Module, x: Tensor) -> Tensor:
            # Reentrant checkpointing needs an input with a gradient, which the first block of a frozen model lacks.
            x = x if x.requires_grad else x.detach().requires_grad_()
            output: Tensor = checkpoint(block, x, use_reentrant=use_reentrant)
            return output

        model.run_block = run  # type: ignore[assignment]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of a usual batch."""
        return 12 if self.token_multiple == 1 else 2 * self.token_multiple

    @property
    def num_tokens_few(self) -> int:
        """Number of tokens where a single layer is called."""
        return 4 if self.token_multiple == 1 else self.token_multiple

    @property
    def changes_forward(self) -> bool:
        """Whether the low-cost path computes other outputs than the plain layers."""
        return "output" in self.documented_changes

    def find_units(self, model: nn.Module, recipe: Recipe) -> list[Unit]:
        """The units that the recipe is offered, as a guard finds them."""
        return find_units(model, None, grouping=getattr(recipe, "unit", "projection"))

    @contextmanager
    def converted(self, model: nn.Module) -> Iterator[Conversion]:
        """``model``, converted in place for as long as the block runs.

        What is switched for the whole process is looked at in each claim: a later one would take it for how it was.
        """
        before = switches()
        recipe = self.recipe()
        conversion = recipe.convert(model, self.find_units(model, recipe))
        conversion.begin_step(1)
        try:
            yield conversion
        finally:
            conversion.undo()
        after = switches()
        left = [name for name in before if before[name] != after[name]]
        assert not left, f"undo left another {', '.join(left)} than it found"

    @contextmanager
    def pair(self, model: nn.Module | None = None) -> Iterator[ConvertedPair]:
        """A plain model and a converted copy."""
        plain = self.model() if model is None else model
        model = copy.deepcopy(plain)
        with self.converted(model) as conversion:
            names = {id(module): name for name, module in model.named_modules()}
            unit_of = {names[id(m)]: i for i, u in enumerate(conversion.units) for m in operators_of(model, u)}
            yield ConvertedPair(
                plain=plain,
                model=model,
                conversion=conversion,
                plain_layers={name: plain.get_submodule(name) for name in unit_of},
                layers={name: model.get_submodule(name) for name in unit_of},
                unit_of=unit_of,
            )

    def gradients(self, model: nn.Module, *batches: Tensor) -> dict[str, Tensor]:
        """Loss and every parameter's gradient, summed over ``batches``."""
        model.zero_grad()
        losses = []
        for batch in batches:
            loss = self.loss(model, batch)
            loss.backward()
            losses.append(loss.detach())
        found = {"the loss": torch.stack(losses).sum()}
        return found | {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}

    def evaluate(self, model: nn.Module) -> Tensor:
        """The output of an evaluation without gradients; the model's mode is then as it was."""
        training = model.training
        model.eval()
        with torch.no_grad():
            output: Tensor = model(self.batch(model))
        model.train(training)
        return output

    def operands(self, pair: ConvertedPair, tokens: int | None = None) -> dict[str, Operands]:
        """What each layer of the plain model is given in a usual forward, and a random gradient of its output.

        A gradient as it comes may be zero: that of a softmax over a single token is.
        """
        batch = self.batch(pair.plain, tokens)
        found, _ = capture(pair.plain_layers, lambda: self.loss(pair.plain, batch))
        generator = torch.Generator().manual_seed(1)
        return {
            name: Operands(
                input=given.input,
                output_gradient=torch.randn(given.output_gradient.shape, generator=generator).to(given.input.dtype),
            )
            for name, given in found.items()
        }

    def forward(self, model: nn.Module, tokens: int | None = None) -> Callable[[], Tensor]:
        """A forward of ``model`` on a usual batch."""
        batch = self.batch(model, tokens)
        return lambda: model(batch)

    def operands_alone(self, layer: nn.Module, tokens: int | None = None) -> Operands:
        """Random operands for one layer, shape (tokens, features)."""
        tokens = self.num_tokens_few if tokens is None else tokens
        generator = torch.Generator().manual_seed(0)
        weight: Tensor = layer.weight  # type: ignore[assignment]
        inputs, outputs = (
            getattr(layer, "in_features", weight.shape[0]),
            getattr(layer, "out_features", weight.shape[-1]),
        )
        return Operands(
            input=torch.randn(tokens, inputs, generator=generator).to(weight.dtype),
            output_gradient=torch.randn(tokens, outputs, generator=generator).to(weight.dtype),
        )


def assert_same(expected: Mapping[str, Tensor], got: Mapping[str, Tensor], where: str) -> None:
    """Assert that two sets of results are equal bit for bit."""
    assert expected.keys() == got.keys(), f"{where}: {sorted(expected.keys() ^ got.keys())} is in one of the two only"
    differ = [name for name in expected if not same(expected[name], got[name])]
    if differ:
        first = differ[0]
        raise AssertionError(
            f"{where}: {len(differ)} of {len(expected)} results differ, first {first}: "
            f"{difference(expected[first], got[first])}"
        )


def subsets_that_part(count: int) -> list[list[bool]]:
    """Few subsets of ``count`` units, such that of any two units each is in one without the other.

    Unit ``i`` is in subset ``k`` if bit ``k`` of ``i`` is set, and in its complement if not.

    Example:
        >>> [subset for subset in subsets_that_part(3) if subset[2] and not subset[0]]
        [[False, False, True]]
    """
    bits = range(max(1, (count - 1).bit_length()))
    subsets: list[Sequence[bool]] = [[bool(i >> k & 1) for i in range(count)] for k in bits]
    return [list(s) for s in subsets] + [[not flag for flag in s] for s in subsets]


def skip(reason: str) -> None:
    """Leave a claim out; test runners know the exception."""
    raise unittest.SkipTest(reason)
