from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.errors import RecordError
from trimtab.trace import RunWriter, StepRow, UnitRow, open_run


def test_a_missing_record_says_where_the_nearest_one_is(open_writer, tmp_path):
    open_writer().close()
    with pytest.raises(RecordError, match=r"There is no run record at .*run\.sqlite.*There is one at .*/run\."):
        open_run(tmp_path)
    with pytest.raises(RecordError, match="Check the path"):
        open_run(tmp_path / "nowhere")


def test_an_empty_run_can_be_read(open_writer, tmp_path):
    writer = open_writer(start_step=4)
    with open_run(tmp_path / "run") as run:
        table = run.steps()
        assert (len(table), run.num_steps, run.last_step) == (0, 0, 4)
        assert table.norms.shape == (0, 3)
        assert run.events() == []
        assert not run.finished
    writer.close()


def test_a_run_is_read_while_it_is_being_written(open_writer, row, tmp_path):
    writer = open_writer()
    seen: list[int] = []
    done = threading.Event()

    def read():
        with open_run(tmp_path / "run") as run:
            while not done.is_set():
                table = run.steps()
                assert table.step.tolist() == list(range(1, len(table) + 1))
                assert table.loss.tolist() == table.step.tolist()
                seen.append(len(table))

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(1, 3001):
        writer.write_step(row(step))
    writer.flush()
    while not seen or seen[-1] < 3000:
        assert reader.is_alive()
    done.set()
    reader.join()
    writer.close()
    assert seen == sorted(seen)


def test_a_reader_in_another_process_neither_blocks_nor_changes_the_run(open_writer, row, tmp_path):
    writer = open_writer()
    writer.write_step(row(1))
    assert writer.flush()
    script = "import sys; from trimtab.trace import open_run; print(open_run(sys.argv[1]).num_steps)"
    out = subprocess.run([sys.executable, "-c", script, tmp_path / "run"], check=True, capture_output=True, text=True)
    assert out.stdout.split() == ["1"]
    writer.write_step(row(2))
    writer.close()
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["run.sqlite"]
    with open_run(tmp_path / "run") as run:
        assert run.num_steps == 2


def test_a_live_reader_does_not_stop_a_run_from_closing(open_writer, row, tmp_path):
    writer = open_writer()
    writer.write_step(row(1))
    assert writer.flush()
    with open_run(tmp_path / "run") as run:
        assert run.num_steps == 1
        run._connection.execute("BEGIN")
        run._connection.execute("SELECT count(*) FROM steps").fetchone()
        writer.write_step(row(2))
        writer.close()
        run._connection.execute("ROLLBACK")
        assert run.num_steps == 2
        assert run.finished


def test_a_closed_run_says_so(open_writer, tmp_path):
    open_writer().close()
    run = open_run(tmp_path / "run")
    run.close()
    run.close()
    with pytest.raises(RecordError, match="was closed"):
        run.steps()


def test_a_resume_supersedes_the_later_rows_and_events_before_it(open_writer, row, tmp_path):
    with open_writer(config={"lr": 1}) as writer:
        for step in range(1, 11):
            writer.write_step(row(step))
            writer.write_event("note", step)
    with open_writer(config={"lr": 2}, start_step=6) as writer:
        for step in range(7, 9):
            writer.write_step(row(step, loss=-1.0))
    with open_run(tmp_path / "run") as run:
        table = run.steps()
        assert table.step.tolist() == list(range(1, 9))
        assert table.segment.tolist() == [1] * 6 + [2] * 2
        assert table.loss.tolist() == [1, 2, 3, 4, 5, 6, -1, -1]
        assert [event.step for event in run.events()] == list(range(1, 7))
        assert [s.num_rows for s in run.segments] == [10, 2]
        assert (run.config, run.num_steps, run.last_step) == ({"lr": 2}, 8, 8)


def test_two_resumes_keep_only_what_the_last_one_went_on_from(open_writer, row, tmp_path):
    for start, end in ((0, 10), (6, 20), (4, 5)):
        with open_writer(start_step=start) as writer:
            for step in range(start + 1, end + 1):
                writer.write_step(row(step))
    with open_run(tmp_path / "run") as run:
        assert run.steps().step.tolist() == [1, 2, 3, 4, 5]
        assert run.steps().segment.tolist() == [1, 1, 1, 1, 3]


def test_a_start_that_never_made_a_step_supersedes_nothing(open_writer, row, tmp_path):
    with open_writer() as writer:
        writer.write_step(row(1))
    open_writer().close(finished=False)
    with open_run(tmp_path / "run") as run:
        assert run.steps().step.tolist() == [1]
        assert not run.finished
        assert run.live_segment.id == 1


