"""No recovery at all: what damping the gradients of risky units does by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from trimtab.control.controller import Controller
from trimtab.control.policies.scored import ScoredPolicy
from trimtab.control.policy import Policy
from trimtab.control.presets import robust

__all__ = ["DampingOnly"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DampingOnly(ScoredPolicy):
    """Scale the gradients of risky units down, and switch none of them.

    What a policy with ``damping`` gains over this, it gains by recovery.

    Args:
        scores: Settings of the GNMR scores, which say what is risky; ``damping`` is on whatever they say.

    Example:
        >>> controller = DampingOnly(scores=Policy()).start(1)
        >>> decision = [controller.update([norm]) for norm in (1.0, 4.0)][-1]
        >>> decision.scale.tolist(), decision.active.tolist()
        ([0.25], [False])
    """

    kind: ClassVar[str] = "damping_only"

    scores: Policy = field(default_factory=robust)

    @property
    def damping(self) -> bool:
        """True."""
        return True

    def budget(self, num_recoverable: int) -> int:
        """0."""
        return 0

    def start(
        self, units: int | Sequence[str], recoverable: Sequence[bool] | Sequence[str] | None = None
    ) -> Controller:
        """Start a controller; see ``Policy.start``."""
        return Controller(units, replace(self.scores, max_active=0, damping=True), recoverable)
