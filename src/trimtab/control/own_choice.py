"""What controllers have in common that score every unit as GNMR does, and choose the active ones in their own way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.control.arrays import Array, place_of
from trimtab.control.controller import Controller
from trimtab.control.decision import Decision
from trimtab.control.reasons import without_locks

__all__ = ["OwnChoice"]


class OwnChoice:
    """Scores by a ``Controller``, whose own choice is not used.

    Args:
        units: Number of units, or their names from the input to the loss.
        policy: The settings; ``scores`` are those of the scores, ``budget(num_recoverable)`` its budget.
        recoverable: None for all units, a mask over the units, or the names of those with a recovery path.

    Raises:
        ConfigError: see ``Controller``.
    """

    def __init__(
        self, units: int | Sequence[str], policy: Any, recoverable: Sequence[bool] | Sequence[str] | None = None
    ) -> None:
        # Only its scores are read. With the whole as budget it forgets nobody's active flag on a load.
        self._scorer = Controller(units, replace(policy.scores, max_active=1.0), recoverable)
        self._policy = policy
        self._can_recover: NDArray[np.bool_] = np.array(self._scorer.recoverable, dtype=np.bool_)
        self._active: NDArray[np.bool_] = np.zeros(len(self._scorer.units), dtype=np.bool_)

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the units, from the input to the loss."""
        return self._scorer.units

    @property
    def recoverable(self) -> tuple[bool, ...]:
        """For each unit, whether it may be on the recovery path."""
        return self._scorer.recoverable

    @property
    def step(self) -> int:
        """Decisions taken so far."""
        return self._scorer.step

    @property
    def active(self) -> Array:
        """The units on the recovery path in the next step, bool, shape (units,)."""
        return place_of(self._scorer.active).bools(self._active)

    @property
    def budget(self) -> int:
        """The most units that are ever active at once."""
        return int(self._policy.budget(int(self._can_recover.sum())))

    def _chosen(self, scored: Decision) -> Decision:
        """The scorer's decision, with the units chosen here; nothing is locked."""
        place = place_of(scored.active)
        return replace(
            scored,
            active=place.bools(self._active),
            lock=place.integers(np.zeros(len(self.units))),
            reason=without_locks(scored.reason, place),
        )
