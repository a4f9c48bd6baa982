"""Outlier channels on purpose: quantizers of a unit see ``x * s`` and ``W / s`` in place of ``x`` and ``W``.

    forward          Y  = Q(X s) Q(W / s)' + b
    input gradient   dX = Q(dY) Q(W / s) s
    weight gradient  dW = Q(dY)' Q(X s) / s

s is a factor on some input channels and 1 on the others. Without quantizers each line is the plain layer's own, so
whatever changes is what the grids lose. Shapes: x (..., in), weight (out, in), s (in,).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["ChannelFactors", "SuffersOutliers"]


class ChannelFactors:
    """The factors of one unit's input channels.

    Args:
        channels: Which input channels have the factor, by their number: the layers of a unit may differ in width.
        factor: What these are multiplied by; finite and above 0.

    Example:
        >>> factors = ChannelFactors(lambda size: [1], 8.0)
        >>> factors.enlarged(torch.ones(3)).tolist(), factors.reduced(torch.ones(1, 3)).tolist()
        ([1.0, 8.0, 1.0], [[1.0, 0.125, 1.0]])
    """

    def __init__(self, channels: Callable[[int], Sequence[int]], factor: float) -> None:
        self.channels = channels
        self.factor = float(factor)
        self._made: dict[tuple[int, torch.device, torch.dtype], Tensor] = {}

    def enlarged(self, x: Tensor) -> Tensor:
        """``x * s``, rounded once to ``x``'s dtype."""
        work = _work(x)
        return (x.detach().to(work) * self._factors(x, work)).to(x.dtype)

    def reduced(self, x: Tensor) -> Tensor:
        """``x / s``, rounded once to ``x``'s dtype."""
        work = _work(x)
        return (x.detach().to(work) / self._factors(x, work)).to(x.dtype)

    def _factors(self, x: Tensor, work: torch.dtype) -> Tensor:
        key = (x.shape[-1], x.device, work)
        if key not in self._made:
            factors = torch.ones(key[0], dtype=work)
            factors[list(self.channels(key[0]))] = self.factor
            self._made[key] = factors.to(x.device)
        return self._made[key]


class SuffersOutliers:
    """For a conversion whose quantizers ask ``outliers_of`` what they are to see; nothing is asked of a compiler."""

    _outliers: dict[int, ChannelFactors] | None = None

    def grow_outliers(self, index: int, channels: Callable[[int], Sequence[int]], factor: float) -> None:
        """Have the quantizers of unit ``index`` see outlier channels on both paths, until the step ends.

        Forwards and backwards look it up as they run, compiled ones too: have both of a step begin after this.

        Args:
            index: The unit.
            channels: Which input channels, by their number.
            factor: How many times larger they are; finite and above 0.
        """
        self._outliers = {**(self._outliers or {}), index: ChannelFactors(channels, factor)}

    def heal(self) -> None:
        """End all outlier channels."""
        self._outliers = None

    def outliers_of(self, index: int | None) -> ChannelFactors | None:
        """What unit ``index`` suffers now; None is nothing."""
        return None if self._outliers is None or index is None else self._outliers.get(index)


def _work(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
