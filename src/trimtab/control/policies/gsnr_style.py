"""Signal to noise of a unit's gradient norm: recover where the norm is least steady."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from trimtab.control.policies.scored import ChoosingController, Observed, ScoredPolicy
from trimtab.control.policy import budget_in_units, budget_setting, is_real
from trimtab.errors import ConfigError

__all__ = ["GsnrStyle"]

_RANGE = (1e-150, 1e150)
"""Norms are brought into it, so that no square over- or underflows."""


@dataclass(frozen=True, slots=True)
class GsnrStyle(ScoredPolicy):
    """Recover the units whose gradient norm has the lowest signal-to-noise ratio, mean^2 / variance.

    The published gradient signal-to-noise ratio of a parameter is the squared mean of its gradient over the variance,
    both over single samples at fixed weights. Norms alone cannot give it. Mean m and variance s^2 here are exponential
    ones of the unit's *norm* over *steps*, with ``factor`` f (first norm as is, then d = n - m, m <- m + (1-f) d,
    s^2 <- f (s^2 + (1-f) d^2)), and the rank is s/m. This differs in three ways:

    - The norm of pure noise has a mean far from 0, and so a high ratio here where the published one is near 0. This
      one says how steady the size of a gradient is, not whether its direction agrees from sample to sample.
    - A step's gradient is the mean over a batch, which divides the samples' variance by the batch size.
    - The weights move between steps, and their drift counts as noise.

    A unit is ranked from its second observed norm on; one without any noise is not recovered.

    Args:
        max_active: The budget, as in ``Policy``.
        factor: Share of the old mean that stays at an update. 0 < factor < 1.
        scores: Settings of the GNMR scores that are recorded beside.

    Raises:
        ConfigError: when a setting is out of its range.

    Source: ours, after Liu et al. 2020 (arXiv:2001.07384), who define GSNR by per-sample gradients.

    Example:
        >>> controller = GsnrStyle(max_active=1).start(["steady", "noisy"])
        >>> for norms in ([9.0, 1.0], [9.1, 2.0]):
        ...     decision = controller.update(norms)
        >>> decision.active.tolist()
        [False, True]
    """

    kind: ClassVar[str] = "gsnr_style"

    max_active: int | float = 0.2
    factor: float = 0.95

    def __post_init__(self) -> None:
        ScoredPolicy.__post_init__(self)
        object.__setattr__(self, "max_active", budget_setting(self.max_active))
        if not is_real(self.factor) or not 0 < self.factor < 1:
            raise ConfigError("factor", self.factor, "it is a share above 0 and below 1.", "Set 0.95 for instance.")
        object.__setattr__(self, "factor", float(self.factor))

    def budget(self, num_recoverable: int) -> int:
        """The most units that may be active at once, of ``num_recoverable``."""
        return budget_in_units(self.max_active, num_recoverable)

    def start(
        self, units: int | Sequence[str], recoverable: Sequence[bool] | Sequence[str] | None = None
    ) -> GsnrStyleController:
        """Start a controller; see ``Policy.start``."""
        return GsnrStyleController(units, self, recoverable)


class GsnrStyleController(ChoosingController):
    """The controller of ``GsnrStyle``."""

    columns: ClassVar = {"count": 0.0, "mean": 0.0, "variance": 0.0}

    def rank(self, seen: Observed) -> NDArray[np.float64]:
        """Noise over signal, s/m; 0 until two norms were observed."""
        policy, memory = self.policy, self.memory
        assert isinstance(policy, GsnrStyle)
        norms = np.clip(seen.norms, *_RANGE)
        away = np.where(memory["count"] > 0, norms - memory["mean"], 0.0)
        mean = np.where(memory["count"] > 0, memory["mean"] + (1 - policy.factor) * away, norms)
        variance = policy.factor * (memory["variance"] + (1 - policy.factor) * away * away)
        memory["count"] = memory["count"] + seen.mask
        memory["mean"] = np.where(seen.mask, mean, memory["mean"])
        memory["variance"] = np.where(seen.mask, variance, memory["variance"])
        noise: NDArray[np.float64] = np.sqrt(memory["variance"]) / np.where(memory["mean"] > 0, memory["mean"], 1.0)
        return noise
