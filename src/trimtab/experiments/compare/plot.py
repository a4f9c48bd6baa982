"""The picture of a comparison: each arm's loss, seed by seed, and what it did in the course of the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.errors import MissingExtraError

__all__ = ["comparison_figure", "write_plot"]

# Wong's colours, which stay apart for every kind of colour blindness, then dashes for more arms.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555", "#F0E442")
_DASHES = ("solid", "dash", "dot")
_BLACK = "#222222"
_MOST_POINTS = 120
_CLEAN = "static-low-clean"


def comparison_figure(summary: Mapping[str, Any]) -> Any:
    """Validation loss by arm, a point a seed; training loss over that without faults; units on the recovery path.

    Args:
        summary: What ``summary.json`` holds.

    Returns: A plotly figure.

    Raises: MissingExtraError: when plotly is not installed.
    """
    try:
        from plotly.subplots import make_subplots
    except ImportError:
        raise MissingExtraError("The picture", "plotly", "report") from None
    arms, steps = summary["arms"], summary["steps"]
    over = _CLEAN in arms
    titles = (
        "Validation loss, nats a token: a point a seed, a bar the mean",
        "Training loss" + (" over that of the low-cost path without faults" if over else "") + ", nats a token",
        "Units on the recovery path, of the arms with a budget",
    )
    figure = make_subplots(rows=3, cols=1, subplot_titles=titles, vertical_spacing=0.12)
    block = max(1, -(-steps // _MOST_POINTS))
    centres = [round(float(step), 1) for step in _blocks(np.arange(1, steps + 1), block)]
    for number, (name, arm) in enumerate(arms.items()):
        line = {"color": _COLOURS[number % len(_COLOURS)], "dash": _DASHES[number // len(_COLOURS) % len(_DASHES)]}
        losses = [row["val_loss"] for row in arm["by_seed"].values()]
        label = [arm["title"]] * len(losses)
        marker = {"color": line["color"], "size": 8}
        common = {"legendgroup": name, "name": arm["title"]}
        figure.add_scatter(x=label, y=losses, mode="markers", marker=marker, showlegend=False, **common, row=1, col=1)
        mean = {"symbol": "line-ew-open", "size": 26, "color": line["color"], "line": {"width": 2}}
        figure.add_scatter(
            x=[arm["title"]],
            y=[arm["val_loss"]["mean"]],
            mode="markers",
            marker=mean,
            showlegend=False,
            **common,
            row=1,
            col=1,
        )
        loss = _line(arm["series"]["train_loss"])
        if over:
            loss = loss - _line(arms[_CLEAN]["series"]["train_loss"])
        # Where all units are on it, or none, there is nothing to see.
        series = [loss, _line(arm["series"]["active"])] if arm["has_budget"] else [loss]
        for row, values in enumerate(series, start=2):
            figure.add_scatter(
                x=centres,
                y=[None if np.isnan(v) else round(float(v), 5) for v in _blocks(values, block)],
                mode="lines",
                line={**line, "width": 1.8},
                showlegend=row == 2,
                **common,
                row=row,
                col=1,
            )
    figure.update_xaxes(title_text="step", row=3)
    figure.update_xaxes(tickangle=25, row=1)
    figure.update_annotations(font_size=12)
    figure.update_layout(
        title=summary["title"],
        width=900,
        height=1040,
        template="plotly_white",
        font={"family": "sans-serif", "color": _BLACK, "size": 11},
        margin={"l": 60, "r": 20, "t": 80, "b": 60},
    )
    return figure


def write_plot(summary: Mapping[str, Any], folder: Path) -> tuple[list[Path], str | None]:
    """Write ``compare.html`` and ``compare.svg``, as far as this machine can.

    Args:
        summary: What ``summary.json`` holds.
        folder: Where to.

    Returns: What was written, and why not all of it was.
    """
    try:
        figure = comparison_figure(summary)
    except MissingExtraError as error:
        return [], str(error)
    page, image = folder / "compare.html", folder / "compare.svg"
    figure.write_html(str(page), include_plotlyjs="cdn")
    try:
        figure.write_image(str(image))
    except Exception as error:  # kaleido raises what its browser makes of it, of many kinds
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return [page], f"No SVG was drawn, which needs the package kaleido and Chrome or Chromium: {first}"
    return [page, image], None


def _line(values: list[float | None]) -> Any:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _blocks(values: Any, block: int) -> list[float]:
    """Means of so many neighbours each; the last may be of fewer.

    Example:
        >>> [float(mean) for mean in _blocks(np.array([1.0, 3.0, 5.0]), 2)]
        [2.0, 5.0]
    """
    return [float(np.mean(values[i : i + block])) for i in range(0, len(values), block)]
