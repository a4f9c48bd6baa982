"""Sets of units that never change: none, all, or those named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from trimtab.control.policies.scored import ChoosingController, Observed, ScoredPolicy
from trimtab.control.settings import check_names
from trimtab.control.units import recoverable_mask, unit_names
from trimtab.errors import ConfigError

__all__ = ["FixedSet", "StaticHigh", "StaticLow"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticLow(ScoredPolicy):
    """Every unit stays on the low-cost path: what low precision does by itself.

    Args:
        scores: Settings of the GNMR scores that are recorded beside.

    Example:
        >>> StaticLow().start(3).update([1.0, 2.0, float("nan")]).active.tolist()
        [False, False, False]
    """

    kind: ClassVar[str] = "static_low"

    def budget(self, num_recoverable: int) -> int:
        """0."""
        return 0

    def start(
        self, units: int | Sequence[str], recoverable: Sequence[bool] | Sequence[str] | None = None
    ) -> StaticController:
        """Start a controller; see ``Policy.start``."""
        return StaticController(units, self, recoverable, ())


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticHigh(ScoredPolicy):
    """Every unit is on the recovery path, from the first decision on: what recovery could give at most.

    Args:
        scores: Settings of the GNMR scores that are recorded beside.

    Example:
        >>> StaticHigh().start(["q", "k"], recoverable=["q"]).update([1.0, 2.0]).active.tolist()
        [True, False]
    """

    kind: ClassVar[str] = "static_high"

    def budget(self, num_recoverable: int) -> int:
        """All of them."""
        return num_recoverable

    def start(
        self, units: int | Sequence[str], recoverable: Sequence[bool] | Sequence[str] | None = None
    ) -> StaticController:
        """Start a controller; see ``Policy.start``."""
        return StaticController(units, self, recoverable, unit_names(units))


@dataclass(frozen=True, slots=True)
class FixedSet(ScoredPolicy):
    """The named units are on the recovery path, from the first decision on: a choice made beforehand.

    Args:
        units: Their names.
        scores: Settings of the GNMR scores that are recorded beside.

    Raises:
        ConfigError: when they are no names; from ``start``, when no unit has one of them, or it has no recovery path
            while others do. (Where none has one, a model is only watched.)

    Example:
        >>> FixedSet(["k"]).start(["q", "k"]).update([1.0, 2.0]).active.tolist()
        [False, True]
    """

    kind: ClassVar[str] = "fixed_set"

    units: Sequence[str]

    def __post_init__(self) -> None:
        ScoredPolicy.__post_init__(self)
        if isinstance(self.units, str) or not isinstance(self.units, Sequence):
            raise ConfigError("units", self.units, "it is a list of names.", "Pass a list of str.")
        for name in self.units:
            if not isinstance(name, str):
                raise ConfigError("units", name, "the name of a unit is text.", "Pass a list of str.")
        object.__setattr__(self, "units", tuple(dict.fromkeys(self.units)))

    @property
    def max_active(self) -> int:
        """The most units that are ever active at once."""
        return len(self.units)

    def budget(self, num_recoverable: int) -> int:
        """The most units that may be active at once, of ``num_recoverable``."""
        return min(self.max_active, num_recoverable)

    def start(
        self, units: int | Sequence[str], recoverable: Sequence[bool] | Sequence[str] | None = None
    ) -> StaticController:
        """Start a controller; see ``Policy.start``."""
        names = unit_names(units)
        check_names("units", self.units, names)
        switchable = [n for n, can in zip(names, recoverable_mask(recoverable, names), strict=True) if can]
        for name in self.units:
            if switchable and name not in switchable:
                remedy = f"The units that have one are {', '.join(switchable[:5])}{' ...' * (len(switchable) > 5)}."
                raise ConfigError("units", name, "this unit has no recovery path.", remedy)
        return StaticController(units, self, recoverable, self.units)


class StaticController(ChoosingController):
    """The controller of a set that never changes.

    Args:
        units: Number of units, or their names.
        policy: The settings.
        recoverable: See ``Policy.start``.
        chosen: Names of the units of the set.
    """

    def __init__(
        self,
        units: int | Sequence[str],
        policy: ScoredPolicy,
        recoverable: Sequence[bool] | Sequence[str] | None,
        chosen: Sequence[str],
    ) -> None:
        super().__init__(units, policy, recoverable)
        self._rank = np.array([float(name in set(chosen)) for name in self.units])

    def rank(self, seen: Observed) -> NDArray[np.float64]:
        """1 for the units of the set."""
        return self._rank
