"""``trimtab replay`` and ``trimtab calibrate``: what they print, their exit status, and what they refuse."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from trimtab.cli import main
from trimtab.control import Policy, robust
from trimtab.monitors import AlarmRule, AnyOf, Floor, PeakDrop
from trimtab.trace import RunWriter, StepRow, UnitRow, open_run, record_path
from trimtab.trace.what_if import healthy_thresholds, verify

NAMES = [f"layers.{layer}.{unit}" for layer in range(4) for unit in ("q_proj", "k_proj")]
START, LENGTH = 100, 15
RULE = AlarmRule(AnyOf(PeakDrop(0.3), Floor(0.1)), "The entropy of {places} fell.")


def record(folder: Path, num_steps: int, *, faulty: bool, readings: bool = False) -> Path:
    rng = np.random.default_rng(0)
    policy = robust(max_active=2)
    controller = policy.start(NAMES)
    config = {"policy": policy.to_dict(), "alarm_rules": {"fake": {"entropy": RULE.to_dict()}}}
    with RunWriter(folder, config=config, units=[UnitRow(name=name) for name in NAMES]) as writer:
        for step in range(1, num_steps + 1):
            norms = np.exp(0.2 * rng.standard_normal(len(NAMES)))
            if faulty and START <= step < START + LENGTH:
                norms[3] *= 8
            if faulty and step == START:
                writer.write_event("fault", step, NAMES[3], {"start_step": START, "num_steps": LENGTH})
            made = controller.update(norms)
            scores = {n: getattr(made, n) for n in ("gnmr", "delta", "risk", "active", "lock", "alpha", "beta")}
            entropy = {"fake": {"entropy": (("a", "b"), 0.8 + 0.05 * rng.standard_normal(2))}}
            writer.write_step(StepRow(step=step, norms=norms, readings=entropy if readings else None, **scores))
    assert verify(folder).is_exact
    return folder


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    return record(tmp_path_factory.mktemp("faulty"), 200, faulty=True)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return record(tmp_path_factory.mktemp("healthy"), 1100, faulty=False, readings=True)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the command line says on stderr when it exits with 2."""
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("trimtab: error: ")
    assert len(said.strip().splitlines()) == 1
    return said


