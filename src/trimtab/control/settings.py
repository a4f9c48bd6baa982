"""Settings of a policy read back from plain values, and names of units checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from trimtab.control.policy import Policy
from trimtab.errors import ConfigError, nearest_names, verbatim

__all__ = ["check_names", "read_settings"]


def read_settings(values: Mapping[str, Any], cls: type[Any], kind: str) -> dict[str, Any]:
    """What to make ``cls``, a dataclass whose ``scores`` are a ``Policy``, of.

    Args:
        values: What its ``to_dict`` gave; ``kind`` may be missing, and so may what has a default.
        cls: The class.
        kind: The kind that its ``to_dict`` writes.

    Raises:
        ConfigError: when it is another kind's, or a key is unknown (with the nearest valid one) or missing.
    """
    if not isinstance(values, Mapping):
        raise ConfigError("policy", values, "it is a mapping from settings to values.", "Pass a dict.")
    read = dict(values)
    given = read.pop("kind", kind)
    if given != kind:
        raise ConfigError("kind", given, f"{cls.__name__} reads {kind!r}.", "Use policy_from_dict for any kind.")
    known = {item.name: item for item in fields(cls)}
    for key in read:
        if key not in known:
            near = nearest_names(str(key), known)
            remedy = f"Did you mean {near[0]!r}?" if near else f"The settings are {', '.join(known)}."
            raise ConfigError(str(key), read[key], f"{cls.__name__} has no such setting.", remedy)
    for name, item in known.items():
        if name not in read and item.default is MISSING and item.default_factory is MISSING:
            raise ConfigError(name, verbatim("(missing)"), f"{cls.__name__} needs it.", f"Add {name!r}.")
    if isinstance(read.get("scores"), Mapping):
        read["scores"] = Policy.from_dict(read["scores"])
    return read


def check_names(setting: str, given: Iterable[str], units: Sequence[str]) -> None:
    """Check that every name of ``given`` is that of a unit.

    Raises:
        ConfigError: when one is not, with the nearest names.
    """
    known = set(units)
    for name in given:
        if name not in known:
            near = nearest_names(str(name), units)
            remedy = f"Did you mean {', '.join(map(repr, near))}?" if near else f"There are {len(units)} units."
            raise ConfigError(setting, name, "no unit has this name.", remedy)
