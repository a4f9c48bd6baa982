"""The text and the model of a part; a base that adapters are put on is pre-trained once a seed, and kept."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trimtab.experiments.arms import TrainingPlan, build_model, train_arm
from trimtab.experiments.faults.models import WatchedPlan, make_model
from trimtab.experiments.text import Corpus, halves, load_corpus, read_files, read_speeches
from trimtab.precision import find_units
from trimtab.precision.recipe import why_unobserved

__all__ = ["earlier_and_later", "model_maker", "pretrain_base", "switchable_units"]


@cache
def earlier_and_later(data: tuple[Path, ...], sequence: int) -> tuple[Corpus, Corpus]:
    """The earlier and the later half of the text, as bytes; read once a process.

    Args:
        data: Text files; the built-in speeches where there are none.
        sequence: Tokens of a sequence.

    Raises:
        ConfigError: when the text is missing or too short.
        MissingExtraError: when the built-in text is not installed.
    """
    documents = read_files(list(data)) if data else read_speeches()
    earlier, later = (load_corpus(half, sequence=sequence) for half in halves(documents))
    return earlier, later


def model_maker(kind: str, plan: TrainingPlan, corpus: Corpus, base: Path) -> Callable[[], nn.Module]:
    """What makes the model of a part, the same each time.

    Args:
        kind: A name of ``MODELS``.
        plan: Its sizes and its seed.
        corpus: The text.
        base: The weights of the base, for "lora".
    """
    if kind == "llama":
        return lambda: build_model(plan, corpus.vocab_size)
    if kind == "mixtral":
        return lambda: make_model("moe", _sizes(plan), corpus.vocab_size, plan.seed)

    from trimtab.experiments.lora import add_lora

    model = build_model(plan, corpus.vocab_size)
    model.load_state_dict(torch.load(base, weights_only=True))
    return lambda: add_lora(copy.deepcopy(model), seed=plan.seed)


def pretrain_base(plan: TrainingPlan, corpus: Corpus, path: Path) -> float:
    """Train the plan's LLaMA for the plan's steps, nothing quantized, and write its weights, whole or not at all.

    Args:
        plan: Model and schedule.
        corpus: The text.
        path: Where to.

    Returns: Its validation loss, in nats a token.
    """
    model = build_model(plan, corpus.vocab_size)
    trained = train_arm(model, None, plan.policy(), plan, corpus)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    torch.save(model.state_dict(), part)
    part.replace(path)
    return trained.val_loss


def switchable_units(model: nn.Module, recipe: Any) -> tuple[tuple[str, ...], bool]:
    """Names of the units of ``model`` that the recipe can switch, and whether it can observe its quantizers.

    Returns: The names, from the input to the loss; and whether it can.

    Raises: ConfigError: when it can switch none.
    """
    with warnings.catch_warnings():
        # The guard says it again.
        warnings.simplefilter("ignore")
        conversion = recipe.convert(model, find_units(model, grouping=getattr(recipe, "unit", "projection")))
    conversion.undo()
    return tuple(unit.name for unit in conversion.units), why_unobserved(conversion) is None


def _sizes(plan: TrainingPlan) -> WatchedPlan:
    same: Sequence[str] = ("hidden", "ffn", "num_layers", "num_heads", "sequence", "batch")
    return WatchedPlan(**{name: getattr(plan, name) for name in same})
