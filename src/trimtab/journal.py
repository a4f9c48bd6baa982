"""What a guard writes down: rows and events for the record, and each warning once."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trimtab._version import __version__
from trimtab.control.protocol import PolicyLike
from trimtab.errors import ConfigError, TrimtabWarning
from trimtab.monitors.group import monitor_metrics
from trimtab.pending import Decided, Pending
from trimtab.precision.recipe import Conversion, Recipe
from trimtab.precision.units import Selection, Unit, describe_filter
from trimtab.trace import QUANTIZER_COLUMNS, RunWriter, StepRow, UnitRow

__all__ = ["Journal", "describe_run"]

# A disk that does not answer must not hold up the checkpoint; what is lost then is a gap in the record.
_LONGEST_WAIT_S = 2.0


class Journal:
    """The guard's side of the run record; without one, only warnings go out.

    What is said before the record is open belongs to the run too: it is held back, and is written first.

    Attributes:
        writer: The record's writer, or None.
        step: Optimizer steps observed so far; events fall on it unless they say otherwise.
        knows_products: Whether it has been told what a recipe's paths are made of.
    """

    def __init__(self) -> None:
        self.writer: RunWriter | None = None
        self.step = 0
        self._said: set[str] = set()
        self._products: Any = None
        self.knows_products = False
        self._row_without_lr: int | None = None
        self._held_back: list[tuple[str, int, str, dict[str, Any]]] | None = []

    def open(self, record: str | Path | None, description: Mapping[str, Any]) -> None:
        """Open the record, on rank 0 alone.

        Raises: ConfigError: when it cannot be written.
        """
        if record is not None and _is_writing_rank():
            self.writer = RunWriter(record, **description)
        held_back, self._held_back = self._held_back or [], None
        for event in held_back:
            if self.writer is not None:
                self.writer.write_event(*event)

    def write(self, pending: Pending, decided: Decided) -> None:
        """Write a step's row, once its decision is taken."""
        if self.writer is None:
            return
        values = pending.values.read()
        n = pending.num_norms
        decision, quantizer = decided.decision, decided.quantizer
        extra = pending.extra | ({"raised": decided.raised} if decided.raised else {})
        if decided.readings:
            extra["monitors"] = monitor_metrics(decided.readings)
        readings = {
            monitor: {metric: (one.places, one.values) for metric, one in by_metric.items()}
            for monitor, by_metric in decided.readings.items()
        }
        self._row_without_lr = pending.step if pending.lr is None else None
        self.writer.write_step(
            StepRow(
                step=pending.step,
                loss=float(values[n + 1]) if pending.has_loss else None,
                lr=pending.lr,
                grad_norm=float(values[n]),
                alpha=decision.alpha,
                beta=decision.beta,
                norms=decided.unit_norms,
                gnmr=decision.gnmr,
                delta=decision.delta,
                risk=decision.risk,
                lock=decision.lock,
                active=decision.active,
                reason=decision.reason,
                errors=None if quantizer is None else quantizer["error"],
                quantizer=None if quantizer is None else {name: quantizer[name] for name in QUANTIZER_COLUMNS},
                extra=extra or None,
                readings=readings or None,
            )
        )

    def note_learning_rate(self, lr: float | None) -> None:
        """An optimizer stepped: complete the row of a decision that was read before that."""
        step, self._row_without_lr = self._row_without_lr, None
        if step is not None and lr is not None and self.writer is not None:
            self.writer.annotate_step(step, lr=lr)

    def event(self, kind: str, data: Mapping[str, Any], place: str = "", step: int | None = None) -> None:
        """Write an event, or hold it back until it is known whether there is a record."""
        event = (kind, self.step if step is None else step, place, dict(data))
        if self.writer is not None:
            self.writer.write_event(*event)
        elif self._held_back is not None:
            self._held_back.append(event)

    def note_products(self, products: Any) -> None:
        """Note which products a recipe's paths were made of, the device's or emulated ones, when that has changed."""
        self.knows_products = True
        if products and products != self._products:
            self._products = products
            self.event("note", {"products": products})

    def say_once(self, key: str, message: str | None) -> None:
        """Warn, the first time that ``message`` is not None for this ``key``; the record keeps it too."""
        if message is not None and key not in self._said:
            self._said.add(key)
            self.event("warning", {"message": message})
            warnings.warn(message, TrimtabWarning, stacklevel=3)

    def say_heard(self, heard: Iterable[warnings.WarningMessage]) -> None:
        """Say what ``hearing`` has collected, of the line of the user's that it was said of; as ``say_once`` does."""
        for one in heard:
            message = str(one.message)
            if message not in self._said:
                self._said.add(message)
                self.event("warning", {"message": message})
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)

    @contextlib.contextmanager
    def hearing(self) -> Iterator[list[warnings.WarningMessage]]:
        """Collect the warnings of a recipe, which has no journal to tell them to; ``say_heard`` takes them from there.

        A recipe of anyone's calls ``warnings.warn``, and used alone it is right to. What is no warning of trimtab's is
        shown as ever.
        """
        heard: list[warnings.WarningMessage] = []
        try:
            with warnings.catch_warnings(record=True) as caught:
                # Also what the user's filters pass over, so that the record has it: say_heard asks these filters again.
                warnings.simplefilter("always", TrimtabWarning)
                yield heard
        finally:
            for one in caught:
                if issubclass(one.category, TrimtabWarning):
                    heard.append(one)
                else:  # it has passed the filters already
                    warnings.showwarning(one.message, one.category, one.filename, one.lineno, one.file, one.line)

    def go_on_from(self, step: int, controller_state: Mapping[str, Any]) -> None:
        """Training goes on after ``step``, with the controller in this state."""
        self.step, self._row_without_lr = step, None
        if self.writer is not None:
            self.writer.resume(step, controller_state)

    def settle(self) -> None:
        """A checkpoint is being made: have the rows up to it on the disk, so that a resume leaves no gap behind it."""
        if self.writer is not None:
            self.writer.flush(timeout_s=_LONGEST_WAIT_S)

    def close(self, finished: bool) -> None:
        """Close the record."""
        if self.writer is not None:
            self.writer.close(finished=finished)


