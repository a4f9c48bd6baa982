"""The recipes by the names that the command line uses: what each needs and reads, and one factory. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from trimtab.errors import ConfigError, nearest_names
from trimtab.experiments.packages import Package

if TYPE_CHECKING:
    from trimtab.precision.recipe import Recipe

__all__ = [
    "ADAPTER_RECIPES",
    "RECIPES",
    "RECIPE_SETTINGS",
    "UNITS",
    "RecipeNeeds",
    "check_read",
    "check_recipe_name",
    "make_recipe",
]

UNITS = ("projection", "half", "block", "layer")
"""How much may be one unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeNeeds:
    """What a recipe needs of a run, and what an experiment must know of it.

    The layers of a recipe with ``needs_adapters`` are frozen, and LoRA is what is trained.
    """

    low: str
    """What the low-cost path is called in a table."""
    high: str
    """What the recovery path is called in a table."""
    reads: tuple[str, ...] = ()
    """Settings that it reads, by their names on the command line."""
    needs_adapters: bool = False
    """Whether it converts a frozen base, so that adapters have to be what is trained."""
    takes_adapters: bool = True
    """Whether it can convert a frozen base."""
    token_multiple: int = 1
    """The tokens of a micro-batch are a multiple of this."""
    changes_output: bool = True
    """Whether a layer's output differs between the paths; where it does not, only what is kept for backward does."""
    package: Package | None = None
    """The package whose layers it uses, if any."""
    demo_steps: int = 250
    """Steps of each arm of the demo, so that it takes about two minutes on two cores."""

    def packages(self, *, has_adapters: bool) -> tuple[Package, ...]:
        """What a run with it needs to be installed, beside what every run needs."""
        own = () if self.package is None else (self.package,)
        return ((("peft", "lora"),) if has_adapters else ()) + own


_TORCHAO, _BITSANDBYTES = ("torchao", "torchao"), ("bitsandbytes", "bnb")

RECIPES: Mapping[str, RecipeNeeds] = {
    "saved-activations": RecipeNeeds(
        low="4-bit copies",
        high="8-bit copies",
        reads=("low_bits", "high_bits", "rounding", "unit"),
        takes_adapters=False,
        changes_output=False,
    ),
    "quantized-gemm": RecipeNeeds(low="E3M2", high="FP8", reads=("low_format", "high_format", "unit")),
    "int8-base": RecipeNeeds(low="INT8 base", high="plain base", reads=("unit",), needs_adapters=True),
    "torchao-float8": RecipeNeeds(low="float8", high="plain layers", reads=("unit",), package=_TORCHAO, demo_steps=200),
    "torchao-mxfp8": RecipeNeeds(
        low="MXFP8", high="plain layers", reads=("unit",), token_multiple=32, package=_TORCHAO, demo_steps=120
    ),
    "torchao-int8": RecipeNeeds(
        low="INT8 base", high="plain base", reads=("unit",), needs_adapters=True, package=_TORCHAO
    ),
    "bnb-8bit": RecipeNeeds(
        low="LLM.int8 base", high="plain base", reads=("unit",), needs_adapters=True, package=_BITSANDBYTES
    ),
    "bnb-4bit": RecipeNeeds(
        low="NF4 base", high="plain base", reads=("unit",), needs_adapters=True, package=_BITSANDBYTES
    ),
    "none": RecipeNeeds(low="", high=""),
}
"""Every recipe; "none" only watches."""

ADAPTER_RECIPES = tuple(name for name, needs in RECIPES.items() if needs.needs_adapters)
"""Those whose base is frozen."""


def make_recipe(
    name: str,
    *,
    low_bits: int = 4,
    high_bits: int = 8,
    rounding: Literal["nearest", "stochastic"] | str = "nearest",
    low_format: str = "e3m2",
    high_format: str = "fp8",
    unit: str | None = None,
) -> Recipe | None:
    """The recipe of that name; only the package that it belongs to is imported.

    Args:
        name: One of ``RECIPES``.
        low_bits: Of saved activations, bits of a copy on the low-cost path.
        high_bits: Of saved activations, bits of a copy on the recovery path.
        rounding: Of saved activations, "nearest" or "stochastic".
        low_format: Of the quantized GEMM, "e3m2", "e2m3" or "e2m1".
        high_format: Of the quantized GEMM, "fp8" or "bf16".
        unit: How much is switched as one; the recipe's own default when left out.

    Returns: The recipe, or None for "none".

    Raises:
        ConfigError: when there is no such recipe, a setting is none that it allows, or it does not read a setting that
            differs from the default.
        MissingExtraError: when the recipe's package is not installed.

    Example:
        >>> make_recipe("saved-activations", low_bits=2).low_bits
        2
    """
    check_recipe_name(name)
    given = {"low_bits": low_bits, "high_bits": high_bits, "rounding": rounding}
    check_read(name, given | {"low_format": low_format, "high_format": high_format, "unit": unit})
    # Its own default may be another one for each recipe.
    grouping: dict[str, Any] = {} if unit is None else {"unit": unit}
    if name == "saved-activations":
        from trimtab.precision.saved_activations import SavedActivations

        return SavedActivations(low_bits, high_bits, rounding=rounding, **grouping)  # type: ignore[arg-type]
    if name == "quantized-gemm":
        from trimtab.precision.quantized_gemm import QuantizedGemm

        return QuantizedGemm(low_format, high_format, **grouping)  # type: ignore[arg-type]
    if name == "int8-base":
        from trimtab.precision.int8_base import Int8Base

        return Int8Base(**grouping)
    if name == "torchao-float8":
        from trimtab.precision.torchao_float8 import TorchaoFloat8

        return TorchaoFloat8(**grouping)
    if name == "torchao-mxfp8":
        from trimtab.precision.torchao_mxfp8 import TorchaoMXFP8

        return TorchaoMXFP8(**grouping)
    if name == "torchao-int8":
        from trimtab.precision.torchao_int8 import TorchaoInt8Base

        return TorchaoInt8Base(**grouping)
    if name in ("bnb-8bit", "bnb-4bit"):
        from trimtab.precision.bitsandbytes_linear import BitsandbytesLinear

        return BitsandbytesLinear(bits=8 if name == "bnb-8bit" else 4, **grouping)
    return None


def check_recipe_name(name: str) -> None:
    """Raises: ConfigError: when there is no recipe of that name."""
    if name not in RECIPES:
        near = nearest_names(name, RECIPES)
        remedy = f"Did you mean {near[0]!r}?" if near else "Use one of them."
        raise ConfigError("recipe", name, f"it is one of {', '.join(map(repr, RECIPES))}.", remedy)


def check_read(name: str, given: Mapping[str, Any]) -> None:
    """See that the recipe reads every setting of ``make_recipe`` that was given another value than its default.

    Raises: ConfigError: when it does not read one: a setting is never ignored.
    """
    for setting, value in given.items():
        if value != RECIPE_SETTINGS[setting] and setting not in RECIPES[name].reads:
            readers = [other for other, needs in RECIPES.items() if setting in needs.reads]
            raise ConfigError(
                setting,
                value,
                f"the recipe {name!r} does not read it.",
                f"Leave it out, or choose {' or '.join(map(repr, readers))}.",
            )


RECIPE_SETTINGS: Mapping[str, Any] = dict(make_recipe.__kwdefaults__ or {})
"""Every setting that some recipe reads, and what it is when it is left out."""
