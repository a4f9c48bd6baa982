"""The gradients of the keys that enter attention, summed up as they come: no kernel is touched, nothing is waited for.

Keys are seen in two ways: those of transformers' attention modules on the way into their attention function, and any
others where the model's own code hands them to ``watch_keys``.

A legend of shapes: keys and their gradients (batch, heads, tokens, d_head), one head a *key* head where several query
heads share it; sums (heads, d_head); lengths (heads,).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.precision.attention_calls import Attention, attention_modules, place_around
from trimtab.precision.linear_conversion import in_backward

__all__ = ["KeySums", "KeyWatch", "watch_keys"]

_handles = itertools.count(1)
_active: weakref.WeakValueDictionary[int, KeyWatch] = weakref.WeakValueDictionary()

_ATTENTION_SETTINGS = {
    "s_aux": "it has attention sinks, whose share of a row's softmax belongs to no key",
    "softcap": "its logits pass a soft-cap, so that shifting the logits of a row changes its softmax",
}
"""Settings that an attention function is called with, and why the gradients of its keys then sum to no zero."""

_ATTRIBUTES = {"sinks": "s_aux", "softcap": "softcap", "attn_logit_softcapping": "softcap"}
"""Attributes of attention modules that are not None where such a setting will be given."""


@dataclass(slots=True)
class KeySums:
    """What the gradients of a layer's keys sum to since they were last taken.

    Args:
        vectors: Sum over all keys of the gradient; float32, or float64 where the gradients are. Shape (heads, d_head).
        lengths: Sum over all keys of its length. Shape (heads,).
    """

    vectors: Tensor
    lengths: Tensor


def watch_keys(k: Tensor, layer: str | int | None = None) -> Tensor:
    """Show the keys of a hand-written attention to the monitors that watch them.

    Call it on the keys as they enter the product with the queries: after position embeddings and norms, and before key
    heads are repeated for the query heads that share them. Where no such monitor is active it does nothing. Call it
    only where the weights are a plain softmax over the keys: with attention sinks, a sigmoid, or a soft-cap on the
    logits, the gradients of the keys need not sum to zero.

    Under ``torch.compile`` the graph may break at the call.

    Args:
        k: The keys. Shape (batch, heads, tokens, d_head).
        layer: Name of the layer, or its number; None counts the calls of each forward of the model. Layers under
            reentrant activation checkpointing need a name, since they are run backwards.

    Returns: ``k`` itself.

    Example:
        >>> k = torch.ones(1, 2, 3, 4)
        >>> watch_keys(k) is k
        True
    """
    for watch in list(_active.values()):
        watch.look_at(k, layer)
    return k


class KeyWatch:
    """Sums up the gradients of a model's keys between two calls of ``take``.

    Args:
        say: Says once why a layer is left out.

    Attributes:
        handle: Number by which compiled code finds this watch again.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.handle = next(_handles)
        self._say = say
        self._sums: dict[str, KeySums] = {}
        self._undo: list[Callable[[], None]] = []
        self._left_out: dict[str, str] = {}
        self._num_calls = 0

    @property
    def left_out(self) -> Mapping[str, str]:
        """Names of the layers that are left out, and why."""
        return self._left_out

    def start(self, model: nn.Module) -> None:
        """Place hooks on the attention modules of ``model`` that transformers knows, and be open to ``watch_keys``."""
        found = attention_modules(model)
        numbers = [getattr(module, "layer_idx", None) for module in found.values()]
        # A model with an encoder and a decoder, say, counts the layers of each.
        counted = None not in numbers and len(set(numbers)) == len(numbers)
        for position, (name, module) in enumerate(found.items()):
            layer = f"layer_{numbers[position] if counted else position}"
            because = next((_ATTENTION_SETTINGS[s] for a, s in _ATTRIBUTES.items() if _is_given(module, a)), None)
            if because is None:
                self._undo.append(place_around(module, _ShowKeys(self, layer, name)))
            else:
                self._leave_out(name, because)
        self._undo.append(model.register_forward_pre_hook(_BeginForward(self)).remove)
        _active[self.handle] = self

    def stop(self) -> None:
        """Take every hook away."""
        _active.pop(self.handle, None)
        while self._undo:
            self._undo.pop()()
        self._sums.clear()

    def take(self) -> dict[str, KeySums]:
        """The sums since the last call, by layer; those of layers that had no gradient are not there."""
        taken, self._sums = self._sums, {}
        self._num_calls = 0
        return taken

    def look_at(self, k: Tensor, layer: str | int | None) -> None:
        """Have the gradient of ``k`` summed up as that of ``layer``."""
        if layer is None:
            # What is recomputed for a backward is no further call.
            if in_backward():
                return
            layer, self._num_calls = self._num_calls, self._num_calls + 1
        if k.requires_grad:
            k.register_hook(_Add(self, f"layer_{layer}" if isinstance(layer, int) else layer))

    def begin_forward(self) -> None:
        """A forward of the whole model begins: calls are counted anew."""
        if not torch.compiler.is_compiling() and not in_backward():
            self._num_calls = 0

    def show(self, attention: Attention, layer: str, name: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call ``attention`` with keys whose gradient is seen."""
        because = next((why for setting, why in _ATTENTION_SETTINGS.items() if kwargs.get(setting) is not None), None)
        query, key, *rest = args
        if because is not None:
            self._leave_out(name, because)
        elif key.requires_grad and torch.is_grad_enabled():
            # A view of its own: what else reads these keys, values that are the same tensor, say, adds nothing to it.
            if torch.compiler.is_compiling():
                key = _AddInGraph.apply(key, self.handle, layer)
            else:
                key = key.view_as(key)
                key.register_hook(_Add(self, layer))
        return attention(module, query, key, *rest, **kwargs)

    @torch.no_grad()
    def add(self, layer: str, grad: Tensor) -> None:
        """A gradient of keys of ``layer`` has come; device work only."""
        # float32 adds up without an error that would count; a float64 run is to be seen to float64.
        dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
        grad = grad.reshape(-1, *grad.shape[-3:])
        vectors = grad.sum((0, 2), dtype=dtype)
        lengths = torch.linalg.vector_norm(grad, dim=-1, dtype=dtype).sum((0, 2))
        sums = self._sums.get(layer)
        if sums is None or sums.vectors.shape != vectors.shape or sums.vectors.device != vectors.device:
            self._sums[layer] = KeySums(vectors, lengths)
        else:
            sums.vectors += vectors
            sums.lengths += lengths

    def _leave_out(self, name: str, because: str) -> None:
        if name not in self._left_out:
            self._left_out[name] = because
            names = [n for n, why in self._left_out.items() if why == because]
            if len(names) == 1:
                self._say(
                    f"The gradients of the keys of {name} are not watched, nor those of layers like it: {because}."
                )


class _Hook:
    """Something that holds a watch; a copy of the model inherits only an inert one."""

    def __init__(self, watch: KeyWatch | None = None) -> None:
        self.watch = watch

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return type(self)()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class _BeginForward(_Hook):
    def __call__(self, module: nn.Module, args: Any) -> None:
        if self.watch is not None:
            self.watch.begin_forward()


class _ShowKeys:
    """What is placed around the attention of one module."""

    def __init__(self, watch: KeyWatch, layer: str, name: str) -> None:
        self.watch, self.layer, self.name = watch, layer, name

    def __call__(self, attention: Attention, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.watch.show(attention, self.layer, self.name, module, *args, **kwargs)


class _Add:
    """A hook on keys: their gradient is added up, and goes on as it is."""

    def __init__(self, watch: KeyWatch, layer: str) -> None:
        self.watch, self.layer = watch, layer

    def __call__(self, grad: Tensor) -> None:
        self.watch.add(self.layer, grad)


class _AddInGraph(torch.autograd.Function):
    """``apply(key, watch, layer)``: the keys as they are. A compiler has it in its graph, where it has no hooks."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, watch: int, layer: str) -> Tensor:
        """The keys."""
        ctx.watch, ctx.layer = watch, layer
        return key.view_as(key)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Their gradient, seen."""
        return torch.ops.trimtab.add_key_gradient(grad, ctx.watch, ctx.layer), None, None


# It returns a copy, since what returns nothing would be left out of a graph as of no use.
@torch.library.custom_op("trimtab::add_key_gradient", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _add_key_gradient(grad: Tensor, watch: int, layer: str) -> Tensor:
    # A graph that was compiled under a monitor may outlive it.
    if (found := _active.get(watch)) is not None:
        found.add(layer, grad)
    return grad.clone()


@_add_key_gradient.register_fake
def _(grad: Tensor, watch: int, layer: str) -> Tensor:
    return torch.empty_like(grad)


def _is_given(module: nn.Module, attribute: str) -> bool:
    return getattr(module, attribute, None) is not None
