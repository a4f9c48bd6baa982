"""How many bytes a model really keeps between forward and backward, measured and not computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.precision.units import Unit

__all__ = ["SavedBytes", "measure_saved_bytes", "plain_saved_bytes"]


@dataclass(slots=True)
class SavedBytes:
    """Bytes kept for backward, each storage counted once; parameters and buffers are not counted.

    Args:
        model: Bytes that the whole model keeps.
        units: Bytes that the watched units keep, within ``model``.
    """

    model: int = 0
    units: int = 0
    _seen: set[int] = field(default_factory=set, repr=False)
    _seen_by_units: set[int] = field(default_factory=set, repr=False)
    # Storages stay alive while they are counted: a freed one could come back at the same address.
    _alive: list[Tensor] = field(default_factory=list, repr=False)


@contextmanager
def measure_saved_bytes(model: nn.Module, units: Iterable[Unit]) -> Iterator[SavedBytes]:
    """Count what every forward inside the block saves for backward.

    Uses saved-tensor hooks, so it must not be combined with activation checkpointing inside the block, whose own hooks
    decide what is kept.

    Args:
        model: The model, converted or not.
        units: Units whose share is counted separately.

    Yields: The counts, final when the block ends.
    """
    counts = SavedBytes()
    own = {_storage(t) for t in (*model.parameters(), *model.buffers())}
    depth = 0

    def enter(*_: Any) -> None:
        nonlocal depth
        depth += 1

    def leave(*_: Any) -> None:
        nonlocal depth
        depth -= 1

    def pack(tensor: Tensor) -> Tensor:
        key = _storage(tensor)
        if key not in own and key:
            size = tensor.untyped_storage().nbytes()
            if key not in counts._seen:
                counts._seen.add(key)
                counts._alive.append(tensor)
                counts.model += size
            if depth and key not in counts._seen_by_units:
                counts._seen_by_units.add(key)
                counts.units += size
        # An output that its own node saves would hold that node, and the graph would never be freed.
        return tensor.detach()

    handles = []
    for unit in units:
        for module in unit.modules:
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield counts
    finally:
        for handle in handles:
            handle.remove()
        counts._alive.clear()


def plain_saved_bytes(model: nn.Module, units: Iterable[Unit], forward: Callable[[], Any]) -> SavedBytes:
    """What one call of ``forward`` (which must run ``model`` with gradients) keeps for backward."""
    with measure_saved_bytes(model, units) as counts:
        keep = forward()
    del keep
    return counts


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
