"""The array library of an array, found in a way that ``torch.compile`` can trace.

array_api_compat looks types up through caches, which it cannot. Torch's own namespace has what the blocked view and the
packing need.
"""

from __future__ import annotations

from typing import Any

import torch
from array_api_compat import array_namespace, device

__all__ = ["library_of", "padded"]


def library_of(array: Any) -> Any:
    """The namespace whose functions take ``array``."""
    return torch if isinstance(array, torch.Tensor) else array_namespace(array)


def padded(array: Any, axis: int, size: int) -> Any:
    """``array`` with zeros behind it up to ``size`` along ``axis``; itself when it is as long."""
    missing = size - array.shape[axis]
    if not missing:
        return array
    xp = library_of(array)
    shape = list(array.shape)
    shape[axis] = missing
    where = array.device if xp is torch else device(array)  # a NumPy array before 2.0 has no such attribute
    return xp.concat([array, xp.zeros(tuple(shape), dtype=array.dtype, device=where)], axis=axis)
