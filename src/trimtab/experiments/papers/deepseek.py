"""Products on a low grid, DeepSeek-style: two-stage thresholds, projections and blocks (Kong et al. 2026, 5.2)."""

from __future__ import annotations

from trimtab.experiments.arms import TrainingPlan
from trimtab.experiments.compare.comparison import Comparison
from trimtab.experiments.papers.layout import Experiment, Layout, Row, Scenario

__all__ = ["DEEPSEEK"]

MAX_ACTIVE = 0.25
"""The published budget: a quarter of the units."""

PUBLISHED = "gnmr-paper@setting=deepseek"
RANDOM_PUBLISHED = "random@of=gnmr-paper,setting=deepseek"
HIGH_ALPHA, LOW_ALPHA = "gnmr-paper@beta=1.5", "gnmr-paper@alpha=1.1,beta=1.5"
RANDOM_ERROR = "random@of=direct-only"
OUTLIERS = {"factor": (200.0, 1000.0)}

INJECTED, BLOCKS, NATURAL, HIGH_RATE = "injected-e2m3", "injected-e3m2-blocks", "natural-e3m2", "natural-e2m1-high-rate"


def _scenarios(seeds: tuple[int, ...], steps: int | None) -> tuple[Scenario, ...]:
    recipe = "quantized-gemm"
    injected = Comparison(
        name=INJECTED,
        title="E2M3 products, outlier channels",
        recipe=recipe,
        recipe_settings={"low_format": "e2m3"},
        arms=(
            *("static-low-clean", "static-low", "static-high", PUBLISHED, HIGH_ALPHA, LOW_ALPHA, RANDOM_PUBLISHED),
            *("gnmr", "random", "direct", "direct-only", RANDOM_ERROR, "random-direct", "adapt-style"),
        ),
        faults="outlier-bursts",
        fault_settings=OUTLIERS,
        max_active=MAX_ACTIVE,
        plan=_plan(steps or 120),
        seeds=seeds,
    )
    blocks = Comparison(
        name=BLOCKS,
        title="E3M2 products, whole blocks as units, outlier channels",
        recipe=recipe,
        recipe_settings={"low_format": "e3m2", "unit": "block"},
        arms=("static-low-clean", "static-low", "static-high", "gnmr", "random", "direct", "random-direct"),
        faults="outlier-bursts",
        fault_settings=OUTLIERS,
        max_active=MAX_ACTIVE,
        plan=_plan(steps or 120),
        seeds=seeds,
    )
    natural = Comparison(
        name=NATURAL,
        title="E3M2 products, no faults",
        recipe=recipe,
        recipe_settings={"low_format": "e3m2"},
        arms=("unquantized-clean", "static-low", "static-high", PUBLISHED),
        max_active=MAX_ACTIVE,
        plan=_plan(steps or 80),
        seeds=seeds,
    )
    high_rate = Comparison(
        name=HIGH_RATE,
        title="E2M1 products at a learning rate of 1e-2, no faults",
        recipe=recipe,
        recipe_settings={"low_format": "e2m1"},
        arms=("unquantized-clean", "static-low", "static-high", PUBLISHED, RANDOM_PUBLISHED),
        max_active=MAX_ACTIVE,
        plan=_plan(steps or 200, learning_rate=1e-2),
        seeds=seeds,
    )
    outliers = (
        "Bursts in which channels of one unit's input are 200 to 1000 times larger and its weights for them as much "
        "smaller: in exact arithmetic the model computes the same, but the other channels of a tile underflow, on the "
        "FP8 recovery path too, though less."
    )
    return (
        Scenario(
            comparison=natural,
            regime="natural",
            about="6-bit E3M2 products in tiles of 128, and nothing else.",
            gnmr=PUBLISHED,
        ),
        Scenario(
            comparison=high_rate,
            regime="natural",
            about="4-bit E2M1 products at three times the usual learning rate, and nothing else.",
            gnmr=PUBLISHED,
        ),
        Scenario(comparison=injected, regime="injected", about=outliers, direct="direct"),
        Scenario(
            comparison=blocks,
            regime="injected",
            about="The same on E3M2, with whole blocks as units.",
            direct="direct",
        ),
    )


def _plan(steps: int, learning_rate: float = 3e-3) -> TrainingPlan:
    return TrainingPlan(num_steps=steps, num_validation=512, learning_rate=learning_rate)


