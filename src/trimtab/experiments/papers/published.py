"""What Kong et al. 2026 report and we know, as data. Where a figure is not here, its cell is a dash."""

from __future__ import annotations

from collections.abc import Mapping

from trimtab.experiments.papers.layout import Cell

__all__ = ["GNMR_4BIT", "PUBLISHED_NOTE", "STATIC_4BIT", "STATIC_8BIT", "UNQUANTIZED"]

PUBLISHED_NOTE = (
    "Paper: Kong et al. 2026 (arXiv:2606.00539), LLaMA 60M on C4, 4-bit activations, validation perplexity a token of "
    "its vocabulary. Ours is a small model on bytes, so that only the columns 'x unquantized' and the shares can be "
    "set side by side. Of its three threshold settings the paper's figures are known to us as ranges. A dash: not "
    "known."
)
"""Below every table that has the paper's columns."""

_UNQUANTIZED = 30.79

UNQUANTIZED: Mapping[str, Cell] = {"paper_perplexity": _UNQUANTIZED, "paper_over_unquantized": 1.0}
"""16-bit activations."""

STATIC_4BIT: Mapping[str, Cell] = {"paper_perplexity": 67.22, "paper_over_unquantized": 67.22 / _UNQUANTIZED}
"""4-bit activations throughout."""

STATIC_8BIT: Mapping[str, Cell] = {"paper_perplexity": 30.88, "paper_over_unquantized": 30.88 / _UNQUANTIZED}
"""8-bit activations throughout."""

GNMR_4BIT: Mapping[str, Cell] = {
    "paper_perplexity": {"low": 30.59, "high": 30.68},
    "paper_over_unquantized": {"low": 30.59 / _UNQUANTIZED, "high": 30.68 / _UNQUANTIZED},
    "paper_trigger_rate": {"low": 0.00016, "high": 0.00141},
    "paper_promotion_ratio": 0.0040,
}
"""4-bit activations with GNMR, at any of its three threshold settings."""
