"""The fault experiment and the study of false alarms, at tiny sizes: what they promise, not what they find."""

import io
import json
import math
import shutil
import warnings

import pytest
import torch
from rich.console import Console

from trimtab.errors import TrimtabWarning
from trimtab.experiments.faults import run as fault_run
from trimtab.experiments.faults.experiment import run_faults
from trimtab.experiments.faults.measures import (
    differences,
    first_alarms,
    lead_steps,
    leave_step,
    over_seeds,
    scenario_row,
    spread,
)
from trimtab.experiments.faults.models import WatchedPlan
from trimtab.experiments.faults.run import BASE, Part, checkpoint_of, record_of, run_part
from trimtab.experiments.faults.said import said_of
from trimtab.experiments.faults.scenarios import SCENARIOS, scenarios_of
from trimtab.experiments.faults.table import fault_tables, markdown_table
from trimtab.experiments.faults.training import WatchedRun
from trimtab.experiments.healthy.cases import CASES
from trimtab.experiments.healthy.experiment import run_healthy
from trimtab.experiments.healthy.rates import false_alarm_rates
from trimtab.experiments.settings import FaultsSettings, HealthySettings
from trimtab.experiments.text import load_corpus
from trimtab.trace import open_run

TEXT = "".join(f"The ship {i} sails to port {i * i % 97} at dawn. " for i in range(2000))
PLAN = WatchedPlan(
    hidden=32,
    ffn=32,
    num_layers=1,
    num_heads=2,
    num_experts=4,
    sequence=16,
    batch=2,
    warmup_steps=3,
    eval_every=2,
    num_validation=2,
)
CORPUS = load_corpus([TEXT], sequence=PLAN.sequence)
NUM_HEALTHY, NUM_FAULTY = 5, 6


def part(scenario, model="dense", seed=0):
    return Part(model=model, seed=seed, scenario=scenario, start_step=NUM_HEALTHY, num_steps=NUM_FAULTY, plan=PLAN)


def without_times(figures):
    return {key: value for key, value in figures.items() if "seconds" not in key}


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize("model", ["dense", "moe", "qk_norm"])
def test_watching_with_every_monitor_changes_no_bit_of_training(tmp_path, model):
    digests = []
    for watched in (True, False):
        run = WatchedRun(model, PLAN, CORPUS, 0, record=tmp_path if watched else None, watched=watched)
        run.train(8)
        digests.append(run.digest())
        run.close()
    assert digests[0] == digests[1]
    other = WatchedRun(model, PLAN, CORPUS, 1, watched=False)
    other.train(8)
    assert other.digest() != digests[0]


def test_a_fork_goes_on_as_the_run_that_was_never_stopped(tmp_path):
    whole = WatchedRun("moe", PLAN, CORPUS, 0, record=tmp_path / "whole")
    whole.train(NUM_HEALTHY + NUM_FAULTY)
    whole.close()
    run_part(part(BASE, "moe"), CORPUS, tmp_path)
    fork = run_part(part("healthy", "moe"), CORPUS, tmp_path)
    assert fork["digest"] == whole.digest()
    assert fork["held_out"] == [list(pair) for pair in whole.held_out]
    with open_run(tmp_path / "whole") as a, open_run(record_of(part("healthy", "moe"), tmp_path)) as b:
        steps, values, _ = a.readings("router", "entropy_mean")
        steps_then, values_then, _ = b.readings("router", "entropy_mean")
    assert steps_then.tolist() == list(range(NUM_HEALTHY + 1, NUM_HEALTHY + NUM_FAULTY + 1))
    assert (values[steps > NUM_HEALTHY] == values_then).all()


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_every_scenario_is_noted_in_its_record_and_only_faults_change_the_weights(tmp_path, model):
    base = run_part(part(BASE, model), CORPUS, tmp_path)
    twin = run_part(part("healthy", model), CORPUS, tmp_path)
    assert twin["digest"] != base["digest"]
    for scenario in scenarios_of(model):
        figures = run_part(part(scenario.name, model), CORPUS, tmp_path)
        # The balancing loss may be too small to move a bit of so small a model in so few steps, and nothing else is.
        if scenario.name in ("healthy", "unwatched"):
            assert figures["digest"] == twin["digest"], scenario
        else:
            assert figures["digest"] != twin["digest"], scenario
        if scenario.watched:
            with open_run(record_of(part(scenario.name, model), tmp_path)) as run:
                faults = run.events("fault")
            assert {event.step for event in faults} == ({NUM_HEALTHY + 1} if faults else set())
            assert bool(faults) == (scenario.name not in ("healthy", "nudged")), scenario


