"""The L2 norm of each unit's gradient, read once, and clipping from the same norms.

Why per-parameter norms: ``torch.nn.utils.clip_grad_norm_`` takes the norm of the vector of per-parameter norms, in
parameter order. Norms of unit norms would differ in the last bit, and a watched run must be the unwatched run bit for
bit. For the same reason the norms of experts, which are rows of stacked parameters, come from a second pass over the
gradients of these alone: the norm of a parameter's row norms is not, in every bit, the norm of the parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._foreach_utils import _has_foreach_support

from trimtab.monitors.sharded import clip_through_torch, row_norms, rows_held_here, sharded_norms
from trimtab.precision.convertible import is_dtensor
from trimtab.precision.units import Unit

__all__ = ["GradientNorms", "NormReading", "norms_of"]


_NARROW = (torch.float16, torch.bfloat16)


@dataclass(slots=True)
class NormReading:
    """The norms of one step, still on the device.

    Args:
        indices: Which parameters have a gradient, in parameter order.
        norms: Their L2 norms, and behind them those of the rows of each stacked parameter among them that has watched
            experts. Shape (len(indices) + rows,), float32 or wider.
        plain: Whether all gradients are dense float32 on one device, so that the parameters' norms are exactly those
            that ``torch.nn.utils.clip_grad_norm_`` would compute.
    """

    indices: list[int]
    norms: Tensor
    plain: bool

    @property
    def of_parameters(self) -> Tensor:
        """The norms of whole parameters, shape (len(indices),)."""
        return self.norms[: len(self.indices)]


class GradientNorms:
    """Reads gradient norms of a model, per parameter, and assembles them per unit.

    Args:
        model: The model; its parameter order is the order of the norms.
        units: The units, in the order of the controller.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self.model = model
        self.units = tuple(units)
        self._num_grads = -1
        self._collect()

    def _collect(self) -> None:
        """Look the parameters up; again when a wrapper has replaced them since."""
        self.parameters = list(self.model.parameters())
        # What hangs where: comparing these costs far less than walking through the model.
        modules = list(self.model.modules())
        places = [(m._parameters, n, p) for m in modules for n, p in m._parameters.items()]
        self._holders = [register for register, _, _ in places]
        self._names = [name for _, name, _ in places]
        self._held = [p for _, _, p in places]
        self._registers = [register for m in modules for register in (m._parameters, m._modules)]
        self._register_sizes = [len(register) for register in self._registers]
        self._parents = [m._modules for m in modules if m._modules]
        self._children = [child for register in self._parents for child in register.values()]
        position = {id(p): i for i, p in enumerate(self.parameters)}
        self._owner = np.full(len(self.parameters), -1, dtype=np.int64)
        owner_of_rows: dict[int, np.ndarray] = {}
        for u, unit in enumerate(self.units):
            for p in unit.parameters():
                i = position.get(id(p))
                if i is None:
                    continue
                if unit.expert is None:
                    self._owner[i] = u
                else:
                    owner_of_rows.setdefault(i, np.full(p.shape[0], -1, dtype=np.int64))[unit.expert] = u
        self._stacked = sorted(owner_of_rows)
        self._row_owner = np.concatenate([np.zeros(0, np.int64), *(owner_of_rows[i] for i in self._stacked)])
        self._row_parameter = np.repeat(
            np.array(self._stacked, dtype=np.int64), [len(owner_of_rows[i]) for i in self._stacked]
        )

    def refresh(self) -> None:
        """Look the parameters up again if one was replaced: by FSDP2, or by loading with ``assign=True``."""
        # Without a Python loop, as this runs at every step.
        if not all(map(is_, map(dict.get, self._holders, self._names), self._held)):
            self._collect()

    def _has_grown(self) -> bool:
        """Whether modules or parameters were added, removed or replaced since they were looked up: adapters, say."""
        if list(map(len, self._registers)) != self._register_sizes:
            return True
        return not all(map(is_, chain.from_iterable(map(dict.values, self._parents)), self._children))

    @torch.no_grad()
    def read(self) -> NormReading:
        """The norm of every gradient there is now: one pass (two over the stacked ones), device work only.

        Gradients narrower than float32 are accumulated in float32; sharded ones over all their shards, with one
        collective; sparse ones over their coalesced values.
        """
        self.refresh()
        grads = [(i, p.grad) for i, p in enumerate(self.parameters) if p.grad is not None]
        if len(grads) != self._num_grads:
            # Experts come and go at every step, and then nothing is to be looked up.
            if self._has_grown():
                self._collect()
                grads = [(i, p.grad) for i, p in enumerate(self.parameters) if p.grad is not None]
            self._num_grads = len(grads)
        indices = [i for i, _ in grads]
        tensors = [g for _, g in grads]
        if not tensors:
            return NormReading(indices, torch.zeros(0), True)
        first = tensors[0]
        plain = all(
            g.dtype == torch.float32 and g.device == first.device and not g.is_sparse and not is_dtensor(g)
            for g in tensors
        )
        stacked = self._stacked_among(indices)
        return NormReading(indices, norms_of(tensors, plain, stacked), plain)

    def _stacked_among(self, indices: Sequence[int]) -> list[int]:
        """Where in ``indices`` the stacked parameters with watched experts are."""
        if not self._stacked:
            return []
        place = {p: k for k, p in enumerate(indices)}
        return [place[p] for p in self._stacked if p in place]

    def unit_norms(self, indices: Sequence[int], norms: np.ndarray) -> np.ndarray:
        """The norm of each unit: the root of the sum of squares of its parameters' norms, in float64.

        Args:
            indices: As in ``NormReading``.
            norms: The values of ``NormReading.norms`` on the host; whatever stands behind them is left alone.

        Returns: Shape (units,). 0 where no parameter of the unit has a gradient, and for an expert without tokens.
        """
        positions = np.asarray(indices, dtype=np.int64)
        owner = self._owner[positions]
        if self._stacked:
            has_grad = np.zeros(len(self.parameters), dtype=bool)
            has_grad[positions] = True
            owner = np.concatenate([owner, self._row_owner[has_grad[self._row_parameter]]])
        inside = owner >= 0
        owner, norms = owner[inside], norms[: len(owner)][inside].astype(np.float64)
        counts = np.bincount(owner, minlength=len(self.units))
        result = np.zeros(len(self.units))
        # A unit of one parameter keeps that norm exactly; a root of a square would round twice.
        single = counts[owner] == 1
        result[owner[single]] = norms[single]
        if not single.all():
            with np.errstate(over="ignore", invalid="ignore"):
                squares = np.bincount(owner[~single], weights=norms[~single] ** 2, minlength=len(self.units))
                result = np.where(counts > 1, np.sqrt(squares), result)
        return result

    def parameters_of(self, unit: int) -> list[int]:
        """Positions, in parameter order, of the parameters of unit number ``unit``; stacked ones for an expert."""
        rows = self._row_parameter[self._row_owner == unit]
        return np.unique(np.concatenate([np.nonzero(self._owner == unit)[0], rows])).tolist()

    def stop(self) -> None:
        """Leave nothing on the model; nothing is there."""

    @torch.no_grad()
    def damp(self, reading: NormReading, scale: np.ndarray) -> None:
        """Multiply the gradients of each unit by ``scale`` (0 removes them, whatever they hold) and renew their norms.

        Of a stacked parameter only the damped experts' rows change.

        Args:
            reading: This step's reading; its norms are updated in place to those of what is left.
            scale: Shape (units,), in [0, 1].
        """
        place = {p: k for k, p in enumerate(reading.indices)}
        first_row = self._first_rows(reading.indices)
        factors = _with_ones_for_none(scale)
        for p in np.nonzero(factors[self._owner] != 1.0)[0].tolist():
            if p in place:
                grad = self._grad(p)
                _scale(grad, float(factors[self._owner[p]]))
                reading.norms[place[p]] = norms_of([grad], reading.plain)[0]
        row_factors = factors[self._row_owner]
        for p in np.unique(self._row_parameter[row_factors != 1.0]).tolist():
            if p in place:
                grad = self._grad(p)
                of_rows = row_factors[self._row_parameter == p]
                # A row's place in what this rank holds; the rest are other ranks' to scale.
                held = rows_held_here(grad)
                local = grad.to_local() if is_dtensor(grad) else grad
                for row in np.nonzero(of_rows != 1.0)[0].tolist():
                    if row in held:
                        _scale(local[held[row]], float(of_rows[row]))
                renewed = norms_of([grad], reading.plain, [0])
                reading.norms[place[p]] = renewed[0]
                reading.norms[first_row[p] : first_row[p] + len(of_rows)] = renewed[1:]

    def _grad(self, position: int) -> Any:
        grad = self.parameters[position].grad
        assert grad is not None
        return grad

    def _first_rows(self, indices: Sequence[int]) -> dict[int, int]:
        """Where in a reading of ``indices`` the rows of each stacked parameter begin."""
        first, places = len(indices), {}
        for k in self._stacked_among(indices):
            places[indices[k]] = first
            first += int(np.count_nonzero(self._row_parameter == indices[k]))
        return places

    @torch.no_grad()
    def clip(self, reading: NormReading, max_norm: float) -> Tensor:
        """Clip all gradients to a total norm of ``max_norm`` exactly as ``torch.nn.utils.clip_grad_norm_`` does.

        Dense float32 gradients on one device reuse the norms already read, and sparse ones have to; anything else goes
        through torch itself.

        Returns: The total norm before clipping, a tensor on the device.
        """
        with_grad = [self.parameters[i] for i in reading.indices]
        sparse = any(p.grad is not None and p.grad.is_sparse for p in with_grad)
        if not reading.plain and not sparse:
            return clip_through_torch(with_grad, max_norm)
        total = self.total(reading)
        if sparse:
            # torch has no norm of a sparse gradient, and refuses; its formula holds all the same.
            coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
            for grad in (p.grad for p in with_grad if p.grad is not None):
                grad.mul_(coefficient.to(grad.device))
        else:
            torch.nn.utils.clip_grads_with_norm_(with_grad, max_norm, total)
        return total

    @torch.no_grad()
    def total(self, reading: NormReading) -> Tensor:
        """The total norm, as torch takes it: the norm of the per-parameter norms."""
        return torch.linalg.vector_norm(reading.of_parameters) if len(reading.indices) else torch.zeros(())


