"""What Kong et al. 2026 report and we know, as data. Where a figure is not here, its cell is a dash."""

from __future__ import annotations

from collections.abc import Mapping

from trimtab.experiments.papers.layout import Cell

__all__ = ["GNMR_4BIT", "PUBLISHED_COLUMNS", "PUBLISHED_NOTE", "STATIC_4BIT", "STATIC_8BIT", "UNQUANTIZED"]

PUBLISHED_NOTE = (
    "Kong et al. 2026 (arXiv:2606.00539): LLaMA 60M on C4, 4-bit activations, validation perplexity a token of its "
    "vocabulary. Neither a perplexity nor a ratio of two can be set beside those of another tokenizer, such as ours of "
    "bytes: a token of a large vocabulary is several bytes, and a ratio grows with it. Of its three threshold settings "
    "the figures are known to us as ranges. How the paper counts promotions is not known to us: its ratio of 0.0040 "
    "lies above its own range of triggers, so that it is not what our column 'promotions' is, which is entries into "
    "the recovery path a unit-step. A dash: not known."
)
"""Below the table of the paper's figures."""

PUBLISHED_COLUMNS = (*("paper_perplexity", "paper_over_unquantized", "paper_trigger_rate", "paper_promotion_ratio"),)
"""Of that table, which has no figure of ours."""

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
