"""``trimtab eval``: a checkpoint through the tasks of lm-eval."""

from __future__ import annotations

import dataclasses
import json
import logging
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trimtab.errors import ConfigError, MissingExtraError, nearest_names
from trimtab.experiments.byte_tokenizer import NEWLINE, byte_tokenizer
from trimtab.experiments.eval_settings import EvalSettings
from trimtab.experiments.eval_tasks import task_config
from trimtab.experiments.model_loading import first_line, load_model
from trimtab.experiments.settings import TrainSettings, write_whole
from trimtab.experiments.train import last_whole_checkpoint

__all__ = ["find_checkpoint", "load_checkpoint", "run_eval"]


def run_eval(settings: EvalSettings) -> dict[str, Any]:
    """Evaluate, print a table or JSON, and write the results where that is asked for.

    Returns: The results: those of each task under "tasks", by metric, and what they were made with.

    Raises:
        ConfigError: when there is no checkpoint, a task is not known or its data cannot be had, or a file is no task.
        MissingExtraError: when lm-eval is not installed, or peft where there are adapters.
    """
    try:
        with _quiet():
            import lm_eval
            from lm_eval.models.huggingface import HFLM
            from lm_eval.tasks import TaskManager
    except ImportError:
        raise MissingExtraError("trimtab eval", "lm_eval", "eval") from None
    checkpoint = find_checkpoint(settings.path)
    with tempfile.TemporaryDirectory() as scratch, _quiet():
        manager = TaskManager()
        tasks = [_task(name, manager, Path(scratch)) for name in settings.tasks]
        model, tokenizer = load_checkpoint(checkpoint, settings.base)
        of_bytes = tokenizer is None
        harness = HFLM(
            pretrained=model,
            tokenizer=byte_tokenizer() if of_bytes else tokenizer,
            batch_size=settings.batch,
            prefix_token_id=NEWLINE if of_bytes else None,
        )
        found = lm_eval.simple_evaluate(
            model=harness,
            tasks=tasks,
            num_fewshot=settings.shots,
            limit=settings.limit,
            log_samples=False,
            task_manager=manager,
        )
    results = {
        "checkpoint": str(checkpoint),
        "tokenizer": "bytes" if of_bytes else type(tokenizer).__name__,
        "lm_eval": lm_eval.__version__,
        "limit": settings.limit,
        "shots": settings.shots,
        "tasks": {name: _metrics(values) for name, values in (found or {}).get("results", {}).items()},
    }
    if settings.out is not None:
        try:
            settings.out.parent.mkdir(parents=True, exist_ok=True)
            write_whole(settings.out, results)
        except OSError as error:
            reason = f"it cannot be written ({error.strerror})."
            raise ConfigError("out", str(settings.out), reason, "Name a file that can be.") from None
    if settings.json:
        print(json.dumps(results, indent=1))
    else:
        Console().print(_table(results["tasks"]))
    return results


def find_checkpoint(path: Path) -> Path:
    """The folder with the weights: ``path`` itself, or what a run in it ended with or saved last.

    Raises: ConfigError: when there is none.
    """
    for folder in (path, path / "final", last_whole_checkpoint(path)):
        if folder is not None and any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
            return folder
    raise ConfigError(
        "path", str(path), "it holds no checkpoint.", "Name a folder that save_pretrained or trimtab train wrote."
    )


def load_checkpoint(checkpoint: Path, base: Path | None = None) -> tuple[Any, Any]:
    """The model in evaluation mode, on the accelerator where there is one, and its tokenizer; None for bytes.

    Args:
        checkpoint: Of a whole model, or of adapters.
        base: The model that adapters belong to; as the checkpoint or its run says when left out.

    Raises:
        ConfigError: when transformers cannot load it, or the adapters' model is not there.
        MissingExtraError: when it holds adapters and peft is not installed.
    """
    from transformers import AutoModelForCausalLM

    tokenizer = _tokenizer_in(checkpoint)
    if (checkpoint / "adapter_config.json").is_file():
        model, of_base = _load_adapted(checkpoint, base)
        tokenizer = tokenizer or of_base
    elif base is not None:
        raise ConfigError("base", str(base), "the checkpoint is of a whole model.", "Leave it out.")
    else:
        try:
            model = AutoModelForCausalLM.from_pretrained(str(checkpoint))
        except Exception as error:  # whatever a config or a file of weights can be wrong in
            raise _no_model("path", checkpoint, error) from None
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    return model.eval().to(device), tokenizer


