"""From figures to tables: as data for JSON, for the terminal, and as Markdown. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from trimtab.experiments.compare.measures import over_seeds
from trimtab.experiments.papers.layout import COLUMNS, Cell, Kind, Layout, Row
from trimtab.experiments.papers.repair import LOW, UNQUANTIZED, losses_of, repair_of

__all__ = ["cell_text", "figure_of", "make_table", "markdown_grid", "markdown_table", "rich_tables"]

_LOSSES = ("val_nats_per_byte", "val_perplexity")


def make_table(layout: Layout, comparisons: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """A table as data.

    Args:
        layout: What is in it.
        comparisons: The summaries of the comparisons that were run, by name.

    Returns: title, note, columns (key, title, kind) and rows (scenario, arm, title, cells by key); None where none of
        its arms was run. A column that is empty in every row is left out.
    """
    there = [row for row in layout.rows if row.arm in comparisons.get(row.scenario, {}).get("arms", ())]
    rows = [_row(row, layout.columns, comparisons[row.scenario]) for row in there]
    if not rows:
        return None
    used = [key for key in layout.columns if any(row["cells"][key] is not None for row in rows)]
    columns = [{"key": key, "title": COLUMNS[key].title, "kind": COLUMNS[key].kind} for key in used]
    cells = [{**row, "cells": {key: row["cells"][key] for key in used}} for row in rows]
    return {"title": layout.title, "note": layout.note, "columns": columns, "rows": cells}


def _row(row: Row, columns: Sequence[str], comparison: Mapping[str, Any]) -> dict[str, Any]:
    cells = {
        key: _jsonable(row.published.get(key)) if key.startswith("paper_") else figure_of(comparison, row.arm, key)
        for key in columns
    }
    return {"scenario": row.scenario, "arm": row.arm, "title": row.title, "cells": cells}


def figure_of(comparison: Mapping[str, Any], arm: str, key: str) -> Cell:
    """One figure of an arm.

    Args:
        comparison: A comparison's summary.
        arm: The arm, as written.
        key: Of a column.

    Returns: mean, sd, n and of; share, interval and how many diverged; or None where the arm has none.
    """
    figures = comparison["arms"][arm]
    if key == "over_unquantized":
        return _over_unquantized(comparison, arm)
    if key == "time_over_low":
        return _over(figures, comparison["arms"].get(LOW), "step_seconds")
    if key == "repaired":
        return _share(repair_of(comparison, arm), len(comparison["seeds"]))
    found = figures.get(key)
    if not isinstance(found, Mapping):
        return None
    # A loss that is missing has diverged, which is a finding; any other figure that is missing does not apply.
    return dict(found) if found.get("mean") is not None or (key in _LOSSES and found.get("of")) else None


def _share(found: Mapping[str, Any] | None, num_seeds: int) -> Cell:
    """Share and interval of what was repaired, or on how many seeds a loss that it takes diverged."""
    if found is None:
        return None
    diverged = max((found.get("num_diverged") or {}).values(), default=0)
    if diverged:
        return {"share": None, "interval": None, "diverged": diverged, "of": num_seeds}
    return None if found["share"] is None else {key: found[key] for key in ("share", "interval")}


def _over_unquantized(comparison: Mapping[str, Any], arm: str) -> Cell:
    """Perplexity over the unquantized model's: of each seed's loss difference the mean, exponentiated."""
    if UNQUANTIZED not in comparison["arms"]:
        return None
    pairs = zip(losses_of(comparison, arm), losses_of(comparison, UNQUANTIZED), strict=True)
    found = over_seeds(loss - plain for loss, plain in pairs)
    if found["mean"] is None:
        return None
    return {**found, "mean": math.exp(min(found["mean"], 700.0)), "sd": None}


def _over(figures: Mapping[str, Any], other: Mapping[str, Any] | None, key: str) -> float | None:
    """The ratio of two means."""
    above, below = (None if one is None else (one.get(key) or {}).get("mean") for one in (figures, other))
    return None if above is None or not below else above / below


def _jsonable(cell: Cell) -> Any:
    return dict(cell) if isinstance(cell, Mapping) else cell


def cell_text(cell: Cell, kind: Kind) -> str:
    """A cell as it is read: a mean with its spread, a range, a share with its interval, how many seeds are in it.

    Example:
        >>> cell_text({"mean": 2.0, "sd": 0.01, "n": 3}, "nats"), cell_text(None, "nats")
        ('2.0000±0.0100', '-')
        >>> cell_text({"share": 0.84, "interval": [0.6, 1.01]}, "share"), cell_text({"low": 1.0, "high": 2.0}, "times")
        ('84% (60 to 101)', '1.00-2.00')
        >>> cell_text({"mean": 2.0, "sd": None, "n": 1, "of": 3}, "nats")
        '2.0000 (1/3)'
        >>> cell_text({"share": None, "interval": None, "diverged": 2, "of": 3}, "share")
        'diverged 2/3'
    """
    if cell is None:
        return "-"
    if not isinstance(cell, Mapping):
        return _number(float(cell), kind)
    if "low" in cell:
        return f"{_number(cell['low'], kind).removesuffix('%')}-{_number(cell['high'], kind)}"
    if "share" in cell:
        if cell["share"] is None:
            return f"diverged {cell['diverged']}/{cell['of']}" if cell.get("diverged") else "-"
        text = _number(cell["share"], kind)
        low_high = cell.get("interval")
        return f"{text} ({100 * low_high[0]:.0f} to {100 * low_high[1]:.0f})" if low_high else text
    if cell["mean"] is None:
        return f"diverged {cell['of']}/{cell['of']}" if cell.get("of") and kind in ("nats", "perplexity") else "-"
    text = _number(cell["mean"], kind)
    # A share's spread would be two percent signs; its mean says enough, and the summary has both.
    has_spread = cell.get("sd") is not None and kind in ("nats", "perplexity", "count")
    text += f"±{_number(cell['sd'], kind)}" if has_spread else ""
    # Fewer seeds than were run have this figure: a mean of those that did not diverge, say.
    return f"{text} ({cell['n']}/{cell['of']})" if cell.get("of", cell["n"]) != cell["n"] else text


def _number(value: float, kind: Kind) -> str:
    if not math.isfinite(value):
        return "-"
    return {
        "nats": f"{value:.4f}",
        "perplexity": f"{value:.2f}",
        "times": f"{value:.2f}",
        "percent": f"{value:.1%}",
        "fine_percent": f"{value:.3%}",
        "ratio": f"{value:.4f}",
        "share": f"{value:.0%}",
        "count": f"{value:.0f}",
        "seconds": f"{value:.3f}",
        "bytes": f"{value / 2**20:.2f} MiB",
    }[kind]


def _grid(table: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings, and the cells of each row."""
    columns = table["columns"]
    several = len({row["scenario"] for row in table["rows"]}) > 1
    headings = [*(["scenario"] if several else []), "arm", *(column["title"] for column in columns)]
    rows = [
        [
            *([row["scenario"]] if several else []),
            row["title"],
            *(cell_text(row["cells"][column["key"]], column["kind"]) for column in columns),
        ]
        for row in table["rows"]
    ]
    return headings, rows


