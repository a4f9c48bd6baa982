"""The faults of one guard: begun with each step, written down when they start, ended with the guard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trimtab.faults.protocol import Fault, fault_key
from trimtab.precision.recipe import Conversion

__all__ = ["InjectedFaults"]


class InjectedFaults:
    """What ``guard.inject`` was given, in that order.

    Args:
        note: Called as ``note(place, data, step)`` for each fault that starts.
    """

    def __init__(self, note: Callable[[str, Mapping[str, Any], int], None]) -> None:
        self._note = note
        self._faults: list[Fault] = []
        # The step that had begun when the loaded state was saved, and what it had then.
        self._resumed: tuple[int, tuple[str, ...]] = (0, ())

    @property
    def keys(self) -> list[str]:
        """One text a fault, by which a resumed run knows it again; JSON-able."""
        return [fault_key(fault) for fault in self._faults]

    def add(self, fault: Fault, step: int, conversion: Conversion | None) -> None:
        """Apply ``fault`` from ``step`` on, which has begun.

        Raises: ConfigError: when it does not fit the conversion.
        """
        fault.check(conversion)
        self._faults.append(fault)
        self._resume(fault, step)
        self._begin(fault, step, conversion, is_noted=True)

    def begin_step(self, step: int, conversion: Conversion | None, is_noted: bool = True) -> None:
        """``step`` begins; ``is_noted`` is False where it does so once more, after it was skipped."""
        for fault in self._faults:
            self._begin(fault, step, conversion, is_noted)

    def resume(self, step: int, keys: Sequence[str]) -> None:
        """A state was loaded that was saved once ``step`` had begun, of a run with the faults of these ``keys``."""
        self._resumed = step, tuple(keys)
        for fault in self._faults:
            self._resume(fault, step)

    def end(self) -> None:
        """Take away what the faults have left anywhere."""
        for fault in self._faults:
            end = getattr(fault, "end", None)
            if end is not None:
                end()

    def _resume(self, fault: Fault, step: int) -> None:
        resumed_step, keys = self._resumed
        resume = getattr(fault, "resume", None)
        if resume is not None and step == resumed_step and fault_key(fault) in keys:
            resume(step)

    def _begin(self, fault: Fault, step: int, conversion: Conversion | None, is_noted: bool) -> None:
        for place, data in fault.begin_step(step, conversion):
            if is_noted:
                self._note(place, data, step)
