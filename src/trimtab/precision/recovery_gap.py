"""How much recovery would gain each unit, measured: its gradient on both paths beside an all-recovered reference."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trimtab.errors import ConfigError, nearest_names, verbatim
from trimtab.precision.recipe import Conversion, QuantizerObserver
from trimtab.precision.units import Unit

__all__ = ["UnitGap", "measure_recovery_gaps"]


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitGap:
    """What both paths do to one unit's gradient.

    A perturbation is the gradient on a path minus the reference. mu is the norm of its mean over batches and repeats, v
    the mean of its squared norm.

    Attributes:
        gradient_norm: Norm of the reference gradient, the mean over batches: G.
        mu_low: mu on the low-cost path.
        v_low: v on the low-cost path.
        mu_high: mu on the recovery path.
        v_high: v on the recovery path.
        gap: Penalty on the low-cost path minus penalty on the recovery path; NaN or infinite where a gradient was.
    """

    gradient_norm: float
    mu_low: float
    v_low: float
    mu_high: float
    v_high: float
    gap: float


def measure_recovery_gaps(
    model: nn.Module,
    guard_or_conversion: Any,
    batch_fn: Callable[[int], Tensor],
    *,
    units: Sequence[str] | None = None,
    others: Literal["high", "low"] = "high",
    num_batches: int = 1,
    repeats: int = 1,
    eta: float = 1e-3,
    L: float = 1.0,
    Gamma: float = 1.0,
    step: int = 1,
    active_after: Sequence[bool] | None = None,
) -> dict[str, UnitGap]:
    """Measure the recovery gap of units, by running batches with one unit at a time on its other path.

    The reference of a batch is the gradient with *every* unit on the recovery path, the mean over repeats. With
    ``others="high"`` a unit's perturbation is the one that it makes itself: it alone is on the low-cost path. Its own
    recovery path is then the reference, so that ``mu_high`` is 0, and ``v_high`` only the noise of stochastic rounding
    (0 with one repeat). With ``others="low"`` all other units are on the low-cost path, as most are in a run, and what
    they do to this unit's gradient counts on both sides. Repeats differ in the recipe's random numbers; for one that
    rounds to nearest, one is enough.

    Costs: forwards and backwards, ``num_batches * repeats * (U + 1)`` with ``others="high"``, one more a batch and
    repeat with "low", for U measured units. Memory: up to five float32 copies of the gradients of the measured
    units; a gradient of each parameter of the model, as in training, beside those there are; a copy of its buffers.

    Call it between optimizer steps: after one, before the next forward. Gradients, buffers, torch's random streams, the
    conversion's state and its route are as before afterwards, and so is the training that follows. Every run starts
    from the same random numbers, so that dropout is the same on both paths. What else hooks the model is run as in any
    forward: hooks of a guard's monitors see these batches, and hooks on gradients run. Statistics that the quantizers
    have kept are dropped. Not for a model that steps its optimizer within backward.

    Args:
        model: The model, converted.
        guard_or_conversion: Its guard (with a recipe), or what ``recipe.convert`` returned.
        batch_fn: Runs the model on the micro-batch of a number from 0 and returns its loss; the same each time.
        units: Names of the units to measure; None for all that the recipe can switch.
        others: On which path the units are that are not measured just then.
        num_batches: Micro-batches. >= 1.
        repeats: Runs of each micro-batch. >= 1.
        eta: Learning rate in the penalty.
        L: Smoothness in the penalty.
        Gamma: Factor of the second moment in the penalty.
        step: For a bare conversion: the optimizer step that is next. A guard knows it.
        active_after: For a bare conversion: the route to leave behind, one flag a unit; all on the low-cost path when
            left out. A guard knows it.

    Returns:
        What was measured of each unit, by name, from the input to the loss. ``{name: one.gap ...}`` is a step of
        ``trimtab.control.Oracle``.

    Raises:
        ConfigError: when there is no conversion, a unit does not exist, or a number cannot be meant.

    Source: Kong et al. 2026, section 4. The penalty is theirs; how mu and v are measured is ours.

    Example:
        >>> from trimtab.precision import SavedActivations, find_units
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        >>> conversion = SavedActivations(4, 16).convert(model, find_units(model, None))
        >>> x = torch.linspace(-1, 1, 32).reshape(4, 8)
        >>> gaps = measure_recovery_gaps(model, conversion, lambda i: model(x).square().sum())
        >>> all(one.gap > 0 and one.mu_high == 0 for one in gaps.values()), model[0].weight.grad is None
        (True, True)
    """
    guard = guard_or_conversion if hasattr(guard_or_conversion, "conversion") else None
    conversion: Any = guard_or_conversion if guard is None else guard.conversion
    if not isinstance(conversion, Conversion) or isinstance(conversion, type):
        given = verbatim(type(guard_or_conversion).__name__)
        remedy = "Pass a guard with a recipe, or what recipe.convert returned."
        raise ConfigError("guard_or_conversion", given, "there are no two paths without a conversion.", remedy)
    for name, value in (("num_batches", num_batches), ("repeats", repeats)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(name, value, "it is a count of 1 or more.", "Set it to 1 or more.")
    if others not in ("high", "low"):
        raise ConfigError("others", others, "it is 'high' or 'low'.", "Use one of them.")
    num_units = len(conversion.units)
    if active_after is not None and len(active_after) != num_units:
        allowed = f"the conversion has {num_units} units."
        raise ConfigError("active_after", verbatim(f"({len(active_after)} flags)"), allowed, "Pass one flag a unit.")
    measured = _measured(conversion.units, units)

    with _left_as_found(model, conversion, guard, step, active_after) as (run, first_step):
        runs = _Runs(model, conversion, batch_fn, run, [conversion.units[i] for i in measured])
        high, low = [True] * num_units, [False] * num_units
        reference = [_Perturbation() for _ in measured]
        on_low, on_high = ([_Perturbation() for _ in measured] for _ in range(2))
        for batch in range(num_batches):
            seeds = [first_step + batch * repeats + r for r in range(repeats)]
            # The reference of this batch first: what it is subtracted from needs all of it.
            of_batch = [_Perturbation() for _ in measured]
            for seed in seeds:
                for k, gradient in enumerate(runs.gradients(high, batch, seed)):
                    of_batch[k].add(gradient)
            base = [one.mean for one in of_batch]
            for k, one in enumerate(of_batch):
                reference[k].add(base[k])
                if others == "high":
                    on_high[k].add_noise(one)
            for seed in seeds:
                if others == "low":
                    for k, gradient in enumerate(runs.gradients(low, batch, seed)):
                        on_low[k].add(gradient - base[k])
                for k, index in enumerate(measured):
                    route = [
                        flag if i != index else not flag for i, flag in enumerate(high if others == "high" else low)
                    ]
                    target = on_low if others == "high" else on_high
                    target[k].add(runs.gradients(route, batch, seed, only=k)[0] - base[k])
    found = {}
    for k, index in enumerate(measured):
        gradient_norm = float(reference[k].mean.norm())
        low_penalty, high_penalty = (
            _penalty(eta, gradient_norm, one.mu, L, Gamma, one.v) for one in (on_low[k], on_high[k])
        )
        found[conversion.units[index].name] = UnitGap(
            gradient_norm=gradient_norm,
            mu_low=on_low[k].mu,
            v_low=on_low[k].v,
            mu_high=on_high[k].mu,
            v_high=on_high[k].v,
            gap=low_penalty - high_penalty,
        )
    return found


def _penalty(eta: float, G: float, mu: float, L: float, Gamma: float, v: float) -> float:
    """As ``trimtab.control.theory.penalty``, which this ring does not know."""
    return eta * G * mu + L * eta**2 / 2 * Gamma * v


class _Perturbation:
    """The mean of vectors, and the mean of their squared norms, one pass."""

    def __init__(self) -> None:
        self.count = 0
        self.mean: Any = 0.0
        self._square = 0.0  # of the squared norms
        self._spread = 0.0  # of the squared distances from the mean; by differences of squares it would cancel out

    def add(self, vector: Tensor) -> None:
        self.count += 1
        away = vector - self.mean
        self.mean = self.mean + away / self.count
        self._square += (float(vector.double().square().sum()) - self._square) / self.count
        self._spread += float((away.double() * (vector - self.mean).double()).sum())

    def add_noise(self, other: _Perturbation) -> None:
        """Count ``other`` as perturbations of mean 0, with its own spread."""
        self.count += 1
        noise = other._spread / (other.count - 1) if other.count > 1 else 0.0
        self._square += (noise - self._square) / self.count

    @property
    def mu(self) -> float:
        return float(self.mean.double().norm()) if isinstance(self.mean, Tensor) else 0.0

    @property
    def v(self) -> float:
        return self._square


class _Runs:
    """Gradients of units after one forward and backward under a route."""

    def __init__(
        self,
        model: nn.Module,
        conversion: Conversion,
        batch_fn: Callable[[int], Tensor],
        begin_run: Callable[[], None],
        units: Sequence[Unit],
    ) -> None:
        self._model, self._conversion, self._batch_fn = model, conversion, batch_fn
        self._begin_run, self._units = begin_run, units

    def gradients(self, route: Sequence[bool], batch: int, seed: int, only: int | None = None) -> list[Tensor]:
        """The gradient of each measured unit, or of one, flat and in float32."""
        self._begin_run()
        self._conversion.begin_step(seed)
        self._conversion.route(route)
        with torch.enable_grad():
            self._batch_fn(batch).backward()
        return [_gradient_of(unit) for unit in (self._units if only is None else [self._units[only]])]


@contextmanager
def _left_as_found(
    model: nn.Module, conversion: Any, guard: Any, step: int, active_after: Sequence[bool] | None
) -> Iterator[tuple[Callable[[], None], int]]:
    """What begins a run, and the step to seed the first one by; gives everything back when the block ends."""
    if guard is not None:
        guard.resolve()
        step = guard.num_steps + 1
        held = set(guard.active)
        active_after = [unit.name in held for unit in conversion.units]
    elif conversion.pull is not None:
        conversion.pull()
    # Taken by now; otherwise the first forward would ask for it, and undo our route.
    conversion.pull = None
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    state: Mapping[str, Any] = copy.deepcopy(conversion.state_dict())
    devices = sorted({t.device.index or 0 for t in itertools.chain(parameters, model.buffers()) if t.is_cuda})
    # The guard's record would take the losses of these forwards for those of the next step.
    losses: list[Tensor] | None = getattr(guard, "_losses", None)
    num_losses = len(losses or ())

    def put_back() -> None:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)

    with torch.random.fork_rng(devices=devices):
        streams = torch.get_rng_state(), [torch.cuda.get_rng_state(d) for d in devices]

        def begin_run() -> None:
            put_back()
            conversion.load_state_dict(state)
            torch.set_rng_state(streams[0])
            for device, stream in zip(devices, streams[1], strict=True):
                torch.cuda.set_rng_state(stream, device)
            for parameter in parameters:
                parameter.grad = None

        try:
            yield begin_run, step
        finally:
            put_back()
            conversion.load_state_dict(state)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            if losses is not None:
                del losses[num_losses:]
            if isinstance(conversion, QuantizerObserver):
                conversion.take_quantizer_stats()
            conversion.route([False] * len(conversion.units) if active_after is None else active_after)
            if guard is None:
                conversion.begin_step(step)
            else:
                guard._begin_step(retried=True)  # as the scaler's retried step: the faults of the step are on again


def _measured(units: Sequence[Unit], names: Sequence[str] | None) -> list[int]:
    """The numbers of the units to measure."""
    known = [unit.name for unit in units]
    if names is None:
        return list(range(len(units)))
    for name in names:
        if name not in known:
            near = nearest_names(str(name), known)
            remedy = f"Did you mean {', '.join(map(repr, near))}?" if near else f"There are {len(known)} units."
            raise ConfigError("units", name, "the recipe switches no unit of this name.", remedy)
    wanted = set(names)
    return [i for i, name in enumerate(known) if name in wanted]


def _gradient_of(unit: Unit) -> Tensor:
    """The unit's gradient, all of its parameters in one vector; zeros where one has none."""
    parts = []
    for parameter in unit.parameters():
        if not parameter.requires_grad:
            continue
        gradient: Any = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        parts.append((gradient if unit.expert is None else gradient[unit.expert]).detach().float().flatten())
    return torch.cat(parts) if parts else torch.zeros(0)
