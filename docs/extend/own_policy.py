"""A policy of your own: recover the units whose norm has grown most since the step before."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from trimtab.control.policies.scored import ChoosingController, Observed, ScoredPolicy
from trimtab.control.policy import budget_in_units, budget_setting
from trimtab.testing import PolicyContract


@dataclass(frozen=True, slots=True)
class FastestGrowing(ScoredPolicy):
    """Settings. ``ScoredPolicy`` has ``to_dict`` and ``from_dict``, and the GNMR scores that are recorded beside."""

    kind: ClassVar[str] = "fastest_growing"

    max_active: int | float = 0.2

    def __post_init__(self) -> None:
        ScoredPolicy.__post_init__(self)
        object.__setattr__(self, "max_active", budget_setting(self.max_active))

    def budget(self, num_recoverable: int) -> int:
        """The most units that are ever active at once; it holds whatever the norms are."""
        return budget_in_units(self.max_active, num_recoverable)

    def start(
        self, units: int | Sequence[str], recoverable: Sequence[bool] | Sequence[str] | None = None
    ) -> "FastestGrowingController":
        """A fresh controller."""
        return FastestGrowingController(units, self, recoverable)


class FastestGrowingController(ChoosingController):
    """Takes the units of the greatest rank above 0. What ``columns`` names is saved and loaded with checkpoints."""

    columns: ClassVar = {"last": 0.0}

    def rank(self, seen: Observed) -> NDArray[np.float64]:
        """How many times the last observed norm; 0 where it has not grown, or is not observed in this step."""
        last = self.memory["last"]
        # Both are finite numbers of 0 or more; logarithms, as a quotient of extreme ones overflows.
        with np.errstate(divide="ignore", invalid="ignore"):
            growth = np.log(seen.norms) - np.log(last)
        self.memory["last"] = np.where(seen.mask, seen.norms, last)
        return np.where(seen.mask & (last > 0) & (growth > 0), growth, 0.0)


class TestFastestGrowing(PolicyContract):
    """The contract: the budget holds whatever the norms, the same norms give the same decisions, resumes are exact."""

    def policy(self) -> FastestGrowing:
        """Called often, so that each claim has its own."""
        return FastestGrowing(max_active=2)
