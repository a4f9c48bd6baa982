"""What monitors read comes back place by place, along the live line, from whole and from damaged records."""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.errors import RecordError
from trimtab.trace import RunWriter, StepRow, UnitRow, open_run, outbox, summarize
from trimtab.trace.rescue import rescue

HEADS = ("layer_0/head_0", "layer_0/head_1", "layer_1/head_0")


def reading(values, places=HEADS, monitor="spectrum", metric="entropy"):
    return {monitor: {metric: (places, values)}}


def test_values_come_back_as_float32_with_the_names_of_their_places(open_writer, row, tmp_path):
    values = [0.1, np.nan, -np.inf]
    with open_writer() as writer:
        writer.write_step(row(1, readings=reading(values)))
        writer.write_step(row(2))
        writer.write_step(row(3, readings=reading([1e39, 1.0, 2.0])))
    with open_run(tmp_path / "run") as run:
        steps, found, places = run.readings("spectrum", "entropy")
        assert steps.tolist() == [1, 3]
        assert places == HEADS
        assert found.dtype == np.float32
        # What float32 cannot hold stays finite, so that infinite still means infinite.
        largest = np.finfo(np.float32).max
        np.testing.assert_array_equal(found, np.array([values, [largest, 1.0, 2.0]], np.float32))


def test_what_was_never_read_is_empty(open_writer, row, tmp_path):
    with open_writer() as writer:
        writer.write_step(row(1, readings=reading([1.0], ("",))))
    with open_run(tmp_path / "run") as run:
        steps, values, places = run.readings("spectrum", "rank")
        assert (len(steps), values.shape, places) == (0, (0, 0), ())
        assert run.reading_keys == (("spectrum", "entropy"),)


def test_names_are_kept_once_a_segment_and_once_more_when_they_change(open_writer, row, tmp_path):
    with open_writer() as writer:
        for step in range(1, 101):
            writer.write_step(row(step, readings=reading(np.ones(3)) | reading([1.0], ("",), "router")))
        for step in range(101, 201):
            writer.write_step(row(step, readings=reading(np.ones(2), HEADS[1:])))
    with closing(sqlite3.connect(tmp_path / "run" / "run.sqlite")) as database:
        assert database.execute(
            "SELECT monitor, count(*) FROM places GROUP BY monitor ORDER BY monitor"
        ).fetchall() == [
            ("router", 1),
            ("spectrum", 2),
        ]


def test_earlier_places_are_matched_by_name(open_writer, row, tmp_path):
    with open_writer() as writer:
        writer.write_step(row(1, readings=reading([1.0, 2.0, 3.0])))
        writer.write_step(row(2, readings=reading([5.0, 4.0], (HEADS[2], "new"))))
    with open_run(tmp_path / "run") as run:
        steps, values, places = run.readings("spectrum", "entropy")
    assert (steps.tolist(), places) == ([1, 2], (HEADS[2], "new"))
    np.testing.assert_array_equal(values, [[3.0, np.nan], [5.0, 4.0]])


def test_a_resume_supersedes_the_later_readings_as_it_does_the_steps(open_writer, row, tmp_path):
    with open_writer() as writer:
        for step in range(1, 7):
            writer.write_step(row(step, readings=reading([1.0] * 3)))
        writer.write_event("alarm", 5)
        writer.resume(3)
        for step in range(4, 6):
            writer.write_step(row(step, readings=reading([2.0] * 3, metric="rank") | {"old": {"x": ([""], [3.0])}}))
    with open_run(tmp_path / "run") as run:
        assert run.readings("spectrum", "entropy")[0].tolist() == [1, 2, 3]
        assert run.readings("spectrum", "rank")[0].tolist() == [4, 5]
        assert run.reading_keys == (("old", "x"), ("spectrum", "entropy"), ("spectrum", "rank"))
        assert summarize(run).num_alarms == 0


