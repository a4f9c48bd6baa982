"""Names of units, and which of them have a recovery path."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

from trimtab.errors import ConfigError, nearest_names, verbatim

__all__ = ["recoverable_mask", "unit_names"]


def unit_names(units: int | Sequence[str]) -> tuple[str, ...]:
    """Give every unit a name: its own, or ``unit_0``, ``unit_1``, ... for a count.

    Args:
        units: Number of units, or their names from the input to the loss.

    Returns:
        The names, in the order given.

    Raises:
        ConfigError: when there is no unit, a name is not text, or a name occurs twice.

    Example:
        >>> unit_names(2)
        ('unit_0', 'unit_1')
    """
    no_unit = ("units", units, "a controller needs at least 1 unit.", "Pass the names of the units, or their number.")
    if isinstance(units, Sequence) and not isinstance(units, str):
        names = tuple(units)
        if not names:
            raise ConfigError(*no_unit)
    elif isinstance(units, Integral) and not isinstance(units, bool):
        if units < 1:
            raise ConfigError(*no_unit)
        return tuple(f"unit_{index}" for index in range(int(units)))
    else:
        raise ConfigError("units", units, "units are a sequence of names or a count.", "Pass a list of str or an int.")
    seen: set[str] = set()
    for name in names:
        if not isinstance(name, str):
            raise ConfigError("units", name, "the name of a unit is text.", "Pass a list of str, or a count.")
        if name in seen:
            raise ConfigError("units", name, "this name occurs more than once.", "Give every unit a name of its own.")
        seen.add(name)
    return names


def recoverable_mask(recoverable: Sequence[bool] | Sequence[str] | None, names: Sequence[str]) -> tuple[bool, ...]:
    """Say for each unit whether it may be switched to a recovery path.

    Args:
        recoverable: None for all units, a mask over the units, or the names of those that are recoverable.
        names: Names of all units.

    Returns:
        One bool a unit.

    Raises:
        ConfigError: when a mask has another length than ``names``, or a name is not that of a unit.

    Example:
        >>> recoverable_mask(["k"], ["q", "k"]) == recoverable_mask([False, True], ["q", "k"])
        True
    """
    if recoverable is None:
        return (True,) * len(names)
    if isinstance(recoverable, str):
        raise ConfigError("recoverable", recoverable, "it is a list of names or a mask.", f"Write [{recoverable!r}].")
    given: list[object] = list(recoverable)
    if given and not any(isinstance(item, str) for item in given):
        if len(given) != len(names):
            allowed = f"a mask has one entry for each of the {len(names)} units."
            raise ConfigError("recoverable", verbatim(f"{len(given)} entries"), allowed, "Pass a full mask, or names.")
        return tuple(bool(item) for item in given)
    known, wanted = set(names), set(given)
    for name in given:
        if name not in known:
            near = nearest_names(str(name), names)
            remedy = (
                f"Did you mean {', '.join(map(repr, near))}?" if near else f"There are {len(names)} units, see `units`."
            )
            raise ConfigError("recoverable", name, "no unit has this name.", remedy)
    return tuple(name in wanted for name in names)
