"""Comparisons of policies, at tiny sizes: what they promise, not what they find."""

import io
import json
import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from trimtab.cli import main
from trimtab.errors import ConfigError, MissingExtraError, TrimtabWarning
from trimtab.experiments.arms import TrainingPlan
from trimtab.experiments.compare import experiment, part
from trimtab.experiments.compare import plot as compare_plot
from trimtab.experiments.compare.arms import ARM_NAMES, read_arm, split_arms
from trimtab.experiments.compare.comparison import Comparison
from trimtab.experiments.compare.experiment import run_comparison
from trimtab.experiments.compare.faults import plan_faults
from trimtab.experiments.compare.measures import repair
from trimtab.experiments.compare.part import BASE, Part, record_of, run_part
from trimtab.experiments.compare.plot import comparison_figure, write_plot
from trimtab.experiments.compare.summary import TIMES
from trimtab.experiments.compare.table import comparison_table
from trimtab.experiments.compare_settings import CompareSettings
from trimtab.experiments.source import source_of
from trimtab.experiments.text import load_corpus
from trimtab.trace import open_run

TEXT = "".join(f"The ship {i} sails to port {i * i % 97} at dawn. " for i in range(2000))
PLAN = TrainingPlan(num_steps=8, hidden=32, ffn=32, num_layers=2, num_heads=2, sequence=16, batch=2, num_validation=4)
CORPUS = load_corpus([TEXT], sequence=PLAN.sequence)
NUM_UNITS = 14


def comparison(*arms, **changes):
    settings = {
        "name": "tiny",
        "title": "Tiny",
        "recipe": "saved-activations",
        "arms": arms,
        "faults": "stored-copy-bursts",
        "fault_settings": {"num_bursts": 3, "first_step": 3, "last_step": 4, "num_steps": (3, 5)},
        "max_active": 3,
        "plan": PLAN,
        "seeds": (0,),
    }
    return Comparison(**{**settings, **changes})


def run(folder, *arms, seed=0, **changes):
    """The figures of the arms, trained one after another."""
    made = comparison(*arms, **changes)
    return {arm: run_part(Part(comparison=made, arm=arm, seed=seed), CORPUS, folder) for arm in arms}


def without_times(value):
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in TIMES}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def tables_of(summary):
    """The tables as printed, with no times in them."""
    nothing = {"mean": None, "sd": None, "n": 0}
    arms = {name: {**arm, **dict.fromkeys(TIMES, nothing)} for name, arm in summary["arms"].items()}
    said = io.StringIO()
    for table in comparison_table({**summary, "arms": arms}):
        Console(file=said, width=100).print(table)
    return said.getvalue()


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """Drawing one starts a browser, which takes seconds."""
    monkeypatch.setattr(experiment, "write_plot", lambda summary, folder: ([], None))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.mark.slow
def test_every_arm_trains_under_the_same_faults_and_within_the_budget(tmp_path):
    limit = "@error_history=ema,error_limit=1.5"
    arms = [name + (limit if "direct" in name else "") for name in ARM_NAMES]
    found = run(tmp_path, *arms, gaps_every=4)
    faults = found["static-low"]["faults"]
    assert len(faults) == 3
    for arm, figures in found.items():
        kind = read_arm(arm).kind
        assert figures["faults"] == (faults if kind.has_faults else []), arm
        assert np.isfinite(figures["val_loss"]), arm
        assert len(figures["train_losses"]) == PLAN.num_steps
        if not kind.is_quantized:
            assert figures["budget"] is None
            continue
        assert figures["most_active"] <= figures["budget"], arm
        assert figures["budget"] == (NUM_UNITS if kind.route == "all" else 3 if kind.has_budget else 0), arm
        assert 0 <= figures["recovered_share"] <= figures["budget"] / NUM_UNITS, arm
        assert figures["capture"] is None or figures["capture"] <= 1 + 1e-9, arm
        with open_run(record_of(Part(comparison=comparison("gnmr"), arm=arm, seed=0), tmp_path)) as record:
            assert record.finished
            assert len(record.events("fault")) == len(figures["faults"]), arm
    assert found["static-high"]["recovered_share"] == 1.0
    assert found["static-low"]["recovered_share"] == 0.0
    assert found["damping-only"]["recovered_share"] == 0.0
    assert found["damping-only"]["damped_unit_steps"] > 0
    assert found["oracle"]["capture"] == pytest.approx(1.0)
    # The first decision routes the second step, so that a fixed set is on in all but the first.
    assert found["fixed"]["recovered_share"] == pytest.approx(3 * (PLAN.num_steps - 1) / (NUM_UNITS * PLAN.num_steps))
    assert found["direct" + limit]["reasons"]["error"] > 0
    assert found["gnmr"]["reasons"]["error"] == 0


