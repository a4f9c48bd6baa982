"""``trimtab train``: any Hugging Face causal LM on the user's own text, through ``transformers.Trainer``."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from trimtab.control import Policy, PolicyLike, preset, robust
from trimtab.errors import ConfigError, MissingExtraError, TrimtabWarning
from trimtab.experiments.exercise import Observable, exercise_sentence, exercise_summary
from trimtab.experiments.model_loading import first_line, load_model, tied_weights_unmentioned, with_adapters
from trimtab.experiments.packages import require_packages
from trimtab.experiments.recipes import RECIPES, make_recipe
from trimtab.experiments.settings import TrainSettings, prepare_folder, write_whole
from trimtab.experiments.text import load_corpus, read_files
from trimtab.precision import Recipe, find_units
from trimtab.trace import open_run

__all__ = ["last_whole_checkpoint", "run_train"]

_IDENTITY = "trimtab.json"


class TextWindows(Dataset[dict[str, Tensor]]):
    """Consecutive windows of a token stream, for the Trainer to shuffle."""

    def __init__(self, tokens: Tensor, sequence: int) -> None:
        self.tokens = tokens
        self.sequence = sequence

    def __len__(self) -> int:
        return len(self.tokens) // self.sequence

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.tokens[index * self.sequence : (index + 1) * self.sequence]
        return {"input_ids": window, "labels": window}


def run_train(
    settings: TrainSettings,
    *,
    policy: PolicyLike | None = None,
    further: Callable[[Any], Sequence[Any]] = lambda watch: (),
    identity: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Train, or go on with a run that was cut short.

    Args:
        settings: What the command line can be told.
        policy: In place of the one that the settings name.
        further: From the callback that attaches the guard, callbacks that the Trainer has after it.
        identity: What else must be equal for one start to go on where another ended; JSON-able.

    Returns: What ``summary.json`` holds.

    Raises:
        ConfigError: when a setting cannot be meant, or the folder holds a run with other settings or a whole one.
        MissingExtraError: when transformers, or a package that the recipe or the model needs, is not installed.
    """
    needs = RECIPES[settings.recipe]
    more = needs.packages(has_adapters=settings.adapter_rank > 0)
    require_packages("trimtab train", (("transformers", "hf"), ("accelerate", "hf"), *more))
    try:
        from transformers import Trainer, TrainingArguments, set_seed

        from trimtab.experiments.exercise_callback import ExerciseCallback
        from trimtab.integrations.transformers import TrimtabCallback
    except ImportError:
        raise MissingExtraError("trimtab train", "transformers", "hf") from None
    is_first = int(os.environ.get("RANK", "0")) == 0
    if policy is None:
        policy = policy_of(settings)
    _check_loggers(settings.report_to)
    recipe = make_recipe(settings.recipe, **settings.recipe_settings)
    prepare_folder(settings.out)
    documents = read_files(settings.data)
    whole_identity = _identity(settings, documents) | dict(identity)
    resumes = _goes_on(settings.out, whole_identity)
    set_seed(settings.seed)
    model, tokenizer = load_model(settings)
    checkpoint = last_whole_checkpoint(settings.out) if resumes else None
    trained = checkpoint is not None and int(checkpoint.name.removeprefix("checkpoint-")) >= settings.steps
    if trained and not settings.adapter_rank:
        model = type(model).from_pretrained(str(checkpoint))
    num_ids = model.get_input_embeddings().num_embeddings
    corpus = load_corpus(documents, tokenizer=tokenizer, vocab_size=num_ids, sequence=settings.sequence)
    if num_ids < corpus.vocab_size:
        raise ConfigError(
            "model",
            settings.model,
            f"it has {num_ids} token ids, and the tokenizer makes {corpus.vocab_size}.",
            "Raise vocab_size in the config, or name the model's own tokenizer.",
        )
    if settings.adapter_rank:
        model = with_adapters(model, settings, checkpoint if trained else None)
    has_gpu = torch.accelerator.is_available()
    arguments = TrainingArguments(
        output_dir=str(settings.out),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch,
        per_device_eval_batch_size=settings.batch,
        gradient_accumulation_steps=settings.accumulation,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=settings.warmup,
        weight_decay=settings.weight_decay,
        adam_beta2=0.95,
        max_grad_norm=settings.max_grad_norm,
        seed=settings.seed,
        bf16=settings.bf16,
        use_cpu=not has_gpu,
        # Named without a launcher, it would make the Trainer look for a process group that nobody made.
        ddp_backend="gloo" if not has_gpu and int(os.environ.get("WORLD_SIZE", "1")) > 1 else None,
        save_steps=settings.save_every,
        save_total_limit=2,
        logging_steps=settings.log_every,
        report_to=settings.report_to.split(","),
        # Under adapters the Trainer cannot find out, and would evaluate without a loss.
        label_names=["labels"],
    )
    _try_forward(model, settings)
    if settings.gradient_checkpointing:
        # The newer name where there is one: the older warns.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
        if settings.adapter_rank:
            # Else no gradient would reach the blocks: the embeddings are frozen.
            model.enable_input_require_grads()
    # Beyond a thousand sequences the figure hardly moves, and a large held-out text would take longer than the run.
    held_out = corpus.validation[: 1024 * settings.sequence]
    train_tokens = corpus.train
    if needs.token_multiple > 1:
        # The batch at the end of an epoch must be a whole one.
        per_step = settings.batch * settings.sequence * int(os.environ.get("WORLD_SIZE", "1"))
        train_tokens = train_tokens[: len(train_tokens) // per_step * per_step]
        if not len(train_tokens):
            raise ConfigError(
                "data",
                f"{len(corpus.train)} training tokens",
                f"the recipe {settings.recipe!r} needs whole batches, of {per_step} tokens.",
                "Give more text, or lower batch or sequence.",
            )
    watch = TrimtabCallback(recipe, policy=policy, record=settings.out)
    callbacks: list[Any] = [watch]
    if settings.exercise_every:
        observable: Observable = "outputs" if needs.changes_output else "quantizers"
        callbacks.append(ExerciseCallback(watch, settings.exercise_every, observable))
    callbacks += further(watch)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=TextWindows(train_tokens, settings.sequence),
        eval_dataset=TextWindows(held_out, settings.sequence),
        processing_class=corpus.tokenizer,
        callbacks=callbacks,
    )
    if recipe is not None:
        _try_recipe(model, recipe)
    if is_first and not resumes:
        # Only now: what was refused until here must not leave a folder that looks like a run.
        write_whole(settings.out / _IDENTITY, whole_identity)
    if is_first and resumes:
        print(f"Going on from {checkpoint}." if checkpoint else "No whole checkpoint yet: starting over.")
    # Killed between its last checkpoint and its summary, a run is trained already; the Trainer would add a step.
    if not trained:
        with tied_weights_unmentioned(model):
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    val_loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(settings.out / "final"))
    summary = {
        "settings": settings.identity() | dict(identity),
        "steps": settings.steps,
        "val_loss": val_loss,
        "val_perplexity": math.exp(min(val_loss, 700.0)),
        "val_nats_per_byte": val_loss / corpus.bytes_per_token,
        "final_model": str(settings.out / "final"),
        "record": str(settings.out / "run.sqlite"),
    }
    if trainer.is_world_process_zero():
        if settings.exercise_every:
            with open_run(settings.out) as run:
                exercise = summary["exercise"] = exercise_summary(run)
            print(exercise_sentence(exercise, settings.exercise_every))
        write_whole(settings.out / "summary.json", summary)
        what = "Adapters" if settings.adapter_rank else "Model"
        print(
            f"Validation loss {val_loss:.4f} nats a token, {summary['val_nats_per_byte']:.4f} nats a byte.\n"
            f"{what}: {summary['final_model']}   Record: trimtab runs {settings.out}"
        )
    return summary


