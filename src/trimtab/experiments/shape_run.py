"""A model of shapes alone, on the meta device: made, given adapters and run without a number being allocated."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.errors import ConfigError
from trimtab.experiments.lora import add_lora
from trimtab.experiments.model_loading import first_line
from trimtab.precision import Conversion, Unit
from trimtab.precision.units import num_experts

__all__ = ["ShapeRunError", "experts_per_token", "make_shapes", "saved_bytes_of_shapes", "without_experts"]

_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


class ShapeRunError(Exception):
    """A model, or a recipe's low-cost path, that needs numbers and not only their shapes."""


def make_shapes(
    config: Mapping[str, Any] | Path, dtype: torch.dtype, *, lora_rank: int = 0, lora_alpha: int = 16
) -> nn.Module:
    """A causal LM on the meta device, in training mode; with adapters, of which alone it is trained, or without.

    Args:
        config: The config, or a config.json or a folder with one; weights beside it are not read.
        dtype: Dtype of its weights.
        lora_rank: Rank of adapters on every projection; 0 for none.
        lora_alpha: Numerator of their scale.

    Raises:
        ConfigError: when transformers cannot make a causal LM of it, or it has none of the adapted projections.
        MissingExtraError: when there are to be adapters and peft is not installed.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        made = AutoConfig.from_pretrained(str(config)) if isinstance(config, Path) else AutoConfig.for_model(**config)
        made.use_cache = False
        with torch.device("meta"), warnings.catch_warnings():
            # About initialization, of which there is none here.
            warnings.simplefilter("ignore")
            model = AutoModelForCausalLM.from_config(made, dtype=dtype)
    except Exception as error:  # whatever a config can be wrong in
        raise ConfigError(
            "model",
            str(config) if isinstance(config, Path) else config.get("model_type"),
            f"transformers cannot make a causal LM of it ({first_line(error)}).",
            "Name a config.json with a model_type, or a folder that save_pretrained wrote.",
        ) from None
    if lora_rank:
        with torch.device("meta"):
            model = add_lora(model, lora_rank, lora_alpha)
    model.train()
    return model


def without_experts(model: nn.Module) -> None:
    """Have every module of stacked experts return its input, for good: which rows an expert gets is no shape."""
    for module in model.modules():
        if num_experts(module) is not None:
            module.__dict__["forward"] = _return_input


def _return_input(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden


def experts_per_token(model: Any) -> int:
    """Through how many experts of a module each token goes; 1 where the config does not say."""
    return next((n for name in _PER_TOKEN if (n := getattr(model.config, name, None)) is not None), 1)


def saved_bytes_of_shapes(
    model: nn.Module,
    units: Iterable[Unit],
    tokens: tuple[int, int],
    conversion: Conversion | None = None,
    active: Sequence[bool] = (),
) -> int:
    """What the modules of ``units`` keep for backward in one forward, each storage once.

    What ``trimtab.precision.measure_saved_bytes`` measures, without the memory: a storage on the meta device has no
    address, and is known by its object.

    Args:
        model: A model on the meta device.
        units: The units.
        tokens: Sequences, and tokens of each.
        conversion: The model's conversion, if it is converted.
        active: Which of the conversion's units are on the recovery path.

    Raises: ShapeRunError: when the forward needs numbers.
    """
    own = {_storage(t) for t in (*model.parameters(), *model.buffers())}
    alive: dict[int, Tensor] = {}
    depth = 0

    def enter(*_: Any) -> None:
        nonlocal depth
        depth += 1

    def leave(*_: Any) -> None:
        nonlocal depth
        depth -= 1

    def pack(tensor: Tensor) -> Tensor:
        key = _storage(tensor)
        if depth and tensor.device.type == "meta" and key not in own:
            alive.setdefault(key, tensor)
        return tensor.detach()

    if conversion is not None:
        conversion.begin_step(1)
        conversion.route(active)
    handles = []
    for module in {id(m): m for unit in units for m in unit.modules}.values():
        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, always_call=True))
    ids = torch.zeros(tokens, dtype=torch.int64, device="meta")
    # A mask that is ready: to make one, transformers looks at numbers.
    mask = torch.zeros(1, 1, tokens[1], tokens[1], dtype=next(model.parameters()).dtype, device="meta")
    try:
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            _no_autocast_on_meta(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            keep = model(input_ids=ids, attention_mask=mask)
    except Exception as error:
        raise ShapeRunError(first_line(error)) from None
    finally:
        for handle in handles:
            handle.remove()
    del keep
    return sum(tensor.untyped_storage().nbytes() for tensor in alive.values())


@contextlib.contextmanager
def _no_autocast_on_meta() -> Iterator[None]:
    """Have torch answer, and not refuse to, when it is asked whether autocast is on for the meta device: it is not."""
    ask: Any = torch.is_autocast_enabled

    def answer(*device: str) -> bool:
        return False if device == ("meta",) else bool(ask(*device))

    torch.is_autocast_enabled = answer  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.is_autocast_enabled = ask


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
