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
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from trimtab.errors import ConfigError
from trimtab.formats import channel_error
from trimtab.formats.sampling import num_rows, rows_of, spread_rows
from trimtab.precision.compiled_copy import allow_dynamic_sizes, scopes_of, traced_linear
from trimtab.precision.conversion_plan import Planned, plan_conversion
from trimtab.precision.convertible import why_not_plain_linear
from trimtab.precision.grouping import Grouping, check_unit
from trimtab.precision.linear_conversion import LinearConversion, Switch, as_autocast_would, in_backward, input_size
from trimtab.precision.quantizer_stats import ObservesQuantizers, most_tokens_of, stats_row
from trimtab.precision.recipe import PathCost
from trimtab.precision.shared_copy import SharedCopies
from trimtab.precision.stored_copy import decode, encode, encode_with_stats, stored_bytes_per_token
from trimtab.precision.stored_linear import LinearFromStoredCopy, corrupted
from trimtab.precision.units import Unit

__all__ = ["LowRow", "SavedActivations", "SavedActivationsConversion"]

_WIDTHS = (2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class LowRow:
    """The statistics of a copy in the low width, and what the noise of that copy is seeded by."""

    row: Tensor
    index: int
    micro_batch: int


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
        unit: What is switched as one: a projection, an attention or MLP half, or a block ("layer" is the same).

    Raises: ConfigError: when a width, rounding, seed or unit is none of these.

    Source: Kong et al. 2026, section 5.1. Ours: one shared copy for layers that read the same tensor.

    Example:
        >>> SavedActivations(low_bits=4, high_bits=8).name
        'saved-activations'
    """

    low_bits: int = 4
    high_bits: int = 8
    rounding: Literal["nearest", "stochastic"] = field(default="nearest", kw_only=True)
    seed: int = field(default=0, kw_only=True)
    unit: Grouping = field(default="projection", kw_only=True)

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
        check_unit(self.unit)

    def to_dict(self) -> dict[str, Any]:
        """The resolved configuration, JSON-able."""
        return {"name": self.name, **dataclasses.asdict(self)}

    def convert(self, model: nn.Module, units: Sequence[Unit]) -> SavedActivationsConversion:
        """Convert the linear layers among ``units`` in place; all start on the low-cost path.

        Raises: ConfigError: when none of the units can be converted; the model is then untouched.
        """
        return SavedActivationsConversion(self, model, plan_conversion(model, units, self.name, _why_not))


class SavedActivationsConversion(ObservesQuantizers, LinearConversion):
    """A model whose projections keep packed copies of their inputs; made by ``SavedActivations.convert``."""

    def __init__(self, recipe: SavedActivations, model: nn.Module, planned: Sequence[Planned]) -> None:
        self.recipe = recipe
        self._corruptions: dict[int, tuple[Tensor, float]] = {}
        self._shared = SharedCopies()
        # By the place in memory of a copy that compiled code has made: units that read another's find its row there.
        self.rows_of_copies: dict[int, LowRow] = {}
        operators = [layers for _, layers in planned]
        super().__init__(model, [unit for unit, _ in planned], [_cost(recipe, o) for o in operators], operators)
        converted = [m for layers in self.operators for m in layers]
        self._scopes = scopes_of(model, converted)
        for module in converted:
            module.__dict__["_trimtab_switch"].scope = self._scopes.get(id(module))
        # Also where a model is let go of without being detached.
        self._stop_dynamic_sizes = weakref.finalize(self, allow_dynamic_sizes())

    def run(self, module: nn.Module, x: Tensor, index: int) -> Tensor | None:
        """The layer's output, with its input kept in the width in force; None where the plain layer is to run."""
        bits = self.bits_in_force(index)
        keeps_copy = bits != 16 and torch.is_grad_enabled()
        if not keeps_copy and self._stats is None:
            return None
        source = x
        x, weight, bias = as_autocast_would(module, x)
        if bits == 16:
            self._note(index, bits, x, None, lambda: self._shared_low_row(source, x, index))
            return None
        packed, scale = self.store(source, x, bits, index)
        # Reentrant checkpointing trains by this forward too, and the recomputed one is not looked at.
        if not keeps_copy:
            return None
        transposed = not isinstance(module, nn.Linear)
        return LinearFromStoredCopy.apply(x, weight, bias, packed, scale, bits, transposed, self.corruption(index))

    def trace(self, module: nn.Module, x: Tensor, switch: Switch) -> Tensor | None:
        """The layer's output, as a compiler traces it."""
        if not torch.is_grad_enabled():
            return None
        return traced_linear(module, x, switch.scope, switch.key)

    @property
    def why_unobserved(self) -> str | None:
        """Why nothing can be told of its quantizers, or None when something can; see ``recipe.QuantizerObserver``."""
        return "low_bits=16 quantizes none" if self.recipe.low_bits == 16 else None

    def undo(self) -> None:
        """Give every layer its class back, the model its hooks, and the compiler its setting."""
        super().undo()
        for scope in set(self._scopes.values()):
            scope.remove()
        self._stop_dynamic_sizes()

    def begin_step(self, step: int) -> None:
        """Optimizer step ``step`` begins: micro-batches are counted anew; copies and corruptions of the last end."""
        super().begin_step(step)
        self._shared.clear()
        self.rows_of_copies.clear()
        self.heal()

    def bits_in_force(self, index: int) -> int:
        """The width in which unit ``index`` keeps its input now; asks for the route first, where one is due."""
        return self.recipe.high_bits if self.is_active(index) else self.recipe.low_bits

    def corrupt(self, index: int, channels: Sequence[int], factor: float) -> None:
        """Scale ``channels`` of the low-width copy that unit ``index`` reads by ``factor``, until the step ends.

        Its channel error is then that of the scaled copy.
        """
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
        packed, scale, *row = self._shared.get(
            source, x.dtype, bits, lambda: self._made(x, bits, index, self._micro_batch)
        )
        self._note(index, bits, x, next(iter(row), None), lambda: self._shared_low_row(source, x, index))
        return packed, scale

    def encode(
        self, x: Tensor, bits: int, index: int, micro_batch: int, earlier: LowRow | None
    ) -> tuple[Tensor, Tensor, LowRow | None]:
        """A new packed copy of ``x``, for compiled code: packed, scale and what ``observe_copy`` returns."""
        packed, scale, *row = self._made(x, bits, index, micro_batch)
        return packed, scale, self.observe_copy(x, bits, index, micro_batch, next(iter(row), earlier))

    def observe_copy(self, x: Tensor, bits: int, index: int, micro_batch: int, row: LowRow | None) -> LowRow | None:
        """Compiled code has unit ``index`` read a copy of ``x`` in ``bits``, its own or another's.

        Args:
            x: What is copied.
            bits: Width of the copy.
            index: The unit.
            micro_batch: The micro-batch; with ``index``, what the unit's noise is seeded by.
            row: The statistics of the copy in the low width that was made of ``x`` or would have been; None where
                there are none yet.

        Returns: These statistics, for other units that read ``x``; None where nobody wants them.
        """
        return self._note(index, bits, x, row, lambda: self._low_row(x, index, micro_batch))

    @torch.no_grad()
    def _made(self, x: Tensor, bits: int, index: int, micro_batch: int) -> tuple[Any, ...]:
        """A packed copy, its scales and, where that is wanted and ``bits`` are the low ones, its statistics."""
        noise = self._noise(x, index, micro_batch)
        if self._stats is None or bits != self.recipe.low_bits:
            return encode(x.detach(), bits, noise)
        packed, scale, stats = encode_with_stats(x.detach(), bits, noise, most_tokens_of(x))
        return packed, scale, LowRow(stats_row(stats, x), index, micro_batch)

    @torch.no_grad()
    def _low_row(self, x: Tensor, index: int, micro_batch: int) -> LowRow:
        """The statistics of the copy that unit ``index`` would have made in the low width."""
        noise = self._noise(x, index, micro_batch)
        _, _, stats = encode_with_stats(x.detach(), self.recipe.low_bits, noise, most_tokens_of(x))
        return LowRow(stats_row(stats, x), index, micro_batch)

    def _shared_low_row(self, source: Tensor, x: Tensor, index: int) -> LowRow:
        """The statistics of the copy that unit ``index`` would have read in the low width: its own or another's."""
        _, _, *row = self._shared.find(source, x.dtype, self.recipe.low_bits) or (None, None)
        if row:
            return row[0]  # type: ignore[no-any-return]
        # No copy has this width.
        [made] = self._shared.get(source, x.dtype, -1, lambda: (self._low_row(x, index, self._micro_batch),))
        return made  # type: ignore[no-any-return]

    @torch.no_grad()
    def _row_as_read(self, x: Tensor, index: int, low_row: LowRow) -> Tensor:
        """What unit ``index``, whose low-width copy is corrupted, reads back against ``x``."""
        bits = self.recipe.low_bits
        noise = self._noise(x, low_row.index, low_row.micro_batch)
        packed, scale, stats = encode_with_stats(x.detach(), bits, noise, most_tokens_of(x))
        rows = spread_rows(num_rows(x), most_tokens_of(x), x.device)
        some, some_packed, some_scales = (rows_of(t, rows) for t in (x.detach(), packed, scale))
        stored = decode(some_packed, some_scales, bits=bits, size=x.shape[-1], dtype=x.dtype)
        corrupted(stored, self._corruptions[index])
        return stats_row(dataclasses.replace(stats, channel_error=channel_error(some, stored)), x)

    def _note(
        self, index: int, bits: int, x: Tensor, row: LowRow | None, low_row: Callable[[], LowRow]
    ) -> LowRow | None:
        """Keep the ``row`` of a copy in the low width, or what that width would have made of ``x``; returns which.

        A corrupted copy is judged as the unit reads it. That is what an observer sees that reads the copy back as it
        is stored, by the scale that backward will use: a scale that is wrong by then shows. One that goes wrong
        between forward and backward shows to none, and is not what the corruption stands for.
        """
        # A recomputed forward has been seen before.
        if self._stats is None or in_backward() or (bits != self.recipe.low_bits and not self._shadow):
            return row
        row = row or low_row()
        self._stats.note(index, self._row_as_read(x, index, row) if index in self._corruptions else row.row)
        return row

    def _noise(self, x: Tensor, index: int, micro_batch: int) -> Tensor | None:
        if self.recipe.rounding == "nearest":
            return None
        # Hashed, because a generator on the CPU reads no more than the lowest 32 bits of its seed.
        words = np.random.SeedSequence([self.recipe.seed, self._step, micro_batch, index])
        generator = torch.Generator(device=x.device)
        generator.manual_seed(int(words.generate_state(1, np.uint64)[0]))
        return torch.rand(x.shape, generator=generator, device=x.device)

    def end_forward(self) -> None:
        """A forward of the whole model is over: nothing reads its tensors again."""
        self._shared.clear()


def _why_not(module: nn.Module, under_fsdp: frozenset[int]) -> str | None:
    """Why a layer keeps no packed copy, or None when it can."""
    reason = why_not_plain_linear(module, under_fsdp)
    weight: Any = getattr(module, "weight", None)
    if reason is None and not weight.requires_grad:
        reason = (
            "its weight is frozen, so it keeps no input for a gradient (the trained parts of an adapter can be picked: "
            "units=lambda m, fqn: 'lora_' in fqn)"
        )
    return reason


def _cost(recipe: SavedActivations, layers: Sequence[nn.Module]) -> PathCost:
    weights: list[Any] = [m.weight for m in layers]
    sizes = [input_size(m) for m in layers]
    element_bytes = weights[0].element_size()
    return PathCost(
        low_saved_bytes=sum(stored_bytes_per_token(d, recipe.low_bits, element_bytes) for d in sizes),
        high_saved_bytes=sum(stored_bytes_per_token(d, recipe.high_bits, element_bytes) for d in sizes),
        flops=6.0 * sum(w.numel() for w in weights),
    )
