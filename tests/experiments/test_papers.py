"""The paper's experiments: their scenarios and tables are whole, and each of them runs."""

import dataclasses
import io
import json
import shlex
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from trimtab.cli import main
from trimtab.errors import ConfigError
from trimtab.experiments import source
from trimtab.experiments.compare.comparison import Comparison
from trimtab.experiments.paper_settings import ActivationsSettings, DeepseekSettings, LoraSettings, MoeSettings
from trimtab.experiments.papers.experiment import EXPERIMENTS, command_of, run_paper_experiment
from trimtab.experiments.papers.layout import COLUMNS
from trimtab.experiments.papers.preset_run import arms_of, run_preset_arms, scaled
from trimtab.experiments.papers.published import GNMR_4BIT, STATIC_4BIT, UNQUANTIZED
from trimtab.experiments.papers.repair import twin_of
from trimtab.experiments.papers.tables import cell_text, make_table, markdown_table, rich_tables
from trimtab.experiments.presets import run_preset
from trimtab.experiments.source import source_of
from trimtab.trace import open_run

pytest.importorskip("transformers", reason="needs transformers: pip install 'trimtab[hf]'")

SETTINGS = {one.name: one for one in (ActivationsSettings, DeepseekSettings, LoraSettings, MoeSettings)}
TEXT = "".join(f"The ship {i} sails to port {i * i % 97} at dawn. " for i in range(900))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def smaller(scenario):
    """The scenario on a model that trains in no time, with the arms that its tables cannot do without."""
    comparison = scenario.comparison
    plan = dataclasses.replace(comparison.plan, hidden=16, ffn=32, num_layers=2, num_heads=2, sequence=8, batch=2)
    kept = {"unquantized-clean", "static-low-clean", "static-low", "static-high", scenario.gnmr, scenario.direct}
    arms = tuple(arm for arm in comparison.arms if arm in kept)
    plan = dataclasses.replace(plan, num_validation=4)
    return dataclasses.replace(scenario, comparison=dataclasses.replace(comparison, plan=plan, arms=arms))


def fake_figures(comparison: Comparison):
    """A summary of the shape that the engine writes, whose figures are made up: losses rise along the arms."""
    arms = {}
    for i, arm in enumerate(comparison.arms):
        loss = 2.0 + i / 100
        spread = {"mean": loss, "sd": 0.01, "n": 2, "of": 2}
        arms[arm] = {
            "title": arm,
            "scores_decide": True,
            "by_seed": {str(seed): {"val_loss": loss + seed / 1000} for seed in comparison.seeds},
            "series": {"train_loss": [1.0]},
            **{key: spread for key in COLUMNS if not key.startswith("paper_")},
        }
    return {
        "name": comparison.name,
        "faults": comparison.faults,
        "seeds": list(comparison.seeds),
        "steps": comparison.plan.num_steps,
        "num_parameters": 700_000,
        "num_units": 28,
        "arms": arms,
        "faults_by_seed": {},
        "source": {"commit": "abc1234", "modified": False, "version": "0.1"},
        "seconds": 1.0,
        "worker_seconds": 2.0,
    }


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=lambda e: e.name)
def test_every_row_of_a_table_is_an_arm_of_a_scenario_and_every_column_exists(experiment):
    scenarios = {one.name: one for one in experiment.scenarios((0, 1), None)}
    assert {one.regime for one in scenarios.values()} == {"natural", "injected"}
    for one in scenarios.values():
        assert (one.regime == "natural") == (one.comparison.faults == "none")
        assert {"static-low", "static-high"} <= set(one.comparison.arms)
        # What harm is measured against.
        assert ("unquantized-clean" if one.regime == "natural" else "static-low-clean") in one.comparison.arms
    shown = set()
    for layout in experiment.layouts:
        assert set(layout.columns) <= set(COLUMNS), layout.title
        rows = {(row.scenario, row.arm) for row in layout.rows if row.arm in scenarios[row.scenario].comparison.arms}
        assert rows, layout.title
        shown |= rows
    every = {(name, arm) for name, one in scenarios.items() for arm in one.comparison.arms}
    assert every - shown == set()


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=lambda e: e.name)
def test_what_is_claimed_of_injected_faults_has_as_many_units_at_random_beside_it(experiment):
    for one in experiment.scenarios((0,), None):
        arms = dict.fromkeys(one.comparison.arms) if one.regime == "injected" else {}
        # Of permanent damage nothing is claimed for gradient norms: their history holds it.
        claimed = {one.direct} if one.comparison.faults == "permanent-outliers" else {one.gnmr, one.direct}
        for arm in claimed & set(arms):
            assert twin_of({"arms": arms}, arm), (one.name, arm)


