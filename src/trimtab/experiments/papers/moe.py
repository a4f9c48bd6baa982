"""A mixture of experts with products on a low grid: alpha 0.9, each expert a unit (Kong et al. 2026)."""

from __future__ import annotations

from trimtab.experiments.arms import TrainingPlan
from trimtab.experiments.compare.comparison import Comparison
from trimtab.experiments.papers.layout import Experiment, Layout, Row, Scenario

__all__ = ["MOE"]

MAX_ACTIVE = 4
"""Ours: the paper's budget for this run is not published. Of 24 units here: 8 projections and 16 experts."""

PUBLISHED = "gnmr-paper@setting=moe"
RANDOM_PUBLISHED = "random@of=gnmr-paper,setting=moe"
RANDOM_ERROR = "random@of=direct-only"

NATURAL, HIGH_RATE, INJECTED = "natural-e3m2", "natural-e2m1-high-rate", "injected-e2m3"


def _scenarios(seeds: tuple[int, ...], steps: int | None) -> tuple[Scenario, ...]:
    natural = Comparison(
        name=NATURAL,
        title="A mixture of experts with E3M2 products, no faults",
        recipe="quantized-gemm",
        recipe_settings={"low_format": "e3m2"},
        model="mixtral",
        arms=("unquantized-clean", "static-low", "static-high", PUBLISHED),
        max_active=MAX_ACTIVE,
        plan=_plan(steps or 150),
        seeds=seeds,
    )
    high_rate = Comparison(
        name=HIGH_RATE,
        title="A mixture of experts with E2M1 products at a learning rate of 1e-2, no faults",
        recipe="quantized-gemm",
        recipe_settings={"low_format": "e2m1"},
        model="mixtral",
        arms=("unquantized-clean", "static-low", "static-high", PUBLISHED, RANDOM_PUBLISHED),
        max_active=MAX_ACTIVE,
        plan=_plan(steps or 250, learning_rate=1e-2),
        seeds=seeds,
    )
    injected = Comparison(
        name=INJECTED,
        title="A mixture of experts with E2M3 products, outlier channels",
        recipe="quantized-gemm",
        recipe_settings={"low_format": "e2m3"},
        model="mixtral",
        arms=(
            *("static-low-clean", "static-low", "static-high", PUBLISHED, RANDOM_PUBLISHED, "gnmr", "random"),
            *("direct", "direct-only", RANDOM_ERROR, "random-direct", "adapt-style"),
        ),
        faults="outlier-bursts",
        fault_settings={"factor": (200.0, 1000.0)},
        max_active=MAX_ACTIVE,
        plan=_plan(steps or 150),
        seeds=seeds,
    )
    return (
        Scenario(
            comparison=natural,
            regime="natural",
            about="6-bit E3M2 products in the projections and experts of a mixture, and nothing else.",
            gnmr=PUBLISHED,
        ),
        Scenario(
            comparison=high_rate,
            regime="natural",
            about="4-bit E2M1 products at three times the usual learning rate, and nothing else.",
            gnmr=PUBLISHED,
        ),
        Scenario(
            comparison=injected,
            regime="injected",
            about="Bursts in which channels of one unit's input are 200 to 1000 times larger and its weights as much "
            "smaller, so that the other channels of a tile underflow.",
            direct="direct",
        ),
    )


def _plan(steps: int, learning_rate: float = 3e-3) -> TrainingPlan:
    return TrainingPlan(num_steps=steps, num_validation=512, num_layers=2, learning_rate=learning_rate)


def _rows(scenario: str, low: str) -> tuple[Row, ...]:
    arms = (
        ("unquantized-clean", "unquantized"),
        ("static-low-clean", f"static {low}, no faults"),
        ("static-low", f"static {low}"),
        ("static-high", "static FP8"),
        (PUBLISHED, "GNMR, published thresholds (0.9, beta ours)"),
        (RANDOM_PUBLISHED, "random, as many"),
        ("gnmr", "GNMR, robust"),
        ("random", "random, as many as robust"),
        ("direct", "GNMR and channel error"),
        ("direct-only", "channel error alone"),
        (RANDOM_ERROR, "random, as many as by the error alone"),
        ("random-direct", "random, as many as with the error"),
        ("adapt-style", "ADAPT-style: profiled for 40% of the run"),
    )
    return tuple(Row(scenario=scenario, arm=arm, title=title) for arm, title in arms)


_COLUMNS = (
    *("val_nats_per_byte", "val_perplexity", "over_unquantized", "trigger_rate", "promotion_ratio"),
    *("recovered_share", "full_share", "repaired", "step_seconds"),
)

MOE = Experiment(
    name="moe",
    title="A mixture of experts",
    scenarios=_scenarios,
    layouts=(
        Layout(title="Natural, E3M2", columns=_COLUMNS, rows=_rows(NATURAL, "E3M2")),
        Layout(title="Natural, E2M1 at learning rate 1e-2", columns=_COLUMNS, rows=_rows(HIGH_RATE, "E2M1")),
        Layout(title="Injected, E2M3", columns=_COLUMNS, rows=_rows(INJECTED, "E2M3")),
    ),
    notes=(
        "The paper runs its first 5% of steps wholly on the recovery path. These small runs do not: the arms of a "
        "comparison have one budget from the first step on. Runs with --preset do. The paper's figures for this run "
        "are not known to us, and beta, lock and budget are ours.",
        "x unquantized: the exponential of the mean loss difference, of a byte. Step times are processor time of one "
        "thread on a CPU that emulates every format.",
    ),
)
"""The paper's mixture of experts."""