def test_a_record_is_verified_and_the_exit_status_says_so(capsys, faulty, tmp_path):
    assert main(["replay", str(faulty)]) == 0
    assert "exactly the recorded decisions, in all 200 steps" in " ".join(capsys.readouterr().out.split())
    assert main(["replay", str(faulty), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["is_exact"] is True
    copy = tmp_path / "run.sqlite"
    copy.write_bytes(record_path(faulty).read_bytes())
    with sqlite3.connect(copy) as database:
        database.execute("update steps set active = ? where step = 7", (bytes([4]),))
    database.close()
    assert main(["replay", str(copy)]) == 1
    assert "1 unit-steps differ, first at step 7" in " ".join(capsys.readouterr().out.split())
    assert main(["replay", str(copy), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["first_different_step"] == 7


def test_what_is_lost_of_a_record_is_said_of_its_verification_too(capsys, faulty, tmp_path):
    copy = tmp_path / "run.sqlite"
    copy.write_bytes(record_path(faulty).read_bytes())
    with sqlite3.connect(copy) as database:
        database.execute("drop table events")
    database.close()
    assert main(["replay", str(copy)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "exactly the recorded decisions, in all 200 steps that can be read." in said
    assert "is damaged or cut short" in said
    assert main(["replay", str(copy), "--json"]) == 0
    (note,) = json.loads(capsys.readouterr().out)["notes"]
    assert "is damaged or cut short" in note


@pytest.mark.parametrize("command", ["replay", "calibrate", "watch"])
def test_a_folder_of_records_is_answered_with_their_names(capsys, faulty, tmp_path, command):
    for name in ("gnmr", "random"):
        folder = tmp_path / "records" / name
        folder.mkdir(parents=True)
        (folder / "run.sqlite").write_bytes(record_path(faulty).read_bytes())
    said = refusal(capsys, command, str(tmp_path))
    assert f"2 records are below {tmp_path.as_posix()}: name one, such as " in said
    assert said.rstrip().endswith("/records/gnmr.")


def test_another_policy_is_shown_beside_what_was_done(capsys, faulty):
    assert main(["replay", str(faulty), "--alpha", "2", "--lock-steps", "3"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for part in ("as recorded", "alpha=2.0, lock_steps=3", "1/1", "only a run with it can tell"):
        assert part in printed
    assert main(["replay", str(faulty), "--preset", "paper", "--max-active", "0", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (one,) = told["policies"].values()
    assert one["policy"] == Policy(max_active=0).to_dict()
    assert (one["recovered_share"], one["num_caught"], one["num_false"]) == (0, 0, 0)
    assert told["recorded"]["num_caught"] == told["num_faults"] == 1
    assert told["recorded"]["latencies"] == [1]
    assert "only a run with it can tell" in told["unknown"]


def test_a_preset_that_needs_the_length_of_the_run_has_it_from_the_record(capsys, faulty):
    assert main(["replay", str(faulty), "--preset", "paper-deepseek", "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["policies"].values()
    assert one["policy"]["alpha"]["switch_step"] == round(0.025 * 200)


@pytest.mark.parametrize("limit", ["error_limit", "amax_limit"])
def test_a_limit_of_0_judges_norms_alone(capsys, faulty, limit):
    assert main(["replay", str(faulty), f"--{limit.replace('_', '-')}", "0", "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["policies"].values()
    assert one["policy"][limit] is None
    assert one["num_different"] == 0
    assert main(["replay", str(faulty), f"--{limit.replace('_', '-')}", "12", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (one,) = told["policies"].values()
    assert one["policy"][limit] == 12
    assert any(limit in note for note in told["notes"])


def test_a_sweep_has_a_row_a_combination_and_a_picture(capsys, faulty, tmp_path):
    pytest.importorskip("plotly")
    picture = tmp_path / "sweep.html"
    words = ["replay", str(faulty), "--sweep", "alpha=1.5,2", "max_active=1,0.5", "--plot", str(picture)]
    assert main(words) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for alpha in ("1.5", "2"):
        for max_active in ("1", "0.5"):
            assert f"alpha={alpha}, max_active={max_active}" in printed
    assert "plotly" in picture.read_text(encoding="utf-8")
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["grid"] == {"alpha": [1.5, 2], "max_active": [1, 0.5]}
    assert len(told["policies"]) == 4


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--preset", "robus"], ["'robus'", "Did you mean 'robust'?"]),
        (["--alpha", "-1"], ["alpha=-1.0", "above 0"]),
        (["--max-active", "1.5"], ["max_active=1.5", "share"]),
        (["--sweep", "alhpa=1"], ["alhpa=1", "Did you mean 'alpha'?"]),
        (["--sweep", "alpha"], ["sweep='alpha'", "Write alpha=1.5,2,3"]),
        (["--sweep", "alpha=1", "alpha=2"], ["sweep='alpha=2'", "once"]),
        (["--sweep", "alpha=a"], ["alpha='a'", "it is a number."]),
        (["--sweep", "window_steps=5,many"], ["window_steps='many'", "it is a number."]),
        (["--alpha", "x"], ["alpha='x'", "it is a number.", "Write --alpha 0.5, say."]),
        (["--window-steps", "2.5"], ["window_steps='2.5'", "it is a whole number."]),
        (["--max-active=many"], ["max_active='many'", "it is a number."]),
        (["--sweep", "alpha=1", "--alpha", "2"], ["alpha=2.0", "it is swept too"]),
        (["--plot", "told.html"], ["plot='told.html'", "a verification is one sentence"]),
        (["--alpha", "2", "--plot", "told.txt"], ["plot='told.txt'", ".html, .svg"]),
    ],
)
def test_what_cannot_be_meant_is_answered_in_one_line(capsys, faulty, words, parts):
    said = refusal(capsys, "replay", str(faulty), *words)
    for part in parts:
        assert part in said


def test_calibration_gives_code_whose_thresholds_keep_to_the_rate(capsys, healthy):
    assert main(["calibrate", str(healthy), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    with open_run(healthy) as run:
        expected = healthy_thresholds(run, 1.0)
    assert found["scores"]["alpha"] == expected.alpha
    assert found["scores"]["num_unit_steps"] == expected.num_unit_steps == (1100 - 40) * len(NAMES)
    assert found["alarms"]["fake"]["entropy"]["num_false"] <= 1
    assert "independent" in found["note"]

    class Fake:
        alarm_rules = None

    names: dict[str, object] = {"fake": Fake}
    exec(found["code"], names)
    assert names["policy"] == robust(max_active=2, alpha=expected.alpha, beta=expected.beta)
    rule = Fake.alarm_rules["entropy"]
    assert rule.detector.to_dict() == found["alarms"]["fake"]["entropy"]["detector"]
    assert rule.sentence == RULE.sentence
    assert main(["calibrate", str(healthy)]) == 0
    printed = capsys.readouterr().out
    assert found["code"] in printed
    for part in (f"alpha={expected.alpha:g}", "fake/entropy", "healthy unit-steps"):
        assert part in " ".join(printed.split())


def test_a_record_without_rules_falls_back_on_the_monitors_own(capsys, tmp_path):
    rng = np.random.default_rng(0)
    with RunWriter(tmp_path, config={}, units=[UnitRow(name="q"), UnitRow(name="k")]) as writer:
        for step in range(1, 1051):
            readings = {"residual_stream": {"growth": (("a",), 1 + 0.1 * rng.random(1))}, "own": {"x": (("",), [1.0])}}
            row = {"gnmr": rng.lognormal(0, 0.2, 2), "delta": rng.lognormal(0, 0.2, 2), "active": [False, False]}
            writer.write_step(StepRow(step=step, norms=[1.0, 1.0], readings=readings, **row))
    assert main(["calibrate", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["alarms"]) == ["residual_stream"]
    assert list(found["left_out"]) == ["own"]
    assert found["code"].startswith("from trimtab import Policy\n")


def test_calibration_says_at_once_how_many_steps_it_needs(capsys, tmp_path):
    """Scores of 100 unit-steps after step 40, of 8 units, and 50 steps for alarms: 53 steps are enough, 52 are not."""
    few = record(tmp_path / "few", 52, faulty=False)
    assert "Record at least 53 steps" in refusal(capsys, "calibrate", str(few), "--false-per-1000", "20")
    assert "Record at least 500 steps" in refusal(capsys, "calibrate", str(few), "--false-per-1000", "2")
    assert main(["calibrate", str(record(tmp_path / "enough", 53, faulty=False)), "--false-per-1000", "20"]) == 0


def test_a_record_that_can_calibrate_nothing_is_refused(capsys, faulty, healthy):
    assert "without faults" in refusal(capsys, "calibrate", str(faulty))
    said = refusal(capsys, "calibrate", str(healthy), "--false-per-1000", "0.5")
    assert "record='1100 steps'" in said
    assert "Record at least 2000 steps" in said
    # More steps than the scores need: a rate of alarms is one of steps. Both needs are said at once.
    assert "Record at least 100000 steps" in refusal(capsys, "calibrate", str(healthy), "--false-per-1000", "0.01")
    assert "false_per_1000=0.0" in refusal(capsys, "calibrate", str(healthy), "--false-per-1000", "0")
