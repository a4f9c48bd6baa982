"""What is compared, checked once: recipe, arms, model, faults, budget, schedule and seeds. No torch here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from trimtab.control.policy import budget_setting, is_real
from trimtab.errors import ConfigError, nearest_names
from trimtab.experiments.compare.arms import ArmName, Given, read_arm
from trimtab.experiments.recipes import ADAPTER_RECIPES, RECIPE_SETTINGS, RECIPES, check_read, check_recipe_name

if TYPE_CHECKING:
    from trimtab.experiments.arms import TrainingPlan

__all__ = ["FAULT_KINDS", "MODELS", "Comparison", "check_arms", "measured_error_limit", "usual_faults"]

MODELS: Mapping[str, str] = MappingProxyType(
    {"llama": "a small LLaMA", "mixtral": "a small Mixtral", "lora": "LoRA on a small LLaMA that is pre-trained first"}
)
"""The models by name, and what they are called in a sentence."""

FAULT_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "none": "no faults",
        "stored-copy-bursts": "for a while, channels of one unit's low-width copy are many times too large",
        "outlier-bursts": "for a while, the quantizers of one unit see outlier channels in its input",
        "permanent-outliers": "throughout, the quantizers of some units see outlier channels in their inputs",
    }
)
"""The faults by name, and what each is."""

_FAULTY_RECIPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "stored-copy-bursts": ("saved-activations",),
        "outlier-bursts": ("quantized-gemm", "int8-base"),
        "permanent-outliers": ("quantized-gemm", "int8-base"),
    }
)
"""Which recipes can suffer them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What is compared; JSON-able. Its identity decides whether a finished part may be reused.

    Raises:
        ConfigError: when a setting cannot be meant, or two do not go together.

    Example:
        >>> from trimtab.experiments.arms import TrainingPlan
        >>> comparison = Comparison(
        ...     name="small", title="A small one", recipe="saved-activations", arms=("static-low", "gnmr", "random"),
        ...     plan=TrainingPlan(num_steps=20), seeds=(0, 1),
        ... )
        >>> [comparison.arm(text).reference for text in comparison.arms]
        [None, None, 'gnmr']
    """

    name: str
    """A word; also the folder below that of the results."""
    title: str
    """What it is called in a sentence."""
    recipe: str
    """A name of ``RECIPES``."""
    recipe_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of ``make_recipe``."""
    arms: tuple[str, ...]
    """Names of ``ARM_NAMES``, each optionally ``name@key=value,key=value`` with settings of its policy."""
    model: str = "llama"
    """A name of ``MODELS``."""
    faults: str = "none"
    """A name of ``FAULT_KINDS``."""
    fault_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the faults; see ``trimtab.experiments.compare.faults``."""
    error_limit: float | None = None
    """Limit of the channel error in the arms that go by it; the recipe's measured one when left out."""
    max_active: int | float = 0.2
    """The one budget of all arms: a count of units, or a share of those that the recipe can switch."""
    plan: TrainingPlan
    """Model, optimizer and schedule; its seed is replaced by each of ``seeds``."""
    seeds: tuple[int, ...]
    """Seeds of the weights, the data order, the faults and random choices."""
    gaps_every: int = 0
    """Measure the recovery gaps before every so many steps, and tell what each arm captured of them; 0 never."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.-]*", self.name):
            raise ConfigError("name", self.name, "it is a word, and names a folder.", "Use letters, digits and dashes.")
        object.__setattr__(self, "recipe_settings", dict(self.recipe_settings))
        object.__setattr__(self, "fault_settings", dict(self.fault_settings))
        object.__setattr__(self, "arms", tuple(self.arms))
        object.__setattr__(self, "seeds", tuple(self.seeds))
        object.__setattr__(self, "max_active", budget_setting(self.max_active))
        _check_recipe(self.recipe, self.recipe_settings, self.model)
        _check_faults(self.faults, self.fault_settings, self.recipe, self.recipe_settings)
        if self.error_limit is not None and not (is_real(self.error_limit) and self.error_limit > 0):
            raise ConfigError("error_limit", self.error_limit, "it is a number above 0.", "Set 0.3 for instance.")
        if isinstance(self.gaps_every, bool) or not isinstance(self.gaps_every, int) or self.gaps_every < 0:
            raise ConfigError("gaps_every", self.gaps_every, "it is a number of steps, or 0.", "Set it to 0 or more.")
        for seed in self.seeds:
            if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
                raise ConfigError("seeds", seed, "NumPy takes seeds from 0 to 4294967295.", "Choose one of these.")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError("seeds", list(self.seeds), "each seed is trained once, at least one.", "Name each once.")
        multiple = RECIPES[self.recipe].token_multiple
        if self.plan.batch * self.plan.sequence % multiple:
            tokens = f"{self.plan.batch} sequences of {self.plan.sequence}"
            allowed = f"the recipe {self.recipe!r} takes tokens in multiples of {multiple}, which {tokens} are not."
            raise ConfigError("plan.sequence", self.plan.sequence, allowed, f"Set it to {multiple}, say.")
        check_arms(self.arms, self.gaps_every)
        # Imported here, as it is by modules that torch is not needed for.
        from trimtab.experiments.compare.faults import plan_faults

        plan_faults(self, ("unit",), self.seeds[0])
        for text in self.arms:
            # So that what a policy cannot mean is said before anything is trained.
            self.policy(self.arm(text), self.seeds[0], units=("unit",), counts=(0,))

    def arm(self, text: str) -> ArmName:
        """One of the arms, read."""
        return read_arm(text)

    @property
    def limit(self) -> float | None:
        """The limit of the channel error in force; None where there is none."""
        if self.error_limit is not None:
            return float(self.error_limit)
        return measured_error_limit(self.recipe, self.recipe_settings)

    def plan_of(self, seed: int) -> TrainingPlan:
        """The plan with that seed."""
        return replace(self.plan, seed=seed)

    def policy(self, arm: ArmName, seed: int, *, units: tuple[str, ...], counts: tuple[int, ...] = ()) -> Any:
        """The policy of an arm.

        Args:
            arm: Which.
            seed: Of the run.
            units: Names of the units that the recipe can switch.
            counts: Active units after each step of the arm that it matches, if it matches one.
        """
        reference = arm.reference
        given = Given(
            plan=self.plan_of(seed), max_active=self.max_active, error_limit=self.limit, units=units, counts=counts
        )
        if reference is not None:
            given = replace(given, reference=read_arm(reference).policy(given))
        return arm.policy(given)

    def identity(self) -> dict[str, Any]:
        """All that the figures of a part depend on but its arm, its seed and the text; JSON-able."""
        values = asdict(self)
        for free in ("name", "title", "arms", "seeds"):
            del values[free]
        del values["plan"]["seed"]
        return json.loads(json.dumps(values))


def check_arms(arms: tuple[str, ...], gaps_every: int) -> None:
    """See that the arms exist and go together.

    Args:
        arms: As written.
        gaps_every: Steps between two measurements of the gaps; 0 = none.

    Raises: ConfigError: when they do not.
    """
    if not arms or len(set(arms)) < len(arms):
        raise ConfigError("arms", list(arms), "each arm is trained once, at least one.", "Name each once.")
    for text in arms:
        arm = read_arm(text)
        if arm.reference is not None and arm.reference not in arms:
            allowed = f"it has as many units on the recovery path as {arm.reference!r} had, which is no arm here."
            raise ConfigError("arm", text, allowed, f"Add {arm.reference!r}.")
        if arm.kind.route == "oracle" and not gaps_every:
            allowed = "the oracle goes by recovery gaps, and they are not measured."
            raise ConfigError("arm", text, allowed, "Set gaps_every to 10, say, or leave the arm out.")


def measured_error_limit(recipe: str, settings: Mapping[str, Any]) -> float | None:
    """The channel error that tells a fault from a healthy unit in the recipe's low-cost format; None where none does.

    Source: our measurements, see ``Policy.error_limit``: 0.3 for floats of 6 and 8 bits in tiles of 128, 0.4 for INT8;
    no limit does for 4 bits and fewer.

    Example:
        >>> measured_error_limit("quantized-gemm", {"low_format": "e2m3"})
        0.3
        >>> measured_error_limit("saved-activations", {}) is None
        True
    """
    if recipe == "quantized-gemm" and settings.get("low_format", RECIPE_SETTINGS["low_format"]) in ("e3m2", "e2m3"):
        return 0.3
    if recipe == "int8-base" or (recipe == "saved-activations" and settings.get("low_bits") == 8):
        return 0.4
    return None


def usual_faults(recipe: str) -> str:
    """The faults that fall on what the recipe quantizes; "none" where there are none for it.

    Example:
        >>> usual_faults("saved-activations"), usual_faults("int8-base"), usual_faults("bnb-4bit")
        ('stored-copy-bursts', 'outlier-bursts', 'none')
    """
    return next((kind for kind, recipes in _FAULTY_RECIPES.items() if recipe in recipes), "none")


def _check_recipe(recipe: str, settings: Mapping[str, Any], model: str) -> None:
    check_recipe_name(recipe)
    if recipe == "none":
        raise ConfigError("recipe", recipe, "without a recipe there are no paths to compare.", "Choose another.")
    for name, value in settings.items():
        if name not in RECIPE_SETTINGS:
            near = nearest_names(str(name), RECIPE_SETTINGS)
            remedy = f"Did you mean {near[0]!r}?" if near else f"They are {', '.join(RECIPE_SETTINGS)}."
            raise ConfigError(str(name), value, "no recipe has such a setting.", remedy)
    check_read(recipe, settings)
    if model not in MODELS:
        near = nearest_names(model, MODELS)
        remedy = f"Did you mean {near[0]!r}?" if near else "Use one of them."
        raise ConfigError("model", model, f"it is one of {', '.join(map(repr, MODELS))}.", remedy)
    if RECIPES[recipe].needs_adapters and model != "lora":
        allowed = f"the recipe {recipe!r} freezes the model, and only 'lora' has something else to train."
        raise ConfigError("model", model, allowed, "Set it to 'lora'.")
    if model == "lora" and not RECIPES[recipe].takes_adapters:
        allowed = f"the recipe {recipe!r} needs projections that are trained, and adapters freeze them."
        raise ConfigError("model", model, allowed, f"Choose the recipe {' or '.join(map(repr, ADAPTER_RECIPES))}.")


def _check_faults(faults: str, settings: Mapping[str, Any], recipe: str, recipe_settings: Mapping[str, Any]) -> None:
    if faults not in FAULT_KINDS:
        near = nearest_names(faults, FAULT_KINDS)
        remedy = f"Did you mean {near[0]!r}?" if near else "Use one of them."
        raise ConfigError("faults", faults, f"it is one of {', '.join(map(repr, FAULT_KINDS))}.", remedy)
    if faults in _FAULTY_RECIPES and recipe not in _FAULTY_RECIPES[faults]:
        allowed = f"they fall on what {' and '.join(map(repr, _FAULTY_RECIPES[faults]))} quantize, and not {recipe!r}."
        raise ConfigError("faults", faults, allowed, f"Choose {usual_faults(recipe)!r}.")
    if faults == "stored-copy-bursts" and recipe_settings.get("low_bits") == 16:
        allowed = "an unquantized input is no copy that could be corrupted."
        raise ConfigError("low_bits", 16, allowed, "Set it to 2, 4 or 8, or faults to 'none'.")
    if faults == "none" and settings:
        raise ConfigError(
            "fault_settings", dict(settings), "there are no faults to set.", "Choose some, or leave it out."
        )
