"""Runs the user's monitors so that one that fails cannot end the run that it watches.

What they observe goes to the host in one flat tensor, behind the norms, and becomes one reading a metric there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trimtab.errors import ConfigError
from trimtab.monitors.alarms import AlarmRule, Reading
from trimtab.monitors.host_copy import HostCopy
from trimtab.monitors.protocol import Monitor, MonitorContext
from trimtab.precision.convertible import is_dtensor

__all__ = ["GroupReading", "MonitorGroup", "Readings", "monitor_metrics"]

Readings = dict[str, dict[str, Reading]]
"""By monitor and metric."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """One metric of a step: its values are on the host already, or a part of what is copied from ``device``."""

    monitor: str
    metric: str
    places: tuple[str, ...]
    on_host: NDArray[np.float64] | None = None
    device: torch.device | None = None
    start: int = 0


@dataclass(slots=True)
class GroupReading:
    """What all monitors observed in one step, on its way to the host.

    Args:
        flat: For the step's one copy, behind all else there; empty when no monitor has a tensor beside the norms.
    """

    flat: Tensor
    _slots: list[_Slot] = field(default_factory=list)
    _elsewhere: dict[torch.device, HostCopy] = field(default_factory=dict)
    _with_unknown: bool = True

    @property
    def size(self) -> int:
        """Number of values in ``flat``."""
        return self.flat.numel()

    def read(self, flat: NDArray[Any]) -> Readings:
        """Every reading, once the values of ``flat`` are on the host."""
        arrays = {device: copy.read() for device, copy in self._elsewhere.items()} | {self.flat.device: flat}
        readings: Readings = {}
        for slot in self._slots:
            values = slot.on_host
            if values is None:
                assert slot.device is not None
                values = arrays[slot.device][slot.start : slot.start + len(slot.places)].astype(np.float64)
            if self._with_unknown or not np.isnan(values).all():
                readings.setdefault(slot.monitor, {})[slot.metric] = Reading(slot.places, values)
        return readings


class MonitorGroup:
    """The monitors of a guard; one that raises is switched off, with one warning, and the others go on.

    Args:
        monitors: The monitors.
        say_once: Warns, the first time for a key.

    Raises: ConfigError: when two have the same name.
    """

    def __init__(self, monitors: Sequence[Monitor], say_once: Callable[[str, str], None]) -> None:
        self._monitors = list(monitors)
        self._say_once = say_once
        self._places: dict[tuple[str, str], tuple[str, ...]] = {}
        names = [monitor.name for monitor in self._monitors]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(
                    "monitors", name, "two monitors have this name.", "Pass one of them, or give one another name."
                )

    @property
    def names(self) -> list[str]:
        """Names of those that are on."""
        return [monitor.name for monitor in self._monitors]

    @property
    def rules(self) -> dict[str, dict[str, AlarmRule]]:
        """The alarm rules of each, by metric."""
        return {monitor.name: dict(getattr(monitor, "alarm_rules", {})) for monitor in self._monitors}

    @property
    def mechanisms(self) -> dict[str, str]:
        """What the alarms of each are a sign of, where it says so."""
        return {monitor.name: str(getattr(monitor, "mechanism", "")) for monitor in self._monitors}

    def start(self, model: nn.Module, context: MonitorContext) -> None:
        """Start all; here an error is the user's setting, and is raised."""
        for monitor in self._monitors:
            bind = getattr(monitor, "bind", None)
            if bind is not None:
                bind(replace(context, say_once=self._voice(monitor.name, context.say_once)))
            monitor.start(model)

    @torch.no_grad()
    def observe(self, step: int, norms: Tensor, over_ranks: torch.device | None = None) -> GroupReading:
        """All their values of a step; device work only.

        Args:
            step: The optimizer step.
            norms: What they are copied with; tensors on another device are copied from there.
            over_ranks: Not None: the mean over all ranks is taken, on this device, so that every rank has the same
                values. NaN is left out of it. All ranks then call this, with monitors that return the same metrics.
        """
        observed: dict[tuple[str, str], Tensor | NDArray[np.float64]] = {}
        for monitor in list(self._monitors):
            try:
                values = {(monitor.name, str(k)): _flattened(v) for k, v in monitor.observe(step).items()}
                for key, value in values.items():
                    self._name_places(monitor, key, len(value))
            except Exception as error:
                self._switch_off(monitor, error)
            else:
                observed |= values
        if over_ranks is not None:
            observed = self._mean_over_ranks(observed, over_ranks)
        reading = self._gather(observed, norms)
        # A metric that no rank has in this step was given a place in the collective all the same.
        reading._with_unknown = over_ranks is None
        return reading

    @torch.no_grad()
    def drop(self, step: int) -> None:
        """The loss scaler skips this attempt at ``step``: none of it may be taken for a part of the next one."""
        for monitor in list(self._monitors):
            let_go = getattr(monitor, "drop", None)
            if let_go is None:
                continue
            try:
                let_go(step)
            except Exception as error:
                self._switch_off(monitor, error)

    def _gather(self, observed: Mapping[tuple[str, str], Tensor | NDArray[np.float64]], norms: Tensor) -> GroupReading:
        slots: list[_Slot] = []
        parts: dict[torch.device, list[Tensor]] = {}
        ends: dict[torch.device, int] = {}
        for key, value in observed.items():
            places = self._places[key]
            if isinstance(value, Tensor):
                start = ends.get(value.device, 0)
                slots.append(_Slot(*key, places, device=value.device, start=start))
                parts.setdefault(value.device, []).append(value)
                ends[value.device] = start + len(value)
            else:
                slots.append(_Slot(*key, places, on_host=value))
        # Concatenating copies, so that a monitor may write to its tensors again.
        flats = {device: torch.cat(tensors) for device, tensors in parts.items()}
        flat = flats.pop(norms.device, norms.new_zeros(0))
        return GroupReading(flat.to(norms.dtype), slots, {device: HostCopy(part) for device, part in flats.items()})

    def _mean_over_ranks(
        self, observed: Mapping[tuple[str, str], Tensor | NDArray[np.float64]], device: torch.device
    ) -> dict[tuple[str, str], Tensor | NDArray[np.float64]]:
        """The mean of each value over the ranks that have it, in one collective."""
        if not self._places:
            return {}
        # What was ever seen has a place in it: a monitor that is off on one rank must not shift those of the others.
        keys = sorted(self._places)
        parts = [_on_device(observed.get(key), len(self._places[key]), device) for key in keys]
        values = torch.cat(parts)
        known = ~values.isnan()
        sums = torch.cat([values.masked_fill(~known, 0.0), known.to(values.dtype)])
        torch.distributed.all_reduce(sums)
        total, count = sums.chunk(2)
        means = (total / count).split([len(part) for part in parts])
        return dict(zip(keys, means, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Their states by name, as JSON holds them."""
        states: dict[str, Any] = {}
        for monitor in list(self._monitors):
            try:
                # Through JSON already here: what a checkpoint cannot hold is this monitor's failure and nobody else's.
                states[monitor.name] = json.loads(json.dumps(monitor.state_dict(), allow_nan=False))
            except Exception as error:
                self._switch_off(monitor, error)
        return states

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Give each its own state back, where there is one."""
        for monitor in [m for m in self._monitors if m.name in states]:
            try:
                monitor.load_state_dict(states[monitor.name])
            except Exception as error:
                self._switch_off(monitor, error)

    def tensor_state(self) -> dict[str, dict[str, Tensor]]:
        """What is too large for JSON, by name of the monitor; only of those that have any."""
        states: dict[str, dict[str, Tensor]] = {}
        for monitor in list(self._monitors):
            take = getattr(monitor, "tensor_state", None)
            if take is None:
                continue
            try:
                state = {str(name): _tensor(value) for name, value in take().items()}
            except Exception as error:
                self._switch_off(monitor, error)
            else:
                if state:
                    states[monitor.name] = state
        return states

    def load_tensor_state(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Give each its own tensors back, where there are any."""
        for monitor in [m for m in self._monitors if m.name in states]:
            load = getattr(monitor, "load_tensor_state", None)
            if load is None:
                continue
            try:
                load(dict(states[monitor.name]))
            except Exception as error:
                self._switch_off(monitor, error)

    def stop(self) -> None:
        """Stop all; one that cannot must not keep the rest from it."""
        for monitor in self._monitors:
            with suppress(Exception):
                monitor.stop()

    def _name_places(self, monitor: Monitor, key: tuple[str, str], size: int) -> None:
        """Know what the entries of a metric are called."""
        if key in self._places and len(self._places[key]) == size:
            return
        ask = getattr(monitor, "places", None)
        names = tuple(str(name) for name in ask(key[1])) if ask is not None else ()
        if len(names) != size or len(set(names)) != size:
            if names:
                self._say_once(
                    f"places of {key}",
                    f"The monitor {key[0]!r} names {len(set(names))} places of {key[1]!r}, and it has {size} values: "
                    "they are numbered instead.",
                )
            names = ("",) if size == 1 else tuple(f"place_{i}" for i in range(size))
        self._places[key] = names

    def _voice(self, name: str, say: Callable[[str], None]) -> Callable[[str], None]:
        return lambda text: say(f"The monitor {name!r}: {text}")

    def _switch_off(self, monitor: Monitor, error: Exception) -> None:
        self._monitors.remove(monitor)
        with suppress(Exception):
            monitor.stop()
        self._say_once(
            f"monitor {monitor.name}", f"The monitor {monitor.name!r} failed and is off from here on: {error!r}."
        )


def monitor_metrics(readings: Readings, detail: bool = False) -> dict[str, float]:
    """Readings for a logger, flat.

    Args:
        readings: Of one step.
        detail: Whether to name each place as well, ``trimtab/<monitor>/<place>/<metric>``.

    Example:
        >>> reading = Reading(("layer_0", "layer_1"), np.array([0.5, 0.7]))
        >>> sorted(monitor_metrics({"router": {"entropy": reading}}))
        ['trimtab/router/entropy_max', 'trimtab/router/entropy_mean', 'trimtab/router/entropy_min']
    """
    metrics: dict[str, float] = {}
    for monitor, by_metric in readings.items():
        for metric, reading in by_metric.items():
            name = f"trimtab/{monitor}/{metric}"
            if len(reading.values) == 1:
                metrics[name] = float(reading.values[0])
            elif len(reading.values):
                known = reading.values[~np.isnan(reading.values)]
                metrics |= {f"{name}_{how}": _aggregate(how, known) for how in ("min", "mean", "max")}
            if detail:
                metrics |= {
                    f"trimtab/{monitor}/{place}/{metric}": float(value)
                    for place, value in zip(reading.places, reading.values, strict=True)
                    if place
                }
    return metrics


def _aggregate(how: str, known: NDArray[np.float64]) -> float:
    with np.errstate(all="ignore"):
        return float(getattr(known, how)()) if known.size else float("nan")


def _flattened(value: Any) -> Tensor | NDArray[np.float64]:
    if not isinstance(value, Tensor):
        return np.array(value, dtype=np.float64).reshape(-1)
    if value.is_complex():
        raise TypeError("a monitor's values are real")
    value = value.detach()
    if is_dtensor(value):
        value = value.full_tensor()  # type: ignore[attr-defined]
    return value.reshape(-1).to(torch.float32)


def _on_device(value: Tensor | NDArray[np.float64] | None, size: int, device: torch.device) -> Tensor:
    if value is None:
        return torch.full((size,), torch.nan, device=device)
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    return torch.from_numpy(value.astype(np.float32)).to(device, non_blocking=True)


def _tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"tensor_state has a {type(value).__name__}")
    return value.detach()