@pytest.mark.parametrize("arms", [("gnmr", "random"), ("gnmr-paper@alpha=1.1", "random@of=gnmr-paper,alpha=1.1")])
def test_random_has_as_many_units_active_in_each_step_as_its_reference(tmp_path, arms):
    found = run(tmp_path, *arms)
    reference, chance = (found[arm] for arm in arms)
    assert sum(reference["active_counts"]) > 0
    assert chance["active_counts"] == reference["active_counts"]
    assert chance["train_losses"] != reference["train_losses"]


@pytest.mark.parametrize(
    ("recipe", "faults"), [("saved-activations", "stored-copy-bursts"), ("quantized-gemm", "outlier-bursts")]
)
def test_measuring_the_gaps_changes_nothing_of_the_training(tmp_path, recipe, faults):
    arm = "direct@error_history=ema,error_limit=1.5"
    plain, measured = (
        run(tmp_path / str(every), arm, recipe=recipe, faults=faults, gaps_every=every)[arm] for every in (0, 3)
    )
    assert measured["capture"] is not None
    assert plain["capture"] is None
    for key in ("val_loss", "train_losses", "active_counts", "reasons", "trigger_rate", "recall", "precision"):
        assert measured[key] == plain[key], key


def test_the_gaps_are_those_under_the_faults_so_that_the_oracle_recovers_a_faulty_unit(tmp_path):
    one = {"num_bursts": 1, "first_step": 3, "last_step": 3, "num_steps": (4, 4), "factor": (500.0, 500.0)}
    found = run(tmp_path, "oracle", fault_settings=one, max_active=1, gaps_every=1)["oracle"]
    assert found["faulty_recovered_share"] == 1.0
    assert found["faults_caught"] == 1
    assert found["mean_latency_steps"] == 0
    assert found["capture"] == pytest.approx(1.0)


@pytest.mark.slow
def test_a_comparison_that_was_stopped_goes_on_and_says_the_same(tmp_path, text, monkeypatch):
    made = comparison("static-low-clean", "static-low", "gnmr", "random", seeds=(0, 1))
    whole = run_comparison(made, tmp_path / "whole", data=[text], workers=1, console=Console(file=io.StringIO()))
    ran = []

    def stops(one, corpus, folder):
        if len(ran) == 5:
            # As a kill would: a record is there, and no part.
            record_of(one, folder).mkdir(parents=True)
            (record_of(one, folder) / "run.sqlite").write_bytes(b"cut short")
            raise KeyboardInterrupt
        ran.append(one.name)
        return run_part(one, corpus, folder)

    folder = tmp_path / "stopped"
    monkeypatch.setattr(experiment, "run_part", stops)
    with pytest.raises(KeyboardInterrupt):
        run_comparison(made, folder, data=[text], workers=1, console=Console(file=io.StringIO()))
    assert not (folder / "tiny" / "summary.json").exists()
    monkeypatch.setattr(experiment, "run_part", run_part)
    trained = []
    monkeypatch.setattr(part, "train_arm", lambda *a, _real=part.train_arm, **k: trained.append(k) or _real(*a, **k))
    resumed = run_comparison(made, folder, data=[text], workers=1, console=Console(file=io.StringIO()))
    assert len(trained) == 8 - 5
    assert without_times(resumed) == without_times(whole)
    assert tables_of(resumed) == tables_of(whole)
    assert json.loads((folder / "tiny" / "summary.json").read_text()) == resumed
    # And once more, with nothing left to train: the same, times and all.
    again = run_comparison(made, folder, data=[text], workers=1, console=Console(file=io.StringIO()))
    assert len(trained) == 3
    assert again["arms"] == resumed["arms"]
    assert (folder / "tiny" / "summary.previous.json").exists()


