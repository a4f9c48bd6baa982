"""Settings of a command in a YAML file: read into the words that would say the same, and written out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, get_type_hints

import tyro

from trimtab.errors import ConfigError, MissingExtraError, nearest_names

__all__ = ["as_yaml", "config_words", "is_place", "read_config"]


def is_place(hint: Any) -> bool:
    """Whether a setting of this type is given by its place on the command line, and has no option."""
    return tyro.conf.Positional in getattr(hint, "__metadata__", ())


def config_words(
    values: Mapping[Any, Any], names: Sequence[str], settings: type, given: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The settings of a file as words: those that go by place, and options, without those that are given."""
    known = {item.name: item for item in fields(settings)}
    hints = get_type_hints(settings, include_extras=True)
    told = {word.partition("=")[0].replace("_", "-") for word in given if word.startswith("--")}
    places: list[str] = []
    options: list[str] = []
    for name, value in values.items():
        if name not in known:
            near = nearest_names(str(name), known)
            remedy = f"Did you mean {near[0]!r}?" if near else f"The settings are {', '.join(known)}."
            raise ConfigError(str(name), value, f"trimtab {' '.join(names)} has no such setting.", remedy)
        if isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(v, list | dict) for v in value)):
            raise ConfigError(name, value, "it is a value or a list of values.", "Write one.")
        if is_place(hints[name]):
            places += map(str, value) if isinstance(value, list) else [str(value)]
            continue
        option = "--" + name.replace("_", "-")
        negated = "--no-" + name.replace("_", "-")
        if {option, negated} & told or (value is None and known[name].default is None):
            continue
        if hints[name] is bool and known[name].default is not MISSING:
            if not isinstance(value, bool):
                raise ConfigError(name, value, "it is true or false.", "Write one of them.")
            options.append(option if value else negated)
        elif isinstance(value, list):
            options += [option, *map(str, value)]
        else:
            options.append(f"{option}={value}")
    return places, options


def read_config(path: Path) -> Mapping[Any, Any]:
    """The settings that a file holds.

    Raises: ConfigError: when it cannot be read, or holds something else.
    """
    yaml, remedy = _yaml(), "Start from what --print-config prints."
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("config", str(path), f"it cannot be read ({error}).", "Check the path.") from None
    except yaml.YAMLError as error:
        raise ConfigError("config", str(path), f"it is no YAML ({' '.join(str(error).split())}).", remedy) from None
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ConfigError("config", str(path), "it is settings and their values.", remedy)
    return values


def as_yaml(settings: Any) -> str:
    """The settings as a file would hold them."""
    values = json.loads(json.dumps(asdict(settings), default=str))
    return str(_yaml().safe_dump(values, sort_keys=False, allow_unicode=True))


def _yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise MissingExtraError("A config file", "PyYAML", "hf") from None
    return yaml
