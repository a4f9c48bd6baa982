"""Finding the units of a model: which modules are watched as one, in which order, under which name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from trimtab.errors import ConfigError, nearest_names, verbatim

__all__ = ["Selection", "Unit", "clean_fqn", "find_units", "is_projection"]

Selection = Callable[[nn.Module, str], bool] | Sequence[str] | None
"""How a user picks units: a filter ``f(module, fqn)``, a list of names, or None for the projections of every block."""

# Wrappers put these into names; without them a checkpoint finds its units again under another wrapper.
_WRAPPERS = re.compile(r"(?:^|\.)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")
# A router's gate decides where tokens go: it stays in high precision, and is no projection.
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Unit:
    """An operator, block or layer that is watched as one.

    Args:
        name: Fully qualified name of its first module, without the names of wrappers.
        modules: Its modules; more than one when they share a weight.
        module_names: Their names, in the same order.
    """

    name: str
    modules: tuple[nn.Module, ...]
    module_names: tuple[str, ...]

    def parameters(self) -> list[nn.Parameter]:
        """The unit's parameters, each once; read anew each time, since a wrapper may replace them."""
        return list({id(p): p for module in self.modules for p in module.parameters()}.values())

    @property
    def num_parameters(self) -> int:
        """Number of elements of its parameters (of the local shard, where they are sharded)."""
        return sum(p.numel() for p in self.parameters())


def clean_fqn(name: str) -> str:
    """A module's name without what wrappers add to it.

    Example:
        >>> clean_fqn("module._orig_mod.layers.0.q_proj")
        'layers.0.q_proj'
    """
    name = _WRAPPERS.sub("", name).removeprefix(".")
    while name.startswith("module."):
        name = name[len("module.") :]
    return name


def linear_class(module: nn.Module) -> type[nn.Module] | None:
    """The linear class that ``module`` is of or inherits: torch's, or GPT-2's transposed one in transformers."""
    for c in type(module).__mro__:
        if c is nn.Linear or (c.__name__ == "Conv1D" and c.__module__ == "transformers.pytorch_utils"):
            return c
    return None


def is_linear(module: nn.Module) -> bool:
    """Whether ``module`` is a linear layer."""
    return linear_class(module) is not None


def is_projection(module: nn.Module, fqn: str) -> bool:
    """The default selection: a linear layer inside a numbered block (``layers.3.…``) that is no router.

    Output heads, embeddings and norms are outside blocks or not linear, so they stay out.
    """
    parts = fqn.split(".")
    return is_linear(module) and any(p.isdigit() for p in parts) and parts[-1] not in _ROUTERS


def find_units(model: nn.Module, selection: Selection = None) -> list[Unit]:
    """The units of ``model``, from the input to the loss (the order in which modules are registered).

    A filter is asked about linear layers first; only if it picks none of them is it asked about every module that owns
    parameters, and then the outermost picked modules are the units. Modules that share a weight are one unit.

    Args:
        model: The model, wrapped or not.
        selection: See ``Selection``.

    Returns: At least one unit; names are unique.

    Raises: ConfigError: when nothing is selected, a name does not exist or owns no parameter, or two named modules
        contain one another.
    """
    # What is inside a wrapper has the wrapper's name, and comes later.
    modules = {clean_fqn(name): module for name, module in model.named_modules()}
    modules.pop("", None)
    owners = {name: module for name, module in modules.items() if next(module.parameters(), None) is not None}
    if selection is None:
        picked = [n for n, m in owners.items() if is_projection(m, n)]
        # A model without numbered blocks: every linear layer, or else every leaf that owns parameters.
        picked = picked or [n for n, m in owners.items() if is_linear(m) and m is not output_head(model)]
        picked = picked or [n for n, m in owners.items() if not any(True for _ in m.children())]
        if not picked:
            raise ConfigError(
                "model",
                type(model).__name__,
                "a watched model has modules that own parameters.",
                "Pass a model that does.",
            )
    elif callable(selection):
        picked = [n for n, m in owners.items() if is_linear(m) and selection(m, n)]
        if not picked:
            picked = _outermost([n for n, m in owners.items() if selection(m, n)])
        if not picked:
            linear = [n for n, m in owners.items() if is_linear(m)]
            some = ", ".join(linear[:3] or list(owners)[:3])
            raise ConfigError(
                "units",
                selection,
                f"the filter matches no module of this {type(model).__name__}.",
                f"Its linear layers have names such as {some}.",
            )
    else:
        if isinstance(selection, str):
            raise ConfigError("units", selection, "a list of names or a filter is needed.", f"Write [{selection!r}].")
        picked = [_existing(clean_fqn(n), modules, owners) for n in selection]
        if not picked:
            raise ConfigError("units", [], "at least one unit is needed.", "Name one, or leave units out.")
        inner = sorted(set(picked) - set(_outermost(picked)))
        if inner:
            raise ConfigError(
                "units", inner[0], "a parameter belongs to one unit, and another named unit contains it.", "Name one."
            )
        chosen = set(picked)
        picked = [n for n in modules if n in chosen]
    return _merge_tied(picked, owners)


def _existing(name: str, modules: dict[str, nn.Module], owners: dict[str, nn.Module]) -> str:
    if name in owners:
        return name
    if name in modules:
        raise ConfigError("units", name, "a unit owns parameters, and this module has none.", "Leave it out.")
    near = nearest_names(name, owners) or list(owners)[:3]
    raise ConfigError("units", name, "the model has no such module.", f"The nearest names are {', '.join(near)}.")


def _outermost(names: list[str]) -> list[str]:
    kept: set[str] = set()
    for name in sorted(names, key=lambda n: n.count(".")):
        parts = name.split(".")
        if not any(".".join(parts[:i]) in kept for i in range(1, len(parts))):
            kept.add(name)
    return [n for n in names if n in kept]


def _merge_tied(names: list[str], owners: dict[str, nn.Module]) -> list[Unit]:
    groups: list[tuple[list[str], set[int]]] = []
    for name in names:
        parameters = {id(p) for p in owners[name].parameters()}
        tied = [group for group in groups if group[1] & parameters]
        if not tied:
            groups.append(([name], parameters))
            continue
        first = tied[0]
        for group in tied[1:]:
            first[0].extend(group[0])
            first[1].update(group[1])
            groups.remove(group)
        first[0].append(name)
        first[1].update(parameters)
    return [Unit(name=g[0], modules=tuple(owners[n] for n in g), module_names=tuple(g)) for g, _ in groups]


def output_head(model: nn.Module) -> nn.Module | None:
    """The output head of ``model``, wrapped or not, where one of its modules says which it is."""
    for module in model.modules():
        get = getattr(module, "get_output_embeddings", None)
        try:
            head = get() if callable(get) else None
        except (NotImplementedError, AttributeError):
            continue
        if head is not None:
            return head
    return None


def describe_filter(selection: Selection) -> str:
    """A short name of a selection, for the record."""
    if selection is None:
        return "projections"
    return (
        verbatim(getattr(selection, "__name__", repr(selection))) if callable(selection) else f"{len(selection)} names"
    )
