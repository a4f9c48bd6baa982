"""What other policies would have decided along a recorded run, beside what it did; and thresholds from a healthy one.

A decision of step t routes step t+1. Everything here is told of the step that is routed: a fault is *caught* when its
unit is on the recovery path in one of the steps that it lasts, and its *latency* is how many of them went by before.

T: observed steps. U: units of the run's last start.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from trimtab.control import Policy, PolicyLike
from trimtab.control.theory import alpha_for_false_trigger_rate
from trimtab.errors import ConfigError, verbatim
from trimtab.trace.encoding import scalar_value
from trimtab.trace.policies import build_again, score_settings
from trimtab.trace.reader import Run, open_run
from trimtab.trace.replay import _Player
from trimtab.trace.segments import Segment
from trimtab.trace.table import RawRow

__all__ = [
    "UNKNOWN",
    "HealthyThresholds",
    "Outcome",
    "UnitFault",
    "Verification",
    "WhatIf",
    "changed",
    "healthy_thresholds",
    "recorded_policy",
    "steps_to_calibrate",
    "sweep",
    "verify",
    "what_if",
]

UNKNOWN = (
    "The recorded norms were taken as they are. Another active set would have changed the gradients, and with them the "
    "norms that followed: what a policy does to the loss, and to later decisions, only a run with it can tell."
)
"""What replay cannot know."""

MOST_POLICIES = 256
"""Of one sweep; the active sets of all are held at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitFault:
    """A fault made on purpose at a unit."""

    unit: str
    """Name of the unit."""
    start_step: int
    """First step that suffered it."""
    num_steps: int
    """How long it lasted."""

    @property
    def end_step(self) -> int:
        """The first step that no longer suffered it."""
        return self.start_step + self.num_steps


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outcome:
    """What one policy's decisions along a run amount to."""

    policy: Any
    """The settings, as plain values."""
    recovered_share: float
    """Share of the recoverable unit-steps on the recovery path, 0 to 1."""
    num_switches: int
    """Times that a unit entered the active set."""
    num_different: int
    """Unit-steps in which the active set is not the recorded one."""
    num_caught: int
    """Faults whose unit was on the recovery path while they lasted."""
    latencies: tuple[int, ...]
    """Of each fault that was caught, the steps that it lasted before its unit was on the recovery path."""
    num_false: int
    """Unit-steps on the recovery path outside any fault of the unit; a lock that outlasts a fault is among them."""
    active_counts: NDArray[np.int64] = field(repr=False)
    """Units in the active set of each decision. (T,)"""

    @property
    def mean_latency_steps(self) -> float | None:
        """The mean of ``latencies``; None when nothing was caught."""
        return sum(self.latencies) / len(self.latencies) if self.latencies else None

    def to_dict(self) -> dict[str, Any]:
        """All but ``active_counts``, as plain values."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "active_counts"}
        return values | {"latencies": list(self.latencies), "mean_latency_steps": self.mean_latency_steps}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WhatIf:
    """The decisions of some policies along a run, beside the recorded ones."""

    steps: NDArray[np.int64]
    """The steps that the decisions were taken from. (T,)"""
    num_units: int
    """Watched units."""
    num_recoverable: int
    """Units with a recovery path."""
    faults: tuple[UnitFault, ...]
    """The recorded faults at units of the run, with a start and a length."""
    num_faults_elsewhere: int
    """Recorded faults at anything else, which no unit's switch can be held against."""
    recorded: Outcome
    """What the run did."""
    outcomes: Mapping[str, Outcome]
    """What each policy would have decided, by the name given to it."""
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """The settings of a sweep and their values; empty for policies that are no sweep."""
    notes: tuple[str, ...]
    """Why a replay may not be what the run itself would have decided; empty when nothing is missing."""

    def __repr__(self) -> str:
        """One line; the figures are in ``to_dict()``."""
        names = ", ".join(self.outcomes)
        return f"<WhatIf of {len(self.steps)} steps, {self.num_units} units: {len(self.outcomes)} policies ({names})>"

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain values, for machines."""
        return {
            "num_steps": len(self.steps),
            "num_units": self.num_units,
            "num_recoverable": self.num_recoverable,
            "num_faults": len(self.faults),
            "num_faults_elsewhere": self.num_faults_elsewhere,
            "recorded": self.recorded.to_dict(),
            "policies": {name: outcome.to_dict() for name, outcome in self.outcomes.items()},
            "grid": {name: list(values) for name, values in self.grid.items()},
            "notes": list(self.notes),
            "unknown": UNKNOWN,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """Whether the recorded policy gives the recorded decisions."""

    num_steps: int
    """Decisions taken again."""
    num_different: int
    """Unit-steps in which the replayed active set is not the recorded one."""
    first_different_step: int | None
    """The first step with a decision that differs; None when there is none."""
    notes: tuple[str, ...]
    """What the record could not tell."""

    @property
    def is_exact(self) -> bool:
        """Whether every decision is the recorded one."""
        return self.num_different == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthyThresholds:
    """The thresholds with which a healthy run would have kept to a rate of false triggers."""

    alpha: float
    """For GNMR."""
    beta: float
    """For Delta."""
    num_unit_steps: int
    """Healthy unit-steps with scores that they rest on."""
    num_steps: int
    """Steps that these are from."""
    num_false: int
    """Unit-steps of these above one of the two thresholds, or both."""
    num_false_recorded: int | None
    """Unit-steps that the thresholds in force flagged; None when these are not recorded."""
    num_failed: int
    """Unit-steps with a NaN, infinite or negative norm, which no threshold lets pass; they are left out."""

    @property
    def upper_per_1000(self) -> float:
        """The upper end of a one-sided 95% interval of the rate, were unit-steps independent; they are less than that.

        Source: Wilson and Hilferty 1931; within 1% of the exact Poisson bound.
        """
        count = self.num_false + 1
        return 1000 * count * (1 - 1 / (9 * count) + 1.645 / (3 * math.sqrt(count))) ** 3 / self.num_unit_steps


def what_if(run: Run | str | os.PathLike[str], policies: Mapping[str, PolicyLike]) -> WhatIf:
    """Say what each policy would have decided on a run's norms, channel errors, amaxes and raised risks.

    The record is read once, whatever the number of policies; each keeps one bit a unit and step.

    Args:
        run: The record, opened or its path.
        policies: By a name for the results.

    Raises:
        ConfigError: The record holds no decision.

    Example:
        >>> import tempfile
        >>> from trimtab.trace import RunWriter, StepRow
        >>> folder, policy = tempfile.mkdtemp(), Policy(max_active=1)
        >>> controller = policy.start(["q", "k"])
        >>> units = [{"name": "q"}, {"name": "k"}]
        >>> with RunWriter(folder, config={"policy": policy.to_dict()}, units=units) as writer:
        ...     for step, norms in enumerate([[1.0, 1.0], [1.0, 9.0], [1.0, 1.0]], start=1):
        ...         made = controller.update(norms)
        ...         writer.write_step(StepRow(step=step, norms=norms, active=made.active))
        ...     writer.write_event("fault", 2, "k", {"start_step": 2, "num_steps": 5})
        >>> told = what_if(folder, {"none": Policy(max_active=0)})
        >>> told.recorded.num_caught, told.recorded.latencies, told.outcomes["none"].num_caught
        (1, (1,), 0)
    """
    if not isinstance(run, Run):
        with open_run(run) as opened:
            return what_if(opened, policies)
    line, _ = run.fold(lambda: _Line(run, policies))
    if not line.steps:
        raise ConfigError("record", str(run.path), "it holds no decision to take again.", "Name one of a run.")
    steps = np.array(line.steps, np.int64)
    faults, num_elsewhere = _unit_faults(run)
    recoverable = np.array([unit.recoverable for unit in run.unit_table], np.bool_)
    judge = _Judge(steps, run.units, recoverable, faults, line.recorded.unpacked())
    outcomes = {
        name: judge.outcome(policies[name].to_dict(), player.active_sets.unpacked())
        for name, player in line.players.items()
    }
    return WhatIf(
        steps=steps,
        num_units=len(run.units),
        num_recoverable=int(np.count_nonzero(recoverable)),
        faults=faults,
        num_faults_elsewhere=num_elsewhere,
        recorded=judge.outcome(run.config.get("policy"), judge.recorded),
        outcomes=outcomes,
        notes=tuple(dict.fromkeys(note for player in line.players.values() for note in player.notes)),
    )


def sweep(
    run: Run | str | os.PathLike[str], grid: Mapping[str, Sequence[Any]], base: PolicyLike | None = None
) -> WhatIf:
    """``what_if`` for every combination of some settings' values.

    Args:
        run: The record, opened or its path.
        grid: Values by the setting of the policy.
        base: The settings that are not swept. None: those of the recorded policy.

    Raises:
        ConfigError: A setting is unknown, a value out of its range, there are none or too many, or the record holds no
            policy to start from.

    Example:
        >>> import tempfile
        >>> from trimtab.trace import RunWriter, StepRow
        >>> folder = tempfile.mkdtemp()
        >>> with RunWriter(folder, config={"policy": Policy().to_dict()}, units=[{"name": "q"}]) as writer:
        ...     for step, norm in enumerate([1.0, 1.8], start=1):
        ...         writer.write_step(StepRow(step=step, norms=[norm], active=[norm > 1.5]))
        >>> {name: one.num_switches for name, one in sweep(folder, {"alpha": [1.5, 2.0]}).outcomes.items()}
        {'alpha=1.5': 1, 'alpha=2.0': 0}
    """
    if not isinstance(run, Run):
        with open_run(run) as opened:
            return sweep(opened, grid, base)
    values = {name: tuple(some) for name, some in grid.items()}
    for name, some in values.items():
        if not some:
            raise ConfigError(name, list(some), "a sweep needs a value of it.", "List one or more, or leave it out.")
    num_policies = math.prod(len(some) for some in values.values())
    if not values or num_policies > MOST_POLICIES:
        allowed = f"a sweep is over 1 to {MOST_POLICIES} policies."
        raise ConfigError(
            "sweep", verbatim(f"({num_policies if values else 0} policies)"), allowed, "List fewer values."
        )
    base = recorded_policy(run) if base is None else base
    policies = {}
    for chosen in itertools.product(*values.values()):
        settings = dict(zip(values, chosen, strict=True))
        policies[settings_text(settings)] = changed(base, settings)
    return replace(what_if(run, policies), grid=values)


def verify(run: Run | str | os.PathLike[str]) -> Verification:
    """Take the decisions again with the recorded policy, and compare them with the recorded ones.

    Raises:
        ConfigError: The record holds no decision, or no policy that can be built again.

    Example:
        >>> import tempfile
        >>> from trimtab.trace import RunWriter, StepRow
        >>> folder = tempfile.mkdtemp()
        >>> with RunWriter(folder, config={"policy": Policy().to_dict()}, units=[{"name": "q"}]) as writer:
        ...     writer.write_step(StepRow(step=1, norms=[1.0], active=[True]))
        >>> verify(folder).first_different_step
        1
    """
    if not isinstance(run, Run):
        with open_run(run) as opened:
            return verify(opened)
    line, _ = run.fold(lambda: _Line(run, {"": None}))
    if not line.steps:
        raise ConfigError("record", str(run.path), "it holds no decision to take again.", "Name one of a run.")
    player = line.players[""]
    differs = player.active_sets.unpacked() != line.recorded.unpacked()
    rows = np.flatnonzero(differs.any(axis=1))
    return Verification(
        num_steps=len(line.steps),
        num_different=int(np.count_nonzero(differs)),
        first_different_step=line.steps[int(rows[0])] if len(rows) else None,
        notes=player.notes,
    )


def recorded_policy(run: Run) -> PolicyLike:
    """The policy of a run's last start; a threshold that was a plain function is what the rows say was in force.

    Raises:
        ConfigError: The record holds no policy that can be built again: none at all, or one that is not of
            ``trimtab.control``.

    Example:
        >>> import tempfile
        >>> from trimtab.trace import RunWriter, open_run
        >>> folder, policy = tempfile.mkdtemp(), Policy(max_active=2)
        >>> RunWriter(folder, config={"policy": policy.to_dict()}, units=[{"name": "q"}]).close()
        >>> with open_run(folder) as run:
        ...     recorded_policy(run) == policy
        True
    """

    def threshold(name: str, recorded: Any) -> Any:
        return _InForce.of(run, name, recorded) if isinstance(recorded, str) else recorded

    return build_again(run.config.get("policy"), threshold, "Name a preset, or pass a policy.")


def changed(policy: PolicyLike, settings: Mapping[str, Any]) -> PolicyLike:
    """``policy`` with other settings.

    Raises:
        ConfigError: A setting is unknown (with the nearest name), or its value is out of its range.

    Example:
        >>> changed(Policy(), {"max_activ": 2})
        Traceback (most recent call last):
        trimtab.errors.ConfigError: max_activ=2: a policy has no such setting. Did you mean 'max_active'?
    """
    if isinstance(policy, Policy):
        Policy.from_dict(settings)
    else:
        known = [item.name for item in fields(cast(Any, policy))]
        for name in settings:
            if name not in known:
                kind = policy.to_dict().get("kind")
                allowed = f"a policy of kind {kind!r} has no such setting; it has {', '.join(known)}."
                raise ConfigError(name, settings[name], allowed, "Start from a preset: robust, say.")
    return cast(PolicyLike, replace(cast(Any, policy), **settings))


def settings_text(settings: Mapping[str, Any]) -> str:
    """Settings as ``name=value, ...``."""
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def healthy_thresholds(run: Run, false_per_1000: float) -> HealthyThresholds:
    """Find alpha and beta with which a healthy run has at most a wanted rate of false triggers.

    Each of the two has half of the rate. They rest on the recorded scores of the steps after ``act_from_step``, and
    hold for the kind of history that the run had.

    Args:
        run: The record of a healthy run.
        false_per_1000: Wanted triggers in 1,000 unit-steps. Above 0, below 1,000.

    Raises:
        ConfigError: The rate is out of its range, or the record has faults, no scores, or too few of them.
    """
    if not 0 < false_per_1000 < 1000:
        raise ConfigError("false_per_1000", false_per_1000, "it is a rate above 0, below 1,000.", "Set 1.0, say.")
    num_faults = len(run.events("fault"))
    if num_faults:
        allowed = "every trigger of a healthy run is false, and in this one some are not."
        raise ConfigError("record", verbatim(f"({num_faults} faults)"), allowed, "Record a run without faults.")
    from_step = _first_scored_step(run)
    scores, _ = run.fold(lambda: _Scores(from_step))
    gnmr, delta = (np.concatenate(some) if some else np.zeros(0, np.float32) for some in (scores.gnmr, scores.delta))
    if len(gnmr) * false_per_1000 < 2000:
        raise ConfigError(
            "record",
            verbatim(f"({len(gnmr)} unit-steps with scores)"),
            f"{false_per_1000:g} false triggers in 1,000 cannot be told from none in so few.",
            f"Record at least {steps_to_calibrate(run, false_per_1000)} steps, or allow more.",
        )
    alpha, beta = (_threshold(some, false_per_1000 / 2000) for some in (gnmr, delta))
    return HealthyThresholds(
        alpha=alpha,
        beta=beta,
        num_unit_steps=len(gnmr),
        num_steps=scores.num_steps,
        num_false=int(np.count_nonzero((gnmr > alpha) | (delta > beta))),
        num_false_recorded=scores.num_flagged if scores.knows_flagged else None,
        num_failed=scores.num_failed,
    )


def steps_to_calibrate(run: Run, false_per_1000: float) -> int:
    """Steps of a healthy run like this one that thresholds for a rate of false triggers need: of scores and of alarms.

    Example:
        >>> import tempfile
        >>> from trimtab.trace import RunWriter
        >>> folder = tempfile.mkdtemp()
        >>> RunWriter(folder, config={"policy": Policy().to_dict()}, units=[{"name": "q"}]).close()
        >>> with open_run(folder) as run:
        ...     steps_to_calibrate(run, 1.0)
        2000
    """
    of_scores = _first_scored_step(run) + math.ceil(2000 / (false_per_1000 * max(len(run.units), 1)))
    # Unit-steps of one step come together, and an alarm is of a step.
    return max(of_scores, math.ceil(1000 / false_per_1000))


def _first_scored_step(run: Run) -> int:
    """The step after which the run's policy acts on its scores."""
    policy = run.config.get("policy")
    return int(score_settings(policy).get("act_from_step", 0)) if isinstance(policy, Mapping) else 0