def policy_of(settings: TrainSettings) -> Policy:
    """The preset with the settings' own budget and damping.

    Raises: ConfigError: when the budget is negative or a share above 1.
    """
    if settings.preset == "robust":
        policy = robust(warmup_steps=settings.warmup)
        _say_if_short(settings, policy.act_from_step)
    else:
        policy = preset(settings.preset, total_steps=settings.steps)
    if settings.max_active is not None:
        policy = dataclasses.replace(policy, max_active=settings.max_active)
    return dataclasses.replace(policy, damping=settings.damping)


def _say_if_short(settings: TrainSettings, act_from_step: int) -> None:
    """What ``robust`` says of a short run, in the words of the command line, which has not its settings."""
    if settings.steps >= 4 * act_from_step:
        return
    lower = ", or lower --warmup-steps" if settings.warmup > 20 else ""
    warnings.warn(
        f"steps={settings.steps}: the robust policy only learns up to step {act_from_step}, more than a quarter of "
        f"this run. Set --steps to {4 * act_from_step} or more{lower}; a run this short is of use to try things out.",
        TrimtabWarning,
        stacklevel=3,
    )


def _try_recipe(model: Any, recipe: Recipe) -> None:
    """Raises: ConfigError, MissingExtraError: when it cannot convert the model, before anything is written for it."""
    with warnings.catch_warnings():
        # The guard says it again.
        warnings.simplefilter("ignore")
        recipe.convert(model, find_units(model, grouping=getattr(recipe, "unit", "projection"))).undo()