def describe_run(
    model: nn.Module,
    recipe: Recipe | None,
    policy: PolicyLike,
    selection: Selection,
    monitors: Sequence[str],
    units: Sequence[Unit],
    conversion: Conversion | None,
) -> dict[str, Any]:
    """The resolved config, the units with their costs and the versions: what a record opens with."""
    costs = {}
    if conversion is not None:
        costs = {u.name: c for u, c in zip(conversion.units, conversion.costs, strict=True)}
    rows = [
        UnitRow(
            name=unit.name,
            recoverable=unit.name in costs,
            num_parameters=unit.num_parameters,
            costs=_as_dict(costs[unit.name]) if unit.name in costs else {},
        )
        for unit in units
    ]
    config = {
        "model": type(model).__name__,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "recipe": None if recipe is None else getattr(conversion, "to_dict", recipe.to_dict)(),
        "policy": policy.to_dict(),
        "units": str(describe_filter(selection, getattr(recipe, "unit", "projection"))),
        "monitors": list(monitors),
    }
    versions = {"trimtab": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return {"config": config, "units": rows, "versions": versions}


def _is_writing_rank() -> bool:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    # Attached before the process group was made: the launcher has said already which rank this is.
    return os.environ.get("RANK", "0") == "0"


def _as_dict(cost: Any) -> dict[str, float]:
    if not dataclasses.is_dataclass(cost):
        allowed = "a conversion has a trimtab.precision.PathCost for each unit."
        raise ConfigError("costs", cost, allowed, "Give what each unit keeps and multiplies on either path.")
    return {name: float(getattr(cost, name)) for name in cost.__dataclass_fields__}