class _Line:
    """The decisions of some policies along a live line, and the recorded ones."""

    def __init__(self, run: Run, policies: Mapping[str, PolicyLike | None]) -> None:
        self.steps: list[int] = []
        self.recorded = _ActiveSets(run.units)
        self.players = {name: _ActivePlayer(run, policy) for name, policy in policies.items()}
        self._units: dict[int, tuple[str, ...]] = {}

    def add(self, segment: Segment, row: RawRow) -> None:
        if row.skipped:
            return
        if segment.id not in self._units:
            self._units[segment.id] = tuple(unit.name for unit in segment.units)
        self.steps.append(row.step)
        self.recorded.add(row, self._units[segment.id])
        for player in self.players.values():
            player.add(segment, row)


class _ActivePlayer(_Player):
    """Replays one policy and keeps the active sets alone: whole tables of many policies do not fit in memory."""

    def __init__(self, run: Run, policy: PolicyLike | None) -> None:
        super().__init__(cast(Run, _WithoutRows(run)), policy)
        self.active_sets = _ActiveSets(run.units)
        self._table = cast(Any, self.active_sets)
        self._recorded = cast(Any, _Ignored())

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._notes)


class _WithoutRows:
    """A run of which a player sees no more than the states that its segments started with."""

    units: tuple[str, ...] = ()
    num_steps = 0

    def __init__(self, run: Run) -> None:
        self.start_state = run.start_state


