"""What a numerical fault on purpose has to offer to be passed to ``guard.inject``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from trimtab.precision.recipe import Conversion

__all__ = ["Fault"]


class Fault(Protocol):
    """A fault that starts, ends and falls where its own fields say; a function of the step alone, so it resumes.

    One that acts on a model or an optimizer was given it when it was made. If it leaves something there, a method
    ``end()`` takes that away, whatever the step.
    """

    def check(self, conversion: Conversion | None) -> None:
        """Raises: ConfigError: when it cannot be applied to this conversion."""

    def begin_step(self, step: int, conversion: Conversion | None) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Apply what holds in optimizer step ``step``.

        Returns: For each fault that starts at this step, its place (a unit's name) and what the record keeps of it.
        """
