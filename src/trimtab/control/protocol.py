"""The two protocols through which a guard takes decisions: a policy starts a controller, a controller answers norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from trimtab.control.arrays import Array
from trimtab.control.checkpoint import LoadReport
from trimtab.control.decision import Decision

__all__ = ["ControllerLike", "PolicyLike", "ask"]


@runtime_checkable
class ControllerLike(Protocol):
    """Takes one decision for each optimizer step."""

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the units, from the input to the loss."""
        ...

    @property
    def recoverable(self) -> tuple[bool, ...]:
        """For each unit, whether it may be on the recovery path."""
        ...

    @property
    def step(self) -> int:
        """Decisions taken so far."""
        ...

    @property
    def active(self) -> Array:
        """The active set of the next step, bool, shape (units,)."""
        ...

    @property
    def budget(self) -> int:
        """The most units that are ever active at once."""
        ...

    def update(
        self,
        norms: Array | Sequence[float | None],
        errors: Array | Sequence[float | None] | None = None,
        risks: Array | Sequence[float | None] | None = None,
        amaxes: Array | Sequence[float | None] | None = None,
    ) -> Decision:
        """Decide the next step's active set; everything is (units,).

        Args:
            norms: This step's.
            errors: Channel errors, where known.
            risks: Risks raised from outside. A controller that does not take them works while none is raised.
            amaxes: Largest magnitudes of the operands, where known. Given only if the policy has an ``amax_limit``, so
                that a controller whose policy has none need not take them.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, as plain JSON-able values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> LoadReport:
        """Continue from ``state``; says which units are new and which are gone."""
        ...


@runtime_checkable
class PolicyLike(Protocol):
    """Settings from which a controller starts."""

    def start(
        self, units: int | Sequence[str], recoverable: Sequence[bool] | Sequence[str] | None = None
    ) -> ControllerLike:
        """A fresh controller for ``units``."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain JSON-able values, for the run record."""
        ...


def ask(
    controller: ControllerLike,
    policy: object,
    norms: Array,
    errors: Array | None,
    risks: Array | None,
    amaxes: Array | None,
) -> Decision:
    """The decision of ``controller``, which is only given what there is, and amaxes only if ``policy`` judges them.

    Args:
        controller: One that ``policy`` started; see ``ControllerLike.update``.
        policy: The settings.
        norms: This step's. Everything is (units,).
        errors: Channel errors; None = not known of any unit, as in the next ones.
        risks: Raised risks.
        amaxes: Largest magnitudes of the operands.
    """
    if amaxes is not None and getattr(policy, "amax_limit", None) is not None:
        return controller.update(norms, errors, risks, amaxes)
    if risks is not None:
        return controller.update(norms, errors, risks)
    return controller.update(norms, errors)
