"""What quantization did to a unit's input, kept on the device until a step ends.

Columns of a row: ``trimtab.precision.recipe.QUANTIZER_STATS``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.formats import QuantizationStats
from trimtab.formats.sampling import num_rows
from trimtab.precision.units import Unit

__all__ = ["FEWEST_TOKENS", "KeptStats", "ObservesQuantizers", "most_tokens_of", "stats_row"]

# Of fewer tokens each channel's norm is that of one or two numbers, and relative errors of small numbers are large: on
# SwiGLU activations of one token E2M3 has an error of .40 and INT8 one of .33, of four tokens .11 and .08.
FEWEST_TOKENS = 4


def most_tokens_of(x: Tensor) -> int:
    """How many tokens of ``x`` statistics are taken from: 64 below 2048 tokens, 128 below 4096, 256 from there on.

    A norm over these tells a channel that is lost from one that is not. A sixteenth of the tokens, or less, keeps what
    it costs at a fraction of quantization, where there are 1024 or more.
    """
    num = num_rows(x)
    return 64 if num < 2048 else 128 if num < 4096 else 256


def stats_row(stats: QuantizationStats, x: Tensor) -> Tensor:
    """``(error, flushed share, saturated share, amax)`` as one float32 row; the error of a non-finite input is inf.

    NaN is kept for what is not known, as the error of fewer than ``FEWEST_TOKENS`` finite tokens is not. The rest of a
    non-finite row says as much as it can: shares of 1 and an infinite amax.

    Args:
        stats: The statistics.
        x: The quantized operand, shape (..., channels).
    """
    row = torch.stack(
        [x.float() for x in (stats.channel_error, stats.flushed_share, stats.saturated_share, stats.amax)]
    )
    unbounded = row.new_full((), torch.inf)
    lost = torch.stack([unbounded, row.new_ones(()), row.new_ones(()), unbounded])
    # An overflow in the norms of finite channels makes NaN of their error; that is no knowing either.
    row = row.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    if num_rows(x) < FEWEST_TOKENS:
        row[0] = torch.nan
    return torch.where(torch.isfinite(stats.amax), row, lost)


class KeptStats:
    """The largest of each statistic of each unit since they were last taken.

    Args:
        num_units: Number of units.
    """

    def __init__(self, num_units: int) -> None:
        self._rows: list[Tensor | None] = [None] * num_units

    def note(self, unit: int, row: Tensor) -> None:
        """Take a row into account."""
        kept = self._rows[unit]
        # What is not known gives way to what is.
        self._rows[unit] = row if kept is None else torch.fmax(kept, row.to(kept.device))

    def take(self) -> Tensor | None:
        """Shape (units, 4), NaN where nothing was noted; None when nothing was at all. Forgets everything."""
        rows, self._rows = self._rows, [None] * len(self._rows)
        first = next((row for row in rows if row is not None), None)
        if first is None:
            return None
        unknown = torch.full_like(first, torch.nan)
        return torch.stack([unknown if row is None else row.to(first.device) for row in rows])


class ObservesQuantizers:
    """For a conversion that notes rows in ``_stats`` where that is not None: a ``recipe.QuantizerObserver``."""

    units: tuple[Unit, ...]
    _stats: KeptStats | None = None
    _shadow = False

    def observe_quantizers(self, shadow: bool) -> None:
        """From now on keep what the low-cost path's quantizer did to each unit's input.

        Args:
            shadow: Also while a unit is on the recovery path, of what the low-cost path would have done.
        """
        self._stats, self._shadow = KeptStats(len(self.units)), shadow

    def take_quantizer_stats(self) -> Tensor | None:
        """What was kept since the last call, shape (units, 4)."""
        return None if self._stats is None else self._stats.take()
