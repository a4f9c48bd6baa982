"""Names, signatures, command-line options and the record's schema are promises; this freezes them.

After a change that is meant, ``python tests/test_public_surface.py`` writes the snapshot anew; review the diff.
"""

import importlib
import inspect
import json
import sqlite3
from dataclasses import fields, is_dataclass
from pathlib import Path

SNAPSHOT = Path(__file__).parent / "data" / "public_surface.json"
MODULES = [
    "trimtab",
    "trimtab.control",
    "trimtab.faults",
    "trimtab.formats",
    "trimtab.integrations.lightning",
    "trimtab.integrations.loggers",
    "trimtab.integrations.transformers",
    "trimtab.monitors",
    "trimtab.precision",
    "trimtab.testing",
    "trimtab.trace",
]


def signature(thing: object) -> str:
    """A name's promise as text, without the annotations, which a newer Python prints in another way."""
    if inspect.isclass(thing) and is_dataclass(thing):
        return "fields: " + ", ".join(f.name for f in fields(thing))
    if not callable(thing):
        return type(thing).__name__
    try:
        found = inspect.signature(thing)
    except (ValueError, TypeError):
        return "callable"
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()]
    return str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def methods(thing: object) -> list[str]:
    """The public names of a class, those that it has from other classes of trimtab included."""
    if not inspect.isclass(thing):
        return []
    ours = [thing, *(base for base in thing.__mro__ if base.__module__.startswith("trimtab."))]
    return sorted({name for base in ours for name in vars(base) if not name.startswith("_")})


def schema(folder: Path) -> list[str]:
    from trimtab.trace import RunWriter, UnitRow, record_path

    RunWriter(folder / "schema", config={}, units=[UnitRow(name="u")]).close()
    with sqlite3.connect(record_path(folder / "schema")) as database:
        return sorted(row[0] for row in database.execute("select sql from sqlite_master where sql is not null"))


def surface(folder: Path) -> dict[str, object]:
    from trimtab.experiments.compare_settings import CompareSettings
    from trimtab.experiments.settings import DemoSettings, FaultsSettings, HealthySettings, TrainSettings

    found: dict[str, object] = {}
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.ismodule(thing):
                continue
            if name != "__version__":
                found[f"{module.__name__}.{name}"] = [signature(thing), *methods(thing)]
    found["trimtab demo"] = [f.name for f in fields(DemoSettings)]
    found["trimtab train"] = [f.name for f in fields(TrainSettings)]
    found["trimtab compare"] = [f.name for f in fields(CompareSettings)]
    found["trimtab experiment faults"] = [f.name for f in fields(FaultsSettings)]
    found["trimtab experiment healthy"] = [f.name for f in fields(HealthySettings)]
    found["schema"] = schema(folder)
    return found


def test_the_public_surface_is_what_was_promised(tmp_path):
    now = surface(tmp_path)
    promised = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    changed = {k: (promised.get(k), now.get(k)) for k in promised.keys() | now.keys() if promised.get(k) != now.get(k)}
    assert not changed, "If this is meant, run: python tests/test_public_surface.py"


if __name__ == "__main__":
    import tempfile

    text = json.dumps(surface(Path(tempfile.mkdtemp())), indent=1, sort_keys=True)
    SNAPSHOT.write_text(text + "\n", encoding="utf-8")
