"""What the other policies share: scores as GNMR has them, and an active set by a rank of their own.

Everything is (units,).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from trimtab.control.arrays import Array, place_of, to_array, to_numpy
from trimtab.control.checkpoint import ControllerMemory, LoadReport
from trimtab.control.controller import Controller
from trimtab.control.decision import Decision
from trimtab.control.own_choice import OwnChoice
from trimtab.control.policy import Policy
from trimtab.control.selection import select_active
from trimtab.control.settings import read_settings
from trimtab.errors import ConfigError

__all__ = ["ChoosingController", "Observed", "ScoredPolicy", "greatest"]

P = TypeVar("P", bound="ScoredPolicy")

_HOST = place_of(np.zeros(1))


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredPolicy(ABC):
    """Settings of a policy that chooses by something else than GNMR, and records the GNMR scores beside.

    Raises:
        ConfigError: when a setting is out of its range.
    """

    kind: ClassVar[str]
    """Its name on the command line, and the ``kind`` in a record."""

    scores: Policy = field(default_factory=Policy)
    """Settings of the GNMR scores that are recorded beside, with ``damping``, ``error_limit`` and ``amax_limit``; they
    choose nothing, and their budget and locks are not used."""

    def __post_init__(self) -> None:
        if not isinstance(self.scores, Policy):
            raise ConfigError("scores", self.scores, "the scores come from a Policy.", "Pass Policy() or robust().")

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

    @abstractmethod
    def budget(self, num_recoverable: int) -> int:
        """The most units that may be active at once, of ``num_recoverable``."""

    @abstractmethod
    def start(
        self, units: int | Sequence[str], recoverable: Sequence[bool] | Sequence[str] | None = None
    ) -> ChoosingController | Controller:
        """Start a controller; see ``Policy.start``."""

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain JSON-able values."""
        values = {item.name: _plain(getattr(self, item.name)) for item in fields(self)}
        return {"kind": self.kind, **values}

    @classmethod
    def from_dict(cls: type[P], values: Mapping[str, Any]) -> P:
        """Read settings back; those that are not given keep their defaults.

        Raises:
            ConfigError: when a key is unknown or missing, or a value is out of its range.
        """
        return cls(**read_settings(values, cls, cls.kind))


@dataclass(frozen=True, slots=True)
class Observed:
    """What a rank may go by; all on the host.

    Attributes:
        step: The optimizer step that the norms are from; the first is 1.
        norms: float64; 0 where not observed or failed.
        gnmr: float64; 0 where not observed or failed.
        mask: bool; the norm is finite and above 0.
    """

    step: int
    norms: NDArray[np.float64]
    gnmr: NDArray[np.float64]
    mask: NDArray[np.bool_]


class ChoosingController(OwnChoice, ABC):
    """Takes the recoverable units of the highest rank above 0, at most as many as the budget allows.

    Of equal ranks the unit nearest the loss wins, as in ``Controller``. A failed norm is not observed: it changes no
    rank. Raised risks, channel errors and amaxes are scored, and choose nothing.

    Args:
        units: Number of units, or their names from the input to the loss.
        policy: The settings.
        recoverable: None for all units, a mask over the units, or the names of those with a recovery path.

    Attributes:
        columns: What is remembered of each unit, by name, with its first value; finite numbers of 0 or more.
        memory: These, an array each.

    Raises:
        ConfigError: see ``Controller``.
    """

    columns: ClassVar[Mapping[str, float]] = {}

    def __init__(
        self,
        units: int | Sequence[str],
        policy: ScoredPolicy,
        recoverable: Sequence[bool] | Sequence[str] | None = None,
    ) -> None:
        super().__init__(units, policy, recoverable)
        self.memory = {name: np.full(len(self.units), first) for name, first in self.columns.items()}

    @abstractmethod
    def rank(self, seen: Observed) -> NDArray[np.float64]:
        """The rank of each unit after a step, and the place to remember it; NaN, 0 and less = not to be active."""

    @property
    def policy(self) -> ScoredPolicy:
        """The settings."""
        policy: ScoredPolicy = self._policy
        return policy

    def update(
        self,
        norms: Array | Sequence[float | None],
        errors: Array | Sequence[float | None] | None = None,
        risks: Array | Sequence[float | None] | None = None,
        amaxes: Array | Sequence[float | None] | None = None,
    ) -> Decision:
        """Choose the next step's active set, and score what is given; see ``Controller.update``.

        Raises:
            ValueError: when the number of norms, of errors, of risks or of amaxes is not the number of units.
        """
        norms = to_array(norms)
        scored = self._scorer.update(norms, errors, risks, amaxes)
        place = place_of(scored.active)
        gnmr = to_numpy(scored.gnmr)
        mask = np.isfinite(gnmr)
        given = to_numpy(place.widen(norms))
        seen = Observed(scored.step, np.where(mask, given, 0.0), np.where(mask, gnmr, 0.0), mask)
        self._active = greatest(self.rank(seen), self._can_recover, self.budget)
        return self._chosen(scored)

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, as plain values that JSON takes."""
        state = self._scorer.state_dict()
        for index, name in enumerate(self.units):
            remembered = {column: float(values[index]) for column, values in self.memory.items()}
            state["units"][name] |= {"active": bool(self._active[index]), "lock": 0, "rank": remembered}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> LoadReport:
        """Go on from a state; see ``Controller.load_state_dict``.

        A state of another kind of controller gives the scores, and the memory that a rank needs starts anew.

        Raises:
            ConfigError: when ``state`` is no state of a controller; nothing is changed then.
        """
        ControllerMemory.from_dict(state)
        remembered = [self._remembered(state["units"].get(name, {}).get("rank"), name) for name in self.units]
        report = self._scorer.load_state_dict(state)
        self.memory = {column: np.array([unit[column] for unit in remembered]) for column in self.columns}
        held = to_numpy(self._scorer.active)
        self._active = greatest(np.ones(len(self.units)), held, self.budget)
        return report

    def _remembered(self, given: Any, name: str) -> dict[str, float]:
        """A unit's memory, checked; the first values where it has none of this kind."""
        if not isinstance(given, Mapping) or given.keys() != self.columns.keys():
            return dict(self.columns)
        for column, value in given.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                allowed = "it is a finite number of 0 or more."
                remedy = "Pass what state_dict() of a controller returned."
                raise ConfigError(f"units[{name!r}].rank.{column}", value, allowed, remedy)
        return {column: float(value) for column, value in given.items()}


def greatest(rank: NDArray[np.float64], candidates: NDArray[np.bool_], count: int) -> NDArray[np.bool_]:
    """The ``count`` candidates with the greatest rank above 0; of equals, those nearest the loss.

    Example:
        >>> greatest(np.array([2.0, 1.0, 2.0, np.nan]), np.ones(4, bool), 1).tolist()
        [False, False, True, False]
    """
    wanted = (rank > 0) & candidates
    chosen: NDArray[np.bool_] = select_active(np.where(wanted, rank, 0.0), wanted, count, _HOST)
    return chosen


def _plain(value: Any) -> Any:
    if isinstance(value, Policy):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
