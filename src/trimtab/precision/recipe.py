"""What a precision path has to offer: a recipe converts a model, a conversion switches its units.

A new path is one frozen dataclass with ``convert`` and one conversion. Neither ever sees a gradient norm or a policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import nn

from trimtab.precision.units import Unit

__all__ = ["Conversion", "PathCost", "Recipe"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PathCost:
    """What a unit costs on each path, per token that runs through it.

    Args:
        low_saved_bytes: Bytes that it keeps for backward on the low-cost path.
        high_saved_bytes: The same on the recovery path.
        flops: Multiply-adds of its forward and backward products, times two; equal on both paths unless stated.
    """

    low_saved_bytes: float
    high_saved_bytes: float
    flops: float


@runtime_checkable
class Conversion(Protocol):
    """A model converted in place: its recoverable units, and the switch of each.

    Attributes:
        pull: Called once, before the next forward that needs the route, if it is not None; set by the guard, which
            answers by calling ``route``.
    """

    pull: Callable[[], None] | None

    @property
    def units(self) -> Sequence[Unit]:
        """The units it can switch, from the input to the loss."""
        ...

    @property
    def costs(self) -> Sequence[PathCost]:
        """What each costs, in the same order."""
        ...

    def route(self, active: Sequence[bool]) -> None:
        """Put the units of ``active`` (one flag a unit) on the recovery path, the rest on the low-cost path."""

    def begin_step(self, step: int) -> None:
        """Optimizer step ``step`` (from 1) begins: random numbers are seeded from it."""

    def undo(self) -> None:
        """Give the model back as it was found."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beyond the route; JSON-able."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` gave."""


@runtime_checkable
class Recipe(Protocol):
    """A pair of precision paths."""

    @property
    def name(self) -> str:
        """The recipe's name on the command line and in records."""
        ...

    def convert(self, model: nn.Module, units: Sequence[Unit]) -> Conversion:
        """Convert those of ``units`` that the recipe can switch; all start on the low-cost path.

        Raises: ConfigError: when it can convert none of them; the model is then untouched.
        """

    def to_dict(self) -> dict[str, Any]:
        """The resolved configuration, JSON-able."""
