"""Singular values of what an update does to a head's query-key product, and what they say, without forming the product.

With W the weights of the older snapshot and dW the update, the product W_q W_k' of a head changes by D1 = D2 + D3:

    D2 = dWq Wk' + Wq dWk'      first order
    D3 = dWq dWk'               second order

D2 = [dWq, Wq] [Wk, dWk]' has rank 2 d_head at most, so its singular values are those of R_q R_k', a small core, where
R_q and R_k come from the QR decompositions of the two blocks. QR keeps each column to its own precision. A Gram matrix
of the same block does not: there the update drowns in the rounding of the weights beside it.

Shapes: d_model, the width of the model; d_head, that of a head; N singular values. Leading dimensions are heads and
layers.

Source: Huang et al. 2026, Mechanism-Driven Monitors; the QR cores are ours.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["effective_rank", "frobenius_norm", "qk_increment", "spectral_entropy", "stable_rank", "wide_product"]


def qk_increment(wq_old: Tensor, wk_old: Tensor, wq_new: Tensor, wk_new: Tensor) -> dict[str, Tensor]:
    """The singular values of one head's increments, for as many heads and layers at once as there are.

    As accurate as a dense decomposition of the whole increments in the same dtype, for updates of any size. A head
    whose weights are not finite has NaN for values, and the heads beside it are left alone.

    Args:
        wq_old: Query weights of the older snapshot, float32 or float64. Shape (..., d_model, d_head).
        wk_old: Its key weights. Leading dimensions broadcast, so that query heads can share a key head: (groups, heads
            in a group, d_model, d_head) beside (groups, 1, d_model, d_head).
        wq_new: Query weights of the newer snapshot.
        wk_new: Its key weights.

    Returns: By "d1", "d2", "d3", "dwq", "dwk", in descending order. There are as many as the greatest rank that the
        matrix can have: min(2 d_head, d_model) of D1 and D2, min(d_head, d_model) of the others. Shape (..., N).

    Example:
        >>> old, new = torch.randn(2, 2, 3, 16, 4, dtype=torch.float64).unbind()
        >>> values = qk_increment(old[0], old[1], new[0], new[1])
        >>> {name: tuple(v.shape) for name, v in values.items()}
        {'d1': (3, 8), 'd2': (3, 8), 'd3': (3, 4), 'dwq': (3, 4), 'dwk': (3, 4)}
        >>> dense = new[0] @ new[1].mT - old[0] @ old[1].mT
        >>> torch.allclose(values["d1"], torch.linalg.svdvals(dense)[..., :8])
        True
    """
    heads, width = torch.broadcast_shapes(wq_old.shape[:-2], wk_old.shape[:-2]), wq_old.shape[-1]
    dwq, dwk = wq_new - wq_old, wk_new - wk_old
    # The update first: its triangle is then the leading block of R, which is all that D3, dWq and dWk need.
    r_q = torch.linalg.qr(torch.cat([dwq, wq_old], -1), mode="r").R
    r_k = torch.linalg.qr(torch.cat([dwk, wk_old], -1), mode="r").R
    update_q, rest_q = r_q[..., :width], r_q[..., width:]
    update_k, rest_k = r_k[..., :width], r_k[..., width:]
    first = wide_product(update_q, rest_k.mT) + wide_product(rest_q, update_k.mT)
    triangle_q, triangle_k = update_q[..., :width, :], update_k[..., :width, :]
    values = {
        "d1": _singular_values(first + wide_product(update_q, update_k.mT)),
        "d2": _singular_values(first),
        "d3": _singular_values(wide_product(triangle_q, triangle_k.mT)),
        "dwq": _singular_values(triangle_q),
        "dwk": _singular_values(triangle_k),
    }
    return {name: v.expand(*heads, v.shape[-1]) for name, v in values.items()}


def spectral_entropy(singular_values: Tensor, power: float = 2.0) -> Tensor:
    """How evenly a matrix spreads over its directions: 1 = over all alike, 0 = over a single one.

    H = -sum p log p / log N, p = sigma^power / sum sigma^power.
    NaN where the matrix is zero, which spreads over nothing, and where a value is not finite; 0 where N is 1.

    Args:
        singular_values: All that the matrix can have, zeros too: N normalises H. Shape (..., N).
        power: 2 weighs directions by their share of the squared norm.

    Returns: Shape (...), in the dtype of ``singular_values``.

    Example:
        >>> spectral_entropy(torch.tensor([[1.0, 1.0, 1.0, 1.0], [3.0, 0.0, 0.0, 0.0], [2.0, 2.0, 0.0, 0.0]])).tolist()
        [1.0, 0.0, 0.5]
    """
    # A single direction has nothing to spread over: 0 / 1, not 0 / 0.
    most = math.log(singular_values.shape[-1]) or 1.0
    return (_entropy(singular_values, power) / most).to(singular_values.dtype)


def effective_rank(singular_values: Tensor) -> Tensor:
    """Over how many directions a matrix spreads: exp of its spectral entropy before that is normalised. In [1, N].

    NaN where the matrix is zero or a value is not finite.

    Args:
        singular_values: Shape (..., N).

    Source: Roy & Vetterli 2007, but for squared singular values, as in ``spectral_entropy``.

    Example:
        >>> round(float(effective_rank(torch.tensor([2.0, 2.0, 0.0]))), 6)
        2.0
    """
    return _entropy(singular_values, 2.0).exp().to(singular_values.dtype)


def stable_rank(singular_values: Tensor) -> Tensor:
    """The squared Frobenius norm over the squared spectral norm. In [1, N]; never above the rank.

    NaN where the matrix is zero or a value is not finite.

    Args:
        singular_values: Shape (..., N).

    Example:
        >>> float(stable_rank(torch.tensor([2.0, 1.0, 0.0])))
        1.25
    """
    return _relative(singular_values)[0].square().sum(-1).to(singular_values.dtype)


def frobenius_norm(singular_values: Tensor) -> Tensor:
    """The Frobenius norm; 0 where the matrix is zero, NaN where a value is not finite.

    Args:
        singular_values: Shape (..., N).

    Example:
        >>> float(frobenius_norm(torch.tensor([4.0, 3.0])))
        5.0
    """
    relative, largest = _relative(singular_values)
    norm = largest * relative.square().sum(-1).sqrt()
    return torch.where(largest == 0, 0.0, norm).to(singular_values.dtype)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in the dtype of ``a``, but multiplied in float64 where float32 may mean TF32.

    With ``torch.set_float32_matmul_precision("high")``, a setting of many training scripts, a CUDA device multiplies
    float32 with ten bits of mantissa, which is too few for the difference of two snapshots.
    """
    if a.device.type == "cuda" and a.dtype == torch.float32:
        return (a.double() @ b.double()).float()
    return a @ b


def _singular_values(matrices: Tensor) -> Tensor:
    """Their singular values, NaN for a matrix with an element that is not finite: torch raises for the whole batch."""
    finite = matrices.isfinite().all(-1).all(-1)[..., None]
    values = torch.linalg.svdvals(torch.where(finite[..., None], matrices, 0.0))
    return torch.where(finite, values, torch.nan)


def _relative(singular_values: Tensor) -> tuple[Tensor, Tensor]:
    """The values over the largest, and the largest; squares of the values themselves could leave float32's range."""
    # What is summed is small beside 1 and as many as hundreds; Apple's devices have no float64.
    wide = singular_values if singular_values.device.type == "mps" else singular_values.double()
    largest = wide.amax(-1)
    return wide / largest[..., None], largest


def _entropy(singular_values: Tensor, power: float) -> Tensor:
    """The entropy of the values' shares, in nats."""
    weight = _relative(singular_values)[0].pow(power)
    share = weight / weight.sum(-1, keepdim=True)
    return torch.special.entr(share).sum(-1)
