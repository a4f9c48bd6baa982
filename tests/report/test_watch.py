import json
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from trimtab.cli import main
from trimtab.errors import RecordError
from trimtab.report.settings import WatchSettings
from trimtab.report.watch import _line, watch
from trimtab.report.watch_data import read_tail, steps_per_second
from trimtab.trace import RunWriter, StepRow, UnitRow, open_run

UNITS = ("q[red]proj", "k", "v", "o", "up")


def open_writer(folder: Path, start_step: int = 0) -> RunWriter:
    config = {"model": "Tiny", "policy": {"max_active": 0.4}}
    return RunWriter(folder, config=config, units=[UnitRow(name=n) for n in UNITS], start_step=start_step)


def write(writer: RunWriter, steps: range) -> None:
    for step in steps:
        active = np.arange(5) == step % 5
        row = StepRow(step=step, norms=np.ones(5), risk=np.zeros(5), active=active, loss=9.5 / step, elapsed_s=step / 4)
        writer.write_step(row)
    assert writer.flush()


def printed(draw: Callable[[Console], object], width: int = 200, terminal: bool = True) -> str:
    console = Console(width=width, record=True, force_terminal=terminal, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        draw(console)
        return console.export_text()


def once(path: Path) -> str:
    return printed(lambda console: watch(WatchSettings(run=path, once=True), console))


def test_a_frame_says_where_the_run_is(tmp_path):
    with open_writer(tmp_path) as writer:
        write(writer, range(1, 41))
        writer.write_event("alarm", 40, "layer_0", {"sentence": "The entropy [bold]fell[/bold]."})
        writer.write_event("notice", 40, "layer_0", {"sentence": "The residual is large."})
        writer.flush()
        said = once(tmp_path)
    for part in ("step", "40", "4.00 steps/s", "0.2375", "1 unit, of at most 2", "not finished", "Latest switches"):
        assert part in said
    assert "q[red]proj" in said, "a name in square brackets is no markup"
    assert "step 40: The entropy [bold]fell[/bold]." in said
    assert "residual" not in said, "a notice is no alarm"
    assert "finished" in once(tmp_path)


def test_steps_routed_by_hand_are_told_and_are_no_decisions(tmp_path, capsys):
    with open_writer(tmp_path) as writer:
        for step, forced in ((1, None), (2, ["k", "q[red]proj"]), (3, None), (4, ["o"])):
            extra = None if forced is None else {"routed_by_hand": forced}
            writer.write_step(StepRow(step=step, norms=np.ones(5), active=np.zeros(5, bool), extra=extra))
        writer.flush()
        said = once(tmp_path)
        assert "0 units, of at most 2" in said
        assert "2 steps of the last 4; the latest is step 4" in " ".join(said.split())
        assert main(["watch", str(tmp_path), "--once", "--json"]) == 0
        now = json.loads(capsys.readouterr().out)
        assert (now["active"], now["routed_by_hand"]) == ([], ["o"])
        line = _line(read_tail(tmp_path / "run.sqlite"))
        assert (
            line == "step 4; recovered 0 units, of at most 2; 2 steps routed by hand, the latest step 4; not finished"
        )
        write(writer, range(5, 6))
        assert main(["watch", str(tmp_path), "--once", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["routed_by_hand"] is None


def test_a_run_that_does_not_exist_yet_is_waited_for(tmp_path):
    assert "There is no record yet. Waiting" in once(tmp_path / "later")
    assert list(tmp_path.iterdir()) == [], "looking leaves nothing behind"


def test_a_run_in_its_first_step_and_one_of_skipped_steps_have_a_frame(tmp_path):
    with open_writer(tmp_path) as writer:
        writer.flush()
        assert "In its first step" in once(tmp_path)
        writer.write_step(StepRow(step=0, skipped=True))
        writer.flush()
        assert "not given" in once(tmp_path)


def test_what_is_no_record_is_refused_once_and_said_while_watching(tmp_path, capsys):
    (tmp_path / "run.sqlite").write_text("no database")
    assert main(["watch", str(tmp_path), "--once"]) == 2
    assert "is no run record" in capsys.readouterr().err
    with pytest.raises(RecordError):
        read_tail(tmp_path / "run.sqlite")
    assert "is no run record" in frames(tmp_path, [lambda: None])


def frames(path: Path, acts: list[Callable[[], object]], terminal: bool = True) -> str:
    """What is shown while ``acts`` are done one by one, until Ctrl-C."""
    left = iter(acts)

    def sleep(_: float) -> None:
        act = next(left, None)
        if act is None:
            raise KeyboardInterrupt
        act()

    def draw(console: Console) -> None:
        with pytest.raises(KeyboardInterrupt):
            watch(WatchSettings(run=path), console, sleep)

    return printed(draw, terminal=terminal)


def test_watching_survives_a_restart_of_the_writer_and_a_record_that_is_made_anew(tmp_path):
    open_writers: list[RunWriter] = []

    def begin(start: int) -> None:
        open_writers.append(open_writer(tmp_path, start))
        write(open_writers[-1], range(start + 1, start + 4))

    def end() -> None:
        open_writers.pop().close(finished=False, reason="killed")

    def anew() -> None:
        for file in tmp_path.iterdir():
            file.unlink()
        begin(700)

    said = frames(tmp_path, [lambda: begin(0), end, lambda: begin(2), end, anew, end])
    assert "703" in said
    assert "ended: killed" in said


def test_the_end_of_a_record_is_that_of_its_live_line(tmp_path):
    first = open_writer(tmp_path)
    write(first, range(1, 11))
    first.close(finished=False)
    second = open_writer(tmp_path, 6)
    write(second, range(7, 10))
    tail = read_tail(second.path, most_rows=5)
    second.close()
    assert tail is not None
    assert [row.step for _, row in tail.rows] == [5, 6, 7, 8, 9]
    assert [segment.id for segment, _ in tail.rows] == [1, 1, 2, 2, 2]
    with open_run(tmp_path) as run:
        assert run.num_steps == tail.num_rows == 9
        assert run.live_segment.id == tail.segment.id
    assert steps_per_second(tail) == 4.0


def test_ctrl_c_ends_the_watch_with_a_word(tmp_path, monkeypatch, capsys):
    with open_writer(tmp_path) as writer:
        write(writer, range(1, 4))

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    assert main(["watch", str(tmp_path)]) == 130
    assert "stopped" in capsys.readouterr().err


def test_a_record_that_is_being_written_can_be_watched(tmp_path):
    stop = threading.Event()
    problems: list[BaseException] = []
    with open_writer(tmp_path) as writer:

        def look() -> None:
            try:
                while not stop.is_set():
                    once(tmp_path)
            except BaseException as error:
                problems.append(error)

        looking = threading.Thread(target=look)
        looking.start()
        for step in range(1, 400, 20):
            write(writer, range(step, step + 20))
        stop.set()
        looking.join()
    assert problems == []


@pytest.mark.parametrize("terminal", [True, False])
def test_a_record_that_is_taken_away_has_gone(tmp_path, terminal):
    folder = tmp_path / "run"
    with open_writer(folder) as writer:
        write(writer, range(1, 4))
    said = frames(folder, [lambda: shutil.rmtree(folder), lambda: None], terminal)
    assert "The record has gone." in said
    assert "There is no record yet" not in said
    assert "There is no record yet" in frames(folder, [lambda: None], terminal)


def test_a_record_without_its_events_is_damaged_and_not_waited_for(tmp_path, capsys):
    with open_writer(tmp_path) as writer:
        write(writer, range(1, 4))
    with sqlite3.connect(tmp_path / "run.sqlite") as database:
        database.execute("DROP TABLE events")
    database.close()
    assert main(["watch", str(tmp_path), "--once"]) == 2
    assert "is damaged or cut short" in capsys.readouterr().err
    assert "is damaged or cut short" in frames(tmp_path, [lambda: None])


def test_where_no_terminal_is_watching_each_change_is_a_plain_line(tmp_path):
    writer = open_writer(tmp_path)

    def more() -> None:
        write(writer, range(1, 4))

    def alarm() -> None:
        writer.write_event("alarm", 3, "layer_0", {"sentence": "The entropy [bold]fell[/bold]."})
        writer.flush()

    acts = [lambda: None, more, lambda: None, alarm, lambda: writer.close(finished=True), lambda: None]
    lines = frames(tmp_path, acts, terminal=False).strip().splitlines()
    assert lines[0] == "not finished, in its first step"
    assert lines[1] == "step 3; loss 3.1667; recovered 1 unit, of at most 2; not finished"
    assert lines[2] == lines[1] + "; latest alarm, step 3: The entropy [bold]fell[/bold]."
    assert lines[3] == lines[2].replace("not finished", "finished")
    assert len(lines) == 4


def test_a_bad_interval_is_refused(capsys):
    assert main(["watch", "runs/x", "--interval", "0"]) == 2
    assert "interval=0.0: at least 0.1 seconds are needed." in capsys.readouterr().err
