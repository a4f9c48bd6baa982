"""The picture of the fault experiment: one row a signal, one colour a fault, from the run records' readings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.errors import MissingExtraError
from trimtab.experiments.faults.table import MODEL_TITLES
from trimtab.trace import open_run

__all__ = ["fault_figure", "write_pictures"]

# Wong's colours, which stay apart for every kind of colour blindness; grey for what is healthy.
_COLOURS = {
    "healthy": "#999999",
    "rounded": "#555555",
    "truncated": "#D55E00",
    "bias_0.1%": "#E69F00",
    "rate_x10": "#0072B2",
    "small_batch": "#009E73",
    "no_aux_loss": "#F0E442",
    "no_aux_rate_x10": "#56B4E9",
    "truncated_rate_x10": "#CC79A7",
}
_BLACK = "#222222"

_Series = tuple[NDArray[Any], NDArray[Any]]

_ROWS = (
    ("Shift residual: coherence, greatest of the heads", "shift_residual", "coherence", np.nanmax),
    ("Update spectrum: entropy of D2, least of the heads", "attention_spectrum", "d2_entropy", np.nanmin),
    ("Update spectrum: entropy of dWq, least of the layers", "attention_spectrum", "dwq_layer_entropy", np.nanmin),
    ("Update spectrum: entropy of dWk, least of the layers", "attention_spectrum", "dwk_layer_entropy", np.nanmin),
    ("Router: routing entropy, least of the layers", "router", "entropy_mean", np.nanmin),
)
_LOSS_ROW = "Held-out loss over the healthy twin's, nats"
_MOST_POINTS = 90
# The loss of a run that has gone wrong is many times what tells when it went.
_MOST_NATS = 1.5


def fault_figure(summary: Mapping[str, Any], folder: Path) -> Any:
    """Means over the seeds of each signal, one column a kind of model; a dashed line where the fault begins.

    Args:
        summary: What ``summary.json`` holds.
        folder: Where it lies, with the records.

    Returns: A plotly figure.

    Raises: MissingExtraError: when plotly is not installed.
    """
    try:
        from plotly.subplots import make_subplots
    except ImportError:
        raise MissingExtraError("The picture", "plotly", "report") from None
    models = list(summary["models"])
    rows = [row for row in _ROWS if "moe" in models or row[1] != "router"]
    titles = [title for title, *_ in rows] + [_LOSS_ROW]
    figure = make_subplots(
        rows=len(rows) + 1,
        cols=len(models),
        shared_xaxes=True,
        vertical_spacing=0.035,
        horizontal_spacing=0.07,
        subplot_titles=[
            title + (f" - {MODEL_TITLES[m]}" if i == 0 else "") for i, title in enumerate(titles) for m in models
        ],
    )
    shown: set[str] = set()
    for column, model in enumerate(models, start=1):
        scenarios = summary["models"][model]
        for name, colour in _COLOURS.items():
            if name not in scenarios:
                continue
            series = [_signal(folder, model, name, summary["seeds"], row) for row in rows]
            series.append(_extra_loss(summary["parts"], model, name, summary["seeds"]))
            for row, (steps, values) in enumerate(series, start=1):
                if not len(steps):
                    continue
                figure.add_scatter(
                    x=steps.tolist(),
                    y=[round(float(v), 4) for v in values],
                    mode="lines",
                    line={"color": colour, "width": 1.8},
                    name=scenarios[name]["title"],
                    legendgroup=name,
                    showlegend=name not in shown,
                    row=row,
                    col=column,
                )
                shown.add(name)
    figure.add_vline(x=summary["start_step"], line={"color": _BLACK, "width": 1, "dash": "dash"})
    figure.update_yaxes(range=[-0.1, _MOST_NATS], row=len(titles))
    figure.update_xaxes(title_text="step", row=len(titles))
    figure.update_annotations(font_size=11)
    figure.update_layout(
        width=560 * len(models),
        height=175 * len(titles) + 80,
        template="plotly_white",
        font={"family": "sans-serif", "color": _BLACK, "size": 11},
        legend={"orientation": "h", "y": -0.05},
        margin={"l": 50, "r": 20, "t": 40, "b": 60},
    )
    return figure


def write_pictures(summary: Mapping[str, Any], folder: Path) -> tuple[list[Path], str | None]:
    """Write ``faults.html`` and ``faults.svg``, as far as this machine can.

    Returns: What was written, and why not all of it was.
    """
    try:
        figure = fault_figure(summary, folder)
    except MissingExtraError as error:
        return [], str(error)
    page, image = folder / "faults.html", folder / "faults.svg"
    figure.write_html(str(page), include_plotlyjs="cdn")
    try:
        figure.write_image(str(image))
    except Exception as error:  # kaleido raises what its browser makes of it, of many kinds
        return [page], f"No SVG was drawn, which needs the package kaleido and Chrome or Chromium: {_first_line(error)}"
    return [page, image], None


def _signal(
    folder: Path, model: str, name: str, seeds: Sequence[int], row: tuple[str, str, str, Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The base's readings and the scenario's after them, over places as the row says, and the mean over the seeds."""
    _, monitor, metric, over_places = row
    lines: list[_Series] = []
    for seed in seeds:
        steps, values = [], []
        for part in ("base", name):
            with open_run(folder / "records" / model / f"seed{seed}" / part) as run:
                found, read, _ = run.readings(monitor, metric)
            known = ~np.isnan(read).all(axis=1) if len(found) else np.zeros(0, dtype=bool)
            steps.append(found[known])
            values.append(over_places(read[known], axis=1) if known.any() else np.zeros(0))
        lines.append((np.concatenate(steps), np.concatenate(values)))
    return _mean_line(lines)


def _extra_loss(parts: Mapping[str, Any], model: str, name: str, seeds: Sequence[int]) -> _Series:
    lines: list[_Series] = []
    for seed in seeds:
        twin = dict(map(tuple, parts[f"{model}-seed{seed}-healthy"]["held_out"]))
        pairs = parts[f"{model}-seed{seed}-{name}"]["held_out"]
        apart = [(step, loss - twin[step]) for step, loss in pairs if loss is not None and twin[step] is not None]
        lines.append((np.array([s for s, _ in apart]), np.array([d for _, d in apart])))
    return _mean_line(lines)


def _mean_line(lines: Sequence[_Series]) -> _Series:
    """The mean over the lines at the steps that all of them have, thinned out to what a picture can show."""
    common = lines[0][0]
    for steps, _ in lines[1:]:
        common = np.intersect1d(common, steps)
    common = common[:: max(1, len(common) // _MOST_POINTS)]
    if not len(common):
        return common, common
    rows = [values[np.searchsorted(steps, common)] for steps, values in lines]
    return common, np.mean(rows, axis=0)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
