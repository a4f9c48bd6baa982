"""How much a gradient grows on its way to a unit: recover where errors would be amplified towards the input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from trimtab.control.arrays import LARGEST
from trimtab.control.policies.scored import ChoosingController, Observed, ScoredPolicy
from trimtab.control.policy import budget_in_units, budget_setting, is_real
from trimtab.errors import ConfigError

__all__ = ["JacobianProxy"]


@dataclass(frozen=True, slots=True)
class JacobianProxy(ScoredPolicy):
    """Recover the units with the largest gradient norm beside those of the units behind them.

    The ratio of unit b in a step is n[b] / sqrt(mean of n[j]^2 over the observed units j > b): those between it and
    the loss, through which its gradient has come. The rank is the exponential mean of the ratio with ``factor`` (first
    one as is); only units with a rank above 1 are recovered. The last observed unit of a step has no ratio in it.

    This is a proxy, and a rough one. What amplifies an error is the Jacobian of the layers between b and the loss, and
    its norm is not in these numbers: n[b] also holds the size of the unit's own input, it grows with the number of
    parameters, and the order of units is taken for the order of computation, which it is not within a block.

    Args:
        max_active: The budget, as in ``Policy``.
        factor: Share of the old mean that stays at an update. 0 <= factor < 1.
        scores: Settings of the GNMR scores that are recorded beside.

    Raises:
        ConfigError: when a setting is out of its range.

    Source: ours.

    Example:
        >>> JacobianProxy(max_active=1).start(["a", "b", "c"]).update([2.0, 9.0, 1.0]).active.tolist()
        [False, True, False]
    """

    kind: ClassVar[str] = "jacobian_proxy"

    max_active: int | float = 0.2
    factor: float = 0.9

    def __post_init__(self) -> None:
        ScoredPolicy.__post_init__(self)
        object.__setattr__(self, "max_active", budget_setting(self.max_active))
        if not is_real(self.factor) or not 0 <= self.factor < 1:
            allowed = "it is a share of at least 0 and below 1."
            raise ConfigError("factor", self.factor, allowed, "Set 0.9 for instance.")
        object.__setattr__(self, "factor", float(self.factor))

    def budget(self, num_recoverable: int) -> int:
        """The most units that may be active at once, of ``num_recoverable``."""
        return budget_in_units(self.max_active, num_recoverable)

    def start(
        self, units: int | Sequence[str], recoverable: Sequence[bool] | Sequence[str] | None = None
    ) -> JacobianProxyController:
        """Start a controller; see ``Policy.start``."""
        return JacobianProxyController(units, self, recoverable)


class JacobianProxyController(ChoosingController):
    """The controller of ``JacobianProxy``."""

    columns: ClassVar = {"count": 0.0, "mean": 0.0}

    def rank(self, seen: Observed) -> NDArray[np.float64]:
        """The mean ratio; 0 where it is 1 or less."""
        policy, memory = self.policy, self.memory
        assert isinstance(policy, JacobianProxy)
        ratio = ratios(seen.norms)
        known = ratio > 0
        mean = policy.factor * memory["mean"] + (1 - policy.factor) * ratio
        mean = np.where(memory["count"] > 0, mean, ratio)
        memory["count"] = memory["count"] + known
        memory["mean"] = np.where(known, mean, memory["mean"])
        return np.where(memory["mean"] > 1, memory["mean"], 0.0)


def ratios(norms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each norm over the root mean square of the observed ones after it; 0 where there is none.

    Example:
        >>> ratios(np.array([6.0, 0.0, 3.0, 1.0])).round(3).tolist()
        [2.683, 0.0, 3.0, 0.0]
    """
    scaled = norms / max(norms.max(initial=0.0), 5e-324)  # so that no square overflows

    def after(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.append(np.cumsum(values[::-1])[::-1][1:], 0.0)

    behind = np.sqrt(after(scaled * scaled) / np.maximum(after((norms > 0).astype(np.float64)), 1.0))
    known = (behind > 0) & (norms > 0)
    with np.errstate(over="ignore"):
        ratio = np.minimum(scaled / np.where(known, behind, 1.0), LARGEST)
    return np.where(known, ratio, 0.0)
