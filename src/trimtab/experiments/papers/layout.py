"""An experiment as data: its scenarios, and the tables that are laid out as the paper's are. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trimtab.experiments.compare.comparison import Comparison

__all__ = ["COLUMNS", "Cell", "Column", "Experiment", "Kind", "Layout", "Regime", "Row", "Scenario", "ScenarioMaker"]

Kind = Literal["nats", "perplexity", "times", "percent", "fine_percent", "ratio", "share", "count", "seconds", "bytes"]
"""How a cell is written."""

Regime = Literal["natural", "injected"]
"""Whether what the low-cost path does is all there is, or faults are injected besides."""

Cell = Mapping[str, Any] | float | None
"""A number; mean, sd, n and of over seeds; share, interval and how many diverged; low and high of a published range;
None for a dash."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """A comparison, and what it is compared for.

    Args:
        comparison: What is run.
        regime: Natural or injected.
        about: What is done to the model, in one sentence for the reader of a page.
        gnmr: The arm that stands for GNMR where signals are compared.
        direct: The arm that goes by channel errors, where there is one.
    """

    comparison: Comparison
    regime: Regime
    about: str
    gnmr: str = "gnmr"
    direct: str | None = None

    def __post_init__(self) -> None:
        for arm in (self.gnmr, self.direct):
            assert arm is None or arm in self.comparison.arms, arm

    @property
    def name(self) -> str:
        """The comparison's."""
        return self.comparison.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One figure of an arm, or one of the paper's.

    Args:
        key: Of the figure, in the summary of an arm; "paper_..." of a figure that only the paper has.
        title: Over the column.
        kind: How it is written.
    """

    key: str
    title: str
    kind: Kind


_ALL = (
    Column(key="val_nats_per_byte", title="nats/byte", kind="nats"),
    Column(key="val_perplexity", title="perplexity", kind="perplexity"),
    Column(key="over_unquantized", title="x unquantized", kind="times"),
    Column(key="trigger_rate", title="triggers", kind="fine_percent"),
    Column(key="recovered_share", title="recovered", kind="percent"),
    Column(key="promotion_ratio", title="promotions", kind="ratio"),
    Column(key="full_share", title="budget full", kind="percent"),
    Column(key="switches", title="switches", kind="count"),
    Column(key="repaired", title="repaired", kind="share"),
    Column(key="step_seconds", title="CPU s/step", kind="seconds"),
    Column(key="wall_step_seconds", title="wall s/step", kind="seconds"),
    Column(key="time_over_low", title="CPU x low-cost", kind="times"),
    Column(key="projection_saved_bytes", title="kept", kind="bytes"),
    Column(key="paper_perplexity", title="paper: perplexity", kind="perplexity"),
    Column(key="paper_over_unquantized", title="paper: x unquantized", kind="times"),
    Column(key="paper_trigger_rate", title="paper: triggers", kind="fine_percent"),
    Column(key="paper_promotion_ratio", title="paper: promotions (definition not known)", kind="ratio"),
)
COLUMNS: Mapping[str, Column] = {column.key: column for column in _ALL}
"""Every column by its key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One arm of one scenario in a table.

    Args:
        scenario: Name of the scenario.
        arm: The arm, as written in its comparison.
        title: What the row is called.
        published: The paper's figures, by the keys of columns.
    """

    scenario: str
    arm: str
    title: str
    published: Mapping[str, Cell] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A table.

    Args:
        title: Over it.
        columns: Keys of ``COLUMNS``.
        rows: From top to bottom; those of a scenario that is not run are left out.
        note: What its reader has to know.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    note: str = ""


ScenarioMaker = Callable[[tuple[int, ...], int | None], tuple[Scenario, ...]]
"""From the seeds, and the number of steps where it is given, to the scenarios."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """An experiment.

    Args:
        name: On the command line.
        title: What it is called.
        scenarios: Makes its scenarios.
        layouts: Its tables.
        notes: What its reader has to know.
    """

    name: str
    title: str
    scenarios: ScenarioMaker
    layouts: tuple[Layout, ...]
    notes: tuple[str, ...] = ()
