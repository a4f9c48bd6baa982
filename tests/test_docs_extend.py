"""The worked examples of docs/extend: a recipe, a monitor and a policy of one's own, each under its contract."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[1] / "docs" / "extend"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_extend_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Where pickle looks for classes.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


TestRoundedInputs = load("own_recipe").TestRoundedInputs
TestDeadScales = load("own_monitor").TestDeadScales
TestFastestGrowing = load("own_policy").TestFastestGrowing


def test_every_example_is_here():
    found = {path.stem for path in FOLDER.glob("*.py")}
    assert found == {name.removeprefix("docs_extend_") for name in sys.modules if name.startswith("docs_extend_")}
