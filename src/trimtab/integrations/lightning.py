"""trimtab inside ``lightning``: one callback, nothing else changed.

Lightning clips in its precision plugin, right after the callbacks' and the module's ``on_before_optimizer_step``, so
the callback wraps the two methods of that *instance* through which every optimizer step and every clip of the user's
own goes. The module and the trainer are left alone. State and the monitors' tensors go into Lightning's checkpoints.
"""

from __future__ import annotations

import inspect
import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimtab.alarm_response import AlarmAction
from trimtab.control import PolicyLike, robust
from trimtab.errors import ConfigError, MissingExtraError, TrimtabWarning, verbatim
from trimtab.faults.factories import FaultFactory, checked_faults, made_faults
from trimtab.faults.protocol import Fault
from trimtab.faults.small_batch import SmallBatch
from trimtab.guard import Guard, attach
from trimtab.monitors import Monitor
from trimtab.precision import Recipe, Selection

try:
    # The two packages hold the same classes twice; a callback should be of the one that the loop is of.
    if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
        from pytorch_lightning import Callback
    else:
        from lightning.pytorch import Callback  # type: ignore[assignment]
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError as error:
        raise MissingExtraError("The Lightning callback", "lightning", "lightning") from error

__all__ = ["TrimtabCallback"]

_WRAPPED = ("_clip_gradients", "clip_gradients")
# These clip or step out of reach: inside their engine, or on flattened parameters that are no unit's any more.
_REFUSED = {
    "DeepSpeedStrategy": "DeepSpeed steps inside backward, before a gradient can be read",
    "FSDPStrategy": "it is FSDP version 1, which flattens parameters, so that no unit has its own gradient",
    "XLAStrategy": "its gradients are not on the host's side of the graph",
    "SingleDeviceXLAStrategy": "its gradients are not on the host's side of the graph",
    "XLAFSDPStrategy": "its gradients are not on the host's side of the graph",
}


