"""Which layers of which units a recipe converts, and a reason for each that it does not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from torch import nn

from trimtab.errors import ConfigError, TrimtabWarning
from trimtab.precision.convertible import modules_under_fsdp, warn_about_heads
from trimtab.precision.operators import operators_of
from trimtab.precision.units import Unit

__all__ = ["Planned", "WhyNot", "plan_conversion"]

Planned = tuple[Unit, tuple[nn.Module, ...]]
"""A unit, and the layers of it that are converted; at least one."""

WhyNot = Callable[[nn.Module, frozenset[int]], str | None]
"""Why a recipe cannot convert a layer, or None when it can; told the identities of the modules under FSDP2."""


def plan_conversion(model: nn.Module, units: Sequence[Unit], recipe: str, why_not: WhyNot) -> list[Planned]:
    """What a recipe converts: of each unit the layers that it can, leaving out units of which it can convert none.

    One switch turns all layers of a unit; those that cannot be converted run plainly on both paths, and one warning
    names them. Nothing is changed here.

    Args:
        model: The model.
        units: The watched units.
        recipe: What the recipe is called, as the subject of a sentence.
        why_not: The recipe's own judgement of one layer.

    Raises: ConfigError: when it can convert no layer of any unit, or a layer is converted already.
    """
    under_fsdp = frozenset(modules_under_fsdp(model, units))
    names = {id(module): name for name, module in model.named_modules()}
    planned: list[Planned] = []
    left_out: dict[str, str] = {}
    first_reason: tuple[str, str] | None = None
    for unit in units:
        layers = operators_of(model, unit)
        reasons = {id(layer): why_not(layer, under_fsdp) for layer in layers}
        able = tuple(layer for layer in layers if reasons[id(layer)] is None)
        refused = {names.get(i, unit.name): reason for i, reason in reasons.items() if reason is not None}
        if not layers:
            kind = type(unit.modules[0]).__name__
            refused = {unit.name: f"it is a {kind}, with no layer that multiplies by a weight"}
        if first_reason is None and refused:
            first_reason = next(iter(refused.items()))
        if able:
            planned.append((unit, able))
        if layers:
            left_out |= refused
    if not planned:
        name, reason = first_reason or ("it", "there is no unit")
        raise ConfigError(
            "units",
            [u.name for u in units][:3],
            f"{recipe} can convert none of them ({name}: {reason}).",
            "Choose other units, or another recipe.",
        )
    if left_out:
        name, reason = next(iter(left_out.items()))
        more = f" (and {len(left_out) - 1} more)" if len(left_out) > 1 else ""
        warnings.warn(f"{recipe} leaves {name}{more} as it is: {reason}.", TrimtabWarning, stacklevel=5)
    warn_about_heads(model, units)
    return planned
