from __future__ import annotations

import copy
import math
import multiprocessing
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from trimtab.errors import ConfigError, RecordError
from trimtab.trace import RunWriter, StepRow, UnitRow, open_run, record_path
from trimtab.trace.encoding import from_json_object, to_json


def test_every_value_comes_back_as_it_was_written(open_writer, tmp_path):
    row = StepRow(
        step=7,
        norms=[0.1, 0.0, 3e-320],
        gnmr=[1.5, math.nan, 2.0],
        delta=[0.5, math.nan, math.inf],
        risk=[1.25, 0.0, math.inf],
        active=[True, False, True],
        lock=[3, 0, 300],
        errors=[0.1, math.nan, math.inf],
        quantizer={"flushed_share": [0.5, math.nan, 1.0], "saturated_share": [0.0, 0.25, 0.0], "amax": [1e300, 0, 448]},
        loss=2.25,
        lr=1e-4,
        grad_norm=math.inf,
        alpha=1.5,
        beta=1.3,
        elapsed_s=12.5,
        extra={"raised": {"on": ["q"]}},
    )
    writer = open_writer(start_step=6, versions={"trimtab": "0.1"})
    writer.write_step(row)
    writer.write_event("fault", 7, place="q", data={"kind": "nan", "seed": 3})
    writer.close()
    with open_run(tmp_path / "run") as run:
        table = run.steps()
        assert table.step.tolist() == [7]
        assert table.norms.tolist() == [[0.1, 0.0, 3e-320]]
        np.testing.assert_array_equal(table.gnmr, [[1.5, math.nan, 2.0]])
        np.testing.assert_array_equal(table.delta, [[0.5, math.nan, math.inf]])
        assert table.risk.tolist() == [[1.25, 0.0, math.inf]]
        assert table.active.tolist() == [[True, False, True]]
        assert table.lock.tolist() == [[3, 0, 300]]
        np.testing.assert_array_equal(table.errors, [[0.1, math.nan, math.inf]])
        np.testing.assert_array_equal(table.flushed_share, [[0.5, math.nan, 1.0]])
        assert table.saturated_share.tolist() == [[0.0, 0.25, 0.0]]
        assert table.amax.tolist() == [[float(np.finfo(np.float32).max), 0.0, 448.0]]
        assert table.known.all()
        for name in ("loss", "lr", "grad_norm", "alpha", "beta", "elapsed_s"):
            assert getattr(table, name).tolist() == [getattr(row, name)], name
        assert table.extra == ({"raised": {"on": ["q"]}},)
        (event,) = run.events()
        assert (event.kind, event.step, event.place, event.data) == ("fault", 7, "q", {"kind": "nan", "seed": 3})
        assert run.events("alarm") == []
        assert run.config == {"policy": {"alpha": 1.5}}
        assert run.versions == {"trimtab": "0.1"}
        assert run.units == ("q", "k", "v")


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    norms=npst.arrays(np.float64, npst.array_shapes(min_dims=2, max_dims=2, max_side=9)),
    data=st.data(),
)
def test_norms_and_errors_come_back_bit_for_bit(norms, data, tmp_path_factory):
    num_steps, num_units = norms.shape
    folder = tmp_path_factory.mktemp("run")
    active = data.draw(npst.arrays(np.bool_, norms.shape))
    lock = data.draw(npst.arrays(np.int64, norms.shape, elements=st.integers(0, 2**62)))
    errors = data.draw(npst.arrays(np.float64, norms.shape))
    with RunWriter(folder, config={}, units=[{"name": f"u{i}"} for i in range(num_units)]) as writer:
        for step in range(num_steps):
            row = {"norms": norms[step], "active": active[step], "lock": lock[step], "errors": errors[step]}
            writer.write_step(StepRow(step=step + 1, **row))
    with open_run(folder) as run:
        table = run.steps()
    # NaN payloads and the sign of zero count too, so bytes are compared.
    assert table.norms.tobytes() == norms.tobytes()
    assert table.errors.tobytes() == errors.tobytes()
    assert np.array_equal(table.active, active)
    assert np.array_equal(table.lock, lock)


@example(risk=np.array([1.0, 1.0 + 1e-12, 1e300, 1.0 - 1e-12]))
@given(risk=npst.arrays(np.float64, 4, elements=st.floats(0, allow_nan=False)))
def test_a_recorded_risk_never_contradicts_its_decision(risk):
    from trimtab.trace.encoding import pack_risk, unpack_scores

    packed = unpack_scores(pack_risk(risk))
    assert np.array_equal(packed > 1, risk > 1)
    assert np.array_equal(np.isinf(packed), np.isinf(risk))