@pytest.mark.slow
def test_two_processes_give_what_one_gives(tmp_path, text):
    made = comparison("gnmr", "random", seeds=(0,))
    found = [
        run_comparison(made, tmp_path / str(n), data=[text], workers=n, console=Console(file=io.StringIO()))
        for n in (1, 2)
    ]
    assert without_times(found[0]) == without_times(found[1])


def test_a_finished_part_serves_another_list_of_arms_but_no_other_budget_or_text(tmp_path, monkeypatch):
    first = run(tmp_path, "gnmr")["gnmr"]
    monkeypatch.setattr(part, "train_arm", None)
    other = comparison("gnmr", "static-low", seeds=(0, 7), name="other", title="Another")
    assert run_part(Part(comparison=other, arm="gnmr", seed=0), CORPUS, tmp_path) == first
    with pytest.raises(TypeError):
        run(tmp_path, "gnmr", max_active=2)
    with pytest.raises(TypeError):
        run(tmp_path, "gnmr", plan=replace(PLAN, num_steps=9))
    longer = load_corpus([TEXT + "more"], sequence=PLAN.sequence)
    with pytest.raises(TypeError):
        run_part(Part(comparison=comparison("gnmr"), arm="gnmr", seed=0), longer, tmp_path)
    (tmp_path / "parts" / "gnmr-seed0.json").write_text('{"identity"')
    with pytest.raises(TypeError):
        run(tmp_path, "gnmr")


def test_lora_fine_tunes_a_base_that_is_trained_once_a_seed(tmp_path, text, monkeypatch):
    made = comparison(
        "static-low",
        "gnmr",
        recipe="int8-base",
        model="lora",
        faults="outlier-bursts",
        fault_settings={"num_bursts": 2},
    )
    quiet = {"data": [text], "workers": 1, "console": Console(file=io.StringIO())}
    summary = run_comparison(made, tmp_path, **quiet)
    base = tmp_path / "tiny" / "bases" / "seed0.pt"
    assert summary["arms"]["static-low"]["val_loss"]["mean"] is not None
    assert len(summary["faults_by_seed"]["0"]) == 2
    pretrained = json.loads((tmp_path / "tiny" / "parts" / f"{BASE}-seed0.json").read_text())["figures"]
    assert pretrained["val_loss"] > 0
    # Other arms of the seed begin from the same base; without it, it is trained again.
    monkeypatch.setattr(part, "pretrain_base", None)
    more = run_comparison(replace(made, arms=("static-low", "static-high")), tmp_path, **quiet)
    assert more["arms"]["static-low"] == summary["arms"]["static-low"]
    base.unlink()
    with pytest.raises(TypeError):
        run_comparison(made, tmp_path, **quiet)


def test_a_mixture_is_compared_and_validated_without_its_balancing_loss(tmp_path):
    found = run(
        tmp_path, "static-low", "gnmr", recipe="quantized-gemm", model="mixtral", faults="permanent-outliers",
        fault_settings={"share": 0.2},
    )  # fmt: skip
    for figures in found.values():
        assert all(one["start_step"] == 1 and one["num_steps"] == PLAN.num_steps for one in figures["faults"])
        assert len(figures["faults"]) == round(0.2 * figures["num_units"])
        # The balancing loss of 2 of 8 experts would add 0.02.
        assert figures["val_loss"] == pytest.approx(np.mean(figures["train_losses"][-2:]), abs=1.0)


