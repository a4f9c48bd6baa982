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
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from trimtab.errors import ConfigError
from trimtab.precision.convertible import is_dtensor, modules_under_fsdp, warn_about_heads, why_not_linear
from trimtab.precision.recipe import PathCost
from trimtab.precision.shared_copy import SharedCopies
from trimtab.precision.stored_copy import encode, stored_bytes_per_token
from trimtab.precision.stored_linear import LinearFromStoredCopy, converted_class, give_back_class
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
            micro-batch and layer, so that a forward recomputed by activation checkpointing stores the same codes.
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
        under_fsdp = modules_under_fsdp(model, units)
        reasons = {unit.name: why_not_linear(unit, under_fsdp) for unit in units}
        convertible = [unit for unit in units if reasons[unit.name] is None]
        if not convertible:
            name, reason = next(iter(reasons.items()))
            raise ConfigError(
                "units",
                [u.name for u in units][:3],
                f"saved activations convert plain linear layers, and {name} is none: {reason}.",
                "Choose units that are linear layers.",
            )
        warn_about_heads(model, convertible)
        return SavedActivationsConversion(self, model, convertible)


class _Switch:
    """What a converted layer asks in its forward: which width, and where to put the copy."""

    def __init__(self, conversion: SavedActivationsConversion, index: int, transposed: bool) -> None:
        self.conversion = conversion
        self.index = index
        self.transposed = transposed

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied model is a plain model: nothing steers it."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    # A data-dependent width cannot be traced as it stands; the layer runs eagerly between two compiled parts.
    @torch.compiler.disable(recursive=True)
    def __call__(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """The layer's output, or None where the plain layer is to run."""
        weight, bias = module.weight, module.bias
        if x.is_inference() or not x.is_floating_point():
            return None
        # FSDP2 has gathered a plain weight by now. What is still distributed is tensor parallelism's, which may also
        # have come after conversion: products of local shards would be the wrong gradient.
        if is_dtensor(weight) or is_dtensor(x):
            return None
        bits = self.conversion.bits_in_force(self.index)
        if bits == 16 or not torch.is_grad_enabled():
            return None
        source = x
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        packed, scale = self.conversion.store(source, x, bits, self.index)
        corruption = self.conversion.corruption(self.index)
        return LinearFromStoredCopy.apply(x, weight, bias, packed, scale, bits, self.transposed, corruption)


class SavedActivationsConversion:
    """A model whose projections keep packed copies of their inputs; made by ``SavedActivations.convert``."""

    def __init__(self, recipe: SavedActivations, model: nn.Module, units: Sequence[Unit]) -> None:
        self.recipe = recipe
        self.units = tuple(units)
        self.costs = tuple(_cost(recipe, unit) for unit in units)
        self.pull: Callable[[], None] | None = None
        self._pulling = threading.RLock()
        self._is_pulling = False
        self._active = [False] * len(self.units)
        self._corruptions: dict[int, tuple[Tensor, float]] = {}
        self._step = 1
        self._micro_batch = 0
        self._shared = SharedCopies()
        for index, unit in enumerate(self.units):
            for module in unit.modules:
                module.__dict__["_trimtab_switch"] = _Switch(self, index, not isinstance(module, nn.Linear))
                module.__class__ = converted_class(type(module))
        self._hooks = [
            model.register_forward_pre_hook(_ModelHook(self._begin_forward)),
            model.register_forward_hook(_ModelHook(self._end_forward), always_call=True),
        ]

    def route(self, active: Sequence[bool]) -> None:
        """Put the units flagged in ``active`` on the recovery path, the rest on the low-cost path."""
        self._active = [bool(flag) for flag in active]

    def begin_step(self, step: int) -> None:
        """Optimizer step ``step`` begins: micro-batches are counted anew; copies and corruptions of the last end."""
        self._step, self._micro_batch = step, 0
        self._shared.clear()
        self.heal()

    def undo(self) -> None:
        """Give every layer its class back, and the model its hooks."""
        for hook in self._hooks:
            hook.remove()
        for unit in self.units:
            for module in unit.modules:
                module.__dict__.pop("_trimtab_switch", None)
                give_back_class(module)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: random numbers are seeded from the step, and the route is the controller's."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to take back."""

    def bits_in_force(self, index: int) -> int:
        """The width in which unit ``index`` keeps its input now; asks for the route first, where one is due."""
        # Never in a backward: a forward that checkpointing recomputes there must store what the first one stored.
        if self.pull is not None and not _in_backward():
            self._take_route()
        return self.recipe.high_bits if self._active[index] else self.recipe.low_bits

    def _take_route(self) -> None:
        """Ask for the route that is due; other threads wait until it is here."""
        # nn.DataParallel runs a replica a thread. Were ``pull`` cleared first, the second replica would go on with the
        # old route while the first still waits for the new one.
        with self._pulling:
            pull = self.pull
            if pull is None or self._is_pulling:
                return
            self._is_pulling = True
            try:
                pull()
            finally:
                self._is_pulling = False
                if self.pull is pull:
                    self.pull = None

    def input_size(self, index: int) -> int:
        """Number of input channels of unit ``index``."""
        return _input_size(self.units[index].modules[0])

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

    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        # Reentrant checkpointing of a whole model runs this forward without gradients; a recomputation is no new one.
        # nn.DataParallel counts once a replica: noise then differs from replica to replica, which is as good.
        if module.training and not _in_backward():
            self._micro_batch += 1

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._shared.clear()


class _ModelHook:
    """A hook on the whole model that a copy of the model does not inherit."""

    def __init__(self, call: Callable[..., None]) -> None:
        self.call = call

    def __call__(self, *args: Any) -> None:
        self.call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _no_hook

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _make_no_hook, ()


def _no_hook(*args: Any) -> None:
    return None


def _make_no_hook() -> Callable[..., None]:
    return _no_hook


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _input_size(module: nn.Module) -> int:
    weight: Any = module.weight
    return int(weight.shape[1] if isinstance(module, nn.Linear) else weight.shape[0])


def _cost(recipe: SavedActivations, unit: Unit) -> PathCost:
    weights: list[Any] = [m.weight for m in unit.modules]
    sizes = [_input_size(m) for m in unit.modules]
    element_bytes = weights[0].element_size()
    return PathCost(
        low_saved_bytes=sum(stored_bytes_per_token(d, recipe.low_bits, element_bytes) for d in sizes),
        high_saved_bytes=sum(stored_bytes_per_token(d, recipe.high_bits, element_bytes) for d in sizes),
        flops=6.0 * sum(w.numel() for w in weights),
    )
