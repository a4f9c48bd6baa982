"""The rows that travel from the training loop to the record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import ArrayLike

__all__ = ["QUANTIZER_COLUMNS", "Event", "StepRow", "UnitRow"]

QUANTIZER_COLUMNS = ("flushed_share", "saturated_share", "amax")
"""What the record keeps of the quantizers beside the channel error: the keys of ``StepRow.quantizer``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitRow:
    """One watched unit, as the record lists it.

    Example:
        >>> UnitRow(name="layers.0.q_proj", num_parameters=65536).recoverable
        True
    """

    name: str
    """Fully qualified name; unique among the units of a segment."""
    recoverable: bool = True
    """False: scored and recorded, never switched."""
    num_parameters: int = 0
    """Elements of the unit's parameters, over the whole sharded tensor."""
    costs: Mapping[str, Any] = field(default_factory=dict)
    """What each path costs: saved bytes, elements, FLOPs, under names that carry their unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRow:
    """What was observed in one optimizer step, and the decision taken from it.

    The active set is the one decided from *this* step's norms and errors: it routes the next step.
    """

    step: int
    """Optimizer step, counted from 1."""
    norms: ArrayLike | None = None
    """Shape (units,). Kept exactly: 0 = not observed, NaN, inf or negative = failed. None: nothing was observed."""
    gnmr: ArrayLike | None = None
    """Shape (units,)."""
    delta: ArrayLike | None = None
    """Shape (units,)."""
    risk: ArrayLike | None = None
    """Shape (units,). Above 1: a candidate."""
    active: ArrayLike | None = None
    """Shape (units,), bool. The units on the recovery path in the next step."""
    lock: ArrayLike | None = None
    """Shape (units,), integers >= 0. Steps for which a unit stays a candidate."""
    reason: ArrayLike | None = None
    """Shape (units,), codes of ``trimtab.control.REASONS``: what made the risk, or holds the unit. 0 = none."""
    errors: ArrayLike | None = None
    """Shape (units,). Channel errors, kept exactly: replay starts from them too. NaN = not known. None: none is."""
    quantizer: Mapping[str, ArrayLike] | None = None
    """What else the quantizers say, by ``QUANTIZER_COLUMNS``; each of shape (units,), NaN = not known. Kept as float32,
    which an amax is: replay starts from it too."""
    alpha: float | None = None
    """Threshold of GNMR in force."""
    beta: float | None = None
    """Threshold of Delta in force."""
    loss: float | None = None
    """Training loss; may come later through ``annotate_step``."""
    lr: float | None = None
    """Learning rate of the first parameter group."""
    grad_norm: float | None = None
    """Total gradient norm before clipping."""
    skipped: bool = False
    """The loss scaler skipped the step: nothing was observed, no decision was taken."""
    elapsed_s: float | None = None
    """Seconds since the segment started. None: the writer's own clock."""
    extra: Mapping[str, Any] | None = None
    """What else belongs to the step: ``"routed_by_hand"``, the units of the set that it ran under if that was forced;
    ``"damped"``, the factor of each damped unit; ``"raised"``, raised risks; ``"monitors"``, the monitors' values."""
    readings: Mapping[str, Mapping[str, tuple[Sequence[str], ArrayLike]]] | None = None
    """What the monitors read, by monitor and metric: the names of the places and a value each. Kept as float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that happened at a step: a fault, an alarm, a set routed by hand, a gap."""

    kind: str
    """One of ``EventKind``."""
    step: int
    """Optimizer step at which it happened."""
    place: str = ""
    """A unit, a layer, a head; empty: the whole run."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """The details, as plain values."""
    segment: int = 0
    """Segment that wrote it; set on reading."""
