"""What all faults have in common that hold for a stretch of steps, at one place of a model in training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, ClassVar, TypeVar

from torch import nn

from trimtab.errors import ConfigError, nearest_names
from trimtab.precision.recipe import Conversion
from trimtab.precision.units import named_modules

__all__ = ["WindowFault", "check_whole", "module_called", "plain_parameter"]

T = TypeVar("T", bound="WindowFault")


class WindowFault(ABC):
    """A fault that starts at a step and lasts for a number of them.

    For ``guard.inject``, or by itself as a context manager: then it holds for the block, whatever its steps.

    Args:
        start_step: First optimizer step that suffers it; at least 1.
        num_steps: How long it lasts; at least 1.
        seed: Seed of what it draws.

    Attributes:
        kind: What the record calls it.
        place: Where it falls: the name of a unit, a parameter, or of what it acts on.

    Raises: ConfigError: when a setting cannot be meant.
    """

    kind: ClassVar[str]
    place: str

    def __init__(self, *, start_step: int, num_steps: int, seed: int = 0) -> None:
        check_whole("start_step", start_step, 1)
        check_whole("num_steps", num_steps, 1)
        check_whole("seed", seed, 0)
        self.start_step = start_step
        self.num_steps = num_steps
        self.seed = seed
        self._is_on = False

    @property
    def end_step(self) -> int:
        """The first step that no longer suffers it."""
        return self.start_step + self.num_steps

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What else it takes to repeat it; JSON-able."""

    @abstractmethod
    def put(self) -> None:
        """Put it where it acts."""

    @abstractmethod
    def take_away(self) -> None:
        """Undo ``put``."""

    def check(self, conversion: Conversion | None) -> None:  # noqa: B027
        """Nothing: it acts beside any recipe."""

    def begin_step(self, step: int, conversion: Conversion | None) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Put it, or take it away; returns it when it starts at ``step``."""
        if self.start_step <= step < self.end_step:
            self._switch(True)
        else:
            self._switch(False)
        return self.started(step)

    def started(self, step: int) -> list[tuple[str, Mapping[str, Any]]]:
        """What the record keeps of it at ``step``."""
        return [(self.place, self.described())] if step == self.start_step else []

    def described(self) -> dict[str, Any]:
        """What it is, when it holds, and its settings; JSON-able."""
        window = {"start_step": self.start_step, "num_steps": self.num_steps, "seed": self.seed}
        return {"fault": self.kind, **window, **self.settings()}

    def resume(self, step: int) -> None:  # noqa: B027
        """A checkpoint was loaded that was made with this fault, once ``step`` had begun; ``begin_step`` comes next.

        For what acts on weights: the checkpoint has them as they were then, so it is not done to them again.
        """

    def end(self) -> None:
        """Take it away for good, whatever the step."""
        self._switch(False)

    def __enter__(self: T) -> T:
        self._switch(True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    def _switch(self, on: bool) -> None:
        if on and not self._is_on:
            self.put()
        elif self._is_on and not on:
            self.take_away()
        self._is_on = on


def check_whole(setting: str, value: object, least: int) -> None:
    """Raises: ConfigError: when ``value`` is no whole number from ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(setting, value, f"a whole number from {least} is needed.", f"Set it to {least} or more.")


def module_called(model: nn.Module, name: str, setting: str = "unit") -> nn.Module:
    """The module of ``model`` with that name, wrapped or not.

    Raises: ConfigError: when there is none.
    """
    modules = named_modules(model)
    if name not in modules:
        near = ", ".join(nearest_names(name, modules) or list(modules)[:3])
        raise ConfigError(setting, name, "the model has no such module.", f"Nearest: {near}.")
    return modules[name]


def plain_parameter(model: nn.Module, name: str) -> nn.Parameter:
    """The parameter with that name, without the names of wrappers.

    Raises: ConfigError: when there is none, or it is sharded.
    """
    parameters = {
        f"{prefix}.{own}".removeprefix("."): parameter
        for prefix, module in ({"": model} | named_modules(model)).items()
        for own, parameter in module.named_parameters(recurse=False)
    }
    if name not in parameters:
        near = ", ".join(nearest_names(name, parameters) or list(parameters)[:3])
        raise ConfigError("parameter", name, "the model has no such parameter.", f"Nearest: {near}.")
    if hasattr(parameters[name], "device_mesh"):
        raise ConfigError("parameter", name, "it is sharded, and its elements have no one place.", "Choose another.")
    return parameters[name]
