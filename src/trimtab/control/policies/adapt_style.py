"""Profile for a while, then freeze: the units that stood out early stay on the recovery path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from trimtab.control.policies.scored import ChoosingController, Observed, ScoredPolicy, greatest
from trimtab.control.policy import budget_in_units, budget_setting, whole_number
from trimtab.errors import ConfigError

__all__ = ["AdaptStyle", "ProfileScore"]

ProfileScore = Literal["gnmr", "norm"]
"""What is averaged while profiling: GNMR, or the gradient norm itself."""


@dataclass(frozen=True, slots=True)
class AdaptStyle(ScoredPolicy):
    """Average a score of each unit over the first steps, then keep the top share on the recovery path for good.

    While it profiles no unit is active. The mean runs over the observed norms. The set is chosen at step
    ``profile_steps``, or at the first one after it by which any unit was observed.

    Args:
        profile_steps: Optimizer steps to profile. >= 1.
        share: Of the recoverable units, as ``max_active`` of a ``Policy``: a share, or an int for a count.
        score: "gnmr" for the mean GNMR, "norm" for the mean gradient norm.
        scores: Settings of the GNMR scores.

    Raises:
        ConfigError: when a setting is out of its range.

    Source: ours, after schemes that profile a model's sensitivity once and then keep to a fixed assignment.

    Example:
        >>> controller = AdaptStyle(2, share=1, score="norm").start(["q", "k"])
        >>> [controller.update(norms).active.tolist() for norms in ([1.0, 5.0], [2.0, 5.0], [99.0, 0.1])]
        [[False, False], [False, True], [False, True]]
    """

    kind: ClassVar[str] = "adapt_style"

    profile_steps: int
    share: int | float = 0.25
    score: ProfileScore = "gnmr"

    def __post_init__(self) -> None:
        ScoredPolicy.__post_init__(self)
        steps = whole_number("profile_steps", self.profile_steps, 1, "a profile needs at least 1 step.")
        object.__setattr__(self, "profile_steps", steps)
        object.__setattr__(self, "share", budget_setting(self.share, "share"))
        if self.score not in get_args(ProfileScore):
            raise ConfigError("score", self.score, "it is 'gnmr' or 'norm'.", "Use one of them.")

    @property
    def max_active(self) -> int | float:
        """The share."""
        return self.share

    def budget(self, num_recoverable: int) -> int:
        """The most units that may be active at once, of ``num_recoverable``."""
        return budget_in_units(self.share, num_recoverable)

    def start(
        self, units: int | Sequence[str], recoverable: Sequence[bool] | Sequence[str] | None = None
    ) -> AdaptStyleController:
        """Start a controller; see ``Policy.start``."""
        return AdaptStyleController(units, self, recoverable)


class AdaptStyleController(ChoosingController):
    """The controller of ``AdaptStyle``."""

    columns: ClassVar = {"count": 0.0, "mean": 0.0, "chosen": 0.0}

    def rank(self, seen: Observed) -> NDArray[np.float64]:
        """1 for the units of the frozen set."""
        policy, memory = self.policy, self.memory
        assert isinstance(policy, AdaptStyle)
        if memory["chosen"].any():
            return memory["chosen"]
        values = seen.norms if policy.score == "norm" else seen.gnmr
        memory["count"] = memory["count"] + seen.mask
        step = (values - memory["mean"]) / np.maximum(memory["count"], 1.0)
        memory["mean"] = np.where(seen.mask, memory["mean"] + step, memory["mean"])
        if seen.step >= policy.profile_steps:
            memory["chosen"] = greatest(memory["mean"], self._can_recover, self.budget).astype(np.float64)
        return memory["chosen"]
