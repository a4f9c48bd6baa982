"""Writes the page of results from the summaries of the paper's experiments.

python -m trimtab.experiments.results_page runs -o docs/experiments/results.md
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trimtab.errors import ConfigError, TrimtabError
from trimtab.experiments.papers.experiment import EXPERIMENTS, tables_of
from trimtab.experiments.papers.page import results_page

__all__ = ["find_summaries", "main"]


def find_summaries(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """The summaries of experiments below ``folder``, in the order of the page; runs of presets are left out.

    Args:
        folder: Where the experiments wrote to, or a folder above.

    Returns: Of each experiment, where its file is, seen from ``folder``'s own parent, and what it holds.

    Raises: ConfigError: when there are none, or two of one experiment.
    """
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for path in sorted(folder.glob("**/summary.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue
        name = content.get("experiment") if isinstance(content, dict) else None
        if not isinstance(name, str) or name not in EXPERIMENTS or "comparisons" not in content:
            continue
        if name in found:
            allowed = f"it holds two runs of the experiment {name!r} ({found[name][0]} and {path})."
            raise ConfigError("folder", str(folder), allowed, "Move one of them elsewhere.")
        # Made anew, as all that the page says is: by the same rules, whatever they were when the run ended.
        tables = tables_of(name, content["comparisons"])
        found[name] = (str(path.relative_to(folder.parent)), content | {"tables": tables})
    if not found:
        allowed = "no summary.json of an experiment is in it."
        raise ConfigError("folder", str(folder), allowed, "Run trimtab experiment activations first.")
    return [found[name] for name in EXPERIMENTS if name in found]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page.

    Args:
        arguments: The words after the module; those of the process when left out.

    Returns: The exit status: 0, or 2 when there is nothing to write of.
    """
    parser = argparse.ArgumentParser(prog="python -m trimtab.experiments.results_page", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the experiments wrote to, such as runs")
    parser.add_argument("-o", "--out", type=Path, default=Path("docs/experiments/results.md"), help="the page")
    words = parser.parse_args(arguments)
    try:
        page = results_page(find_summaries(words.folder))
    except TrimtabError as error:
        print(f"trimtab: error: {error}", file=sys.stderr)
        return 2
    words.out.parent.mkdir(parents=True, exist_ok=True)
    words.out.write_text(page, encoding="utf-8")
    print(f"Results: {words.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