def _with_ones_for_none(scale: np.ndarray) -> np.ndarray:
    """``scale``, and behind it a 1 for what belongs to no unit: its index is -1."""
    return np.append(scale, 1.0)


def _scale(grad: Tensor, factor: float) -> None:
    # 0 times NaN is NaN, so a failed gradient is replaced and not scaled.
    grad.zero_() if factor == 0.0 else grad.mul_(factor)


def norms_of(tensors: list[Tensor], plain: bool, stacked: Sequence[int] = ()) -> Tensor:
    """The norms of ``tensors`` in their order, then those of the rows of each that is ``stacked``.

    Args:
        tensors: Gradients, at least one.
        plain: Whether all of them are dense float32 on one device.
        stacked: Positions of those whose rows' norms are wanted too.

    Example:
        >>> norms_of([torch.tensor([[3.0, 4.0], [0.0, 12.0]])], plain=True, stacked=[0]).tolist()
        [13.0, 5.0, 12.0]
    """
    if not plain and any(is_dtensor(g) for g in tensors):
        return sharded_norms(tensors, stacked)
    norms = _stacked_norms(tensors, plain)
    if not stacked:
        return norms
    return torch.cat([norms, *(row_norms(tensors[k]).to(norms.device, norms.dtype) for k in stacked)])


def _stacked_norms(tensors: list[Tensor], plain: bool) -> Tensor:
    """The norms of ``tensors`` in their order; ``plain`` says that torch's own function takes them in one group."""
    first = tensors[0]
    if plain:
        # The same kernels, chosen by the same rule, as torch.nn.utils.get_total_norm: else a last bit may differ.
        if _has_foreach_support(tensors, first.device):
            return torch.stack(list(torch._foreach_norm(tensors, 2.0)))
        return torch.stack([torch.linalg.vector_norm(g, 2.0) for g in tensors])
    dense = [g.coalesce().values() if g.is_sparse else g for g in tensors]
    wide = [torch.linalg.vector_norm(g, 2.0, dtype=torch.float32 if g.dtype in _NARROW else None) for g in dense]
    dtype = torch.float64 if any(n.dtype == torch.float64 for n in wide) else torch.float32
    return torch.stack([n.to(first.device, dtype) for n in wide])
