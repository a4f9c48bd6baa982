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
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from trimtab.errors import ConfigError, TrimtabWarning
from trimtab.precision.recipe import PathCost
from trimtab.precision.stored_copy import decode, encode, stored_bytes_per_token
from trimtab.precision.units import Unit, is_linear

__all__ = ["SavedActivations", "SavedActivationsConversion"]

_WIDTHS = (2, 4, 8, 16)
# Enough for every tensor that two projections of one block read, also where attention and MLP run side by side.
_MOST_SHARED = 4


@dataclass(frozen=True, slots=True)
class SavedActivations:
    """Keep the input of each projection in ``low_bits``, and in ``high_bits`` while the unit is on the recovery path.

    Forward outputs, input gradients and bias gradients stay bit for bit those of the plain layers.

    Args:
        low_bits: 2, 4, 8, or 16 for an unquantized copy in the activation's own dtype.
        high_bits: The same choices; at least ``low_bits``.
        rounding: To nearest with ties to even, or stochastic (unbiased) from a generator of its own, seeded by step,
            micro-batch and layer, so that a forward recomputed by activation checkpointing stores the same codes.
        seed: Seed of stochastic rounding.

    Raises: ConfigError: when a width or rounding is none of these.

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
            if bits not in _WIDTHS or isinstance(bits, bool):
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

    def to_dict(self) -> dict[str, Any]:
        """The resolved configuration, JSON-able."""
        return {"name": self.name, **dataclasses.asdict(self)}

    def convert(self, model: nn.Module, units: Sequence[Unit]) -> SavedActivationsConversion:
        """Convert the linear layers among ``units`` in place; all start on the low-cost path.

        Raises: ConfigError: when none of the units can be converted; the model is then untouched.
        """
        reasons = {unit.name: _why_not(unit) for unit in units}
        convertible = [unit for unit in units if reasons[unit.name] is None]
        if not convertible:
            name, reason = next(iter(reasons.items()))
            raise ConfigError(
                "units",
                [u.name for u in units][:3],
                f"saved activations convert plain linear layers, and {name} is none: {reason}.",
                "Choose units that are linear layers.",
            )
        _warn_about_heads(model, convertible)
        return SavedActivationsConversion(self, model, convertible)


def _why_not(unit: Unit) -> str | None:
    """Why ``unit`` cannot be converted, or None when it can."""
    for module in unit.modules:
        if not is_linear(module):
            return f"it is a {type(module).__name__}"
        forward = type(module).forward
        if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
            return "nn.MultiheadAttention reads its weight without calling it"
        if isinstance(module, nn.Linear) and forward is not nn.Linear.forward:
            return f"its class {type(module).__name__} computes its forward in its own way"
        if "forward" in module.__dict__:
            return "something else has already replaced its forward"
        if (
            hasattr(module.weight, "device_mesh")
            and any(p.is_shard() for p in getattr(module.weight, "placements", ()))
            and not _is_fsdp(module)
        ):
            return "its weight is sharded by tensor parallelism"
    return None


def _is_fsdp(module: nn.Module) -> bool:
    # FSDP2 gathers a plain weight before forward; only its own modules say so.
    from torch.distributed.tensor import DTensor

    return isinstance(module.weight, DTensor) and len(module.weight.device_mesh.mesh_dim_names or ("dp",)) == 1


def _warn_about_heads(model: nn.Module, units: Sequence[Unit]) -> None:
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    for unit in units:
        if head is not None and any(m is head for m in unit.modules):
            warnings.warn(
                f"units picks the output head ({unit.name}): its gradient is the largest of the model and is usually "
                "kept in full precision. Narrow the filter if that was not meant.",
                TrimtabWarning,
                stacklevel=4,
            )


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
        bits = self.conversion.bits_in_force(self.index)
        if bits == 16:
            return None
        source = x
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        packed, scale = self.conversion.store(source, x, bits, self.index)
        corruption = self.conversion.corruption(self.index)
        return _LinearFromStoredCopy.apply(x, weight, bias, packed, scale, bits, self.transposed, corruption)


class _LinearFromStoredCopy(torch.autograd.Function):
    """A linear layer whose backward reads its input from a stored copy."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        packed: Tensor,
        scale: Tensor,
        bits: int,
        transposed: bool,
        corruption: tuple[Tensor, float] | None,
    ) -> Tensor:
        return _conv1d(x, weight, bias) if transposed else F.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, packed, scale, ctx.bits, ctx.transposed, ctx.corruption = inputs
        ctx.size, ctx.dtype = x.shape[-1], x.dtype
        # Which kernels the plain layer's backward takes depends on the input's layout; so does its rounding.
        ctx.column_major = x.dim() == 2 and x.stride() == (1, x.shape[0]) and not x.is_contiguous()
        ctx.fused_bias = x.dim() == 2 or x.is_contiguous()
        ctx.save_for_backward(weight, packed, scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, packed, scale = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        flat = grad.reshape(-1, grad.shape[-1])
        if ctx.needs_input_grad[0]:
            by_input = weight.t() if ctx.transposed else weight
            if ctx.column_major:
                grad_x = by_input.t().mm(flat.t()).t()
            else:
                grad_x = flat.mm(by_input).view(*grad.shape[:-1], ctx.size)
        if ctx.needs_input_grad[1]:
            stored = decode(packed, scale, bits=ctx.bits, size=ctx.size, dtype=ctx.dtype)
            if ctx.corruption is not None:
                channels, factor = ctx.corruption
                stored[..., channels] = stored[..., channels] * factor
            stored = stored.reshape(-1, ctx.size)
            grad_weight = stored.t().mm(flat) if ctx.transposed else flat.t().mm(stored)
        if ctx.needs_input_grad[2]:
            grad_bias = flat.sum(0) if ctx.fused_bias else grad.sum_to_size(grad.shape[-1])
        return grad_x, grad_weight, grad_bias, None, None, None, None, None


def _conv1d(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The transposed linear layer of GPT-2, as transformers computes it."""
    return torch.addmm(bias, x.view(-1, x.size(-1)), weight).view(*x.shape[:-1], weight.shape[1])


_converted_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _converted_class(base: type[nn.Module]) -> type[nn.Module]:
    """The subclass of ``base`` whose forward asks the switch. One per base, so that conversions of one model agree."""
    if base not in _converted_classes:

        def forward(self: nn.Module, x: Tensor) -> Tensor:
            switch = self.__dict__.get("_trimtab_switch")
            if switch is not None and torch.is_grad_enabled() and self.weight.requires_grad:
                output = switch(self, x)
                if output is not None:
                    return output
            return base.forward(self, x)

        def reduce_as_plain(self: nn.Module, protocol: int) -> tuple[Any, ...]:
            # A pickled or copied layer is a plain layer: readable without trimtab, and steered by nothing.
            state = {k: v for k, v in self.__dict__.items() if k != "_trimtab_switch"}
            return object.__new__, (base,), state

        _converted_classes[base] = type(
            base.__name__,
            (base,),
            {"forward": forward, "__reduce_ex__": reduce_as_plain, "__module__": base.__module__},
        )
    return _converted_classes[base]


class SavedActivationsConversion:
    """A model whose projections keep packed copies of their inputs; made by ``SavedActivations.convert``."""

    def __init__(self, recipe: SavedActivations, model: nn.Module, units: Sequence[Unit]) -> None:
        self.recipe = recipe
        self.units = tuple(units)
        self.costs = tuple(_cost(recipe, unit) for unit in units)
        self.pull: Callable[[], None] | None = None
        self._active = [False] * len(self.units)
        self._corruptions: dict[int, tuple[Tensor, float]] = {}
        self._step = 1
        self._micro_batch = 0
        self._shared = threading.local()
        for index, unit in enumerate(self.units):
            for module in unit.modules:
                module.__dict__["_trimtab_switch"] = _Switch(self, index, not isinstance(module, nn.Linear))
                module.__class__ = _converted_class(type(module))
        self._hooks = [
            model.register_forward_pre_hook(_ModelHook(self._begin_forward)),
            model.register_forward_hook(_ModelHook(self._end_forward), always_call=True),
        ]

    def route(self, active: Sequence[bool]) -> None:
        """Put the units flagged in ``active`` on the recovery path, the rest on the low-cost path."""
        self._active = [bool(flag) for flag in active]

    def begin_step(self, step: int) -> None:
        """Optimizer step ``step`` begins: micro-batches are counted anew."""
        self._step, self._micro_batch = step, 0

    def undo(self) -> None:
        """Give every layer its class back, and the model its hooks."""
        for hook in self._hooks:
            hook.remove()
        for unit in self.units:
            for module in unit.modules:
                module.__dict__.pop("_trimtab_switch", None)
                # A wrapper that came later (FSDP2) has put its own class on top; without its switch ours is inert.
                if type(module) in _converted_classes.values():
                    module.__class__ = type(module).__mro__[1]

    def state_dict(self) -> dict[str, Any]:
        """Nothing: random numbers are seeded from the step, and the route is the controller's."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to take back."""

    def bits_in_force(self, index: int) -> int:
        """The width in which unit ``index`` keeps its input now; asks for the route first, where one is due."""
        # Never in a backward: a forward that checkpointing recomputes there must store what the first one stored.
        if self.pull is not None and torch._C._current_graph_task_id() == -1:
            pull, self.pull = self.pull, None
            pull()
        return self.recipe.high_bits if self._active[index] else self.recipe.low_bits

    def input_size(self, index: int) -> int:
        """Number of input channels of unit ``index``."""
        return _input_size(self.units[index].modules[0])

    def corrupt(self, index: int, channels: Sequence[int], factor: float) -> None:
        """Scale ``channels`` of the low-width copy that unit ``index`` reads by ``factor`` (fault injection)."""
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
        entries: dict[int, _SharedCopy] = self._shared.__dict__.setdefault("entries", {})
        entry = entries.get(id(source))
        if entry is None or not entry.is_of(source, x.dtype):
            while len(entries) >= _MOST_SHARED:
                del entries[next(iter(entries))]
            entry = entries[id(source)] = _SharedCopy(source, x.dtype, entries)
        if bits not in entry.copies:
            with torch.no_grad():
                entry.copies[bits] = encode(x.detach(), bits, self._noise(x, index))
        return entry.copies[bits]

    def _noise(self, x: Tensor, index: int) -> Tensor | None:
        if self.recipe.rounding == "nearest":
            return None
        generator = torch.Generator(device=x.device)
        # Each factor's range is far below 2**20, so that no two draws of a run share a seed.
        seed = ((self.recipe.seed * 2**20 + self._step) * 2**12 + self._micro_batch) * 2**20 + index
        generator.manual_seed(seed % 2**63)
        return torch.rand(x.shape, generator=generator, device=x.device)

    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and module.training:
            self._micro_batch += 1

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._shared.__dict__.pop("entries", None)


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


class _SharedCopy:
    """The copies made of one tensor, one a width, while that tensor lives unchanged."""

    __slots__ = ("copies", "dtype", "source", "version")

    def __init__(self, source: Tensor, dtype: torch.dtype, entries: dict[int, _SharedCopy]) -> None:
        key = id(source)

        def forget(reference: weakref.ref[Tensor]) -> None:
            # Another tensor may live at the same address by now.
            if key in entries and entries[key].source is reference:
                del entries[key]

        self.source = weakref.ref(source, forget)
        self.version = source._version
        self.dtype = dtype
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}

    def is_of(self, source: Tensor, dtype: torch.dtype) -> bool:
        return self.source() is source and self.version == source._version and self.dtype == dtype


def _input_size(module: nn.Module) -> int:
    return module.weight.shape[1] if isinstance(module, nn.Linear) else module.weight.shape[0]


def _cost(recipe: SavedActivations, unit: Unit) -> PathCost:
    weights = [m.weight for m in unit.modules]
    sizes = [_input_size(m) for m in unit.modules]
    element_bytes = weights[0].element_size()
    return PathCost(
        low_saved_bytes=sum(stored_bytes_per_token(d, recipe.low_bits, element_bytes) for d in sizes),
        high_saved_bytes=sum(stored_bytes_per_token(d, recipe.high_bits, element_bytes) for d in sizes),
        flops=6.0 * sum(w.numel() for w in weights),
    )
