"""Which source the figures of a run came from: the commit where it is a checkout of git, or else the version."""

from __future__ import annotations

import functools
import hashlib
import subprocess
from pathlib import Path
from typing import Any

import trimtab
from trimtab._version import __version__

__all__ = ["source_digest", "source_of", "source_text"]


def source_of(folder: Path | None = None) -> dict[str, Any]:
    """The commit, whether the source was changed since, and the version.

    Args:
        folder: A folder of the source; that of this package when left out.

    Returns: commit, None where the folder is not under git's control or git is not there; modified, version.

    Example:
        >>> source_of()["version"] == __version__
        True
    """
    folder = Path(trimtab.__file__).parent if folder is None else folder
    found: dict[str, Any] = {"commit": None, "modified": None, "version": __version__}
    # A package that is installed inside some other project's checkout is not that project's.
    if not _git(folder, "ls-files", "--", "."):
        return found
    commit = _git(folder, "rev-parse", "--short=7", "HEAD")
    if commit:
        found |= {"commit": commit, "modified": bool(_git(folder, "status", "--porcelain", "--", "."))}
    return found


def source_text(source: dict[str, Any]) -> str:
    """The source in a few words.

    Example:
        >>> source_text({"commit": "abc1234", "modified": True, "version": "0.1"})
        'abc1234, and changes that were not committed'
        >>> source_text({"commit": None, "modified": None, "version": "0.1"})
        'version 0.1'
    """
    if not source.get("commit"):
        return f"version {source.get('version', 'unknown')}"
    return source["commit"] + (", and changes that were not committed" if source.get("modified") else "")


@functools.cache
def source_digest(folder: Path | None = None) -> str:
    """A digest of every Python file of the source and its place; read once a process.

    It tells whether figures came from this very code, which a version does not, and a commit only without changes.

    Args:
        folder: A folder of the source; that of this package when left out.

    Example:
        >>> source_digest() == source_digest(Path(trimtab.__file__).parent)
        True
    """
    folder = Path(trimtab.__file__).parent if folder is None else folder
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).as_posix()):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(text)}\n".encode())
        digest.update(text)
    return digest.hexdigest()


def _git(folder: Path, *words: str) -> str:
    """What git answers; nothing where it fails."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
