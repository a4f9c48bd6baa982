"""Whatever trimtab can say in a run is explained in docs/troubleshooting.md, and nothing there is out of date."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import trimtab.monitors
from trimtab.monitors import BaseMonitor
from trimtab.monitors.diagnosis import _ADVICE

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "trimtab"
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
TREES = {
    path: ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(SOURCE.rglob("*.py"))
    if "testing" not in path.parts
}
SPEAKS = {"say_once", "_say_once", "_say", "_warn", "warn"}
# What is put in a queue, and said by another function.
QUEUES = {"self._outbox.warnings.popleft()": "_warn_once"}


def name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def literal(node: ast.expr) -> str | None:
    """A string, or the parts of one that are written down; {} where something is filled in."""
    if isinstance(node, ast.Constant):
        return re.sub(r"\{[^}]*\}", "{}", node.value) if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
    return None


class Messages:
    """Follows what a speaking call is given back to the sentences that are written down."""

    def __init__(self, tree: ast.Module, inside: list[ast.AST]) -> None:
        self.tree, self.inside = tree, inside

    def of(self, node: ast.expr) -> list[str] | None:
        """The sentences; empty where another function's caller gives it; None where it is not understood."""
        text = literal(node)
        if text is not None:
            return [text]
        if isinstance(node, ast.Constant):
            return []
        if isinstance(node, ast.BinOp | ast.BoolOp | ast.IfExp):
            parts = (
                [node.left, node.right]
                if isinstance(node, ast.BinOp)
                else node.values
                if isinstance(node, ast.BoolOp)
                else [node.body, node.orelse]
            )
            return [text for part in parts for text in self.of(part) or []]
        if isinstance(node, ast.Name):
            return self.of_name(node.id)
        if isinstance(node, ast.Attribute):
            return []  # a field of what it is given: an alarm's sentence, which the rule has
        return self.of_call(node) if isinstance(node, ast.Call) else None

    def of_name(self, name: str) -> list[str] | None:
        found: list[str] = []
        known = False
        for place in (*self.inside, self.tree):
            body = ast.walk(place) if place is not self.tree else iter(self.tree.body)
            for one in body:
                if isinstance(one, ast.arg) and one.arg == name:
                    known = True
                # What a loop takes from a queue was put there by a speaking call.
                if isinstance(one, ast.For) and name in {n.id for n in ast.walk(one.target) if isinstance(n, ast.Name)}:
                    known = True
                targets = one.targets if isinstance(one, ast.Assign) else []
                if isinstance(one, ast.AugAssign | ast.AnnAssign):
                    targets = [one.target]
                if any(isinstance(t, ast.Name) and t.id == name for t in targets) and one.value is not None:
                    known = True
                    found += self.of(one.value) or []
                if (
                    isinstance(one, ast.Call)
                    and name_of(one.func) == "append"
                    and getattr(one.func.value, "id", "") == name
                ):
                    known = True
                    found += self.of(one.args[0]) or []
        return found if known else None

    def of_call(self, node: ast.Call) -> list[str] | None:
        function = QUEUES.get(ast.unparse(node), name_of(node.func))
        if function == "format":
            return self.of(node.func.value)
        if function in ("join", "TrimtabWarning"):
            return self.of(node.args[0])
        found: list[str] = []
        known = False
        for tree in TREES.values():
            for one in ast.walk(tree):
                if isinstance(one, ast.FunctionDef) and one.name == function:
                    known = True
                    inner = Messages(tree, [one])
                    for part in ast.walk(one):
                        if isinstance(part, ast.Return) and part.value is not None:
                            found += inner.of(part.value) or []
                        if isinstance(part, ast.Call) and name_of(part.func) == "append":
                            found += inner.of(part.args[0]) or []
        return found if known else None


@functools.cache
def spoken() -> list[tuple[str, list[str] | None]]:
    return list(speaking_calls())


def speaking_calls() -> Iterator[tuple[str, list[str] | None]]:
    """Each speaking call, and the sentences that it can say."""
    for path, tree in TREES.items():
        parents: dict[ast.AST, ast.AST] = {c: p for p in ast.walk(tree) for c in ast.iter_child_nodes(p)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or name_of(node.func) not in SPEAKS or not node.args:
                continue
            if name_of(node.func) == "warn":
                if not any("TrimtabWarning" in ast.unparse(a) for a in node.args):
                    continue
                message = node.args[0]
            else:
                message = node.args[-1]  # say_once has a key before it
            inside, one = [], parents.get(node)
            while one is not None:
                if isinstance(one, ast.FunctionDef | ast.Lambda):
                    inside.append(one)
                one = parents.get(one)
            where = f"{path.relative_to(SOURCE)}:{node.lineno}"
            yield where, Messages(tree, inside).of(message)


FRAGMENTS = [
    re.sub(r"\s+", " ", fragment)
    for line in re.findall(r"^(`[^\n]*`)\n: ", PAGE, re.MULTILINE)
    for fragment in re.findall(r"`([^`]+)`", line)
]


def section(heading: str) -> list[list[str]]:
    """The rows of the table under a heading."""
    text = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return rows[2:]


def test_where_a_sentence_comes_from_is_known_for_each_call():
    unknown = [where for where, texts in spoken() if texts is None]
    assert not unknown, "teach Messages how these calls come by what they say"


def test_every_warning_is_explained():
    said = {text: where for where, texts in spoken() for text in texts or [] if len(text) > 30}
    assert len(said) > 25
    missing = {where: text for text, where in said.items() if not any(f in text for f in FRAGMENTS)}
    assert not missing


def test_no_explanation_is_of_something_that_is_never_said():
    said = [text for _, texts in spoken() for text in texts or []]
    assert FRAGMENTS
    assert [f for f in FRAGMENTS if not any(f in text for text in said)] == []


def test_every_alarm_is_explained_and_no_other():
    monitors = [getattr(trimtab.monitors, name) for name in trimtab.monitors.__all__]
    made = [m() for m in monitors if isinstance(m, type) and issubclass(m, BaseMonitor) and m is not BaseMonitor]
    assert len(made) >= 5
    rules = {f"{monitor.name}/{metric}" for monitor in made for metric in monitor.alarm_rules}
    assert {row[0].strip("`") for row in section("Alarms")} == rules


def test_every_diagnosis_is_explained_and_no_other():
    assert {row[0] for row in section("Diagnoses")} == _ADVICE.keys()