def test_readings_are_copied_so_that_the_caller_may_reuse_its_arrays(open_writer, row, tmp_path):
    values = np.ones(3)
    with open_writer() as writer:
        writer.write_step(row(1, readings=reading(values)))
        values[:] = 9.0
    with open_run(tmp_path / "run") as run:
        assert run.readings("spectrum", "entropy")[1].tolist() == [[1.0] * 3]


@pytest.mark.parametrize("values", [[1.0], np.ones((3, 1)), 1.0])
def test_a_reading_without_a_value_for_each_place_is_refused(values, open_writer, row):
    with pytest.raises(ValueError, match=r"spectrum/entropy of step 1 has shape .*3 places"):
        open_writer().write_step(row(1, readings=reading(values)))


def test_large_readings_lower_the_number_of_rows_that_wait_in_memory(open_writer, row, monkeypatch):
    monkeypatch.setattr(outbox, "MAX_WAITING_BYTES", 4_000_000)
    writer = open_writer()
    before = writer._outbox._max_waiting
    places = tuple(f"head_{i}" for i in range(2000))
    writer.write_step(row(1, readings=reading(np.ones(2000), places)))
    assert writer._outbox._max_waiting < before
    assert writer._outbox._max_waiting * 2000 * 8 <= 4_000_000


def test_a_reader_meets_readings_of_a_run_that_goes_on(open_writer, row, tmp_path):
    writer = open_writer()
    writer.write_step(row(1, readings=reading([1.0] * 3)))
    assert writer.flush()
    with open_run(tmp_path / "run") as run:
        assert len(run.readings("spectrum", "entropy")[0]) == 1
        writer.write_step(row(2, readings=reading([1.0] * 3)))
        assert writer.flush()
        assert len(run.readings("spectrum", "entropy")[0]) == 2


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """File of a closed record of 300 steps with readings of 300 places."""
    folder = tmp_path_factory.mktemp("whole")
    places = tuple(f"layer_{i}" for i in range(300))
    with RunWriter(folder, config={}, units=[UnitRow(name="q")]) as writer:
        for step in range(1, 301):
            writer.write_step(StepRow(step=step, norms=[1.0], readings=reading([step / 8] * 300, places)))
            if step % 50 == 0:
                writer.flush()
    return folder / "run.sqlite"


def _check_prefix(path):
    with open_run(path) as run:
        steps, values, places = run.readings("spectrum", "entropy")
        assert steps.tolist() == list(range(1, len(steps) + 1))
        assert (values == steps[:, None] / 8).all()
        assert len(places) == (300 if len(steps) else 0)
        return len(steps), run.damage


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_record_cut_short_has_the_readings_before_the_cut(share, whole, tmp_path):
    content = whole.read_bytes()
    path = tmp_path / "cut.sqlite"
    path.write_bytes(content[: int(len(content) * share)])
    num, damage = _check_prefix(path)
    assert "what follows is lost" in damage
    # Segments, names and an index lie in the file too, and the rows of a commit after those of the steps.
    assert num >= share * 300 - 60


@settings(max_examples=20, deadline=None)
@given(at=st.integers(30_000, 400_000), size=st.integers(1, 20_000), filler=st.sampled_from([b"\0", b"\xff"]))
def test_any_overwritten_stretch_never_raises_an_sqlite_error(whole, at, size, filler, tmp_path_factory):
    content = bytearray(whole.read_bytes())
    content[at : at + size] = filler * len(content[at : at + size])
    path = tmp_path_factory.mktemp("holes") / "run.sqlite"
    path.write_bytes(bytes(content))
    with suppress(RecordError), open_run(path) as run:
        run.readings("spectrum", "entropy")
        run.steps()


def test_a_rescue_takes_the_readings_along(whole):
    connection, damage = rescue(whole, ValueError("cause"))
    assert damage is None
    assert connection.execute("SELECT count(*) FROM readings").fetchone() == (300,)
    assert connection.execute("SELECT count(*) FROM places").fetchone() == (1,)
    connection.close()