def _load_adapted(checkpoint: Path, base: Path | None) -> tuple[Any, Any]:
    """A model with the adapters of a checkpoint, and the base's tokenizer; None for bytes."""
    try:
        from peft import PeftModel
    except ImportError:
        raise MissingExtraError("A checkpoint of adapters", "peft", "lora") from None
    from transformers import AutoModelForCausalLM, set_seed

    said = json.loads((checkpoint / "adapter_config.json").read_text(encoding="utf-8")).get("base_model_name_or_path")
    run = _settings_of_run(checkpoint) if base is None else None
    tokenizer = None
    if run is not None:
        # A base without weights is random, and follows from the seed as it did in the run.
        set_seed(run.seed)
        model, tokenizer = load_model(run)
        tokenizer = None if isinstance(tokenizer, str) else tokenizer
    else:
        folder = base or Path(said or "")
        if not (said or base) or not folder.exists():
            raise ConfigError(
                "base",
                None if base is None else str(base),
                f"the adapters in {checkpoint} belong to a model that is not there ({said or 'none is named'}).",
                "Name its folder.",
            )
        try:
            model = AutoModelForCausalLM.from_pretrained(str(folder))
        except Exception as error:
            raise _no_model("base", folder, error) from None
        tokenizer = _tokenizer_in(folder)
    return PeftModel.from_pretrained(model, str(checkpoint)), tokenizer


def _settings_of_run(checkpoint: Path) -> TrainSettings | None:
    """The settings of the run of ``trimtab train`` that wrote a checkpoint; None where none did."""
    path = checkpoint.parent / "trimtab.json"
    if not path.is_file():
        return None
    written = json.loads(path.read_text(encoding="utf-8"))
    known = {field.name for field in dataclasses.fields(TrainSettings)}
    given = {name: value for name, value in written.items() if name in known}
    return TrainSettings(**given | {"data": tuple(map(Path, given["data"])), "out": checkpoint.parent})


def _tokenizer_in(folder: Path) -> Any:
    """The tokenizer that lies in ``folder``, or None."""
    if not (folder / "tokenizer_config.json").is_file():
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:
        reason = f"no tokenizer loads from it ({first_line(error)})."
        raise ConfigError("path", str(folder), reason, "Save the model's tokenizer there.") from None


def _no_model(setting: str, folder: Path, error: Exception) -> ConfigError:
    return ConfigError(
        setting,
        str(folder),
        f"transformers cannot load a causal LM from it ({first_line(error)}).",
        "Name a folder that save_pretrained or trimtab train wrote.",
    )


def _task(name: str, manager: Any, scratch: Path) -> Any:
    """What lm-eval takes for a task: a loaded one of its own, or the config of a file's."""
    path = Path(name)
    if path.is_file():
        return task_config(path, scratch)
    known: Sequence[str] = manager.all_tasks
    if name.lower() not in known:
        near = nearest_names(name.lower(), known)
        raise ConfigError(
            "tasks",
            name,
            "it is neither a file nor a task of lm-eval.",
            f"Did you mean {near[0]!r}?" if near else "Name a file of JSON lines, hellaswag, mmlu, gsm8k or wikitext.",
        )
    try:
        return _loaded(manager.load([name.lower()]), name.lower())
    except Exception as error:  # whatever a network, a cache or a server can be wrong in
        raise ConfigError(
            "tasks",
            name,
            f"its data cannot be had from here ({first_line(error)}).",
            "Run it once where there is network, which leaves the data in a cache, or name a file of your own.",
        ) from None


def _loaded(loaded: Any, name: str) -> Any:
    """The task or group of that name among what was loaded."""
    return {**loaded["tasks"], **loaded.get("groups", {})}.get(name, name)


def _metrics(values: dict[str, Any]) -> dict[str, float]:
    """A task's figures by their plain names; lm-eval adds the filter's, which is "none" but for some."""
    return {
        key.removesuffix(",none"): float(value)
        for key, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and "," in key
    }


def _table(tasks: dict[str, dict[str, float]]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("task", overflow="fold")
    table.add_column("metric")
    table.add_column("value", justify="right")
    table.add_column("standard error", justify="right")
    for name, values in tasks.items():
        for metric, value in values.items():
            plain, _, of_filter = metric.partition(",")
            if plain.endswith("_stderr"):
                continue
            error = values.get(f"{plain}_stderr" + (f",{of_filter}" if of_filter else ""))
            table.add_row(escape(name), escape(metric), f"{value:.4f}", "" if error is None else f"{error:.4f}")
    return table


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep to itself what lm-eval says of its own workings, below a warning."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
