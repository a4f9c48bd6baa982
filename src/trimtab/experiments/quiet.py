"""Keeps libraries that chatter while they are imported from talking into what our own programs print. No torch here."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

__all__ = ["hush_libraries", "quiet_libraries"]

# What transformers imports where it is installed, and what that says of kernels and of torch's insides when it is. The
# command line is our own program, whose user has asked for none of them; a library must leave its user's loggers alone.
_CHATTY_LIBRARIES = ("torchao", "torch.utils._pytree", "bitsandbytes")


def hush_libraries() -> None:
    """From here on only their errors are heard; for a process of our own."""
    for library in _CHATTY_LIBRARIES:
        logging.getLogger(library).setLevel(logging.ERROR)


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Only their errors are heard inside; on leaving, their loggers are as they were found."""
    levels = {name: logging.getLogger(name).level for name in _CHATTY_LIBRARIES}
    hush_libraries()
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
