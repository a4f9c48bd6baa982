"""Saved activations in few bits: policies, thresholds, budgets and matched random recovery (Kong et al. 2026, 5.1)."""

from __future__ import annotations

from trimtab.experiments.arms import TrainingPlan
from trimtab.experiments.compare.comparison import Comparison
from trimtab.experiments.papers.layout import Experiment, Layout, Row, Scenario
from trimtab.experiments.papers.published import (
    GNMR_4BIT,
    PUBLISHED_COLUMNS,
    PUBLISHED_NOTE,
    STATIC_4BIT,
    STATIC_8BIT,
    UNQUANTIZED,
)

__all__ = ["ACTIVATIONS"]

MAX_ACTIVE = 4
"""The published budget, of 28 projections here."""

# The published thresholds (1.5, 1.3), (2, 1.5) and (3, 2), and the two-stage ones that were published for another run.
LOWEST, MIDDLE, HIGHEST = "gnmr-paper", "gnmr-paper@setting=activations-2.0", "gnmr-paper@setting=activations-3.0"
TWO_STAGE = "gnmr-paper@setting=deepseek"
RANDOM_LOWEST = "random@of=gnmr-paper"
# 4 bits have no absolute limit of the channel error; it is compared with its own mean.
DIRECT = "direct@error_history=ema,error_limit=1.5"
RANDOM_DIRECT = "random-direct@error_history=ema,error_limit=1.5"
RANDOM_DAMPING = "random@of=gnmr-damping"
BUDGETS = ("gnmr@max_active=2", "gnmr", "gnmr@max_active=6", "gnmr@max_active=8")

NATURAL, NATURAL_2BIT, INJECTED = "natural-4bit", "natural-2bit", "injected-4bit"


def _scenarios(seeds: tuple[int, ...], steps: int | None) -> tuple[Scenario, ...]:
    recipe = "saved-activations"
    published = (LOWEST, MIDDLE, HIGHEST)
    natural = Comparison(
        name=NATURAL,
        title="4-bit saved activations, no faults",
        recipe=recipe,
        arms=("unquantized-clean", "static-low", "static-high", *published, RANDOM_LOWEST),
        max_active=MAX_ACTIVE,
        plan=_plan(steps or 150),
        seeds=seeds,
    )
    two_bits = Comparison(
        name=NATURAL_2BIT,
        title="2-bit saved activations, no faults",
        recipe=recipe,
        recipe_settings={"low_bits": 2},
        arms=("unquantized-clean", "static-low", "static-high", "gnmr-paper", "gnmr", "random"),
        max_active=MAX_ACTIVE,
        plan=_plan(steps or 150),
        seeds=seeds,
    )
    injected = Comparison(
        name=INJECTED,
        title="4-bit saved activations, corrupted copies",
        recipe=recipe,
        arms=(
            *("unquantized-clean", "static-low-clean", "static-low", "static-high"),
            *(*published, TWO_STAGE, RANDOM_LOWEST, *BUDGETS, "random"),
            *(DIRECT, RANDOM_DIRECT, "adapt-style", "damping-only", "gnmr-damping", RANDOM_DAMPING),
        ),
        faults="stored-copy-bursts",
        max_active=MAX_ACTIVE,
        plan=_plan(steps or 180),
        seeds=seeds,
    )
    return (
        Scenario(
            comparison=natural,
            regime="natural",
            about="4-bit copies of the projections' inputs, kept for the weight gradient, and nothing else.",
            gnmr="gnmr-paper",
        ),
        Scenario(comparison=two_bits, regime="natural", about="The same copies in 2 bits."),
        Scenario(
            comparison=injected,
            regime="injected",
            about="Bursts of 10 to 25 steps in which 16 channels of one projection's 4-bit copy are 50 to 1000 times "
            "too large: its gradient grows.",
            direct=DIRECT,
        ),
    )


def _plan(steps: int) -> TrainingPlan:
    return TrainingPlan(num_steps=steps, num_validation=512)


def _quality(scenario: str, clean: bool, bits: int = 4) -> tuple[Row, ...]:
    rows = [Row(scenario=scenario, arm="unquantized-clean", title="unquantized")]
    if clean:
        rows.append(Row(scenario=scenario, arm="static-low-clean", title=f"static {bits}-bit, no faults"))
    rows += [
        Row(scenario=scenario, arm="static-low", title=f"static {bits}-bit"),
        Row(scenario=scenario, arm="static-high", title="static 8-bit"),
    ]
    for arm, thresholds in ((LOWEST, "1.5, 1.3"), (MIDDLE, "2, 1.5"), (HIGHEST, "3, 2")):
        rows.append(Row(scenario=scenario, arm=arm, title=f"GNMR, published ({thresholds})"))
    rows += [
        Row(scenario=scenario, arm=TWO_STAGE, title="GNMR, two-stage (1.5 to 1.1, 1.5)"),
        Row(scenario=scenario, arm="gnmr", title="GNMR, robust"),
        Row(scenario=scenario, arm="gnmr-damping", title="GNMR, robust, and damping"),
        Row(scenario=scenario, arm=RANDOM_DAMPING, title="random, as many, and damping"),
        Row(scenario=scenario, arm="damping-only", title="damping alone: nothing is recovered"),
        Row(scenario=scenario, arm=DIRECT, title="GNMR and channel error"),
        Row(scenario=scenario, arm="adapt-style", title="ADAPT-style: profiled for 40% of the run"),
    ]
    return tuple(rows)


