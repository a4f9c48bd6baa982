"""Records of an older schema: read as they are, brought up to date by a writer that goes on in them."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import numpy as np
import pytest

from trimtab.control import Policy
from trimtab.errors import ConfigError
from trimtab.report.runs_table import runs_table, summaries
from trimtab.trace import SCHEMA_VERSION, RunWriter, StepRow, UnitRow, find_runs, open_run, replay, summarize
from trimtab.trace.rescue import rescue

# As version 1 was released; never to be changed.
VERSION_1 = """
CREATE TABLE segments (
    id INTEGER PRIMARY KEY, started_at TEXT NOT NULL, start_step INTEGER NOT NULL, config TEXT NOT NULL,
    versions TEXT NOT NULL, state TEXT, finished INTEGER NOT NULL DEFAULT 0, reason TEXT, ended_at TEXT
);
CREATE TABLE units (
    segment INTEGER NOT NULL REFERENCES segments(id), idx INTEGER NOT NULL, name TEXT NOT NULL,
    recoverable INTEGER NOT NULL, num_parameters INTEGER NOT NULL, costs TEXT NOT NULL, PRIMARY KEY (segment, idx)
) WITHOUT ROWID;
CREATE TABLE steps (
    id INTEGER PRIMARY KEY, segment INTEGER NOT NULL REFERENCES segments(id), step INTEGER NOT NULL,
    skipped INTEGER NOT NULL, loss REAL, lr REAL, grad_norm REAL, alpha REAL, beta REAL, elapsed_s REAL,
    num_active INTEGER, extra TEXT, norms BLOB, gnmr BLOB, delta BLOB, risk BLOB, active BLOB, lock BLOB
);
CREATE INDEX steps_by_step ON steps (segment, step, skipped);
CREATE TABLE events (
    id INTEGER PRIMARY KEY, segment INTEGER NOT NULL REFERENCES segments(id), step INTEGER NOT NULL,
    kind TEXT NOT NULL, place TEXT NOT NULL, data TEXT NOT NULL
);
CREATE INDEX events_by_kind ON events (kind, step);
PRAGMA application_id = 1416784237;
PRAGMA user_version = 1;
"""
NAMES = ("q", "k", "v")
POLICY = Policy(alpha=1.2, beta=1.1, window_steps=2, max_active=1)
NUM_STEPS = 20


def write_steps(writer, controller, first, last, errors=None):
    rng = np.random.default_rng(first)
    for step in range(first, last + 1):
        norms = rng.lognormal(0, 0.5, 3)
        made = controller.update(norms, errors)
        fields = {name: getattr(made, name) for name in ("gnmr", "delta", "risk", "active", "lock", "alpha", "beta")}
        writer.write_step(StepRow(step=step, norms=norms, errors=errors, **fields))


@pytest.fixture
def old(tmp_path):
    """A record of version 1, and the state of its controller at the end."""
    policy = POLICY.to_dict()
    del policy["error_limit"]  # no record of that version has it
    controller = POLICY.start(NAMES)
    with RunWriter(tmp_path / "new", config={"policy": policy}, units=[UnitRow(name=name) for name in NAMES]) as writer:
        write_steps(writer, controller, 1, NUM_STEPS)
        writer.write_event("fault", 3)
    path = tmp_path / "old" / "run.sqlite"
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(VERSION_1)
        connection.execute("ATTACH ? AS new", (str(tmp_path / "new" / "run.sqlite"),))
        for table in ("segments", "units", "steps", "events"):
            columns = ", ".join(row[1] for row in connection.execute(f"PRAGMA main.table_info({table})"))
            connection.execute(f"INSERT INTO main.{table} ({columns}) SELECT {columns} FROM new.{table}")
        connection.commit()
    return path, controller.state_dict()


def version_of(path):
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("PRAGMA user_version").fetchone()[0]


def test_a_record_of_version_1_is_read_and_left_as_it_is(old):
    path, _ = old
    content = path.read_bytes()
    assert find_runs(path.parent) == [path]
    with open_run(path) as run:
        table = run.steps()
        assert table.step.tolist() == list(range(1, NUM_STEPS + 1))
        assert table.known.all()
        for name in ("errors", "flushed_share", "saturated_share", "amax"):
            assert getattr(table, name).shape == (NUM_STEPS, 3)
            assert np.isnan(getattr(table, name)).all()
        assert not table.reason.any()
        made = replay(run)
        assert made.num_different == 0
        assert made.notes == ()
        assert made.steps.active.any()
        assert summarize(run).num_steps == NUM_STEPS
        assert run.reading_keys == ()
        assert len(run.readings("router", "entropy")[0]) == 0
    runs_table(summaries(path.parent)[0], path.parent)
    assert path.read_bytes() == content
    assert version_of(path) == 1


def test_a_policy_that_judges_errors_says_that_an_old_record_has_none(old):
    with open_run(old[0]) as run:
        assert replay(run, POLICY).notes == ()
        (note,) = replay(run, Policy(error_limit=0.3)).notes
    assert "no channel errors" in note


def test_a_writer_that_goes_on_in_a_record_of_version_1_brings_it_up_to_date(old):
    path, state = old
    policy = Policy.from_dict({**POLICY.to_dict(), "error_limit": 0.3})
    controller = policy.start(NAMES)
    controller.load_state_dict(state)
    units = [UnitRow(name=name) for name in NAMES]
    with (
        open_run(path) as before,
        RunWriter(path, config={"policy": policy.to_dict()}, units=units, start_step=NUM_STEPS, state=state) as writer,
    ):
        assert len(before.steps()) == NUM_STEPS  # a reader that was there already reads on
        assert before.reading_keys == ()
        write_steps(writer, controller, NUM_STEPS + 1, NUM_STEPS + 5, errors=[0.1, 0.9, np.nan])
        writer.write_step(StepRow(step=NUM_STEPS + 6, skipped=True, readings={"router": {"entropy": (("",), [0.5])}}))
        assert writer.flush()
        assert len(before.steps()) == NUM_STEPS + 6
        assert before.readings("router", "entropy")[1].tolist() == [[0.5]]
    assert version_of(path) == SCHEMA_VERSION == 2
    with open_run(path) as run:
        table = run.steps()
        assert np.isnan(table.errors[:NUM_STEPS]).all()
        np.testing.assert_array_equal(table.errors[NUM_STEPS:-1], [[0.1, 0.9, np.nan]] * 5)
        assert table.active[-2].tolist() == [False, True, False]
        made = replay(run)
        assert made.num_different == 0
        assert made.notes == ()
    # Once is enough.
    RunWriter(path, config={}, units=units, start_step=NUM_STEPS + 5).close()
    assert version_of(path) == 2


def test_a_record_that_cannot_be_brought_up_to_date_stays_at_its_version(old, monkeypatch):
    path, _ = old
    from trimtab.trace import schema

    monkeypatch.setattr(schema, "STEP_COLUMNS_SINCE", {2: ("errors", "errors")})  # the second one fails
    with pytest.raises(ConfigError, match="duplicate column name"):
        RunWriter(path, config={}, units=[UnitRow(name="q")])
    assert version_of(path) == 1
    monkeypatch.undo()
    with open_run(path) as run:
        assert len(run.steps()) == NUM_STEPS
        assert len(run.segments) == 1


def test_a_damaged_record_of_version_1_is_rescued_as_any_other(old):
    path, _ = old
    connection, damage = rescue(path, ValueError("cause"))
    assert damage is None
    rows = connection.execute("SELECT count(*), count(norms), count(errors) FROM steps").fetchone()
    assert rows == (NUM_STEPS, NUM_STEPS, 0)
    connection.close()
