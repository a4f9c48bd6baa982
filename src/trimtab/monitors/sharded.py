"""Norms of gradients that are spread over ranks: each rank's squares, summed with one collective a mesh dimension.

All ranks call in the same order with the same parameters, as they do in the backward that made the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.precision.convertible import is_dtensor

__all__ = ["clip_through_torch", "sharded_norms"]


def sharded_norms(tensors: list[Tensor]) -> Tensor:
    """The L2 norm of each tensor over all its shards, in their order; float32.

    Parameters sharded over the same dimensions of the same mesh share one all-reduce, so that FSDP2 costs one a step
    (and one more for each further way of sharding in the model).

    Args:
        tensors: DTensors and plain tensors; a plain one counts as the same on every rank.

    Returns: Shape (len(tensors),), equal on every rank.
    """
    squares: list[Tensor] = []
    groups: dict[tuple[Any, tuple[int, ...]], list[int]] = {}
    for k, given in enumerate(tensors):
        tensor: Any = given  # a DTensor, of which torch is imported without
        if not is_dtensor(tensor):
            squares.append(torch.linalg.vector_norm(tensor, 2.0, dtype=torch.float32).double().square())
            continue
        if any(p.is_partial() for p in tensor.placements):
            # Pending sums cannot be squared before they are added up.
            tensor = tensor.redistribute(placements=[_settled(p) for p in tensor.placements])
        local = tensor.to_local()
        # Squares in float64: the square of a float32 norm leaves float32's range long before the norm does.
        norm = torch.linalg.vector_norm(local, 2.0, dtype=torch.float32) if local.numel() else local.new_zeros(())
        squares.append(norm.double().square())
        # Not is_shard(): what FSDP2 makes of a dimension that tensor parallelism has sharded already is no Shard to it.
        dims = tuple(d for d, p in enumerate(tensor.placements) if not p.is_replicate())
        if dims:
            # Each fully_shard makes a mesh object of its own; equal ones are one mesh.
            groups.setdefault((tensor.device_mesh, dims), []).append(k)
    for (mesh, dims), members in groups.items():
        # Gathered and put back by position on the host: an index tensor would be a copy that waits for the device.
        part = torch.stack([squares[k] for k in members])
        for dim in dims:
            torch.distributed.all_reduce(part, group=mesh.get_group(dim))
        for k, total in zip(members, part.unbind(), strict=True):
            squares[k] = total
    return torch.stack([s.to(squares[0].device) for s in squares]).sqrt().float()


def _settled(placement: Any) -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate() if placement.is_partial() else placement


def clip_through_torch(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """Clip with ``torch.nn.utils``, one mesh at a time where gradients live on several: torch cannot span them.

    Args:
        parameters: Parameters that have a gradient.
        max_norm: Largest total norm; as in torch, an infinite one leaves finite gradients alone.

    Returns: The total norm before clipping, the same on every rank.
    """
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for p in parameters:
        grad: Any = p.grad
        by_mesh.setdefault(grad.device_mesh if is_dtensor(grad) else None, []).append(p)
    norms: list[Any] = [
        torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in by_mesh.values()
    ]
    norms = [n.full_tensor() if is_dtensor(n) else n for n in norms]
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack([n.to(norms[0]) for n in norms]))
    for group in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total
