"""Which units a recipe of linear layers can convert, and why not the others."""

from __future__ import annotations

import warnings
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import nn

from trimtab.errors import ConfigError, TrimtabWarning
from trimtab.precision.units import Unit, linear_class, output_head

__all__ = ["convertible_units", "is_dtensor", "why_not_linear"]


def convertible_units(model: nn.Module, units: Sequence[Unit], recipe: str) -> list[Unit]:
    """Those of ``units`` that a recipe of linear layers can convert.

    Args:
        model: The model they belong to.
        units: The units.
        recipe: What the recipe is called, as the subject of a sentence.

    Raises: ConfigError: when it can convert none of them.
    """
    under_fsdp = _modules_under_fsdp(model, units)
    reasons = {unit.name: why_not_linear(unit, under_fsdp) for unit in units}
    convertible = [unit for unit in units if reasons[unit.name] is None]
    if not convertible:
        name, reason = next(iter(reasons.items()))
        raise ConfigError(
            "units",
            [u.name for u in units][:3],
            f"{recipe} convert plain linear layers, and {name} is none: {reason}.",
            "Choose units that are linear layers.",
        )
    _warn_about_heads(model, convertible)
    return convertible


def why_not_linear(unit: Unit, under_fsdp: Container[int]) -> str | None:
    """Why ``unit`` cannot be converted, or None when it can.

    Args:
        unit: The unit.
        under_fsdp: Identities of the modules whose parameters FSDP2 may manage.
    """
    for module in unit.modules:
        base = linear_class(module)
        if base is None:
            if hasattr(module, "base_layer"):
                return (
                    "it is an adapter around a frozen layer, whose parts can be picked: lambda m, fqn: 'lora_' in fqn"
                )
            return f"it is a {type(module).__name__}"
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
        if not weight.requires_grad:
            return "its weight is frozen, so it keeps no input for a gradient"
        if is_dtensor(weight) and not (id(module) in under_fsdp and _is_placed_by_fsdp(weight)):
            return "its weight is sharded by tensor parallelism"
    return None


def is_dtensor(tensor: Any) -> bool:
    """Whether ``tensor`` is a DTensor; asks no import of a run that has none."""
    return hasattr(tensor, "device_mesh")


def _modules_under_fsdp(model: nn.Module, units: Sequence[Unit]) -> set[int]:
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


def _warn_about_heads(model: nn.Module, units: Sequence[Unit]) -> None:
    """Say once that a filter has caught the output head."""
    head = output_head(model)
    for unit in units:
        if head is not None and any(m is head for m in unit.modules):
            warnings.warn(
                f"units picks the output head ({unit.name}): its gradient is the largest of the model and is usually "
                "kept in full precision. Narrow the filter if that was not meant.",
                TrimtabWarning,
                stacklevel=6,
            )
