"""All that a model carries, and the switches of torch, to see whether both were given back as they were found."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Snapshot", "changes_since", "snapshot_of", "switches", "values_of"]

Snapshot = dict[str, dict[str, Any]]

_PROCESS = "the process"


def snapshot_of(model: nn.Module) -> Snapshot:
    """Class, attributes, parameters, buffers, children and hooks of each module, by identity and in their order.

    With the hooks of each parameter, and what torch has switched and hooked for all models.
    """
    return {name: _parts_of(module) for name, module in model.named_modules()} | {_PROCESS: switches()}


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
        parts[name] = _entries(value) if isinstance(value, dict) else id(value)
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            parts[f"requires_grad of {name}"] = tensor.requires_grad
            for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                # A hook that was removed leaves an empty dictionary behind.
                parts[f"{hooks} of {name}"] = _entries(getattr(tensor, hooks, None) or {})
    return parts


def switches() -> dict[str, Any]:
    """What torch has switched, and which hooks it has, for all models of the process."""
    own = vars(nn.modules.module).items()
    hooks = {name: _entries(d) for name, d in own if name.startswith("_global_") and isinstance(d, dict)}
    return hooks | {
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.get_default_device()": torch.get_default_device(),
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "torch.is_deterministic_algorithms_warn_only_enabled()": torch.is_deterministic_algorithms_warn_only_enabled(),
        "torch.backends.cudnn.deterministic": torch.backends.cudnn.deterministic,
        "torch.backends.cudnn.benchmark": torch.backends.cudnn.benchmark,
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.is_inference_mode_enabled()": torch.is_inference_mode_enabled(),
        "torch.is_anomaly_enabled()": torch.is_anomaly_enabled(),
        "torch.is_autocast_enabled('cpu')": torch.is_autocast_enabled("cpu"),
        "torch.is_autocast_enabled('cuda')": torch.is_autocast_enabled("cuda"),
        "torch.get_num_threads()": torch.get_num_threads(),
    }


def _entries(entries: dict[Any, Any]) -> list[tuple[Any, int]]:
    return [(key, id(entry)) for key, entry in entries.items()]
