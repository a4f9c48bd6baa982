"""Fault: outlier channels that leave a unit's function as it is. Its input's channels grow, its weight's shrink alike.

In exact arithmetic ``(x s) (W / s)' = x W'``, and no gradient grows, so that a gradient norm need not show it.
Quantizers suffer: a scale that has to hold the outliers leaves the channels beside them no codes, and the shrunken
columns of the weight lose theirs. It falls on both paths; FP8, whose numbers have more exponent, loses less, and an
unquantized recovery path nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.errors import ConfigError
from trimtab.faults.bursts import BurstFaults, ChannelBurst, draw_bursts
from trimtab.precision.outlier_channels import SuffersOutliers
from trimtab.precision.recipe import Conversion

__all__ = ["OutlierChannels", "OutlierFaults", "random_outliers"]

_LARGEST_FACTOR = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class OutlierChannels(ChannelBurst):
    """One burst: for ``num_steps`` steps the quantizers of a unit see some input channels ``factor`` times larger.

    The columns of the weight that belong to them are seen as many times smaller. Damage that stays is one burst from
    ``start_step=1`` that is as long as the run.

    Args:
        unit: Name of the unit.
        start_step: First optimizer step that suffers it; at least 1.
        num_steps: How long it lasts; at least 1.
        factor: How many times larger the channels are; 1e-6 to 1e6, which float32 holds on both sides.
        num_channels: How many channels of each layer's input, all of them where it has fewer.
        seed: Which channels.

    Raises: ConfigError: when a setting cannot be meant.

    Example:
        >>> burst = OutlierChannels(unit="layers.0.mlp.up", start_step=5, num_steps=10, factor=300.0, num_channels=2)
        >>> burst.end_step, len(burst.channels(64))
        (15, 2)
    """

    def __post_init__(self) -> None:
        # Without arguments, super() does not find the class that slots=True makes anew.
        ChannelBurst.__post_init__(self)
        if not 1 / _LARGEST_FACTOR <= self.factor <= _LARGEST_FACTOR:
            raise ConfigError("factor", self.factor, "it is from 1e-6 to 1e6.", "Use one between 200 and 1000, say.")


class OutlierFaults(BurstFaults[OutlierChannels]):
    """A set of bursts of outlier channels, for ``guard.inject``; for the recipes "quantized-gemm" and "int8-base".

    Where two bursts of one unit overlap, the later one holds. Compiled models suffer it too, and starts and ends
    compile nothing anew. A unit on the recovery path is judged by what its low-cost path would see.

    Args:
        bursts: The bursts, in any order.

    Example:
        >>> import torch
        >>> import trimtab
        >>> from trimtab.precision import QuantizedGemm
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 8))
        >>> faults = OutlierFaults([OutlierChannels(unit="0", start_step=1, num_steps=9, factor=500.0)])
        >>> errors = []
        >>> with trimtab.attach(model, QuantizedGemm("e2m3"), quantizer_stats=True) as guard:
        ...     for _ in range(2):
        ...         model(torch.randn(32, 64, generator=torch.Generator().manual_seed(0))).sum().backward()
        ...         _ = guard.step()
        ...         model.zero_grad()
        ...         errors.append(guard.metrics()["trimtab/quantizer/error_max"])
        ...         guard.inject(faults)
        >>> errors[0] < 0.2, errors[1] > 0.3
        (True, True)
    """

    kind = "outlier channels"

    def __init__(self, bursts: Sequence[OutlierChannels]) -> None:
        super().__init__(bursts)
        self._conversion: SuffersOutliers | None = None

    def check_conversion(self, conversion: Conversion | None) -> Conversion:
        """Raises: ConfigError: when the conversion quantizes no operands that could have outliers."""
        if not isinstance(conversion, SuffersOutliers):
            raise ConfigError(
                "fault",
                self.kind,
                'only the recipes "quantized-gemm" and "int8-base" quantize both operands here.',
                "Attach QuantizedGemm() or Int8Base().",
            )
        return conversion  # type: ignore[return-value]

    def begin_step(self, step: int, conversion: Conversion | None) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Apply what is suffered in ``step``, after the conversion has begun it; returns the bursts that start."""
        assert isinstance(conversion, SuffersOutliers)
        self._conversion = conversion
        return super().begin_step(step, conversion)

    def apply(self, burst: OutlierChannels, index: int, conversion: Conversion) -> None:
        """Have the quantizers of unit ``index`` see outliers, until the step ends."""
        assert isinstance(conversion, SuffersOutliers)
        conversion.grow_outliers(index, burst.channels, burst.factor)

    def end(self) -> None:
        """End what is suffered, whatever the step."""
        if self._conversion is not None:
            self._conversion.heal()
            self._conversion = None


def random_outliers(
    units: Sequence[str],
    *,
    num_bursts: int = 30,
    first_step: int = 50,
    last_step: int = 210,
    seed: int = 0,
    num_steps: tuple[int, int] = (10, 25),
    factor: tuple[float, float] = (200.0, 1000.0),
    num_channels: int = 16,
) -> list[OutlierChannels]:
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

    Example:
        >>> bursts = random_outliers(["q", "k"], num_bursts=3, first_step=5, last_step=9, seed=1)
        >>> len(bursts), all(5 <= burst.start_step <= 9 and burst.unit in ("q", "k") for burst in bursts)
        (3, True)
    """
    return draw_bursts(
        OutlierChannels,
        units,
        num_bursts=num_bursts,
        first_step=first_step,
        last_step=last_step,
        seed=seed,
        num_steps=num_steps,
        factor=factor,
        num_channels=num_channels,
    )
