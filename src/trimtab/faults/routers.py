"""Faults of a mixture's routers: weights scaled or tilted, and a balancing loss that is switched off."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from trimtab.errors import ConfigError, nearest_names
from trimtab.faults.window import WindowFault
from trimtab.precision.recipe import Conversion
from trimtab.precision.units import named_modules

__all__ = ["RouterChange", "RouterFault"]

RouterChange = Literal["scale", "tilt", "no_aux_loss"]
"""What happens to the routers: see ``RouterFault``."""

_NAMES = ("gate", "router")
_COEFFICIENT = "router_aux_loss_coef"


class RouterFault(WindowFault):
    """For some steps, the routers of a mixture of experts are not what training has made of them.

    - "scale": their weights are ``amount`` times as large, so their choices are more (or less) decided.
    - "tilt": the same vector, of length ``amount``, is added to each expert's row, so that the rows become alike. Its
      direction is drawn by the seed, for each router another.
    - "no_aux_loss": the loss that keeps the load balanced is switched off.

    What is done to a weight as the first step begins is undone as the step after the last begins: what training did to
    it in between stays. A resumed run goes on as the uninterrupted one did, since the changed weights are in the
    checkpoint; inject the fault after the state is loaded.

    Args:
        model: The model.
        change: What happens.
        amount: The factor, or the length of the vector; not used by "no_aux_loss".
        routers: Names of the routers that it falls on; None is all.
        start_step: First optimizer step that suffers it; at least 1.
        num_steps: How long it lasts; at least 1.
        seed: Direction of a tilt.

    Raises: ConfigError: when a setting cannot be meant, or the model has no such router or loss.
    """

    kind = "router"

    def __init__(
        self,
        model: nn.Module,
        change: RouterChange,
        *,
        amount: float = 4.0,
        routers: Iterable[str] | None = None,
        start_step: int = 1,
        num_steps: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__(start_step=start_step, num_steps=num_steps, seed=seed)
        if change not in get_args(RouterChange):
            allowed = ", ".join(map(repr, get_args(RouterChange)))
            raise ConfigError("change", change, f"it is one of {allowed}.", "Use one of them.")
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 < amount < math.inf:
            raise ConfigError("amount", amount, "a finite number above 0 is needed.", "Set it to 4, say.")
        self.model, self.change, self.amount = model, change, float(amount)
        found = _routers(model)
        self.routers = tuple(found if routers is None else routers)
        if change == "no_aux_loss":
            if not _with_aux_loss(model):
                raise ConfigError(
                    "change", change, f"no module of the model has a {_COEFFICIENT}.", "Choose another change."
                )
        elif not self.routers:
            raise ConfigError("model", type(model).__name__, "it has no router beside experts.", "Pass one that has.")
        for name in self.routers:
            if name not in found:
                near = ", ".join(nearest_names(name, found) or list(found)[:3]) or "there is none"
                raise ConfigError("routers", name, "no router has that name.", f"Nearest: {near}.")
        self.place = "aux loss" if change == "no_aux_loss" else ", ".join(self.routers)
        self._coefficients: list[tuple[Any, float]] = []

    def settings(self) -> dict[str, Any]:
        """What happens, and to which routers."""
        return {"change": self.change, "amount": self.amount, "routers": list(self.routers)}

    def begin_step(self, step: int, conversion: Conversion | None) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Change the routers at the first step, and undo it after the last."""
        if self.change == "no_aux_loss":
            return super().begin_step(step, conversion)
        if step == self.start_step:
            self._switch(True)
        elif self.start_step < step < self.end_step:
            self._is_on = True  # resumed within: the weights are changed already
        elif step == self.end_step:
            self._switch(False)
        return self.started(step)

    def resume(self, step: int) -> None:
        """The checkpoint's weights are changed already, or changed back."""
        if self.change != "no_aux_loss":
            self._is_on = self.start_step <= step < self.end_step

    @torch.no_grad()
    def put(self) -> None:
        """Change the routers."""
        if self.change == "no_aux_loss":
            self._coefficients = [(module, getattr(module, _COEFFICIENT)) for module in _with_aux_loss(self.model)]
            for module, _ in self._coefficients:
                setattr(module, _COEFFICIENT, 0.0)
        for index, weight in enumerate(self._weights()):
            if self.change == "scale":
                weight.mul_(self.amount)
            else:
                weight.add_(self._tilt(index, weight))

    @torch.no_grad()
    def take_away(self) -> None:
        """Undo it."""
        for module, coefficient in self._coefficients:
            setattr(module, _COEFFICIENT, coefficient)
        self._coefficients = []
        for index, weight in enumerate(self._weights()):
            if self.change == "scale":
                weight.div_(self.amount)
            else:
                weight.sub_(self._tilt(index, weight))

    def _weights(self) -> list[Any]:
        found = _routers(self.model)
        return [] if self.change == "no_aux_loss" else [found[name].weight for name in self.routers]

    def _tilt(self, index: int, weight: Tensor) -> Tensor:
        """The vector that is added to each row. Shape (model,)."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        direction = torch.randn(weight.shape[1], generator=generator, dtype=torch.float64)
        return (direction * (self.amount / direction.norm())).to(weight.device, weight.dtype)


def _routers(model: nn.Module) -> dict[str, Any]:
    """Modules that are called as routers are, have a row an expert, and stand beside experts."""
    modules = {"": model} | named_modules(model)
    found = {}
    for name, module in modules.items():
        holder, _, own = name.rpartition(".")
        weight = getattr(module, "weight", None)
        stands_beside = any(child.startswith("experts") for child, _ in modules[holder].named_children())
        if own in _NAMES and stands_beside and isinstance(weight, Tensor) and weight.dim() == 2:
            found[name] = module
    return found


def _with_aux_loss(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m.__dict__.get(_COEFFICIENT), int | float)]
