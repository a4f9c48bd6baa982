"""The loop that joins the rings: observe the gradients, decide, act, record.

Nothing here knows how a unit is scored, how a copy is stored or how a row is written. The order within a step is fixed:
unscale, norms, monitors, damping, total norm of what is left, clipping. The decision taken from step t routes step t+1.
"""

from __future__ import annotations

import platform
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trimtab._version import __version__
from trimtab.control import Decision, LoadReport, robust
from trimtab.control.protocol import PolicyLike
from trimtab.errors import ConfigError, TrimtabWarning, nearest_names
from trimtab.faults.protocol import Fault
from trimtab.monitors.cadence import Cadence
from trimtab.monitors.gradient_norms import GradientNorms
from trimtab.monitors.host_copy import HostCopy
from trimtab.monitors.optimizers import OptimizerWatch, unscale
from trimtab.monitors.protocol import Monitor
from trimtab.precision.recipe import Conversion, Recipe
from trimtab.precision.units import Selection, describe_filter, find_units
from trimtab.trace import RunWriter, StepRow, UnitRow

__all__ = ["Guard", "PendingDecision", "attach"]

_guards: weakref.WeakKeyDictionary[nn.Module, Guard] = weakref.WeakKeyDictionary()


def attach(
    model: nn.Module,
    recipe: Recipe | None = None,
    *,
    policy: PolicyLike | None = None,
    monitors: Sequence[Monitor] = (),
    units: Selection = None,
    record: str | Path | None = None,
) -> Guard:
    """Watch ``model`` in training and, with a recipe, run its risky units on the recovery path.

    Without a recipe nothing is converted and training stays bit for bit what it was.

    Args:
        model: The model, wrapped or not, before or after it was moved to its device.
        recipe: The pair of precision paths, such as ``trimtab.precision.SavedActivations``; None only watches.
        policy: What decides; ``trimtab.control.robust()`` when left out.
        monitors: Further monitors.
        units: Which modules to watch: a filter ``f(module, fqn) -> bool``, a list of names, or None for the projections
            of every block. Those that the recipe cannot switch are watched only and never use the budget.
        record: Folder or ``.sqlite`` file of the run record; None keeps none. Only rank 0 writes.

    Returns: The guard; call its ``step`` between backward and the optimizer's step.

    Raises: ConfigError: when the model is attached already, a unit does not exist, the recipe can convert none of them, or
        the record cannot be written.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        >>> with attach(model) as guard:
        ...     model(torch.ones(3, 4)).sum().backward()
        ...     decision = guard.step(max_norm=1.0)
        >>> bool(decision.active.any())
        False
    """
    taken = next((m for m in model.modules() if m in _guards), None)
    if taken is not None:
        raise ConfigError(
            "model", type(model).__name__, "trimtab is attached to it already.", "Call detach() on the first guard."
        )
    if policy is None:
        policy = robust()
    elif not isinstance(policy, PolicyLike):
        raise ConfigError("policy", policy, "a policy has start(units, recoverable).", "Pass trimtab.control.robust().")
    if recipe is not None and not isinstance(recipe, Recipe):
        raise ConfigError(
            "recipe", recipe, "a recipe has convert(model, units).", "Pass trimtab.precision.SavedActivations()."
        )
    guard = Guard(model, recipe, policy=policy, monitors=monitors, units=units, record=record)
    _guards[model] = guard
    return guard