def test_a_scenario_is_a_function_of_its_seed(tmp_path):
    figures = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        run_part(part(BASE), CORPUS, folder)
        figures.append(run_part(part("truncated_rate_x10"), CORPUS, folder))
    assert without_times(figures[0]) == without_times(figures[1])


def test_a_finished_part_is_kept_and_one_with_other_settings_is_run(tmp_path, monkeypatch):
    run_part(part(BASE), CORPUS, tmp_path)
    first = run_part(part("rate_x10"), CORPUS, tmp_path)
    real = fault_run.WatchedRun
    monkeypatch.setattr(fault_run, "WatchedRun", None)
    assert run_part(part("rate_x10"), CORPUS, tmp_path) == first
    with pytest.raises(TypeError):
        run_part(part("rate_x10"), load_corpus([TEXT + "more"], sequence=PLAN.sequence), tmp_path)
    # What is cut short, or no JSON, is run again; a base without its checkpoint is too.
    (tmp_path / "parts" / "dense-seed0-rate_x10.json").write_text('{"identity"')
    with pytest.raises(TypeError):
        run_part(part("rate_x10"), CORPUS, tmp_path)
    checkpoint_of(part(BASE), tmp_path).unlink()
    with pytest.raises(TypeError):
        run_part(part(BASE), CORPUS, tmp_path)
    monkeypatch.setattr(fault_run, "WatchedRun", real)
    run_part(part(BASE), CORPUS, tmp_path)
    assert without_times(run_part(part("rate_x10"), CORPUS, tmp_path)) == without_times(first)


def test_the_experiment_goes_on_where_it_was_stopped_and_reports_the_same(tmp_path, text, monkeypatch):
    def settings(out):
        return FaultsSettings(out=out, seeds=1, model="moe", start_step=4, steps=4, workers=1, data=(text,), plot=False)

    said = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("error", TrimtabWarning)
        whole = run_faults(settings(tmp_path / "whole"), Console(file=said, width=200), PLAN)
    assert whole["watched_is_bit_identical"]
    assert whole["harmless_steps"] == 4 + 4
    assert set(whole["models"]["moe"]) == {scenario.name for scenario in scenarios_of("moe")}
    assert json.loads((tmp_path / "whole" / "summary.json").read_text())["seeds"] == [0]
    for words in ("fault injection", "Mixture of experts", "truncation and rate x10", "bit for bit"):
        assert words in said.getvalue()

    class StoppedError(Exception):
        pass

    def stop_at_small_batch(self, *args, **kwargs):
        if "small_batch" in str(kwargs.get("record")):
            raise StoppedError
        return real(self, *args, **kwargs)

    real = fault_run.WatchedRun.__init__
    cut = tmp_path / "cut"
    with monkeypatch.context() as patch:
        patch.setattr(fault_run.WatchedRun, "__init__", stop_at_small_batch)
        with pytest.raises(StoppedError):
            run_faults(settings(cut), Console(file=io.StringIO()), PLAN)
    assert not (cut / "summary.json").exists()
    kept = {path.name: path.stat().st_mtime_ns for path in (cut / "parts").iterdir()}
    assert len(kept) == 5  # the base, two twins, the truncation, the rate
    again = run_faults(settings(cut), Console(file=io.StringIO()), PLAN)
    assert {name: (cut / "parts" / name).stat().st_mtime_ns for name in kept} == kept
    assert again["models"] == whole["models"]


