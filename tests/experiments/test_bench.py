"""What trimtab bench measures and says; never how long anything takes."""

import json
import math
import sys

import pytest
import torch

import trimtab
from trimtab.cli import main
from trimtab.errors import ConfigError, MissingExtraError
from trimtab.experiments.bench.accounting import HOOKS, JUDGING, OBSERVE, REST, Account, accounted
from trimtab.experiments.bench.figures import ratio
from trimtab.experiments.bench.monitors import measure_monitors, per_step
from trimtab.experiments.bench.settings import MEASURES, BenchSettings
from trimtab.experiments.bench.step import build
from trimtab.monitors import ResidualNorm, ShiftResidual, UsualSignals, attention_keys
from trimtab.precision.attention_calls import attention_modules, place_around


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"only": ("desision",)}, ["only='desision'", "Did you mean 'decision'?"]),
        ({"only": (",",)}, ["only=", "Name one"]),
        ({"threads": 0}, ["threads=0", "at least 1"]),
        ({"threads": 100_000}, ["threads=100000", "torch's own"]),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused(settings, parts):
    with pytest.raises(ConfigError) as caught:
        BenchSettings(**settings)
    assert all(part in str(caught.value) for part in parts)


def test_measures_are_named_apart_by_spaces_or_commas_and_taken_in_one_order():
    assert BenchSettings().measures == MEASURES
    assert BenchSettings(only=("formats", "step,decision")).measures == ("decision", "step", "formats")


def test_a_ratio_is_the_median_of_pairs_not_the_ratio_of_medians():
    found = ratio("a", [1.0, 10.0, 9.0], [1.0, 1.0, 10.0], "of b")
    assert found.value == 1.0
    assert found.low <= found.value <= found.high


@pytest.mark.slow
def test_everything_is_measured_and_told_to_machines(capsys):
    threads = torch.get_num_threads()
    assert main(["bench", "--quick", "--json", "--threads", "1"]) == 0
    assert torch.get_num_threads() == threads
    told = json.loads(capsys.readouterr().out)
    assert (told["quick"], told["threads"], told["device"]) == (True, 1, "cpu")
    assert list(told["figures"]) == list(MEASURES)
    for figures in told["figures"].values():
        assert len({figure["name"] for figure in figures}) == len(figures) >= 5
        assert all(math.isfinite(figure["value"]) for figure in figures)
    names = {figure["name"] for figure in told["figures"]["step"]}
    assert {"watched", "static 4-bit", "GNMR 4/8", "static 8-bit"} < names
    shares = {figure["name"]: figure["value"] for figure in told["figures"]["monitors"]}
    for model, monitors in {"LLaMA": (), "Mixtral": ("router",)}.items():
        parts = ["judging", "attention spectrum, observe"]
        both = ("shift residual", "usual signals", "residual norm", *monitors)
        parts += [f"{monitor}, {part}" for monitor in both for part in ("hooks", "observe")]
        found = [shares[f"{model}: {part}"] for part in parts]
        assert min(found) > 0
        assert shares[f"{model}: all of them"] == pytest.approx(sum(found))


def test_what_is_left_out_is_not_measured_and_tables_go_to_stdout(capsys):
    assert main(["bench", "--quick", "--only", "decision"]) == 0
    said = capsys.readouterr().out
    assert "robust()" in said
    assert "untouched" not in said


def test_without_transformers_a_step_is_not_timed_and_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'trimtab\[hf\]'"):
        build(1)


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        return self.now

    def slowed(self, seconds, function):
        def run(*args, **kwargs):
            self.now += seconds
            return function(*args, **kwargs)

        return run


def a_watched_step(account, clock, monitors):
    """What was booked in one step, and the time that passed meanwhile."""
    model = build(1)
    for monitor in monitors:
        account.watch(monitor)
    ids = torch.zeros(1, 8, dtype=torch.long)
    with accounted(account), trimtab.attach(model, monitors=monitors) as guard:
        account.take()
        before = clock.now
        model(input_ids=ids, labels=ids).loss.backward()
        guard.step()
        guard.resolve()
        return account.take(), clock.now - before


def test_hooks_are_booked_to_their_monitor_and_the_attention_inside_them_is_not(monkeypatch):
    pytest.importorskip("transformers")
    clock = Clock()
    # Of the 4 layers, each forward of a hook takes 10, each gradient 1, each attention between them 100.
    for name, seconds in (("show", 10), ("add", 1)):
        slow = clock.slowed(seconds, getattr(attention_keys.KeyWatch, name))
        monkeypatch.setattr(
            attention_keys.KeyWatch, name, lambda self, *args, _slow=slow, **kw: _slow(self, *args, **kw)
        )
    monitor = ShiftResidual()
    monkeypatch.setattr(ShiftResidual, "observe", lambda self, step: clock.slowed(5, dict)())
    account = Account(clock)
    start = monitor.start

    def start_on_slow_attention(model):
        for module in attention_modules(model).values():
            place_around(module, clock.slowed(100, lambda attention, *args, **kwargs: attention(*args, **kwargs)))
        start(model)

    monitor.start = start_on_slow_attention
    booked, _ = a_watched_step(account, clock, [monitor])
    assert booked[monitor.name, HOOKS] == 4 * (10 + 1)
    assert booked[monitor.name, OBSERVE] == 5
    assert booked[REST] == 4 * 100
    assert booked[JUDGING] == 0


def test_each_moment_is_booked_once_and_each_monitor_has_its_own():
    pytest.importorskip("transformers")
    clock = Clock()
    monitors = [ShiftResidual(), UsualSignals(1), ResidualNorm()]
    account = Account(clock.slowed(1, clock))
    booked, elapsed = a_watched_step(account, clock, monitors)
    assert {(m.name, part) for m in monitors for part in (HOOKS, OBSERVE)} | {JUDGING, REST} == set(booked)
    assert min(booked.values()) > 0
    assert sum(booked.values()) == elapsed


def registrations():
    return [torch.nn.Module.register_forward_hook, torch.Tensor.register_hook, attention_keys.place_around]


def test_nothing_is_left_replaced_once_accounting_ends_by_an_error():
    before, during = registrations(), []

    def fail():
        during.extend(registrations())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), accounted(Account()):
        fail()
    assert not set(during) & set(before)
    assert registrations() == before


@pytest.mark.parametrize("period", [3, 6, 12])
def test_a_reading_is_spread_over_its_cadence_however_often_the_run_has_one(period):
    steps = [2.0 + 10.0 * (step % period == 0) for step in range(24)]
    assert per_step(steps, period, 50) == pytest.approx(2.0 + 10.0 / 50)


def test_too_few_steps_to_tell_a_reading_from_the_rest_are_refused():
    with pytest.raises(ConfigError, match=r"num_steps=4: .*at least 5"):
        measure_monitors(1, num_steps=4)
