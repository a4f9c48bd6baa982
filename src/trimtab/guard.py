"""The loop that joins the rings: observe the gradients, decide, act, record.

Nothing here knows how a unit is scored, how a copy is stored or how a row is written. The order within a step is fixed:
unscale, norms, monitors, damping, total norm of what is left, clipping. The decision taken from step t routes step t+1;
alarms are judged just before it.
"""

from __future__ import annotations

import atexit
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trimtab.alarm_response import AlarmAction, AlarmResponse, StopRequest
from trimtab.control import Decision, LoadReport, robust
from trimtab.control.protocol import PolicyLike, ask
from trimtab.errors import ConfigError, nearest_names, verbatim
from trimtab.faults.injected import InjectedFaults
from trimtab.faults.protocol import Fault
from trimtab.journal import Journal, describe_run
from trimtab.monitors.alarms import Alarm
from trimtab.monitors.backward_norms import BackwardCadence, BackwardNorms, refuse_in_backward
from trimtab.monitors.cadence import Cadence
from trimtab.monitors.diagnosis import Diagnosis, diagnose
from trimtab.monitors.gradient_norms import GradientNorms
from trimtab.monitors.group import GroupReading, MonitorGroup, monitor_metrics
from trimtab.monitors.host_copy import HostCopy
from trimtab.monitors.losses import LossHook, mean_loss
from trimtab.monitors.optimizers import OptimizerWatch, unscale
from trimtab.monitors.protocol import Monitor, MonitorContext
from trimtab.monitors.quantizers import QuantizerStats, QuantizerValues, quantizer_metrics, wants_quantizer_stats
from trimtab.pending import Decided, Pending, PendingDecision, decision_before_the_first, decision_metrics
from trimtab.precision.recipe import Conversion, Recipe
from trimtab.precision.units import Selection, find_units
from trimtab.saved_tensors import SavedTensors

__all__ = ["Guard", "PendingDecision", "attach", "detach"]

# Weak: a guard lives as long as its model, which keeps it, and a model that nobody uses any more is freed.
_attached: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Guard]] = weakref.WeakKeyDictionary()


