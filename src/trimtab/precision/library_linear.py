"""Layers of other libraries as a path: their own module computes, trimtab only switches.

Each converted layer has two forwards, one a path; None stands for the forward that the module has by itself. Which path
is the module's own depends on who converted it: of a plain layer the recovery path, of a layer that the user has turned
into the library's before, the low-cost path.

Under a compiler the layer is one operator of ours, so that a switch leaves the graph as it is. The library's kernels
then run as they do in eager mode, and its forward runs a second time in backward, for its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.precision.converted_class import own_forward, plain_tensor, warn_about_replicas, weights_of
from trimtab.precision.linear_conversion import LinearConversion, Switch, in_backward, look_up
from trimtab.precision.operand_quantizer import OperandQuantizer
from trimtab.precision.quantizer_stats import ObservesQuantizers
from trimtab.precision.recipe import PathCost
from trimtab.precision.units import Unit

__all__ = ["Forward", "LibraryConversion", "Paths"]

Forward = Callable[[Tensor], Tensor]
"""A forward of one layer, bound to its weights."""


@dataclass(frozen=True, slots=True)
class Paths:
    """The forwards of one layer.

    Args:
        low: On the low-cost path; None is the module's own.
        high: On the recovery path; None is the module's own.
        refuses: Raises where the low-cost path cannot take an input that is to have a backward; asked with its shape
            before the library is.
        quantizer: What the low-cost path does to its input in the forward; None where it leaves that as it is.
    """

    low: Forward | None = None
    high: Forward | None = None
    refuses: Callable[[torch.Size], None] | None = None
    quantizer: OperandQuantizer | None = None


class LibraryConversion(ObservesQuantizers, LinearConversion):
    """A model in which a library's layers are one of two paths.

    Args:
        model: The model.
        units: The units.
        costs: What each costs.
        operators: The layers of each unit.
        paths: The forwards of each layer, by its identity.
        on_undo: What else is to be given back when the recipe is.
    """

    needs_weight_gradient = False

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        costs: Sequence[PathCost],
        operators: Sequence[Sequence[nn.Module]],
        paths: Mapping[int, Paths],
        on_undo: Callable[[], None] | None = None,
    ) -> None:
        self.paths = dict(paths)
        self._on_undo = on_undo
        super().__init__(model, units, costs, operators)

    @property
    def why_unobserved(self) -> str | None:
        """Why nothing can be told of its quantizers, or None when something can; see ``recipe.QuantizerObserver``."""
        if all(paths.quantizer is None for paths in self.paths.values()):
            return "as it is configured, this one quantizes no layer's input"
        return None

    def run(self, module: nn.Module, x: Tensor, index: int) -> Tensor | None:
        """The layer's output on the path in force; None where that is the module's own forward."""
        active = self.is_active(index)
        forward = self.forward_of(module, x.shape, active, has_backward=torch.is_grad_enabled())
        self.note(module, x, index, active)
        if forward is None:
            return None
        # Whatever the library makes of autocast, a path must not show in the dtype of the output.
        dtype = _dtype_of_output(x)
        return forward(x.to(dtype)).to(dtype)

    def trace(self, module: nn.Module, x: Tensor, switch: Switch) -> Tensor | None:
        """The layer's output, as a compiler traces it."""
        weight: Any = module.weight
        bias: Any = module.bias
        outputs = self.outputs_of(module)
        is_cast = torch.is_autocast_enabled(x.device.type)
        x = x.to(_dtype_of_output(x))
        has_backward = torch.is_grad_enabled()  # in the function below it never is
        output: Tensor = _LibraryLinear.apply(
            x, plain_tensor(weight), plain_tensor(bias), outputs, is_cast, has_backward, switch.key
        )
        return output

    def undo(self) -> None:
        """Give every layer its class back, the model its hooks, and what else the recipe took."""
        super().undo()
        if self._on_undo is not None:
            self._on_undo()
            self._on_undo = None

    def forward_of(
        self, module: nn.Module, shape: torch.Size, active: bool, *, has_backward: bool = True
    ) -> Forward | None:
        """The forward of a layer on a path; None is its own. Sizes are refused where there will be a backward."""
        paths = self.paths.get(id(module))
        if paths is None:
            warn_about_replicas()
            return None
        if active:
            return paths.high
        if has_backward and paths.refuses is not None:
            paths.refuses(shape)
        return paths.low

    @torch.no_grad()
    def note(self, module: nn.Module, x: Tensor, index: int, active: bool) -> None:
        """Keep what the low-cost path does to the input of a layer of unit ``index``, or would do."""
        # A forward that is recomputed in backward has been seen before.
        if self._stats is None or (active and not self._shadow) or in_backward():
            return
        paths = self.paths.get(id(module))
        if paths is not None and paths.quantizer is not None:
            self._stats.note(index, paths.quantizer.row(x.detach().to(_dtype_of_output(x))))

    @staticmethod
    def outputs_of(module: nn.Module) -> int:
        """Number of output channels of a layer."""
        layer: Any = module
        return int(layer.out_features if isinstance(module, nn.Linear) else layer.weight.shape[1])


