"""What a path has made of each frozen weight, kept beside the weight for as long as it stays the same."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from trimtab.formats.sampling import spread_rows

__all__ = ["WeightCopies"]

T = TypeVar("T")

_NUM_ENTRIES = 64


class WeightCopies(Generic[T]):
    """What a path has made of each frozen weight, and makes anew when the weight is another one.

    At each look it is compared by its identity, its place in memory, autograd's count of its changes and the adapters
    that are merged into it, by their names. Another change through ``.data`` is not counted, so at the first look of a
    step some entries of all the weights are compared too, together. That waits for the device, once, at a time when the
    decision on the step has just done so.

    Args:
        model: The model; of what FSDP2 shards in it, nothing is kept.
        make: What to make of a layer's weight; called without gradients.
    """

    def __init__(self, model: nn.Module, make: Callable[[nn.Module], T]) -> None:
        self._model = weakref.ref(model)
        self._make = make
        # The adapters around a layer, as peft has them, from the outermost.
        self._around: dict[int, list[weakref.ref[Any]]] = {}
        for module in model.modules():
            base: Any = getattr(module, "get_base_layer", None)
            if hasattr(module, "merged_adapters") and callable(base):
                self._around.setdefault(id(base()), []).append(weakref.ref(module))
        self._kept: dict[int, _Kept[T]] = {}
        self._sharded: set[int] = set()
        self._is_due = False

    def begin_step(self) -> None:
        """A step begins, before which a weight may have changed."""
        self._is_due = True

    def clear(self) -> None:
        """Let go of everything."""
        self._kept.clear()

    @torch.no_grad()
    def make(self, layer: nn.Module) -> T:
        """A new copy of the weight of ``layer``, which is not kept."""
        return self._make(layer)

    def get(self, layer: nn.Module) -> T:
        """The copy of the weight of ``layer``."""
        key = id(layer)
        if key in self._sharded:
            return self.make(layer)
        if self._is_due:
            self._is_due = False
            self._drop_changed()
        weight: Any = layer.weight
        kept = self._kept.get(key)
        merged = [tuple(a.merged_adapters) for ref in self._around.get(key, ()) if (a := ref()) is not None]
        if kept is not None and kept.is_of(weight, merged):
            return kept.copy
        # The old copy goes before the new one is made: there may not be room for both.
        kept = None
        self._kept.pop(key, None)
        copy = self.make(layer)
        # FSDP2 may have come after conversion. Its whole weights are made anew, so the search is rare.
        if _is_under_fsdp(self._model(), layer):
            self._sharded.add(key)
        else:
            self._kept[key] = _Kept(weight, merged, copy)
        return copy

    @torch.no_grad()
    def _drop_changed(self) -> None:
        """Let go of the copies of weights whose entries have changed; one comparison and one reading for them all."""
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor, Tensor]]] = {}
        for key, kept in self._kept.items():
            weight = kept.weight()
            # Of any other weight ``get`` sees that it is another one, without its entries.
            if weight is not None and weight.numel() and kept.token == _token(weight):
                group = groups.setdefault((weight.device, weight.dtype), [])
                group.append((key, kept.sample, kept.sample_of(weight)))
        for group in groups.values():
            keys, before, now = zip(*group, strict=True)
            is_changed = (torch.stack(before) != torch.stack(now)).any(dim=1)
            for key, changed in zip(keys, is_changed.tolist(), strict=True):
                if changed:
                    del self._kept[key]


class _Kept(Generic[T]):
    """One copy, and what the weight was like that it was made of."""

    __slots__ = ("copy", "entries", "merged", "sample", "token", "weight")

    def __init__(self, weight: Tensor, merged: list[tuple[str, ...]], copy: T) -> None:
        self.weight = weakref.ref(weight)
        self.merged = merged
        self.token = _token(weight)
        self.entries = _some_entries(weight)
        self.sample = self.sample_of(weight)
        self.copy = copy

    def is_of(self, weight: Tensor, merged: list[tuple[str, ...]]) -> bool:
        return self.weight() is weight and self.token == _token(weight) and self.merged == merged

    def sample_of(self, weight: Tensor) -> Tensor:
        return weight.detach().reshape(-1).index_select(0, self.entries)


def _token(weight: Tensor) -> tuple[Any, ...]:
    version = -1 if weight.is_inference() else weight._version
    return weight.data_ptr(), version, weight.dtype, weight.device, weight.shape


def _some_entries(weight: Tensor) -> Tensor:
    """The numbers of as many entries of each weight, so that those of all make one matrix; none of an empty weight."""
    # What changes a weight usually changes every entry. Spread like this they keep to no row and to no column.
    entries = spread_rows(weight.numel(), _NUM_ENTRIES, weight.device)
    if entries is not None:
        return entries
    some = min(_NUM_ENTRIES, _NUM_ENTRIES * weight.numel())
    return torch.arange(some, device=weight.device) % max(weight.numel(), 1)


def _is_under_fsdp(model: nn.Module | None, layer: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or model is None:
        return False
    tops = [m for m in model.modules() if isinstance(m, fsdp.FSDPModule)]
    return any(m is layer for top in tops for m in top.modules())