def _check_loggers(names: str) -> None:
    """Raises: ConfigError: when transformers does not know a logger, or its package is not installed."""
    from transformers.integrations.integration_utils import get_available_reporting_integrations

    available = get_available_reporting_integrations()
    for name in names.split(","):
        if name not in (*available, "none", "all"):
            raise ConfigError(
                "report_to",
                name,
                f"the loggers that are installed here are {', '.join(available) or 'none at all'}.",
                "Install its package, or choose one of these.",
            )


def _try_forward(model: Any, settings: TrainSettings) -> None:
    """Raises: ConfigError: when the model cannot run on a sequence, before anything is written for it."""
    # A large model on a CPU would take long for a whole sequence; two tokens find all but too few positions.
    is_small = sum(p.numel() for p in model.parameters()) < 300e6
    model.eval()
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, settings.sequence if is_small else 2, dtype=torch.int64))
    except Exception as error:
        raise ConfigError(
            "model",
            settings.model,
            f"it fails on a sequence of {settings.sequence} tokens ({first_line(error)}).",
            "Correct its config, or shorten the sequence.",
        ) from None
    finally:
        model.train()


def last_whole_checkpoint(out: Path) -> Path | None:
    """The latest checkpoint that was written to its end, or None.

    The Trainer writes ``trainer_state.json`` last, so a kill in the middle of saving leaves a folder without it, or
    with a piece of it; such a folder is passed over.
    """
    whole = []
    for folder in out.glob("checkpoint-*"):
        number = folder.name.removeprefix("checkpoint-")
        try:
            state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if number.isdigit() and state.get("global_step") == int(number):
            whole.append((int(number), folder))
    return max(whole)[1] if whole else None


def _identity(settings: TrainSettings, documents: Sequence[str]) -> dict[str, Any]:
    """What must be equal for one start to go on where another ended: the settings, the text and the model's config."""
    text = hashlib.sha256("\0".join(documents).encode()).hexdigest()
    model = Path(settings.model)
    config = model / "config.json" if model.is_dir() else model
    found = hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else None
    return settings.identity() | {"text_sha256": text, "config_sha256": found}


def _goes_on(out: Path, identity: Mapping[str, Any]) -> bool:
    """Whether the folder holds the same run, cut short.

    Raises: ConfigError: when it holds a whole run, one with other settings, or checkpoints of something else.
    """
    path = out / _IDENTITY
    if (out / "summary.json").exists():
        raise ConfigError("out", str(out), "it holds a run that is finished.", "Choose another folder.")
    if not path.exists():
        if any(out.glob("checkpoint-*")):
            raise ConfigError(
                "out", str(out), "it holds checkpoints that trimtab train did not write.", "Choose another folder."
            )
        return False
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = {}
    if found != identity:
        changed = sorted(k for k in identity if found.get(k) != identity[k])
        raise ConfigError(
            "out",
            str(out),
            f"it holds an unfinished run with other settings ({', '.join(changed)}).",
            "Use the same settings to go on with it, or choose another folder.",
        )
    return True
