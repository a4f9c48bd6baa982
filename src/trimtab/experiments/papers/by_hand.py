"""All units on the recovery path by hand for the first steps, or throughout, inside ``transformers.Trainer``."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trimtab.integrations.transformers import TrimtabCallback

__all__ = ["RecoverAll"]


class RecoverAll(TrainerCallback):
    """The high-fidelity warm-up: every recoverable unit is on the recovery path in the first steps, beyond any budget.

    The policy goes on deciding beside it, so that its scores are warm when the phase ends.

    Args:
        trimtab: The callback that attaches the guard; before this one in the Trainer's list.
        num_steps: How many steps; None for all of them.
    """

    def __init__(self, trimtab: TrimtabCallback, num_steps: int | None = None) -> None:
        self.trimtab = trimtab
        self.num_steps = num_steps

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """An optimizer step begins; the guard is attached, and its last decision is overruled."""
        guard = self.trimtab.guard
        assert guard is not None
        if guard.conversion is not None and (self.num_steps is None or state.global_step < self.num_steps):
            guard.route([unit.name for unit in guard.conversion.units])
