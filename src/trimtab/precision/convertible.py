"""Why a linear layer cannot be converted, if it cannot, and what is said of heads and embeddings."""

from __future__ import annotations

import warnings
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import nn

from trimtab.errors import TrimtabWarning
from trimtab.precision.units import Unit, input_embeddings, linear_class, output_head

__all__ = [
    "is_dtensor",
    "modules_under_fsdp",
    "warn_about_heads",
    "why_not_plain_linear",
    "why_not_weight",
]

_TRAINED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def why_not_plain_linear(module: nn.Module, under_fsdp: Container[int]) -> str | None:
    """Why ``module`` is no linear layer whose forward a recipe can replace, or None when it is one.

    Args:
        module: The module.
        under_fsdp: Identities of the modules whose parameters FSDP2 may manage.
    """
    base = linear_class(module)
    if base is None:
        return f"it is a {type(module).__name__}"
    if "_trimtab_switch" in module.__dict__:
        return "another recipe has converted it already"
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads its weight without calling it"
    if type(module).forward is not base.forward:
        return f"its class {type(module).__name__} computes its forward in its own way"
    if "forward" in module.__dict__:
        return "something else has already replaced its forward"
    if torch.nn.utils.parametrize.is_parametrized(module):
        return "its weight is parametrized, and each look at it computes it anew"
    weight: Any = module.weight
    if isinstance(weight, nn.parameter.UninitializedParameter):
        return "its weight has no shape before the first forward"
    if weight.dim() != 2:
        return f"its weight is sharded or flattened, of shape {tuple(weight.shape)}: attach before that is done"
    if (reason := why_not_weight(weight)) is not None:
        return reason
    if is_dtensor(weight) and not (id(module) in under_fsdp and _is_placed_by_fsdp(weight)):
        return "its weight is sharded by tensor parallelism"
    return None


def why_not_weight(weight: Any) -> str | None:
    """Why ``weight`` is none that a recipe can round and multiply, or None when it is one."""
    kinds = type(weight).__mro__
    derived = kinds[: kinds.index(nn.Parameter if nn.Parameter in kinds else torch.Tensor)]
    is_own = any("__torch_function__" in k.__dict__ or "__torch_dispatch__" in k.__dict__ for k in derived)
    if is_own and not is_dtensor(weight):
        return (
            f"its weight is a {kinds[0].__name__}, which multiplies in its own way and leaves nothing to recover with: "
            "load the model unquantized"
        )
    if weight.dtype not in _TRAINED:
        return f"its weight is of {weight.dtype}, in which no layer is trained"
    return None if weight.numel() else f"its weight is empty, of shape {tuple(weight.shape)}"


def is_dtensor(tensor: Any) -> bool:
    """Whether ``tensor`` is a DTensor; asks no import of a run that has none."""
    return hasattr(tensor, "device_mesh")


def modules_under_fsdp(model: nn.Module, units: Sequence[Unit]) -> set[int]:
    """Identities of the modules at or below one that FSDP2 manages; imports nothing for a model without DTensors."""
    if not any(is_dtensor(p) for unit in units for p in unit.parameters()):
        return set()
    from torch.distributed.fsdp import FSDPModule

    return {id(m) for top in model.modules() if isinstance(top, FSDPModule) for m in top.modules()}


def _is_placed_by_fsdp(weight: Any) -> bool:
    """Whether FSDP2 alone has placed ``weight``: sharded over one dimension of the mesh, replicated over any before it.

    Tensor parallelism takes the innermost dimension, so together they are (Shard, Shard), (_StridedShard, Shard) or, of
    a weight that it leaves whole, (Shard, Replicate).
    """
    *outer, inner = weight.placements
    return all(p.is_replicate() for p in outer) and inner.is_shard()


def warn_about_heads(model: nn.Module, units: Sequence[Unit]) -> None:
    """Say once that a filter has caught the output head, or embeddings."""
    # With adapters each is a module that holds several.
    head, embeddings = (
        set() if found is None else {id(m) for m in found.modules()}
        for found in (output_head(model), input_embeddings(model))
    )
    caught = []
    for unit in units:
        held = {id(m) for module in unit.modules for m in module.modules()}
        if held & head:
            caught.append(
                f"units picks the output head ({unit.name}): its gradient is the largest of the model and is usually "
                "kept in full precision."
            )
        if held & embeddings or any(isinstance(m, nn.Embedding) for m in unit.modules):
            caught.append(
                f"units picks the input embeddings ({unit.name}): looking rows up is no product, and only the rows of "
                "the step's tokens have a gradient."
            )
    if caught:
        caught.append("Narrow the filter if that was not meant.")
        warnings.warn(" ".join(caught), TrimtabWarning, stacklevel=6)
