"""Draws what ``what_if`` and ``sweep`` tell: a sweep's figures, or the active sets of each policy along the run."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trimtab.errors import ConfigError, MissingExtraError, nearest_names
from trimtab.trace.what_if import Outcome, WhatIf, settings_text

__all__ = ["check_picture", "what_if_figure", "write_picture"]

# Wong's colours, which stay apart for every kind of colour blindness.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#F0E442")
_BLACK, _GREY = "#222222", "#999999"
_IMAGES = (".svg", ".png", ".pdf")


def check_picture(path: Path) -> None:
    """See that a picture can be asked for under this name, before anything is computed.

    Raises:
        ConfigError: The suffix names no format.
        MissingExtraError: plotly is not installed.
    """
    if path.suffix not in (".html", *_IMAGES):
        near = nearest_names(path.suffix, [".html", *_IMAGES], 1) or [".html"]
        allowed = f"the suffix says the format: .html, {', '.join(_IMAGES)}."
        raise ConfigError("plot", str(path), allowed, f"Name it {path.with_suffix(near[0]).name}, say.")
    _make_subplots()


def write_picture(told: WhatIf, path: Path) -> None:
    """Draw ``what_if_figure`` into a file; the suffix says the format.

    Raises:
        ConfigError: The suffix names no format, or the file cannot be written here.
        MissingExtraError: plotly is not installed.
    """
    check_picture(path)
    figure = what_if_figure(told)
    try:
        if path.suffix == ".html":
            figure.write_html(str(path), include_plotlyjs="cdn")
        else:
            figure.write_image(str(path))
    except Exception as error:  # kaleido raises what its browser makes of it, of many kinds
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        remedy = "Images need the package kaleido and Chrome or Chromium; a name that ends in .html needs neither."
        raise ConfigError("plot", str(path), f"it could not be written ({said}).", remedy) from None


def what_if_figure(told: WhatIf) -> Any:
    """A sweep as lines over the values of its first setting; other policies as active units over the steps.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    figure = _sweep_figure(told) if told.grid else _timeline(told)
    figure.update_layout(
        width=900,
        template="plotly_white",
        font={"family": "sans-serif", "color": _BLACK, "size": 11},
        margin={"l": 60, "r": 20, "t": 40, "b": 50},
    )
    figure.update_annotations(font_size=12)
    return figure


def _sweep_figure(told: WhatIf) -> Any:
    rows: list[tuple[str, Callable[[Outcome], float]]] = [
        ("Recoverable unit-steps on the recovery path", lambda one: one.recovered_share),
        ("Times that a unit entered the active set", lambda one: one.num_switches),
    ]
    if told.faults:
        rows.append((f"Faults caught, of {len(told.faults)}", lambda one: one.num_caught))
        rows.append(("Unit-steps on the recovery path outside any fault of the unit", lambda one: one.num_false))
    figure = _make_subplots()(
        rows=len(rows), cols=1, shared_xaxes=True, vertical_spacing=0.06, subplot_titles=[title for title, _ in rows]
    )
    first, *others = told.grid
    shown = [str(value) for value in told.grid[first]]
    for number, chosen in enumerate(itertools.product(*(told.grid[name] for name in others))):
        rest = dict(zip(others, chosen, strict=True))
        line = [told.outcomes[settings_text({first: value} | rest)] for value in told.grid[first]]
        for row, (_, value_of) in enumerate(rows, start=1):
            figure.add_scatter(
                x=shown,
                y=[value_of(one) for one in line],
                mode="lines+markers",
                line={"color": _COLOURS[number % len(_COLOURS)], "width": 1.8},
                name=settings_text(rest) or first,
                legendgroup=str(number),
                showlegend=row == 1 and bool(others),
                row=row,
                col=1,
            )
    for row, (_, value_of) in enumerate(rows, start=1):
        figure.add_scatter(
            x=[shown[0], shown[-1]],
            y=[value_of(told.recorded)] * 2,
            mode="lines",
            line={"color": _GREY, "width": 1.5, "dash": "dash"},
            name="as recorded",
            legendgroup="recorded",
            showlegend=row == 1,
            row=row,
            col=1,
        )
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(tickformat=".1%", row=1)
    figure.update_xaxes(type="category")
    figure.update_xaxes(title_text=first, row=len(rows))
    figure.update_layout(height=190 * len(rows) + 90)
    return figure


def _timeline(told: WhatIf) -> Any:
    figure = _make_subplots()(rows=1, cols=1, subplot_titles=["Units on the recovery path; faults are shaded"])
    routed = (told.steps + 1).tolist()
    # What the run did comes last, so that it lies on top.
    colours = [*(_COLOURS[number % len(_COLOURS)] for number in range(len(told.outcomes))), _BLACK]
    for colour, (name, one) in zip(colours, {**told.outcomes, "as recorded": told.recorded}.items(), strict=True):
        figure.add_scatter(
            x=routed,
            y=one.active_counts.tolist(),
            mode="lines",
            line={"color": colour, "width": 1.5, "shape": "hv"},
            name=name,
            showlegend=True,
        )
    for fault in told.faults:
        figure.add_vrect(
            x0=fault.start_step, x1=fault.end_step, fillcolor=_COLOURS[1], opacity=0.12, line_width=0, layer="below"
        )
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(rangemode="tozero")
    figure.update_layout(height=360)
    return figure


def _make_subplots() -> Any:
    try:
        from plotly.subplots import make_subplots
    except ImportError:
        raise MissingExtraError("The picture", "plotly", "report") from None
    return make_subplots
