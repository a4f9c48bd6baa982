"""trimtab inside ``transformers.Trainer``: one callback, nothing else changed.

The Trainer clips before any callback event of the step, and with ``max_grad_norm=0`` it still calls a clip with an
infinite bound, which turns every gradient into NaN when one is not finite. So the norms must be read before either, and
the callback wraps the two methods of the *instance* that do it, ``training_step`` for the step's loss, and ``log``,
through which metrics reach TensorBoard, W&B, trackio and whatever else the Trainer reports to. State goes
into ``trainer_state.json`` through ``_save_checkpoint``: with the checkpoint, or not at all. What monitors have that is
too large for it is written beside it, and before it. See docs/decisions/0003.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import warnings
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimtab.alarm_response import AlarmAction
from trimtab.control import PolicyLike, robust
from trimtab.errors import ConfigError, MissingExtraError, TrimtabWarning, verbatim
from trimtab.faults.factories import FaultFactory, checked_faults, made_faults
from trimtab.faults.protocol import Fault
from trimtab.faults.small_batch import SmallBatch, cut_by
from trimtab.guard import Guard, attach, guards_of
from trimtab.monitors import Monitor
from trimtab.precision import Recipe, Selection

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.utils import is_sagemaker_mp_enabled
except ImportError as error:
    raise MissingExtraError("The Trainer callback", "transformers", "hf") from error

__all__ = ["TrimtabCallback"]

_STATE_KEY = "trimtab"
_TENSORS_NAME = "trimtab_monitors.pt"
_guards_of_callbacks: weakref.WeakSet[Guard] = weakref.WeakSet()
_WRAPPED = ("_clip_grad_norm", "_get_grad_norm", "training_step", "_save_checkpoint", "log")
# These clip or step out of reach: inside their engine, or on flattened parameters that are no unit's any more.
_REFUSED = {
    "DEEPSPEED": "DeepSpeed steps inside backward, before a gradient can be read",
    "MEGATRON_LM": "Megatron-LM clips inside its own engine",
    "XLA": "its gradients are not on the host's side of the graph",
}


class TrimtabCallback(TrainerCallback):
    """Watch the Trainer's model and, with a recipe, run its risky units on the recovery path.

    Without a recipe training is bit for bit what it was, and so are the logged ``grad_norm`` and the saved arguments.
    The guard's state is saved in every checkpoint and restored on resume, with default ``TrainingArguments``.

    Args:
        recipe: The pair of precision paths; None only watches.
        policy: What decides; ``robust`` with the run's own warm-up and length when left out.
        monitors: Further monitors.
        record: Folder or file of the run record; None keeps none.
        units: Which modules to watch; see ``trimtab.attach``.
        faults: Faults on purpose, for experiments: see ``trimtab.faults``. One that acts on the model or the optimizer
            is made by a function, ``lambda model, optimizer: BitFlips(model, ...)``. They hold in their steps, also
            when training resumes within them, and are recorded. ``SmallBatch`` cuts the batches before the Trainer
            counts their tokens, so that the loss is the mean over what is left.
        on_alarm: What else is done about an alarm; see ``trimtab.attach``. With ``trimtab.monitors.StopTraining`` the
            Trainer stops at the end of the step after it.
        monitor_detail: Whether the guard's ``metrics`` names the monitors' values at each place too.
        log_metrics: Whether the guard's ``metrics`` are part of what the Trainer logs of its training, and so reach all
            that it reports to (``report_to``). Only when it logs, and then it waits for the device anyway.

    Attributes:
        guard: The guard while training runs, or the last one; None before.

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
        self._trainer: Trainer | None = None
        self._wrappers: dict[str, tuple[Any, Any]] = {}
        self._losses: list[Tensor] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach to the model, wrap the Trainer's clipping, and go on from the checkpoint's state if it resumes one."""
        trainer, checkpoint = _calling_trainer(self)
        # A train() that died, or one that is retried with a smaller batch, never reached on_train_end.
        self._release(finished=False)
        _refuse_what_cannot_be_read(trainer)
        self._take_over(trainer)
        policy = self.policy
        if policy is None:
            policy = robust(warmup_steps=args.get_warmup_steps(state.max_steps), total_steps=state.max_steps)
        model: Any = trainer.model
        self.guard = attach(
            model,
            self.recipe,
            policy=policy,
            monitors=self.monitors,
            units=self.units,
            record=self.record,
            on_alarm=self.on_alarm,
            monitor_detail=self.monitor_detail,
        )
        _guards_of_callbacks.add(self.guard)
        self._wrap(trainer)
        if state.global_step > 0:
            folder = Path(args.output_dir or "") / f"checkpoint-{state.global_step}"
            self._restore(state, folder if checkpoint is None else Path(checkpoint))
        try:
            self._inject(trainer, model)
        except BaseException:
            self._release(finished=False)
            raise

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stop where an action on an alarm has asked for it."""
        assert self.guard is not None
        stop = self.guard.stop_request
        # One that this step's decision asked for counts from the next step on: whether it is taken already may differ
        # from rank to rank, and they have to stop together.
        if stop is not None and stop.step < self.guard.num_steps:
            control.should_training_stop = True
            control.should_save = control.should_save or stop.save

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Give the model and the Trainer back as they were, and close the record."""
        self._release(finished=state.global_step >= state.max_steps)

    def _take_over(self, trainer: Trainer) -> None:
        """A Trainer that was interrupted, and whose name is gone, has left its guard on the model: detach that one."""
        others = [c for c in trainer.callback_handler.callbacks if isinstance(c, TrimtabCallback) and c is not self]
        if others:
            raise ConfigError(
                "callbacks",
                verbatim(f"{len(others) + 1} of {type(self).__name__}"),
                "one guard watches a model.",
                "Pass one, with all that is to be watched.",
            )
        model: Any = trainer.model
        for guard in guards_of(model):
            if guard in _guards_of_callbacks:
                guard.close(finished=False)

    def _wrap(self, trainer: Trainer) -> None:
        missing = [name for name in _WRAPPED if not callable(getattr(trainer, name, None))]
        if missing:
            raise ConfigError(
                "trainer",
                type(trainer).__name__,
                f"its {missing[0]} is gone, through which trimtab reads gradients before they are clipped.",
                "Use a release of transformers that trimtab's hf extra allows.",
            )
        self._trainer = trainer
        clip, get, train, save, log = (getattr(trainer, name) for name in _WRAPPED)
        ours: tuple[Callable[..., Any], ...] = (
            lambda model: self._clip(clip, model, trainer.args.max_grad_norm),
            lambda model, grad_norm=None: self._norm_to_log(get, model, grad_norm),
            lambda *a, **k: self._note_loss(train(*a, **k)),
            lambda *a, **k: self._save(save, *a, **k),
            lambda logs, *a, **k: log(self._with_metrics(logs), *a, **k),
        )
        for name, wrapper in zip(_WRAPPED, ours, strict=True):
            self._put(trainer, name, wrapper)

    def _put(self, trainer: Trainer, name: str, wrapper: Callable[..., Any]) -> None:
        # What the user has put on the instance goes back there; what its class has needs no entry.
        self._wrappers[name] = (wrapper, trainer.__dict__.get(name))
        setattr(trainer, name, wrapper)

    def _inject(self, trainer: Trainer, model: Any) -> None:
        """Inject the faults, after the state is loaded: they go on where the run before stopped."""
        assert self.guard is not None
        optimizers = [] if trainer.optimizer is None else [trainer.optimizer]
        faults = made_faults(self.faults, model, optimizers)
        for fault in faults:
            self.guard.inject(fault)
        small = [fault for fault in faults if isinstance(fault, SmallBatch)]
        if small:
            # Here all batches of a step are fetched, once the step before it is over, and their tokens counted.
            fetch = trainer.get_batch_samples
            self._put(trainer, "get_batch_samples", lambda batches, *a, **k: fetch(cut_by(small, batches), *a, **k))

    def _release(self, finished: bool) -> None:
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            for name, (wrapper, before) in self._wrappers.items():
                if trainer.__dict__.get(name) is wrapper:
                    del trainer.__dict__[name]
                    if before is not None:
                        trainer.__dict__[name] = before
            self._wrappers.clear()
        if self.guard is not None:
            self.guard.close(finished=finished)
        self._losses.clear()

    def _clip(self, original: Callable[..., Any], model: Any, max_norm: float) -> Any:
        if getattr(original, "__func__", None) is Trainer._clip_grad_norm:
            return self._observe_and_clip(max_norm)
        # Somebody clips in a way of their own: theirs holds, after the norms are read.
        self._observe_and_clip(None)
        return original(model)

    def _observe_and_clip(self, max_norm: float | None) -> Tensor:
        """Read the norms, then clip: what the Trainer's own clip returns, from norms that are read once."""
        assert self.guard is not None
        assert self._trainer is not None
        scaler = self._trainer.accelerator.scaler
        if scaler is not None:
            # accelerate knows its optimizers; the guard then sees that the gradients are unscaled already.
            self._trainer.accelerator.unscale_gradients()
        if self._losses:
            # Each micro-batch's loss comes divided by their number, or by the step's tokens: the step's is the sum.
            self.guard.observe(loss=torch.stack([x.float() for x in self._losses]).sum())
            self._losses.clear()
        return self.guard.step(max_norm=max_norm, scaler=scaler).grad_norm

    def _norm_to_log(self, original: Callable[..., Any], model: Any, grad_norm: Any) -> Any:
        assert self._trainer is not None
        if grad_norm is not None:
            return original(model, grad_norm=grad_norm)
        total = self._observe_and_clip(None)
        if self._trainer.accelerator.scaler is not None:
            # The original would unscale once more, and fail. This is what it does then.
            module: Any = self._trainer.model
            torch.nn.utils.clip_grads_with_norm_(module.parameters(), float("inf"), total)
            return total
        return original(model, grad_norm=None)

    def _note_loss(self, loss: Tensor) -> Tensor:
        self._losses.append(loss.detach())
        return loss

    def _with_metrics(self, logs: dict[str, float]) -> dict[str, float]:
        assert self.guard is not None
        # An evaluation and the end of training are logged by the same method, and are no step of ours.
        if self.log_metrics and "loss" in logs:
            logs |= self.guard.metrics()
        return logs

    def _save(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        assert self.guard is not None
        assert self._trainer is not None
        # Annotated as a list in transformers, and a dict by the time training runs.
        callbacks: Any = self._trainer.state.stateful_callbacks
        callbacks[_STATE_KEY] = _encode(self.guard.state_dict())
        # Before the Trainer's state: a checkpoint that has a state has its tensors.
        self._save_tensors(kwargs.get("trial", args[1] if len(args) > 1 else None))
        original(*args, **kwargs)

    def _save_tensors(self, trial: Any) -> None:
        assert self.guard is not None
        assert self._trainer is not None
        tensors = self.guard.tensor_state_dict()
        if not tensors or not self._trainer.args.should_save:
            return
        run_folder = Path(self._trainer._get_output_dir(trial=trial))
        path = run_folder / f"checkpoint-{self._trainer.state.global_step}" / _TENSORS_NAME
        new = path.with_name(path.name + ".new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"step": self.guard.num_steps, "monitors": tensors}, new)
            os.replace(new, path)
        except (OSError, RuntimeError) as error:  # torch's writer knows only the latter
            warnings.warn(
                f"{path} could not be written ({error}): a run that resumes there starts the monitors' windows afresh.",
                TrimtabWarning,
                stacklevel=2,
            )

    def _restore(self, state: TrainerState, checkpoint: Path) -> None:
        assert self.guard is not None
        callbacks: Any = state.stateful_callbacks or {}
        saved = callbacks.get(_STATE_KEY)
        reason: Exception | None = None
        try:
            if saved is not None:
                decoded = _decode(saved)
                self.guard.load_state_dict(decoded)
                self._restore_tensors(checkpoint / _TENSORS_NAME, decoded)
        except (ValueError, KeyError, TypeError, zlib.error) as error:
            reason = error
        if saved is None or reason is not None:
            what = "holds no state of trimtab" if saved is None else f"holds no usable state of trimtab ({reason})"
            warnings.warn(
                f"{checkpoint} {what}: training resumes at step {state.global_step}, and the units start without "
                "history, on the low-cost path.",
                TrimtabWarning,
                stacklevel=2,
            )
            self.guard.start_from(state.global_step)

    def _restore_tensors(self, path: Path, state: Mapping[str, Any]) -> None:
        assert self.guard is not None
        if not state.get("tensors"):
            return
        tensors: Mapping[str, Mapping[str, Tensor]] = {}
        problem = None
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True)
            if saved["step"] != state["step"]:
                raise ValueError(f"it is of step {saved['step']}")
            tensors = saved["monitors"]
        except Exception as error:  # whatever a torn file makes of itself
            problem = f"{path.name}: {error}".splitlines()[0]
        self.guard.load_tensor_state_dict(tensors, problem)


def _calling_trainer(callback: TrimtabCallback) -> tuple[Trainer, str | None]:
    """The Trainer whose event is being handled, and the checkpoint it resumes from.

    Callbacks are not given their Trainer, so it is looked for among the callers: the one that has this callback.
    """
    frame = sys._getframe(1)
    while frame is not None:
        # No further out than needed: before Python 3.13 a frame that was looked at keeps what its variables held.
        local = frame.f_locals
        found = local.get("self")
        if isinstance(found, Trainer) and callback in found.callback_handler.callbacks:
            checkpoint = local.get("resume_from_checkpoint")
            return found, checkpoint if isinstance(checkpoint, str) else None
        frame = frame.f_back  # type: ignore[assignment]
    raise ConfigError(
        "callbacks",
        type(callback).__name__,
        "the callback works inside transformers.Trainer, and no Trainer that has it is training.",
        "Pass it to Trainer(callbacks=[...]); in another loop use trimtab.attach.",
    )


def _refuse_what_cannot_be_read(trainer: Trainer) -> None:
    kind = trainer.accelerator.distributed_type.name
    reason = _REFUSED.get(kind)
    if is_sagemaker_mp_enabled():
        kind, reason = "SAGEMAKER_MP", "its optimizer clips inside its own engine"
    elif kind == "FSDP" and not trainer.accelerator.is_fsdp2:
        kind, reason = "FSDP version 1", "it flattens parameters, so that no unit has its own gradient"
    if reason is not None:
        raise ConfigError(
            "trainer", kind, f"{reason}.", "Use FSDP2, DDP or a single device, or leave the callback out."
        )


def _encode(state: Mapping[str, Any]) -> dict[str, str]:
    # Packed, because trainer_state.json is indented: a line a number would bury what people read in it.
    text = json.dumps(state, allow_nan=False).encode()
    return {"format": "zlib+base64", "data": base64.b64encode(zlib.compress(text)).decode()}


def _decode(saved: Mapping[str, str]) -> dict[str, Any]:
    return json.loads(zlib.decompress(base64.b64decode(saved["data"])))
