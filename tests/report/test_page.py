import base64
import json
import re
import sqlite3
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trimtab.cli import main
from trimtab.control import REASONS
from trimtab.report import page_data
from trimtab.report.page import build_page, write_report
from trimtab.report.page_data import gather_run
from trimtab.report.settings import ReportSettings
from trimtab.trace import RunWriter, StepRow, UnitRow, open_run, record_path

NASTY = ("a.<script>alert(1)</script>", "b.</script><!--", "c.{{script}}&amp;'\"", "d.\u2028")
ALARM = {
    "first_step": 5,
    "monitor": "shift_residual",
    "mechanism": "attention backward",
    "metric": "coherence",
    "places": ["layer_0/head_1"],
    "value": 0.9,
    "reference": 0.5,
    "sentence": "The coherence of <b>layer_0</b> is 0.90.",
}
TYPES = {"u1": np.uint8, "u4": np.uint32, "i4": np.int32, "f4": np.float32, "f8": np.float64}


def write_run(folder: Path, num_steps: int = 30, units: tuple[str, ...] = NASTY, **changes: Any) -> Path:
    """A run whose norms are random, with one failed and one not observed."""
    random = np.random.default_rng(0)
    costs = {"low_saved_bytes": 10.0, "high_saved_bytes": 30.0, "flops": 100.0}
    rows = [UnitRow(name=name, recoverable=u != 1, costs=costs if u != 1 else {}) for u, name in enumerate(units)]
    config = {"model": "<i>Tiny</i>", "policy": {"alpha": 1.5, "max_active": 2}} | changes
    with RunWriter(folder, config=config, units=rows, versions={"trimtab": "<u>0</u>"}) as writer:
        for step in range(1, num_steps + 1):
            norms, risk = random.lognormal(size=(2, len(units)))
            if step == 7 and len(units) > 2:
                norms[0], risk[0], norms[2], risk[2] = np.nan, np.inf, 0.0, 0.0
            active = risk > 1.5
            writer.write_step(
                StepRow(
                    step=step,
                    norms=norms,
                    gnmr=norms / 2,
                    delta=norms / 3,
                    risk=risk,
                    active=active,
                    lock=active * 2,
                    reason=np.where(np.isinf(risk), 5, active * 1),
                    loss=3 / step,
                    grad_norm=float(np.nansum(norms)),
                    elapsed_s=step / 10,
                    extra={"damped": {units[0]: 0.5}} if step == 9 else None,
                    readings={
                        "shift_residual": {"coherence": (("layer_0/head_0", "layer_0/head_1"), [0.1, step / 99])}
                    },
                )
            )
        writer.write_event("fault", 4, units[0], {"fault": "stored <copy>", "start_step": 4, "num_steps": 5, "seed": 1})
        writer.write_event("alarm", 6, "layer_0/head_1", ALARM | {"step": 6})
        ended = {"what": "ended", "monitor": "shift_residual", "metric": "coherence", "alarm_step": 6}
        writer.write_event("note", 12, "", {"alarm": ended})
        writer.write_event("warning", 3, "", {"message": "<script>alert(2)</script>"})
    return folder


def report(out: Path, *runs: Path) -> str:
    return write_report(ReportSettings(runs=runs, out=out / "report.html")).read_text(encoding="utf-8")


class Elements(HTMLParser):
    """What a browser would make of the page: its elements, the text outside scripts, and the scripts."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self._attributes: dict[str, str | None] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._attributes = dict(attrs) if tag == "script" else None

    def handle_endtag(self, tag: str) -> None:
        self._attributes = None

    def handle_data(self, data: str) -> None:
        if self._attributes is not None:
            self.scripts.append((self._attributes, data))
        else:
            self.texts.append(data)

    def data(self, i: int = 0) -> dict[str, Any]:
        (text,) = (text for attributes, text in self.scripts if attributes.get("id") == f"run-{i}-data")
        return json.loads(text)


def unpacked(array: dict[str, Any]) -> np.ndarray:
    """Undo what the page's script undoes."""
    planes = np.frombuffer(zlib.decompress(base64.b64decode(array["z"])), np.uint8)
    dtype = np.dtype(TYPES[array["type"]])
    return planes.reshape(dtype.itemsize, -1).T.copy().view(dtype).reshape(array["shape"])


