"""The check of conftest.py on every test: it fails where it should, and what it lets pass is only what it names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import sqlite3, subprocess, sys

import pytest
import torch
from torch import nn

import trimtab
from trimtab.control import Policy


def train(record, policy=None, num_steps=4):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with trimtab.attach(model, policy=policy, record=record) as guard:
        for step in range(num_steps):
            model.zero_grad()
            model(torch.randn(3, 4)).sum().backward()
            guard.step()


def change(record, step=3):
    with sqlite3.connect(record / "run.sqlite") as database:
        database.execute("UPDATE steps SET active = x'03' WHERE step = ?", (step,))
    database.close()


class Ours(Policy):
    def to_dict(self):
        return {"kind": "ours"}


class Unreadable(Policy):
    def to_dict(self):
        return super().to_dict() | {"max_active": -1}


def test_exact(tmp_path):
    train(tmp_path)


def test_still_open(tmp_path):
    model = nn.Sequential(nn.Linear(4, 2))
    guard = trimtab.attach(model, record=tmp_path)
    model(torch.randn(3, 4)).sum().backward()
    guard.step()
    guard.resolve()
    test_still_open.guard = guard


def test_different(tmp_path):
    train(tmp_path)
    change(tmp_path)


def test_different_of_another_process(tmp_path):
    script = f"import runpy, pathlib; runpy.run_path({__file__!r})['train'](pathlib.Path({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", script], check=True)
    change(tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("of_a_module")
    train(folder)
    change(folder, 2)
    return folder


def test_different_of_a_fixture(folder):
    pass


@pytest.mark.unreplayable("changed on purpose")
def test_marked(tmp_path):
    train(tmp_path)
    change(tmp_path)


@pytest.mark.unreplayable("no longer true")
def test_marked_in_vain(tmp_path):
    train(tmp_path)


def test_settings_that_no_policy_has(tmp_path):
    train(tmp_path, Unreadable())


def test_reasons_to_pass_a_record_over(tmp_path):
    train(tmp_path / "ours", Ours())
    train(tmp_path / "none", num_steps=0)
    train(tmp_path / "gone")
    (tmp_path / "gone" / "run.sqlite").unlink()
    with trimtab.trace.RunWriter(tmp_path / "by_hand", config={"policy": Policy().to_dict()}, units=[]) as writer:
        writer.write_step(trimtab.trace.StepRow(step=1, norms=[], active=[]))
"""


@pytest.mark.slow
@pytest.mark.unreplayable("records below its folder were changed on purpose, and make the tests in it fail")
def test_a_record_that_a_replay_decides_otherwise_fails_the_test_that_made_it(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_made.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    unreplayable(reason): why\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "--basetemp", str(tmp_path / "folders")]
    made = subprocess.run(command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, check=False)
    outcomes = {name: result for result, name in re.findall(r"^(PASSED|FAILED|ERROR) \S+::(\w+)", made.stdout, re.M)}
    different = {"test_different", "test_different_of_another_process", "test_different_of_a_fixture"}
    failed = different | {"test_marked_in_vain", "test_settings_that_no_policy_has"}
    passed = {"test_exact", "test_still_open", "test_marked", "test_reasons_to_pass_a_record_over"}
    assert outcomes == dict.fromkeys(failed, "FAILED") | dict.fromkeys(passed, "PASSED"), made.stdout + made.stderr
    assert made.stdout.count("the recorded policy decides otherwise from step 3 on, in 2 unit-steps of 4 steps.") >= 2
    assert "the recorded policy decides otherwise from step 2 on, in 2 unit-steps of 4 steps." in made.stdout
    assert "it cannot be replayed (ConfigError: policy=(recorded): the recorded policy cannot be built" in made.stdout
    summary = next(line for line in made.stdout.splitlines() if line.startswith("run records: "))
    assert set(summary.removeprefix("run records: ").split(", ")) == {
        "3 replayed with a difference",
        "2 replayed exactly",
        "2 of tests marked as unreplayable",
        "1 unreadable",
        "1 of a policy that is not trimtab's",
        "1 without a decision",
        "1 removed by the test",
    }
