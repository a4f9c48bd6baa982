"""The loss of each micro-batch, picked up from the model's own output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["LossHook", "mean_loss"]

# Far more micro-batches than anybody accumulates.
_MOST = 4096


class LossHook:
    """Notes the ``loss`` of a model's output, unread; a copy of the model inherits only an inert one.

    Args:
        losses: Where it goes; None notes nothing.
        owner: Kept alive for as long as the model is, and no longer.
    """

    def __init__(self, losses: list[Tensor] | None, owner: object = None) -> None:
        self.losses = losses
        self.owner = owner

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note the loss of a forward in training."""
        if torch.compiler.is_compiling() or self.losses is None or not torch.is_grad_enabled():
            return
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if isinstance(loss, Tensor) and loss.numel() == 1 and module.training:
            if len(self.losses) >= _MOST:
                # Nobody calls guard.step, which empties the list.
                self.losses.clear()
            self.losses.append(loss.detach())

    def __deepcopy__(self, memo: dict[int, Any]) -> LossHook:
        return LossHook(None)

    def __reduce__(self) -> tuple[type[LossHook], tuple[None]]:
        return LossHook, (None,)


def mean_loss(losses: list[Tensor]) -> list[Tensor]:
    """The mean of ``losses`` in a list, or an empty one; ``losses`` is emptied."""
    taken, losses[:] = list(losses), []
    if not taken:
        return []
    device = taken[-1].device
    return [torch.stack([x.to(device, torch.float32).reshape(()) for x in taken]).mean()]
