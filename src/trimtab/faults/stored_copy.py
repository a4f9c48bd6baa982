"""Fault: a corrupted stored copy. Some channels of a unit's low-width copy are scaled up and not scaled back.

It is what a wrong or stale scale does. The copy of the recovery path has its own scale and is not affected, and of
layers that share one stored copy only the named unit reads it wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from trimtab.errors import ConfigError, nearest_names
from trimtab.precision.recipe import Conversion
from trimtab.precision.saved_activations import SavedActivationsConversion

__all__ = ["StoredCopyBurst", "StoredCopyFaults", "random_bursts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredCopyBurst:
    """One burst: for ``num_steps`` steps, channels of one unit's low-width copy are ``factor`` times too large.

    Args:
        unit: Name of the unit.
        start_step: First optimizer step that suffers it; at least 1.
        num_steps: How long it lasts; at least 1.
        factor: What the channels are multiplied by.
        num_channels: How many channels.
        seed: Which channels.
    """

    unit: str
    start_step: int
    num_steps: int
    factor: float
    num_channels: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for setting, least in (("start_step", 1), ("num_steps", 1), ("num_channels", 1), ("seed", 0)):
            value = getattr(self, setting)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(
                    setting, value, f"a whole number from {least} is needed.", f"Set it to {least} or more."
                )
        if not isinstance(self.factor, int | float) or not math.isfinite(self.factor):
            raise ConfigError("factor", self.factor, "a finite number is needed.", "Use one between 50 and 1000, say.")

    @property
    def end_step(self) -> int:
        """The first step that no longer suffers it."""
        return self.start_step + self.num_steps

    def channels(self, size: int) -> list[int]:
        """The channels it falls on, of ``size``; the same for the same seed."""
        rng = np.random.default_rng([self.seed, self.start_step])
        return sorted(rng.choice(size, size=min(self.num_channels, size), replace=False).tolist())


class StoredCopyFaults:
    """A set of bursts, for ``guard.inject``.

    Where two bursts of one unit overlap, the later one holds.

    Args:
        bursts: The bursts, in any order.
    """

    def __init__(self, bursts: Sequence[StoredCopyBurst]) -> None:
        self.bursts = tuple(sorted(bursts, key=lambda b: b.start_step))

    def check(self, conversion: Conversion | None) -> None:
        """Raises: ConfigError: when there is no stored copy to corrupt, or a unit has none."""
        if not isinstance(conversion, SavedActivationsConversion):
            raise ConfigError(
                "fault", "stored copy", "only saved activations keep a copy to corrupt.", "Attach that recipe."
            )
        if conversion.recipe.low_bits == 16:
            raise ConfigError(
                "low_bits", 16, "an unquantized input is no copy that could be corrupted.", "Set it to 2, 4 or 8."
            )
        known = [u.name for u in conversion.units]
        for burst in self.bursts:
            if burst.unit not in known:
                near = ", ".join(nearest_names(burst.unit, known) or known[:3])
                raise ConfigError("unit", burst.unit, "no converted unit has that name.", f"Nearest: {near}.")

    def begin_step(self, step: int, conversion: Conversion | None) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Corrupt what suffers in ``step``, after the conversion has begun it; returns the bursts that start."""
        assert isinstance(conversion, SavedActivationsConversion)
        index = {u.name: i for i, u in enumerate(conversion.units)}
        for burst in self.bursts:
            if burst.start_step <= step < burst.end_step:
                i = index[burst.unit]
                conversion.corrupt(i, burst.channels(conversion.input_size(i)), burst.factor)
        return [(b.unit, {"fault": "stored copy", **asdict(b)}) for b in self.bursts if b.start_step == step]


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
    if isinstance(units, str) or not units:
        raise ConfigError("units", units, "at least one name to choose from is needed.", "Pass guard.units.")
    if num_bursts < 1:
        raise ConfigError("num_bursts", num_bursts, "at least one burst is needed.", "Set it to 1 or more.")
    for setting, low, high, least in (
        ("last_step", first_step, last_step, 1),
        ("num_steps", *num_steps, 1),
        ("factor", *factor, math.ulp(0.0)),
    ):
        if not least <= low <= high < math.inf:
            raise ConfigError(
                setting, (low, high), "a range runs from above 0 to no less than its start.", "Swap or widen it."
            )
    rng = np.random.default_rng(seed)
    bursts = [
        StoredCopyBurst(
            unit=units[int(rng.integers(len(units)))],
            start_step=int(rng.integers(first_step, last_step + 1)),
            num_steps=int(rng.integers(num_steps[0], num_steps[1] + 1)),
            factor=float(np.exp(rng.uniform(np.log(factor[0]), np.log(factor[1])))),
            num_channels=num_channels,
            seed=int(rng.integers(2**31)),
        )
        for _ in range(num_bursts)
    ]
    return sorted(bursts, key=lambda b: b.start_step)
