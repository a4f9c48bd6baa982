"""Whose processor time a step is: that of each monitor's hooks, of its ``observe``, of the judging, or the rest.

Whole steps scatter on a shared machine by more than monitors cost, so the monitors' own time is taken where it is
spent, in the run whose steps it is compared with. Every callable that a monitor hands to the model is replaced by one
that runs it at the monitor's expense; the monitors themselves know nothing of it.

Left out is what torch and the table of attention functions do to call a hook at all, some microseconds a hook.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn

import trimtab.guard
from trimtab.alarm_response import AlarmResponse
from trimtab.monitors import Monitor
from trimtab.monitors.group import GroupReading, MonitorGroup
from trimtab.precision import attention_calls

__all__ = ["HOOKS", "JUDGING", "OBSERVE", "REST", "Account", "Owner", "accounted"]

Owner = tuple[str, str]
"""A monitor's name, or none, and what of it."""
HOOKS = "hooks"
OBSERVE = "observe"
JUDGING: Owner = ("", "judging")
"""Gathering the values of all monitors, judging them, naming them for a logger."""
REST: Owner = ("", "rest")
"""Everything else."""

_REGISTRATIONS: Sequence[tuple[type, str]] = (
    (nn.Module, "register_forward_pre_hook"),
    (nn.Module, "register_forward_hook"),
    (nn.Module, "register_full_backward_pre_hook"),
    (nn.Module, "register_full_backward_hook"),
    (torch.Tensor, "register_hook"),
    (torch.Tensor, "register_post_accumulate_grad_hook"),
)
# What the guard does for the monitors that it would not do without them.
_JUDGES: Sequence[tuple[Any, str]] = (
    (MonitorGroup, "observe"),
    (GroupReading, "read"),
    (AlarmResponse, "respond"),
    (trimtab.guard, "monitor_metrics"),
)


class Account:
    """Processor seconds by owner: each moment is booked once, to the owner that was called last and has not returned.

    Args:
        clock: Gives seconds; the processor time of all threads of this process when left out. Threads that wait for
            work by spinning count, so run torch with one.

    Example:
        >>> ticks = iter([0, 1, 3, 7])
        >>> account = Account(lambda: next(ticks))  # begins at 0
        >>> account.charged(("router", "hooks"), lambda: None)()  # from 1 to 3
        >>> account.take() == {REST: 1 + 4, ("router", "hooks"): 2}
        True
    """

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self._clock = clock
        self._owners = [REST]
        self._seconds: dict[Owner, float] = defaultdict(float)
        self._since = clock()

    @property
    def owner(self) -> Owner:
        """Who pays for this moment."""
        return self._owners[-1]

    def take(self) -> dict[Owner, float]:
        """The seconds of each since the last call."""
        self._book()
        taken, self._seconds = dict(self._seconds), defaultdict(float)
        return taken

    def charged(self, owner: Owner, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, at the expense of ``owner`` for as long as it runs."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._book()
            self._owners.append(owner)
            try:
                return function(*args, **kwargs)
            finally:
                self._book()
                self._owners.pop()

        return run

    def watch(self, monitor: Monitor) -> None:
        """Have what ``monitor`` does booked to it, from its ``start`` on; inside ``accounted``."""
        ours: Any = monitor
        ours.start = self.charged((monitor.name, "start"), monitor.start)
        ours.observe = self.charged((monitor.name, OBSERVE), monitor.observe)

    def _book(self) -> None:
        now = self._clock()
        self._seconds[self._owners[-1]] += now - self._since
        self._since = now


@contextmanager
def accounted(account: Account) -> Iterator[None]:
    """While it lasts, hooks that a watched monitor places are booked to it, and what a guard does for monitors too.

    Whatever is registered at the expense of a monitor, in its ``start`` or in one of its hooks, runs at its expense.
    """
    with ExitStack() as stack:
        for kind, name in _REGISTRATIONS:
            stack.enter_context(_replaced(kind, name, _registering(account, getattr(kind, name))))
        original = attention_calls.place_around
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("trimtab.monitors.") and hasattr(module, "place_around"):
                stack.enter_context(_replaced(module, "place_around", _placing(account, original)))
        for holder, name in _JUDGES:
            # A function of the class, so that it is bound to the object as the one it stands for.
            judge = getattr(holder, name)
            stack.enter_context(_replaced(holder, name, wraps(judge)(account.charged(JUDGING, judge))))
        yield


def _registering(account: Account, register: Callable[..., Any]) -> Callable[..., Any]:
    """``register(owner, hook, ...)``, whose hook is booked to the monitor that registers it."""

    @wraps(register)
    def registering(where: Any, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        monitor = account.owner[0]
        return register(where, account.charged((monitor, HOOKS), hook) if monitor else hook, *args, **kwargs)

    return registering


def _placing(account: Account, place: Callable[..., Any]) -> Callable[..., Any]:
    """``place(module, wrapper, ...)``, whose wrapper is booked to a monitor, and the attention in it to the rest."""

    def placing(module: nn.Module, wrapper: Callable[..., Any], **kwargs: Any) -> Any:
        monitor = account.owner[0]
        if not monitor:
            return place(module, wrapper, **kwargs)

        def around(attention: Callable[..., Any], *args: Any, **settings: Any) -> Any:
            return wrapper(account.charged(REST, attention), *args, **settings)

        return place(module, account.charged((monitor, HOOKS), around), **kwargs)

    return placing


@contextmanager
def _replaced(holder: Any, name: str, by: Any) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, by)
    try:
        yield
    finally:
        setattr(holder, name, before)
