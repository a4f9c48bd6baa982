"""Finding the units of a model: which modules are watched as one, in which order, under which name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from trimtab.errors import ConfigError, nearest_names, verbatim

__all__ = ["Selection", "Unit", "clean_fqn", "find_units", "is_projection"]

Selection = Callable[[nn.Module, str], bool] | Sequence[str] | None
"""How a user picks units: a filter ``f(module, fqn)``, a list of names, or None for the projections of every block.

``find_units`` says what None picks in a model with adapters, with fused experts, or without blocks.
"""

# Wrappers put these into names; without them a checkpoint finds its units again under another wrapper.
_WRAPPERS = re.compile(r"(?:^|\.)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")
# A router's gate decides where tokens go: it stays in high precision, and is no projection.
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
# Under this name an adapter's layer (LoRA and its kin in peft) holds the layer that it adapts.
_ADAPTED = "base_layer"
_NORM_OR_EMBEDDING = re.compile(r"norm(?!al)|embed", re.IGNORECASE)


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
        """Number of elements of its parameters: frozen ones too, and whole ones where they are sharded DTensors."""
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
    """Whether a module is a projection: a linear layer inside a numbered block (``layers.3.…``) that is no router.

    Output heads, embeddings and norms are outside blocks or not linear, so they stay out.
    """
    return is_linear(module) and _in_block(fqn)


def _in_block(fqn: str) -> bool:
    """Whether the name is inside a numbered block, and not that of a router or of a part of one."""
    parts = fqn.split(".")
    block = next((i for i, p in enumerate(parts) if p.isdigit()), len(parts))
    return block < len(parts) and _ROUTERS.isdisjoint(parts[block:])


def find_units(model: nn.Module, selection: Selection = None) -> list[Unit]:
    """The units of ``model``, from the input to the loss (the order in which modules are registered).

    By default they are, inside numbered blocks:

    - every projection (see ``is_projection``);
    - every projection with adapters (a module whose child ``base_layer`` is what it adapts, as peft has it), as one
      unit under the projection's name, whose gradient is that of its adapters;
    - every module that holds fused experts (a parameter of three or more dimensions, as in transformers' mixtures of
      experts), as one unit. Its norm is that of all its experts together, so a single expert can hide in it.

    Routers, norms, embeddings and convolutions stay out, and so does what has no trainable parameter at the time. A
    model with nothing of the kind has its linear layers but the output head, or else its leaves, as units. In a model
    that is frozen throughout, frozen modules are picked as if they were not.

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
        picked = _default(model, modules, owners)
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
                describe_filter(selection),
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


def _default(model: nn.Module, modules: dict[str, nn.Module], owners: dict[str, nn.Module]) -> list[str]:
    """The names that are picked where the user picks none."""
    adapters = set(_outermost([n for n in owners if f"{n}.{_ADAPTED}" in modules]))
    # An adapted layer is one thing: its parts are no candidates.
    whole = {n: m for n, m in owners.items() if not _inside(n, adapters)}
    linear = {n: m for n, m in whole.items() if is_linear(m) or (n in adapters and _adapts_projection(n, modules))}
    in_block = {n for n in linear if _in_block(n)}
    # A block that owns such a parameter itself is not watched as one: its projections are.
    around = {outer for n in in_block for outer in _ancestors(n)}
    experts = [n for n, m in whole.items() if n not in around and _in_block(n) and _holds_experts(m)]
    in_block.update(_outermost(experts))
    head = output_head(model)
    stages = (
        [n for n in whole if n in in_block],
        # A model without numbered blocks: every linear layer, or else every leaf that owns parameters.
        [n for n, m in linear.items() if m is not head],
        [n for n, m in whole.items() if n in adapters or not any(True for _ in m.children())],
    )
    for stage in stages:
        if trained := [n for n in stage if any(p.requires_grad for p in owners[n].parameters())]:
            return trained
    return next((stage for stage in stages if stage), [])


def _adapts_projection(name: str, modules: dict[str, nn.Module]) -> bool:
    """Whether what the adapter ``name`` adapts is no norm and no embedding: a quantized layer need not be linear."""
    while f"{name}.{_ADAPTED}" in modules:
        name = f"{name}.{_ADAPTED}"
    return not _NORM_OR_EMBEDDING.search(type(modules[name]).__name__)


def _holds_experts(module: nn.Module) -> bool:
    """Whether the module itself owns a weight of three or more dimensions that is no kernel of a convolution.

    A dimension of length 1 does not count: position embeddings and layer scales have it.
    """
    if isinstance(module, (nn.modules.conv._ConvNd, nn.utils.parametrize.ParametrizationList)):
        return False
    if _NORM_OR_EMBEDDING.search(type(module).__name__):
        return False
    return any(
        sum(size > 1 for size in p.shape) >= 3
        for p in module.parameters(recurse=False)
        if not isinstance(p, nn.parameter.UninitializedParameter)
    )


def _existing(name: str, modules: dict[str, nn.Module], owners: dict[str, nn.Module]) -> str:
    if name in owners:
        return name
    if name in modules:
        raise ConfigError("units", name, "a unit owns parameters, and this module has none.", "Leave it out.")
    near = nearest_names(name, owners) or list(owners)[:3]
    raise ConfigError("units", name, "the model has no such module.", f"The nearest names are {', '.join(near)}.")


def _ancestors(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _inside(name: str, names: set[str]) -> bool:
    return any(outer in names for outer in _ancestors(name))


def _outermost(names: list[str]) -> list[str]:
    every = set(names)
    return [n for n in names if not _inside(n, every)]


def _merge_tied(names: list[str], owners: dict[str, nn.Module]) -> list[Unit]:
    """Units in the order of ``names``; those that share a parameter, directly or through others, become one."""
    first = list(range(len(names)))  # a forest: each points towards the first name of its group

    def root(i: int) -> int:
        while first[i] != i:
            first[i] = first[first[i]]
            i = first[i]
        return i

    owner: dict[int, int] = {}
    for i, name in enumerate(names):
        for p in owners[name].parameters():
            a, b = root(owner.setdefault(id(p), i)), root(i)
            first[max(a, b)] = min(a, b)
    groups: dict[int, list[str]] = {}
    for i, name in enumerate(names):
        groups.setdefault(root(i), []).append(name)
    return [Unit(name=g[0], modules=tuple(owners[n] for n in g), module_names=tuple(g)) for g in groups.values()]


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
    if not callable(selection):
        return f"{len(selection)} names"
    # Neither a lambda's repr nor an object's would say more than where it is in memory.
    return verbatim(getattr(selection, "__name__", type(selection).__name__))
