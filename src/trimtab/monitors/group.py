"""Runs the user's monitors so that one that fails cannot end the run that it watches."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import nn

from trimtab.monitors.protocol import Monitor

__all__ = ["MonitorGroup"]


class MonitorGroup:
    """The monitors of a guard; one that raises is switched off, with one warning, and the others go on.

    Args:
        monitors: The monitors.
        say_once: Warns, the first time for a key.
    """

    def __init__(self, monitors: Sequence[Monitor], say_once: Callable[[str, str], None]) -> None:
        self._monitors = list(monitors)
        self._say_once = say_once

    @property
    def names(self) -> list[str]:
        """Names of those that are on."""
        return [monitor.name for monitor in self._monitors]

    def start(self, model: nn.Module) -> None:
        """Start all; here an error is the user's setting, and is raised."""
        for monitor in self._monitors:
            monitor.start(model)

    def observe(self, step: int) -> dict[str, float]:
        """All their values of a step, named ``trimtab/<monitor>/<aggregate>``."""
        read: dict[str, float] = {}
        for monitor in list(self._monitors):
            try:
                values = {f"trimtab/{monitor.name}/{k}": float(v) for k, v in monitor.observe(step).items()}
            except Exception as error:
                self._switch_off(monitor, error)
            else:
                read |= values
        return read

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

    def stop(self) -> None:
        """Stop all; one that cannot must not keep the rest from it."""
        for monitor in self._monitors:
            with suppress(Exception):
                monitor.stop()

    def _switch_off(self, monitor: Monitor, error: Exception) -> None:
        self._monitors.remove(monitor)
        with suppress(Exception):
            monitor.stop()
        self._say_once(
            f"monitor {monitor.name}", f"The monitor {monitor.name!r} failed and is off from here on: {error!r}."
        )
