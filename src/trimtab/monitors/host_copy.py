"""A copy from the device to the host that nobody waits for until it is read."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["HostCopy"]


class HostCopy:
    """Starts copying ``tensor`` to the host at once; ``read`` waits for this copy alone, not for work queued after it.

    Args:
        tensor: A tensor that nobody writes to again, on any device.

    Example:
        >>> HostCopy(torch.tensor([1.0, 2.0])).read().tolist()
        [1.0, 2.0]
    """

    __slots__ = ("_event", "_tensor")

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))
        else:
            # On the CPU there is nothing to copy; elsewhere (MPS, say) the read waits for the stream.
            self._tensor = tensor

    def read(self) -> np.ndarray:
        """The values on the host; waits until they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor.detach().cpu().numpy()