def test_a_nan_loss_is_told_apart_from_no_loss(open_writer, row, tmp_path):
    with open_writer() as writer:
        writer.write_step(row(1, loss=math.nan))
        writer.write_step(row(2, loss=None))
    with sqlite3.connect(tmp_path / "run" / "run.sqlite") as database:
        assert database.execute("SELECT loss FROM steps").fetchall() == [("nan",), (None,)]
    database.close()
    with open_run(tmp_path / "run") as run:
        assert np.isnan(run.steps().loss).all()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"errors": [0.1]}, r"errors of step 1 has shape \(1,\), the record has 3 units"),
        ({"quantizer": {"amax": [1.0] * 4}}, r"amax of step 1 has shape \(4,\), the record has 3 units"),
        ({"quantizer": {"flushed": [1.0] * 3}}, r"'flushed', the record keeps flushed_share, saturated_share, amax"),
    ],
)
def test_quantizer_values_that_do_not_fit_the_record_are_refused(values, message, open_writer):
    with open_writer() as writer, pytest.raises(ValueError, match=message):
        writer.write_step(StepRow(step=1, **values))


def test_rows_are_copied_so_that_the_caller_may_reuse_its_arrays(open_writer, tmp_path):
    norms, extra = np.ones(3), {"raised": {"on": ["q"]}}
    with open_writer() as writer:
        writer.write_step(StepRow(step=1, norms=norms, errors=norms, quantizer={"amax": norms}, extra=extra))
        norms[:] = 9
        extra["raised"]["on"].append("k")
    with open_run(tmp_path / "run") as run:
        for name in ("norms", "errors", "amax"):
            assert getattr(run.steps(), name).tolist() == [[1, 1, 1]]
        assert run.steps().extra == ({"raised": {"on": ["q"]}},)


def test_a_wrong_number_of_norms_names_both_numbers(open_writer):
    with pytest.raises(ValueError, match=r"norms of step 1 has shape \(2,\), the record has 3 units"):
        open_writer().write_step(StepRow(step=1, norms=[1.0, 2.0]))


def test_annotations_reach_queued_and_written_rows(open_writer, row, tmp_path):
    writer = open_writer()
    writer.write_step(row(1, loss=None))
    assert writer.flush()
    writer.write_step(row(2, loss=None, extra={"a": 1}))
    writer.annotate_step(1, loss=0.25, lr=0.5)
    writer.annotate_step(2, loss=0.75, grad_norm=3.0, extra={"b": 2})
    writer.annotate_step(99, loss=1.0)
    writer.close()
    with open_run(tmp_path / "run") as run:
        table = run.steps()
    assert table.loss.tolist() == [0.25, 0.75]
    assert table.lr[0] == 0.5
    assert table.grad_norm[1] == 3.0
    assert table.extra == (None, {"a": 1, "b": 2})


def test_rows_are_committed_within_a_second_without_a_flush(open_writer, row, tmp_path):
    writer = open_writer()
    writer.write_step(row(1))
    deadline = time.monotonic() + 5
    with open_run(tmp_path / "run") as run:
        while run.num_steps == 0:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert not writer.closed


def test_closing_leaves_a_single_file(open_writer, row, tmp_path):
    writer = open_writer()
    for step in range(1, 200):
        writer.write_step(row(step))
    writer.close()
    writer.close()
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["run.sqlite"]


def test_a_path_with_a_database_ending_is_the_file_itself(open_writer, tmp_path):
    assert record_path(tmp_path / "a") == tmp_path / "a" / "run.sqlite"
    for name in ("one.sqlite", "two.db", "odd #1?%20.db"):
        open_writer(tmp_path / name).close()
        assert (tmp_path / name).is_file()
        with open_run(tmp_path / name) as run:
            assert run.finished


def test_the_finished_flag_says_how_a_run_ended(open_writer, tmp_path):
    open_writer(tmp_path / "good").close()
    open_writer(tmp_path / "stopped").close(finished=False, reason="out of time")
    with pytest.raises(KeyError), open_writer(tmp_path / "broken"):
        raise KeyError("x")
    ends = []
    for name in ("good", "stopped", "broken"):
        with open_run(tmp_path / name) as run:
            ends.append((run.finished, run.segments[-1].reason, run.segments[-1].ended_at is not None))
    assert ends == [(True, None, True), (False, "out of time", True), (False, "KeyError: 'x'", True)]


def test_a_live_writer_refuses_a_second_one_and_names_the_file(open_writer, tmp_path):
    first = open_writer()
    with pytest.raises(ConfigError, match=r"run\.sqlite.*another run is writing this record"):
        open_writer()
    first.close()
    open_writer().close()