def attach(
    model: nn.Module,
    recipe: Recipe | None = None,
    *,
    policy: PolicyLike | None = None,
    monitors: Sequence[Monitor] = (),
    units: Selection = None,
    record: str | Path | None = None,
    quantizer_stats: bool | None = None,
    on_alarm: Sequence[AlarmAction] = (),
    monitor_detail: bool = False,
    optimizer_in_backward: bool = False,
) -> Guard:
    """Watch ``model`` in training and, with a recipe, run its risky units on the recovery path.

    Without a recipe nothing is converted and training stays bit for bit what it was (but for ``damping``, if the policy
    asks for it).

    Args:
        model: The model, wrapped or not, before or after it was moved to its device.
        recipe: The pair of precision paths, such as ``trimtab.precision.SavedActivations``; None only watches.
        policy: What decides; ``trimtab.control.robust()`` when left out.
        monitors: Further monitors. Their alarms go into the record and give one warning a mechanism.
        units: Which modules to watch: a filter ``f(module, fqn) -> bool``, a list of names, or None for the projections
            and experts of every block; "half" or "block" makes larger units of these. Those that the recipe cannot
            switch are watched only and never use the budget.
        record: Folder or ``.sqlite`` file of the run record; None keeps none. Only rank 0 writes.
        quantizer_stats: Whether to observe what the low-cost path's quantizers lose of their operands, for the metrics
            and the record; None does if the policy has an ``error_limit`` or an ``amax_limit``, and then units on the
            recovery path are observed too.
        on_alarm: What else is done about an alarm: ``trimtab.monitors.RaiseRisk``, ``StopTraining``, or any callable
            ``(alarm, guard)``.
        monitor_detail: Whether ``metrics`` names the monitors' values at each place too, and the quantizers' of each
            unit.
        optimizer_in_backward: Whether the optimizer steps inside backward, from hooks of the parameters
            (``register_post_accumulate_grad_hook``). Norms are then taken before those hooks run, and ``step`` comes
            after each backward, for that is a step of its own. Damping, clipping and a loss scaler are refused there.

    Returns: The guard; call its ``step`` between backward and the optimizer's step.

    Raises: ConfigError: when the model is attached already, a unit does not exist, the recipe can convert none of them,
        or cannot tell what its quantizers do where that is asked for, an action cannot be called, or the record cannot
        be written.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        >>> with attach(model) as guard:
        ...     model(torch.ones(3, 4)).sum().backward()
        ...     decision = guard.step(max_norm=1.0)
        >>> bool(decision.active.any())
        False
    """
    if guards_of(model):
        raise ConfigError(
            "model",
            verbatim(type(model).__name__),
            "trimtab is attached to it already.",
            "Call detach() on the first guard, or trimtab.detach(model).",
        )
    if policy is None:
        policy = robust()
    elif not _is_made(policy, PolicyLike):
        raise ConfigError("policy", policy, "a policy has start(units, recoverable).", "Pass trimtab.control.robust().")
    if recipe is not None and not _is_made(recipe, Recipe):
        raise ConfigError(
            "recipe", recipe, "a recipe has convert(model, units).", "Pass trimtab.precision.SavedActivations()."
        )
    for monitor in monitors:
        if not _is_made(monitor, Monitor):
            raise ConfigError(
                "monitors", monitor, "a monitor has start(model) and observe(step).", "Pass a list of monitors."
            )
    guard = Guard(
        model,
        recipe,
        policy=policy,
        monitors=monitors,
        units=units,
        record=record,
        quantizer_stats=quantizer_stats,
        on_alarm=on_alarm,
        monitor_detail=monitor_detail,
        optimizer_in_backward=optimizer_in_backward,
    )
    _attached[model] = weakref.ref(guard)
    return guard


def detach(model: nn.Module) -> bool:
    """Detach whatever guard watches ``model``, a part of it, or what wraps it; for when no name reaches the guard.

    Returns: Whether there was one.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2))
        >>> _ = attach(model)
        >>> detach(model), detach(model)
        (True, False)
    """
    found = guards_of(model)
    for guard in found:
        guard.close(finished=False)
    return bool(found)


def guards_of(model: nn.Module) -> list[Guard]:
    """Every guard that watches ``model``, a part of it, or what wraps it."""
    related = [m for m in model.modules() if m in _attached]
    related += [a for a in list(_attached) if a not in related and any(m is model for m in a.modules())]
    guards = [_attached[m]() for m in related]
    return [g for g in guards if g is not None]