class _Ignored:
    def add(self, row: RawRow, units: tuple[str, ...]) -> None:
        """Nothing is kept."""


class _ActiveSets:
    """Active sets row by row, in one bit a unit."""

    def __init__(self, units: tuple[str, ...]) -> None:
        self._units = units
        self._rows: list[NDArray[np.uint8]] = []
        self._nothing = np.packbits(np.zeros(len(units), np.bool_))
        self._columns: dict[tuple[str, ...], NDArray[np.intp]] = {}

    def add(self, row: RawRow, units: tuple[str, ...]) -> None:
        active = row.active
        if active is None:
            self._rows.append(self._nothing)
            return
        if units != self._units:
            if units not in self._columns:
                index = {name: i for i, name in enumerate(units)}
                # A unit that the segment did not have is read from one place behind its last.
                self._columns[units] = np.array([index.get(name, len(units)) for name in self._units], np.intp)
            active = np.append(active, False)[self._columns[units]]
        self._rows.append(np.packbits(active))

    def unpacked(self) -> NDArray[np.bool_]:
        """Bools, shape (T, U)."""
        num_units = len(self._units)
        return np.unpackbits(np.stack(self._rows), axis=1, count=num_units).view(np.bool_)


class _Judge:
    """Turns active sets into outcomes."""

    def __init__(
        self,
        steps: NDArray[np.int64],
        units: tuple[str, ...],
        recoverable: NDArray[np.bool_],
        faults: tuple[UnitFault, ...],
        recorded: NDArray[np.bool_],
    ) -> None:
        self._routed = steps + 1
        self._recoverable = recoverable
        self.recorded = recorded
        index = {name: i for i, name in enumerate(units)}
        self._faults = [(fault, index[fault.unit], self._rows_of(fault)) for fault in faults]
        self._outside = np.ones(recorded.shape, np.bool_)
        for _, unit, rows in self._faults:
            self._outside[rows, unit] = False

    def outcome(self, policy: Any, active: NDArray[np.bool_]) -> Outcome:
        latencies = []
        for fault, unit, rows in self._faults:
            during = active[rows, unit]
            if during.any():
                latencies.append(int(self._routed[rows][during.argmax()]) - fault.start_step)
        num_recoverable = int(np.count_nonzero(self._recoverable))
        num_unit_steps = num_recoverable * len(active)
        entered = np.count_nonzero(active[0]) + np.count_nonzero(active[1:] & ~active[:-1])
        return Outcome(
            policy=policy,
            recovered_share=np.count_nonzero(active & self._recoverable) / num_unit_steps if num_unit_steps else 0.0,
            num_switches=int(entered),
            num_different=int(np.count_nonzero(active != self.recorded)),
            num_caught=len(latencies),
            latencies=tuple(latencies),
            num_false=int(np.count_nonzero(active & self._outside)),
            active_counts=np.count_nonzero(active, axis=1).astype(np.int64),
        )

    def _rows_of(self, fault: UnitFault) -> slice:
        """The decisions that route a step of ``fault``."""
        first, end = np.searchsorted(self._routed, [fault.start_step, fault.end_step])
        return slice(int(first), int(end))


