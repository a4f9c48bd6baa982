"""Fine-tuning with adapters: LoRA on every projection, and a base small enough to pre-train on the spot."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from trimtab.errors import ConfigError, MissingExtraError, nearest_names
from trimtab.experiments.arms import TrainingPlan, build_model
from trimtab.experiments.text import Corpus, TextBatches
from trimtab.precision.units import is_linear

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import LlamaForCausalLM

__all__ = ["PROJECTIONS", "add_lora", "pretrain_small_base"]

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The seven projections of a LLaMA block, by their names in transformers."""


def add_lora(
    model: nn.Module,
    rank: int = 8,
    alpha: int = 16,
    targets: Sequence[str] = PROJECTIONS,
    seed: int = 0,
) -> PeftModel:
    """Freeze ``model`` and put LoRA adapters on its projections, in place.

    An adapted projection computes W x + (alpha/rank) B A x; A is random and B is 0, so at first the model computes what
    it did, and the first gradient of every A is exactly 0. ``trimtab.attach`` sees one unit a projection, under the
    projection's name; its norm is that of A's and B's gradients together, and so of B's alone in the first step.

    The adapters follow from the seed alone, and nothing is drawn from the random numbers of the process.

    Args:
        model: A transformers model; it belongs to the returned one afterwards.
        rank: Rows of A and columns of B. >= 1.
        alpha: Numerator of the adapters' scale.
        targets: Names of the modules to adapt, or the last parts of their names.
        seed: Seed of A.

    Returns: The model with adapters, of which only the adapters are trained.

    Raises:
        ConfigError: when ``rank`` is below 1, or a target is no module's name.
        MissingExtraError: when peft is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise MissingExtraError("LoRA", "peft", "lora") from None
    if rank < 1:
        raise ConfigError("rank", rank, "an adapter has a rank of at least 1.", "Set it to 1 or more.")
    if isinstance(targets, str):
        raise ConfigError("targets", targets, "a list of names is needed.", f"Write [{targets!r}].")
    _check_targets(model, targets)
    with _own_random_numbers(seed), warnings.catch_warnings():
        # About a name of transformers that peft still uses.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        return get_peft_model(
            model, LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets), task_type="CAUSAL_LM")
        )


def pretrain_small_base(corpus: Corpus, steps: int = 60, seed: int = 0) -> LlamaForCausalLM:
    """Pre-train the demo's small LLaMA for a few seconds: a base that an adapter has something to add to.

    A randomly initialised base would not do: its adapters would have to learn the language too. Fine-tune it on text
    that it has not seen; with the speeches, pre-train on the earlier ones and fine-tune on the later ones. Nothing is
    drawn from the random numbers of the process.

    Args:
        corpus: The text; its token ids are the model's.
        steps: Optimizer steps, of 8 sequences of 64 tokens each.
        seed: Seed of the weights and of the data order.

    Returns: The model, in training mode and without gradients.

    Raises: ConfigError: when ``steps`` is below 1.
    """
    if steps < 1:
        raise ConfigError("steps", steps, "pre-training takes at least 1 step.", "Set it to 1 or more.")
    plan = TrainingPlan(num_steps=steps, seed=seed)
    with _own_random_numbers(seed):
        model = cast("LlamaForCausalLM", build_model(plan, corpus.vocab_size))
    batches = TextBatches(corpus.train, plan.batch, plan.sequence, plan.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=plan.learning_rate, betas=(0.9, 0.95), weight_decay=plan.weight_decay
    )
    for step in range(1, plan.num_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate_at(step)
        model(input_ids=batches[step], labels=batches[step]).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), plan.max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return model


@contextlib.contextmanager
def _own_random_numbers(seed: int) -> Iterator[None]:
    """Random numbers from ``seed`` inside; the process's go on afterwards as if nothing had been drawn."""
    # All devices by name: seeding reaches all of them, and without names torch warns where there are several.
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


def _check_targets(model: nn.Module, targets: Sequence[str]) -> None:
    """Raises: ConfigError: when peft would adapt nothing for one of ``targets``; unless for all, it keeps silent."""
    names = [name for name, _ in model.named_modules() if name]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            ends = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if is_linear(module)})
            near = ", ".join(nearest_names(target, ends) or ends[:3])
            raise ConfigError("targets", target, "no module has this name.", f"The nearest names are {near}.")