class PendingDecision(Decision):
    """The decision of a step, taken when somebody first reads it; until then nothing has waited for the device.

    Attributes:
        grad_norm: The total norm before clipping, a tensor on the gradients' device, as ``clip_grad_norm_`` returns it.
        skipped: Whether the loss scaler will skip this step; then nothing was observed and the fields are those of the
            decision in force.
    """

    grad_norm: Tensor
    skipped: bool

    def __init__(self, resolve: Callable[[], None], grad_norm: Tensor, skipped: bool = False) -> None:
        self.__dict__.update(_resolve=resolve, grad_norm=grad_norm, skipped=skipped)

    def __getattr__(self, name: str) -> Any:
        # Only reached for what is not there yet: the guard fills the fields in when it takes the decision.
        resolve = self.__dict__.pop("_resolve", None) if not name.startswith("__") else None
        if resolve is not None:
            resolve()
            if name in self.__dict__:
                return self.__dict__[name]
        raise AttributeError(f"{name!r}: this decision was never taken; its guard has loaded another state since")

    def fill(self, decision: Decision) -> None:
        """Take over the fields of the decision that was taken."""
        self.__dict__.pop("_resolve", None)
        self.__dict__.update(vars(decision))

    def __repr__(self) -> str:
        return "PendingDecision(not read yet)" if "_resolve" in self.__dict__ else super().__repr__()


