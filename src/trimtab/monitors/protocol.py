"""What a monitor has to offer to be passed to ``attach(monitors=[...])``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import nn

__all__ = ["Monitor"]


@runtime_checkable
class Monitor(Protocol):
    """Reads something off a model after each backward.

    Attributes:
        name: The ``<monitor>`` part of its metric names, ``trimtab/<monitor>/<aggregate>``.
    """

    name: str

    def start(self, model: nn.Module) -> None:
        """Look at the model once, before the first step; place hooks if any are needed."""

    def observe(self, step: int) -> Mapping[str, float]:
        """Values of optimizer step ``step``, by ``<aggregate>``; empty when this step has none.

        Called after the backward of the step and before clipping.
        """

    def stop(self) -> None:
        """Take every hook away."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs; JSON-able."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` gave."""
