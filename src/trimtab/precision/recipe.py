"""What a precision path has to offer: a recipe converts a model, a conversion switches its units.

A new path is one frozen dataclass with ``convert`` and one conversion. Neither ever sees a gradient norm or a policy.
A conversion that can also tell what its quantizers do is a ``QuantizerObserver``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from trimtab.precision.units import Unit

__all__ = ["QUANTIZER_STATS", "Conversion", "PathCost", "QuantizerObserver", "Recipe", "why_unobserved"]

QUANTIZER_STATS = ("error", "flushed_share", "saturated_share", "amax")
"""What a ``QuantizerObserver`` tells of each unit, in the order of its columns.

error: Mean over input channels of |x - q(x)| / |x|, norms over the tokens, channels that are all zero left out. It has
    no scale: an outlier channel cannot hide what happens to the others.
    Of fewer than four finite tokens it is not known: NaN.
flushed_share: Share of the nonzero values that became zero.
saturated_share: Share of the nonzero values that were clipped to the largest one.
amax: Largest magnitude.
"""


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

    One that emulates what some devices can do says in a further attribute ``products`` which of the two ran; the record
    keeps it. One that knows what its quantizers did is a ``QuantizerObserver`` too.

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
class QuantizerObserver(Protocol):
    """What a ``Conversion`` may offer besides: statistics of what the low-cost path's quantizers did to their operands.

    Policies with an ``error_limit`` or an ``amax_limit`` need it. Where a unit has several quantized operands, it is up
    to the recipe which one it judges.

    A forward in training mode counts as one of the step's also where it records no gradients: reentrant checkpointing
    trains by such a forward, and nothing tells it from another. Call ``model.eval()`` for what is no training, such as
    an evaluation or the rollouts of reinforcement learning; forwards in evaluation mode without gradients are not
    looked at.

    Where there is no quantizer to look at, a further attribute ``why_unobserved`` may say why, as the end of a
    sentence; it is None where there is one. ``trimtab.attach`` refuses to observe with those words.
    """

    def observe_quantizers(self, shadow: bool) -> None:
        """Keep statistics from now on; called once, right after the conversion.

        Args:
            shadow: Also of units on the recovery path, by quantizing as their low-cost path would, with the same noise
                where it rounds stochastically: what a unit is judged by must not end with the recovery that it brought
                about.
        """

    def take_quantizer_stats(self) -> Tensor | None:
        """The statistics since the last call, the maximum over micro-batches; begins anew. Waits for no device.

        Returns: Shape (units, 4), float32, on the device; columns as in ``QUANTIZER_STATS``, all >= 0, NaN where
            a statistic is not known of a unit. An operand that is not finite has an error of +inf, never NaN: it is
            known to be broken. None when nothing was seen of any unit.
        """


def why_unobserved(conversion: Conversion) -> str | None:
    """Why ``conversion`` tells nothing of its quantizers, as the end of a sentence; None when it does."""
    reason: str | None = getattr(conversion, "why_unobserved", None)
    if reason is None and not isinstance(conversion, QuantizerObserver):
        return "this one does not"
    return reason


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
