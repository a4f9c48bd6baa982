"""Fault: a corrupted stored copy. Some channels of a unit's low-width copy are scaled up and not scaled back.

It is what a wrong or stale scale does. The copy of the recovery path has its own scale and is not affected, and of
layers that share one stored copy only the named unit reads it wrongly. The scale is wrong from the moment the copy is
made, so that an observer that reads it back sees it: the unit's channel error is that of the copy as the unit reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.errors import ConfigError
from trimtab.faults.bursts import BurstFaults, ChannelBurst, draw_bursts
from trimtab.precision.recipe import Conversion
from trimtab.precision.saved_activations import SavedActivationsConversion

__all__ = ["StoredCopyBurst", "StoredCopyFaults", "random_bursts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredCopyBurst(ChannelBurst):
    """One burst: for ``num_steps`` steps, channels of one unit's low-width copy are ``factor`` times too large.

    Args:
        unit: Name of the unit.
        start_step: First optimizer step that suffers it; at least 1.
        num_steps: How long it lasts; at least 1.
        factor: What the channels are multiplied by.
        num_channels: How many channels.
        seed: Which channels.
    """


class StoredCopyFaults(BurstFaults[StoredCopyBurst]):
    """A set of bursts, for ``guard.inject``.

    Where two bursts of one unit overlap, the later one holds.

    Args:
        bursts: The bursts, in any order.
    """

    kind = "stored copy"

    def check_conversion(self, conversion: Conversion | None) -> Conversion:
        """Raises: ConfigError: when there is no stored copy to corrupt."""
        if not isinstance(conversion, SavedActivationsConversion):
            raise ConfigError(
                "fault", self.kind, "only saved activations keep a copy to corrupt.", "Attach that recipe."
            )
        if conversion.recipe.low_bits == 16:
            raise ConfigError(
                "low_bits", 16, "an unquantized input is no copy that could be corrupted.", "Set it to 2, 4 or 8."
            )
        return conversion

    def apply(self, burst: StoredCopyBurst, index: int, conversion: Conversion) -> None:
        """Corrupt the copy that unit ``index`` reads, until the step ends."""
        assert isinstance(conversion, SavedActivationsConversion)
        conversion.corrupt(index, burst.channels(conversion.input_size(index)), burst.factor)


def random_bursts(
    units: Sequence[str],
    *,
    num_bursts: int = 30,
    first_step: int = 50,
    last_step: int = 210,
    seed: int = 0,
    num_steps: tuple[int, int] = (10, 25),
    factor: tuple[float, float] = (50.0, 1000.0),
    num_channels: int = 16,
) -> list[StoredCopyBurst]:
    """Bursts at random units, starts, lengths and strengths; the same for the same seed.

    Args:
        units: Names of the units to choose from.
        num_bursts: How many.
        first_step: Earliest start.
        last_step: Latest start.
        seed: Seed of all choices.
        num_steps: Shortest and longest length.
        factor: Weakest and strongest factor, drawn evenly in its logarithm.
        num_channels: Channels that each falls on.

    Returns: The bursts, by start.

    Raises: ConfigError: when there is no unit or no burst to choose, or a range is empty.
    """
    return draw_bursts(
        StoredCopyBurst,
        units,
        num_bursts=num_bursts,
        first_step=first_step,
        last_step=last_step,
        seed=seed,
        num_steps=num_steps,
        factor=factor,
        num_channels=num_channels,
    )