def test_the_command_is_what_was_run():
    given = LoraSettings(seeds=2, first_seed=3, steps=9, only=("natural-layers",), data=(Path("some text.txt"),))
    words = shlex.split(command_of(given))
    assert words[:3] == ["trimtab", "experiment", "lora"]
    options = "--seeds 2 --first-seed 3 --steps 9 --only natural-layers --data"
    assert words[3:] == [*options.split(), "some text.txt"]


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=lambda e: e.name)
def test_steps_and_seeds_reach_every_scenario_and_each_can_be_named(experiment):
    for one in experiment.scenarios((3, 4), 7):
        assert (one.comparison.plan.num_steps, one.comparison.seeds) == (7, (3, 4))
    natural = experiment.scenarios((0,), None)[0].name
    settings = SETTINGS[experiment.name](only=("natural",))
    with pytest.raises(ConfigError, match=natural):
        run_paper_experiment(settings, Console(quiet=True))


def test_the_published_figures_are_the_papers():
    assert STATIC_4BIT["paper_over_unquantized"] == pytest.approx(67.22 / 30.79)
    assert UNQUANTIZED["paper_perplexity"] == 30.79
    assert GNMR_4BIT["paper_trigger_rate"] == {"low": 0.00016, "high": 0.00141}


def test_an_experiment_with_made_up_figures_prints_and_writes_them(tmp_path):
    asked = []

    def compare(comparison, out, **settings):
        asked.append((comparison.name, out, settings["workers"]))
        return fake_figures(comparison)

    said = io.StringIO()
    settings = ActivationsSettings(out=tmp_path, seeds=2, workers=1)
    summary = run_paper_experiment(settings, Console(file=said, width=200), compare=compare)
    names = [one.name for one in EXPERIMENTS["activations"].scenarios((0, 1), None)]
    assert asked == [(name, tmp_path, 1) for name in names]
    assert json.loads((tmp_path / "summary.json").read_text())["tables"] == json.loads(json.dumps(summary["tables"]))
    assert summary["source"]["version"] == summary["versions"]["trimtab"]
    assert summary["seeds"] == [0, 1]
    assert len(summary["tables"]) == len(EXPERIMENTS["activations"].layouts)
    assert "series" not in summary["comparisons"][names[0]]["arms"]["static-low"]
    document = (tmp_path / "table.md").read_text()
    for words in ("67.22", "30.59-30.68", "0.016-0.141%", "| 2 | 2", "no faults", "max_active"):
        assert words in document, words
    assert "paper: triggers" in said.getvalue()
    assert summary["command"] in document
    assert summary["command"] == "trimtab experiment activations --seeds 2"
    assert "source: abc1234" in document
    assert summary["worker_seconds"] == 2.0 * len(names)
    # The paper's figures are of tokens, and of a ratio that is counted otherwise: in a table without any of ours.
    for table in summary["tables"]:
        keys = [column["key"] for column in table["columns"]]
        assert len({key.startswith("paper_") for key in keys}) == 1, table["title"]
    # A run that is cut short does not leave the older summary as its own.
    with pytest.raises(ZeroDivisionError):
        run_paper_experiment(settings, Console(quiet=True), compare=lambda *_, **__: 1 / 0)
    assert not (tmp_path / "summary.json").exists()


def test_a_table_has_no_empty_column_and_no_row_of_an_arm_that_was_not_run():
    experiment = EXPERIMENTS["deepseek"]
    one = experiment.scenarios((0, 1), None)[0]
    figures = fake_figures(one.comparison)
    for arm in figures["arms"].values():
        arm["trigger_rate"] = {"mean": None, "sd": None, "n": 0, "of": 2}
    del figures["arms"][one.gnmr]
    tables = [make_table(layout, {one.name: figures}) for layout in experiment.layouts]
    (table,) = [table for table in tables if table is not None]
    assert "trigger_rate" not in [column["key"] for column in table["columns"]]
    assert one.gnmr not in [row["arm"] for row in table["rows"]]
    ratio = next(row["cells"]["over_unquantized"] for row in table["rows"] if row["arm"] == "static-low")
    # Of the losses: a mean of perplexities would be that of the worst seed.
    assert ratio["mean"] == pytest.approx(np.exp(0.01))
    (whole,) = rich_tables(table, 300)
    assert whole.row_count == len(table["rows"]) == markdown_table(table).count("\n| ") - 2
    narrow = rich_tables(table, 80)
    assert [part.row_count for part in narrow] == [whole.row_count] * len(narrow)
    # Each column once, and the names in every part.
    assert sum(len(part.columns) - 1 for part in narrow) == len(table["columns"])
    assert len(narrow) > 1