class _LibraryLinear(torch.autograd.Function):
    """``apply(x, weight, bias, outputs, is_cast, has_backward, key)``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        outputs: int,
        is_cast: bool,
        has_backward: bool,
        key: Tensor,
    ) -> Tensor:
        """The output."""
        output, path = torch.ops.trimtab.library_linear(x, weight, bias, outputs, is_cast, has_backward, key)
        ctx.is_cast = is_cast
        ctx.save_for_backward(x, weight, bias, path, key)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients."""
        x, weight, bias, path, key = ctx.saved_tensors
        grads = torch.ops.trimtab.library_linear_backward(
            grad, x, weight, bias, path, list(ctx.needs_input_grad[:3]), ctx.is_cast, key
        )
        return (
            *(g if needed else None for g, needed in zip(grads, ctx.needs_input_grad, strict=False)),
            None,
            None,
            None,
            None,
        )


@torch.library.custom_op("trimtab::library_linear", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _library_linear(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, outputs: int, is_cast: bool, has_backward: bool, key: Tensor
) -> tuple[Tensor, Tensor]:
    conversion, unit, number = _look_up(key)
    active = conversion.is_active(unit)
    # A library's own tensors are met by composite operators otherwise, which they never are in eager mode.
    module = conversion.layers[number]
    with _autograd_within_an_operator(), torch.no_grad(), weights_of(module, weight, bias):
        output = _forward(conversion, number, x.detach(), active, is_cast, has_backward)
    conversion.note(module, x, unit, active)
    output = output.contiguous()
    # An operator's output may not be its input.
    return output.clone() if output.data_ptr() == x.data_ptr() else output, torch.tensor(active, device="cpu")


@_library_linear.register_fake
def _(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, outputs: int, is_cast: bool, has_backward: bool, key: Tensor
) -> tuple[Tensor, Tensor]:
    return x.new_empty((*x.shape[:-1], outputs), dtype=x.dtype), torch.empty((), dtype=torch.bool, device="cpu")


@torch.library.custom_op("trimtab::library_linear_backward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _library_linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    path: Tensor,
    needs: Sequence[bool],
    is_cast: bool,
    key: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    conversion, _, number = _look_up(key)
    module: Any = conversion.layers[number]
    given = [x, weight, bias]
    with _autograd_within_an_operator(), torch.enable_grad():
        leaves = [None if t is None else t.detach().requires_grad_(n) for t, n in zip(given, needs, strict=True)]
        leaf, *own = leaves
        assert leaf is not None
        with weights_of(module, *own):
            output = _forward(conversion, number, leaf, bool(path), is_cast, has_backward=True)
    wanted = [t if n else None for t, n in zip(leaves, needs, strict=True)]
    found = iter(torch.autograd.grad(output, [t for t in wanted if t is not None], grad))
    return tuple(grad.new_empty((0,)) if t is None else next(found).contiguous() for t in wanted)  # type: ignore[return-value]


@_library_linear_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    path: Tensor,
    needs: Sequence[bool],
    is_cast: bool,
    key: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    given = zip([x, weight, bias], needs, strict=True)
    x_like, weight_like, bias_like = (
        t.new_empty(t.shape) if t is not None and n else grad.new_empty((0,)) for t, n in given
    )
    return x_like, weight_like, bias_like


def _autograd_within_an_operator() -> Any:
    """Have autograd take part again, which the dispatcher leaves out below an operator."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def _forward(
    conversion: LibraryConversion, number: int, x: Tensor, active: bool, is_cast: bool, has_backward: bool
) -> Tensor:
    module = conversion.layers[number]
    forward = conversion.forward_of(module, x.shape, active, has_backward=has_backward) or own_forward(module)
    # Autocast is off in an operator; whether it was on is part of the graph.
    with torch.autocast(x.device.type, dtype=x.dtype if is_cast else None, enabled=is_cast):
        return forward(x).to(x.dtype)


def _dtype_of_output(x: Tensor) -> torch.dtype:
    """The dtype that a plain layer's output has."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def _look_up(key: Tensor) -> tuple[LibraryConversion, int, int]:
    return look_up(key)