@dataclass(slots=True)
class _Pending:
    """What a step left to be decided: the norms on their way to the host, and what goes into its row."""

    step: int
    indices: list[int]
    values: HostCopy
    has_loss: bool
    handle: PendingDecision
    extra: dict[str, Any] = field(default_factory=dict)
    monitors: dict[str, float] = field(default_factory=dict)


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
    ) -> None:
        self.model = model
        self.policy = policy
        self._units = find_units(model, units)
        self.units = tuple(unit.name for unit in self._units)
        self._norms = GradientNorms(model, self._units)
        self._writer: RunWriter | None = None
        self.conversion: Conversion | None = None
        self._monitors = list(monitors)
        self._faults: list[Fault] = []
        self._pending: _Pending | None = None
        self._decision: Decision | None = None
        self._forced: list[str] | None = None
        self._losses: list[Tensor] = []
        self._observed: dict[str, Any] = {}
        self._monitor_values: dict[str, float] = {}
        self._said: set[str] = set()
        self._detached = False
        self._step = 0
        if recipe is not None:
            self.conversion = recipe.convert(model, self._units)
        try:
            switchable = {u.name for u in self.conversion.units} if self.conversion is not None else set()
            self._switch_index = [i for i, name in enumerate(self.units) if name in switchable]
            self._controller = policy.start(self.units, [name in switchable for name in self.units])
            if record is not None and _is_writing_rank():
                self._writer = RunWriter(record, **self._description(recipe, policy, units))
        except BaseException:
            if self.conversion is not None:
                self.conversion.undo()
            raise
        self._damping = bool(getattr(policy, "damping", False))
        self._watch = OptimizerWatch(lambda: self._norms.parameters)
        self._cadence = Cadence(self._watch)
        self._watch.on_step = lambda: self._say_once("never", self._cadence.on_optimizer_step())
        self._loss_hook = model.register_forward_hook(_LossHook(self._losses))
        for monitor in self._monitors:
            monitor.start(model)
        self._begin_step()

    def step(self, max_norm: float | None = None, scaler: torch.amp.GradScaler | None = None) -> Decision:
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
        if self._detached:
            raise ConfigError("guard", "detached", "a detached guard watches nothing.", "Attach the model again.")
        if max_norm is not None and not max_norm >= 0:
            raise ConfigError(
                "max_norm", max_norm, "a norm is 0 or more.", "Pass a positive norm, or None not to clip."
            )
        self.resolve()
        if scaler is not None and scaler.is_enabled() and unscale(scaler, self._watch.optimizers()):
            self._losses.clear()
            self._record_event("skip", {"reason": "the loss scaler found a non-finite gradient"})
            skipped = PendingDecision(self.resolve, self._norms.total(self._norms.read()), skipped=True)
            skipped.fill(self._decision if self._decision is not None else self._no_decision())
            return skipped
        self._step += 1
        self._say_once("twice", self._cadence.on_call(self._norms.parameters))
        reading = self._norms.read()
        extra: dict[str, Any] = {"forced": self._forced} if self._forced is not None else {}
        unit_norms = decision = None
        if self._damping:
            # Damping acts on this very step, so this is the one option that waits for the norms here.
            unit_norms = self._norms.unit_norms(reading.indices, HostCopy(reading.norms).read())
            decision = self._controller.update(unit_norms)
            damped = np.nonzero(decision.scale != 1.0)[0]
            if damped.size:
                extra["damped"] = {self.units[u]: float(decision.scale[u]) for u in damped}
                self._norms.damp(reading, decision.scale)
        total = self._norms.total(reading) if max_norm is None else self._norms.clip(reading, max_norm)
        scalars = [total, *self._mean_loss()]
        values = HostCopy(torch.cat([reading.norms, *(_as_element(s, reading.norms) for s in scalars)]))
        handle = PendingDecision(self.resolve, total)
        monitored = self._read_monitors()
        self._pending = _Pending(self._step, reading.indices, values, len(scalars) > 1, handle, extra, monitored)
        if decision is not None and unit_norms is not None:
            self._finish(decision, unit_norms)
        elif self.conversion is not None:
            self.conversion.pull = self.resolve
        self._begin_step()
        return handle

    def observe(self, *, loss: Tensor | float | None = None, lr: float | None = None) -> None:
        """Tell the record this step's loss and learning rate, before ``step``.

        Both are found without it where the model returns an output with a ``loss`` and the optimizer is torch's.

        Args:
            loss: The step's loss; a tensor is not waited for.
            lr: The step's learning rate.
        """
        if loss is not None:
            self._losses[:] = [torch.as_tensor(loss, dtype=torch.float32).detach()]
        if lr is not None:
            self._observed["lr"] = float(lr)

    def route(self, names: Sequence[str]) -> None:
        """Put exactly these units on the recovery path by hand until the next decision; for tests and experiments.

        Raises: ConfigError: when there is no recipe, or a name is no recoverable unit.
        """
        if self.conversion is None:
            raise ConfigError("route", list(names), "without a recipe there is no recovery path.", "Attach with one.")
        known = [self.units[i] for i in self._switch_index]
        for name in names:
            if name not in known:
                near = ", ".join(nearest_names(name, known) or known[:3])
                raise ConfigError("route", name, "it is no recoverable unit.", f"The nearest names are {near}.")
        self.resolve()
        self._forced = [n for n in known if n in set(names)]
        self.conversion.route([n in set(names) for n in known])
        self._record_event("forced", {"units": self._forced})

    def inject(self, fault: Fault) -> None:
        """Apply a numerical fault on purpose from now on; its start and end go into the record.

        Raises: ConfigError: when the fault does not fit the recipe or names a unit that does not exist.
        """
        fault.check(self.conversion)
        self._faults.append(fault)
        self._apply_faults()

    def resolve(self) -> None:
        """Take the decision that is pending, if one is; waits for its norms to be on the host."""
        pending = self._pending
        if pending is None:
            return
        norms = pending.values.read()[: len(pending.indices)]
        unit_norms = self._norms.unit_norms(pending.indices, norms)
        self._finish(self._controller.update(unit_norms), unit_norms)

    @property
    def num_steps(self) -> int:
        """Optimizer steps observed so far, those before a resume included."""
        return self._step

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
        d = self._decision
        if d is not None:
            gnmr, delta, risk = (np.asarray(a) for a in (d.gnmr, d.delta, d.risk))
            num_active = int(np.asarray(d.active).sum()) if self.conversion is not None else 0
            values |= {
                "trimtab/gnmr/max": _largest(gnmr),
                "trimtab/gnmr/mean": _mean(gnmr),
                "trimtab/delta/max": _largest(delta),
                "trimtab/risk/max": _largest(risk),
                "trimtab/control/num_risky": float((risk > 1).sum()),
                "trimtab/control/num_active": float(num_active),
                "trimtab/control/active_share": num_active / max(1, len(self._switch_index)),
                "trimtab/control/num_failed": float(d.num_failed),
                "trimtab/control/num_unobserved": float(d.num_unobserved),
            }
        return values

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs to decide as an uninterrupted one; JSON-able."""
        self.resolve()
        return {
            "version": 1,
            "step": self._step,
            "controller": self._controller.state_dict(),
            "forced": self._forced,
            "conversion": self.conversion.state_dict() if self.conversion is not None else {},
            "monitors": {m.name: m.state_dict() for m in self._monitors},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> LoadReport:
        """Go on from a saved state; the record's later rows are superseded from its step on.

        Args:
            state: What ``state_dict`` gave, also after a trip through JSON.

        Returns: Which units are new and which are gone; a load with other units takes what matches, and warns.

        Raises: ConfigError: when it is no such state.
        """
        if not isinstance(state, Mapping) or state.get("version") != 1 or "controller" not in state:
            raise ConfigError(
                "state", type(state).__name__, "it is no state of a guard.", "Pass what state_dict() gave."
            )
        report = self._controller.load_state_dict(state["controller"])
        self._step = int(state["step"])
        self._pending, self._decision = None, None
        self._losses.clear()
        for monitor in self._monitors:
            if monitor.name in state["monitors"]:
                monitor.load_state_dict(state["monitors"][monitor.name])
        if self.conversion is not None:
            self.conversion.pull = None
            self.conversion.load_state_dict(state["conversion"])
            self._route(self._active_flags())
            if state.get("forced") is not None:
                self.route([n for n in state["forced"] if n in self.units])
        if self._writer is not None:
            self._writer.resume(self._step, state["controller"])
        if report.new or report.gone:
            self._say_once(
                "units",
                f"The checkpoint's units are not the model's: new here: {_some(report.new)}; gone: {_some(report.gone)}. "
                "What matches was loaded; new units start without history.",
            )
        self._begin_step()
        return report

    def start_from(self, step: int) -> None:
        """Count steps from ``step`` on, without a state: units start without history, and the record goes on from there.

        Args:
            step: Optimizer steps already done.
        """
        self.resolve()
        self._step = int(step)
        if self._writer is not None:
            self._writer.resume(self._step)
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
        try:
            self.resolve()
        finally:
            self._detached = True
            self._watch.stop()
            self._loss_hook.remove()
            for monitor in self._monitors:
                monitor.stop()
            if self.conversion is not None:
                self.conversion.undo()
            _guards.pop(self.model, None)
            if self._writer is not None:
                self._writer.close(finished=finished)

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *exc: object) -> None:
        # What ended in an exception must not look like a whole run.
        self.close(finished=exc[0] is None)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied model is a plain model: nothing watches it."""

    def _begin_step(self) -> None:
        """The next optimizer step begins: tell the recipe and the faults."""
        if self.conversion is not None:
            self.conversion.begin_step(self._step + 1)
        self._apply_faults()

    def _apply_faults(self) -> None:
        for fault in self._faults:
            for place, data in fault.begin_step(self._step + 1, self.conversion):
                self._record_event("fault", data, place, step=self._step + 1)

    def _finish(self, decision: Decision, unit_norms: np.ndarray) -> None:
        """A decision is taken: hand it out, route the next step by it, record it."""
        pending, self._pending = self._pending, None
        assert pending is not None
        self._decision, self._forced, self._monitor_values = decision, None, pending.monitors
        pending.handle.fill(decision)
        self._route(decision.active)
        if self._writer is not None:
            self._write(pending, decision, unit_norms)

    def _active_flags(self) -> np.ndarray:
        return np.asarray(self._controller.active, dtype=bool)

    def _route(self, active: Any) -> None:
        if self.conversion is not None:
            flags = np.asarray(active)
            self.conversion.route([bool(flags[i]) for i in self._switch_index])

    def _no_decision(self) -> Decision:
        """What is in force before the first decision: no score, nothing on the recovery path."""
        n = len(self.units)
        return Decision(
            gnmr=np.full(n, np.nan),
            delta=np.full(n, np.nan),
            risk=np.zeros(n),
            active=self._active_flags(),
            lock=np.zeros(n, dtype=np.int64),
            scale=np.ones(n),
            step=self._step,
            alpha=float("nan"),
            beta=float("nan"),
        )

    def _mean_loss(self) -> list[Tensor]:
        losses, self._losses[:] = list(self._losses), []
        if not losses:
            return []
        device = losses[-1].device
        return [torch.stack([x.to(device, torch.float32).reshape(()) for x in losses]).mean()]

    def _read_monitors(self) -> dict[str, float]:
        read: dict[str, float] = {}
        for monitor in list(self._monitors):
            try:
                values = monitor.observe(self._step)
            except Exception as error:  # a watcher that fails must not end the run that it watches
                self._monitors.remove(monitor)
                self._say_once(monitor.name, f"The monitor {monitor.name!r} failed and is off from here on: {error!r}.")
                continue
            read |= {f"trimtab/{monitor.name}/{k}": float(v) for k, v in values.items()}
        return read

    def _write(self, pending: _Pending, decision: Decision, unit_norms: np.ndarray) -> None:
        assert self._writer is not None
        values = pending.values.read()
        n = len(pending.indices)
        lr = self._observed.pop("lr", self._watch.learning_rate)
        extra = pending.extra | ({"monitors": pending.monitors} if pending.monitors else {})
        self._writer.write_step(
            StepRow(
                step=pending.step,
                loss=float(values[n + 1]) if pending.has_loss else None,
                lr=lr,
                grad_norm=float(values[n]),
                alpha=decision.alpha,
                beta=decision.beta,
                norms=unit_norms,
                gnmr=decision.gnmr,
                delta=decision.delta,
                risk=decision.risk,
                lock=decision.lock,
                active=decision.active,
                extra=extra or None,
            )
        )

    def _record_event(self, kind: str, data: Mapping[str, Any], place: str = "", step: int | None = None) -> None:
        if self._writer is not None:
            self._writer.write_event(kind, self._step if step is None else step, place, dict(data))

    def _say_once(self, key: str, message: str | None) -> None:
        if message is not None and key not in self._said:
            self._said.add(key)
            self._record_event("warning", {"message": message})
            warnings.warn(message, TrimtabWarning, stacklevel=3)

    def _description(self, recipe: Recipe | None, policy: PolicyLike, units: Selection) -> dict[str, Any]:
        costs = {}
        if self.conversion is not None:
            costs = {u.name: c for u, c in zip(self.conversion.units, self.conversion.costs, strict=True)}
        rows = [
            UnitRow(
                name=unit.name,
                recoverable=unit.name in costs,
                num_parameters=unit.num_parameters,
                costs=_as_dict(costs[unit.name]) if unit.name in costs else {},
            )
            for unit in self._units
        ]
        config = {
            "model": type(self.model).__name__,
            "num_parameters": sum(p.numel() for p in self.model.parameters()),
            "recipe": recipe.to_dict() if recipe is not None else None,
            "policy": policy.to_dict(),
            "units": str(describe_filter(units)),
            "monitors": [m.name for m in self._monitors],
        }
        versions = {"trimtab": __version__, "torch": torch.__version__, "python": platform.python_version()}
        return {"config": config, "units": rows, "versions": versions}


class _LossHook:
    """Notes the ``loss`` of a model's output, unread; a copy of the model does not inherit it."""

    def __init__(self, losses: list[Tensor]) -> None:
        self.losses = losses

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if isinstance(loss, Tensor) and loss.numel() == 1 and module.training:
            self.losses.append(loss.detach())

    def __deepcopy__(self, memo: dict[int, Any]) -> _LossHook:
        return _LossHook([])

    def __reduce__(self) -> tuple[type[_LossHook], tuple[list[Tensor]]]:
        return _LossHook, ([],)


def _is_writing_rank() -> bool:
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not ready or torch.distributed.get_rank() == 0


def _as_element(scalar: Tensor, like: Tensor) -> Tensor:
    scalar = scalar.full_tensor() if hasattr(scalar, "full_tensor") else scalar
    return scalar.detach().reshape(1).to(like.device, like.dtype)


def _as_dict(cost: Any) -> dict[str, float]:
    return {name: float(getattr(cost, name)) for name in cost.__dataclass_fields__}


def _largest(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(known.max()) if known.size else float("nan")


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else float("nan")


def _some(names: Sequence[str], most: int = 5) -> str:
    if not names:
        return "none"
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
