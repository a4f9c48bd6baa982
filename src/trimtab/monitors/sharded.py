"""Norms of gradients that are spread over ranks: each rank's squares, summed with one collective a mesh dimension.

All ranks call in the same order with the same parameters, as they do in the backward that made the gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.precision.convertible import is_dtensor

__all__ = ["clip_through_torch", "row_norms", "rows_held_here", "sharded_norms"]


def row_norms(tensor: Tensor) -> Tensor:
    """The L2 norm of each row of a plain tensor, over all dimensions but the first; accumulated in float32 or wider.

    Example:
        >>> row_norms(torch.tensor([[3.0, 4.0], [0.0, 0.0]])).tolist()
        [5.0, 0.0]
    """
    if not tensor.numel():
        return torch.zeros(len(tensor), device=tensor.device)
    wide = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None
    # Without dimensions to go over, torch goes over all.
    tensor = tensor if tensor.dim() > 1 else tensor.unsqueeze(1)
    return torch.linalg.vector_norm(tensor, 2.0, dim=tuple(range(1, tensor.dim())), dtype=wide)


def sharded_norms(tensors: list[Tensor], stacked: Sequence[int] = ()) -> Tensor:
    """The L2 norm of each tensor over all its shards, in their order; float32. Then those of the rows of stacked ones.

    Parameters sharded over the same dimensions of the same mesh share one all-reduce, so that FSDP2 costs one a step
    (and one more for each further way of sharding in the model). Rows that lie interleaved over the ranks, as FSDP2
    leaves those that expert parallelism has sharded already, are put in order by torch, which costs one gather more.

    Args:
        tensors: DTensors and plain tensors; a plain one counts as the same on every rank.
        stacked: Positions of those whose rows' norms are wanted too.

    Returns: Shape (len(tensors) + rows of the stacked ones,), equal on every rank.
    """
    squares: list[Tensor] = []
    rows: dict[int, Tensor] = {}
    groups: dict[tuple[Any, tuple[int, ...]], list[int]] = {}
    interleaved: dict[tuple[Any, tuple[Any, ...], torch.Size], list[int]] = {}
    wanted = frozenset(stacked)
    for k, given in enumerate(tensors):
        tensor: Any = given  # a DTensor, of which torch is imported without
        if not is_dtensor(tensor):
            squares.append(torch.linalg.vector_norm(tensor, 2.0, dtype=torch.float32).double().square())
            if k in wanted:
                rows[k] = row_norms(tensor).double().square()
            continue
        if any(p.is_partial() for p in tensor.placements):
            # Pending sums cannot be squared before they are added up.
            tensor = tensor.redistribute(placements=[_settled(p) for p in tensor.placements])
        local = tensor.to_local()
        # Squares in float64: the square of a float32 norm leaves float32's range long before the norm does.
        norm = torch.linalg.vector_norm(local, 2.0, dtype=torch.float32) if local.numel() else local.new_zeros(())
        squares.append(norm.double().square())
        if k in wanted:
            rows[k] = row_norms(local).double().square()
            if _rows_are_interleaved(tensor):
                interleaved.setdefault((tensor.device_mesh, tensor.placements, tensor.shape[:1]), []).append(k)
            else:
                held = _contiguous_rows(tensor)
                rows[k] = torch.nn.functional.pad(rows[k], (held.start, len(tensor) - held.stop))
        # Not is_shard(): what FSDP2 makes of a dimension that tensor parallelism has sharded already is no Shard to it.
        dims = tuple(d for d, p in enumerate(tensor.placements) if not p.is_replicate())
        if dims:
            # Each fully_shard makes a mesh object of its own; equal ones are one mesh.
            groups.setdefault((tensor.device_mesh, dims), []).append(k)
    for (mesh, placements, size), members in interleaved.items():
        together = _in_order(torch.stack([rows[k] for k in members], 1), mesh, placements, size[0])
        rows.update(zip(members, together.unbind(1), strict=True))
    is_in_order = {k for members in interleaved.values() for k in members}
    for (mesh, dims), members in groups.items():
        # Gathered and put back by position on the host: an index tensor would be a copy that waits for the device.
        parts = [squares[k].unsqueeze(0) for k in members]
        of_rows = [k for k in members if k in rows and k not in is_in_order]
        part = torch.cat([*parts, *(rows[k] for k in of_rows)])
        for dim in dims:
            torch.distributed.all_reduce(part, group=mesh.get_group(dim))
        totals = part.split([1] * len(members) + [len(rows[k]) for k in of_rows])
        squares_of, rows_of = totals[: len(members)], totals[len(members) :]
        for k, total in zip(members, squares_of, strict=True):
            squares[k] = total.squeeze(0)
        rows.update(zip(of_rows, rows_of, strict=True))
    device = squares[0].device
    found = [torch.stack([s.to(device) for s in squares]), *(rows[k].to(device) for k in stacked)]
    return torch.cat(found).sqrt().float()


def rows_held_here(tensor: Any) -> Mapping[int, int]:
    """Which rows of a tensor this rank holds, in full or in part, and where in its local tensor each is.

    All ranks call it with the same tensors: to know where interleaved rows are, they have to ask each other.

    Args:
        tensor: A DTensor or a plain tensor.
    """
    if not is_dtensor(tensor):
        return {row: row for row in range(len(tensor))}
    if not _rows_are_interleaved(tensor):
        return {row: local for local, row in enumerate(_contiguous_rows(tensor))}
    mesh, local = tensor.device_mesh, tensor.to_local()
    # Each row is marked with the rank that holds it and its place there; torch then puts the marks in order.
    rank, size = torch.distributed.get_rank(), len(tensor)
    places = [p if _dim(p) == 0 else _replicate() for p in tensor.placements]
    marks = torch.arange(len(local), dtype=torch.float64, device=local.device) + rank * size
    mine = _in_order(marks.unsqueeze(1), mesh, places, size).squeeze(1).long() - rank * size
    return {row: place for row, place in enumerate(mine.tolist()) if 0 <= place < len(local)}


def _in_order(local: Tensor, mesh: Any, placements: Sequence[Any], size: int) -> Tensor:
    """The rows of all ranks in the order of the whole tensor, summed where several ranks hold a part of each.

    Args:
        local: This rank's rows, shape (rows, columns).
        mesh: The mesh of the tensor that they belong to.
        placements: Its placements; what shards another dimension than the first leaves sums to be added up.
        size: Number of its rows.
    """
    from torch.distributed.tensor import DTensor, Partial

    sums = [p if _dim(p) == 0 or p.is_replicate() else Partial() for p in placements]
    shape = torch.Size([size, local.shape[1]])
    # With the size: what torch would derive from a local shard is wrong where ranks hold unequally many.
    whole = DTensor.from_local(local, mesh, sums, run_check=False, shape=shape, stride=(local.shape[1], 1))
    return whole.full_tensor()


def _contiguous_rows(tensor: Any) -> range:
    """The rows of a DTensor that this rank holds: dimension by dimension of the mesh, split as ``torch.chunk`` does."""
    rows = range(tensor.shape[0])
    for dim, placement in enumerate(tensor.placements):
        if _dim(placement) == 0:
            chunk = -(-len(rows) // tensor.device_mesh.size(dim))
            start = chunk * tensor.device_mesh.get_local_rank(dim)
            rows = rows[start : start + chunk]
    return rows


def _rows_are_interleaved(tensor: Any) -> bool:
    """Whether a rank's rows need not lie side by side: FSDP2 has sharded rows that were sharded before."""
    return any(_dim(p) == 0 and hasattr(p, "split_factor") for p in tensor.placements)


def _dim(placement: Any) -> int | None:
    """The dimension that a placement shards."""
    return getattr(placement, "dim", None)


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


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
