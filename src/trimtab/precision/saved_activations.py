"""Saved activations: a projection keeps its input for the weight gradient in few bits ([G] section 5.1).

    forward          Y  = X W' + b            exact, with the plain layer's own kernel
    input gradient   dX = dY W                exact
    weight gradient  dW = dY' Q(X)            Q: per-token codes of 4 bits (low-cost path) or 8 (recovery path)
    bias gradient    db = sum over tokens dY  exact

Only dW changes. What is kept between forward and backward is Q(X), packed, and not X. Layers that read the same tensor
(q, k, v; gate, up) keep one copy between them, for otherwise each would pack its own and the saving would be lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from trimtab.errors import ConfigError
from trimtab.precision.convertible import convertible_units
from trimtab.precision.linear_conversion import LinearConversion, as_autocast_would, input_size
from trimtab.precision.recipe import PathCost
from trimtab.precision.shared_copy import SharedCopies
from trimtab.precision.stored_copy import encode, stored_bytes_per_token
from trimtab.precision.stored_linear import LinearFromStoredCopy
from trimtab.precision.units import Unit

__all__ = ["SavedActivations", "SavedActivationsConversion"]

_WIDTHS = (2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class SavedActivations:
    """Keep the input of each projection in ``low_bits``, and in ``high_bits`` while the unit is on the recovery path.

    Forward outputs, input gradients and bias gradients stay bit for bit those of the plain layers.

    Args:
        low_bits: 2, 4, 8, or 16 for an unquantized copy in the activation's own dtype.
        high_bits: The same choices; at least ``low_bits``.
        rounding: To nearest with ties to even, or stochastic (unbiased) from a generator of its own, seeded by step,
            micro-batch and layer, so that a forward recomputed by activation checkpointing stores the same codes. A
            loop that calls parts of the model and not the model draws the same noise for each micro-batch of a step.
        seed: Seed of stochastic rounding; 0 or more.

    Raises: ConfigError: when a width, rounding or seed is none of these.

    Source: Kong et al. 2026, section 5.1. Ours: one shared copy for layers that read the same tensor.

    Example:
        >>> SavedActivations(low_bits=4, high_bits=8).name
        'saved-activations'
    """

    low_bits: int = 4
    high_bits: int = 8
    rounding: Literal["nearest", "stochastic"] = field(default="nearest", kw_only=True)
    seed: int = field(default=0, kw_only=True)

    name = "saved-activations"

    def __post_init__(self) -> None:
        for setting in ("low_bits", "high_bits"):
            bits = getattr(self, setting)
            if not isinstance(bits, int) or bits not in _WIDTHS:
                raise ConfigError(setting, bits, "a copy is kept in 2, 4, 8 or 16 bits.", "Choose one of these.")
        if self.high_bits < self.low_bits:
            raise ConfigError(
                "high_bits",
                self.high_bits,
                f"the recovery path keeps at least the {self.low_bits} bits of the low-cost path.",
                "Raise high_bits or lower low_bits.",
            )
        if self.rounding not in ("nearest", "stochastic"):
            raise ConfigError("rounding", self.rounding, "it is 'nearest' or 'stochastic'.", "Choose one of the two.")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or self.seed < 0:
            raise ConfigError("seed", self.seed, "a seed is a whole number from 0.", "Set it to 0, say.")

    def to_dict(self) -> dict[str, Any]:
        """The resolved configuration, JSON-able."""
        return {"name": self.name, **dataclasses.asdict(self)}

    def convert(self, model: nn.Module, units: Sequence[Unit]) -> SavedActivationsConversion:
        """Convert the linear layers among ``units`` in place; all start on the low-cost path.

        Raises: ConfigError: when none of the units can be converted; the model is then untouched.
        """
        convertible = convertible_units(model, units, "saved activations")
        return SavedActivationsConversion(self, model, convertible)


class SavedActivationsConversion(LinearConversion):
    """A model whose projections keep packed copies of their inputs; made by ``SavedActivations.convert``."""

    def __init__(self, recipe: SavedActivations, model: nn.Module, units: Sequence[Unit]) -> None:
        self.recipe = recipe
        self._corruptions: dict[int, tuple[Tensor, float]] = {}
        self._shared = SharedCopies()
        super().__init__(model, units, tuple(_cost(recipe, unit) for unit in units))

    def run(self, module: nn.Module, x: Tensor, index: int) -> Tensor | None:
        """The layer's output, with its input kept in the width in force; None where the plain layer is to run."""
        bits = self.bits_in_force(index)
        if bits == 16 or not torch.is_grad_enabled():
            return None
        source = x
        x, weight, bias = as_autocast_would(module, x)
        packed, scale = self.store(source, x, bits, index)
        transposed = not isinstance(module, nn.Linear)
        return LinearFromStoredCopy.apply(x, weight, bias, packed, scale, bits, transposed, self.corruption(index))

    def begin_step(self, step: int) -> None:
        """Optimizer step ``step`` begins: micro-batches are counted anew; copies and corruptions of the last end."""
        super().begin_step(step)
        self._shared.clear()
        self.heal()

    def state_dict(self) -> dict[str, Any]:
        """Nothing: random numbers are seeded from the step, and the route is the controller's."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to take back."""

    def bits_in_force(self, index: int) -> int:
        """The width in which unit ``index`` keeps its input now; asks for the route first, where one is due."""
        return self.recipe.high_bits if self.is_active(index) else self.recipe.low_bits

    def corrupt(self, index: int, channels: Sequence[int], factor: float) -> None:
        """Scale ``channels`` of the low-width copy that unit ``index`` reads by ``factor``, until the step ends."""
        device = self.units[index].parameters()[0].device
        self._corruptions[index] = (torch.tensor(list(channels), device=device), float(factor))

    def heal(self) -> None:
        """End every corruption."""
        self._corruptions.clear()

    def corruption(self, index: int) -> tuple[Tensor, float] | None:
        """The corruption that unit ``index`` suffers now: the recovery path has none."""
        return None if self._active[index] else self._corruptions.get(index)

    def store(self, source: Tensor, x: Tensor, bits: int, index: int) -> tuple[Tensor, Tensor]:
        """The packed copy of ``x``: the one another layer made of the same tensor in this width, or a new one.

        Args:
            source: The tensor object that the layer was given; its identity and version say whether it is the same.
            x: ``source``, or its copy in autocast's dtype.
            bits: Width of the copy.
            index: The unit that asks; a new copy's noise is seeded by it.
        """

        def make() -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                return encode(x.detach(), bits, self._noise(x, index))

        return self._shared.get(source, x.dtype, bits, make)

    def _noise(self, x: Tensor, index: int) -> Tensor | None:
        if self.recipe.rounding == "nearest":
            return None
        # Hashed, because a generator on the CPU reads no more than the lowest 32 bits of its seed.
        words = np.random.SeedSequence([self.recipe.seed, self._step, self._micro_batch, index])
        generator = torch.Generator(device=x.device)
        generator.manual_seed(int(words.generate_state(1, np.uint64)[0]))
        return torch.rand(x.shape, generator=generator, device=x.device)

    def end_forward(self) -> None:
        """A forward of the whole model is over: nothing reads its tensors again."""
        self._shared.clear()


def _cost(recipe: SavedActivations, unit: Unit) -> PathCost:
    weights: list[Any] = [m.weight for m in unit.modules]
    sizes = [input_size(m) for m in unit.modules]
    element_bytes = weights[0].element_size()
    return PathCost(
        low_saved_bytes=sum(stored_bytes_per_token(d, recipe.low_bits, element_bytes) for d in sizes),
        high_saved_bytes=sum(stored_bytes_per_token(d, recipe.high_bits, element_bytes) for d in sizes),
        flops=6.0 * sum(w.numel() for w in weights),
    )
