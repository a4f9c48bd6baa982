"""What a monitor has to offer to be passed to ``attach(monitors=[...])``, and a base class for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from trimtab.monitors.alarms import AlarmRule

__all__ = ["BaseMonitor", "Monitor", "MonitorContext"]


@runtime_checkable
class Monitor(Protocol):
    """Reads something off a model after each backward.

    This is all that has to be there; ``BaseMonitor`` lists what may be there beside it: alarm rules, names of places,
    tensors that a checkpoint keeps, what is done about a step that is skipped.

    Attributes:
        name: The ``<monitor>`` part of its metric names, ``trimtab/<monitor>/<aggregate>``.
    """

    name: str

    def start(self, model: nn.Module) -> None:
        """Look at the model once, before the first step; place hooks if any are needed."""

    def observe(self, step: int) -> Mapping[str, Tensor | float]:
        """Values of optimizer step ``step``, by metric; empty when this step has none.

        Called after the backward of the step and before clipping. A value is a number, or a tensor of any shape on any
        device with one entry a place (a layer, a head), NaN where a place has none. Nothing waits for a tensor here:
        it travels to the host with the norms. It is copied, so the monitor may write to it again.

        Ranks of one run return the same metrics at the same steps; their values may differ, and the record then holds
        those of rank 0.
        """

    def stop(self) -> None:
        """Take every hook away."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs; JSON-able, small."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` gave."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorContext:
    """What a guard offers its monitors before they start."""

    optimizers: Callable[[], list[Optimizer]]
    """The model's optimizers that have stepped so far; asked anew at each call."""
    say_once: Callable[[str], None]
    """Warn the user; the same text only once, and the record keeps it."""
    units: tuple[str, ...] = ()
    """Names of the watched units, from the input to the loss."""
    loss: Callable[[], Tensor | None] | None = None
    """For ``observe``: the step's loss, a scalar that is not waited for, as ``guard.observe`` was told, or else the
    mean of those of the model's outputs; it returns None where neither is known. None: look for it yourself."""


class BaseMonitor(ABC):
    """A monitor that only has to say its ``name``, how it starts and what it observes.

    Attributes:
        name: The ``<monitor>`` part of its metric names.
        mechanism: What its alarms are a sign of, for the diagnosis; empty: what ``name`` says.
        alarm_rules: By metric, what raises an alarm. A metric without one is only recorded.
        context: What the guard offers; None before ``bind``.

    Example:
        >>> import torch
        >>> class WeightSizes(BaseMonitor):
        ...     name = "weight_sizes"
        ...     def start(self, model):
        ...         self.named = dict(model.named_parameters())
        ...     def observe(self, step):
        ...         return {"mean": torch.stack([p.detach().abs().mean() for p in self.named.values()])}
        ...     def places(self, metric):
        ...         return list(self.named)
        >>> monitor = WeightSizes()
        >>> monitor.start(nn.Linear(2, 2))
        >>> len(monitor.places("mean")) == monitor.observe(1)["mean"].numel()
        True
    """

    name: str
    mechanism: str = ""
    alarm_rules: Mapping[str, AlarmRule] = {}
    context: MonitorContext | None = None

    def bind(self, context: MonitorContext) -> None:
        """Keep what the guard offers; called before ``start``."""
        self.context = context

    @abstractmethod
    def start(self, model: nn.Module) -> None:
        """Look at the model once, before the first step; see ``Monitor.start``."""

    @abstractmethod
    def observe(self, step: int) -> Mapping[str, Tensor | float]:
        """Values of optimizer step ``step``, by metric; see ``Monitor.observe``."""

    def drop(self, step: int) -> None:  # noqa: B027
        """The loss scaler skips this attempt at ``step``: let go of what hooks have added up for it.

        Called in place of ``observe``; the same step is tried again. Device work only. A monitor whose hooks add
        nothing up has nothing to do.
        """

    def stop(self) -> None:  # noqa: B027
        """Take every hook away; there is none unless a subclass places one."""

    def places(self, metric: str) -> Sequence[str]:
        """One name for each entry of the flattened value of ``metric``, such as ``layer_3/head_1``.

        Empty: the value's one entry is the model, several are numbered. Asked when a metric is first seen, and again
        when its number of entries has changed.
        """
        return ()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs; JSON-able, small."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Take back what ``state_dict`` gave."""

    def tensor_state(self) -> dict[str, Tensor]:
        """What a resumed run needs and is too large for JSON: weight snapshots. Kept as it is, so not written to."""
        return {}

    def load_tensor_state(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Take back what ``tensor_state`` gave, after ``load_state_dict``; where it is not called, start afresh."""