def rich_tables(table: Mapping[str, Any], width: int) -> list[Table]:
    """For the terminal: one table where its columns fit into ``width``, or else several with some of them each."""
    headings, rows = _grid(table)
    num_words = len(headings) - len(table["columns"])
    needs = [max(len(cells[i]) for cells in [headings, *rows]) + 1 for i in range(len(headings))]
    groups: list[list[int]] = [[]]
    for i in range(num_words, len(headings)):
        if groups[-1] and sum(needs[:num_words]) + sum(needs[j] for j in groups[-1]) + needs[i] > width:
            groups.append([])
        groups[-1].append(i)
    return [_rich(table["title"], headings, rows, [*range(num_words), *group], num_words) for group in groups]


def _rich(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], chosen: Sequence[int], num_words: int
) -> Table:
    shown = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for i in chosen:
        # Where not even one column fits beside the names, those are what is folded.
        shown.add_column(headings[i], justify="left" if i < num_words else "right", no_wrap=i >= num_words)
    for row in rows:
        shown.add_row(*(row[i] for i in chosen))
    return shown


def markdown_table(table: Mapping[str, Any], heading: str = "##") -> str:
    """For a document: its title as a heading, the table, its note."""
    headings, rows = _grid(table)
    num_words = len(headings) - len(table["columns"])
    parts = [f"{heading} {table['title']}", markdown_grid(headings, rows, num_words)]
    return "\n\n".join([*parts, *([table["note"]] if table["note"] else [])])


def markdown_grid(headings: Sequence[str], rows: Sequence[Sequence[str]], num_words: int = 1) -> str:
    r"""A table in Markdown, of which the first ``num_words`` columns are words.

    Example:
        >>> print(markdown_grid(["arm", "loss"], [["a|b", "1"]]))
        | arm | loss |
        | --- | ---: |
        | a\|b | 1 |
    """
    rule = ["---"] * num_words + ["---:"] * (len(headings) - num_words)
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [list(headings), rule, *escaped])