def test_the_study_counts_every_run_and_a_restart_changes_nothing(tmp_path, text):
    settings = HealthySettings(
        out=tmp_path / "healthy", seeds=2, fresh_seeds=1, steps=8, workers=1, data=(text,), first_seed=7
    )
    said = io.StringIO()
    summary = run_healthy(settings, Console(file=said, width=200), PLAN)
    assert summary["restart_is_bit_identical"]
    assert summary["steps"] == 2 * len(CASES) * 8
    assert summary["fresh_seeds"] == [8]
    rates = summary["rates"]
    assert rates["all"]["all"]["steps"] == 2 * rates["fresh_seeds"]["all"]["steps"] == summary["steps"]
    assert rates["all"]["router/entropy_mean"]["steps"] == 2 * 8
    assert summary["runs"]["cosine-seed7"]["digest"] != summary["runs"]["dense-seed7"]["digest"]
    assert "fresh seeds" in said.getvalue()
    shutil.rmtree(settings.out / "records")
    assert run_healthy(settings, Console(file=io.StringIO()), PLAN)["runs"] == summary["runs"]


def test_the_loss_leaves_its_twin_when_the_average_over_recent_looks_is_far_enough():
    apart = [(step, 0.03 if step >= 40 else 0.0) for step in range(10, 100, 10)]
    assert leave_step(apart, 0.02) == 70  # (0 + 0.03 * 4) / 5 is the first above 0.02
    assert leave_step(apart, 0.031) is None
    assert leave_step([(10, 0.5), (20, 0.0)], 0.02) == 10
    assert leave_step([], 0.02) is None
    assert leave_step([(10, 0.0), (20, math.inf)], 0.02) == 20
    # Below the twin is not above it.
    assert leave_step([(10, -1.0), (20, -math.inf)], 0.02) is None


def test_differences_are_those_since_the_fault():
    twin = [(10, 2.0), (20, 2.0), (30, None)]
    assert differences([(10, 9.0), (20, 2.5), (30, 2.0)], twin, 10) == [(20, 0.5), (30, -math.inf)]


def alarm(step, monitor="attention_spectrum", metric="d2_entropy", mechanism="attention"):
    return {
        "step": step,
        "first_step": step,
        "monitor": monitor,
        "mechanism": mechanism,
        "metric": metric,
        "places": ["layer_0/head_0"],
        "value": 0.2,
        "reference": 0.4,
        "sentence": "It fell.",
    }


def test_a_lead_is_from_the_first_alarm_of_a_mechanism_to_the_harm():
    looks = range(10, 100, 10)
    twin = {"held_out": [(s, 2.0) for s in looks], "digest": "a"}
    alarms = [alarm(30, "signals", "loss_rise", "loss"), alarm(60), alarm(40), alarm(90, metric="dwq_layer_entropy")]
    hit = {
        "alarms": alarms,
        "notices": [],
        "held_out": [(s, 2.0 if s < 70 else 3.0) for s in looks],
        "digest": "b",
        "said": "attention dynamics",
        "said_first": "attention dynamics",
    }
    row = scenario_row(hit, twin, ("attention dynamics",), 20)
    assert row["loss_leaves"] == 70
    assert row["first_mechanism_alarm"] == 40
    assert row["lead_steps"] == 30
    assert row["loss_alarm_lead_steps"] == 40
    assert row["named"]
    assert not row["same_weights_as_twin"]
    assert list(row["first_alarms"].values()) == [30, 40, 90]
    unharmed = scenario_row(hit | {"held_out": twin["held_out"]}, twin, (), 20)
    assert unharmed["loss_leaves"] is unharmed["lead_steps"] is unharmed["named"] is None
    both = over_seeds([row, unharmed])
    assert both["lead_steps"] == spread([30, None])
    assert both["num_named"] == 1
    assert both["first_alarms"]["attention_spectrum/d2_entropy"]["mean"] == 40


