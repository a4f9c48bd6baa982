"""Faults as settings of a framework's callback, where model and optimizer are only known once training begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trimtab.errors import ConfigError
from trimtab.faults.protocol import Fault

__all__ = ["FaultFactory", "checked_faults", "made_faults"]

FaultFactory = Callable[[nn.Module, Optimizer], Fault]
"""Makes a fault of the model and the optimizer that are trained: ``lambda model, optimizer: BitFlips(model, ...)``."""


def checked_faults(faults: Sequence[Fault | FaultFactory]) -> tuple[Fault | FaultFactory, ...]:
    """The faults, if each of them is one, or a function that makes one.

    Raises: ConfigError: when one is neither, or they are no list.

    Example:
        >>> from trimtab.faults import LargeLearningRate, SmallBatch
        >>> len(checked_faults([SmallBatch(start_step=9), lambda model, optimizer: LargeLearningRate(optimizer)]))
        2
    """
    given: Any = faults
    wrong = [f for f in given if not _is_usable(f)] if isinstance(given, Sequence) else [given]
    if wrong:
        raise ConfigError(
            "faults",
            wrong[0],
            "it is a list of faults, or of functions f(model, optimizer) that make one.",
            "Pass [SmallBatch(start_step=100)], or [lambda model, optimizer: BitFlips(model, ...)].",
        )
    return tuple(faults)


def made_faults(
    faults: Sequence[Fault | FaultFactory], model: nn.Module, optimizers: Sequence[Optimizer]
) -> list[Fault]:
    """The faults themselves, those of factories made for this model and the first of its optimizers.

    Raises: ConfigError: when a factory makes no fault, or there is no optimizer for it.
    """
    return [_made(fault, model, optimizers) for fault in faults]


def _made(given: Any, model: nn.Module, optimizers: Sequence[Optimizer]) -> Fault:
    if _is_fault(given):
        return given
    if not optimizers:
        raise ConfigError("faults", given, "it is made of the optimizer, and training has none.", "Leave it out.")
    fault = given(model, optimizers[0])
    if not _is_fault(fault):
        raise ConfigError("faults", fault, "a factory returns a fault.", "Return BitFlips(model, ...), say, from it.")
    return fault


def _is_usable(given: Any) -> bool:
    return not isinstance(given, type) and (_is_fault(given) or callable(given))


def _is_fault(given: Any) -> bool:
    return callable(getattr(given, "begin_step", None)) and callable(getattr(given, "check", None))
