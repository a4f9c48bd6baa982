"""One live writer per record: a lock beside the file that dies with the process.

The lock is on a file of its own. On the database itself it would mix with SQLite's locks, which POSIX drops as soon as
any handle of the process on that file is closed.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path
from typing import Any

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows has no flock; there, two writers are not kept apart
    fcntl = None

__all__ = ["WriterLock"]


class WriterLock:
    """An exclusive lock on ``<record>.lock``, held from ``acquire`` to ``release`` or to the end of the process."""

    def __init__(self, record: Path) -> None:
        self.path = record.with_name(record.name + ".lock")
        self._handle: int | None = None
        _locks.add(self)

    def acquire(self) -> bool:
        """Take the lock; False when another writer, also one of this process, holds it.

        Raises:
            OSError: The folder cannot be written.
        """
        self.release()
        while True:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            if fcntl is None:
                self._handle = handle
                return True
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                return False
            except OSError:  # a file system without locks: go on without, as on Windows
                self._handle = handle
                return True
            # The holder before may have removed the file between our open and our lock; then the name is free again.
            if self._is_named(handle):
                self._handle = handle
                return True
            os.close(handle)

    @property
    def held(self) -> bool:
        """Whether this object holds the lock and the lock file still lies in its place."""
        return self._handle is not None and self._is_named(self._handle)

    def release(self) -> None:
        """Give the lock back and remove its file; harmless when it is not held."""
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        # Removed before it is unlocked, so that nobody's fresh lock file is ever removed. Windows removes no open file.
        with contextlib.suppress(OSError):
            if self._is_named(handle):
                self.path.unlink()
        with contextlib.suppress(OSError):
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_UN)  # closing is not enough: a forked worker holds the same lock
        with contextlib.suppress(OSError):
            os.close(handle)
            self.path.unlink() if fcntl is None else None

    def drop_in_child(self) -> None:
        """In a forked child: let go of the inherited handle, and leave the lock with the parent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(OSError):
                os.close(handle)

    def _is_named(self, handle: int) -> bool:
        try:
            there, ours = os.stat(self.path), os.fstat(handle)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


_locks: weakref.WeakSet[WriterLock] = weakref.WeakSet()


def _drop_all_in_child() -> None:
    for lock in list(_locks):
        lock.drop_in_child()


# A data loader's worker is a fork. With the handle it would hold the lock on after its parent was killed, and a restart
# at once would be refused.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_all_in_child)
