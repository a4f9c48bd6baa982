"""What a library's quantizer makes of an activation, by our own formats.

What the library's kernels do inside is theirs, and nothing of it comes out. Their rule is documented: which entries
share a scale, how that is made, what they are rounded to. So the same rule, on some tokens of the same operand, tells
what is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.formats import Format, Granularity, QuantizationStats, channel_error
from trimtab.formats.fake_quantization import evenly_spaced, flushed_share
from trimtab.formats.granularity import BLOCK_AXES
from trimtab.precision.quantizer_stats import MOST_TOKENS, stats_row
from trimtab.precision.recipe import QUANTIZER_STATS

__all__ = ["FactorOf", "OperandQuantizer", "nothing_lost", "row_of"]

FactorOf = Callable[[Tensor], Tensor]
"""Of the largest magnitude of each block, float32, what its entries are multiplied by before they are rounded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperandQuantizer:
    """A library's quantizer of an activation.

    Args:
        fmt: What is rounded to.
        granularity: Which entries share a scale.
        factor_of: The library's rule for scales.

    Example:
        >>> from trimtab.formats import get, per_tensor
        >>> quantizer = OperandQuantizer(fmt=get("e2m1"), granularity=per_tensor(), factor_of=lambda amax: 6 / amax)
        >>> [round(value, 3) for value in quantizer.row(torch.tensor([[6.0, 0.1], [6.0, 0.5]])).tolist()]
        [0.098, 0.25, 0.0, 6.0]
    """

    fmt: Format
    granularity: Granularity
    factor_of: FactorOf

    def row(self, x: Tensor) -> Tensor:
        """What it does to ``x``, as a row of statistics.

        The largest magnitude is that of all of ``x``, by one reduction: a scale of the whole tensor needs it, and an
        entry that is not finite must not hide among tokens that are left out. All else is of evenly spaced tokens.

        Args:
            x: Shape (..., channels), as the library is given it.
        """
        if not x.numel():
            return nothing_lost(x)
        x = x.reshape(-1, x.shape[-1])
        lowest, highest = torch.aminmax(x)
        amax = torch.maximum(highest, -lowest).float()
        some = evenly_spaced(x, MOST_TOKENS)
        values, saturated_share = self.values(some, amax if self.granularity.rows is None else None)
        return row_of(some, values, amax, saturated_share)

    def values(self, x: Tensor, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What it makes of ``x``, in float32, and the share of the nonzero entries that it clips.

        Args:
            x: Shape (tokens, channels).
            amax: Largest magnitude, where ``x`` is only some of what shares a scale.
        """
        blocks = self.granularity.split(x.float())
        factor = self.factor_of(blocks.abs().amax(BLOCK_AXES, keepdim=True) if amax is None else amax)
        scaled = blocks * factor
        half_a_step = 2.0 ** (self.fmt.max_exponent - self.fmt.mantissa_bits - 1)
        num_clipped = torch.count_nonzero(scaled.abs() > self.fmt.max_value + half_a_step)
        values: Tensor = self.granularity.join(self.fmt.round(scaled) / factor, tuple(x.shape))
        return values, num_clipped / torch.count_nonzero(blocks).clamp(min=1)


def row_of(x: Tensor, values: Tensor, amax: Tensor, saturated_share: Tensor) -> Tensor:
    """The row of statistics of some tokens and what became of them.

    Args:
        x: Shape (tokens, channels).
        values: The same, after quantization.
        amax: Largest magnitude of the whole operand; not finite when the operand is not.
        saturated_share: Share of the nonzero entries that were clipped.
    """
    return stats_row(
        QuantizationStats(
            amax=amax,
            flushed_share=flushed_share(x, values),
            saturated_share=saturated_share,
            channel_error=channel_error(x, values),
        )
    )


def nothing_lost(x: Tensor) -> Tensor:
    """The row of statistics of an operand without tokens."""
    return x.new_zeros(len(QUANTIZER_STATS), dtype=torch.float32)
