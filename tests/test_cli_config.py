"""Config files, ``--print-config``, ``--json`` and shell completion, of every command."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import get_type_hints

import pytest
import tyro

from trimtab import cli
from trimtab.cli import main

yaml = pytest.importorskip("yaml")


def below(words: str, hint: object) -> dict[str, type]:
    """Every command's words, and its settings."""
    found: dict[str, type] = {}
    for name, settings in cli._choices(hint).items():
        hints = get_type_hints(settings, include_extras=True).values()
        nested = [hint for hint in hints if cli._choices(hint)]
        named = f"{words} {name}".strip()
        found |= below(named, nested[0]) if nested else {named: settings}
    return found


COMMANDS = below("", cli._Command)
WITH_A_TABLE = ("demo", "train", "compare", "runs", "replay", "calibrate", "experiment faults", "experiment healthy")
NEEDED = {
    "train": ["--model", "m.json", "--data", "a.txt", "b.txt", "--out", "o"],
    "plan": ["llama-60m"],
}
"""Words without which a command is refused, where not any word will do."""


def needed(command: str) -> list[str]:
    """Words without which the command is refused: what it names by place, and its options without a default."""
    if command in NEEDED:
        return NEEDED[command]
    words, options = [], []
    hints = get_type_hints(COMMANDS[command], include_extras=True)
    for item in fields(COMMANDS[command]):
        if item.default is not MISSING or item.default_factory is not MISSING:
            continue
        if tyro.conf.Positional in getattr(hints[item.name], "__metadata__", ()):
            words.append(".")
        else:
            options += ["--" + item.name.replace("_", "-"), "x"]
    return words + options


def printed_config(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main([*words, "--print-config"]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("trimtab: error: ")
    assert len(said.strip().splitlines()) == 1
    return said


def test_the_commands_are_found():
    assert set(WITH_A_TABLE) <= set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_printed_config_is_every_setting_and_reads_back_the_same(capsys, tmp_path, command):
    words = command.split()
    first = printed_config(capsys, *words, *needed(command))
    assert list(first) == [item.name for item in fields(COMMANDS[command])]
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(first))
    assert printed_config(capsys, *words, "--config", str(path)) == first
    assert printed_config(capsys, *words, f"--config={path}") == first


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_key_is_refused_with_the_nearest_name(capsys, tmp_path, command):
    name = fields(COMMANDS[command])[0].name
    path = tmp_path / "run.yaml"
    path.write_text(f"{name}x: 1\n")
    said = refusal(capsys, *command.split(), "--config", str(path))
    assert f"{name}x=1: trimtab {command} has no such setting." in said
    assert f"Did you mean {name!r}?" in said


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: m.json\ndata: [a.txt, b.txt]\nout: o\nlearning_rate: 1e-4\nmax_active: 0.25\nbf16: true\n"
        "warmup_steps: null\nsteps: 77\n"
    )
    return path


def test_a_config_holds_values_of_every_kind_and_the_command_line_goes_first(capsys, config):
    found = printed_config(capsys, "train", "--config", str(config))
    assert (found["data"], found["learning_rate"], found["max_active"]) == (["a.txt", "b.txt"], 1e-4, 0.25)
    assert (found["bf16"], found["warmup_steps"], found["steps"]) == (True, None, 77)
    words = ["--data", "c.txt", "--no-bf16", "--steps=5", "--max_active", "3", "--config", str(config), "--seed", "9"]
    found = printed_config(capsys, "train", *words)
    assert (found["data"], found["bf16"], found["steps"], found["max_active"]) == (["c.txt"], False, 5, 3)
    assert (found["model"], found["seed"]) == ("m.json", 9)


def test_what_goes_by_place_may_be_in_the_config_and_is_overridden_too(capsys, tmp_path):
    path = tmp_path / "replay.yaml"
    path.write_text("path: there\nsweep: [alpha=1, max_active=2]\n")
    found = printed_config(capsys, "replay", "--config", str(path))
    assert (found["path"], found["sweep"]) == ("there", ["alpha=1", "max_active=2"])
    assert printed_config(capsys, "replay", "--config", str(path), "here")["path"] == "here"
    assert printed_config(capsys, "replay", "--config", str(path), "--json")["json"] is True
    assert "alpha=-1.0" in refusal(capsys, "replay", "here", "--alpha", "-1", "--config", str(path))


