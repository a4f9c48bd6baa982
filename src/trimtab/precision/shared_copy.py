"""One packed copy for all layers that read the same tensor, for as long as that tensor lives unchanged."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["SharedCopies"]

# Enough for every tensor that two projections of one block read, also where attention and MLP run side by side.
_MOST_SHARED = 4

Copy = tuple[Any, ...]


class SharedCopies:
    """The copies of the tensors that were read last; each thread has its own."""

    def __init__(self) -> None:
        self._threads = threading.local()

    def get(self, source: Tensor, dtype: torch.dtype, bits: int, make: Callable[[], Copy]) -> Copy:
        """The copy of ``source`` in ``bits``: the one another layer had made, or what ``make`` makes now.

        What a copy consists of is up to the caller, and the same for one ``bits``.

        Args:
            source: The tensor object that the layer was given; its identity and version say whether it is the same.
            dtype: What it was cast to before it was copied.
            bits: Width of the copy.
            make: Makes the copy.
        """
        entries: dict[int, _Entry] = self._threads.__dict__.setdefault("entries", {})
        entry = entries.get(id(source))
        if entry is None or not entry.is_of(source, dtype):
            while len(entries) >= _MOST_SHARED:
                # A list, and a default: a tensor that dies between two of these steps takes its own entry out.
                entries.pop(next(iter(list(entries)), 0), None)
            entry = entries[id(source)] = _Entry(source, dtype, entries)
        if bits not in entry.copies:
            entry.copies[bits] = make()
        return entry.copies[bits]

    def find(self, source: Tensor, dtype: torch.dtype, bits: int) -> Copy | None:
        """The copy that ``get`` would find; None where it would have one made."""
        entry: _Entry | None = self._threads.__dict__.get("entries", {}).get(id(source))
        return entry.copies.get(bits) if entry is not None and entry.is_of(source, dtype) else None

    def clear(self) -> None:
        """Let go of this thread's copies; a backward that needs one holds it itself."""
        self._threads.__dict__.pop("entries", None)


class _Entry:
    """The copies made of one tensor, one a width."""

    __slots__ = ("copies", "dtype", "source", "version")

    def __init__(self, source: Tensor, dtype: torch.dtype, entries: dict[int, _Entry]) -> None:
        key = id(source)

        def forget(reference: weakref.ref[Tensor]) -> None:
            # Another tensor may live at the same address by now.
            entry = entries.get(key)
            if entry is not None and entry.source is reference:
                entries.pop(key, None)

        self.source = weakref.ref(source, forget)
        self.version = source._version
        self.dtype = dtype
        self.copies: dict[int, Copy] = {}

    def is_of(self, source: Tensor, dtype: torch.dtype) -> bool:
        return self.source() is source and self.version == source._version and self.dtype == dtype
