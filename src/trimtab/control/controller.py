"""The controller: one decision an optimizer step, vectorised over units, in any array library."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trimtab.control.amax_history import judge_amaxes
from trimtab.control.arrays import Array, Place, place_of, to_array, to_numpy
from trimtab.control.checkpoint import ControllerMemory, LoadReport, UnitMemory
from trimtab.control.decision import Decision
from trimtab.control.error_history import judge_errors
from trimtab.control.own_history import OwnHistory
from trimtab.control.policy import Policy
from trimtab.control.reasons import AMAX, DELTA, ERROR, GNMR, RAISED, reasons_of
from trimtab.control.schedules import threshold_at
from trimtab.control.scores import History, observe, recent_values, remember, score
from trimtab.control.selection import next_lock, select_active
from trimtab.control.units import recoverable_mask, unit_names
from trimtab.errors import ConfigError, TrimtabWarning

__all__ = ["Controller"]


class Controller:
    """Score every unit's gradient norm, and choose the units that take the recovery path in the next step.

    Deterministic: the same norms, channel errors, raised risks and amaxes give the same decisions on every rank and
    after every resume. The state is float64, and lives in the namespace and on the device of the norms last given; a
    device without float64 cannot hold it.
    ``update`` reads no value back, so on an accelerator it waits for nothing.

    Args:
        units: Number of units, or their names from the input to the loss. A count names them ``unit_0``, ...
        policy: The settings.
        recoverable: None for all units, a mask over the units, or the names of those with a recovery path. The others
            are scored, and never active.

    Raises:
        ConfigError: when there is no unit, a name occurs twice, or a recoverable unit does not exist.

    Source: Kong et al. 2026, Algorithms 1 and 2. ``trimtab.control.reference`` is the same in plain Python.

    Example:
        >>> controller = Controller(["q", "k"], Policy(max_active=1))
        >>> for norms in ([1.0, 1.0], [1.0, 5.0]):
        ...     decision = controller.update(norms)
        >>> decision.gnmr.tolist(), decision.active.tolist()
        ([1.0, 5.0], [False, True])
    """

    def __init__(
        self,
        units: int | Sequence[str],
        policy: Policy,
        recoverable: Sequence[bool] | Sequence[str] | None = None,
    ) -> None:
        if not isinstance(policy, Policy):
            raise ConfigError("policy", policy, "a controller starts from a Policy.", "Pass Policy() or robust().")
        self._units = unit_names(units)
        self._policy = policy
        self._recoverable = recoverable_mask(recoverable, self._units)
        self._budget = policy.budget(sum(self._recoverable))
        self._step = 0
        self._thresholds = {name: threshold_at(name, getattr(policy, name), 1) for name in ("alpha", "beta")}
        self._warned: set[str] = set()
        self._place: Place
        self._history: History
        self._errors: OwnHistory
        self._amaxes: OwnHistory
        self._can_recover: Array
        self._lock: Array
        self._active: Array
        self._place_memories([UnitMemory()] * len(self._units), place_of(np.zeros(1)))

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the units, from the input to the loss."""
        return self._units

    @property
    def policy(self) -> Policy:
        """The settings."""
        return self._policy

    @property
    def recoverable(self) -> tuple[bool, ...]:
        """For each unit, whether it may be on the recovery path."""
        return self._recoverable

    @property
    def step(self) -> int:
        """Decisions taken so far; the last one was taken from this optimizer step's norms."""
        return self._step

    @property
    def active(self) -> Array:
        """The units on the recovery path in the next step, bool, shape (units,)."""
        return self._own(self._active)

    @property
    def budget(self) -> int:
        """The most units that are ever active at once."""
        return self._budget

    def update(
        self,
        norms: Array | Sequence[float | None],
        errors: Array | Sequence[float | None] | None = None,
        risks: Array | Sequence[float | None] | None = None,
        amaxes: Array | Sequence[float | None] | None = None,
    ) -> Decision:
        """Take the decision of one optimizer step.

        Whatever the norms, errors, risks and amaxes are, the answer is a valid decision within the budget.

        An error is a risk of its own: it counts in full where the norm was not observed, and before ``act_from_step``
        unless the policy's ``error_history`` compares it with one. It changes neither the norms' history nor damping.
        So does a risk that is raised; and an amax, which is always compared with its history.

        Args:
            norms: L2 norm of each unit's gradient before clipping, after unscaling and accumulation. Shape (units,),
                any real dtype, widened to float64. 0, or None in a list, = not observed; NaN, infinite or
                negative = failed.
            errors: Channel error of each unit's low-cost path, from 0; +inf = a non-finite operand, and a risk of the
                largest finite double (+inf is kept for failed norms). Shape (units,). NaN, negative, or None in a
                list, = not known, adds nothing. Ignored while the policy has no ``error_limit``. Errors that live
                elsewhere than the norms are copied to them.
            risks: Risk that something else sees in each unit, an alarm, say: above 1 makes a candidate of it. +inf is
                the largest finite double. Shape (units,). NaN, negative, or None in a list, = none. Copied to the norms
                as errors are.
            amaxes: Largest magnitude of the operand of each unit's low-cost path, above 0; +inf = a non-finite operand,
                and a risk as that of errors. Shape (units,). 0, NaN, negative, or None in a list, = not known, adds
                nothing. Ignored while the policy has no ``amax_limit``. Copied to the norms as errors are.

        Returns:
            The scores of this step and the active set of the next.

        Raises:
            ValueError: when the number of norms, of errors, of risks or of amaxes is not the number of units.

        Source: Kong et al. 2026, Algorithms 1 and 2.

        Example:
            >>> controller = Controller(3, Policy(max_active=1))
            >>> decision = controller.update([float("inf"), -1.0, 2.0])
            >>> int(decision.active.sum()) <= controller.budget, decision.num_failed
            (True, 2)
        """
        norms = self._one_a_unit("norms", to_array(norms))
        if errors is not None:
            errors = self._one_a_unit("errors", to_array(errors, missing=float("nan")))
        if risks is not None:
            risks = self._one_a_unit("risks", to_array(risks, missing=float("nan")))
        if amaxes is not None:
            amaxes = self._one_a_unit("amaxes", to_array(amaxes, missing=float("nan")))
        if not self._place.is_home_of(norms):
            self._move_to(place_of(norms))
        step = self._step + 1
        alpha, beta = self._threshold("alpha", step), self._threshold("beta", step)
        with np.errstate(all="ignore"):  # an overflow is clamped below; other libraries do not speak of it
            beside = [self._beside_norms(values) for values in (errors, risks, amaxes)]
            return self._decide(self._place.widen(norms), *beside, step=step, alpha=alpha, beta=beta)

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs to go on bit for bit, as plain values that JSON takes; waits for the device.

        Example:
            >>> import json
            >>> controller = Controller(["q", "k"], Policy())
            >>> _ = controller.update([1.0, 2.0])
            >>> resumed = Controller(["k", "q"], Policy())
            >>> resumed.load_state_dict(json.loads(json.dumps(controller.state_dict())))
            LoadReport(new=(), gone=())
            >>> resumed.update([2.0, 1.0]).gnmr.tolist() == controller.update([1.0, 2.0]).gnmr.tolist()
            True
        """
        memories = dict(zip(self._units, self._memories(), strict=True))
        return ControllerMemory(self._step, self._thresholds["alpha"], self._thresholds["beta"], memories).to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> LoadReport:
        """Go on from a state that was saved, in this order of units or another.

        Another window than the one saved with keeps the most recent values; a smaller budget keeps the units locked
        longest. Units that the state does not know start fresh.

        Args:
            state: What ``state_dict`` returned.

        Returns:
            The units that are new and those that are gone.

        Raises:
            ConfigError: when ``state`` is no state of a controller; nothing is changed then.
        """
        memory = ControllerMemory.from_dict(state)
        memories, report = memory.match(self._units)
        self._place_memories(memories, self._place)
        self._step = memory.step
        self._thresholds = {"alpha": memory.alpha, "beta": memory.beta}
        return report

    def _decide(
        self,
        norms: Array,
        errors: Array | None,
        risks: Array | None,
        amaxes: Array | None,
        *,
        step: int,
        alpha: float,
        beta: float,
    ) -> Decision:
        place, policy, xp = self._place, self._policy, self._place.xp
        seen = observe(norms, place)
        scores = score(self._history, seen, place)
        risk = xp.where(seen.failed, place.inf, place.zero)
        # What is compared for the reason: one term is there always, and stands for none where no risk is above 1.
        terms = {GNMR: xp.zeros_like(risk)}
        if step > policy.act_from_step:
            for code, value, threshold in ((GNMR, scores.gnmr, alpha), (DELTA, scores.delta, beta)):
                term = xp.minimum(value / place.number(threshold), place.largest)
                terms[code] = xp.where(seen.observed, term, place.zero)
                risk = xp.maximum(risk, terms[code])
        # Before the others come in: they say nothing about how large the gradient should have been.
        overgrown = (risk > place.one) & seen.observed
        if errors is not None and policy.error_limit is not None:
            terms[ERROR], self._errors = judge_errors(self._errors, errors, policy.error_limit, step, policy, place)
            risk = xp.maximum(risk, terms[ERROR])
        if risks is not None:
            terms[RAISED] = xp.where(risks >= place.zero, xp.minimum(risks, place.largest), place.zero)
            risk = xp.maximum(risk, terms[RAISED])
        if amaxes is not None and policy.amax_limit is not None:
            terms[AMAX], self._amaxes = judge_amaxes(self._amaxes, amaxes, policy.amax_limit, step, policy, place)
            risk = xp.maximum(risk, terms[AMAX])
        risky = risk > place.one
        candidates = (risky | (self._lock > 0)) & self._can_recover
        active = select_active(risk, candidates, self._budget, place)
        mean = self._history.mean
        # Only where it is used: a mean of 0 is no history, and says nothing about how far to scale.
        damped = overgrown & (mean > place.zero)
        scale = xp.minimum(mean / xp.where(damped, seen.norms, place.one), place.one)
        scale = xp.where(damped, scale, xp.where(seen.failed, place.zero, place.one))
        no_score = xp.where(seen.failed, place.inf, place.nan)
        self._history = remember(self._history, seen, scores.gnmr, policy, place)
        self._lock = next_lock(self._lock, active, risky, policy.lock_steps, place)
        self._active = active
        self._step = step
        return Decision(
            gnmr=xp.where(seen.observed, scores.gnmr, no_score),
            delta=xp.where(seen.observed, scores.delta, no_score),
            risk=risk,
            active=self._own(active),
            lock=self._own(self._lock),
            scale=scale,
            step=step,
            alpha=alpha,
            beta=beta,
            reason=reasons_of(terms, risky, seen.failed, active, place),
        )

    def _one_a_unit(self, name: str, values: Array) -> Array:
        """``values``, if there is one for each unit."""
        if values.shape != (len(self._units),):
            got = values.shape[0] if len(values.shape) == 1 else f"an array of shape {tuple(values.shape)}"
            raise ValueError(f"{name}: got {got}, but there are {len(self._units)} units. Pass one for each unit.")
        return values

    def _beside_norms(self, values: Array | None) -> Array | None:
        """``values`` as float64 where the state lives."""
        if values is None or self._place.is_home_of(values):
            return None if values is None else self._place.widen(values)
        return self._place.floats(to_numpy(place_of(values).widen(values)))

    def _threshold(self, name: str, step: int) -> float:
        """The threshold at ``step``; the last valid one, and one warning, where a schedule has none."""
        try:
            self._thresholds[name] = threshold_at(name, getattr(self._policy, name), step)
        except ConfigError as error:
            if name not in self._warned:
                self._warned.add(name)
                kept = self._thresholds[name]
                warnings.warn(f"{error} Until then {name} stays {kept!r}.", TrimtabWarning, stacklevel=3)
        return self._thresholds[name]

    def _own(self, array: Array) -> Array:
        """A copy, so that what a reader does to it leaves the state alone."""
        return self._place.xp.asarray(array, copy=True)

    def _place_memories(self, memories: Sequence[UnitMemory], place: Place) -> None:
        """Hold ``memories``, one a unit, in arrays at ``place``."""
        if self._policy.history == "window":
            # Saved under another kind of history: its mean is the best single value to start the window from.
            memories = [m if m.history or not m.entered else replace(m, history=[m.mean]) for m in memories]
        self._place = place
        self._history = History.of(memories, self._policy, place)
        self._errors = OwnHistory.of([m.error_seen for m in memories], [m.error_mean for m in memories], place)
        self._amaxes = OwnHistory.of([m.amax_seen for m in memories], [m.amax_mean for m in memories], place)
        self._can_recover = place.bools(self._recoverable)
        lock = place.integers([memory.lock for memory in memories])
        held = place.bools([memory.active for memory in memories]) & self._can_recover
        self._active = select_active(place.widen(lock), held, self._budget, place)
        self._lock = lock * place.xp.astype(self._active, place.xp.int64)

    def _move_to(self, place: Place) -> None:
        """Hold the same state at another place."""
        self._place = place
        self._history = self._history.moved_to(place)
        self._errors = self._errors.moved_to(place)
        self._amaxes = self._amaxes.moved_to(place)
        self._can_recover = place.bools(self._recoverable)
        self._lock = place.integers(to_numpy(self._lock))
        self._active = place.bools(to_numpy(self._active))

    def _memories(self) -> list[UnitMemory]:
        """Every unit's memory as plain values."""
        history = self._history
        columns = zip(
            to_numpy(history.seen).astype(int).tolist(),
            to_numpy(history.entered).astype(int).tolist(),
            to_numpy(history.mean).tolist(),
            recent_values(history.queue, history.queued, len(self._units)),
            recent_values(history.rows, history.kept, len(self._units)),
            to_numpy(self._lock).tolist(),
            to_numpy(self._active).tolist(),
            to_numpy(self._errors.seen).astype(int).tolist(),
            to_numpy(self._errors.mean).tolist(),
            to_numpy(self._amaxes.seen).astype(int).tolist(),
            to_numpy(self._amaxes.mean).tolist(),
            strict=True,
        )
        return [UnitMemory(*column) for column in columns]
