"""A decision that is taken when somebody first needs it, and what a step leaves behind for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from trimtab.control import Decision
from trimtab.monitors.group import GroupReading, Readings
from trimtab.monitors.host_copy import HostCopy
from trimtab.monitors.quantizers import QuantizerValues

__all__ = ["Decided", "Pending", "PendingDecision", "decision_before_the_first", "decision_metrics"]


class PendingDecision(Decision):
    """The decision of a step, taken when somebody first reads it; until then nothing has waited for the device.

    Attributes:
        grad_norm: The total norm before clipping, a tensor on the gradients' device, as ``clip_grad_norm_`` returns it.
        skipped: Whether the loss scaler will skip this step; then nothing was observed and the fields are those of the
            decision in force.
    """

    grad_norm: Tensor
    skipped: bool

    def __init__(self, resolve: Callable[[], None], grad_norm: Tensor, skipped: bool = False) -> None:
        self.__dict__.update(_resolve=resolve, grad_norm=grad_norm, skipped=skipped)

    def __getattr__(self, name: str) -> Any:
        # Only reached for what is not there yet: the guard fills the fields in when it takes the decision.
        if not hasattr(Decision, name) and name not in Decision.__dataclass_fields__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        resolve = self.__dict__.pop("_resolve", None)
        if resolve is not None:
            resolve()
            if name in self.__dict__:
                return self.__dict__[name]
        raise AttributeError(f"{name!r}: this decision was never taken; its guard has loaded another state since")

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy is taken, and knows no guard.
        fields = {name: getattr(self, name) for name in Decision.__dataclass_fields__}
        return _taken, (fields, self.grad_norm, self.skipped)

    def fill(self, decision: Decision) -> None:
        """Take over the fields of the decision that was taken."""
        self.__dict__.pop("_resolve", None)
        self.__dict__.update(vars(decision))

    def __repr__(self) -> str:
        return "PendingDecision(not read yet)" if "_resolve" in self.__dict__ else super().__repr__()


def _taken(fields: dict[str, Any], grad_norm: Tensor, skipped: bool) -> PendingDecision:
    decision = PendingDecision(_nothing, grad_norm, skipped)
    decision.fill(Decision(**fields))
    return decision


def _nothing() -> None:
    """What a decision that is taken has left to do."""


@dataclass(slots=True)
class Pending:
    """What a step left to be decided, and what goes into its row.

    Attributes:
        step: The optimizer step.
        indices: Which parameters have a gradient.
        num_norms: How many norms there are: theirs, and those of the rows of stacked ones.
        values: On their way to the host: the norms, the total norm, the loss if there is one, what the quantizers did
            if they are observed, and what the monitors read.
        has_loss: Whether there is a loss.
        lr: The learning rate, where it is known.
        handle: What ``Guard.step`` gave out.
        reading: What the monitors read.
        extra: Further inputs of the decision.
    """

    step: int
    indices: list[int]
    num_norms: int
    values: HostCopy
    has_loss: bool
    lr: float | None
    handle: PendingDecision
    reading: GroupReading
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Decided:
    """A decision, and what it was taken from.

    Attributes:
        decision: The decision.
        unit_norms: The norm of each unit. Shape (units,).
        quantizer: What the quantizers did, if that is known.
        readings: What the monitors read, by monitor and metric.
        raised: Risks that were raised for it, by unit.
    """

    decision: Decision
    unit_norms: np.ndarray
    quantizer: QuantizerValues | None
    readings: Readings
    raised: dict[str, float]


def decision_before_the_first(step: int, active: np.ndarray) -> Decision:
    """What is in force before the first decision: no score, and the units that are ``active``."""
    n = len(active)
    return Decision(
        gnmr=np.full(n, np.nan),
        delta=np.full(n, np.nan),
        risk=np.zeros(n),
        active=active,
        lock=np.zeros(n, dtype=np.int64),
        scale=np.ones(n),
        step=step,
        alpha=float("nan"),
        beta=float("nan"),
    )


def decision_metrics(decision: Decision, num_switchable: int) -> dict[str, float]:
    """A decision's values for a logger, flat; nothing is active where no unit can be switched."""
    gnmr, delta, risk = (np.asarray(a) for a in (decision.gnmr, decision.delta, decision.risk))
    num_active = int(np.asarray(decision.active).sum()) if num_switchable else 0
    return {
        "trimtab/gnmr/max": _largest(gnmr),
        "trimtab/gnmr/mean": _mean(gnmr),
        "trimtab/delta/max": _largest(delta),
        "trimtab/risk/max": _largest(risk),
        "trimtab/control/num_risky": float((risk > 1).sum()),
        "trimtab/control/num_active": float(num_active),
        "trimtab/control/active_share": num_active / max(1, num_switchable),
        "trimtab/control/num_failed": float(decision.num_failed),
        "trimtab/control/num_unobserved": float(decision.num_unobserved),
    }


def _largest(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(known.max()) if known.size else float("nan")


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else float("nan")
