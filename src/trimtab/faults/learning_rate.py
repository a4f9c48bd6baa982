"""Fault: a learning rate that is too large for some steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

from trimtab.errors import ConfigError
from trimtab.faults.window import WindowFault
from trimtab.precision.recipe import Conversion

__all__ = ["LargeLearningRate"]


class LargeLearningRate(WindowFault):
    """For some steps, the optimizer steps at ``factor`` times its learning rate.

    The rate is raised as the optimizer steps and put back right after, so that a scheduler neither undoes it nor takes
    it for its own.

    Args:
        optimizer: The optimizer, wrapped or not.
        factor: What the learning rate of each parameter group is multiplied by. Above 0.
        start_step: First optimizer step that suffers it; at least 1.
        num_steps: How long it lasts; at least 1.

    Raises: ConfigError: when a setting cannot be meant.

    Example:
        >>> import torch
        >>> p = torch.nn.Parameter(torch.zeros(()))
        >>> optimizer = torch.optim.SGD([p], lr=1.0)
        >>> p.grad = torch.ones(())
        >>> with LargeLearningRate(optimizer, factor=10.0):
        ...     optimizer.step()
        >>> p.item(), optimizer.param_groups[0]["lr"]
        (-10.0, 1.0)
    """

    kind = "learning rate"
    place = "optimizer"

    def __init__(self, optimizer: Optimizer, *, factor: float = 10.0, start_step: int = 1, num_steps: int = 1) -> None:
        super().__init__(start_step=start_step, num_steps=num_steps)
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < math.inf:
            raise ConfigError("factor", factor, "a finite number above 0 is needed.", "Set it to 10, say.")
        # Some wrappers are optimizers that hold the real one, and only that one calls its hooks.
        while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
            optimizer = inner
        self.optimizer = optimizer
        self.factor = float(factor)
        self._step: int | None = None
        self._rates: list[Any] | None = None
        self._hooks: list[Any] = []

    def settings(self) -> dict[str, Any]:
        """By how much."""
        return {"factor": self.factor}

    def put(self) -> None:
        """Watch the optimizer step."""
        self._hooks = [
            self.optimizer.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(lambda optimizer, args, kwargs: self._put_back()),
        ]

    def take_away(self) -> None:
        """Watch it no longer."""
        self._put_back()
        while self._hooks:
            self._hooks.pop().remove()

    def begin_step(self, step: int, conversion: Conversion | None) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Know which step it is; returns the fault when it starts there."""
        self._step = step
        # A guard begins a step before the optimizer has stepped for the one before it, which may be the last to suffer.
        self._switch(self.start_step <= step <= self.end_step)
        return self.started(step)

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Raise the rate, or have it raised once a closure has run: the guard's step may be part of it."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._raise()
            return None

        def raising(*given: Any) -> Any:
            loss = closure(*given)
            self._raise()
            return loss

        return (args[0], raising), {name: value for name, value in kwargs.items() if name != "closure"}

    def _raise(self) -> None:
        if self._rates is not None or not (self._step is None or self.start_step <= self._step - 1 < self.end_step):
            return
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * self.factor

    def _put_back(self) -> None:
        if self._rates is not None:
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate
            self._rates = None
