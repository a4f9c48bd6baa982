"""What quantization did to a unit's input, kept on the device until a step ends.

Columns of a row: ``trimtab.precision.recipe.QUANTIZER_STATS``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.formats import QuantizationStats
from trimtab.precision.units import Unit

__all__ = ["MOST_TOKENS", "KeptStats", "ObservesQuantizers", "stats_row"]

# A norm over this many tokens tells a channel that is lost from one that is not, and costs a fraction of quantization.
MOST_TOKENS = 256


def stats_row(stats: QuantizationStats) -> Tensor:
    """``(error, flushed share, saturated share, amax)`` as one float32 row; the error of a non-finite input is inf.

    NaN is kept for what is not known, and a maximum over rows would spread it, so the rest of such a row says as much
    as it can: shares of 1 and an infinite amax.
    """
    row = torch.stack(
        [x.float() for x in (stats.channel_error, stats.flushed_share, stats.saturated_share, stats.amax)]
    )
    unbounded = row.new_full((), torch.inf)
    lost = torch.stack([unbounded, row.new_ones(()), row.new_ones(()), unbounded])
    # An overflow in the norms of finite channels makes NaN of their error; that is no knowing either.
    return torch.where(torch.isfinite(stats.amax), row.nan_to_num(nan=torch.inf, posinf=torch.inf), lost)


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
        self._rows[unit] = row if kept is None else torch.maximum(kept, row.to(kept.device))

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
