from __future__ import annotations

import math
import sqlite3

import pytest

from trimtab.errors import RecordError
from trimtab.trace import RunWriter, StepRow, UnitRow, find_runs, open_run, summarize


def test_only_records_are_found_at_any_depth(open_writer, tmp_path):
    for path in ("a", "b/c/d", "e/mine.db"):
        open_writer(tmp_path / path)
    with sqlite3.connect(tmp_path / "other.db") as database:
        database.execute("CREATE TABLE mine (x)")
    database.close()
    (tmp_path / "text.sqlite").write_text("no database" * 50)
    found = [path.relative_to(tmp_path).as_posix() for path in find_runs(tmp_path)]
    assert found == ["a/run.sqlite", "b/c/d/run.sqlite", "e/mine.db"]
    with pytest.raises(RecordError, match="There is no folder"):
        find_runs(tmp_path / "nowhere")


def test_a_summary_counts_what_happened(tmp_path):
    units = [UnitRow(name="q"), UnitRow(name="k"), UnitRow(name="norm", recoverable=False)]
    config = {
        "policy": {"alpha": 1.5, "max_active": 4, "damping": False},
        "recipe": {"name": "SavedActivations", "low": 4},
    }
    with RunWriter(tmp_path, config=config, units=units) as writer:
        writer.write_step(StepRow(step=1, norms=[1, 0, math.nan], active=[True, False, False], loss=3.0))
        writer.write_step(StepRow(step=1, skipped=True, loss=9.0))
        writer.write_step(StepRow(step=2, norms=[math.inf, -1, 1], active=[True, True, False], loss=2.0))
        writer.write_step(StepRow(step=4, norms=[1, 1, 1], active=[False, True, False]))
        writer.write_event("fault", 2)
        writer.write_event("alarm", 2)
        writer.write_event("alarm", 4)
    with open_run(tmp_path) as run:
        summary = summarize(run)
    assert (summary.num_steps, summary.num_skipped, summary.num_missing) == (3, 1, 1)
    assert (summary.first_step, summary.last_step) == (1, 4)
    assert (summary.num_units, summary.num_recoverable) == (3, 2)
    assert summary.recovered_share == 4 / 6
    assert summary.num_switches == 2
    assert (summary.num_failed, summary.num_unobserved) == (3, 1)
    assert (summary.num_faults, summary.num_alarms) == (1, 2)
    assert summary.last_loss == 2.0
    assert summary.policy == "alpha=1.5, max_active=4"
    assert summary.recipe == "SavedActivations(low=4)"
    assert summary.finished


def test_a_run_in_its_first_step_has_a_summary(open_writer, tmp_path):
    open_writer()
    with open_run(tmp_path / "run") as run:
        summary = summarize(run)
    assert (summary.num_steps, summary.first_step, summary.last_step, summary.last_loss) == (0, None, None, None)
    assert summary.recovered_share == 0
    assert not summary.finished


def test_units_that_come_with_a_resume_are_not_counted_as_failed(open_writer, tmp_path):
    with open_writer(units=("a",)) as writer:
        writer.write_step(StepRow(step=1, norms=[1], active=[True]))
    with open_writer(units=("b", "a"), start_step=1) as writer:
        writer.write_step(StepRow(step=2, norms=[1, 1], active=[False, True]))
    with open_run(tmp_path / "run") as run:
        summary = summarize(run)
    assert (summary.num_failed, summary.num_switches, summary.num_segments) == (0, 1, 2)
    assert summary.recovered_share == 2 / 3
