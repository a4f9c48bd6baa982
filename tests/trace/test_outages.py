from __future__ import annotations

import shutil
import sqlite3
import subprocess
import time
import warnings
from contextlib import suppress

import pytest

from trimtab.errors import ConfigError, TrimtabWarning
from trimtab.trace import open_run, outbox, store


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(store, "BUSY_TIMEOUT_S", 0.05)
    monkeypatch.setattr(outbox, "RETRY_INTERVAL_S", 0.05)


@pytest.fixture
def short_memory(monkeypatch):
    """Only 100 rows wait for the disk."""
    monkeypatch.setattr(outbox, "MAX_WAITING_ROWS", 100)


def _account(run):
    """Steps in the record, and steps that its gaps name."""
    gaps = run.events("gap")
    lost = {
        step
        for gap in gaps
        if gap.data["num_steps"]
        for step in range(gap.data["first_step"], gap.data["last_step"] + 1)
    }
    return set(run.steps().step.tolist()), lost, gaps


def test_a_full_disk_is_one_warning_and_a_gap_and_training_goes_on(
    open_writer, row, tmp_path, short_memory, one_warning
):
    writer = open_writer()
    for step in range(1, 11):
        writer.write_step(row(step))
    assert writer.flush()
    database = writer._outbox._store._connection
    database.execute("PRAGMA max_page_count = 1")
    with one_warning("disk is full.*Training goes on"):
        for step in range(11, 411):
            writer.write_step(row(step))
            if step % 50 == 0:
                assert not writer.flush()
    database.execute("PRAGMA max_page_count = 1000000")
    for step in range(411, 421):
        writer.write_step(row(step))
    writer.close()
    with open_run(tmp_path / "run") as run:
        kept, lost, gaps = _account(run)
        assert run.finished
    assert len(gaps) == 1
    assert "full" in gaps[0].data["reason"]
    assert gaps[0].data["num_steps"] == len(lost) > 0
    assert kept | lost == set(range(1, 421))
    assert not kept & lost


def test_a_short_outage_loses_nothing_and_is_noted(open_writer, row, tmp_path, one_warning):
    writer = open_writer()
    blocker = sqlite3.connect(writer.path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    with one_warning("locked"):
        for step in range(1, 101):
            writer.write_step(row(step))
        assert not writer.flush()
        assert not writer.flush()
    blocker.execute("ROLLBACK")
    blocker.close()
    writer.close()
    with open_run(tmp_path / "run") as run:
        assert run.steps().step.tolist() == list(range(1, 101))
        (gap,) = run.events("gap")
        assert (gap.step, gap.data["num_steps"], gap.data["num_events"]) == (1, 0, 0)
        assert "locked" in gap.data["reason"]


def test_a_deleted_folder_is_noticed_and_its_steps_are_a_gap_of_the_next_file(open_writer, row, tmp_path, one_warning):
    writer = open_writer()
    for step in range(1, 21):
        writer.write_step(row(step))
    assert writer.flush()
    shutil.rmtree(tmp_path / "run")
    with one_warning("is gone"):
        writer.write_step(row(21))
        assert not writer.flush()
        writer.write_step(row(22))
        assert not writer.flush()
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    writer.write_step(row(23))
    assert writer.flush()
    with pytest.raises(ConfigError, match="another run is writing"):
        open_writer()
    writer.close()
    with open_run(tmp_path / "run") as run:
        kept, lost, _ = _account(run)
        assert run.finished
    assert (kept, lost) == ({21, 22, 23}, set(range(1, 21)))


def test_a_file_replaced_by_another_program_is_left_alone(open_writer, row, one_warning):
    writer = open_writer()
    writer.write_step(row(1))
    assert writer.flush()
    writer.path.unlink()
    writer.path.write_text("mine now " * 50)
    with one_warning("is no run record"):
        writer.write_step(row(2))
        assert not writer.flush()
        writer.close()
    assert writer.path.read_text() == "mine now " * 50


def test_a_disk_that_never_comes_back_still_lets_a_run_end(open_writer, row, tmp_path, one_warning):
    writer = open_writer()
    shutil.rmtree(tmp_path / "run")
    with one_warning("is gone"):
        writer.write_step(row(1))
        writer.close()


def test_an_error_filter_meets_the_warning_in_the_training_thread_and_no_row_is_lost(open_writer, row, tmp_path):
    writer = open_writer()
    blocker = sqlite3.connect(writer.path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    writer.write_step(row(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TrimtabWarning):
            writer.flush()
    blocker.execute("ROLLBACK")
    blocker.close()
    writer.close()
    with open_run(tmp_path / "run") as run:
        assert run.num_steps == 1


def test_steps_faster_than_a_working_disk_wait_for_it_rather_than_being_lost(open_writer, row, tmp_path, short_memory):
    writer = open_writer()
    for step in range(1, 3001):
        writer.write_step(row(step))
    writer.close()
    with open_run(tmp_path / "run") as run:
        assert run.num_steps == 3000
        assert run.events() == []


def test_a_hanging_disk_is_a_gap_with_a_warning(open_writer, row, tmp_path, short_memory, monkeypatch, one_warning):
    writer = open_writer()
    write = store.Store.write
    monkeypatch.setattr(outbox, "PATIENCE_S", 0.01)
    monkeypatch.setattr(store.Store, "write", lambda *args: (time.sleep(0.3), write(*args)))
    with one_warning("slower than training"):
        for step in range(1, 1001):
            writer.write_step(row(step))
        writer.close()
    with open_run(tmp_path / "run") as run:
        kept, lost, _ = _account(run)
    assert lost
    assert kept | lost == set(range(1, 1001))


def test_where_no_wal_can_be_used_the_record_falls_back_with_one_warning(
    open_writer, row, tmp_path, monkeypatch, one_warning
):
    monkeypatch.setattr(store, "_use_wal", lambda connection: "shared memory is not available")
    with one_warning("rollback journal"):
        writer = open_writer()
        writer.write_step(row(1))
        writer.close()
    with open_run(tmp_path / "run") as run:
        assert run.num_steps == 1
        assert run.finished


def _fill(path):
    with open(path, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * 4096)


def test_a_record_on_a_truly_full_disk_recovers(open_writer, tmp_path, row, one_warning):
    mount = tmp_path / "small"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", mount], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        writer = open_writer(mount / "run")
        filler = mount / "filler"
        with one_warning("Training goes on"):
            _fill(filler)
            for step in range(1, 2001):
                writer.write_step(row(step))
                if step % 250 == 0:
                    writer.flush()
        filler.unlink()
        writer.write_step(row(2001))
        writer.close()
        with open_run(mount / "run") as run:
            kept, lost, _ = _account(run)
            assert kept | lost == set(range(1, 2002))
            assert run.damage is None
            assert run.finished
    finally:
        subprocess.run(["umount", "-l", mount], check=True)
