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

from trimtab.formats import Format, Granularity
from trimtab.formats.fake_quantization import stats_of
from trimtab.formats.granularity import BLOCK_AXES
from trimtab.formats.sampling import num_rows, rows_of, spread_rows
from trimtab.precision.quantizer_stats import most_tokens_of, stats_row
from trimtab.precision.recipe import QUANTIZER_STATS

__all__ = ["FactorOf", "OperandQuantizer", "nothing_seen", "some_tokens"]

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
        >>> [round(value, 3) for value in quantizer.row(torch.tensor([[6.0, 0.1], [6.0, 0.5]] * 2)).tolist()]
        [0.098, 0.25, 0.0, 6.0]
    """

    fmt: Format
    granularity: Granularity
    factor_of: FactorOf

    def row(self, x: Tensor) -> Tensor:
        """What it does to ``x``, as a row of statistics.

        The largest magnitude is that of all of ``x``, by one reduction: a scale of the whole tensor needs it, and an
        entry that is not finite must not hide among tokens that are left out. All else is of some tokens.

        Args:
            x: Shape (..., channels), as the library is given it.
        """
        if not x.numel():
            return nothing_seen(x)
        lowest, highest = torch.aminmax(x)
        amax = torch.maximum(highest, -lowest).float()
        some = some_tokens(x)
        values, num_clipped = self.values(some, amax if self.granularity.rows is None else None)
        return stats_row(stats_of(some, values, amax, num_clipped), x)

    def values(self, x: Tensor, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What it makes of ``x``, in float32, and how many entries it clips.

        Args:
            x: Shape (tokens, channels).
            amax: Largest magnitude, where ``x`` is only some of what shares a scale.
        """
        blocks = self.granularity.split(x.float())
        factor = self.factor_of(blocks.abs().amax(BLOCK_AXES, keepdim=True) if amax is None else amax)
        scaled = blocks * factor
        half_a_step = 2.0 ** (self.fmt.max_exponent - self.fmt.mantissa_bits - 1)
        num_clipped = (scaled.abs() > self.fmt.max_value + half_a_step).sum()
        values: Tensor = self.granularity.join(self.fmt.round(scaled) / factor, tuple(x.shape))
        return values, num_clipped


def some_tokens(x: Tensor) -> Tensor:
    """The tokens of ``x`` (..., channels) that statistics are taken from, as a matrix."""
    return rows_of(x, spread_rows(num_rows(x), most_tokens_of(x), x.device))


def nothing_seen(x: Tensor) -> Tensor:
    """The row of statistics of an operand without tokens: its error is not known."""
    row = x.new_zeros(len(QUANTIZER_STATS), dtype=torch.float32)
    row[0] = torch.nan
    return row