class TrimtabCallback(Callback):
    """Watch the LightningModule in ``fit`` and, with a recipe, run its risky units on the recovery path.

    Without a recipe training is bit for bit what it was. ``Trainer(gradient_clip_val=...)`` is kept, and clips from the
    norms that the guard has read; a ``configure_gradient_clipping`` of the module's own, clipping by value, and an
    optimizer that does not hold all parameters in the model's order clip as they did, after the norms are read.

    Manual optimization is watched too. Of several optimizers the one that is first in the run, by its ``step`` or by
    ``self.clip_gradients``, makes the step: others that use the same backward belong to it. Optimizers that take turns,
    each after a backward of its own, are watched in the first one's turns only, and one warning says so.

    Args:
        recipe: The pair of precision paths; None only watches.
        policy: What decides; ``robust`` with the run's length, where it is known, when left out.
        monitors: Further monitors.
        record: Folder or file of the run record; None keeps none.
        units: Which modules to watch; see ``trimtab.attach``. Names begin at the LightningModule.
        faults: Faults on purpose, for experiments: see ``trimtab.faults``. One that acts on the model or the optimizer
            is made by a function, ``lambda module, optimizer: BitFlips(module, ...)``; of several optimizers it is
            given the first. They hold in their steps, also when training resumes within them, and are recorded.
            ``SmallBatch`` cuts the batches of ``training_step`` before they go to the device; it is refused where
            ``training_step`` fetches them itself, from a ``dataloader_iter``.
        on_alarm: What else is done about an alarm; see ``trimtab.attach``. With ``trimtab.monitors.StopTraining`` the
            trainer stops after the step that follows it.
        monitor_detail: Whether the guard's ``metrics`` names the monitors' values at each place too.
        log_metrics: Whether the guard's ``metrics`` go to the trainer's loggers, at the steps at which it logs, and
            alarms as text where a logger has ``add_text``. Callbacks can then monitor them too.

    Attributes:
        guard: The guard while ``fit`` runs, or the last one; None before.

    Example:
        >>> callback = TrimtabCallback()  # Trainer(..., callbacks=[callback])
        >>> callback.guard is None
        True
    """

    def __init__(
        self,
        recipe: Recipe | None = None,
        *,
        policy: PolicyLike | None = None,
        monitors: Sequence[Monitor] = (),
        record: str | Path | None = None,
        units: Selection = None,
        on_alarm: Sequence[AlarmAction] = (),
        monitor_detail: bool = False,
        log_metrics: bool = False,
        faults: Sequence[Fault | FaultFactory] = (),
    ) -> None:
        self.recipe = recipe
        self.policy = policy
        self.monitors = tuple(monitors)
        self.record = record
        self.units = units
        self.on_alarm = on_alarm
        self.monitor_detail = monitor_detail
        self.log_metrics = log_metrics
        self.faults = checked_faults(faults)
        self.guard: Guard | None = None
        self._plugin: Any = None
        self._module: Any = None
        self._wrappers: dict[str, tuple[Any, Any]] = {}
        self._losses: list[Tensor] = []
        self._loaded: Mapping[str, Any] | None = None
        self._saved: dict[str, Any] = {}
        self._first: Any = None
        self._is_observed = False
        self._backward_since = False
        self._said: set[str] = set()
        self._last_logged = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to the module, wrap the precision plugin's clipping, and go on from the checkpoint's state if any."""
        # A fit that died in a way of its own never reached an end.
        self._release(finished=False)
        _refuse_what_cannot_be_read(self, trainer)
        policy = self.policy
        if policy is None:
            length = trainer.estimated_stepping_batches
            policy = robust(total_steps=int(length)) if 0 < length < float("inf") else robust()
        self.guard = attach(
            pl_module,
            self.recipe,
            policy=policy,
            monitors=self.monitors,
            units=self.units,
            record=self.record,
            on_alarm=self.on_alarm,
            monitor_detail=self.monitor_detail,
        )
        self._first, self._is_observed, self._backward_since = None, False, False
        try:
            self._wrap(trainer, pl_module)
            # Without a checkpoint, a trainer that goes on where its last fit ended.
            loaded, self._loaded = self._loaded or self._saved, None
            if trainer.global_step > 0:
                self._restore(loaded, trainer.global_step)
            self._inject(trainer, pl_module)
            self._saved, self._last_logged = {}, self.guard.num_steps
        except BaseException:
            self._release(finished=False)
            raise

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Note the loss, unread."""
        if self._plugin is None:
            return
        loss = loss.detach()
        scaler = _scaler_of(trainer)
        if scaler is not None:
            # The scale as a tensor: get_scale would wait for the device.
            loss = loss / scaler.scale(torch.ones((), device=loss.device, dtype=torch.float32))
        self._losses.append(loss)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Note that there are new gradients."""
        self._backward_since = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log where the trainer does, and stop where an action on an alarm has asked for it."""
        guard = self.guard
        if guard is None or self._plugin is None:
            return
        if self.log_metrics:
            self._log(trainer, pl_module, guard)
        stop = guard.stop_request
        # One that this step's decision asked for counts from the next step on: whether it is taken already may differ
        # from rank to rank, and they have to stop together.
        if stop is not None and stop.step < guard.num_steps and not trainer.should_stop:
            trainer.should_stop = True
            if stop.save:
                folder = getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
                trainer.save_checkpoint(Path(folder) / f"trimtab-stop-step={trainer.global_step}.ckpt")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Give the module and the trainer back as they were, and close the record."""
        # A checkpoint may be made yet.
        self._saved = self.state_dict()
        self._release(finished=not trainer.should_stop)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Give everything back; the record does not call the run finished."""
        # What broke may have taken the device along, and that must stay the error that is seen.
        with suppress(Exception):
            self._saved = self.state_dict()
        with suppress(Exception):
            self._release(finished=False)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give everything back, if that was not done yet."""
        self._release(finished=False)

    def state_dict(self) -> dict[str, Any]:
        """The guard's state and the monitors' tensors, for Lightning's checkpoint; of plain types and tensors alone."""
        if self._plugin is None or self.guard is None:
            return dict(self._saved or self._loaded or {})
        # As text: a dictionary of every unit's history would take far longer to pickle.
        state = json.dumps(self.guard.state_dict(), allow_nan=False)
        return {"guard": state, "tensors": self.guard.tensor_state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep a checkpoint's state until ``fit`` begins."""
        self._loaded = state_dict

    def _restore(self, saved: Mapping[str, Any] | None, step: int) -> None:
        assert self.guard is not None
        problem = "holds no state of trimtab"
        if saved:
            try:
                self.guard.load_state_dict(json.loads(saved["guard"]))
                self.guard.load_tensor_state_dict(saved.get("tensors") or {})
                return
            except (ValueError, KeyError, TypeError) as error:
                problem = f"holds no usable state of trimtab ({error})"
        warnings.warn(
            f"The checkpoint {problem}: training resumes at step {step}, and the units start without history, on the "
            "low-cost path.",
            TrimtabWarning,
            stacklevel=2,
        )
        self.guard.start_from(step)

    def _wrap(self, trainer: Any, module: Any) -> None:
        plugin = trainer.precision_plugin
        missing = [name for name in _WRAPPED if not callable(getattr(plugin, name, None))]
        if missing:
            raise ConfigError(
                "trainer",
                verbatim(type(plugin).__name__),
                f"its {missing[0]} is gone, through which trimtab reads gradients before they are clipped.",
                "Use a release of lightning that trimtab's lightning extra allows.",
            )
        self._plugin, self._module = plugin, module
        before_step, clip = (getattr(plugin, name) for name in _WRAPPED)
        ours = (
            lambda *a, **k: self._before_step(before_step, trainer, *a, **k),
            lambda *a, **k: self._clip(clip, trainer, *a, **k),
        )
        for name, wrapper in zip(_WRAPPED, ours, strict=True):
            self._put(name, wrapper)

    def _put(self, name: str, wrapper: Callable[..., Any]) -> None:
        # What the user has put on the instance goes back there; what its class has needs no entry.
        self._wrappers[name] = (wrapper, self._plugin.__dict__.get(name))
        setattr(self._plugin, name, wrapper)

    def _inject(self, trainer: Any, module: Any) -> None:
        """Inject the faults, after the state is loaded: they go on where the run before stopped."""
        assert self.guard is not None
        faults = made_faults(self.faults, module, trainer.optimizers)
        small = [fault for fault in faults if isinstance(fault, SmallBatch)]
        if small and "dataloader_iter" in inspect.signature(module.training_step).parameters:
            raise ConfigError(
                "faults",
                verbatim("SmallBatch"),
                "training_step takes a dataloader_iter, and its batches are cut by nobody else.",
                "Cut them there: fault.batches(dataloader_iter) with guard.inject(fault).",
            )
        for fault in faults:
            self.guard.inject(fault)
        if small:
            # Each batch passes here on its way to the device, once it is fetched and the step before it is over.
            convert = self._plugin.convert_input

            def cut(batch: Any) -> Any:
                if trainer.training:
                    for fault in small:
                        batch = fault.cut(batch)
                return convert(batch)

            self._put("convert_input", cut)

    def _release(self, finished: bool) -> None:
        plugin, self._plugin, self._module = self._plugin, None, None
        if plugin is not None:
            for name, (wrapper, before) in self._wrappers.items():
                if plugin.__dict__.get(name) is wrapper:
                    del plugin.__dict__[name]
                    if before is not None:
                        plugin.__dict__[name] = before
            self._wrappers.clear()
        if self.guard is not None:
            self.guard.close(finished=finished)
        self._losses.clear()
        self._first = None

    def _before_step(
        self,
        original: Callable[..., None],
        trainer: Any,
        model: Any,
        optimizer: Any,
        clip_val: float | None = None,
        gradient_clip_algorithm: Any = None,
    ) -> None:
        """An optimizer is about to step: all hooks have run, and gradients are unscaled but for fused optimizers."""
        if model is not self._module:
            original(model, optimizer, clip_val, gradient_clip_algorithm=gradient_clip_algorithm)
            return
        if self._makes_the_step(optimizer):
            is_observed, self._is_observed = self._is_observed, False
            if not is_observed:
                # Where nobody overrode anything, Lightning would now clip in one known way: the guard does it instead.
                default = model.automatic_optimization and _is_lightnings(model.configure_gradient_clipping)
                if default and self._clips_alike(optimizer, clip_val, gradient_clip_algorithm):
                    self._observe(trainer, clip_val)
                    return
                self._observe(trainer, None)
        # In manual optimization this does nothing.
        original(model, optimizer, clip_val, gradient_clip_algorithm=gradient_clip_algorithm)

    def _clip(
        self,
        original: Callable[..., None],
        trainer: Any,
        optimizer: Any,
        clip_val: float = 0.0,
        gradient_clip_algorithm: Any = "norm",
    ) -> None:
        """Somebody clips; in manual optimization that is before the step is known of, and the norms are read first."""
        module = self._module
        manual = module is not None and not module.automatic_optimization
        if not manual or not self._makes_the_step(optimizer) or self._is_observed:
            original(optimizer, clip_val=clip_val, gradient_clip_algorithm=gradient_clip_algorithm)
            return
        if _scaler_of(trainer) is not None:
            # Lightning unscales in optimizer.step, and would fail if that was done here.
            self._say_once(
                "In manual optimization with a loss scaler self.clip_gradients acts on gradients that are still scaled,"
                " before they can be watched: the norms are those after clipping. Clip in on_before_optimizer_step."
            )
            original(optimizer, clip_val=clip_val, gradient_clip_algorithm=gradient_clip_algorithm)
            return
        alike = self._clips_alike(optimizer, clip_val, gradient_clip_algorithm)
        self._observe(trainer, clip_val if alike else None)
        self._is_observed = True
        if not alike:
            original(optimizer, clip_val=clip_val, gradient_clip_algorithm=gradient_clip_algorithm)

    def _makes_the_step(self, optimizer: Any) -> bool:
        optimizer = _unwrapped(optimizer)
        if self._first is None:
            self._first = optimizer
        if optimizer is not self._first and self._backward_since:
            self._say_once(
                "The optimizers of this module take turns, each after a backward of its own, and a step has one set of "
                f"gradients: trimtab watches the turns of the first, {type(self._first).__name__}, and no others."
            )
        return optimizer is self._first

    def _observe(self, trainer: Any, max_norm: float | None) -> None:
        assert self.guard is not None
        if self._losses:
            # In automatic optimization each micro-batch's loss comes divided by their number: the step's is the sum.
            losses = torch.stack([x.float().reshape(()) for x in self._losses])
            self.guard.observe(loss=losses.sum() if self._module.automatic_optimization else losses.mean())
            self._losses.clear()
        self._backward_since = False
        self.guard.step(max_norm=max_norm if max_norm and max_norm > 0 else None, scaler=_scaler_of(trainer))

    def _clips_alike(self, optimizer: Any, clip_val: float | None, algorithm: Any) -> bool:
        """Whether Lightning's own clip is the guard's, to the last bit: one norm over the same gradients in order."""
        if not clip_val or clip_val <= 0:
            return True
        if str(getattr(algorithm, "value", algorithm) or "norm") != "norm":
            return False
        plugin = type(self._plugin)
        names = {getattr(plugin, n).__qualname__.split(".")[0] for n in ("clip_gradients", "clip_grad_by_norm")}
        if not names <= {"Precision", "MixedPrecision"}:
            return False
        ours = (id(p) for p in self._module.parameters() if p.grad is not None)
        groups = _unwrapped(optimizer).param_groups
        return list(ours) == [id(p) for group in groups for p in group["params"] if p.grad is not None]

    def _log(self, trainer: Any, module: Any, guard: Guard) -> None:
        every = trainer.log_every_n_steps
        done = trainer.global_step if module.automatic_optimization else trainer.fit_loop.total_batch_idx + 1
        if guard.num_steps == self._last_logged or not every or done % every:
            return
        self._last_logged, since = guard.num_steps, self._last_logged
        try:
            module.log_dict(guard.metrics(), on_step=True, on_epoch=False)
            for alarm in [a for a in guard.alarms if a.step > since]:
                for logger in trainer.loggers:
                    add_text = getattr(getattr(logger, "experiment", None), "add_text", None)
                    if callable(add_text):
                        add_text(f"trimtab/alarm/{alarm.mechanism}", alarm.sentence, alarm.step)
        except Exception as error:
            self.log_metrics = False
            self._say_once(f"trimtab's metrics could not be logged and are off: {error!r}.")

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            warnings.warn(text, TrimtabWarning, stacklevel=3)


def _scaler_of(trainer: Any) -> torch.amp.GradScaler | None:
    return getattr(trainer.precision_plugin, "scaler", None)


def _unwrapped(optimizer: Any) -> Any:
    # Lightning's optimizer imitates the class of the one that it holds.
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def _is_lightnings(method: Any) -> bool:
    """Whether a method is the base class's, and nobody's own."""
    home = getattr(getattr(method, "__func__", None), "__module__", "")
    return home.split(".")[0] in ("lightning", "pytorch_lightning")


def _refuse_what_cannot_be_read(callback: TrimtabCallback, trainer: Any) -> None:
    others = [c for c in trainer.callbacks if isinstance(c, TrimtabCallback)]
    if len(others) > 1:
        raise ConfigError(
            "callbacks",
            verbatim(f"{len(others)} of {type(callback).__name__}"),
            "one guard watches a model.",
            "Pass one, with all that is to be watched.",
        )
    for kind in type(trainer.strategy).__mro__:
        if kind.__name__ in _REFUSED:
            raise ConfigError(
                "strategy",
                verbatim(type(trainer.strategy).__name__),
                f"{_REFUSED[kind.__name__]}.",
                "Use ModelParallelStrategy (FSDP2), DDP or a single device, or leave the callback out.",
            )
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                "optimizer",
                verbatim(type(optimizer).__name__),
                "it takes several gradients a step, and a step has one set of norms.",
                "Use another optimizer, or leave the callback out.",
            )
