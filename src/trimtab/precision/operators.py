"""Which modules' products a recipe runs on another path for a unit: those of its projections, adapted ones and experts.

A unit says what is watched, which is what is trained; what computes may be frozen. A decoder layer whose queries have
adapters is watched by the adapters' gradients, while its frozen projections are what a recipe runs in low precision.
"""

from __future__ import annotations

from torch import nn

from trimtab.precision.units import (
    Unit,
    candidates,
    clean_fqn,
    innermost_base,
    is_linear,
    num_experts,
    output_head,
)

__all__ = ["operators_of"]


def operators_of(model: nn.Module, unit: Unit) -> tuple[nn.Module, ...]:
    """The modules whose products make up ``unit``, frozen or not.

    - Of a projection, the linear layer; of tied ones, each.
    - Of an adapted projection, the layer that is adapted, and never a part of the adapter.
    - Of a module that holds others, and of a group, what ``find_units`` would pick in it by default: no router, norm,
      embedding or output head. A group that is named as the module that holds it has that module's frozen layers too.
    - Of experts, one or all, the module that stacks their weights.

    Args:
        model: The model, wrapped or not.
        unit: One of its units.

    Returns: From the input to the loss, each once; none where the unit computes no such product, as a norm does not.

    Example:
        >>> from trimtab.precision import find_units
        >>> block = nn.ModuleDict({"up": nn.Linear(2, 4), "down": nn.Linear(4, 2), "norm": nn.LayerNorm(2)})
        >>> model = nn.ModuleDict({"layers": nn.ModuleList([block])})
        >>> [unit] = find_units(model, "block")
        >>> operators_of(model, unit) == (block["up"], block["down"])
        True
    """
    if unit.expert is not None:
        found = list(unit.modules)
    elif unit.name not in unit.module_names:
        found = _in_group(model, unit)
    else:
        found = []
        for name, module in zip(unit.module_names, unit.modules, strict=True):
            found += [module] if is_linear(module) else _in_container(model, name, module)
    return tuple({id(module): module for module in found}.values())


def _in_container(model: nn.Module, name: str, module: nn.Module) -> list[nn.Module]:
    """The operators of a module that is no linear layer: an adapter, a container of others, or experts."""
    below = _modules_at(name, module)
    in_block, anywhere, _ = candidates(below, None)
    if in_block:
        return [below[innermost_base(n, below)] for n in in_block]
    head = output_head(model)
    if found := [below[innermost_base(n, below)] for n in anywhere if n == name or below[n] is not head]:
        return found
    return [module] if num_experts(module) is not None else []


def _in_group(model: nn.Module, unit: Unit) -> list[nn.Module]:
    """The operators of modules that were grouped under the name of the module that holds them."""
    modules = _modules_at(unit.name, _module_called(model, unit.name))
    # Others are tied to these by a weight.
    for name, module in zip(unit.module_names, unit.modules, strict=True):
        if name not in modules:
            modules |= _modules_at(name, module)
    members = frozenset(unit.module_names)
    # A filter may have picked parts of an adapted layer, or modules that hold several layers.
    around = {outer for member in members for outer in _up_from(member)}
    found = []
    for name in candidates(modules, None)[0]:
        is_frozen = not any(p.requires_grad for p in modules[name].parameters())
        if name in around or any(outer in members or (is_frozen and outer == unit.name) for outer in _up_from(name)):
            found.append(modules[innermost_base(name, modules)])
    return found


def _modules_at(name: str, module: nn.Module) -> dict[str, nn.Module]:
    """``module``, which is called ``name``, and what is below it, by name."""
    return {clean_fqn(f"{name}.{inner}" if inner else name): m for inner, m in module.named_modules()}


def _module_called(model: nn.Module, name: str) -> nn.Module:
    """The module of that name; looks nowhere else, for a model of many experts has very many modules."""
    found, open_ends = model, [("", model)]
    while open_ends:
        prefix, module = open_ends.pop()
        for child_name, child in module.named_children():
            full = f"{prefix}.{child_name}".removeprefix(".")
            clean = clean_fqn(full)
            # A wrapper adds nothing to the name of what it holds, which has that name too.
            if clean == name:
                found = child
            if clean in ("", "module", name) or name.startswith(f"{clean}."):
                open_ends.append((full, child))
    return found


def _up_from(name: str) -> list[str]:
    """``name`` and the names of what holds it."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(len(parts), 0, -1)]