def test_repair_without_faults_is_of_what_the_low_cost_path_itself_costs():
    one = EXPERIMENTS["deepseek"].scenarios((0, 1, 2), None)[1]
    figures = fake_figures(one.comparison)
    for arm, loss in (("unquantized-clean", 2.0), ("static-low", 3.0), ("static-high", 2.1), (one.gnmr, 2.5)):
        for seed in figures["seeds"]:
            figures["arms"][arm]["by_seed"][str(seed)] = {"val_loss": loss + seed / 100}
    layout = next(layout for layout in EXPERIMENTS["deepseek"].layouts if layout.rows[0].scenario == one.name)
    table = make_table(layout, {one.name: figures})
    cells = {row["arm"]: row["cells"]["repaired"] for row in table["rows"]}
    assert cells["static-low"] is cells["unquantized-clean"] is None
    assert cells[one.gnmr]["share"] == pytest.approx(0.5)
    figures["arms"][one.gnmr]["by_seed"]["1"] = {"val_loss": None}
    (lost,) = [row["cells"] for row in make_table(layout, {one.name: figures})["rows"] if row["arm"] == one.gnmr]
    assert cell_text(lost["repaired"], "share") == "diverged 1/3"
    assert cell_text(lost["over_unquantized"], "times").endswith(" (2/3)")
    assert cells["static-high"]["interval"] == pytest.approx([0.9, 0.9])


def test_numbers_are_written_as_they_are_read():
    assert cell_text(0.5, "percent") == "50.0%"
    assert cell_text({"low": 0.00016, "high": 0.00141}, "fine_percent") == "0.016-0.141%"
    assert cell_text({"mean": None, "sd": None, "n": 0}, "nats") == "-"
    assert cell_text({"share": None, "interval": None}, "share") == "-"
    assert cell_text({"share": 0.5, "interval": None}, "share") == "50%"
    assert cell_text(float("nan"), "nats") == "-"
    assert cell_text({"mean": 2.0, "sd": 0.5, "n": 2, "of": 3}, "nats") == "2.0000±0.5000 (2/3)"
    assert cell_text({"mean": None, "sd": None, "n": 0, "of": 3}, "nats") == "diverged 3/3"
    assert cell_text({"mean": None, "sd": None, "n": 0, "of": 3}, "percent") == "-"


def test_the_source_of_a_checkout_is_its_commit_and_of_anything_else_the_version(tmp_path, monkeypatch):
    assert source_of(tmp_path)["commit"] is None
    assert source.source_text(source_of(tmp_path)).startswith("version ")
    answers = {"ls-files": "a.py", "rev-parse": "abc1234", "status": " M a.py"}
    monkeypatch.setattr(source, "_git", lambda folder, command, *words: answers[command])
    assert source_of(tmp_path) | {"version": ""} == {"commit": "abc1234", "modified": True, "version": ""}


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--seeds", "0"], ["seeds=0", "at least 1"]),
        (["--batch", "2"], ["batch='2'", "only a preset's run reads it"]),
        (["--preset", "llama-60", "--data", "x"], ["preset='llama-60'", "Did you mean 'llama-60m'?"]),
        (["--preset", "moe-3.7b", "--data", "x"], ["preset='moe-3.7b'", "llama-60m"]),
        (["--preset", "llama-60m"], ["data=[]", "no text of its own"]),
        (["--preset", "llama-60m", "--data", "x", "--workers", "2"], ["workers=2", "one after the other"]),
        (["--only", "natural-4bits"], ["only='natural-4bits'", "Did you mean 'natural-4bit'?"]),
    ],
)
def test_what_is_wrong_is_said_in_one_line(words, parts, capsys, tmp_path):
    assert main(["experiment", "activations", "--out", str(tmp_path / "out"), *words]) == 2
    said = capsys.readouterr().err
    assert all(part in said for part in parts), said
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_experiment_runs_and_goes_on_where_it_was_stopped(name, tmp_path, text, monkeypatch):
    # The engine's pictures need a browser, and seconds each.
    monkeypatch.setattr("trimtab.experiments.compare.experiment.write_plot", lambda *_: ([], None))
    if name == "lora":
        pytest.importorskip("peft")
    settings = SETTINGS[name](out=tmp_path, seeds=1, steps=4, workers=1, data=(text,))
    summary = run_paper_experiment(settings, Console(file=io.StringIO(), width=200), change=smaller)
    scenarios = EXPERIMENTS[name].scenarios((0,), 4)
    assert set(summary["comparisons"]) == {one.name for one in scenarios}
    for one in scenarios:
        found = summary["comparisons"][one.name]
        assert found["regime"] == one.regime
        assert all(np.isfinite(arm["val_loss"]["mean"]) for arm in found["arms"].values())
        assert (tmp_path / one.name / "summary.json").exists()
    again = run_paper_experiment(settings, Console(quiet=True), change=smaller)
    assert again["tables"] == summary["tables"]