def test_a_list_that_goes_by_place_is_overridden_whole(capsys, tmp_path):
    path = tmp_path / "report.yaml"
    path.write_text("runs: [one, two]\nout: page.html\n")
    assert printed_config(capsys, "report", "--config", str(path))["runs"] == ["one", "two"]
    assert printed_config(capsys, "report", "three", "--config", str(path))["runs"] == ["three"]
    assert printed_config(capsys, "report", "a", "b", "c", "-o", "x.html", "--config", str(path))["runs"] == [*"abc"]
    path.write_text("out: page.html\n")
    assert printed_config(capsys, "report", "three", "--config", str(path))["runs"] == ["three"]
    assert "at least one record" in refusal(capsys, "report", "--config", str(path))


def test_a_config_is_printed_for_what_is_not_there_yet(capsys, tmp_path):
    nowhere = tmp_path / "nowhere"
    assert printed_config(capsys, "eval", str(nowhere), "--tasks", "hellaswag")["path"] == str(nowhere)
    assert "there is no such folder" in refusal(capsys, "eval", str(nowhere), "--tasks", "hellaswag")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("steps: 0\n", ["steps=0", "at least 1"]),
        ("recipe: saved-activation\n", ["Did you mean 'saved-activations'?"]),
        ("bf16: 7\n", ["bf16=7", "true or false"]),
        ("steps: {a: 1}\n", ["steps={'a': 1}", "a value or a list of values"]),
        ("- steps\n", ["it is settings and their values", "--print-config"]),
        ("steps: [1\n", ["it is no YAML"]),
        ("max-active: 2\n", ["max-active=2", "Did you mean 'max_active'?"]),
    ],
)
def test_a_config_that_cannot_be_meant_is_refused_in_one_line(capsys, tmp_path, text, parts):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    said = refusal(capsys, "train", *NEEDED["train"], "--config", str(path))
    for part in parts:
        assert part in said


def test_a_config_that_is_not_there_or_of_no_command_is_refused(capsys, config):
    assert "it cannot be read" in refusal(capsys, "train", "--config", "nowhere.yaml")
    assert "it is a file in YAML" in refusal(capsys, "train", "--config")
    assert "settings of one command" in refusal(capsys, "--config", str(config))
    assert "settings of one command" in refusal(capsys, "experiment", "--config", str(config))


def test_a_config_without_the_package_that_reads_it_is_a_missing_package(capsys, config, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert main(["train", "--config", str(config)]) == 2
    assert "missing package: A config file needs the package 'PyYAML'" in capsys.readouterr().err


def test_a_job_prints_its_summary_alone_for_machines(capsys, monkeypatch, tmp_path):
    def run_demo(settings: object) -> None:
        print("progress")
        (settings.folder / "summary.json").write_text('{"arms": {}}\n')

    monkeypatch.setattr("trimtab.experiments.demo.run_demo", run_demo)
    assert main(["demo", "--out", str(tmp_path), "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {"arms": {}}
    assert said.err == "progress\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_says_what_it_takes_in_common(capsys, command):
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    printed = capsys.readouterr().out
    for option in ("--config", "--print-config", *(["--json"] if command in WITH_A_TABLE else [])):
        assert option in printed


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_the_commands(shell):
    done = subprocess.run(
        [sys.executable, "-m", "trimtab", "--tyro-print-completion", shell], capture_output=True, text=True, check=True
    )
    for word in ("trimtab", "replay", "calibrate", "--false-per-1000", "--config", "--print-config"):
        assert word in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_completed_with_all_of_its_options(command):
    """What is completed is made of the same settings, with what ``main`` takes before tyro sees the words."""
    extended = below("", cli._with_common_options(cli._Command))
    assert list(extended) == list(COMMANDS)
    more = {item.name for item in fields(extended[command])} - {item.name for item in fields(COMMANDS[command])}
    expected = {"config", "print_config"} | ({"json"} if COMMANDS[command] in cli._SUMMARIES else set())
    assert more == expected


def test_the_help_names_the_completion(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "--tyro-print-completion" in capsys.readouterr().out
