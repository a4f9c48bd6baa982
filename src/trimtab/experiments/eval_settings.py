"""What ``trimtab eval`` can be told. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from trimtab.errors import ConfigError

__all__ = ["EvalSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSettings:
    """Evaluate a checkpoint with the tasks of lm-eval, or with a file of your own.

    A file is JSON lines, all of one kind: {"context": ..., "choices": [...], "answer": ...} ("question" is the same as
    "context"; the answer is a number from 0, a letter or the choice itself), or {"text": ...} for perplexity.

    Example: trimtab eval runs/text --tasks hellaswag my_questions.jsonl
    """

    path: Annotated[Path, tyro.conf.Positional]
    """A checkpoint, of a whole model or of adapters, or the folder of a run of trimtab train."""
    tasks: tuple[str, ...]
    """Names of lm-eval's tasks, such as hellaswag, mmlu, gsm8k or wikitext, and files of your own."""
    limit: int | None = None
    """Examples a task, to try things out; all of them when left out."""
    shots: int | None = None
    """Solved examples before each; the task's own number when left out. Files have none."""
    base: Path | None = None
    """The model that adapters belong to, where the checkpoint does not say or it has moved."""
    batch: int = 8
    """Sequences a batch."""
    out: Path | None = None
    """File for the results, in JSON."""
    json: bool = False
    """Print JSON for machines."""

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ConfigError("tasks", [], "there is nothing to evaluate by.", "Name a task or a file.")
        for setting, least in (("limit", 1), ("shots", 0), ("batch", 1)):
            value = getattr(self, setting)
            if value is not None and value < least:
                raise ConfigError(setting, value, f"it is at least {least}.", f"Set it to {least} or more.")

    def check_path(self) -> None:
        """See that there is something to evaluate, before anything heavy is loaded.

        Raises: ConfigError: when there is no such folder.
        """
        if not self.path.is_dir():
            raise ConfigError("path", str(self.path), "there is no such folder.", "Name a checkpoint or a run.")
