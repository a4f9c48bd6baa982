"""Versions of what the figures of an experiment depend on, for its summary. No torch here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform

from trimtab._version import __version__

__all__ = ["package_versions"]

_PACKAGES = ("torch", "transformers", "peft", "torchao", "bitsandbytes", "numpy")


def package_versions() -> dict[str, str]:
    """Those of trimtab, Python, and what of the packages that experiments use is installed.

    Example:
        >>> {"trimtab", "python", "torch"} <= set(package_versions())
        True
    """
    versions = {"trimtab": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is not None:
            versions[package] = importlib.metadata.version(package)
    return versions
