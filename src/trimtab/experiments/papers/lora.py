"""LoRA on a frozen INT8 base: a quarter of the layers on the plain base at most (Kong et al. 2026, 5.3)."""

from __future__ import annotations

from trimtab.experiments.arms import TrainingPlan
from trimtab.experiments.compare.comparison import Comparison
from trimtab.experiments.papers.layout import Experiment, Layout, Row, Scenario

__all__ = ["LORA"]

MAX_ACTIVE = 0.25
"""The published budget: 10 of 40 layers."""

PUBLISHED = "gnmr-paper@setting=lora"
RANDOM_DAMPING = "random@of=gnmr-damping"
DAMAGE = {"share": 0.25}
LIMIT = 0.4

NATURAL, LAYERS, PROJECTIONS, BURSTS = "natural-layers", "injected-layers", "injected-projections", "injected-bursts"


def _scenarios(seeds: tuple[int, ...], steps: int | None) -> tuple[Scenario, ...]:
    layers = {"unit": "layer"}
    natural = Comparison(
        name=NATURAL,
        title="LoRA on an INT8 base, layers as units, no faults",
        recipe="int8-base",
        recipe_settings=layers,
        model="lora",
        arms=("unquantized-clean", "static-low", "static-high", PUBLISHED),
        max_active=MAX_ACTIVE,
        plan=_plan(steps or 60, num_layers=8),
        seeds=seeds,
    )
    damaged_layers = Comparison(
        name=LAYERS,
        title="LoRA on an INT8 base, layers as units, permanent outliers",
        recipe="int8-base",
        recipe_settings=layers,
        model="lora",
        arms=("static-low-clean", "static-low", "static-high", PUBLISHED, "direct", "random-direct"),
        faults="permanent-outliers",
        fault_settings=DAMAGE,
        error_limit=LIMIT,
        max_active=MAX_ACTIVE,
        plan=_plan(steps or 60, num_layers=8),
        seeds=seeds,
    )
    damaged_projections = Comparison(
        name=PROJECTIONS,
        title="LoRA on an INT8 base, projections as units, permanent outliers",
        recipe="int8-base",
        model="lora",
        arms=("static-low-clean", "static-low", "static-high", "gnmr", "direct", "random-direct", "adapt-style"),
        faults="permanent-outliers",
        fault_settings=DAMAGE,
        error_limit=LIMIT,
        max_active=MAX_ACTIVE,
        plan=_plan(steps or 120),
        seeds=seeds,
    )
    bursts = Comparison(
        name=BURSTS,
        title="LoRA on an INT8 base, projections as units, bursts of outliers",
        recipe="int8-base",
        model="lora",
        arms=(
            *("static-low-clean", "static-low", "static-high", "gnmr", "random", "gnmr-damping"),
            *(RANDOM_DAMPING, "direct", "direct-only", "random-direct", "adapt-style"),
        ),
        faults="outlier-bursts",
        error_limit=LIMIT,
        max_active=MAX_ACTIVE,
        plan=_plan(steps or 120),
        seeds=seeds,
    )
    damage = (
        "From the first step to the last, channels of the inputs of a quarter of the units are outliers, and the "
        "base's weights for them as much smaller: in exact arithmetic it computes the same, in INT8 it does not. A "
        "norm's own history holds such damage from the first step, so that by construction GNMR cannot see it set in."
    )
    return (
        Scenario(
            comparison=natural,
            regime="natural",
            about="A pre-trained base in INT8 under LoRA, and nothing else.",
            gnmr=PUBLISHED,
        ),
        Scenario(comparison=damaged_layers, regime="injected", about=damage, gnmr=PUBLISHED, direct="direct"),
        Scenario(
            comparison=damaged_projections,
            regime="injected",
            about="The same, with projections as units: damage whose onset is in no history of norms.",
            direct="direct",
        ),
        Scenario(
            comparison=bursts,
            regime="injected",
            about="Bursts of such outliers in one unit's input after a fifth of the run, so that a norm's history "
            "holds healthy steps first.",
            direct="direct",
        ),
    )


def _plan(steps: int, num_layers: int = 4) -> TrainingPlan:
    return TrainingPlan(num_steps=steps, num_validation=512, num_layers=num_layers)


def _rows(scenario: str) -> tuple[Row, ...]:
    arms = (
        ("unquantized-clean", "plain base"),
        ("static-low-clean", "static INT8, no faults"),
        ("static-low", "static INT8"),
        ("static-high", "static plain base, through the recipe"),
        (PUBLISHED, "GNMR, published two-stage (1.5 to 1.1, 1.5)"),
        ("gnmr", "GNMR, robust"),
        ("random", "random, as many"),
        ("gnmr-damping", "GNMR, robust, and damping"),
        (RANDOM_DAMPING, "random, as many, and damping"),
        ("direct", "GNMR and channel error"),
        ("direct-only", "channel error alone"),
        ("random-direct", "random, as many as with the error"),
        ("adapt-style", "ADAPT-style: profiled for 40% of the run"),
    )
    return tuple(Row(scenario=scenario, arm=arm, title=title) for arm, title in arms)


_COLUMNS = (
    *("val_nats_per_byte", "val_perplexity", "trigger_rate", "promotion_ratio", "recovered_share", "full_share"),
    *("repaired", "step_seconds"),
)

LORA = Experiment(
    name="lora",
    title="LoRA on an INT8 base",
    scenarios=_scenarios,
    layouts=(
        Layout(title="Natural, layers as units", columns=_COLUMNS, rows=_rows(NATURAL)),
        Layout(title="Injected, layers as units", columns=_COLUMNS, rows=_rows(LAYERS)),
        Layout(title="Injected, projections as units", columns=_COLUMNS, rows=_rows(PROJECTIONS)),
        Layout(title="Injected, bursts, projections as units", columns=_COLUMNS, rows=_rows(BURSTS)),
    ),
    notes=(
        "A quarter of the units at most, which is 2 of 8 layers or 7 of 28 projections here and 10 of 40 layers in the "
        "paper. The base is pre-trained on the earlier half of the text for as many steps as LoRA is then trained on "
        "the later half. The paper's figures for this run are not known to us. Step times are processor time of one "
        "thread on a CPU that emulates INT8.",
    ),
)
"""Section 5.3."""
