"""The model and tokenizer of ``trimtab train``: from a config, a checkpoint or a package; with adapters or without."""

from __future__ import annotations

import ast
import contextlib
import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from trimtab.errors import ConfigError, TrimtabWarning
from trimtab.experiments.settings import SMOLLM2, TrainSettings

__all__ = ["first_line", "load_model", "tied_weights_unmentioned", "with_adapters"]


def load_model(settings: TrainSettings) -> tuple[Any, Any]:
    """The model, and the tokenizer to use: an object, "bytes" or "bpe".

    Raises: ConfigError: when the path is no Hugging Face config or checkpoint of a causal LM.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if settings.model == SMOLLM2:
        return _load_smollm2(settings)
    path = Path(settings.model)
    if not path.exists():
        raise ConfigError(
            "model", settings.model, "there is no such file or folder.", "Name a config.json or a local checkpoint."
        )
    try:
        config = AutoConfig.from_pretrained(str(path))
        make = AutoModelForCausalLM
        model = make.from_pretrained(str(path)) if _holds_weights(path) else make.from_config(config)
    except Exception as error:  # whatever a config or a file of weights can be wrong in
        reason = first_line(error)
        raise ConfigError(
            "model",
            settings.model,
            f"transformers cannot make a causal LM of it ({reason}).",
            "Name a config.json with a model_type, or a folder that save_pretrained wrote.",
        ) from None
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    if settings.tokenizer in ("bytes", "bpe"):
        return model, settings.tokenizer
    folder = Path(settings.tokenizer) if settings.tokenizer is not None else (path if path.is_dir() else path.parent)
    if settings.tokenizer is None and not (folder / "tokenizer_config.json").exists():
        return model, "bytes"
    return model, _load_tokenizer(folder)


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:
        reason = first_line(error)
        raise ConfigError(
            "tokenizer", str(folder), f"no tokenizer loads from it ({reason}).", "Name a folder with one, or bytes."
        ) from None


def _load_smollm2(settings: TrainSettings) -> tuple[Any, Any]:
    from trimtab.experiments.smollm2 import load_smollm2

    model, tokenizer = load_smollm2(cache=settings.cache or settings.out / "model")
    model.config.use_cache = False
    if settings.tokenizer is None:
        return model, tokenizer
    return model, settings.tokenizer if settings.tokenizer in ("bytes", "bpe") else _load_tokenizer(
        Path(settings.tokenizer)
    )


def _holds_weights(path: Path) -> bool:
    return path.is_dir() and any(
        p.suffix in (".safetensors", ".bin") and p.stem.startswith(("model", "pytorch_model")) for p in path.iterdir()
    )


def with_adapters(model: Any, settings: TrainSettings, checkpoint: Path | None) -> Any:
    """The model, frozen, with new adapters, or with those of a checkpoint.

    Raises: ConfigError: when it has none of the projections that are adapted.
    """
    from trimtab.experiments.lora import add_lora

    if settings.model != SMOLLM2 and not _holds_weights(Path(settings.model)):
        warnings.warn(
            f"{settings.model} has no weights: the base is random and stays so, since only its adapters are trained. "
            "That is of use to try things out.",
            TrimtabWarning,
            stacklevel=3,
        )
        # Saving adapters, peft would look there for a model.
        model.name_or_path = ""
    if checkpoint is None:
        return add_lora(model, settings.adapter_rank, settings.lora_alpha, seed=settings.seed)
    from peft import PeftModel

    return PeftModel.from_pretrained(model, str(checkpoint))


@contextlib.contextmanager
def tied_weights_unmentioned(model: Any) -> Iterator[None]:
    """Keep the Trainer from warning, on a resume, of weights that are in the checkpoint under their other name alone.

    A tied weight is saved once. Of keys that are really missing it still warns.
    """
    trainer, tied = logging.getLogger("transformers.trainer"), _TiedWeights(model)
    trainer.addFilter(tied)
    try:
        yield
    finally:
        trainer.removeFilter(tied)


class _TiedWeights(logging.Filter):
    """Passes every record but one of missing keys each of which is tied to a weight that is not missing."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        places: dict[tuple[Any, ...], set[str]] = {}
        for name, tensor in model.state_dict().items():
            if isinstance(tensor, Tensor) and tensor.numel():
                place = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape)
                places.setdefault(place, set()).add(name)
        self._names_of = {name: names for names in places.values() for name in names}

    def filter(self, record: logging.LogRecord) -> bool:
        found = re.search(r"missing keys in the checkpoint model loaded: (\[.*\])", record.getMessage())
        if found is None:
            return True
        missing = set(ast.literal_eval(found[1]))
        return not all(self._names_of.get(name, {name}) - missing for name in missing)


def first_line(error: Exception) -> str:
    """What an error of another package says, in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
