"""Fault: a batch that is too small for some steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor

from trimtab.faults.window import WindowFault, check_whole

__all__ = ["SmallBatch", "cut_by"]

Batch = TypeVar("Batch")


class SmallBatch(WindowFault):
    """For some steps, only the first samples of each batch are trained on.

    Args:
        num_samples: How many are left of a batch; at least 1.
        start_step: First optimizer step that suffers it; at least 1.
        num_steps: How long it lasts; at least 1.

    Raises: ConfigError: when a setting cannot be meant.

    Example:
        >>> import torch
        >>> fault = SmallBatch(num_samples=2)
        >>> with fault:
        ...     fault.cut({"ids": torch.zeros(8, 5)})["ids"].shape
        torch.Size([2, 5])
        >>> fault.cut(torch.zeros(8, 5)).shape
        torch.Size([8, 5])
    """

    kind = "small batch"
    place = "batch"

    def __init__(self, *, num_samples: int = 1, start_step: int = 1, num_steps: int = 1) -> None:
        super().__init__(start_step=start_step, num_steps=num_steps)
        check_whole("num_samples", num_samples, 1)
        self.num_samples = num_samples

    def settings(self) -> dict[str, Any]:
        """How many samples are left."""
        return {"num_samples": self.num_samples}

    def put(self) -> None:
        """Nothing: ``cut`` asks whether it holds."""

    def take_away(self) -> None:
        """Nothing."""

    def cut(self, batch: Batch) -> Batch:
        """``batch`` with as many samples as the step has: tensors cut in their first dimension, inside containers."""
        return _cut(batch, self.num_samples) if self._is_on else batch

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of ``loader``, each cut as the step in which it is asked for has it.

        What fetches batches ahead of their step must be inside ``loader``, not around this.
        """
        for batch in loader:
            yield self.cut(batch)


def cut_by(faults: Iterable[SmallBatch], loader: Iterable[Batch]) -> Iterator[Batch]:
    """The batches of ``loader``, each cut by all of ``faults`` that hold as it is asked for.

    Example:
        >>> with SmallBatch(num_samples=2) as fault:
        ...     list(cut_by([fault, SmallBatch(num_samples=1)], [[Tensor(3)]]))[0][0].shape
        torch.Size([2])
    """
    for fault in faults:
        loader = fault.batches(loader)
    yield from loader


def _cut(batch: Any, num_samples: int) -> Any:
    if isinstance(batch, Tensor):
        return batch[:num_samples] if batch.dim() else batch
    if isinstance(batch, Mapping):
        # transformers' batches are mappings of a class of their own, which takes a dictionary.
        return type(batch)({name: _cut(value, num_samples) for name, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_cut(value, num_samples) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_cut(value, num_samples) for value in batch)
    return batch
