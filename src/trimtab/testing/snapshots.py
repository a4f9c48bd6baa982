"""All that a model carries, to see whether it was given back as it was found."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

__all__ = ["Snapshot", "changes_since", "snapshot_of", "values_of"]

Snapshot = dict[str, dict[str, Any]]


def snapshot_of(model: nn.Module) -> Snapshot:
    """Class, attributes, parameters, buffers, children and hooks of each module, by identity and in their order."""
    return {name: _parts_of(module) for name, module in model.named_modules()}


def changes_since(snapshot: Snapshot, model: nn.Module) -> list[str]:
    """What of ``model`` is not as ``snapshot`` has it: ``<module>: <attribute>``."""
    now = snapshot_of(model)
    changed = [f"module {name!r} came or went" for name in snapshot.keys() ^ now.keys()]
    for name in snapshot.keys() & now.keys():
        before, after = snapshot[name], now[name]
        changed += [
            f"{name or 'the model'}: {key}"
            for key in sorted(before.keys() | after.keys())
            if key not in before or key not in after or before[key] != after[key]
        ]
    return changed


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of each entry of ``state_dict``."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _parts_of(module: nn.Module) -> dict[str, Any]:
    parts: dict[str, Any] = {
        "its class": type(module),
        "its forward": getattr(module.forward, "__func__", module.forward),
    }
    for name, value in module.__dict__.items():
        # Of a dictionary (of hooks, of parameters) the entries count, not the dictionary.
        parts[name] = [(key, id(entry)) for key, entry in value.items()] if isinstance(value, dict) else id(value)
    return parts