def test_a_checkpoint_loaded_in_the_middle_of_a_process_is_a_resume(open_writer, row, tmp_path):
    with open_writer() as writer:
        writer.resume(100)  # before the first row: the segment itself starts there
        for step in (101, 102, 103, 104):
            writer.write_step(row(step))
        writer.resume(102, state={"a": 1})
        writer.write_step(row(103))
        writer.write_step(row(101))  # went back without a word
        writer.write_step(row(102))
    with open_run(tmp_path / "run") as run:
        assert [s.start_step for s in run.segments] == [100, 102, 100]
        assert [run.start_state(s) for s in run.segments] == [None, {"a": 1}, None]
        assert run.steps().step.tolist() == [101, 102]
        assert run.steps().segment.tolist() == [3, 3]
        assert [s.finished for s in run.segments] == [False, False, True]


def test_skipped_steps_may_share_the_number_of_an_observed_one(open_writer, tmp_path):
    with open_writer() as writer:
        writer.write_step(StepRow(step=1, norms=[1, 1, 1]))
        for _ in range(2):
            writer.write_step(StepRow(step=1, skipped=True, loss=5.0))
        writer.write_step(StepRow(step=2, norms=[2, 2, 2]))
    with open_run(tmp_path / "run") as run:
        table = run.steps()
    assert table.step.tolist() == [1, 1, 1, 2]
    assert table.skipped.tolist() == [False, True, True, False]
    assert table.known.all(axis=1).tolist() == [True, False, False, True]
    assert not table.active[1].any()


def test_units_of_earlier_segments_are_matched_by_name(open_writer, tmp_path):
    with open_writer(units=("a", "b", "c")) as writer:
        row = StepRow(step=1, norms=[1, 2, 3], active=[True, False, True], lock=[1, 2, 3], risk=[1, 2, 3])
        writer.write_step(replace(row, quantizer={"amax": [10, 20, 30]}))
    with open_writer(units=("c", "new", "a"), start_step=1) as writer:
        row = StepRow(step=2, norms=[30, 40, 10], active=[False, True, False], lock=[7, 8, 9], errors=[0.3, 0.4, 0.1])
        writer.write_step(row)
    with open_run(tmp_path / "run") as run:
        table = run.steps()
        assert run.units == table.units == ("c", "new", "a")
    np.testing.assert_array_equal(table.norms, [[3, np.nan, 1], [30, 40, 10]])
    np.testing.assert_array_equal(table.risk, [[3, np.nan, 1], [np.nan] * 3])
    np.testing.assert_array_equal(table.errors, [[np.nan] * 3, [0.3, 0.4, 0.1]])
    np.testing.assert_array_equal(table.amax, [[30, np.nan, 10], [np.nan] * 3])
    assert table.known.tolist() == [[True, False, True], [True, True, True]]
    assert table.active.tolist() == [[True, False, True], [False, True, False]]
    assert table.lock.tolist() == [[3, 0, 1], [7, 8, 9]]


def test_units_keep_what_they_cost(tmp_path):
    units = [
        UnitRow(name="q", num_parameters=64, costs={"low_saved_bytes": 4, "high_saved_bytes": 8}),
        {"name": "norm", "recoverable": False},
    ]
    RunWriter(tmp_path, config={}, units=units).close()
    with open_run(tmp_path) as run:
        assert run.unit_table == (units[0], UnitRow(name="norm", recoverable=False))


def _slow_live_line(segments):
    """The truth by play: each step overwrites history, each resume throws away what came after it."""
    line: list[tuple[int, int]] = []
    for index, (start, count) in enumerate(segments):
        if count:
            line = [(step, owner) for step, owner in line if step <= start]
            line += [(step, index + 1) for step in range(start + 1, start + count + 1)]
    return line


@settings(max_examples=25, deadline=None)
@given(segments=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 8)), min_size=1, max_size=5))
def test_the_live_line_is_what_a_playback_of_all_starts_leaves(segments, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    for start, count in segments:
        with RunWriter(folder, config={}, units=[UnitRow(name="q")], start_step=start) as writer:
            for step in range(start + 1, start + count + 1):
                writer.write_step(StepRow(step=step, norms=[step]))
                writer.write_event("note", step)
    with open_run(folder) as run:
        table, events = run.steps(), run.events()
        assert run.num_steps == len(table)
    line = _slow_live_line(segments)
    assert list(zip(table.step.tolist(), table.segment.tolist(), strict=True)) == line
    assert [(event.step, event.segment) for event in events] == line


def test_a_killed_run_is_read_whole_from_a_folder_that_was_copied(open_writer, row, tmp_path):
    writer = open_writer()
    writer.write_step(row(1))
    assert writer.flush()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with open_run(tmp_path / "copy") as run:
        assert run.num_steps == 1
        assert run.damage is None


def test_a_locked_record_says_so(open_writer, row, tmp_path, monkeypatch):
    open_writer().close()
    blocker = sqlite3.connect(tmp_path / "run" / "run.sqlite", isolation_level=None)
    blocker.execute("BEGIN EXCLUSIVE")
    from trimtab.trace import reader

    connect = reader.connect_read_only
    monkeypatch.setattr(reader, "connect_read_only", lambda path: connect(path, timeout_s=0.05))
    with pytest.raises(RecordError, match="locked by another program"):
        open_run(tmp_path / "run")
    blocker.close()
