"""What could have been recovered at most: the largest gaps, known beforehand."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from trimtab.control.policies.scored import ChoosingController, Observed, ScoredPolicy
from trimtab.control.policy import budget_in_units, budget_setting, is_real
from trimtab.control.settings import check_names
from trimtab.errors import ConfigError, TrimtabWarning

__all__ = ["Oracle"]


@dataclass(frozen=True, slots=True)
class Oracle(ScoredPolicy):
    """Recover the units with the largest positive recovery gaps, which it is told.

    No policy under the same budget recovers more of the gaps given. They come from ``measure_recovery_gaps`` in
    ``trimtab.precision.recovery_gap``, or from a run in which the fault is known.

    Args:
        gaps: For each step's decision, the first for step 1, the gap of each unit by name, as it will be in the step
            that the decision routes. NaN, or no entry = not known, never chosen. Beyond the last one no unit is active.
        max_active: The budget, as in ``Policy``.
        scores: Settings of the GNMR scores that are recorded beside.

    Raises:
        ConfigError: when a gap is no number or infinite, or the budget is out of its range; from ``start``, when no
            unit has one of the names.

    Source: Kong et al. 2026, section 4: the oracle set.

    Example:
        >>> controller = Oracle([{"q": 1.0, "k": 3.0, "v": -2.0}], max_active=1).start(["q", "k", "v"])
        >>> controller.update([1.0, 1.0, 1.0]).active.tolist()
        [False, True, False]
    """

    kind: ClassVar[str] = "oracle"

    gaps: Sequence[Mapping[str, float]]
    max_active: int | float = 0.2

    def __post_init__(self) -> None:
        ScoredPolicy.__post_init__(self)
        object.__setattr__(self, "max_active", budget_setting(self.max_active))
        steps = []
        for gaps in self.gaps:
            if not isinstance(gaps, Mapping):
                raise ConfigError("gaps", gaps, "it is a mapping from names to gaps a step.", "Pass a list of dicts.")
            for name, gap in gaps.items():
                if not is_real(gap) or math.isinf(gap):
                    raise ConfigError(f"gaps[{name!r}]", gap, "a gap is a finite number, or NaN.", "Leave it out.")
            steps.append({str(name): float(gap) for name, gap in gaps.items() if not math.isnan(gap)})
        object.__setattr__(self, "gaps", tuple(steps))

    def budget(self, num_recoverable: int) -> int:
        """The most units that may be active at once, of ``num_recoverable``."""
        return budget_in_units(self.max_active, num_recoverable)

    def start(
        self, units: int | Sequence[str], recoverable: Sequence[bool] | Sequence[str] | None = None
    ) -> OracleController:
        """Start a controller; see ``Policy.start``."""
        return OracleController(units, self, recoverable)


class OracleController(ChoosingController):
    """The controller of ``Oracle``.

    Args:
        units: Number of units, or their names.
        policy: The settings.
        recoverable: See ``Policy.start``.
    """

    def __init__(
        self, units: int | Sequence[str], policy: Oracle, recoverable: Sequence[bool] | Sequence[str] | None
    ) -> None:
        super().__init__(units, policy, recoverable)
        check_names("gaps", dict.fromkeys(name for gaps in policy.gaps for name in gaps), self.units)
        self._gaps = policy.gaps
        self._said_it_ran_out = False

    def rank(self, seen: Observed) -> NDArray[np.float64]:
        """The gap of each unit; 0 where it is not known."""
        if seen.step <= len(self._gaps):
            gaps = self._gaps[seen.step - 1]
            return np.array([gaps.get(name, 0.0) for name in self.units])
        if not self._said_it_ran_out:
            self._said_it_ran_out = True
            warnings.warn(
                f"gaps: those of {len(self._gaps)} steps were given, and this is step {seen.step}: no unit is active "
                "from here on. Pass the gaps of each step of the run.",
                TrimtabWarning,
                stacklevel=3,
            )
        return np.zeros(len(self.units))
