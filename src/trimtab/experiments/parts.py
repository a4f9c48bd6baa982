"""The finished parts of an experiment on disk, so that one that is started again goes on with what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trimtab.experiments.settings import write_whole

__all__ = ["figures_of", "finished_figures", "keep_part"]


def finished_figures(path: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The figures of a part that was kept with this identity; None where there is none, or one that cannot be read.

    Args:
        path: The part's file.
        identity: All that its figures depend on; JSON-able.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return found["figures"] if found.get("identity") == identity else None


def keep_part(path: Path, identity: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
    """Keep a part that is finished.

    Returns: Its figures, read back, so that a part that was finished before is the same to the letter.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, {"identity": identity, "figures": figures})
    return figures_of(path)


def figures_of(path: Path) -> dict[str, Any]:
    """The figures of a part that is known to be there."""
    return json.loads(path.read_text(encoding="utf-8"))["figures"]