class Guard:
    """A watched model; made by ``attach``.

    Attributes:
        model: The model.
        units: Names of the watched units, from the input to the loss.
        policy: The policy that decides.
        conversion: The recipe's conversion, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe | None,
        *,
        policy: PolicyLike,
        monitors: Sequence[Monitor],
        units: Selection,
        record: str | Path | None,
        quantizer_stats: bool | None = None,
        on_alarm: Sequence[AlarmAction] = (),
        monitor_detail: bool = False,
        optimizer_in_backward: bool = False,
    ) -> None:
        if optimizer_in_backward:
            refuse_in_backward(model, damping=bool(getattr(policy, "damping", False)))
        error_limit, amax_limit = (getattr(policy, name, None) for name in ("error_limit", "amax_limit"))
        with_stats = wants_quantizer_stats(quantizer_stats, error_limit, recipe, amax_limit)
        self.model = model
        self.policy = policy
        self._units = find_units(model, units, grouping=getattr(recipe, "unit", "projection"))
        self.units = tuple(unit.name for unit in self._units)
        self._in_backward = optimizer_in_backward
        self._norms = (BackwardNorms if optimizer_in_backward else GradientNorms)(model, self._units)
        self._journal = Journal()
        self._monitors = MonitorGroup(monitors, self._journal.say_once)
        self._tensors = SavedTensors(self._monitors, self._journal)
        self._monitor_detail = monitor_detail
        self.conversion: Conversion | None = None
        journal = self._journal
        self._faults = InjectedFaults(lambda place, data, step: journal.event("fault", data, place, step=step))
        self._pending: Pending | None = None
        self._deciding, self._num_loads = False, 0
        self._decision: Decision | None = None
        self._forced: list[str] | None = None
        self._forced_late = False
        self._losses: list[Tensor] = []
        self._step_loss: Tensor | None = None
        self._observed_lr: float | None = None
        self._monitor_values: dict[str, float] = {}
        self._quantizers: QuantizerStats | None = None
        self._quantizer_values: QuantizerValues | None = None
        self._detached = False
        self._at_exit = _ResolveAtExit(self)
        self._damping = bool(getattr(policy, "damping", False))
        heard: list[warnings.WarningMessage] = []
        if recipe is not None:
            with self._journal.hearing() as heard:
                self.conversion = recipe.convert(model, self._units)
        self._watch = OptimizerWatch(self._parameters)
        self._watch.on_step = self._on_optimizer_step
        self._cadence: Cadence | BackwardCadence = Cadence(self._watch)
        if isinstance(self._norms, BackwardNorms):
            self._cadence = BackwardCadence(self._norms)
        # The hook, and with it the model, keeps the guard alive; nothing else needs to.
        self._loss_hook = model.register_forward_hook(LossHook(self._losses, owner=self))
        try:
            self._journal.say_heard(heard)
            switchable = {u.name for u in self.conversion.units} if self.conversion is not None else set()
            self._switch_index = [i for i, name in enumerate(self.units) if name in switchable]
            if with_stats and recipe is not None and self.conversion is not None:
                self._quantizers = QuantizerStats(
                    recipe,
                    self.conversion,
                    self._switch_index,
                    len(self.units),
                    error_limit,
                    getattr(policy, "error_history", "absolute"),
                    amax_limit,
                )
            self._controller = policy.start(self.units, [name in switchable for name in self.units])
            say_once = lambda text: self._journal.say_once(text, text)  # noqa: E731
            self._monitors.start(
                model,
                MonitorContext(
                    optimizers=self._optimizers_seen,
                    say_once=say_once,
                    units=self.units,
                    loss=lambda: self._step_loss,
                ),
            )
            self._alarms = AlarmResponse(
                self._monitors.rules, self._monitors.mechanisms, on_alarm, self.units, self._journal
            )
            about = describe_run(model, recipe, policy, units, self._monitors.names, self._units, self.conversion)
            about["config"] |= self._alarms.to_dict()
            self._journal.open(record, about)
        except BaseException:
            self._take_everything_away()
            raise
        self._begin_step()
        # A script may end without detaching; its last decision is still to be taken and recorded then.
        atexit.register(self._at_exit)

    def step(self, max_norm: float | None = None, scaler: torch.amp.GradScaler | None = None) -> PendingDecision:
        """Observe this step's gradients, decide the next step's route, and clip; once before each ``optimizer.step()``.

        Args:
            max_norm: Clip the total gradient norm to this, exactly as ``torch.nn.utils.clip_grad_norm_`` does; None
                does not clip.
            scaler: The loss scaler of fp16 training. Gradients are unscaled first; when the scaler will skip the step,
                nothing is observed, counted or clipped.

        Returns: The decision, taken when it is first read or when the next forward needs it; on the host, arrays over
            units. Its ``grad_norm`` is the total norm before clipping.

        Raises: ConfigError: when ``max_norm`` is negative or NaN, or the guard is detached.
        """
        if max_norm is not None and not max_norm >= 0:
            raise ConfigError(
                "max_norm", max_norm, "a norm is 0 or more.", "Pass a positive norm, or None not to clip."
            )
        if self._in_backward:
            refuse_in_backward(self.model, max_norm=max_norm, scaler=scaler)
        self.resolve()
        # Only now: an action on an alarm may just have detached it.
        if self._detached:
            raise ConfigError("guard", "detached", "a detached guard watches nothing.", "Attach the model again.")
        if scaler is not None and scaler.is_enabled() and unscale(scaler, self._watch.optimizers()):
            self._losses.clear()
            self._observed_lr = None
            self._monitors.drop(self.num_steps + 1)
            if self._quantizers is not None:
                self._quantizers.drop()
            self._journal.event("skip", {"reason": "the loss scaler found a non-finite gradient"})
            self._forced_late = False  # the retried step runs under the set from its start
            skipped = PendingDecision(self.resolve, self._norms.total(self._norms.read()), skipped=True)
            # The retried step counts its micro-batches from one again, and suffers the same faults.
            self._begin_step(retried=True)
            skipped.fill(self._decision or decision_before_the_first(self.num_steps, self._active_flags()))
            return skipped
        self._journal.step += 1
        problem = self._cadence.on_call(self._parameters())
        reading = self._norms.read()
        if problem is not None and not reading.indices and (max_norm is not None or self._damping):
            problem += " Neither max_norm nor damping does anything then: what they would change is gone."
        self._journal.say_once(problem or "", problem)
        # These travel to the host in the same copy as the norms, at its end.
        tail = [] if self._quantizers is None else [self._quantizers.read().to(reading.norms)]
        self._tensors.note_missing()
        loss = mean_loss(self._losses)
        self._step_loss = loss[0] if loss else None
        monitored = self._monitors.observe(self.num_steps, reading.norms, self._over_ranks())
        tail.append(monitored.flat)
        extra: dict[str, Any] = {"routed_by_hand": self._forced} if self._forced is not None else {}
        if self._forced is not None and self._forced_late:
            extra["routed_late"] = True
        decided: Decided | None = None
        if self._damping:
            # Damping acts on this very step, so this is the one option that waits for the norms here.
            values = HostCopy(torch.cat([reading.norms, *tail]))
            decided = self._decide(self.num_steps, reading.indices, values.read(), monitored)
            scale = np.ones(len(self.units)) if decided is None else decided.decision.scale
            damped = np.nonzero(scale != 1.0)[0]
            if damped.size:
                extra["damped"] = {self.units[u]: float(scale[u]) for u in damped}
                self._norms.damp(reading, scale)
        total = self._norms.total(reading) if max_norm is None else self._norms.clip(reading, max_norm)
        scalars = [total, *loss]
        values = HostCopy(torch.cat([reading.norms, *(_as_element(s, reading.norms) for s in scalars), *tail]))
        handle = PendingDecision(self.resolve, total)
        lr, self._observed_lr = self._observed_lr, None
        step, indices, num_norms = self.num_steps, reading.indices, len(reading.norms)
        self._pending = Pending(step, indices, num_norms, values, len(scalars) > 1, lr, handle, monitored, extra)
        if decided is not None:
            self._finish(decided)
        elif self.conversion is not None:
            self.conversion.pull = self.resolve
        self._begin_step()
        return handle

    def observe(self, *, loss: Tensor | float | None = None, lr: float | None = None) -> None:
        """Tell the record and the monitors this step's loss, and the record its learning rate, before ``step``.

        Both are found without it where the model returns an output with a ``loss`` and the optimizer is torch's.

        Args:
            loss: The step's loss, in place of what the model's outputs hold; a tensor is not waited for.
            lr: The step's learning rate.
        """
        if loss is not None:
            self._losses[:] = [self._as_loss(loss)]
        if lr is not None:
            self._observed_lr = float(lr)

    def route(self, names: Sequence[str]) -> None:
        """Put exactly these units on the recovery path by hand until the next decision; for tests and experiments.

        It holds from here on, so call it before the step's first forward: the row of a step that had begun under
        another set says ``routed_late``. Between a forward and its backward it is too late, and what checkpointing
        recomputes would be something else. On several ranks all of them call it with the same names.

        Raises: ConfigError: when the guard is detached, there is no recipe, or a name is no recoverable unit.
        """
        if self._detached:
            raise ConfigError("guard", "detached", "a detached guard routes nothing.", "Attach the model again.")
        if self.conversion is None:
            raise ConfigError("route", list(names), "without a recipe there is no recovery path.", "Attach with one.")
        if isinstance(names, str):
            raise ConfigError("route", names, "it is a list of names.", f"Write [{names!r}].")
        given: list[Any] = list(names) if isinstance(names, Iterable) else [names]
        if not all(isinstance(name, str) for name in given):
            raise ConfigError("route", given, "it is a list of names.", "Take them from guard.units.")
        known = dict.fromkeys(self.units[i] for i in self._switch_index)
        wanted = set(given)
        if unknown := wanted.difference(known):
            name = min(unknown)
            near = ", ".join(nearest_names(name, known) or list(known)[:3])
            raise ConfigError("route", name, "it is no recoverable unit.", f"The nearest names are {near}.")
        self.resolve()
        self._forced = [n for n in known if n in wanted]
        self._forced_late = bool(getattr(self.conversion, "has_run", False))
        self.conversion.route([n in wanted for n in known])
        self._journal.event("forced", {"units": self._forced}, step=self.num_steps + 1)

    def inject(self, fault: Fault) -> None:
        """Apply a numerical fault on purpose from now on; its start and end go into the record.

        A resumed run injects the faults of the run before it anew, after its state is loaded: what they did to weights
        by then is in the checkpoint, and is not done twice.

        Raises: ConfigError: when the fault does not fit the recipe or names a unit that does not exist.
        """
        self._faults.add(fault, self.num_steps + 1, self.conversion)

    def resolve(self) -> None:
        """Take the decision that is pending, if one is; waits for its norms to be on the host."""
        pending = self._pending
        # An action on an alarm, called while the decision is taken, may read what would ask for it.
        if pending is None or self._deciding:
            return
        decided = self._decide(pending.step, pending.indices, pending.values.read(), pending.reading)
        if decided is not None:
            self._finish(decided)

    @property
    def num_steps(self) -> int:
        """Optimizer steps observed so far, those before a resume included."""
        return self._journal.step

    @property
    def active(self) -> tuple[str, ...]:
        """Names of the units on the recovery path now."""
        self.resolve()
        if self._forced is not None:
            return tuple(self._forced)
        flags = self._active_flags()
        return tuple(self.units[i] for i in self._switch_index if flags[i]) if self.conversion is not None else ()

    def metrics(self) -> dict[str, float]:
        """The latest step's values for a logger, flat: ``trimtab/<monitor>/<aggregate>``."""
        self.resolve()
        values = dict(self._monitor_values)
        if self._decision is not None:
            values |= decision_metrics(self._decision, len(self._switch_index))
        return values | quantizer_metrics(self._quantizer_values, self.units if self._monitor_detail else ())

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """The alarms so far, oldest first, those before a resume included; of very many the latest 1,000."""
        self.resolve()
        return tuple(self._alarms.alarms)

    @property
    def notices(self) -> tuple[Alarm, ...]:
        """What was found that is no alarm, and changes what one means; kept as ``alarms`` are."""
        self.resolve()
        return tuple(self._alarms.notices)

    def diagnosis(self) -> Diagnosis:
        """What the alarms and notices so far amount to: a mechanism, the evidence, and what to do."""
        return diagnose([*self.alarms, *self.notices])

    def note(self, about: str, data: Mapping[str, Any] | None = None, place: str = "") -> None:
        """Put a note of your own into the record, at the step observed last; without a record it goes nowhere.

        Args:
            about: What it is about, as later readers look for it: ``event.data["about"]`` of ``run.events("note")``.
            data: Details, as plain values.
            place: A unit, a layer, a head; empty for the whole run.
        """
        self._journal.event("note", {"about": about} | dict(data or {}), place)

    def raise_risk(self, units: Sequence[str], risk: float = 2.0, steps: int = 10) -> None:
        """Hold the risk of units at ``risk`` or above in the next decisions, within the budget as any other.

        On several ranks all of them call this, at the same step. From an action on an alarm, the decision that is being
        taken is the first. The record keeps it, and replay uses it.

        Args:
            units: Names of watched units.
            risk: Above 1 makes candidates of them.
            steps: For how many decisions.

        Raises: ConfigError: when a unit does not exist, or a number cannot be meant.
        """
        self.resolve()
        self._alarms.raise_risk(units, risk, steps)

    def request_stop(self, reason: str, save: bool = True) -> None:
        """Ask for training to stop; the first one to ask is heard. Nothing in a loop of your own stops by itself.

        Args:
            reason: Why, as a sentence.
            save: Whether a framework that can is to save a checkpoint first.
        """
        if self._alarms.stop is None:
            self._alarms.stop = StopRequest(self.num_steps, reason, save)
            self._journal.event("note", {"stop": reason, "save": save})

    @property
    def should_stop(self) -> bool:
        """Whether an action has asked for training to stop."""
        self.resolve()
        return self._alarms.stop is not None

    @property
    def stop_request(self) -> StopRequest | None:
        """What asked for training to stop, as far as decisions are taken; waits for none."""
        return self._alarms.stop

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs to decide as an uninterrupted one; JSON-able.

        Except what monitors have that is too large for it: see ``tensor_state_dict``.
        """
        self.resolve()
        self._journal.settle()
        return {
            "version": 1,
            "step": self.num_steps,
            "controller": self._controller.state_dict(),
            "forced": self._forced,
            "conversion": self.conversion.state_dict() if self.conversion is not None else {},
            "monitors": self._monitors.state_dict(),
            "tensors": sorted(self._tensors.state()),
            "alarms": self._alarms.state_dict(),
            "faults": self._faults.keys,
        }

    def tensor_state_dict(self) -> dict[str, dict[str, Tensor]]:
        """What the monitors need for a resume and is too large for JSON, by monitor; empty when none has any.

        The tensors are the monitors' own: save them, and do not write to them.
        """
        return self._tensors.state()

    def load_tensor_state_dict(self, state: Mapping[str, Mapping[str, Tensor]], problem: str | None = None) -> None:
        """Take back what ``tensor_state_dict`` gave, after ``load_state_dict``.

        A monitor whose tensors are missing starts a fresh window; one warning and the record say so.

        Args:
            state: By monitor.
            problem: Why some are missing, as a clause, if that is known.
        """
        self._tensors.load(state, problem)

    def load_state_dict(self, state: Mapping[str, Any]) -> LoadReport:
        """Go on from a saved state; the record's later rows are superseded from its step on.

        Args:
            state: What ``state_dict`` gave, also after a trip through JSON.

        Returns: Which units are new and which are gone; a load with other units takes what matches, and warns.

        Raises: ConfigError: when it is no such state.
        """
        if not isinstance(state, Mapping) or state.get("version") != 1 or not state.keys() >= _STATE_KEYS:
            raise ConfigError(
                "state", type(state).__name__, "it is no state of a guard.", "Pass what state_dict() gave."
            )
        report = self._controller.load_state_dict(state["controller"])
        self._num_loads += 1
        self._pending, self._decision, self._forced, self._quantizer_values = None, None, None, None
        if self._quantizers is not None:
            self._quantizers.restart()
        self._losses.clear()
        self._observed_lr = None
        self._monitors.load_state_dict(state["monitors"])
        self._tensors.await_those_of(state.get("tensors", ()))
        self._alarms.load_state_dict(state.get("alarms"))
        self._journal.go_on_from(int(state["step"]), state["controller"])
        self._faults.resume(self.num_steps + 1, state.get("faults", ()))
        if self.conversion is not None:
            self.conversion.pull = None
            self.conversion.load_state_dict(state["conversion"])
            self._route(self._active_flags())
            if state["forced"] is not None:
                known = {self.units[i] for i in self._switch_index}
                self.route([n for n in state["forced"] if n in known])
                self._forced_late = False  # whatever has run before belongs to no step of this state
        if report.new or report.gone:
            self._journal.say_once(
                "units",
                f"The checkpoint's units are not the model's: new here: {_some(report.new)}; "
                f"gone: {_some(report.gone)}. What matches was loaded; new units start without history.",
            )
        self._begin_step()
        return report

    def start_from(self, step: int) -> None:
        """Count steps from ``step`` on, without a state: units start without history, the record goes on from there.

        Args:
            step: Optimizer steps already done.
        """
        self.resolve()
        # With the state, although it is a fresh one: else the record would be read as going on from the rows before.
        self._journal.go_on_from(int(step), self._controller.state_dict())
        self._begin_step()

    def detach(self) -> None:
        """Give the model back as it was found and close the record; safe to call twice."""
        self.close(finished=True)

    def close(self, finished: bool) -> None:
        """``detach``, and say in the record whether the run came to its end.

        Args:
            finished: False when it was cut short, so that the record is not mistaken for a whole one.
        """
        if self._detached:
            return
        self._journal.say_once("never", self._cadence.on_end())
        try:
            self.resolve()
            self._note_products()
        finally:
            self._detached = True
            self._take_everything_away()
            self._journal.close(finished)

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *exc: object) -> None:
        # What ended in an exception must not look like a whole run.
        self.close(finished=exc[0] is None)

    def __repr__(self) -> str:
        """One line; asks for no decision, and so never waits for the device."""
        kinds = f"{len(self.units)} units, {len(self._switch_index)} of them recoverable"
        if self._detached:
            return f"<Guard of {type(self.model).__name__}: {kinds}, step {self.num_steps}, detached>"
        active = len(self._forced) if self._forced is not None else int(self._active_flags().sum())
        return f"<Guard of {type(self.model).__name__}: {kinds}, step {self.num_steps}, {active} active>"

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied model is a plain model: nothing watches it."""

    def _take_everything_away(self) -> None:
        """Leave nothing of ours on the model or in torch."""
        self._watch.stop()
        self._norms.stop()
        self._loss_hook.remove()
        self._monitors.stop()
        self._faults.end()
        if self.conversion is not None:
            self.conversion.pull = None
            self.conversion.undo()
        _attached.pop(self.model, None)
        atexit.unregister(self._at_exit)

    def _parameters(self) -> list[nn.Parameter]:
        # Positions in the pending norms are those of the parameters as they were read.
        if self._pending is None:
            self._norms.refresh()
        return self._norms.parameters

    def _on_optimizer_step(self) -> None:
        self._journal.say_once("never", self._cadence.on_optimizer_step(self._norms.parameters))
        rate = self._watch.learning_rate
        if self._in_backward:  # it steps before ``step`` is called, and what is pending is an earlier step's
            self._observed_lr = rate if self._observed_lr is None else self._observed_lr
        elif self._pending is None:
            self._journal.note_learning_rate(rate)
        elif self._pending.lr is None:
            self._pending.lr = rate

    def _begin_step(self, retried: bool = False) -> None:
        """The next optimizer step begins: tell the recipe and the faults; the record knows of a ``retried`` one."""
        if self.conversion is not None:
            self.conversion.begin_step(self.num_steps + 1)
        self._faults.begin_step(self.num_steps + 1, self.conversion, is_noted=not retried)

    def _decide(self, step: int, indices: list[int], values: np.ndarray, monitored: GroupReading) -> Decided | None:
        """Judge alarms and decide, from ``values`` on the host; None when an action has loaded another state meanwhile.

        The values begin with the norms, and end with the quantizers' statistics and what the monitors read.
        """
        unit_norms, quantizer = self._norms.unit_norms(indices, values), None
        values, read = np.split(values, [len(values) - monitored.size])
        if self._quantizers is not None:
            quantizer = self._quantizers.by_unit(values[len(values) - self._quantizers.size :])
        readings = monitored.read(read)
        num_loads, self._deciding = self._num_loads, True
        try:
            self._alarms.respond(step, readings, self)
        finally:
            self._deciding = False
        if self._num_loads != num_loads or self._detached:
            return None
        raised = self._alarms.take_risks()
        errors, amaxes = (None if quantizer is None else quantizer[name] for name in ("error", "amax"))
        risks = np.array([raised.get(name, np.nan) for name in self.units]) if raised else None
        decision = ask(self._controller, self.policy, unit_norms, errors, risks, amaxes)
        return Decided(decision, unit_norms, quantizer, readings, raised)

    def _finish(self, decided: Decided) -> None:
        """A decision is taken: hand it out, route the next step by it, record it."""
        pending, self._pending = self._pending, None
        assert pending is not None
        decision, quantizer = decided.decision, decided.quantizer
        self._decision, self._forced, self._quantizer_values = decision, None, quantizer
        self._monitor_values = monitor_metrics(decided.readings, self._monitor_detail)
        pending.handle.fill(decision)
        self._route(decision.active)
        self._journal.write(pending, decided)
        if pending.step % 100 == 1 or not self._journal.knows_products:
            self._note_products()
        if self._quantizers is not None:
            told = self._quantizers.too_many_for_long(quantizer, self._controller.budget, decision.reasons)
            self._journal.say_once("quantizers", told)
        self._alarms.say()

    def _note_products(self) -> None:
        self._journal.note_products(getattr(self.conversion, "products", None))

    def _optimizers_seen(self) -> list[torch.optim.Optimizer]:
        """The model's optimizers, once one has stepped."""
        try:
            return self._watch.optimizers() if self._watch.num_steps else []
        except ConfigError:  # it is unclear which of several steps a parameter
            return []

    def _as_loss(self, loss: Tensor | float) -> Tensor:
        """A loss where the gradients are; on its way there nothing waits for the device."""
        device = next((p.device for p in self._norms.parameters if p.device.type != "meta"), torch.device("cpu"))
        if not isinstance(loss, Tensor):
            # Filled in there: what is copied from the host waits for the device to come to it.
            return torch.full((), float(loss), dtype=torch.float32, device=device)
        loss = loss.detach().to(torch.float32)
        return loss.to(device, non_blocking=True) if loss.device.type == "cpu" else loss

    def _over_ranks(self) -> torch.device | None:
        """Where the monitors' values are averaged over the ranks; None where they need not be."""
        if not self._alarms.needs_every_rank:
            return None
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return None
        return self._norms.parameters[0].device if torch.distributed.get_world_size() > 1 else None

    def _active_flags(self) -> np.ndarray:
        return np.asarray(self._controller.active, dtype=bool)

    def _route(self, active: Any) -> None:
        if self.conversion is not None:
            flags = np.asarray(active)
            self.conversion.route([bool(flags[i]) for i in self._switch_index])


class _ResolveAtExit:
    """Takes a guard's last decision when the process ends, if the guard is still there then."""

    def __init__(self, guard: Guard) -> None:
        self.guard = weakref.ref(guard)

    def __call__(self) -> None:
        guard = self.guard()
        if guard is not None:
            with suppress(Exception):  # the device may be gone already
                guard.resolve()


_STATE_KEYS = {"step", "controller", "forced", "conversion", "monitors"}


def _is_made(given: object, protocol: type) -> bool:
    # A class has the methods too; what is needed is one that was made from it.
    return isinstance(given, protocol) and not isinstance(given, type)


def _as_element(scalar: Tensor, like: Tensor) -> Tensor:
    scalar = scalar.full_tensor() if hasattr(scalar, "full_tensor") else scalar
    return scalar.detach().reshape(1).to(like.device, like.dtype)


def _some(names: Sequence[str], most: int = 5) -> str:
    if not names:
        return "none"
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