def test_a_seed_changes_weights_data_and_faults(tmp_path):
    figures = [run(tmp_path, "static-low", seed=seed, seeds=(0, 1))["static-low"] for seed in (0, 1)]
    assert figures[0]["train_losses"][0] != figures[1]["train_losses"][0]
    assert figures[0]["faults"] != figures[1]["faults"]


def test_a_run_whose_loss_is_no_number_any_more_is_reported_and_not_counted(tmp_path, text):
    plan = replace(PLAN, learning_rate=1e30)
    made = comparison("static-low-clean", "static-low", "gnmr", plan=plan)
    said = io.StringIO()
    summary = run_comparison(made, tmp_path, data=[text], workers=1, console=Console(file=said, width=100))
    assert "no finite loss" in said.getvalue()
    for arm in summary["arms"].values():
        assert arm["val_loss"] == {"mean": None, "sd": None, "n": 0, "of": 1}
        assert arm["val_perplexity"]["mean"] is None
    repaired = summary["arms"]["gnmr"]["repaired"]
    assert repaired["did_harm"] is None
    assert repaired["num_diverged"] == {"low": 1, "clean": 1, "arm": 1}
    assert summary["harm"]["num_diverged"] == {"low": 1, "clean": 1}
    assert "1 diverged in the arm 'low-cost path'" in said.getvalue().replace("\n", " ").replace("  ", " ")
    assert "No harm to repair" not in said.getvalue()
    assert "diverged" in tables_of(summary)
    comparison_figure(summary)


def test_what_is_warned_of_in_the_runs_is_said_once_with_their_number(tmp_path, text):
    made = comparison("static-low", recipe="saved-activations", seeds=(0, 1))
    real = part.train_arm

    def warns(*args, **kwargs):
        warnings.warn("A unit is odd [1].", TrimtabWarning, stacklevel=2)
        return real(*args, **kwargs)

    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part, "train_arm", warns)
        summary = run_comparison(made, tmp_path, data=[text], workers=1, console=Console(file=said, width=100))
    assert summary["warnings"] == {"A unit is odd [1].": 2}
    assert "Warned in 2 of the parts: A unit is odd [1]." in said.getvalue()


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"arms": ("gnrm",)}, ["arm='gnrm'", "Did you mean 'gnmr'?"]),
        ({"arms": ()}, ["arms=[]", "at least one"]),
        ({"arms": ("gnmr", "gnmr")}, ["each arm is trained once"]),
        ({"arms": ("random",)}, ["'gnmr'", "Add 'gnmr'."]),
        ({"arms": ("random@of=gnmr-paper", "gnmr")}, ["Add 'gnmr-paper'."]),
        ({"arms": ("random@of=static-low", "static-low")}, ["of='static-low'", "switches units"]),
        ({"arms": ("gnmr@alfa=2",)}, ["alfa=2", "Did you mean 'alpha'?"]),
        ({"arms": ("gnmr@alpha",)}, ["key=value"]),
        ({"arms": ("gnmr@alpha=2,alpha=3",)}, ["each once"]),
        ({"arms": ("gnmr@max_active=1.5",)}, ["max_active=1.5", "share"]),
        ({"arms": ("static-low@max_active=2",)}, ["max_active=2", "spends no budget"]),
        ({"arms": ("gnmr-paper@setting=lorra",)}, ["setting='lorra'", "Did you mean 'lora'?"]),
        ({"arms": ("adapt-style@score=gnnr",)}, ["score='gnnr'"]),
        ({"arms": ("oracle",)}, ["gaps_every"]),
        ({"arms": ("direct",)}, ["error_limit=None", "error_history=ema"]),
        ({"recipe": "saved-activation"}, ["Did you mean 'saved-activations'?"]),
        ({"recipe": "none"}, ["no paths to compare"]),
        ({"recipe_settings": {"low_bit": 2}}, ["low_bit=2", "Did you mean 'low_bits'?"]),
        ({"recipe_settings": {"low_format": "e2m3"}}, ["low_format='e2m3'", "does not read it"]),
        ({"model": "lama"}, ["model='lama'", "Did you mean 'llama'?"]),
        ({"model": "lora"}, ["model='lora'", "adapters freeze them"]),
        ({"recipe": "int8-base", "faults": "none", "fault_settings": {}}, ["model='llama'", "Set it to 'lora'."]),
        ({"faults": "outlier-burst"}, ["Did you mean 'outlier-bursts'?"]),
        ({"faults": "outlier-bursts"}, ["'quantized-gemm' and 'int8-base'", "Choose 'stored-copy-bursts'."]),
        ({"faults": "none"}, ["there are no faults to set"]),
        ({"recipe_settings": {"low_bits": 16}}, ["low_bits=16", "no copy that could be corrupted"]),
        ({"fault_settings": {"factr": 3}}, ["factr=3", "Did you mean 'factor'?"]),
        ({"fault_settings": {"factor": 3}}, ["factor=3", "a range"]),
        (
            {"recipe": "quantized-gemm", "faults": "permanent-outliers", "fault_settings": {"share": "all"}},
            ["share='all'", "share of the units"],
        ),
        ({"max_active": -1}, ["max_active=-1"]),
        ({"error_limit": 0}, ["error_limit=0"]),
        ({"seeds": ()}, ["seeds=[]"]),
        ({"seeds": (1, 1)}, ["each seed is trained once"]),
        ({"seeds": (-1,)}, ["seeds=-1"]),
        ({"gaps_every": -1}, ["gaps_every=-1"]),
        (
            {"recipe": "torchao-mxfp8", "faults": "none", "fault_settings": {}, "plan": replace(PLAN, sequence=15)},
            ["plan.sequence=15", "multiples of 32"],
        ),
        ({"name": "a/b"}, ["name='a/b'", "a word"]),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_trained(changes, parts):
    with pytest.raises(ConfigError) as refused:
        comparison(*changes.get("arms", ("static-low",)), **{k: v for k, v in changes.items() if k != "arms"})
    for text in parts:
        assert text in str(refused.value)