_COLUMNS = (
    *("val_nats_per_byte", "val_perplexity", "over_unquantized", "trigger_rate", "recovered_share", "repaired"),
)
_OVER = "x unquantized: the exponential of the mean loss difference, of a byte."

ACTIVATIONS = Experiment(
    name="activations",
    title="Saved activations in few bits",
    scenarios=_scenarios,
    layouts=(
        Layout(
            title="Natural, 4 bits: quality and triggers",
            columns=_COLUMNS,
            rows=_quality(NATURAL, clean=False),
            note=_OVER,
        ),
        Layout(
            title="What the paper reports, which is not to be set beside ours",
            columns=PUBLISHED_COLUMNS,
            rows=(
                Row(scenario=NATURAL, arm="unquantized-clean", title="unquantized", published=UNQUANTIZED),
                Row(scenario=NATURAL, arm="static-low", title="static 4-bit", published=STATIC_4BIT),
                Row(scenario=NATURAL, arm="static-high", title="static 8-bit", published=STATIC_8BIT),
                Row(scenario=NATURAL, arm=LOWEST, title="GNMR, any of its three settings", published=GNMR_4BIT),
            ),
            note=PUBLISHED_NOTE,
        ),
        Layout(
            title="Injected, 4 bits: quality and triggers",
            columns=_COLUMNS,
            rows=_quality(INJECTED, clean=True),
            note=f"Faults fall on every row but the first two. {_OVER}",
        ),
        Layout(
            title="Natural, 2 bits: quality and triggers",
            columns=_COLUMNS,
            rows=_quality(NATURAL_2BIT, clean=False, bits=2),
            note=_OVER,
        ),
        Layout(
            title="Budget: max_active of 28 projections",
            columns=("val_nats_per_byte", "repaired", "recovered_share", "full_share", "switches"),
            rows=tuple(
                Row(scenario=INJECTED, arm=arm, title=str(count))
                for arm, count in zip(BUDGETS, (2, 4, 6, 8), strict=True)
            ),
            note="GNMR with the robust settings.",
        ),
        Layout(
            title="Matched triggers: as many units in each step, chosen at random",
            columns=("val_nats_per_byte", "repaired", "promotion_ratio", "recovered_share", "full_share"),
            rows=(
                Row(scenario=NATURAL, arm=LOWEST, title="GNMR, published (1.5, 1.3)"),
                Row(scenario=NATURAL, arm=RANDOM_LOWEST, title="random, as many"),
                Row(scenario=NATURAL_2BIT, arm="gnmr", title="GNMR, robust"),
                Row(scenario=NATURAL_2BIT, arm="random", title="random, as many"),
                Row(scenario=INJECTED, arm=LOWEST, title="GNMR, published (1.5, 1.3)"),
                Row(scenario=INJECTED, arm=RANDOM_LOWEST, title="random, as many"),
                Row(scenario=INJECTED, arm="gnmr", title="GNMR, robust"),
                Row(scenario=INJECTED, arm="random", title="random, as many"),
                Row(scenario=INJECTED, arm="gnmr-damping", title="GNMR, robust, and damping"),
                Row(scenario=INJECTED, arm=RANDOM_DAMPING, title="random, as many, and damping"),
                Row(scenario=INJECTED, arm=DIRECT, title="GNMR and channel error"),
                Row(scenario=INJECTED, arm=RANDOM_DIRECT, title="random, as many"),
            ),
            note="promotions: entries into the recovery path a unit-step.",
        ),
        Layout(
            title="What a step costs",
            columns=("step_seconds", "time_over_low", "wall_step_seconds", "projection_saved_bytes"),
            rows=tuple(
                Row(scenario=INJECTED, arm=arm, title=title)
                for arm, title in (
                    ("unquantized-clean", "unquantized"),
                    ("static-low", "static 4-bit"),
                    ("static-high", "static 8-bit"),
                    (LOWEST, "GNMR, published (1.5, 1.3)"),
                    ("gnmr", "GNMR, robust"),
                    (DIRECT, "GNMR and channel error"),
                )
            ),
            note="Median processor and wall time of a step of one thread, and bytes that the projections keep for "
            "backward, measured. Other processes on the machine are in the wall times. Every arm runs under a guard, "
            "the unquantized one too: what watching costs cancels out of the ratio.",
        ),
    ),
    notes=(
        "The budget of every arm is 4 of 28 projections, as published, where the row does not say otherwise. The short "
        "window of the paper's pre-training runs is not published; ours is 10.",
    ),
)
"""Section 5.1."""
