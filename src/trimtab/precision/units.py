"""Finding the units of a model: which modules are watched as one, in which order, under which name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from torch import nn

from trimtab.errors import ConfigError, nearest_names, verbatim
from trimtab.precision.grouping import GROUPINGS, Grouping, group_names

__all__ = ["Selection", "Unit", "clean_fqn", "find_units", "is_projection"]

Selection = Callable[[nn.Module, str], bool] | Sequence[str] | Grouping | None
"""How a user picks units: a filter ``f(module, fqn)``, a list of names, or None for the projections of every block.

A word of ``Grouping``, such as "block", picks what None does, and says how much of it is one unit. ``find_units`` says
what None picks in a model with adapters, with stacked experts, or without blocks.
"""

# Wrappers put these into names; without them a checkpoint finds its units again under another wrapper.
_WRAPPERS = re.compile(r"(?:^|\.)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")
# A router's gate decides where tokens go: it stays in high precision, and is no projection.
_ROUTER = re.compile(r"gate|shared_expert_gate|(?:.*_)?router(?:_.*)?")
# Under this name an adapter's layer (LoRA and its kin in peft) holds the layer that it adapts.
_ADAPTED = "base_layer"
_NORM_OR_EMBEDDING = re.compile(r"norm(?!al)|embed", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Unit:
    """An operator, block or layer that is watched as one.

    Args:
        name: Fully qualified name of its first module, without the names of wrappers; that of what holds its modules
            where they were grouped; for an expert ``<name of the experts>.<its index>``.
        modules: Its modules; more than one when they share a weight or were grouped.
        module_names: Their names, in the same order.
        expert: For one expert of a module that stacks the weights of many: its index, which is that of its row in each
            stacked parameter.
    """

    name: str
    modules: tuple[nn.Module, ...]
    module_names: tuple[str, ...]
    expert: int | None = None

    def parameters(self) -> list[nn.Parameter]:
        """The unit's parameters, each once; read anew each time, since a wrapper may replace them.

        Of an expert, the stacked parameters, of which only row number ``expert`` is its own.
        """
        found = {id(p): p for module in self.modules for p in module.parameters()}.values()
        if self.expert is None:
            return list(found)
        counts = {num_experts(module) for module in self.modules} - {None}
        return [p for p in found if p.dim() and p.shape[0] in counts]

    @property
    def num_parameters(self) -> int:
        """Number of elements of its parameters: frozen ones too, and whole ones where they are sharded DTensors."""
        return sum(p.numel() // (1 if self.expert is None else p.shape[0]) for p in self.parameters())


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
    return block < len(parts) and not any(_ROUTER.fullmatch(part) for part in parts[block:])


def find_units(model: nn.Module, selection: Selection = None, grouping: Grouping = "projection") -> list[Unit]:
    """The units of ``model``, from the input to the loss (the order in which modules are registered).

    By default they are, inside numbered blocks:

    - every projection (see ``is_projection``);
    - every projection with adapters (a module whose child ``base_layer`` is what it adapts, as peft has it), as one
      unit under the projection's name, whose gradient is that of its adapters;
    - every expert of a module that stacks the weights of many (in parameters of three or more dimensions that agree in
      the first, as in transformers' mixtures of experts), as one unit: its row of every parameter whose first
      dimension is the number of experts. Where the parameters do not agree, the module is one unit.

    Routers, norms, embeddings and convolutions stay out, and so does what has no trainable parameter at the time. A
    model with nothing of the kind has its linear layers but the output head, or else its leaves, as units. In a model
    that is frozen throughout, frozen modules are picked as if they were not.

    A filter is asked about linear layers first; only if it picks none of them is it asked about every module that owns
    parameters, and then the outermost picked modules are the units. Modules that share a weight are one unit.

    ``grouping`` merges what was picked by default or by a filter into larger units (see
    ``trimtab.precision.grouping.group_names``): with "half" or "block", the experts of a module are no units of their
    own. A list of names says itself how large a unit is: it may name a decoder layer, the module that holds the
    experts, or one of them, and is never grouped.

    Args:
        model: The model, wrapped or not.
        selection: See ``Selection``; a grouping given there wins over ``grouping``.
        grouping: How much is one unit.

    Returns: At least one unit; names are unique.

    Raises: ConfigError: when nothing is selected, a name does not exist or owns no parameter, two named modules contain
        one another, or there is no such grouping.
    """
    if isinstance(selection, str) and selection in GROUPINGS:
        selection, grouping = None, cast(Grouping, selection)
    if grouping not in GROUPINGS:
        raise ConfigError("grouping", grouping, f"a unit is one of {', '.join(GROUPINGS)}.", _meant(grouping))
    modules = named_modules(model)
    owners = owners_of(modules)
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
            raise ConfigError(
                "units",
                selection,
                "a list of names or a filter is needed.",
                f"Write [{selection!r}], or say how much is one unit. {_meant(selection)}",
            )
        names = list(selection) if isinstance(selection, Iterable) else [selection]
        if not all(isinstance(n, str) for n in names):
            raise ConfigError(
                "units",
                selection,
                "a list of names or a filter is needed.",
                "Write the names of modules, such as guard.units has them.",
            )
        picked = [_existing(clean_fqn(n), modules, owners) for n in names]
        if not picked:
            raise ConfigError("units", [], "at least one unit is needed.", "Name one, or leave units out.")
        inner = sorted(set(picked) - set(_outermost(picked)))
        if inner:
            raise ConfigError(
                "units", inner[0], "a parameter belongs to one unit, and another named unit contains it.", "Name one."
            )
        return _named_units(picked, modules, owners)
    groups = group_names(picked, {"": model} | modules, grouping)
    units = _merge_tied(groups, owners)
    # A group of experts that are all its members is a group all the same.
    return units if grouping in ("half", "block", "layer") else [one for unit in units for one in _experts_of(unit)]


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules below ``model`` by their names without those of wrappers."""
    # What is inside a wrapper has the wrapper's name, and comes later.
    modules = {clean_fqn(name): module for name, module in model.named_modules()}
    modules.pop("", None)
    return modules


def owners_of(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Those of ``modules`` that own parameters, or hold others that do."""
    return {name: module for name, module in modules.items() if next(module.parameters(), None) is not None}


def candidates(modules: Mapping[str, nn.Module], head: nn.Module | None) -> tuple[list[str], list[str], list[str]]:
    """What may be picked where the user picks nothing, frozen or not: the first of these lists that is not empty.

    Args:
        modules: Modules by name, from the input to the loss: those of a model, or of a part of one.
        head: The model's output head, if it says which it is.

    Returns: In numbered blocks: projections, adapted ones, and modules that hold experts. Anywhere: linear layers but
        the head. Leaves that own parameters.
    """
    owners = owners_of(modules)
    adapters = set(_outermost([n for n in owners if f"{n}.{_ADAPTED}" in modules]))
    # An adapted layer is one thing: its parts are no candidates.
    whole = {n: m for n, m in owners.items() if not _inside(n, adapters)}
    linear = {n: m for n, m in whole.items() if is_linear(m) or (n in adapters and _adapts_projection(n, modules))}
    in_block = {n for n in linear if _in_block(n)}
    # A block that owns such a parameter itself is not watched as one: its projections are.
    around = {outer for n in in_block for outer in _ancestors(n)}
    experts = [n for n, m in whole.items() if n not in around and _in_block(n) and _holds_experts(m)]
    in_block.update(_outermost(experts))
    return (
        [n for n in whole if n in in_block],
        # A model without numbered blocks: every linear layer, or else every leaf that owns parameters.
        [n for n, m in linear.items() if m is not head],
        [n for n, m in whole.items() if n in adapters or not any(True for _ in m.children())],
    )


def _default(model: nn.Module, modules: dict[str, nn.Module], owners: dict[str, nn.Module]) -> list[str]:
    """The names that are picked where the user picks none."""
    head = output_head(model)
    stages = candidates(modules, head)
    if not any(stages[:2]) and _first_said(model, "get_output_embeddings") is None:
        stages = candidates(modules, None)  # what only looks like a head is all that there is
    for stage in stages:
        if trained := [n for n in stage if any(p.requires_grad for p in owners[n].parameters())]:
            return trained
    return next((stage for stage in stages if stage), [])


def _named_units(names: Iterable[str], modules: dict[str, nn.Module], owners: dict[str, nn.Module]) -> list[Unit]:
    """The units that the user named one by one: modules, and single experts of modules that stack many."""
    chosen = set(names)
    parts = [name.rpartition(".") for name in chosen if name not in modules]
    holders = {holder for holder, _, _ in parts}
    units = _merge_tied([(n, [n]) for n in modules if n in chosen or n in holders], owners)
    return [
        one
        for unit in units
        for one in (_experts_of(unit) if unit.name in holders else [unit])
        if one.name in chosen or one.expert is None
    ]


def _experts_of(unit: Unit) -> list[Unit]:
    """The experts of a unit that consists of stacked ones, or else the unit itself."""
    counts = {num_experts(module) for module in unit.modules}
    count = counts.pop()
    if count is None or counts:
        return [unit]
    return [
        Unit(name=f"{unit.name}.{i}", modules=unit.modules, module_names=unit.module_names, expert=i)
        for i in range(count)
    ]


def num_experts(module: nn.Module) -> int | None:
    """How many experts' weights ``module`` stacks; None where it holds none, or where its parameters disagree."""
    if not _holds_experts(module):
        return None
    counts = {p.shape[0] for p in module.parameters() if _is_stacked(p)}
    return counts.pop() if len(counts) == 1 else None


def _adapts_projection(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether what the adapter ``name`` adapts is no norm and no embedding: a quantized layer need not be linear."""
    return not _NORM_OR_EMBEDDING.search(type(modules[innermost_base(name, modules)]).__name__)


def innermost_base(name: str, modules: Mapping[str, nn.Module]) -> str:
    """The name of the layer that the adapter ``name`` adapts in the end, or ``name`` where it is no adapter."""
    while f"{name}.{_ADAPTED}" in modules:
        name = f"{name}.{_ADAPTED}"
    return name


def _holds_experts(module: nn.Module) -> bool:
    """Whether the module itself owns a weight of three or more dimensions that is no kernel of a convolution."""
    if isinstance(module, (nn.modules.conv._ConvNd, nn.utils.parametrize.ParametrizationList)):
        return False
    if _NORM_OR_EMBEDDING.search(type(module).__name__):
        return False
    return any(_is_stacked(p) for p in module.parameters(recurse=False))


def _is_stacked(parameter: nn.Parameter) -> bool:
    """Whether the parameter has three or more dimensions.

    One of length 1 does not count: position embeddings and layer scales have it.
    """
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        return False
    return sum(size > 1 for size in parameter.shape) >= 3


def _existing(name: str, modules: dict[str, nn.Module], owners: dict[str, nn.Module]) -> str:
    if name in owners:
        return name
    holder, _, index = name.rpartition(".")
    if name not in modules and holder in owners and index.isdecimal():
        count = num_experts(owners[holder])
        if count is not None and str(int(index)) == index and int(index) < count:
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


def _merge_tied(groups: Sequence[tuple[str, list[str]]], owners: dict[str, nn.Module]) -> list[Unit]:
    """A unit a group, in their order; those that share a parameter, directly or through others, become one."""
    first = list(range(len(groups)))  # a forest: each points towards the first group that it is tied to

    def root(i: int) -> int:
        while first[i] != i:
            first[i] = first[first[i]]
            i = first[i]
        return i

    owner: dict[int, int] = {}
    for i, (_, members) in enumerate(groups):
        for name in members:
            for p in owners[name].parameters():
                a, b = root(owner.setdefault(id(p), i)), root(i)
                first[max(a, b)] = min(a, b)
    tied: dict[int, list[str]] = {}
    for i, (_, members) in enumerate(groups):
        tied.setdefault(root(i), []).extend(members)
    return [
        Unit(name=groups[i][0], modules=tuple(owners[n] for n in names), module_names=tuple(names))
        for i, names in tied.items()
    ]


def output_head(model: nn.Module) -> nn.Module | None:
    """The output head of ``model``, wrapped or not: what it says that it is, or else what looks like it.

    Of a model that does not say: the last of its linear layers, where that is outside blocks and has as many outputs as
    its largest embedding has rows, or an embedding's weight.
    """
    said = _first_said(model, "get_output_embeddings")
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    if said is not None or not embeddings:
        return said
    linear = [(n, m) for n, m in named_modules(model).items() if isinstance(m, nn.Linear)]
    if not linear or _in_block(linear[-1][0]):
        return None
    last = linear[-1][1]
    num_words = max(m.num_embeddings for m in embeddings)
    is_head = last.out_features == num_words or any(m.weight is last.weight for m in embeddings)
    return last if is_head else None


def input_embeddings(model: nn.Module) -> nn.Module | None:
    """The input embeddings of ``model``, wrapped or not, where one of its modules says which they are."""
    return _first_said(model, "get_input_embeddings")


def _first_said(model: nn.Module, getter: str) -> nn.Module | None:
    """What the first module that has a ``getter`` and knows the answer says."""
    for module in model.modules():
        get = getattr(module, getter, None)
        try:
            found = get() if callable(get) else None
        except (NotImplementedError, AttributeError):
            continue
        if found is not None:
            return found
    return None


def describe_filter(selection: Selection, grouping: Grouping = "projection") -> str:
    """A short name of a selection and of how it is grouped, for the record.

    Example:
        >>> describe_filter("block"), describe_filter(None, "half"), describe_filter(["a", "b"], "half")
        ('projections by block', 'projections by half', '2 names')
    """
    if isinstance(selection, str) and selection in GROUPINGS:
        selection, grouping = None, cast(Grouping, selection)
    if selection is not None and not callable(selection):
        return f"{len(selection)} names"
    # Neither a lambda's repr nor an object's would say more than where it is in memory.
    picked = "projections" if selection is None else getattr(selection, "__name__", type(selection).__name__)
    by = {"projection": "", "layer": " by block"}.get(grouping, f" by {grouping}")
    return verbatim(f"{picked}{by}")


def _meant(word: object) -> str:
    """Which grouping ``word`` may have been meant as, as a sentence."""
    near = nearest_names(str(word), GROUPINGS) or GROUPINGS
    return f"Choose {' or '.join(map(repr, near))}."
