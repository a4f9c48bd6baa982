"""What ``trimtab plan`` can be told. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from trimtab.control import PRESETS
from trimtab.errors import ConfigError, nearest_names
from trimtab.experiments.presets import RUN_PRESETS, RunPreset
from trimtab.experiments.recipes import (
    ADAPTER_RECIPES,
    RECIPE_SETTINGS,
    RECIPES,
    UNITS,
    check_read,
    check_recipe_name,
)

__all__ = ["DTYPES", "PlanSettings"]

DTYPES = ("bfloat16", "float16", "float32")
"""What a model may be trained in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    """Say what a run would take, before anything is trained or allocated: units, parameters, bytes, FLOPs, record.

    Only the config is read; weights are never made. What is left out is the preset's.

    Example: trimtab plan llama2-13b-lora
    """

    model: Annotated[str, tyro.conf.Positional]
    """A preset: llama-60m, llama-130m, llama-350m, llama-1.3b, llama-3b, llama2-13b-lora or moe-3.7b; or a config.json,
    or a folder with one."""
    recipe: str | None = None
    """A recipe of trimtab train; the preset's, or else "saved-activations", when left out."""
    low_bits: int = 4
    """saved-activations: bits of the low-cost path, 2, 4, 8 or 16."""
    high_bits: int = 8
    """saved-activations: bits of the recovery path."""
    rounding: str = "nearest"
    """saved-activations: "nearest" or "stochastic"."""
    low_format: str = "e3m2"
    """quantized-gemm: grid of the low-cost path."""
    high_format: str = "fp8"
    """quantized-gemm: the recovery path."""
    unit: str | None = None
    """What is switched as one: "projection", "half", "block" or "layer"; the preset's or the recipe's when left out."""
    lora_rank: int | None = None
    """Rank of LoRA adapters on every projection; 0 trains the whole model."""
    policy: str | None = None
    """Policy preset, as of trimtab train; the preset's, or else robust, when left out."""
    max_active: int | float | None = None
    """Budget: a count of units, or a share of them such as 0.2. The policy's own when left out."""
    batch: int | None = None
    """Sequences that a device holds at once; the preset's, or else 8, when left out."""
    sequence: int | None = None
    """Tokens of a sequence; the preset's, or else 128, when left out."""
    accumulation: int | None = None
    """Micro-batches an optimizer step; the preset's on one device, or else 1, when left out."""
    dtype: str = "bfloat16"
    """What the model is trained in: bfloat16, float16 or float32."""
    json: bool = False
    """Print JSON for machines."""

    def __post_init__(self) -> None:
        if self.preset is None and not Path(self.model).exists():
            near = nearest_names(self.model, RUN_PRESETS)
            raise ConfigError(
                "model",
                self.model,
                f"it is a config.json, a folder with one, or one of {', '.join(map(repr, RUN_PRESETS))}.",
                f"Did you mean {near[0]!r}?" if near else "Use one of them.",
            )
        for setting in ("batch", "sequence", "accumulation"):
            value = getattr(self, setting)
            if value is not None and value < 1:
                raise ConfigError(setting, value, "it is at least 1.", "Set it to 1 or more.")
        check_recipe_name(self.recipe_name)
        _one_of("rounding", self.rounding, ("nearest", "stochastic"))
        _one_of("low_format", self.low_format, ("e3m2", "e2m3", "e2m1"))
        _one_of("high_format", self.high_format, ("fp8", "bf16"))
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("policy", self.policy_name, tuple(PRESETS))
        if self.unit is not None:
            _one_of("unit", self.unit, UNITS)
        check_read(self.recipe_name, self.recipe_settings)
        self._check_adapters()

    def _check_adapters(self) -> None:
        needs = RECIPES[self.recipe_name]
        if self.adapter_rank < 0:
            raise ConfigError("lora_rank", self.adapter_rank, "it is at least 0.", "Set it to 0 or more.")
        if needs.needs_adapters and self.adapter_rank == 0:
            raise ConfigError(
                "lora_rank",
                0,
                f"the recipe {self.recipe_name!r} freezes the model, and without adapters nothing would be trained.",
                "Leave it out, or set it to 1 or more.",
            )
        if self.adapter_rank and not needs.takes_adapters:
            raise ConfigError(
                "lora_rank",
                self.adapter_rank,
                f"the recipe {self.recipe_name!r} needs projections that are trained, and adapters freeze them.",
                f"Set it to 0, or choose {' or '.join(map(repr, ADAPTER_RECIPES))}.",
            )

    @property
    def preset(self) -> RunPreset | None:
        """The preset that is named, if one is; a file or folder of its name is reached as ./NAME."""
        return RUN_PRESETS.get(self.model)

    @property
    def recipe_name(self) -> str:
        """The recipe."""
        if self.recipe is not None:
            return self.recipe
        return "saved-activations" if self.preset is None else self.preset.recipe

    @property
    def recipe_settings(self) -> dict[str, Any]:
        """The settings of ``make_recipe``."""
        given = {setting: getattr(self, setting) for setting in RECIPE_SETTINGS}
        if self.preset is not None and self.preset.recipe == self.recipe_name:
            own = {k: v for k, v in self.preset.recipe_settings.items() if given[k] == RECIPE_SETTINGS[k]}
            given |= own
        return given

    @property
    def policy_name(self) -> str:
        """The policy preset."""
        if self.policy is not None:
            return self.policy
        return "robust" if self.preset is None else self.preset.policy

    @property
    def adapter_rank(self) -> int:
        """Rank of the adapters; 0 = none."""
        if self.lora_rank is not None:
            return self.lora_rank
        if self.preset is not None and self.preset.recipe == self.recipe_name:
            return self.preset.lora_rank
        return 8 if RECIPES[self.recipe_name].needs_adapters else 0

    @property
    def adapter_alpha(self) -> int:
        """Numerator of the adapters' scale; no figure depends on it."""
        return 16 if self.preset is None else self.preset.lora_alpha

    @property
    def num_sequences(self) -> int:
        """Sequences that a device holds at once."""
        if self.batch is not None:
            return self.batch
        return 8 if self.preset is None else self.preset.batch

    @property
    def num_tokens(self) -> int:
        """Tokens of a sequence."""
        if self.sequence is not None:
            return self.sequence
        return 128 if self.preset is None else self.preset.sequence

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches an optimizer step on one device."""
        if self.accumulation is not None:
            return self.accumulation
        # Another batch than the preset's leaves the step's sequences what they are, where that comes out even.
        return 1 if self.preset is None else max(1, self.preset.total_batch // self.num_sequences)


def _one_of(setting: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        near = nearest_names(value, allowed)
        remedy = f"Did you mean {near[0]!r}?" if near else "Use one of them."
        raise ConfigError(setting, value, f"it is one of {', '.join(map(repr, allowed))}.", remedy)
