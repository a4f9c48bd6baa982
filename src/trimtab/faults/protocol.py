"""What a numerical fault on purpose has to offer to be passed to ``guard.inject``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from trimtab.precision.recipe import Conversion

__all__ = ["Fault", "fault_key"]


class Fault(Protocol):
    """A fault that starts, ends and falls where its own fields say; a function of the step alone, so it resumes.

    One that acts on a model or an optimizer was given it when it was made. If it leaves something there, a method
    ``end()`` takes that away, whatever the step. One that changes weights, which checkpoints then hold, has
    ``described()`` and ``resume(step)`` too: see ``WindowFault``.
    """

    def check(self, conversion: Conversion | None) -> None:
        """Raises: ConfigError: when it cannot be applied to this conversion."""

    def begin_step(self, step: int, conversion: Conversion | None) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Apply what holds in optimizer step ``step``.

        Returns: For each fault that starts at this step, its place (a unit's name) and what the record keeps of it.
        """


def fault_key(fault: Fault) -> str:
    """A text that is the same for two faults that do the same in the same steps; of others, their class alone.

    Example:
        >>> from trimtab.faults import SmallBatch
        >>> fault_key(SmallBatch(start_step=3)) == fault_key(SmallBatch(start_step=3)) != fault_key(SmallBatch())
        True
    """
    described = getattr(fault, "described", None)
    details = {} if described is None else described() | {"place": getattr(fault, "place", "")}
    return json.dumps({"class": type(fault).__name__, **details}, sort_keys=True, default=str)
