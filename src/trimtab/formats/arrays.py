"""The array library of an array, found in a way that ``torch.compile`` can trace.

array_api_compat looks types up through caches, which it cannot. Torch's own namespace has what the blocked view and the
packing need.
"""

from __future__ import annotations

from typing import Any

import torch
from array_api_compat import array_namespace, device

from trimtab.errors import ConfigError

__all__ = ["library_of", "namespace_of", "padded"]


def namespace_of(array: Any) -> Any:
    """The array-API namespace of ``array``.

    Raises: ConfigError: when it is no array of a library that has one.
    """
    try:
        return array_namespace(array)
    except TypeError:
        allowed = "it is an array of NumPy, torch or another array-API library."
        raise ConfigError("array", array, allowed, "Convert it with numpy.asarray or torch.as_tensor.") from None


def library_of(array: Any) -> Any:
    """The namespace whose functions take ``array``."""
    return torch if isinstance(array, torch.Tensor) else namespace_of(array)


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
