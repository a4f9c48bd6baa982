"""What ``trimtab report --json`` and ``trimtab watch --json`` print."""

import io
import json
import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from trimtab.cli import main
from trimtab.report.runs_table import runs_table, summaries
from trimtab.report.settings import WatchSettings
from trimtab.report.watch import watch
from trimtab.trace import RunWriter, StepRow, UnitRow


def write(folder: Path, steps: range, finished: bool = True, start_step: int = 0) -> None:
    config = {"model": "Tiny", "policy": {"max_active": 0.5}}
    with RunWriter(
        folder, config=config, units=[UnitRow(name="q"), UnitRow(name="k")], start_step=start_step
    ) as writer:
        for step in steps:
            active = np.array([step % 2 == 0, False])
            writer.write_step(StepRow(step=step, norms=np.ones(2), active=active, loss=1 / step, elapsed_s=step / 4))
        writer.write_event("alarm", steps[-1], "layer_0", {"sentence": "The entropy fell."})
        writer.write_event("warning", steps[-1], "", {"message": "guard.step was called twice."})
        assert writer.flush()
        writer.close(finished=finished)


def test_a_report_says_where_the_page_is_and_what_the_runs_amount_to(tmp_path, capsys):
    write(tmp_path / "a", range(1, 9))
    write(tmp_path / "b", range(1, 5), finished=False)
    page = tmp_path / "report.html"
    assert main(["report", str(tmp_path), "-o", str(page), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["page"] == str(page)
    assert page.is_file()
    assert [(run["num_steps"], run["finished"]) for run in told["runs"]] == [(8, True), (4, False)]
    assert told["runs"][0]["num_alarms"] == 1
    assert told["refused"] == []


def test_a_loss_that_is_no_number_is_null_in_json(tmp_path, capsys):
    with RunWriter(tmp_path / "run", config={}, units=[UnitRow(name="q")]) as writer:
        writer.write_step(StepRow(step=1, norms=[1.0], active=[False], loss=float("nan")))
    assert main(["runs", str(tmp_path), "--json"]) == 0

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    (run,) = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert run["last_loss"] is None
    assert main(["runs", str(tmp_path)]) == 0
    assert "nan" in capsys.readouterr().out


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_records_that_cannot_be_read_are_named_beside_the_others(tmp_path, capsys, more):
    write(tmp_path / "a", range(1, 9))
    write(tmp_path / "newer", range(1, 9))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "run.sqlite").write_bytes(b"")
    with sqlite3.connect(tmp_path / "newer" / "run.sqlite") as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    assert main(["runs", str(tmp_path), *more]) == 0
    said = capsys.readouterr()
    assert "newer" not in said.out
    lines = said.err.splitlines()
    assert len(lines) == 2
    for line, part in zip(lines, ("empty file", "schema is version 99"), strict=True):
        assert line.startswith("trimtab: left out: ")
        assert part in line


def test_where_no_record_can_be_read_each_reason_is_said(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.sqlite").write_bytes(b"")
    assert main(["runs", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count("is an empty file") == 2


def test_a_table_with_alarms_has_every_column_at_80(tmp_path):
    name = "a-name-of-a-run-that-is-rather-long"
    write(tmp_path / name, range(1, 1001), finished=False)
    write(tmp_path / "b", range(1, 5))
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(runs_table(summaries(tmp_path)[0], tmp_path))
    said = console.export_text()
    assert "0.0010" in said
    assert "unfinished" in said
    assert "alarms" in said
    assert all(len(line.rstrip()) <= 80 for line in said.splitlines())
    assert "".join(line.split()[0] for line in said.splitlines() if line.startswith("a")).startswith("a-name")


def test_a_record_that_cannot_be_read_is_named_with_the_reason(tmp_path, capsys):
    write(tmp_path / "a", range(1, 9))
    broken = tmp_path / "broken.sqlite"
    broken.write_text("no database")
    assert main(["report", str(tmp_path / "a"), str(broken), "-o", str(tmp_path / "r.html"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["path"] for one in told["refused"]] == [str(broken)]
    assert "is no run record" in told["refused"][0]["reason"]
    assert len(told["runs"]) == 1


def test_one_look_is_one_line(tmp_path, capsys):
    write(tmp_path, range(1, 9))
    assert main(["watch", str(tmp_path), "--once", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    assert (told["state"], told["step"], told["loss"], told["active"]) == ("finished", 8, 0.125, ["q"])
    assert told["budget"] == 1
    assert told["steps_per_second"] == pytest.approx(4)
    assert told["grad_norm"] is None, "what is not known is null, and no NaN"
    assert [one["text"] for one in told["alarms"] + told["warnings"]] == [
        "The entropy fell.",
        "guard.step was called twice.",
    ]


def test_what_is_no_record_is_an_error_where_one_look_is_asked_for(tmp_path, capsys):
    (tmp_path / "run.sqlite").write_text("no database")
    assert main(["watch", str(tmp_path), "--once", "--json"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "is no run record" in said.err


def test_there_is_a_line_each_time_that_something_is_new(tmp_path, capsys):
    acts = iter(
        [
            lambda: (tmp_path / "run.sqlite").write_text("no database"),
            lambda: (tmp_path / "run.sqlite").unlink(),
            lambda: write(tmp_path, range(1, 5), finished=False),
            lambda: None,
            lambda: write(tmp_path, range(3, 7), start_step=2),
        ]
    )

    def sleep(_: float) -> None:
        act = next(acts, None)
        if act is None:
            raise KeyboardInterrupt
        act()

    with pytest.raises(KeyboardInterrupt):
        watch(WatchSettings(run=tmp_path, json=True), sleep=sleep)
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["step"] for one in told] == [None, None, None, 4, 6]
    assert [one["state"] for one in told[:3]] == ["no record yet", "unreadable", "no record yet"]
    assert "is no run record" in told[1]["problem"]
    assert (told[-1]["state"], told[-1]["num_starts"]) == ("finished", 2)
    assert all(one.keys() == told[0].keys() for one in told)


def test_a_record_that_is_taken_away_has_gone(tmp_path, capsys):
    folder = tmp_path / "run"
    write(folder, range(1, 5))
    acts = iter([lambda: shutil.rmtree(folder)])

    def sleep(_: float) -> None:
        act = next(acts, None)
        if act is None:
            raise KeyboardInterrupt
        act()

    with pytest.raises(KeyboardInterrupt):
        watch(WatchSettings(run=folder, json=True), sleep=sleep)
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["state"] for one in told] == ["finished", "the record has gone"]
