"""What monitors need for a resume and is too large for JSON: saved apart from a guard's state, and missed if gone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from trimtab.journal import Journal
from trimtab.monitors.group import MonitorGroup

__all__ = ["SavedTensors"]


class SavedTensors:
    """The tensors of a guard's monitors, and which of them a loaded state still waits for.

    Args:
        monitors: Whose tensors.
        journal: Where it is said that some are missing.
    """

    def __init__(self, monitors: MonitorGroup, journal: Journal) -> None:
        self._monitors = monitors
        self._journal = journal
        self._awaited: list[str] = []

    def state(self) -> dict[str, dict[str, Tensor]]:
        """The tensors, by monitor; empty when none has any."""
        return self._monitors.tensor_state()

    def await_those_of(self, names: Sequence[str]) -> None:
        """A state was loaded that was saved with tensors of these monitors."""
        self._awaited = [name for name in names if name in self._monitors.names]

    def load(self, state: Mapping[str, Mapping[str, Tensor]], problem: str | None = None) -> None:
        """Give the monitors theirs back, and say which are missing; ``problem`` is why, as a clause, if it is known."""
        self._monitors.load_tensor_state(state)
        self._awaited = [name for name in self._awaited if name not in state]
        self.note_missing(problem)

    def note_missing(self, problem: str | None = None) -> None:
        """Training goes on: whoever has not got its tensors by now begins a fresh window, and the record says so."""
        missing, self._awaited = self._awaited, []
        if missing:
            self._journal.event("note", {"fresh_window": missing, "problem": problem})
            why = f" ({problem})" if problem else ""
            self._journal.say_once(
                "tensors",
                f"The checkpoint's tensors of the monitors {', '.join(missing)} were not loaded{why}: their windows "
                "start afresh. Save guard.tensor_state_dict() with each checkpoint, and load it.",
            )
