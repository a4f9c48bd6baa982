"""What a controller answers: the scores of one step and the active set of the next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trimtab.control.arrays import to_numpy
from trimtab.control.reasons import REASONS

__all__ = ["Decision"]


# No slots and no class-level defaults: a lazy subclass may then fill the fields through __getattr__ on first use.
@dataclass(frozen=True, eq=False)
class Decision:
    """The scores of one step, and the units that are on the recovery path in the next one.

    All arrays have shape (units,), and live where the norms lived. Treat them as read-only.

    Attributes:
        gnmr: n / historical mean. NaN = not observed, +inf = failed, otherwise finite.
        delta: GNMR / mean of its recent values. NaN = not observed, +inf = failed, otherwise finite.
        risk: max(GNMR/alpha, Delta/beta, error/error_limit, raised risk, amax ratio/amax_limit), the error compared as
            the policy has it; what is not known of a unit adds nothing. +inf = its norm failed, otherwise finite.
            Never NaN.
        active: bool, the units on the recovery path in step ``step + 1``.
        lock: int, further decisions in which the unit stays a candidate without a risk above 1.
        scale: What ``damping`` multiplies the unit's gradient of this step with: min(1, mean/n) where GNMR or Delta is
            above its threshold, 0 where failed, otherwise 1. What else is a risk scales nothing.
        step: The optimizer step that the norms are from; the first is 1.
        alpha: Threshold of GNMR in force.
        beta: Threshold of Delta in force.
        reason: int8, which term made the unit's risk, or "locked": codes of ``trimtab.control.REASONS``. None where the
            controller does not say, and before the first decision.

    Source: Kong et al. 2026, Algorithms 1 and 2.

    Example:
        >>> from trimtab.control import Controller, Policy
        >>> decision = Controller(3, Policy(max_active=1)).update([1.0, 0.0, float("nan")])
        >>> decision.active.tolist(), decision.num_unobserved, decision.num_failed
        ([False, False, True], 1, 1)
        >>> decision.reasons
        ('none', 'none', 'failed')
    """

    gnmr: Any
    delta: Any
    risk: Any
    active: Any
    lock: Any
    scale: Any
    step: int
    alpha: float
    beta: float
    # A factory leaves no attribute on the class.
    reason: Any = field(default_factory=lambda: None)

    @property
    def reasons(self) -> tuple[str, ...]:
        """The names of ``reason``; "none" for every unit where the controller does not say. Waits for the device."""
        if self.reason is None:
            return (REASONS[0],) * len(self.active)
        return tuple(REASONS[code] for code in to_numpy(self.reason).tolist())

    # Counted on reading, because counting in `update` would wait for the device.
    @property
    def num_unobserved(self) -> int:
        """Units without a norm in this step: missing or exactly 0."""
        gnmr = to_numpy(self.gnmr)
        return int((gnmr != gnmr).sum())

    @property
    def num_failed(self) -> int:
        """Units whose norm was NaN, infinite or negative in this step."""
        return int((to_numpy(self.risk) == float("inf")).sum())
