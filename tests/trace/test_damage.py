from __future__ import annotations

import shutil
import sqlite3
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.errors import RecordError
from trimtab.trace import RunWriter, StepRow, UnitRow, find_runs, open_run, summarize
from trimtab.trace.rescue import rescue


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """File of a closed record of 400 steps with 200 units: rows larger than a page."""
    folder = tmp_path_factory.mktemp("whole")
    units = [UnitRow(name=f"u{i}") for i in range(200)]
    with RunWriter(folder, config={"a": 1}, units=units) as writer:
        for step in range(1, 401):
            writer.write_step(StepRow(step=step, norms=[step / 8] * 200, gnmr=[1.0] * 200, active=[True] * 200))
            if step % 50 == 0:
                writer.flush()
    return folder / "run.sqlite"


def _check_prefix(path):
    """What opens is true: steps 1 to some n, each as written."""
    with open_run(path) as run:
        table = run.steps()
        assert table.step.tolist() == list(range(1, len(table) + 1))
        assert (table.norms == table.step[:, None] / 8).all()
        assert run.config == {"a": 1}
        summary = summarize(run)
        assert summary.num_steps == len(table)
        assert summary.damage == run.damage
        return len(table), run.damage


def test_a_record_cut_in_the_middle_opens_up_to_its_last_whole_step(whole, tmp_path):
    content = whole.read_bytes()
    path = tmp_path / "cut.sqlite"
    lengths = []
    for share in (0.3, 0.5, 0.501, 0.9):
        path.write_bytes(content[: int(len(content) * share)])
        num_steps, damage = _check_prefix(path)
        assert f"read up to step {num_steps}, what follows is lost" in damage
        # Rows are stored in the order written, so a share of the file holds about that share of the steps.
        assert num_steps > 0.9 * share * 400
        lengths.append(num_steps)
    assert lengths == sorted(lengths)
    assert path.read_bytes() == content[: int(len(content) * 0.9)]


def _opens(path):
    try:
        open_run(path).close()
    except RecordError as error:
        return str(path) not in str(error)
    return True


@settings(max_examples=30, deadline=None)
@given(length=st.integers(0, 2_000_000))
def test_any_cut_gives_a_true_prefix_or_one_clear_error(whole, length, tmp_path_factory):
    content = whole.read_bytes()
    path = tmp_path_factory.mktemp("cut") / "cut.sqlite"
    path.write_bytes(content[:length])
    if _opens(path):
        _check_prefix(path)
    else:
        assert length < 40_000  # segments and units lie before it


@settings(max_examples=30, deadline=None)
@given(at=st.integers(0, 1_500_000), size=st.integers(1, 20_000), filler=st.sampled_from([b"\0", b"\xff"]))
def test_any_overwritten_stretch_never_raises_an_sqlite_error(whole, at, size, filler, tmp_path_factory):
    content = whole.read_bytes()
    path = tmp_path_factory.mktemp("hole") / "hole.sqlite"
    path.write_bytes(content[:at] + filler * min(size, len(content) - at) + content[at + size :])
    # The hole may lie where only later reading meets it.
    with suppress(RecordError), open_run(path) as run:
        run.steps(), run.events(), summarize(run)


@pytest.mark.parametrize("content", [b"", b"SQLite", b"SQLite format 3\0", b"\0" * 5000])
def test_a_stump_is_a_clear_error(content, tmp_path):
    path = tmp_path / "stump.db"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=r"stump\.db"):
        open_run(path)


def test_a_damaged_record_is_not_written_to(whole, tmp_path):
    content = whole.read_bytes()
    path = tmp_path / "cut.sqlite"
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(RecordError, match="damaged or cut short"):
        RunWriter(path, config={}, units=[])
    assert path.read_bytes() == content[: len(content) // 2]
    assert [p.name for p in tmp_path.iterdir()] == ["cut.sqlite"]


def test_a_record_killed_while_its_log_was_folded_in_is_whole(open_writer, row, tmp_path):
    writer = open_writer()
    for step in range(1, 51):
        writer.write_step(row(step))
    assert writer.flush()
    path = shutil.copytree(tmp_path / "run", tmp_path / "killed") / "run.sqlite"
    # The header came first and names pages that are still in the log alone.
    content = bytearray(path.read_bytes())
    content[28:32] = (10_000).to_bytes(4, "big")
    path.write_bytes(content)
    assert find_runs(tmp_path / "killed") == [path]
    with open_run(path) as run:
        assert (run.num_steps, run.damage) == (50, None)
    open_writer(path, start_step=50).close()
    with open_run(path) as run:
        assert (run.num_steps, len(run.segments), run.damage) == (50, 2, None)


def test_a_killed_record_that_cannot_be_read_in_place_is_read_from_a_copy(open_writer, row, tmp_path):
    writer = open_writer()
    writer.write_step(row(1))
    assert writer.flush()
    path = shutil.copytree(tmp_path / "run", tmp_path / "killed") / "run.sqlite"
    before = {p.name: p.read_bytes() for p in path.parent.iterdir()}
    connection, damage = rescue(path, sqlite3.OperationalError("unable to open database file"))
    assert connection.execute("SELECT step FROM steps").fetchall() == [(1,)]
    assert damage is None
    assert {p.name: p.read_bytes() for p in path.parent.iterdir()} == before
    connection.close()