def test_what_a_recipe_cannot_mean_is_refused_before_a_folder_is_made(tmp_path):
    with pytest.raises(ConfigError, match="high_bits=2"):
        run_comparison(comparison("static-low", recipe_settings={"high_bits": 2}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_fixed_set_does_not_know_where_permanent_faults_fall():
    units = tuple(f"unit{i}" for i in range(20))
    made = comparison(
        "fixed", recipe="quantized-gemm", faults="permanent-outliers", fault_settings={"share": 0.2}, max_active=4
    )
    covered, seeds = [], 300
    for seed in range(seeds):
        faulty = {window.unit for window in plan_faults(made, units, seed).windows}
        fixed = set(made.policy(read_arm("fixed"), seed, units=units).units)
        assert len(faulty) == len(fixed) == 4
        covered.append(len(faulty & fixed) / 4)
    # By chance 4 of 20; a hypergeometric count of 4 drawn twice has the variance 4 * 0.2 * 0.8 * 16 / 19.
    error = math.sqrt(4 * 0.2 * 0.8 * 16 / 19 / seeds) / 4
    assert abs(np.mean(covered) - 0.2) < 3 * error


def test_the_profile_of_adapt_style_ends_after_bursts_have_begun():
    made = comparison("adapt-style", plan=replace(PLAN, num_steps=250), fault_settings={})
    policy = made.policy(read_arm("adapt-style"), 0, units=("a", "b"))
    starts = [window.start_step for window in plan_faults(made, ("a", "b"), 0).windows]
    assert policy.profile_steps == 100
    assert min(starts) < policy.profile_steps
    assert "40% of the run" in read_arm("adapt-style").title


@pytest.mark.slow
def test_the_signals_are_measured_on_one_untreated_run(tmp_path, text):
    settings = {"num_bursts": 2, "first_step": 12, "last_step": 14, "num_steps": (5, 6), "factor": (500.0, 500.0)}
    made = comparison("static-low", "gnmr", plan=replace(PLAN, num_steps=20), seeds=(0, 1), fault_settings=settings)
    summary = run_comparison(made, tmp_path, data=[text], workers=1, console=Console(file=io.StringIO()))
    signals = summary["signals"]
    assert list(signals) == ["gnmr", "gnmr-paper", "error"]
    # The same faults, in the same steps.
    assert len({json.dumps(found["faulty_unit_steps"]) for found in signals.values()}) == 1
    assert signals["error"]["recall"]["of"] == 2
    # Without an absolute limit, a copy that is 500 times too large is still no like of its past.
    assert signals["error"]["event_recall"]["mean"] == 1.0
    # That of GNMR is what the run's own decisions were, for they are of the same policy, but for its budget.
    own = summary["arms"]["static-low"]
    for figure in ("recall", "event_recall", "precision"):
        assert own[figure] == signals["gnmr"][figure], figure
    assert "what the signals see" in tables_of(summary)
    # Observing changes nothing of the training, and another list of arms has the same signals or none.
    plain = run_part(Part(comparison=made, arm="static-low-clean", seed=0), CORPUS, tmp_path / "clean")
    assert plain["signals"] == {}
    without = run_comparison(
        replace(made, arms=("gnmr",)), tmp_path, data=[text], workers=1, console=Console(file=io.StringIO())
    )
    assert without["signals"] == {}


def test_observing_the_quantizers_changes_nothing_of_the_untreated_run(tmp_path, monkeypatch):
    watched = run(tmp_path / "a", "static-low")["static-low"]
    real = part.train_arm
    monkeypatch.setattr(part, "signals_of", lambda *_: {})
    monkeypatch.setattr(part, "train_arm", lambda *a, **k: real(*a, **{**k, "quantizer_stats": None}))
    plain = run(tmp_path / "b", "static-low")["static-low"]
    assert watched["train_losses"] == plain["train_losses"]
    assert watched["val_loss"] == plain["val_loss"]


def test_where_nothing_is_injected_there_is_no_precision_and_repair_is_of_the_low_cost_path(tmp_path, text):
    made = comparison(
        "unquantized-clean", "static-low", "gnmr", "static-high", faults="none", fault_settings={}, seeds=(0, 1)
    )
    summary = run_comparison(made, tmp_path, data=[text], workers=1, console=Console(file=io.StringIO()))
    assert summary["signals"] == {}
    for arm in summary["arms"].values():
        for figure in ("recall", "event_recall", "precision", "faulty_recovered_share"):
            assert arm[figure] == {"mean": None, "sd": None, "n": 0, "of": 2}
    losses = {name: [row["val_loss"] for row in arm["by_seed"].values()] for name, arm in summary["arms"].items()}
    slow = repair(losses["static-low"], losses["unquantized-clean"], losses["static-high"])
    assert summary["arms"]["static-high"]["repaired"] == slow
    assert summary["harm"]["reference"] == "unquantized-clean"
    assert summary["harm"]["mean_harm"] == slow["mean_harm"]
    assert summary["arms"]["static-low"]["repaired"] is None
    assert summary["arms"]["unquantized-clean"]["repaired"] is None


def test_a_part_of_other_source_is_not_reused_and_the_summary_says_which_it_is(tmp_path, text, monkeypatch):
    quiet = {"data": [text], "workers": 1, "console": Console(file=io.StringIO())}
    made = comparison("static-low-clean")
    first = run_comparison(made, tmp_path, **quiet)
    assert first["source"] == source_of()
    assert 0 < first["worker_seconds"] < first["seconds"]
    again = run_comparison(made, tmp_path, **quiet)
    # What it took is what all starts took; this start took next to nothing.
    assert again["worker_seconds"] == first["worker_seconds"]
    monkeypatch.setattr(part, "source_digest", lambda: "another")
    monkeypatch.setattr(part, "train_arm", None)
    with pytest.raises(TypeError):
        run_comparison(made, tmp_path, **quiet)


def test_arms_are_read_as_they_are_written():
    assert split_arms("gnmr@alpha=2,beta=1.5,random") == ("gnmr@alpha=2,beta=1.5", "random")
    assert split_arms("gnmr, random") == ("gnmr", "random")
    arm = read_arm("gnmr-paper@setting=lora,damping=true,history_clip=none,max_active=0.5")
    assert dict(arm.changes) == {"setting": "lora", "damping": True, "history_clip": None, "max_active": 0.5}
    policy = comparison("gnmr").policy(arm, 0, units=("a", "b"))
    assert (policy.damping, policy.max_active, policy.window_steps) == (True, 0.5, 5)
    adapt = comparison("gnmr").policy(read_arm("adapt-style@profile_steps=3,score=norm,alpha=9"), 0, units=("a",))
    assert (adapt.profile_steps, adapt.score, adapt.scores.alpha, adapt.share) == (3, "norm", 9.0, 3)


def test_the_table_says_that_one_seed_tells_no_harm_and_the_picture_has_every_arm(tmp_path, text, monkeypatch):
    made = comparison("unquantized-clean", "static-low-clean", "static-low", "gnmr", faults="none", fault_settings={})
    said = io.StringIO()
    summary = run_comparison(made, tmp_path, data=[text], workers=1, console=Console(file=said, width=100))
    assert "No faults are injected." in said.getvalue()
    assert summary["arms"]["gnmr"]["repaired"]["share"] is None
    hit = {**summary, "arms": {name: {**arm, "has_faults": True} for name, arm in summary["arms"].items()}}
    assert "unknown: one seed" in tables_of(hit)
    assert "With one seed nothing tells harm from chance" in said.getvalue()
    figure = comparison_figure(summary)
    monkeypatch.setattr(type(figure), "write_image", lambda *_: None)
    assert write_plot(summary, tmp_path) == ([tmp_path / "compare.html", tmp_path / "compare.svg"], None)
    titles = {trace.name for trace in figure.data}
    assert titles == {arm["title"] for arm in summary["arms"].values()}


def test_without_plotly_a_sentence_is_said_and_nothing_fails(tmp_path, monkeypatch):
    def refuses(summary):
        raise MissingExtraError("The picture", "plotly", "report")

    monkeypatch.setattr(compare_plot, "comparison_figure", refuses)
    written, problem = write_plot({}, tmp_path)
    assert written == []
    assert "plotly" in problem


def test_the_command_line_compares_and_prints_its_summary_for_machines(tmp_path, text, capsys):
    out = tmp_path / "out"
    words = ["compare", "--policies", "static-low,gnmr", "--seeds", "1", "--steps", "2", "--no-plot", "--workers", "1"]
    assert main([*words, "--data", str(text), "--out", str(out), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary == json.loads((out / "summary.json").read_text())
    assert list(summary["arms"]) == ["static-low", "gnmr"]
    assert {"seeds", "steps", "data", "plan", "notes", "arms", "versions"} <= set(summary)
    assert summary["faults"] == "stored-copy-bursts"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--policies", "gnrm"], ["Did you mean 'gnmr'?"]),
        (["--policies", "oracle"], ["gaps_every"]),
        (["--policies", "direct"], ["error_limit=None"]),
        (["--seeds", "0"], ["seeds=0"]),
        (["--steps", "0"], ["steps=0"]),
        (["--workers", "0"], ["workers=0"]),
        (["--recipe", "int8"], ["Did you mean 'int8-base'?"]),
    ],
)
def test_the_command_line_refuses_in_one_line(capsys, words, parts):
    assert main(["compare", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("trimtab: error: ")
    assert len(said.strip().splitlines()) == 1
    for text in parts:
        assert text in said


def test_the_usual_faults_and_model_are_those_that_the_recipe_can_have():
    made = {name: CompareSettings(recipe=name).comparison(PLAN) for name in ("saved-activations", "int8-base")}
    assert made["saved-activations"].faults == "stored-copy-bursts"
    assert (made["int8-base"].faults, made["int8-base"].model, made["int8-base"].limit) == (
        "outlier-bursts", "lora", 0.4,
    )  # fmt: skip
    assert CompareSettings(recipe="torchao-float8").comparison(PLAN).faults == "none"
