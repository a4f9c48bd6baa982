"""What a benchmark gives: figures, most of them ratios, and how they are timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Figure", "best_ms", "ratio"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One figure.

    Args:
        name: What was measured.
        value: The figure.
        unit: "ms", or what a ratio is to: "of a copy", "of an untouched step".
        low: Lower quartile over the repeats; None where the figure is the fastest of them.
        high: Upper quartile.

    Example:
        >>> print(Figure(name="watched", value=1.01, unit="of an untouched step", low=0.99, high=1.02))
        watched: 1.01 of an untouched step (quartiles 0.99 to 1.02)
    """

    name: str
    value: float
    unit: str
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        spread = "" if self.low is None or self.high is None else f" (quartiles {self.low:.3g} to {self.high:.3g})"
        return f"{self.name}: {self.value:.3g} {self.unit}{spread}"


def best_ms(*acts: Callable[[], object], repeats: int) -> list[float]:
    """The fastest run of each, taking turns, so that the machine's other work slows all alike.

    Example:
        >>> quick, slow = best_ms(lambda: None, lambda: sum(range(100_000)), repeats=3)
        >>> quick < slow
        True
    """
    best = [float("inf")] * len(acts)
    for _ in range(repeats):
        for i, act in enumerate(acts):
            start = time.perf_counter()
            act()
            best[i] = min(best[i], 1e3 * (time.perf_counter() - start))
    return best


def ratio(name: str, taken: Sequence[float], against: Sequence[float], unit: str) -> Figure:
    """The median ratio of two arms that took turns, pair by pair, and its quartiles.

    Example:
        >>> ratio("twice", [2.0, 4.0, 6.0], [1.0, 2.0, 3.0], "of once").value
        2.0
    """
    pairs = [a / b for a, b in zip(taken, against, strict=True)]
    low, _, high = statistics.quantiles(pairs, n=4)
    return Figure(name=name, value=statistics.median(pairs), unit=unit, low=low, high=high)