def test_what_the_record_calls_things_never_becomes_markup(tmp_path):
    page = Elements(report(tmp_path, write_run(tmp_path / "<b>run</b>")))
    code = [text for attributes, text in page.scripts if "type" not in attributes]
    assert len(code) == 1
    assert "alert" not in code[0]
    assert not {"i", "u", "b"} & set(page.tags)
    assert page.data()["units"][:3] == list(NASTY[:3])
    text = "".join(page.texts)
    for part in (NASTY[0], NASTY[2], "<i>Tiny</i>", "<u>0</u>", "stored <copy>", "<script>alert(2)</script>"):
        assert part in text


def test_nothing_in_the_data_can_end_or_comment_out_its_element(tmp_path):
    page = report(tmp_path, write_run(tmp_path / "run"))
    assert len(re.findall(r"<script", page)) == 2
    assert len(re.findall(r"</script", page)) == 2
    assert "<!--" not in page


def test_the_page_loads_nothing_and_lets_only_its_own_script_run(tmp_path):
    page = report(tmp_path, write_run(tmp_path / "run"))
    assert "default-src 'none'; script-src 'sha256-" in page
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)""", page)
    assert set(re.findall(r"https?://[^\s\"'<]*", page)) <= {"http://www.w3.org/2000/svg"}


def test_every_cell_of_a_small_run_is_what_the_record_holds(tmp_path):
    record = write_run(tmp_path / "run")
    data = Elements(report(tmp_path, record)).data()
    cells = data["cells"]
    with open_run(record) as run:
        steps = run.steps()
    assert (cells["first"], cells["width"], data["reasons"]) == (1, 1, list(REASONS))
    np.testing.assert_array_equal(unpacked(cells["step"]), np.repeat(np.arange(30)[:, None], 4, axis=1))
    for name, column in (("norm", steps.norms), ("gnmr", steps.gnmr), ("delta", steps.delta), ("risk", steps.risk)):
        np.testing.assert_array_equal(unpacked(cells[name]), column)
    np.testing.assert_array_equal(unpacked(cells["lock"]), steps.lock)
    np.testing.assert_array_equal(unpacked(cells["reason"]), steps.reason)
    recoverable = np.array([True, False, True, True])
    np.testing.assert_array_equal(unpacked(cells["flags"]) & 1, steps.active & recoverable)
    assert np.argwhere(unpacked(cells["flags"]) & 2).tolist() == [[8, 0]]
    for name in ("loss", "grad_norm"):
        np.testing.assert_array_equal(unpacked(data["points"][name]), getattr(steps, name))
    # What is kept follows the set that the step ran under; nobody routes one of these steps by hand.
    ran = np.vstack([np.zeros((1, 4), bool), steps.active[:-1] & recoverable])
    saved = 30 + 20 * ran.sum(axis=1)
    np.testing.assert_array_equal(unpacked(data["points"]["saved_bytes"]), saved)
    assert data["saved_bytes"] == [30.0, pytest.approx(saved.mean()), 90.0]
    assert data["budget"] == 2


@pytest.mark.parametrize(("num_cells", "width"), [(60, 2), (16, 8), (4, 30), (1, 30)])
def test_a_pooled_cell_is_the_riskiest_step_of_its_bin(tmp_path, monkeypatch, num_cells, width):
    monkeypatch.setattr(page_data, "MAX_CELLS", num_cells)
    with open_run(write_run(tmp_path / "run")) as run:
        steps, cells = run.steps(), gather_run(run).cells
    assert cells is not None
    assert cells.width_steps == width
    for b in range(len(cells.num_steps)):
        part = slice(b * width, min((b + 1) * width, 30))
        assert cells.num_steps[b] == part.stop - part.start
        for u in range(4):
            t = part.start + int(steps.risk[part, u].argmax())
            assert cells.step[b, u] == t
            assert cells.risk[b, u] == steps.risk[t, u]
            assert cells.gnmr[b, u] == steps.gnmr[t, u] or np.isnan(steps.gnmr[t, u])
            assert cells.num_active[b, u] == (steps.active[part, u].sum() if u != 1 else 0)


def test_a_choice_of_points_holds_every_peak_and_what_was_no_number(tmp_path, monkeypatch):
    monkeypatch.setattr(page_data, "MAX_POINTS", 40)
    with RunWriter(tmp_path, config={}, units=[UnitRow(name="u")]) as writer:
        for step in range(1, 501):
            loss = {100: 99.0, 203: float("nan"), 311: -5.0}.get(step, 1 + step / 1000)
            writer.write_step(StepRow(step=step, norms=[1.0], loss=loss, grad_norm=7.0 if step == 404 else 1.0))
    with open_run(tmp_path) as run:
        found = gather_run(run)
    assert found.num_rows == 500
    assert len(found.points["step"]) <= 45
    assert {1, 100, 203, 311, 404, 500} <= set(found.points["step"].tolist())


def test_steps_routed_by_hand_are_told_beside_the_decisions(tmp_path):
    units = [UnitRow(name=name, costs={"low_saved_bytes": 10.0, "high_saved_bytes": 30.0}) for name in ("q", "k")]
    for folder, sets in (("forced", {2: ["q", "k"], 4: ["k"]}), ("alone", {})):
        with RunWriter(tmp_path / folder, config={"policy": {"max_active": 1}}, units=units) as writer:
            for step in range(1, 6):
                extra = {"routed_by_hand": sets[step]} if step in sets else None
                writer.write_step(StepRow(step=step, norms=[1, 1], risk=[0, 0], active=[step == 4, False], extra=extra))
    page = report(tmp_path, tmp_path / "forced")
    data = Elements(page).data()
    assert "2 steps routed by hand, 30.00% of recoverable unit-steps" in page
    assert '<th scope="col">by hand</th>' in page
    assert "<td>k</td><td>0.0%</td><td>40.0%</td>" in page
    assert data["num_forced_steps"] == 2
    assert (unpacked(data["cells"]["flags"]) & 4 != 0).tolist() == [
        [False] * 2,
        [True] * 2,
        [False] * 2,
        [False, True],
        [False] * 2,
    ]
    assert unpacked(data["points"]["num_active"]).tolist() == [0, 0, 0, 1, 0]
    assert unpacked(data["points"]["saved_bytes"]).tolist() == [20, 60, 20, 40, 40], (
        "as run: forced, or as decided before"
    )
    assert ">by hand<" in page
    assert ">by hand<" not in report(tmp_path, tmp_path / "alone")
    both = report(tmp_path, tmp_path / "forced", tmp_path / "alone")
    assert "<td>10.0%</td><td>30.0%</td><td>1</td>" in both
    assert "<td>10.0%</td><td></td><td>1</td>" in both


def test_alarms_faults_and_readings_are_told(tmp_path):
    page = Elements(report(tmp_path, write_run(tmp_path / "run")))
    data, text = page.data(), " ".join(page.texts)
    assert "Diagnosis: biased attention backward." in text
    assert [(a["step"], a["first_step"], a["end_step"]) for a in data["alarms"]] == [(6, 5, 12)]
    assert data["faults"] == [[4, 9]]
    (reading,) = data["readings"]
    assert reading["groups"] == ["layer_0"]
    values = np.array([[0.1, step / 99] for step in range(1, 31)], np.float32)
    low, high = map(unpacked, reading["band"])
    np.testing.assert_array_equal(low[:, 0], values.min(axis=1))
    np.testing.assert_array_equal(high[:, 0], values.max(axis=1))
    np.testing.assert_allclose(unpacked(reading["mean"])[:, 0], values.mean(axis=1), rtol=1e-6)


def test_a_notice_is_told_and_is_no_alarm(tmp_path):
    notice = ALARM | {"step": 2, "mechanism": "inexact attention backward", "metric": "residual", "level": "notice"}
    with RunWriter(tmp_path, config={"monitors": ["m"]}, units=[UnitRow(name="u")]) as writer:
        for step in range(1, 9):
            writer.write_step(StepRow(step=step, norms=[1.0], readings={"m": {"value": (("",), [0.1])}}))
        writer.write_event("notice", 2, "layer_0/head_1", notice)
        ended = {"what": "ended", "monitor": "shift_residual", "metric": "residual", "alarm_step": 2}
        writer.write_event("note", 5, "", {"notice": ended})
    page = Elements(report(tmp_path, tmp_path))
    data, text = page.data(), " ".join(page.texts)
    assert data["alarms"] == []
    assert [(n["step"], n["end_step"], n["metric"]) for n in data["notices"]] == [(2, 5, "residual")]
    assert "Notices (1)" in text
    assert "Alarms (" not in text
    assert "Diagnosis: healthy." in text
    assert "Step 2" in text
    assert "a notice, shift_residual/residual" in text


def bar(page: str) -> tuple[str, str]:
    """Class and text of the bar with the diagnosis."""
    found = re.search(r'<div class="(diagnosis[ \w]*)"><p><strong>(Diagnosis: .*?)</p>', page)
    assert found
    return found[1], found[2].replace("</strong>", "")


def write_quiet(folder: Path, num_steps: int, *, read: bool = True, finished: bool = True, **last: Any) -> Path:
    """A run of a learning policy and two monitors without an alarm; ``last`` is of its last step."""
    config = {"policy": {"max_active": 1, "act_from_step": 40}, "monitors": ["shift_residual", "attention_spectrum"]}
    writer = RunWriter(folder, config=config, units=[UnitRow(name="u")])
    for step in range(1, num_steps + 1):
        values: dict[str, Any] = {"norms": [1.0], "risk": [0.0 if step <= 40 else 0.3], "loss": 2.0}
        readings = {"shift_residual": {"coherence": (("",), [0.1])}}
        if read:
            readings["attention_spectrum"] = {"d2_entropy": (("",), [0.9])}
        values |= last if step == num_steps else {}
        writer.write_step(StepRow(step=step, readings=readings, **values))
    writer.close(finished=finished)
    return folder


@pytest.mark.parametrize(
    ("case", "kind", "part"),
    [
        ({}, "diagnosis healthy", "healthy. Nothing has given alarm."),
        ({"read": False}, "diagnosis open", "not judged. Nothing has given alarm, but the record has no reading of a"),
        ({"read": False, "finished": False}, "diagnosis open", "not judged yet. "),
        ({"loss": float("nan")}, "diagnosis", "none. Nothing has given alarm. Still, something is wrong: the last lo"),
        ({"norms": [float("inf")]}, "diagnosis", "wrong: 1 gradient norm failed."),
    ],
)
def test_the_bar_is_green_only_where_every_monitor_has_read_and_nothing_failed(tmp_path, case, kind, part):
    found, text = bar(report(tmp_path, write_quiet(tmp_path / "run", 50, **case)))
    assert found == kind
    assert part in text


def test_without_a_monitor_nothing_is_called_healthy(tmp_path):
    with RunWriter(tmp_path, config={"monitors": []}, units=[UnitRow(name="u")]) as writer:
        writer.write_step(StepRow(step=1, norms=[1.0]))
    assert bar(report(tmp_path, tmp_path)) == (
        "diagnosis open",
        "Diagnosis: none. No monitor was on; nothing could give alarm.",
    )


def test_while_the_policy_only_learns_the_page_says_so_and_no_risk_is_told(tmp_path):
    young = report(tmp_path, write_quiet(tmp_path / "young", 30, finished=False))
    assert "At step 30 the policy has judged nothing yet: it only learns up to step 40" in young
    assert "acts from step 41 on" in young
    assert re.search(r"<td>u</td><td>0.0%</td><td>0</td><td>0</td><td></td><td></td>", young)
    ended = report(tmp_path, write_quiet(tmp_path / "ended", 40))
    assert "The run ended at step 40, before the policy judged anything" in ended
    old = report(tmp_path, write_quiet(tmp_path / "old", 41))
    assert "judged nothing" not in old
    assert "up to step 40; norms are judged from step 41 on" in old
    assert "<td>0.3</td><td>41</td>" in old
    assert Elements(old).data()["learning_steps"] == 40


def test_a_failed_norm_is_told_even_while_the_policy_only_learns(tmp_path):
    page = report(tmp_path, write_quiet(tmp_path / "run", 30, norms=[float("nan")], risk=[float("inf")]))
    assert "<td>1</td><td>failed</td><td>30</td>" in page


def test_a_loss_that_was_not_given_is_told_from_one_that_is_no_number(tmp_path):
    for name, losses in (("none", [None] * 4), ("some", [2.0, None, float("nan"), None])):
        with RunWriter(tmp_path / name, config={}, units=[UnitRow(name="u")]) as writer:
            for step, loss in enumerate(losses, 1):
                writer.write_step(StepRow(step=step, norms=[1.0], loss=loss))
    page = Elements(report(tmp_path, tmp_path))
    none, some = page.data(0), page.data(1)
    assert (none["loss_given"], some["loss_given"]) == (False, True)
    assert unpacked(none["points"]["loss_given"]).tolist() == [0, 0, 0, 0]
    assert unpacked(some["points"]["loss_given"]).tolist() == [1, 0, 1, 0]


def test_an_alarm_of_somebody_elses_making_is_shown_and_not_diagnosed(tmp_path):
    with RunWriter(tmp_path, config={}, units=[UnitRow(name="u")]) as writer:
        writer.write_step(StepRow(step=1, norms=[1.0]))
        writer.write_event("alarm", 1, "somewhere", {"what": 3})
    text = " ".join(Elements(report(tmp_path, tmp_path)).texts)
    assert "Alarms (1)" in text
    assert "Diagnosis" not in text


def test_a_run_in_its_first_step_has_a_page(tmp_path):
    RunWriter(tmp_path / "run", config={}, units=[UnitRow(name="u")]).close(finished=False, reason="killed")
    page = report(tmp_path, tmp_path / "run")
    assert "in its first step" in page
    assert "not finished: still running, or stopped on its way (killed)" in page


def test_a_run_of_skipped_steps_or_without_units_or_scores_has_a_page(tmp_path):
    with RunWriter(tmp_path / "skipped", config={}, units=[UnitRow(name="u")]) as writer:
        writer.write_step(StepRow(step=0, skipped=True, loss=1.0))
    with RunWriter(tmp_path / "none", config={"policy": None, "monitors": "odd"}, units=[]) as writer:
        writer.write_step(StepRow(step=1, loss=float("nan")))
    with RunWriter(tmp_path / "bare", config={"policy": {"max_active": -3}}, units=[UnitRow(name="u")]) as writer:
        writer.write_step(StepRow(step=1))
        writer.write_step(StepRow(step=2, norms=[float("nan")]))
        writer.write_step(StepRow(step=3, norms=[2.0]))
    page = Elements(report(tmp_path, tmp_path))
    names = {page.data(i)["name"]: page.data(i) for i in range(3)}
    assert names["skipped"]["cells"] is None
    assert names["none"]["cells"] is None
    assert names["bare"]["budget"] is None
    assert unpacked(names["bare"]["cells"]["step"]).tolist() == [[-1], [1], [2]]


def test_gaps_and_restarts_are_said_and_leave_holes(tmp_path):
    first = RunWriter(tmp_path, config={}, units=[UnitRow(name="a"), UnitRow(name="gone")])
    for step in (1, 2, 3, 6, 7):
        first.write_step(StepRow(step=step, norms=[step, 1.0], risk=[0.1, 0.1]))
    first.close(finished=False)
    second = RunWriter(tmp_path, config={}, units=[UnitRow(name="new"), UnitRow(name="a")], start_step=6)
    second.write_step(StepRow(step=7, norms=[1.0, 70.0], risk=[0.1, 0.1]))
    second.write_event("gap", 9, "", {"num_steps": 3, "reason": "disk full"})
    second.write_step(StepRow(step=9, norms=[1.0, 90.0], risk=[0.1, 0.1]))
    second.close()
    page = report(tmp_path, tmp_path)
    for part in ("Started again after step 6", "3 rows could not be written (disk full)", "3 steps between the first"):
        assert part in page
    data = Elements(page).data()
    assert data["units"] == ["new", "a"]
    assert data["gaps"] == [[3, 6], [7, 9]]
    norm = unpacked(data["cells"]["norm"])
    np.testing.assert_array_equal(norm[:, 1], [1, 2, 3, np.nan, np.nan, 6, 70, np.nan, 90])
    assert np.isnan(norm[:6, 0]).all()


def test_of_very_many_gaps_the_longest_are_kept_in_order():
    lengths = np.random.default_rng(0).integers(2, 90, 900)
    gaps = page_data._gaps(np.concatenate([[1], 1 + np.cumsum(lengths)]))
    assert len(gaps) == page_data._MOST_GAPS
    assert list(gaps) == sorted(gaps)
    assert min(after - before for before, after in gaps) >= np.sort(lengths)[-len(gaps)]


def test_runs_of_different_models_are_put_beside_each_other_with_a_warning(tmp_path):
    a = write_run(tmp_path / "a", model="One")
    b = write_run(tmp_path / "b", model="Two", units=("x", "y"))
    text = " ".join(Elements(report(tmp_path, a, b)).texts)
    assert "The runs are of different models (One, Two)" in text
    assert "Runs beside each other" in text


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    for folder in ("x/run", "y/run"):
        write_run(tmp_path / folder, 3)
    page = Elements(report(tmp_path, tmp_path))
    assert [page.data(i)["name"] for i in range(2)] == ["x/run", "y/run"]


def test_a_record_that_cannot_be_read_is_a_sentence_beside_others_and_an_error_alone(tmp_path, capsys):
    good = write_run(tmp_path / "good", 5)
    newer = write_run(tmp_path / "newer", 5)
    with sqlite3.connect(record_path(newer)) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    assert "Left out:" in report(tmp_path, good, newer)
    assert main(["report", str(newer), "-o", str(tmp_path / "none.html")]) == 2
    assert "written by a newer trimtab" in capsys.readouterr().err
    assert not (tmp_path / "none.html").exists()


def test_a_damaged_record_shows_what_is_left(tmp_path):
    record = record_path(write_run(tmp_path / "run", 400))
    content = record.read_bytes()
    record.write_bytes(content[: len(content) * 2 // 3])
    try:
        page = report(tmp_path, tmp_path / "run")
    except Exception as error:
        assert type(error).__name__ == "RecordError"  # noqa: PT017
    else:
        assert "The record is damaged" in page


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["nowhere"], "there is no such file or folder"),
        (["."], "no run record is in it"),
        (["run", "-o", "page.sqlite"], "a page's name ends in .html"),
        (["run", "-o", "run/run.sqlite/report.html"], "it cannot be written"),
    ],
)
def test_what_cannot_be_meant_is_one_line(tmp_path, monkeypatch, capsys, words, part):
    (tmp_path / "empty").mkdir()
    if words[0] != ".":
        write_run(tmp_path / "run", 3)
    monkeypatch.chdir(tmp_path)
    assert main(["report", *words]) == 2
    said = capsys.readouterr().err
    assert part in said
    assert len(said.strip().splitlines()) == 1


def test_a_page_of_large_runs_stays_within_its_size(tmp_path):
    units = tuple(f"model.layers.{u // 7}.unit_{u}" for u in range(1500))
    for name in "ab":
        write_run(tmp_path / name, 300, units=units)
    page = report(tmp_path, tmp_path)
    assert len(page) < 15 * 2**20
    data = Elements(page).data(1)
    assert data["cells"]["step"]["shape"][0] * 1500 * 2 <= page_data.MAX_CELLS


def test_the_command_says_where_the_page_is(tmp_path, capsys):
    out = tmp_path / "deep" / "page.html"
    assert main(["report", str(write_run(tmp_path / "run", 3)), "-o", str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_page_needs_no_file_but_the_records(tmp_path):
    with open_run(write_run(tmp_path / "run", 3)) as run:
        page = build_page([gather_run(run)], ["That one is <odd>."])
    assert "Left out: That one is &lt;odd&gt;." in page
    assert "{{" not in page.replace("{{script}}", "")