def small_preset(name):
    known = run_preset(name)
    config = dict(known.config) | {
        "vocab_size": 256,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
    }
    if "num_experts" in config:
        config |= {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
        config |= {"num_key_value_heads": 2, "head_dim": 8}
    return dataclasses.replace(known, config=config, total_batch=4, batch=2, sequence=8)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_presets_arms_are_runs_that_trimtab_train_takes(name):
    for preset in SETTINGS[name].presets:
        arms = arms_of(name, run_preset(preset))
        assert [arm.name for arm in arms[:4]] == ["unquantized-clean", "static-low", "static-high", "gnmr"]
        assert [arm.name for arm in arms if arm.recovers_all] == ["static-high"]
        assert {arm.reference for arm in arms} == {"", "gnmr"}
        has_figures = name == "activations" and preset == "llama-60m"
        assert any(arm.published for arm in arms) == has_figures


@pytest.mark.slow
def test_a_shrunken_preset_trains_every_arm_and_is_not_trained_twice(tmp_path, text, monkeypatch):
    settings = ActivationsSettings(out=tmp_path, preset="llama-60m", data=(text,), steps=2)
    known = small_preset("llama-60m")
    summary = run_preset_arms(settings, Console(file=io.StringIO(), width=200), known)
    assert summary["steps"] == 2
    assert summary["arms"]["static-high"]["recovered_share"]["mean"] == 1.0
    assert summary["arms"]["static-low"]["recovered_share"]["mean"] == 0.0
    assert summary["arms"]["static-high"]["full_share"]["mean"] is None
    assert summary["arms"]["gnmr"]["full_share"]["mean"] == 0.0
    ours, papers = summary["tables"]
    assert "ADAPT-style" in ours["note"]
    assert {"full_share", "over_unquantized"} <= {column["key"] for column in ours["columns"]}
    assert all(column["key"].startswith("paper_") for column in papers["columns"])
    assert set(summary["arms"]) == {arm.name for arm in arms_of("activations", known)}
    assert "67.22" in (settings.summary_folder / "table.md").read_text()
    monkeypatch.setattr("trimtab.experiments.train.run_train", None)
    again = run_preset_arms(settings, Console(quiet=True), known)
    assert again["tables"] == summary["tables"]
    with pytest.raises(ConfigError, match="other settings"):
        run_preset_arms(dataclasses.replace(settings, steps=3), Console(quiet=True), known)


@pytest.mark.slow
def test_the_mixture_begins_wholly_on_the_recovery_path(tmp_path, text, monkeypatch):
    known = dataclasses.replace(small_preset("moe-3.7b"), high_fidelity_share=0.5)
    arms = arms_of("moe", known)
    monkeypatch.setattr("trimtab.experiments.papers.preset_run.arms_of", lambda *_: arms[3:4])
    settings = MoeSettings(out=tmp_path, preset="moe-3.7b", data=(text,), steps=4)
    assert scaled(known, 4).high_fidelity_steps == 2
    run_preset_arms(settings, Console(quiet=True), known)
    with open_run(settings.summary_folder / "seed0" / "gnmr") as run:
        forced = run.events("forced")
        units = sum(unit.recoverable for unit in run.unit_table)
    assert [event.step for event in forced] == [1, 2]
    assert [len(event.data["units"]) for event in forced] == [units, units]