def test_first_alarms_and_leads_of_nothing_are_nothing():
    assert first_alarms([]) == {}
    assert lead_steps(None, None) is lead_steps(5, None) is None
    found = spread([1.0, math.inf, None, 3.0])
    assert (found["mean"], found["num"], found["of"], found["least"], found["greatest"]) == (2.0, 2, 4, 1.0, 3.0)
    assert found["sd"] == pytest.approx(math.sqrt(2))


def test_a_false_alarm_before_the_fault_is_part_of_what_is_said():
    spectrum, routing = alarm(50), alarm(350, "router", "entropy_mean", "router")
    assert said_of("moe", [], []) == {"said": "healthy", "said_first": "healthy"}
    assert said_of("moe", [], [routing])["said"] == "router"
    assert said_of("moe", [spectrum], [routing])["said"] != "router"
    loss = alarm(340, "signals", "loss_rise", "loss")
    assert said_of("moe", [], [loss])["said_first"] == "healthy"


def test_the_bound_of_a_rate_is_the_exact_poisson_one():
    judged = ["router/entropy_mean"]
    runs = [([], 500, judged), ([alarm(3, "router", "entropy_mean", "router")] * 2, 500, judged), ([], 1000, ["m/a"])]
    rates = false_alarm_rates(runs)
    assert rates["router/entropy_mean"]["steps"] == 1000
    assert rates["m/a"] == {"alarms": 0, "steps": 1000, "per_1000_steps": 0.0} | {
        "upper_per_1000_steps": pytest.approx(-math.log(0.05))
    }
    bound = rates["all"]["upper_per_1000_steps"] * 2
    # Two alarms or fewer have a chance of exactly 5% there.
    assert math.exp(-bound) * (1 + bound + bound**2 / 2) == pytest.approx(0.05)


def test_the_tables_have_a_row_a_scenario(tmp_path):
    twin = {
        "alarms": [],
        "notices": [],
        "held_out": [(10, 2.0)],
        "digest": "a",
        "said": "healthy",
        "said_first": "healthy",
    }
    scenarios = {
        s.name: {"title": s.title, "watched": s.watched, **over_seeds([scenario_row(twin, twin, s.expected, 0)])}
        for s in SCENARIOS
    }
    (table,) = fault_tables({"models": {"moe": scenarios}}, 200)
    alarms, outcomes = fault_tables({"models": {"moe": scenarios}}, 80)
    assert alarms.row_count == outcomes.row_count == table.row_count
    assert table.row_count == len(SCENARIOS) - 1  # what nothing watches gives no alarm
    lines = markdown_table("dense", scenarios).splitlines()
    assert len(lines) == 2 + table.row_count
    assert len({line.count("|") for line in lines}) == 1


def test_the_picture_is_drawn_from_the_records(tmp_path, text):
    pytest.importorskip("plotly")
    from trimtab.experiments.faults.plot import fault_figure

    settings = FaultsSettings(
        out=tmp_path, seeds=1, model="dense", start_step=4, steps=4, workers=1, data=(text,), plot=False
    )
    summary = run_faults(settings, Console(file=io.StringIO()), PLAN)
    figure = fault_figure(summary, tmp_path)
    residual = [trace for trace in figure.data if trace.name == "O truncated to 1 bit"]
    assert residual
    assert max(max(trace.x) for trace in figure.data) == 8
    assert all(len(trace.x) == len(trace.y) for trace in figure.data)


def test_runs_of_one_seed_draw_nothing_from_the_global_stream(tmp_path):
    run = WatchedRun("dense", PLAN, CORPUS, 0)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    run.train(2)
    run.nudge(1e-6, 0)
    run.close()
    assert torch.equal(before, torch.random.get_rng_state())
