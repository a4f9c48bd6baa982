"""The README's picture, made from a demo's records.

``python -m trimtab.experiments.picture runs/demo docs/demo.svg``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.errors import ConfigError, MissingExtraError
from trimtab.trace import open_run

__all__ = ["demo_figure"]

# Wong's colours, which stay apart for every kind of colour blindness.
_BLUE, _ORANGE, _GREY, _BLACK = "#0072B2", "#D55E00", "#999999", "#222222"
_ARMS = ("static_4bit", "random", "damping", "gnmr", "gnmr_damping", "static_8bit")


def demo_figure(folder: Path) -> Any:
    """Above: the risk of every unit over the steps of the GNMR arm, its faults, and when each unit was recovered.
    Below: validation loss of every arm.

    Args:
        folder: Where ``trimtab demo`` wrote.

    Returns: A plotly figure.

    Raises:
        ConfigError: when the folder holds no whole demo.
        MissingExtraError: when plotly is not installed.
    """  # noqa: D205
    try:
        from plotly.subplots import make_subplots
    except ImportError:
        raise MissingExtraError("The picture", "plotly", "report") from None
    path = folder / "summary.json"
    if not path.exists():
        raise ConfigError("folder", str(folder), "it holds no whole demo.", "Run trimtab demo first.")
    summary = json.loads(path.read_text(encoding="utf-8"))
    with open_run(folder / "records" / "gnmr") as run:
        steps = run.steps()
    figure = make_subplots(
        rows=2,
        cols=1,
        row_heights=[0.62, 0.38],
        vertical_spacing=0.16,
        subplot_titles=[
            "Risk of every unit, GNMR arm: injected faults (open boxes) and steps on the 8-bit path (blue)",
            f"Validation loss over fault-free 4-bit, nats, after {summary['steps']} steps (seed {summary['seed']})",
        ],
    )
    names = [_short(name) for name in steps.units]
    # Risk spans orders of magnitude; 1, where a unit becomes risky, is the middle of what is shown.
    risk = np.clip(np.log10(np.maximum(np.nan_to_num(steps.risk.T, posinf=1e3), 1e-3)), -1.5, 1.5)
    figure.add_heatmap(
        z=risk,
        x=steps.step,
        y=names,
        zmin=-1.5,
        zmax=1.5,
        colorscale=[[0, "#ffffff"], [0.5, "#f3e2d3"], [0.62, "#f0b27a"], [1, _ORANGE]],
        colorbar={
            "title": "risk",
            "tickvals": [-1, 0, 1],
            "ticktext": ["0.1", "1", "10"],
            "len": 0.55,
            "y": 1,
            "yanchor": "top",
        },
        row=1,
        col=1,
    )
    for unit, row in enumerate(steps.active.T):
        for start, stop in _stretches(row):
            # The decision of a step routes the step after it.
            first, last = int(steps.step[start]) + 1, int(steps.step[stop - 1]) + 1
            figure.add_shape(
                type="line",
                x0=first - 0.5,
                x1=last + 0.5,
                y0=unit,
                y1=unit,
                line={"color": _BLUE, "width": 3},
                row=1,
                col=1,
            )
    for burst in summary["bursts"]:
        unit, end = steps.units.index(burst["unit"]), burst["start_step"] + burst["num_steps"]
        figure.add_shape(
            type="rect",
            x0=burst["start_step"] - 0.5,
            x1=end - 0.5,
            y0=unit - 0.46,
            y1=unit + 0.46,
            line={"color": _BLACK, "width": 1},
            row=1,
            col=1,
        )
    arms = [summary["arms"][name] for name in _ARMS]
    clean = summary["arms"]["static_4bit_clean"]["val_loss"]
    figure.add_bar(
        x=[a["val_loss"] - clean for a in arms],
        y=[a["title"] for a in arms],
        orientation="h",
        text=[_label(a) for a in arms],
        textposition="outside",
        marker_color=[_BLUE if a["title"].startswith("GNMR") else _GREY for a in arms],
        row=2,
        col=1,
    )
    extra = [a["val_loss"] - clean for a in arms]
    figure.update_xaxes(title_text="step", row=1, col=1)
    figure.update_xaxes(range=[-0.12 * max(extra), 1.35 * max(extra)], row=2, col=1)
    figure.update_yaxes(autorange="reversed", tickfont={"size": 9}, row=1, col=1)
    figure.update_yaxes(autorange="reversed", row=2, col=1)
    figure.update_layout(
        width=1000,
        height=900,
        template="plotly_white",
        showlegend=False,
        font={"family": "sans-serif", "color": _BLACK},
        margin={"l": 150, "r": 60, "t": 60, "b": 50},
    )
    return figure


def _label(arm: dict[str, Any]) -> str:
    share = arm["repaired_share"]
    return f"{arm['val_loss']:.4f}" + ("" if share is None else f"  {share:.0%} repaired")


def _short(name: str) -> str:
    parts = name.split(".")
    number = next((p for p in parts if p.isdigit()), "")
    return f"{number}.{parts[-1]}"


def _stretches(flags: np.ndarray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def main(arguments: list[str]) -> None:
    """Write the figure of a demo folder to an image file; the suffix names the format."""
    folder, target = map(Path, arguments)
    demo_figure(folder).write_image(str(target))


if __name__ == "__main__":
    main(sys.argv[1:])
