"""Units larger than a projection: which of the picked modules make one unit together, and what it is called."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from torch import nn

from trimtab.errors import ConfigError, nearest_names

__all__ = ["GROUPINGS", "Grouping", "block_of", "check_unit", "group_names"]

Grouping = Literal["projection", "expert", "half", "block", "layer"]
"""How much is one unit: a projection, an expert, the attention or the MLP half of a block, or a block.

"layer" is "block" under the name that papers on adapters give it (decoder layer).
"""

GROUPINGS: tuple[str, ...] = get_args(Grouping)

_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
# `post_attention_layernorm` stands behind the attention, and is no part of it.
_NORM = re.compile(r"norm", re.IGNORECASE)


def check_unit(unit: str) -> None:
    """Refuse what is no ``Grouping`` as the ``unit`` of a recipe.

    Raises: ConfigError: when it is none.
    """
    if unit not in GROUPINGS:
        near = nearest_names(str(unit), GROUPINGS)
        remedy = f"Did you mean {near[0]!r}?" if near else "Use one of them."
        raise ConfigError("unit", unit, f"it is one of {', '.join(map(repr, GROUPINGS))}.", remedy)


def group_names(
    names: Sequence[str], modules: Mapping[str, nn.Module], grouping: Grouping
) -> list[tuple[str, list[str]]]:
    """The names of each group's members, under the group's name, in the order of the groups' first members.

    - "block": what was picked inside the same numbered block; named as the block.
    - "half": of that, what lies below a module called attention (each such module is a half of its own), and the rest.
      It is named as the smallest module that holds its members, or as its first member where that module holds
      something of another half too.
    - "expert": what was picked inside the same numbered expert of a block; named as the expert.

    What is inside no such thing is a group of its own.

    Args:
        names: Names of the picked modules, without those of wrappers, from the input to the loss.
        modules: Every module of the model under such a name; the model itself under "".
        grouping: How much is one unit.

    Example:
        >>> block = nn.ModuleDict({"q": nn.Linear(2, 2), "o": nn.Linear(2, 2)})
        >>> modules = dict(nn.ModuleDict({"layers": nn.ModuleList([block])}).named_modules())
        >>> group_names(["layers.0.q", "layers.0.o"], modules, "block")
        [('layers.0', ['layers.0.q', 'layers.0.o'])]
    """
    if grouping == "projection":
        return [(name, [name]) for name in names]
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        groups.setdefault(_group_of(name, modules, grouping), []).append(name)
    halves = _halves_below(modules) if grouping == "half" else {}
    named = []
    for (kind, key), members in groups.items():
        if kind in ("attention", "rest"):
            holder = _smallest_holder(members)
            key = holder if len(members) == 1 or len(halves.get(holder, ())) <= 1 else members[0]
        named.append((key, members))
    return named


def block_of(name: str, modules: Mapping[str, nn.Module]) -> str | None:
    """The name of the numbered block that holds the module ``name``; None where none does.

    The block's number is the first that counts the entries of a list or dictionary of modules, or else the first there
    is: a model may be a step of an ``nn.Sequential``, whose number then comes first. Numbers of experts count no
    blocks.
    """
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    if not numbers:
        return None
    numbers = [i for i in numbers if not any(map(_is_expert, parts[:i]))] or numbers
    lists = (i for i in numbers if isinstance(modules.get(".".join(parts[:i])), (nn.ModuleList, nn.ModuleDict)))
    return ".".join(parts[: next(lists, numbers[0]) + 1])


def _group_of(name: str, modules: Mapping[str, nn.Module], grouping: Grouping) -> tuple[str, str]:
    """What kind of group the module belongs to, and what tells it from others of the kind."""
    block = block_of(name, modules)
    if block is None:
        return "itself", name
    if grouping == "half":
        return _half_of(name, block, modules)
    if grouping == "expert":
        parts = name.split(".")
        first = block.count(".") + 1
        for i in range(first + 1, len(parts)):
            if parts[i].isdigit() and any(map(_is_expert, parts[first:i])):
                return "expert", ".".join(parts[: i + 1])
        return "itself", name
    return "block", block


def _half_of(name: str, block: str, modules: Mapping[str, nn.Module]) -> tuple[str, str]:
    parts = name.split(".")
    for i in range(block.count(".") + 1, len(parts)):
        if _ATTENTION.search(parts[i]) and not _NORM.search(parts[i]):
            # Projections called attn_q and attn_out, directly in the block, are one attention.
            is_part = i == len(parts) - 1 and _is_single(modules[name])
            return "attention", ".".join(parts[: i if is_part else i + 1])
    return "rest", block


def _halves_below(modules: Mapping[str, nn.Module]) -> dict[str, set[tuple[str, str]]]:
    """Of which halves something lies at or below each module that is inside a block: picked or not, frozen or not."""
    below: dict[str, set[tuple[str, str]]] = {}
    for name, module in modules.items():
        block = block_of(name, modules)
        if block is None or not (module._parameters or module._buffers):
            continue
        half = _half_of(name, block, modules)
        parts = name.split(".")
        for i in range(block.count(".") + 1, len(parts) + 1):
            below.setdefault(".".join(parts[:i]), set()).add(half)
    return below


def _smallest_holder(names: Sequence[str]) -> str:
    """The longest name that all ``names`` equal or are inside of."""
    parts = [n.split(".") for n in names]
    # Whatever sorts between two names shares what these two have in common.
    first, last = min(parts), max(parts)
    common = 0
    while common < min(len(first), len(last)) and first[common] == last[common]:
        common += 1
    return ".".join(first[:common])


def _is_single(module: nn.Module) -> bool:
    """Whether the module is one layer, adapted or not, and no container of layers."""
    return hasattr(module, "base_layer") or next(module.children(), None) is None


def _is_expert(part: str) -> bool:
    return "expert" in part.lower()