def _unit_faults(run: Run) -> tuple[tuple[UnitFault, ...], int]:
    """The faults at units, each once, and how many there are elsewhere or without a length."""
    units, elsewhere = set(run.units), set()
    found: dict[UnitFault, None] = {}
    for event in run.events("fault"):
        start, length = event.data.get("start_step", event.step), event.data.get("num_steps")
        if event.place in units and isinstance(start, int) and isinstance(length, int):
            found[UnitFault(unit=event.place, start_step=start, num_steps=length)] = None
        else:
            elsewhere.add((event.place, event.step, str(event.data.get("fault"))))
    return tuple(found), len(elsewhere)


class _Thresholds:
    """The recorded values of one threshold."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.steps: list[int] = []
        self.values: list[float] = []

    def add(self, segment: Segment, row: RawRow) -> None:
        value = scalar_value(row.scalars[self._name])
        if not row.skipped and not math.isnan(value):
            self.steps.append(row.step)
            self.values.append(value)


class _InForce:
    """A threshold as the rows have it: at a step without one, that of the last step that has."""

    def __init__(self, text: str, steps: Sequence[int], values: Sequence[float]) -> None:
        self._text, self._steps, self._values = text, np.array(steps), values

    @classmethod
    def of(cls, run: Run, name: str, text: str) -> _InForce:
        found, _ = run.fold(lambda: _Thresholds(name))
        if not found.steps:
            allowed = "it was a function, and no row says what it gave."
            raise ConfigError(name, verbatim(text), allowed, f"Set {name}, or name a preset.")
        return cls(text, found.steps, found.values)

    def __call__(self, step: int) -> float:
        return self._values[max(int(np.searchsorted(self._steps, step, side="right")) - 1, 0)]

    def __repr__(self) -> str:
        return self._text


class _Scores:
    """The recorded scores of observed units, from the steps after ``from_step``."""

    def __init__(self, from_step: int) -> None:
        self._from_step = from_step
        self.gnmr: list[NDArray[np.floating[Any]]] = []
        self.delta: list[NDArray[np.floating[Any]]] = []
        self.num_steps = self.num_failed = self.num_flagged = 0
        self.knows_flagged = True

    def add(self, segment: Segment, row: RawRow) -> None:
        if row.skipped or row.gnmr is None or row.delta is None or row.step <= self._from_step:
            return
        known = np.isfinite(row.gnmr) & np.isfinite(row.delta)
        gnmr, delta = row.gnmr[known], row.delta[known]
        self.num_steps += 1
        self.num_failed += int(np.count_nonzero(np.isinf(row.gnmr)))
        alpha, beta = row.scalars["alpha"], row.scalars["beta"]
        if math.isnan(alpha) or math.isnan(beta):
            self.knows_flagged = False
        else:
            self.num_flagged += int(np.count_nonzero((gnmr > alpha) | (delta > beta)))
        self.gnmr.append(gnmr)
        self.delta.append(delta)


def _threshold(scores: NDArray[np.floating[Any]], rate: float) -> float:
    """A threshold of four digits that at most a share ``rate`` of the scores is above."""
    # Recorded scores are float32: one may have become 0, and what was just above a threshold may have become it.
    tiny, infinity = np.float32(np.finfo(np.float32).tiny), np.float32(np.inf)
    value = float(np.nextafter(np.float32(alpha_for_false_trigger_rate(np.maximum(scores, tiny), rate)), infinity))
    digits = 3 - math.floor(math.log10(value))
    return round(math.ceil(value * 10.0**digits) / 10.0**digits, max(digits, 0))