def _rows(scenario: str, low: str) -> tuple[Row, ...]:
    arms = (
        ("unquantized-clean", "unquantized"),
        ("static-low-clean", f"static {low}, no faults"),
        ("static-low", f"static {low}"),
        ("static-high", "static FP8"),
        (PUBLISHED, "GNMR, published two-stage (1.5 to 1.1, 1.5)"),
        (RANDOM_PUBLISHED, "random, as many"),
        ("gnmr", "GNMR, robust"),
        ("direct", "GNMR and channel error"),
        ("direct-only", "channel error alone"),
        ("adapt-style", "ADAPT-style: profiled for 40% of the run"),
    )
    return tuple(Row(scenario=scenario, arm=arm, title=title) for arm, title in arms)


_COLUMNS = (
    *("val_nats_per_byte", "val_perplexity", "over_unquantized", "trigger_rate", "recovered_share", "full_share"),
    "repaired",
)

DEEPSEEK = Experiment(
    name="deepseek",
    title="Products on a low grid, DeepSeek-style",
    scenarios=_scenarios,
    layouts=(
        Layout(title="Natural, E3M2: quality and triggers", columns=_COLUMNS, rows=_rows(NATURAL, "E3M2")),
        Layout(
            title="Natural, E2M1 at learning rate 1e-2: quality and triggers",
            columns=_COLUMNS,
            rows=_rows(HIGH_RATE, "E2M1"),
        ),
        Layout(title="Injected, E2M3: quality and triggers", columns=_COLUMNS, rows=_rows(INJECTED, "E2M3")),
        Layout(title="Injected, E3M2 and blocks: quality and triggers", columns=_COLUMNS, rows=_rows(BLOCKS, "E3M2")),
        Layout(
            title="Two-stage thresholds and constant ones",
            columns=("val_nats_per_byte", "trigger_rate", "promotion_ratio", "full_share", "repaired"),
            rows=(
                Row(scenario=INJECTED, arm=PUBLISHED, title="alpha 1.5, then 1.1"),
                Row(scenario=INJECTED, arm=HIGH_ALPHA, title="alpha 1.5"),
                Row(scenario=INJECTED, arm=LOW_ALPHA, title="alpha 1.1"),
            ),
            note="The first stage is 2.5% of the steps, as published; beta 1.5.",
        ),
        Layout(
            title="Matched triggers: as many units in each step, chosen at random",
            columns=("val_nats_per_byte", "repaired", "promotion_ratio", "recovered_share", "full_share"),
            rows=tuple(
                Row(scenario=scenario, arm=arm, title=title)
                for scenario, arm, title in (
                    (HIGH_RATE, PUBLISHED, "GNMR, published"),
                    (HIGH_RATE, RANDOM_PUBLISHED, "random, as many"),
                    (INJECTED, PUBLISHED, "GNMR, published"),
                    (INJECTED, RANDOM_PUBLISHED, "random, as many"),
                    (INJECTED, "gnmr", "GNMR, robust"),
                    (INJECTED, "random", "random, as many"),
                    (INJECTED, "direct", "GNMR and channel error"),
                    (INJECTED, "random-direct", "random, as many"),
                    (INJECTED, "direct-only", "channel error alone"),
                    (INJECTED, RANDOM_ERROR, "random, as many"),
                    (BLOCKS, "gnmr", "GNMR, robust"),
                    (BLOCKS, "random", "random, as many"),
                    (BLOCKS, "direct", "GNMR and channel error"),
                    (BLOCKS, "random-direct", "random, as many"),
                )
            ),
        ),
        Layout(
            title="What a step costs",
            columns=("step_seconds", "time_over_low", "wall_step_seconds"),
            rows=tuple(
                Row(scenario=INJECTED, arm=arm, title=title)
                for arm, title in (
                    ("static-low", "static E2M3"),
                    ("static-high", "static FP8"),
                    (PUBLISHED, "GNMR, published"),
                    ("direct", "GNMR and channel error"),
                )
            ),
            note="Processor and wall time of one thread on a CPU, where every format is emulated: they say nothing of "
            "a device that has it. Every arm runs under a guard, so that what watching costs cancels out of the ratio.",
        ),
    ),
    notes=(
        "The budget is a quarter of the units, as published. The paper's figures for this run are not known to us.",
        "x unquantized: the exponential of the mean loss difference, of a byte.",
    ),
)
"""Section 5.2."""
