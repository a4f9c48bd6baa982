"""What a job needs to be installed: asked for all at once, and before anything is written or trained. No torch here."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

from trimtab.errors import MissingExtraError

__all__ = ["Package", "require_packages"]

Package = tuple[str, str]
"""A package's name, and the extra of trimtab that brings it."""


def require_packages(feature: str, packages: Iterable[Package]) -> None:
    """See that all of ``packages`` are there, without importing any of them.

    Args:
        feature: What needs them, as the subject of a sentence.
        packages: Each once.

    Raises: MissingExtraError: when some are not; it names all of these.
    """
    missing = [(name, extra) for name, extra in packages if not _is_there(name)]
    if missing:
        extras = dict.fromkeys(extra for _, extra in missing)
        raise MissingExtraError(feature, tuple(name for name, _ in missing), ",".join(extras))


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # something in the path of imports, or a half-made module, says that it is not
        return False
