"""A ``Controller`` for replay: the same decisions, in a fraction of the time.

``trimtab.control.Controller`` is the truth, and a test holds the two together decision by decision. It serves any array
library on any device, and so asks of every unit, at every step, what mostly holds for all of them at once: that each
was observed, has a history and a full queue, and that few are risky. Here NumPy asks once a step for all, and what is
rare is done for the few units alone.

w: steps in the queue or in a window history. U: units. Everything else is (U,).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.control import Controller, ControllerLike, Decision, LoadReport, Policy, PolicyLike
from trimtab.control.amax_history import judge_amaxes
from trimtab.control.arrays import LARGEST, place_of
from trimtab.control.error_history import judge_errors
from trimtab.control.own_history import OwnHistory
from trimtab.control.reasons import AMAX, DELTA, ERROR, GNMR, RAISED, reasons_of
from trimtab.control.schedules import threshold_at
from trimtab.control.scores import CLIP_AFTER, downscale, recent_values
from trimtab.control.selection import next_lock, select_active
from trimtab.errors import ConfigError, TrimtabWarning

__all__ = ["FastController", "start_replay"]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_HOST = place_of(np.zeros(1))

# Settings that this file knows. With any other one set, the truth decides.
_KNOWN = frozenset(
    {
        *("alpha", "beta", "error_limit", "error_history", "error_ema_factor", "amax_limit"),
        *("window_steps", "lock_steps", "max_active", "damping"),
        *("history", "ema_factor", "history_steps", "history_clip", "burn_in_steps", "act_from_step"),
    }
)


def start_replay(policy: PolicyLike, units: Sequence[str], recoverable: Sequence[bool]) -> ControllerLike:
    """Start a controller that takes ``policy``'s decisions: a fast one for GNMR, otherwise the policy's own.

    Example:
        >>> type(start_replay(Policy(), ["q"], [True])).__name__
        'FastController'
    """
    if type(policy) is Policy and _is_known(policy):
        return FastController(policy, units, recoverable)
    return policy.start(units, recoverable)


def _is_known(policy: Policy) -> bool:
    """Whether every setting that is not known here is at its default, in which it changes nothing."""
    unknown = [item for item in fields(policy) if item.name not in _KNOWN]
    return all(item.default is not MISSING and getattr(policy, item.name) == item.default for item in unknown)


class FastController:
    """Takes the decisions of ``Controller``, bit for bit, from float64 arrays of NumPy.

    Args:
        policy: The settings.
        units: Names of the units.
        recoverable: A mask over them.

    Example:
        >>> norms = np.array([[1.0, 2.0], [1.5, 9.0]])
        >>> fast, slow = FastController(Policy(), ["q", "k"], [True, True]), Policy().start(["q", "k"])
        >>> all((fast.update(row).risk == slow.update(row).risk).all() for row in norms)
        True
    """

    def __init__(self, policy: Policy, units: Sequence[str], recoverable: Sequence[bool]) -> None:
        self.policy = policy
        self._truth = policy.start(units, recoverable)
        self._can_recover = np.array(self._truth.recoverable, np.bool_)
        self._scale_queue = downscale(policy.window_steps)
        self._warned: set[str] = set()
        self._take(self._truth)

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the units, from the input to the loss."""
        return self._truth.units

    @property
    def recoverable(self) -> tuple[bool, ...]:
        """For each unit, whether it may be on the recovery path."""
        return self._truth.recoverable

    @property
    def step(self) -> int:
        """Decisions taken so far."""
        return self._step

    @property
    def active(self) -> Bools:
        """The units on the recovery path in the next step."""
        active: Bools = self._active.copy()
        return active

    @property
    def budget(self) -> int:
        """The most units that are ever active at once."""
        return self._truth.budget

    def update(self, norms: Any, errors: Any = None, risks: Any = None, amaxes: Any = None) -> Decision:
        """Take the decision of one optimizer step; see ``Controller.update``.

        Args:
            norms: As there, but always an array of NumPy's, one float64 a unit. It is left as it is.
            errors: So too, or None.
            risks: So too, or None.
            amaxes: So too, or None.
        """
        alpha, beta = self._threshold("alpha"), self._threshold("beta")
        with np.errstate(all="ignore"):
            return self._decide(norms, errors, risks, amaxes, alpha, beta)

    def state_dict(self) -> dict[str, Any]:
        """As ``Controller.state_dict``."""
        num_units = len(self.units)
        past = [[]] * num_units if self._past is None else recent_values(self._past.rows(), self._kept, num_units)
        columns: dict[str, list[Any]] = {
            "seen": self._seen.astype(int).tolist(),
            "entered": self._entered.astype(int).tolist(),
            "mean": self._mean.tolist(),
            "queue": recent_values(self._queue.rows(), self._queued, num_units),
            "history": past,
            "lock": self._lock.tolist(),
            "active": self._active.tolist(),
        }
        # From the truth's own, so that what is remembered beyond these, and does not change here, goes on unharmed.
        state = self._truth.state_dict() | {"step": self._step, **self._in_force}
        for index, name in enumerate(self.units):
            state["units"][name] |= {key: values[index] for key, values in columns.items()}
            for kind, history in (("error", self._errors), ("amax", self._amaxes)):
                if history.seen[index]:  # `UnitMemory` has none otherwise
                    remembered = {"seen": int(history.seen[index]), "mean": float(history.mean[index])}
                    state["units"][name] |= {f"{kind}_{key}": value for key, value in remembered.items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> LoadReport:
        """As ``Controller.load_state_dict``."""
        report = self._truth.load_state_dict(state)
        self._take(self._truth)
        return report

    def _take(self, controller: Controller) -> None:
        """Go on from where ``controller`` is."""
        state = controller.state_dict()
        units = [state["units"][name] for name in self.units]
        policy = self.policy
        self._step: int = state["step"]
        self._in_force: dict[str, float] = {name: state[name] for name in ("alpha", "beta")}
        self._seen, self._entered, self._mean = (_floats(units, name) for name in ("seen", "entered", "mean"))
        self._errors, self._amaxes = (
            OwnHistory(*(_floats(units, f"{kind}_{key}") for key in ("seen", "mean"))) for kind in ("error", "amax")
        )
        self._lock = np.array([unit["lock"] for unit in units], np.int64)
        self._active = np.array([unit["active"] for unit in units], np.bool_)
        self._queue = _Rows([unit["queue"] for unit in units], policy.window_steps)
        self._queued = np.array([float(len(unit["queue"])) for unit in units])
        self._past = None
        if policy.history == "window":
            self._past = _Rows([unit["history"] for unit in units], policy.history_steps)
            self._kept = np.array([float(len(unit["history"])) for unit in units])
        # Once true of all units, they stay so: none of these counts ever falls.
        self._all_full = self._all_past_burn_in = self._all_entered = self._all_clip = False

    def _threshold(self, name: str) -> float:
        """As ``Controller`` has it: the last valid one, and one warning, where a schedule has none."""
        threshold = getattr(self.policy, name)
        try:
            self._in_force[name] = threshold_at(name, threshold, self._step + 1) if callable(threshold) else threshold
        except ConfigError as error:
            if name not in self._warned:
                self._warned.add(name)
                kept = self._in_force[name]
                warnings.warn(f"{error} Until then {name} stays {kept!r}.", TrimtabWarning, stacklevel=3)
        return self._in_force[name]

    def _decide(
        self,
        norms: Floats,
        errors: Floats | None,
        risks: Floats | None,
        amaxes: Floats | None,
        alpha: float,
        beta: float,
    ) -> Decision:
        policy, step = self.policy, self._step + 1
        # None stands for all that were observed, and none that failed. A NaN fails both comparisons.
        observed: Bools | None = None
        failed: Bools | None = None
        if not (norms.min() > 0 and norms.max() <= LARGEST):
            finite = norms <= LARGEST
            observed, failed = finite & (norms > 0), ~(finite & (norms >= 0))
            norms = np.where(observed, norms, 0.0)
        all_have_mean = bool(self._mean.min() > 0)
        gnmr, delta = self._scores(norms, all_have_mean)
        terms = {}
        if step > policy.act_from_step:
            for code, value, threshold in ((GNMR, gnmr, alpha), (DELTA, delta, beta)):
                term = value / threshold
                np.minimum(term, LARGEST, out=term)
                if observed is not None:
                    term[~observed] = 0.0
                terms[code] = term
            risk = np.maximum(terms[GNMR], terms[DELTA])
        else:
            terms[GNMR] = risk = np.zeros(len(norms))
        if failed is not None and failed.any():
            risk = np.where(failed, np.inf, risk)
        scale = self._damping(norms, risk, observed, failed)
        if errors is not None and policy.error_limit is not None:
            terms[ERROR], self._errors = judge_errors(self._errors, errors, policy.error_limit, step, policy, _HOST)
            risk = np.maximum(risk, terms[ERROR])
        if risks is not None:
            terms[RAISED] = np.where(risks >= 0, np.minimum(risks, LARGEST), 0.0)
            risk = np.maximum(risk, terms[RAISED])
        if amaxes is not None and policy.amax_limit is not None:
            terms[AMAX], self._amaxes = judge_amaxes(self._amaxes, amaxes, policy.amax_limit, step, policy, _HOST)
            risk = np.maximum(risk, terms[AMAX])
        risky = risk > 1
        candidates = (risky | (self._lock > 0)) & self._can_recover
        # With places for all of them there is nothing to choose.
        if np.count_nonzero(candidates) > self.budget:
            (places,) = np.nonzero(candidates)  # in the order of units, which decides between equal risks
            candidates[places] = select_active(risk[places], candidates[places], self.budget, _HOST)
        self._active = candidates
        self._remember(norms, gnmr, observed, all_have_mean)
        reason = self._hold(terms, risky, failed)
        self._step = step
        if observed is not None and failed is not None:
            no_score = np.where(failed, np.inf, np.nan)
            gnmr, delta = np.where(observed, gnmr, no_score), np.where(observed, delta, no_score)
        return Decision(
            gnmr=gnmr,
            delta=delta,
            risk=risk,
            active=self._active.copy(),
            lock=self._lock.copy(),
            scale=scale,
            step=step,
            alpha=alpha,
            beta=beta,
            reason=reason,
        )

    def _scores(self, norms: Floats, all_have_mean: bool) -> tuple[Floats, Floats]:
        """GNMR and Delta against what was remembered before."""
        mean, window_steps = self._mean, self.policy.window_steps
        if all_have_mean:
            gnmr = norms / mean
            np.minimum(gnmr, LARGEST, out=gnmr)
        else:
            has_mean = mean > 0
            gnmr = np.where(has_mean, np.minimum(norms / np.where(has_mean, mean, 1.0), LARGEST), 1.0)
        recent = self._queue.sum()
        recent /= window_steps * self._scale_queue
        np.minimum(recent, LARGEST, out=recent)
        self._all_full = self._all_full or bool(self._queued.min() >= window_steps)
        if self._all_full and recent.min() > 0:
            delta = gnmr / recent
            np.minimum(delta, LARGEST, out=delta)
        else:
            comparable = (recent > 0) & (self._queued >= window_steps)
            delta = np.where(comparable, np.minimum(gnmr / np.where(comparable, recent, 1.0), LARGEST), 1.0)
        return gnmr, delta

    def _damping(self, norms: Floats, risk: Floats, observed: Bools | None, failed: Bools | None) -> Floats:
        """What the gradient of each unit is scaled with."""
        scale = np.ones(len(norms))
        if failed is not None:
            scale[failed] = 0.0
        overgrown = risk > 1
        if observed is not None:
            overgrown &= observed
        (damped,) = np.nonzero(overgrown)
        damped = damped[self._mean[damped] > 0]
        scale[damped] = np.minimum(self._mean[damped] / norms[damped], 1.0)
        return scale

    def _hold(self, terms: Mapping[int, Floats], risky: Bools, failed: Bools | None) -> NDArray[np.int8]:
        """The locks after the decision, and the reasons: of units that are risky or active; the others have none."""
        (some,) = np.nonzero(risky | self._active)
        lock, reason = np.zeros(len(risky), np.int64), np.zeros(len(risky), np.int8)
        if len(some):
            of_some = (risky[some], self._active[some])
            lock[some] = next_lock(self._lock[some], of_some[1], of_some[0], self.policy.lock_steps, _HOST)
            broken = np.zeros(len(some), np.bool_) if failed is None else failed[some]
            few = {code: term[some] for code, term in terms.items()}
            reason[some] = reasons_of(few, of_some[0], broken, of_some[1], _HOST)
        self._lock = lock
        return reason

    def _remember(self, norms: Floats, gnmr: Floats, observed: Bools | None, all_have_mean: bool) -> None:
        """Take this step's norms into the history."""
        policy, mean = self.policy, self._mean
        enters = observed
        if policy.burn_in_steps and not self._all_past_burn_in:
            past = self._seen >= policy.burn_in_steps
            self._all_past_burn_in = bool(past.all())
            enters = past if observed is None else past & observed
        value = norms
        if policy.history_clip is not None:
            self._all_clip = self._all_clip or bool(self._entered.min() >= CLIP_AFTER)
            if self._all_clip and all_have_mean:
                value = np.minimum(value, mean * policy.history_clip)
            else:
                clips = (self._entered >= CLIP_AFTER) & (mean > 0)
                value = np.where(clips, np.minimum(value, mean * policy.history_clip), value)
        before_this = self._entered
        self._entered = before_this + (1.0 if enters is None else enters)
        if self._past is not None:
            self._kept += 1.0 if enters is None else enters
            self._past.push(value, enters)
            num_rows = policy.history_steps
            count = np.maximum(np.minimum(self._kept, num_rows), 1.0)
            self._mean = np.minimum(self._past.sum() / (count * downscale(num_rows)), LARGEST)
        else:
            if policy.history == "ema":
                new = mean * policy.ema_factor
                new += value * (1 - policy.ema_factor)
                self._all_entered = self._all_entered or bool(before_this.min() > 0)
                if not self._all_entered:
                    new = np.where(before_this > 0, new, value)
            else:
                new = mean + (value - mean) / np.maximum(self._entered, 1.0)
            self._mean = new if enters is None else np.where(enters, new, mean)
        self._seen += 1.0 if observed is None else observed
        self._queued += 1.0 if observed is None else observed
        self._queue.push(gnmr, observed)


class _Rows:
    """The last w values of each unit, downscaled as ``History`` has them, in a ring.

    Args:
        values: Each unit's, oldest first, at most w.
        num_rows: w.
    """

    def __init__(self, values: Sequence[Sequence[float]], num_rows: int) -> None:
        self._downscale = downscale(num_rows)
        padded = [[0.0] * (num_rows - len(unit)) + list(unit) for unit in values]
        self._ring = np.array(padded, np.float64).T.copy() * self._downscale  # (w, U)
        self._order = list(range(num_rows))  # rows of the ring, oldest first

    def push(self, value: Floats, enters: Bools | None) -> None:
        """Append a value to the units that enter, None for all; those of the others stay where they are."""
        order = [*self._order[1:], self._order[0]]
        if enters is None:
            np.multiply(value, self._downscale, out=self._ring[order[-1]])
        else:
            (stay,) = np.nonzero(~enters)
            kept = self._ring[np.array(self._order)[:, None], stay]
            np.multiply(value, self._downscale, out=self._ring[order[-1]])
            self._ring[np.array(order)[:, None], stay] = kept
        self._order = order

    def sum(self) -> Floats:
        """Each unit's sum, oldest first: another order may give another last bit."""
        total: Floats = self._ring[self._order[0]].copy()
        for row in self._order[1:]:
            total += self._ring[row]
        return total

    def rows(self) -> tuple[Floats, ...]:
        """The rows, oldest first."""
        return tuple(self._ring[row] for row in self._order)


def _floats(units: Sequence[Mapping[str, Any]], name: str) -> Floats:
    return np.array([unit.get(name, 0.0) for unit in units], np.float64)
