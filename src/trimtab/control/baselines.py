"""Policies to compare with, under the same budget."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import numpy as np

from trimtab.control.arrays import Array, to_numpy
from trimtab.control.checkpoint import LoadReport
from trimtab.control.decision import Decision
from trimtab.control.own_choice import OwnChoice
from trimtab.control.policy import Policy
from trimtab.control.settings import read_settings
from trimtab.errors import ConfigError, TrimtabWarning

__all__ = ["MatchedRandom", "RandomController"]


@dataclass(frozen=True, slots=True)
class MatchedRandom:
    """Random units, as many in each step as another policy had active.

    What a policy gains over this, it gains by choosing units, and not by how much it recovers.

    Args:
        counts: Active units for each step's decision, the first for step 1. Beyond the last one no unit is active.
        seed: Of the choice. >= 0.
        scores: Settings of the GNMR scores that are recorded beside; they choose nothing.

    Raises:
        ConfigError: when a count or the seed is no int of 0 or more.

    Source: ours; the control that Kong et al. 2026, Algorithm 2, is to be held against.

    Example:
        >>> controller = MatchedRandom([2, 0], seed=1).start(5)
        >>> [int(controller.update([1.0] * 5).active.sum()) for _ in range(2)]
        [2, 0]
    """

    counts: Sequence[int]
    seed: int
    scores: Policy = field(default_factory=Policy, kw_only=True)

    def __post_init__(self) -> None:
        for name, values in (("counts", self.counts), ("seed", [self.seed])):
            for value in values:
                if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
                    raise ConfigError(name, value, "it takes whole numbers.", "Set an int of 0 or more.")
        if not isinstance(self.scores, Policy):
            raise ConfigError("scores", self.scores, "the scores come from a Policy.", "Pass Policy() or robust().")
        object.__setattr__(self, "counts", tuple(int(count) for count in self.counts))
        object.__setattr__(self, "seed", int(self.seed))

    @property
    def max_active(self) -> int:
        """The most units that are ever active at once."""
        return max(self.counts, default=0)

    @property
    def damping(self) -> bool:
        """As ``scores`` has it, so that both sides of a comparison damp alike."""
        return self.scores.damping

    @property
    def error_limit(self) -> float | None:
        """As ``scores`` has it, so that both sides of a comparison measure their quantizers alike."""
        return self.scores.error_limit

    @property
    def amax_limit(self) -> float | None:
        """As ``scores`` has it; so too."""
        return self.scores.amax_limit

    def budget(self, num_recoverable: int) -> int:
        """The most units that may be active at once, of ``num_recoverable``."""
        return min(self.max_active, num_recoverable)

    def start(
        self, units: int | Sequence[str], recoverable: Sequence[bool] | Sequence[str] | None = None
    ) -> RandomController:
        """Start a controller; see ``Policy.start``."""
        return RandomController(units, self, recoverable)

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain JSON-able values.

        Example:
            >>> MatchedRandom([1, 2], seed=3).to_dict()["counts"]
            [1, 2]
        """
        return {
            "kind": "matched_random",
            "counts": list(self.counts),
            "seed": self.seed,
            "scores": self.scores.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MatchedRandom:
        """Read settings back.

        Raises:
            ConfigError: when a key is unknown or missing, or a value is out of its range.

        Example:
            >>> MatchedRandom.from_dict(MatchedRandom([1, 2], seed=3).to_dict()) == MatchedRandom([1, 2], seed=3)
            True
        """
        return cls(**read_settings(values, cls, "matched_random"))


class RandomController(OwnChoice):
    """The controller of ``MatchedRandom``: scores as GNMR has them, the active set at random.

    The choice of a step depends on the seed and the step alone, so that every rank and every resume makes it again
    (with the same NumPy; its random streams may change between versions).

    Args:
        units: Number of units, or their names from the input to the loss.
        policy: The settings.
        recoverable: None for all units, a mask over the units, or the names of those with a recovery path.

    Raises:
        ConfigError: see ``Controller``.
    """

    def __init__(
        self,
        units: int | Sequence[str],
        policy: MatchedRandom,
        recoverable: Sequence[bool] | Sequence[str] | None = None,
    ) -> None:
        super().__init__(units, policy, recoverable)
        self._candidates = np.flatnonzero(self._can_recover)
        self._said_it_ran_out = False

    @property
    def policy(self) -> MatchedRandom:
        """The settings."""
        policy: MatchedRandom = self._policy
        return policy

    def update(
        self,
        norms: Array | Sequence[float | None],
        errors: Array | Sequence[float | None] | None = None,
        risks: Array | Sequence[float | None] | None = None,
        amaxes: Array | Sequence[float | None] | None = None,
    ) -> Decision:
        """Choose the next step's active set at random, and score what is given; see ``Controller.update``.

        Raises:
            ValueError: when the number of norms, of errors, of risks or of amaxes is not the number of units.
        """
        scored = self._scorer.update(norms, errors, risks, amaxes)
        self._active = np.zeros(len(self.units), dtype=np.bool_)
        random = np.random.default_rng((self.policy.seed, scored.step))
        self._active[random.choice(self._candidates, size=self._count(scored.step), replace=False)] = True
        return self._chosen(scored)

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, as plain values that JSON takes."""
        state = self._scorer.state_dict()
        for name, active in zip(self.units, self._active.tolist(), strict=True):
            state["units"][name] |= {"active": active, "lock": 0}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> LoadReport:
        """Go on from a state; see ``Controller.load_state_dict``.

        Raises:
            ConfigError: when ``state`` is no state of a controller; nothing is changed then.
        """
        report = self._scorer.load_state_dict(state)
        active = np.flatnonzero(to_numpy(self._scorer.active))
        self._active = np.zeros(len(self.units), dtype=np.bool_)
        self._active[active[len(active) - min(self.budget, len(active)) :]] = True
        return report

    def _count(self, step: int) -> int:
        """How many units to activate by the decision of ``step``."""
        if step > len(self.policy.counts):
            if not self._said_it_ran_out:
                self._said_it_ran_out = True
                num_counts = len(self.policy.counts)
                warnings.warn(
                    f"counts: {num_counts} were given, and this is step {step}: no unit is active from here on. "
                    "Pass one count for each step of the run.",
                    TrimtabWarning,
                    stacklevel=3,
                )
            return 0
        return min(self.policy.counts[step - 1], len(self._candidates))
