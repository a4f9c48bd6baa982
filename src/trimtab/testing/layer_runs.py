"""The layers of a model, each run on operands that are held fast, so that what one computes cannot hide in another.

In a model each layer reads what the ones before it made, so a change in one shows in all that follow. Here each layer
of a forward is given an input that was captured before, and in backward the gradient of its output that was: what it
computes then depends on its own path alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["QUANTITIES", "LayerRun", "Operands", "capture", "difference", "replay", "run_alone", "same"]

QUANTITIES = ("output", "input_gradient", "weight_gradient", "bias_gradient")
"""What a linear layer computes, in a forward and a backward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operands:
    """What a layer is given.

    Args:
        input: Shape (..., in).
        output_gradient: Gradient of its output, shape (..., out).
    """

    input: Tensor
    output_gradient: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRun:
    """What a layer made of it; None where nothing is computed, as for a frozen weight."""

    output: Tensor
    input_gradient: Tensor | None
    weight_gradient: Tensor | None
    bias_gradient: Tensor | None


def capture(
    layers: Mapping[str, nn.Module], forward: Callable[[], Tensor]
) -> tuple[dict[str, Operands], dict[str, LayerRun]]:
    """Run a forward and a backward as they come, and note what each layer was given and made.

    The input's gradient is left out: where several layers read one tensor, theirs cannot be told apart.

    Args:
        layers: Layers by name, each run once in a forward.
        forward: Gives the loss.
    """
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            inputs[name] = args[0].detach().clone()
            outputs[name] = output.detach().clone()
            if output.requires_grad:
                output.register_hook(lambda gradient: gradients.__setitem__(name, gradient.detach().clone()))

        return hook

    _forget_gradients(layers.values())
    with _hooks(module.register_forward_hook(note(name)) for name, module in layers.items()):
        loss = forward()
    loss.backward()
    for name, output in outputs.items():
        # The first layers of a frozen model get no gradient.
        gradients.setdefault(name, torch.zeros_like(output))
    return (
        {n: Operands(input=inputs[n], output_gradient=gradients[n]) for n in layers},
        {n: _layer_run(m, outputs[n], None) for n, m in layers.items()},
    )


def replay(
    layers: Mapping[str, nn.Module], operands: Mapping[str, Operands], forward: Callable[[], Any]
) -> dict[str, LayerRun]:
    """Run a forward in which each layer gets its own copy of the input in ``operands``, and a backward of each.

    Args:
        layers: Layers by name, each run once in a forward.
        operands: What each is given.
        forward: Runs the model on anything of the same size.
    """
    inputs = {n: operands[n].input.clone().requires_grad_() for n in layers}
    outputs: dict[str, Tensor] = {}

    def give(name: str) -> Callable[..., tuple[Tensor]]:
        return lambda module, args: (inputs[name],)

    def take(name: str) -> Callable[..., None]:
        return lambda module, args, output: outputs.__setitem__(name, output)

    _forget_gradients(layers.values())
    hooks = [module.register_forward_pre_hook(give(name)) for name, module in layers.items()]
    hooks += [module.register_forward_hook(take(name)) for name, module in layers.items()]
    with _hooks(hooks):
        forward()
    gradients = [operands[n].output_gradient.to(outputs[n].dtype) for n in layers]
    torch.autograd.backward([outputs[n] for n in layers], gradients)
    return {n: _layer_run(m, outputs[n].detach(), inputs[n].grad) for n, m in layers.items()}


def run_alone(layer: nn.Module, given: Operands) -> LayerRun:
    """One layer called by itself, on operands of the strides that they are given in."""
    _forget_gradients([layer])
    # A copy of what is expanded would not be.
    x = (given.input.detach() if 0 in given.input.stride() else given.input.clone()).requires_grad_()
    output = layer(x)
    output.backward(given.output_gradient.to(output.dtype))
    return _layer_run(layer, output.detach(), x.grad)


def same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether both are of one shape and dtype and equal bit for bit, NaN equal to NaN; or both are None."""
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def difference(one: Tensor | None, other: Tensor | None) -> str:
    """In which way two results differ, as the end of a sentence."""
    if one is None or other is None:
        return f"one is {'None' if one is None else 'a tensor'}, the other {'None' if other is None else 'a tensor'}"
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{one.dtype} of shape {tuple(one.shape)} against {other.dtype} of shape {tuple(other.shape)}"
    apart = (one.double() - other.double()).abs()
    return f"{int((apart != 0).sum())} of {apart.numel()} entries differ, by {apart.max().item():.3g} at most"


def _layer_run(layer: nn.Module, output: Tensor, input_gradient: Tensor | None) -> LayerRun:
    weight, bias = (getattr(getattr(layer, part, None), "grad", None) for part in ("weight", "bias"))
    return LayerRun(
        output=output,
        input_gradient=input_gradient,
        weight_gradient=None if weight is None else weight.clone(),
        bias_gradient=None if bias is None else bias.clone(),
    )


def _forget_gradients(layers: Iterable[nn.Module]) -> None:
    for layer in layers:
        layer.zero_grad()


@contextmanager
def _hooks(handles: Iterable[torch.utils.hooks.RemovableHandle]) -> Iterator[Sequence[Any]]:
    kept = list(handles)
    try:
        yield kept
    finally:
        for handle in kept:
            handle.remove()
