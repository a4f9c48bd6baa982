"""Settings of the whole suite, and a check on all of it: what a guard recorded in a test, a replay decides again."""

import builtins
import os
import re
import subprocess
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

# Small operators on several threads crawl when anything runs beside them, and tests compare bits.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
torch.set_num_threads(1)

# What became of a test's records, in the terminal's words, on its way through the reports of the workers.
_PROPERTY = "run records"
_LONGEST_WAIT_S = 2.0
# A setting of our own policies that cannot be read back gives another sentence, and is no reason to pass a record over.
_NOT_OURS = re.compile(r"the recorded policy cannot be built again \(kind=.*: no policy is of this kind\.")


class MadeRecords:
    """The run records that guards wrote since the last test.

    Those of this process are known from the journal that opened them. Other processes' (ranks, workers, scripts) are
    looked for in the temporary folders that pytest gave out, and known by the versions that only a guard writes down.
    """

    def __init__(self) -> None:
        self._paths: list[Path] = []
        self._writers: list[weakref.ref[Any]] = []
        self._folders: list[Path] = []

    def add_writer(self, writer: Any) -> None:
        """A guard has opened ``writer``; weakly kept, so that a dropped one closes as it would without this."""
        self._paths.append(writer.path.absolute())
        self._writers.append(weakref.ref(writer))

    def add_folder(self, folder: Path) -> None:
        """Other processes may write records below ``folder``."""
        self._folders.append(folder)

    def forget(self) -> None:
        """Begin anew, with the next test."""
        self._paths, self._writers, self._folders = [], [], []

    def replay(self) -> tuple[Counter[str], list[str]]:
        """How many records came to what, and a sentence for each that is not what its own policy decides."""
        fates: Counter[str] = Counter()
        problems: list[str] = []
        for path in self._find():
            try:
                fate, problem = _replayed(path)
            except Exception as error:
                fate, problem = "unreadable", f"it cannot be replayed ({type(error).__name__}: {error})."
            fates[fate] += 1
            if problem:
                problems.append(f"{path}: {problem}")
        return fates, problems

    def _find(self) -> list[Path]:
        for reference in self._writers:
            writer = reference()
            if writer is not None and not writer.closed:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # a disk that a test has broken
                    writer.flush(_LONGEST_WAIT_S)
        found = dict.fromkeys(self._paths)
        if self._folders:
            from trimtab.trace import find_runs

            below = (path for folder in self._folders if folder.is_dir() for path in find_runs(folder.absolute()))
            found |= dict.fromkeys(path for path in below if path not in found and _is_guards(path))
        return list(found)


def _is_guards(path: Path) -> bool:
    """Whether a guard wrote the record, not a test by itself."""
    from trimtab.errors import RecordError
    from trimtab.trace import open_run

    try:
        with open_run(path) as run:
            return run.versions.keys() >= {"python", "torch", "trimtab"} and "num_parameters" in run.config
    except RecordError:
        return False


def _replayed(path: Path) -> tuple[str, str | None]:
    """What a replay of the record came to, and what is wrong with that."""
    from trimtab.errors import ConfigError
    from trimtab.trace import open_run, verify

    if not path.exists():
        return "removed by the test", None
    try:
        with open_run(path) as run:
            told = verify(run)
            if run.damage is not None:
                return "damaged", run.damage
    except ConfigError as error:
        if "it holds no decision to take again." in str(error):
            return "without a decision", None
        if _NOT_OURS.search(str(error)):
            return "of a policy that is not trimtab's", None
        raise
    if told.is_exact:
        return "replayed exactly", None
    notes = "".join(f" {note}" for note in told.notes)
    return "replayed with a difference", (
        f"the recorded policy decides otherwise from step {told.first_different_step} on, in {told.num_different} "
        f"unit-steps of {told.num_steps} steps.{notes}"
    )


_made = MadeRecords()


@pytest.fixture(scope="session", autouse=True)
def _note_what_guards_record() -> Iterator[None]:
    """Have ``_made`` told of every record that a guard opens, and of every temporary folder."""
    from trimtab.journal import Journal

    open_record, make_folder = Journal.open, pytest.TempPathFactory.mktemp

    def open_and_note(journal: Journal, record: str | Path | None, description: Mapping[str, Any]) -> None:
        open_record(journal, record, description)
        if journal.writer is not None:
            _made.add_writer(journal.writer)

    def make_and_note(factory: pytest.TempPathFactory, *args: Any, **settings: Any) -> Path:
        folder = make_folder(factory, *args, **settings)
        _made.add_folder(folder)
        return folder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "open", open_and_note)
        patch.setattr(pytest.TempPathFactory, "mktemp", make_and_note)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """A test that passes has also recorded nothing that a replay with the recorded policy does not decide again."""
    result = yield
    marker = item.get_closest_marker("unreplayable")
    fates, problems = _made.replay()
    if marker is not None:
        fates = Counter({"of tests marked as unreplayable": fates.total()})
    if fates.total():
        item.user_properties.append((_PROPERTY, dict(fates)))
    if marker is not None and not problems:
        pytest.fail("marked as unreplayable, and every record of it replays: take the mark away.", pytrace=False)
    if marker is None and problems:
        pytest.fail("\n".join(problems), pytrace=False)
    return result


def pytest_runtest_teardown() -> None:
    """What the next test's fixtures record is the next test's."""
    _made.forget()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many records were replayed, and what the others were."""
    fates: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "call":
                for name, values in report.user_properties:
                    fates.update(values if name == _PROPERTY else {})
    if fates:
        terminalreporter.write_line(f"{_PROPERTY}: " + ", ".join(f"{n} {fate}" for fate, n in fates.most_common()))


@pytest.fixture(autouse=True)
def _fresh_compiler_counters() -> None:
    """A graph break that an earlier test has counted is no graph break of this one; a reset of dynamo keeps them."""
    counting = sys.modules.get("torch._dynamo.utils")
    if counting is not None:
        counting.counters.clear()


@pytest.fixture(autouse=True)
def _no_value_of_a_doctest() -> None:
    """A doctest leaves its last value as ``builtins._``; tyro, when first imported, puts all of builtins into a set."""
    vars(builtins).pop("_", None)


@pytest.fixture(scope="session")
def start_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Runs a test file as a script on several ranks, ``file rank folder``, and gives the folder they wrote to."""

    def start(script: str, num_ranks: int) -> Path:
        folder = tmp_path_factory.mktemp("ranks")
        ranks = [
            subprocess.Popen(
                [sys.executable, script, str(rank), str(folder)],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(num_ranks)
        ]
        try:
            outputs = [process.communicate(timeout=300)[0] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.communicate()  # closes its pipe, or a later test is told of it
        assert [process.returncode for process in ranks] == [0] * num_ranks, "\n".join(outputs)
        return folder

    return start
