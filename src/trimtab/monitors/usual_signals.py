"""The signals that training runs are usually watched by, to compare the others with.

The gradient norm and the loss are in the record without a monitor; here are the rest. U: units, L: attention layers,
P: parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.errors import ConfigError
from trimtab.monitors.alarms import AlarmRule
from trimtab.monitors.detectors import Above
from trimtab.monitors.losses import LossHook, mean_loss
from trimtab.monitors.protocol import BaseMonitor
from trimtab.monitors.router import layer_places
from trimtab.precision.attention_calls import Attention, attention_modules, place_around
from trimtab.precision.convertible import is_dtensor
from trimtab.precision.units import Selection, Unit, find_units, named_modules

__all__ = ["LossSignals", "UsualSignals"]

# Elements of a parameter that the update ratio looks at: of so many, in no particular order, a norm is known to
# 1 / sqrt(2 * 16384) = 0.6%. Our choice.
_MOST_SAMPLED = 16384


class UsualSignals(BaseMonitor):
    """Update ratios, a bound of the attention logits, and when the loss itself tells that something is wrong.

    - ``update_ratio`` of each unit, ``|W_t - W_(t-1)| / |W_(t-1)|``: how far the last optimizer step moved its trained
      parameters. It is told a step later, and NaN where there is no last step to compare with. It is an estimate, from
      up to 16,384 evenly spaced elements of each parameter (and of a sharded one, of what this rank holds): exact for
      smaller ones, to about 1% for larger ones. From the step before a reading on, a float32 copy of these elements is
      kept. Weights of 16 bits move in steps; what an optimizer keeps beside them is not seen.
    - ``attention_logit_bound`` of each layer whose attention transformers looks up: the greatest ``|q| |k|`` of two
      tokens of one head and sequence, times the scale of the logits. No logit is larger, and the largest is usually a
      good deal smaller: a *bound*, which costs one look at queries and keys, where the logits themselves are nowhere
      in memory. Masks and padding are not looked at, biases on the logits not counted.
    - ``loss_excess``, ``loss_rise`` of the model: see ``LossSignals``. The loss is what ``guard.observe`` was told, or
      that of the model's outputs; without either there is none. Alarms: an excess above 8, a rise above 0.1.

    Only forwards in training mode count. In a compiled model, the bounds are computed in its graph.

    Args:
        every_steps: Optimizer steps from one reading to the next; the loss is followed at every step. A reading looks
            at two copies of the sampled weights, most of which are in no cache by then, so 1 costs several times as
            much. Between readings the hooks do nothing, except in compiled code.
        units: What an update ratio is of, as ``find_units`` takes it.

    Raises: ConfigError: when a setting cannot be meant; from ``start``, when ``units`` names what the model has not.

    Source: Ours; the signals are common practice.

    Example:
        >>> model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2, bias=False)])})
        >>> monitor = UsualSignals(every_steps=1)
        >>> monitor.start(model)
        >>> first = monitor.observe(1)
        >>> _ = model["layers"][0].weight.data.mul_(1.01)  # an optimizer step
        >>> round(monitor.observe(2)["update_ratio"].item(), 4)
        0.01
    """

    name = "signals"
    mechanism = "loss"
    # For a loss whose deviations are normal, 8 mean deviations are 6.4 sigma. A smoothed loss of a language model that
    # has lost a tenth of what it was has lost weeks of training. Our choices.
    alarm_rules: Mapping[str, AlarmRule] = {
        "loss_excess": AlarmRule(
            Above(8.0, warmup=0), "The loss is {value:.3g} of its usual deviations above its mean: a spike."
        ),
        "loss_rise": AlarmRule(
            Above(0.1, warmup=0), "The smoothed loss is {value:.0%} above the lowest that it has been: it diverges."
        ),
    }

    def __init__(self, every_steps: int = 10, *, units: Selection = "block") -> None:
        if not _is_count(every_steps):
            raise ConfigError("every_steps", every_steps, "it counts steps, 1 or more.", "Set an int of 1 or more.")
        self._every_steps = int(every_steps)
        self._selection = units
        self._units: list[Unit] = []
        self._bounds: dict[str, _Bound] = {}
        self._undo: list[Any] = []
        self._losses: list[Tensor] = []
        self._loss = LossSignals()
        # Of the weights before the update of step ``_step``; None: of no step.
        self._samples: list[Tensor] = []
        self._step: int | None = None
        self._loaded_step: int | None = None
        self._layers: dict[str, list[str]] = {}
        self._sent: tuple[Any, Tensor, Tensor] | None = None

    def start(self, model: nn.Module) -> None:
        """Find the units and the attention modules, and hook the latter."""
        self.stop()
        modules = {"": model} | named_modules(model)
        self._units = find_units(model, self._selection)
        attention = attention_modules(model)
        self._bounds = {name: _Bound(module) for name, module in attention.items()}
        self._undo = [place_around(attention[name], bound) for name, bound in self._bounds.items()]
        if self.context is None or self.context.loss is None:
            self._undo.append(model.register_forward_hook(LossHook(self._losses)).remove)
        self._layers = {
            "update_ratio": layer_places([unit.name for unit in self._units], modules),
            "attention_logit_bound": layer_places(list(attention), modules),
        }

    @torch.no_grad()
    def observe(self, step: int) -> dict[str, Tensor]:
        """The values of a step: of the loss always, of the rest where a reading is due."""
        values = self._loss.update(*self._step_loss())
        is_due, is_next = step % self._every_steps == 0, (step + 1) % self._every_steps == 0
        samples = self._sample() if is_due or is_next else []
        if is_due:
            before = self._samples if self._step == step - 1 else []
            values["update_ratio"] = self._ratios(samples, before)
            if self._bounds:
                values["attention_logit_bound"] = self._bounds_of_step()
        for bound in self._bounds.values():
            bound.clear()
            bound.is_due = is_next
        self._samples, self._step = (samples, step) if is_next else ([], None)
        return values

    def drop(self, step: int) -> None:
        """Forget the loss and the queries and keys of a step that the loss scaler skips."""
        self._losses.clear()
        for bound in self._bounds.values():
            bound.clear()

    def places(self, metric: str) -> Sequence[str]:
        """``layer_<i>`` of each unit or attention module; the loss is the model's."""
        return self._layers.get(metric, [])

    def state_dict(self) -> dict[str, Any]:
        """At which step the copy was made."""
        return {"step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start afresh, unless ``load_tensor_state`` brings what was kept."""
        self._losses.clear()
        self._loss = LossSignals()
        self._samples, self._step, self._loaded_step = [], None, state["step"]
        for bound in self._bounds.values():
            bound.clear()
            bound.is_due = True  # whether the next step is due is not known until it is observed

    def tensor_state(self) -> dict[str, Tensor]:
        """The copied elements, by the number of their parameter, and what is kept of the loss."""
        return {str(i): sample for i, sample in enumerate(self._samples)} | self._loss.tensor_state()

    def load_tensor_state(self, state: Mapping[str, Tensor]) -> None:
        """Take back what ``tensor_state`` gave."""
        self._loss.load_tensor_state(state)
        self._samples = [state[str(i)] for i in range(len(state)) if str(i) in state]
        self._step, self._loaded_step = self._loaded_step, None

    def stop(self) -> None:
        """Take every hook away, and let go of the model."""
        while self._undo:
            self._undo.pop()()
        self._losses.clear()
        self._loss = LossSignals()
        self._units, self._bounds, self._samples, self._step, self._layers = [], {}, [], None, {}

    def _step_loss(self) -> list[Tensor]:
        """The loss of the step in a list, or an empty one: the guard's, or without a guard that of the outputs."""
        told = None if self.context is None else self.context.loss
        if told is None:
            return mean_loss(self._losses)
        loss = told()
        return [] if loss is None else [loss]

    def _parameters(self) -> list[list[nn.Parameter]]:
        """The trained parameters of each unit; read anew each time, since a wrapper may replace them."""
        return [[p for p in unit.parameters() if p.requires_grad] for unit in self._units]

    def _sample(self) -> list[Tensor]:
        """A float32 copy of evenly spaced elements of each parameter, in the order of ``_parameters``."""
        return [_spaced(p) for parameters in self._parameters() for p in parameters]

    def _ratios(self, now: Sequence[Tensor], before: Sequence[Tensor]) -> Tensor:
        """The update ratio of each unit, shape (U,); NaN where there is nothing to compare."""
        parameters = self._parameters()
        device = now[0].device if now else torch.device("cpu")
        unknown = torch.full((len(parameters),), torch.nan, device=device)
        if not now or [s.shape for s in now] != [s.shape for s in before]:
            return unknown
        before = [s.to(n.device) for s, n in zip(before, now, strict=True)]
        lengths = [
            torch.stack([norm.to(device) for norm in torch._foreach_norm(group)])
            for group in (torch._foreach_sub(list(now), before), before)
        ]
        scale, index = self._scale_and_index(parameters, now, device)
        moved, size = (torch.zeros_like(unknown).index_add(0, index, scale * x.square()) for x in lengths)
        return torch.where(size > 0, (moved / size).sqrt(), torch.nan)

    def _scale_and_index(
        self, parameters: Sequence[Sequence[nn.Parameter]], samples: Sequence[Tensor], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """How many elements each sampled one stands for, and of which unit it is. Each of shape (P,)."""
        flat = [p for of_unit in parameters for p in of_unit]
        scale = [_numel(p) / max(len(s), 1) for p, s in zip(flat, samples, strict=True)]
        owner = [u for u, of_unit in enumerate(parameters) for _ in of_unit]
        # Sent to the device once, and not at each step: sending waits for it.
        if self._sent is None or self._sent[0] != (scale, owner, device):
            sent = torch.tensor(scale).to(device), torch.tensor(owner).to(device)
            self._sent = ((scale, owner, device), *sent)
        return self._sent[1], self._sent[2]

    def _bounds_of_step(self) -> Tensor:
        """The bound of each layer over the step's micro-batches, shape (L,); NaN where it has not run."""
        bounds = [bound.peak for bound in self._bounds.values()]
        peaks = torch.stack([b.to(bounds[0].device) for b in bounds])
        return torch.where(peaks < 0, torch.nan, peaks)


class LossSignals:
    """Whether a loss has left its own course: as a spike, or for good.

    Both are held against the past: a mean and a mean absolute deviation from it, over all losses at first, and from the
    20th on with a weight of 0.05 for the newest.

    - ``loss_excess``: the loss minus the mean of those before it, in units of their mean deviation. A rise that is slow
      enough to take mean and deviation along stays small in it.
    - ``loss_rise``: the mean over the lowest that it has been, minus 1, for a positive one. That is what shows a slow
      rise.

    The first 20 losses have neither (NaN). A loss that is not finite has the excess +inf and changes nothing.

    Args:
        warmup: Losses before the first values.
        ema_factor: Weight of the past in the means, in the long run.

    Source: Ours.

    Example:
        >>> signals = LossSignals(warmup=2)
        >>> excess = [signals.update(torch.tensor(loss))["loss_excess"].item() for loss in (4.0, 2.0, 3.0, 6.0)]
        >>> excess[2:]  # means of 4, 2 and 4, 2, 3, with deviations of |2 - 4|, and of that and |3 - 3|
        [0.0, 3.0]
    """

    def __init__(self, warmup: int = 20, ema_factor: float = 0.95) -> None:
        self._warmup = warmup
        self._least_weight = 1 - ema_factor
        # Losses seen, their mean, its mean deviation, the lowest mean after the warm-up.
        self._state: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def update(self, loss: Tensor | None = None) -> dict[str, Tensor]:
        """Take the next loss; nothing waits for it. Both values, NaN without a loss, and none before the first one."""
        if loss is None:
            nan = None if self._state is None else torch.full_like(self._state[1], torch.nan)
            return {} if nan is None else {"loss_excess": nan, "loss_rise": nan}
        loss = loss.detach().to(torch.float32)
        if self._state is None:
            zero = torch.zeros_like(loss)
            self._state = (zero, zero, zero, torch.full_like(loss, torch.inf))
        num, mean, deviation, lowest = (kept.to(loss.device) for kept in self._state)
        is_finite, is_warm = loss.isfinite(), num >= self._warmup
        away = loss - mean
        # A loss that never moved has no deviation; then anything that float32 can show is an excess.
        scale = torch.maximum(deviation, torch.finfo(torch.float32).eps * mean.abs()).clamp(min=1e-30)
        excess = torch.where(is_warm, away / scale, torch.nan)
        # Means of all values as long as there are few; the deviation of the first one, from nothing, is none.
        weight = (1 / (num + 1)).clamp(min=self._least_weight)
        weight_of_deviation = torch.where(num == 0, 0.0, (1 / num.clamp(min=1)).clamp(min=self._least_weight))
        new_mean = mean + weight * away
        new_deviation = deviation + weight_of_deviation * (away.abs() - deviation)
        new_lowest = torch.where(num + 1 >= self._warmup, torch.minimum(lowest, new_mean), lowest)
        rise = torch.where(is_warm & (new_lowest > 0), new_mean / new_lowest - 1, torch.nan)
        new = (num + 1, new_mean, new_deviation, new_lowest)
        old = (num, mean, deviation, lowest)
        kept = tuple(torch.where(is_finite, n, o) for n, o in zip(new, old, strict=True))
        self._state = (kept[0], kept[1], kept[2], kept[3])
        return {
            "loss_excess": torch.where(is_finite, excess, torch.inf),
            "loss_rise": torch.where(is_finite, rise, torch.nan),
        }

    def tensor_state(self) -> dict[str, Tensor]:
        """What is kept of the losses."""
        return {} if self._state is None else {"loss": torch.stack(self._state)}

    def load_tensor_state(self, state: Mapping[str, Tensor]) -> None:
        """Take back what ``tensor_state`` gave."""
        kept = state.get("loss")
        self._state = None if kept is None else (kept[0], kept[1], kept[2], kept[3])


class _Bound:
    """What is placed around an attention module: notes how large its logits can have been.

    The greatest of all forwards, so that one that is repeated, as by activation checkpointing, changes nothing.

    Args:
        module: The attention module.

    Attributes:
        peak: The bound over the forwards since it was cleared, -1 before the first. 0-dimensional.
        is_due: Whether the step's values will be asked for.
    """

    def __init__(self, module: nn.Module) -> None:
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        # The same tensor at all times, as compiled code writes to it.
        self.peak = torch.full((), -1.0, device=device)
        self.is_due = True

    def __call__(self, attention: Attention, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Compiled code cannot ask whether it is due: it would be compiled anew whenever the answer changed.
        if module.training and (torch.compiler.is_compiling() or self.is_due):
            self.note(args[0], args[1], kwargs.get("scaling"))
        return attention(module, *args, **kwargs)

    @torch.no_grad()
    def note(self, query: Tensor, key: Tensor, scaling: float | None) -> None:
        """Take a forward into account; both of shape (batch, heads, tokens, d_head), maybe with fewer key heads."""
        if query.dim() != 4 or not query.numel() or not key.numel() or query.shape[1] % key.shape[1]:
            return
        longest_query, longest_key = (
            torch.linalg.vector_norm(x.detach(), dim=-1, dtype=torch.float32).amax(-1) for x in (query, key)
        )
        of_key_head = longest_query.unflatten(1, (key.shape[1], -1)).amax(-1)
        scale = query.shape[-1] ** -0.5 if scaling is None else abs(scaling)
        bound = (of_key_head * longest_key).amax() * scale
        if self.peak.device.type in ("cpu", "meta") and bound.device.type != self.peak.device.type:
            # The model has moved since; a copy to the host would wait for each forward.
            self.peak = torch.full((), -1.0, device=bound.device)
        self.peak.copy_(torch.maximum(self.peak, bound.to(self.peak.device)))

    def clear(self) -> None:
        """Begin anew."""
        self.peak.fill_(-1.0)


def _is_count(given: object) -> bool:
    return isinstance(given, Integral) and not isinstance(given, bool) and int(given) >= 1


def _spaced(parameter: nn.Parameter) -> Tensor:
    """A float32 copy of evenly spaced elements."""
    p: Any = parameter.detach()
    flat = (p.to_local() if is_dtensor(p) else p).flatten()
    step = max(1, math.ceil(flat.numel() / _MOST_SAMPLED))
    # A step that shares a divisor with the width of a row would see few of its columns, time and again.
    while step > 1 and math.gcd(step, flat.numel()) > 1:
        step += 1
    return flat[::step].to(torch.float32, copy=True)


def _numel(parameter: nn.Parameter) -> int:
    p: Any = parameter
    return int((p.to_local() if is_dtensor(p) else p).numel())
