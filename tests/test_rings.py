"""The house: which ring may import which."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "trimtab"
FILES = sorted(SOURCE.rglob("*.py"))


def imports_of(path: Path) -> set[str]:
    """Every module that a file names in an import, wherever in the file it stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path} imports relatively"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def ring(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0]


FORBIDDEN = {
    # ring: what it must not import
    "control": ("torch", "trimtab.precision", "trimtab.monitors", "trimtab.trace", "trimtab.guard", "trimtab.faults"),
    "formats": ("trimtab.precision", "trimtab.control", "trimtab.monitors", "trimtab.guard"),
    "precision": ("trimtab.control", "trimtab.guard", "trimtab.trace", "trimtab.monitors", "trimtab.faults"),
    "monitors": ("trimtab.guard", "trimtab.trace", "trimtab.control", "transformers"),
    "faults": ("trimtab.guard", "trimtab.trace", "trimtab.control", "transformers"),
    "trace": ("torch", "trimtab.precision", "trimtab.monitors", "trimtab.guard", "transformers"),
    "report": ("torch", "trimtab.guard", "transformers"),
    # What third parties run must ask for no test runner, and for none of the papers' models.
    "testing": ("pytest", "transformers", "trimtab.experiments", "trimtab.integrations"),
    "guard.py": ("transformers", "trimtab.formats", "sqlite3"),
}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_dependencies_point_inward(path):
    names = imports_of(path)
    for forbidden in FORBIDDEN.get(ring(path), ()):
        offending = {n for n in names if n == forbidden or n.startswith(forbidden + ".")}
        assert not offending, f"{path.name} imports {offending}"
    if ring(path) not in ("experiments", "cli.py"):
        assert not {n for n in names if n.startswith("trimtab.experiments")}
    if ring(path) not in ("testing", "__init__.py"):  # the public API names every room
        assert not {n for n in names if n.startswith("trimtab.testing")}


@pytest.mark.parametrize("module", ["trimtab", "trimtab.control", "trimtab.trace", "trimtab.errors"])
def test_what_needs_no_torch_loads_none(module):
    code = f"import sys, {module}; print([m for m in ('torch', 'transformers', 'plotly', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_file_says_why_it_is_there():
    for path in FILES:
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path
