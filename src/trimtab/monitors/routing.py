"""What a router's weight, logits and choices say about how tokens are spread over experts.

Pure functions of tensors, batched, and none waits for the device.
T: tokens, E: experts, K: experts chosen for a token, D: width of the model.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from trimtab.formats.sampling import spread_rows

__all__ = [
    "Scores",
    "busiest_share",
    "load_entropy",
    "load_of",
    "low_percentile",
    "max_logit",
    "router_conditioning",
    "router_similarity",
    "routing_entropy",
    "similarity_bound",
    "unused_experts",
]

Scores = Literal["softmax", "sigmoid"]
"""What a router makes of its logits before it chooses: shares that compete, or a score of each expert for itself."""

MOST_SAMPLED = 4096
"""Tokens of a micro-batch that a percentile looks at: it is then off by less than 0.4 percentage points in rank.

That is one standard error, sqrt(0.05 * 0.95 / 4096) = 0.34%, for tokens in no particular order. Our choice.
"""


def router_similarity(weight: Tensor) -> Tensor:
    """How alike the experts' rows are: the mean cosine over all pairs of two different rows.

    Computed from the mean of the unit rows, ``(E * |mean unit row|**2 - 1) / (E - 1)``, which takes no E x E products.
    A row of zeros has no direction: its cosine with every other counts as 0. One expert alone has no pair: NaN. A
    weight that is not finite gives NaN.

    Args:
        weight: A row an expert. Shape (..., E, D).

    Returns: Shape (...), in [-1 / (E - 1), 1], in float32 or wider.

    Source: Huang et al. 2026. That zero rows count as orthogonal is ours.

    Example:
        >>> router_similarity(torch.ones(4, 4)).item(), router_similarity(torch.eye(4)).item()
        (1.0, 0.0)
    """
    w = _scaled(weight)
    num_experts = w.shape[-2]
    if num_experts < 2:
        return torch.full_like(w[..., 0, 0], torch.nan)
    norms = torch.linalg.vector_norm(w, dim=-1, keepdim=True)
    units = torch.where(norms == 0, 0.0, w / norms)
    num_units = (norms != 0).sum((-2, -1))
    # |sum of unit rows|**2 is their number and twice the sum over all pairs.
    return (units.sum(-2).square().sum(-1) - num_units) / (num_experts * (num_experts - 1))


def router_conditioning(weight: Tensor) -> Tensor:
    """How far the experts' rows are from their mean, relative to it: ``max_i |w_i - mean| / |mean|``.

    0 when all rows are the same; infinite when they cancel; NaN when all are zero, or one is not finite. Below 1 it
    bounds how different two rows can be, see ``similarity_bound``.

    Args:
        weight: A row an expert. Shape (..., E, D).

    Returns: Shape (...), 0 or more, in float32 or wider.

    Source: Huang et al. 2026.

    Example:
        >>> router_conditioning(torch.tensor([[1.0, 0.5], [1.0, -0.5]])).item()
        0.5
    """
    w = _scaled(weight)
    mean = w.mean(-2)
    deviation = torch.linalg.vector_norm(w - mean.unsqueeze(-2), dim=-1).amax(-1)
    return deviation / torch.linalg.vector_norm(mean, dim=-1)


def similarity_bound(conditioning: Tensor) -> Tensor:
    """The least cosine that any two rows of a router with this conditioning can have.

    A row within ``eps |m|`` of the mean ``m`` lies in a ball that is seen from the origin under the half-angle
    ``arcsin(eps)``, if eps < 1. Two rows are then at most ``2 arcsin(eps)`` apart, and the cosine of that is
    ``1 - 2 eps**2``. It holds for the mean cosine, ``router_similarity``, all the more. From eps = 1 on the ball holds
    the origin, and a row may point anywhere: -1.

    Args:
        conditioning: As ``router_conditioning`` gives it.

    Returns: The shape of ``conditioning``, in [-1, 1].

    Source: That a small conditioning forces a high similarity is Huang et al. 2026; the constant is derived here.

    Example:
        >>> weight = torch.tensor([[1.0, 0.3], [1.0, -0.3], [1.1, 0.0]])
        >>> bool(router_similarity(weight) >= similarity_bound(router_conditioning(weight)))
        True
    """
    return torch.where(conditioning >= 1, -1.0, 1 - 2 * conditioning.square())


def routing_entropy(logits: Tensor, scores: Scores = "softmax") -> Tensor:
    """How undecided the router is about each token: the entropy of its scores over all experts, in units of log E.

    Of a router that scores by softmax, this is the entropy of the softmax over *all* logits, whatever is chosen
    afterwards. One that scores each expert by a sigmoid has no such distribution; taken is that of the sigmoids divided
    by their sum, of which the weights of the chosen experts are a part. It is 1 for equal logits too, but differs
    otherwise: experts whose sigmoids are saturated count as equal.

    A token with a logit that is NaN or +inf has entropy NaN; an expert at -inf takes no part. One expert: NaN.

    Args:
        logits: Shape (..., E).
        scores: What the router makes of them.

    Returns: Shape (...), in [0, 1], in float32 or wider.

    Source: Huang et al. 2026. What is reported for sigmoids is ours.

    Example:
        >>> routing_entropy(torch.tensor([[0.0, 0.0], [9.0, -9.0]])).round(decimals=3).tolist()
        [1.0, 0.0]
    """
    x = _wide(logits)
    # The softmax of log-sigmoids is the sigmoids over their sum, also where all of them underflow.
    p = torch.softmax(F.logsigmoid(x) if scores == "sigmoid" else x, -1)
    return torch.special.entr(p).sum(-1) / math.log(x.shape[-1]) if x.shape[-1] > 1 else p[..., 0] * torch.nan


def max_logit(logits: Tensor, valid: Tensor | None = None) -> Tensor:
    """The greatest logit of all tokens, 0-dimensional; NaN if one of them is NaN, -inf if no token counts.

    Args:
        logits: Shape (T, E).
        valid: Which tokens count. Shape (T,), bool; None = all.
    """
    x = _wide(logits)
    if not x.shape[0]:
        return x.new_full((), -torch.inf)
    return (x if valid is None else torch.where(valid.unsqueeze(-1), x, -torch.inf)).amax()


def low_percentile(values: Tensor, valid: Tensor | None = None, share: float = 0.05) -> Tensor:
    """The percentile at ``share`` of the values that count, interpolated as NumPy does.

    Of more than ``MOST_SAMPLED`` values some are looked at, so that the sort stays small: spread over all, in step with
    no length of a sequence. NaN if one of these is NaN, or none counts.

    Args:
        values: Shape (T,).
        valid: Which of them count. Shape (T,), bool; None = all.
        share: In [0, 1].

    Returns: 0-dimensional.

    Example:
        >>> low_percentile(torch.arange(101.0)).item()
        5.0
    """
    if not values.shape[0]:
        return values.new_full((), torch.nan)
    rows = spread_rows(values.shape[0], MOST_SAMPLED, values.device)
    if rows is not None:
        values, valid = values[rows], None if valid is None else valid[rows]
    if valid is None:
        valid = torch.ones_like(values, dtype=torch.bool)
    # torch.nanquantile would do, but looks at its arguments on the host.
    ordered = torch.where(valid, values, torch.inf).sort().values
    last = valid.sum() - 1
    rank = share * last.clamp(min=0)
    low = rank.long()
    high = torch.minimum(low + 1, last.clamp(min=0))
    # Gathered, and not indexed with a tensor: that would wait for its value.
    below, above = ordered.gather(0, low.view(1))[0], ordered.gather(0, high.view(1))[0]
    found = torch.lerp(below, above, (rank - low).to(below.dtype))
    hidden = torch.where(valid, values, 0.0).isnan().any()
    return torch.where((last < 0) | hidden, torch.nan, found)


def load_of(chosen: Tensor, num_experts: int, valid: Tensor | None = None) -> Tensor:
    """How many tokens each expert was chosen for.

    An index that names no expert counts nowhere: some implementations mark a dropped token by one.

    Args:
        chosen: Indices of experts. Shape (T, K), integers.
        num_experts: E.
        valid: Which tokens count. Shape (T,), bool; None = all.

    Returns: Shape (E,), int64.

    Example:
        >>> load_of(torch.tensor([[0, 2], [2, 3]]), 3).tolist()
        [1, 0, 2]
    """
    named = (chosen >= 0) & (chosen < num_experts)
    if valid is not None:
        named = named & valid.unsqueeze(-1)
    # One place more takes what does not count; torch.bincount would wait for the greatest index.
    places = torch.where(named, chosen, num_experts).flatten().long()
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=chosen.device)
    return counts.index_add(0, places, torch.ones_like(places))[:num_experts]


def load_entropy(load: Tensor) -> Tensor:
    """How evenly tokens are spread over the experts: the entropy of their shares, in units of log E.

    Args:
        load: As ``load_of`` gives it. Shape (..., E).

    Returns: Shape (...), in [0, 1]; NaN where there is no token, and for one expert.

    Example:
        >>> load_entropy(torch.tensor([[5, 5], [10, 0]])).tolist()
        [1.0, 0.0]
    """
    shares = load / load.sum(-1, keepdim=True)
    entropy = torch.special.entr(shares).sum(-1)
    return entropy / math.log(load.shape[-1]) if load.shape[-1] > 1 else entropy * torch.nan


def busiest_share(load: Tensor) -> Tensor:
    """The share of the busiest expert in all choices; 1 / E when even, 1 when one takes all, NaN without a token.

    Args:
        load: As ``load_of`` gives it. Shape (..., E).
    """
    return load.amax(-1) / load.sum(-1)


def unused_experts(load: Tensor) -> Tensor:
    """The number of experts that no token chose, as a float; NaN without a token.

    Args:
        load: As ``load_of`` gives it. Shape (..., E).
    """
    num_unused = (load == 0).sum(-1)
    return torch.where(load.sum(-1) == 0, torch.nan, num_unused.to(torch.float32))


def _wide(x: Tensor) -> Tensor:
    """``x``, detached, in float32 or wider."""
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def _scaled(weight: Tensor) -> Tensor:
    """``weight`` over its greatest entry: no square then over- or underflows, and neither measure depends on it."""
    w = _wide(weight)
    largest = w.abs().amax((-2, -1), keepdim=True)
    return torch.where(largest == 0, w, w / largest)