def _try_to_open(path, answers):
    try:
        RunWriter(path, config={}, units=[]).close()
        answers.put("opened")
    except ConfigError:
        answers.put("refused")


def test_a_second_process_is_refused_too(open_writer, tmp_path):
    open_writer()
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=_try_to_open, args=(tmp_path / "run", answers))
    process.start()
    assert answers.get(timeout=30) == "refused"
    process.join()


def test_an_unwritable_place_is_a_config_error(open_writer, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"record=.*must be in a folder that can be written"):
        open_writer(tmp_path / "file" / "run")
    (tmp_path / "folder.db").mkdir()
    with pytest.raises(ConfigError, match="this is a folder"):
        open_writer(tmp_path / "folder.db")


def test_a_file_that_is_no_record_is_left_untouched(open_writer, tmp_path):
    text = tmp_path / "notes.db"
    text.write_text("not a database, but longer than a hundred bytes " * 9)
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE mine (x)")
    database.close()
    for path in (text, other):
        before = path.read_bytes()
        with pytest.raises(RecordError, match="is no run record"):
            open_writer(path)
        with pytest.raises(RecordError, match="is no run record"):
            open_run(path)
        assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.db", "other.sqlite"]


def test_a_newer_schema_is_refused_by_reader_and_writer(open_writer, tmp_path):
    open_writer().close()
    with sqlite3.connect(tmp_path / "run" / "run.sqlite") as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    for opening in (open_writer, lambda: open_run(tmp_path / "run")):
        with pytest.raises(RecordError, match="newer trimtab: its schema is version 99"):
            opening()


def test_a_writer_cannot_be_copied_or_pickled(open_writer):
    writer = open_writer()
    for attempt in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            attempt(writer)


def test_rows_after_closing_become_one_warning(open_writer, row, one_warning):
    writer = open_writer()
    writer.close()
    with one_warning("is closed"):
        writer.write_step(row(1))
        writer.write_step(row(2))


_SCRIPT = """
import os, sys, time
from trimtab.trace import RunWriter, StepRow, UnitRow
writer = RunWriter(sys.argv[1], config={}, units=[UnitRow(name="q")])
for step in range(1, int(sys.argv[2]) + 1):
    writer.write_step(StepRow(step=step, norms=[float(step)]))
    if sys.argv[3] == "report":
        print(step, time.monotonic(), flush=True)
        time.sleep(0.0005)
"""


def test_a_script_that_ends_without_closing_loses_nothing_and_is_not_finished(tmp_path):
    subprocess.run([sys.executable, "-c", _SCRIPT, tmp_path / "run", "75", "quiet"], check=True)
    with open_run(tmp_path / "run") as run:
        assert run.num_steps == 75
        assert not run.finished
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["run.sqlite"]


@pytest.mark.parametrize("reports_before_kill", [3, 137, 700])
def test_a_killed_process_leaves_a_record_that_misses_at_most_50_steps_or_a_second(tmp_path, reports_before_kill):
    process = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, tmp_path / "run", "100000", "report"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(reports_before_kill)]
    killed_at = time.monotonic()
    os.kill(process.pid, signal.SIGKILL)
    lines += process.communicate()[0].splitlines()
    told = [(int(line.split()[0]), float(line.split()[1])) for line in lines[:-1]]
    with open_run(tmp_path / "run") as run:
        table = run.steps()
        assert table.step.tolist() == list(range(1, len(table) + 1))
        assert table.norms[:, 0].tolist() == table.step.tolist()
        assert not run.finished
        assert run.damage is None
    missing = [at for step, at in told if step > len(table)]
    assert len(missing) <= 50 or killed_at - missing[0] <= 1.0
    RunWriter(tmp_path / "run", config={}, units=[UnitRow(name="q")], start_step=len(table)).close()
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["run.sqlite"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_leaves_the_record_alone(open_writer, row, tmp_path):
    writer = open_writer()
    writer.write_step(row(1))
    assert writer.flush()
    child = os.fork()
    if child == 0:
        writer.write_step(row(2))
        writer.flush()
        writer.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    writer.write_step(row(3))
    writer.close()
    with open_run(tmp_path / "run") as run:
        assert run.steps().step.tolist() == [1, 3]


def test_importing_the_record_loads_no_torch():
    code = "import sys, trimtab.trace; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_any_config_becomes_json():
    loop: dict[str, object] = {}
    loop["self"] = loop
    assert isinstance(to_json(loop), str)
    assert from_json_object(to_json({"path": Path("a"), 1: {2}, "f": np.float32(0.5)})) == {
        "path": "a",
        "1": [2],
        "f": 0.5,
    }
