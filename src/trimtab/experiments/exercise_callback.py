"""Exercising the switch inside ``transformers.Trainer``."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trimtab.experiments.exercise import Exercise, Observable
from trimtab.integrations.transformers import TrimtabCallback

__all__ = ["ExerciseCallback"]


class ExerciseCallback(TrainerCallback):
    """Puts all recoverable units on the recovery path by hand in every ``every``-th step; see ``Exercise``.

    Args:
        trimtab: The callback that attaches the guard; before this one in the Trainer's list.
        every: Steps from one exercise to the next. >= 1.
        observable: By what a unit is seen to be on the recovery path.
    """

    def __init__(self, trimtab: TrimtabCallback, every: int, observable: Observable) -> None:
        self.trimtab = trimtab
        self.every = every
        self.observable: Observable = observable
        self._exercise: Exercise | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The guard is attached."""
        assert self.trimtab.guard is not None
        self._exercise = Exercise(self.trimtab.guard, self.every, self.observable)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """An optimizer step begins."""
        assert self._exercise is not None
        self._exercise.begin_step(state.global_step + 1)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """An optimizer step is over; before it is counted, evaluated or saved."""
        assert self._exercise is not None
        self._exercise.end_step(state.global_step)
