"""Alarms in a watched run: recorded, said once, acted on in the decision of their own step, and resumed.

This file is also the script that each rank of the last tests runs.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import trimtab
from trimtab.control import Controller, Policy
from trimtab.errors import ConfigError, TrimtabWarning
from trimtab.monitors import Above, Alarm, AlarmRule, BaseMonitor, PeakDrop, RaiseRisk, StopTraining, calibrate
from trimtab.monitors.host_copy import HostCopy
from trimtab.precision import SavedActivations
from trimtab.trace import open_run, replay, summarize

WIDTH = 8
UNITS = ("layers.0.q_proj", "layers.0.o_proj", "layers.1.q_proj", "layers.1.o_proj")
# Nothing is risky by its norm alone.
CALM = Policy(alpha=1e6, beta=1e6, max_active=1, lock_steps=0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"q_proj": nn.Linear(WIDTH, WIDTH), "o_proj": nn.Linear(WIDTH, WIDTH)}) for _ in range(2)
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = x + layer["o_proj"](torch.tanh(layer["q_proj"](x)))
        return {"loss": x.square().mean()}


class Scripted(BaseMonitor):
    """Returns the values it was given for each step, as tensors on the model's device."""

    name = "scripted"
    mechanism = "a script"

    def __init__(self, values: dict[int, list[float]], rule: AlarmRule | None = None) -> None:
        self.values = values
        self.alarm_rules = {
            "size": rule or AlarmRule(Above(0.5, warmup=0), "The size of {places} is {value:.2f}, above {reference}.")
        }
        self.kept = torch.zeros(2)

    def start(self, model: nn.Module) -> None:
        self.model = model

    def observe(self, step: int) -> dict[str, Tensor]:
        if step not in self.values:
            return {}
        # Made of a parameter, so that it is the device's, and in its graph unless that is cut.
        zero = next(self.model.parameters()).sum() * 0
        return {"size": torch.tensor(self.values[step], device=zero.device).reshape(-1, 1) + zero}

    def places(self, metric: str) -> list[str]:
        return ["layer_0", "layer_1"]


class Window(Scripted):
    """Keeps tensors too."""

    def tensor_state(self) -> dict[str, Tensor]:
        return {"kept": self.kept}

    def load_tensor_state(self, state: Any) -> None:
        self.kept = state["kept"]


def build() -> Net:
    torch.manual_seed(0)
    return Net()


class Training:
    """A small run; each step is a forward, a backward, the guard and an optimizer step."""

    def __init__(self, monitor: BaseMonitor | None, recipe: Any = None, policy: Any = CALM, **settings: Any) -> None:
        self.model = build()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        monitors = [] if monitor is None else [monitor]
        self.guard = trimtab.attach(self.model, recipe, policy=policy, monitors=monitors, **settings)
        self.step_num = 0

    def step(self, num: int = 1) -> Any:
        for _ in range(num):
            self.step_num += 1
            generator = torch.Generator().manual_seed(self.step_num)
            self.model(torch.randn(4, WIDTH, generator=generator))["loss"].backward()
            decision = self.guard.step(max_norm=1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return decision

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.guard.__exit__(*exc)


def quiet(rest: float = 0.1, **loud: list[float]) -> dict[int, list[float]]:
    """Values for twelve steps; ``s3=[...]`` sets those of step 3."""
    return {step: [rest, rest] for step in range(1, 13)} | {int(k[1:]): v for k, v in loud.items()}


LOUD = quiet(s3=[0.1, 0.9], s4=[0.8, 0.9], s5=[0.8, 0.1])
pytestmark = pytest.mark.filterwarnings("ignore:The size of:trimtab.errors.TrimtabWarning")


@pytest.mark.parametrize("recipe", [None, SavedActivations()])
def test_a_monitor_with_tensors_and_alarms_changes_no_bit_of_training(recipe, tmp_path):
    with Training(Scripted(LOUD), recipe, record=tmp_path) as watched, Training(None, recipe) as plain:
        watched.step(10)
        plain.step(10)
    assert len(watched.guard.alarms) == 1
    for a, b in zip(watched.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_all_values_of_a_step_travel_in_its_one_copy(monkeypatch):
    copies = []

    def counted(tensor):
        copies.append(tensor.numel())
        return HostCopy(tensor)

    monkeypatch.setattr("trimtab.guard.HostCopy", counted)
    monkeypatch.setattr("trimtab.monitors.group.HostCopy", counted)
    with Training(Scripted(LOUD)) as watched, Training(None) as plain:
        watched.step()
        plain.step()
    assert len(copies) == 2
    assert copies[0] == copies[1] + 2


def test_an_alarm_is_in_the_record_once_an_episode_with_all_that_is_known(tmp_path):
    with Training(Scripted(LOUD), record=tmp_path) as run:
        run.step(10)
        (alarm,) = run.guard.alarms
    assert (alarm.step, alarm.monitor, alarm.mechanism, alarm.metric) == (3, "scripted", "a script", "size")
    assert alarm.sentence == "The size of layer_1 is 0.90, above 0.5."
    with open_run(tmp_path) as record:
        (event,) = record.events("alarm")
        assert (event.step, event.place, event.data) == (3, "layer_1", alarm.to_dict())
        changes = [e.data["alarm"] for e in record.events("note") if "alarm" in e.data]
        assert [(c["what"], c["step"], c["places"]) for c in changes] == [
            ("joined", 4, ["layer_0"]),
            ("ended", 6, ["layer_1", "layer_0"]),
        ]


def test_the_record_has_the_values_of_each_place_and_the_aggregates(tmp_path):
    with Training(Scripted({2: [0.1, 0.9], 5: [0.3, 0.2]}), record=tmp_path) as run:
        run.step(6)
    with open_run(tmp_path) as record:
        steps, values, places = record.readings("scripted", "size")
        extras = record.steps().extra
    assert (steps.tolist(), places) == ([2, 5], ("layer_0", "layer_1"))
    np.testing.assert_array_equal(values, np.array([[0.1, 0.9], [0.3, 0.2]], np.float32))
    assert [bool(extra and "monitors" in extra) for extra in extras] == [False, True, False, False, True, False]
    assert set(extras[1]["monitors"]) == {f"trimtab/scripted/size_{how}" for how in ("min", "mean", "max")}


def test_the_rules_and_the_actions_are_in_the_recorded_config(tmp_path):
    rule = AlarmRule(PeakDrop(0.3), "Fell.", fire_at=2)
    with Training(Scripted(LOUD, rule), on_alarm=[RaiseRisk(steps=3), StopTraining(), print], record=tmp_path):
        pass
    with open_run(tmp_path) as record:
        config = record.config
    found = config["alarm_rules"]["scripted"]["size"]
    assert found["detector"] == {"detector": "PeakDrop", "drop": 0.3, "hysteresis": 0.15, "ewma": 0.5, "warmup": 3}
    assert (found["sentence"], found["fire_at"]) == ("Fell.", 2)
    assert config["on_alarm"] == [
        {"action": "RaiseRisk", "units": None, "risk": 2.0, "steps": 3},
        {"action": "StopTraining", "save": True},
        {"action": "print"},
    ]


def test_a_mechanism_is_said_once_however_often_it_gives_alarm():
    loud = {step: [0.9 * (step % 2)] * 2 for step in range(1, 13)}
    with Training(Scripted(loud)) as run, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.step(12)
        assert len(run.guard.alarms) == 6
    assert [str(w.message) for w in caught] == ["The size of layer_0, layer_1 is 0.90, above 0.5."]


def test_a_warning_that_is_made_an_error_comes_after_the_decision_is_taken():
    with Training(Scripted(LOUD)) as run:
        decision = run.step(3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(TrimtabWarning, match="size of layer_1"):
                run.guard.resolve()
        assert decision.step == 3
        run.step(3)
        assert len(run.guard.alarms) == 1


def test_metrics_name_each_place_on_request():
    for detail in (False, True):
        with Training(Scripted(LOUD), monitor_detail=detail) as run:
            run.step(3)
            names = {name for name in run.guard.metrics() if name.startswith("trimtab/scripted/")}
        aggregates = {f"trimtab/scripted/size_{how}" for how in ("min", "mean", "max")}
        assert names == aggregates | (
            {"trimtab/scripted/layer_0/size", "trimtab/scripted/layer_1/size"} if detail else set()
        )


class TestRaiseRisk:
    @pytest.mark.parametrize("damping", [False, True])
    def test_it_counts_in_the_decision_of_the_alarms_own_step_and_for_as_many_as_it_says(self, damping, tmp_path):
        policy = Policy(alpha=1e6, beta=1e6, max_active=1, lock_steps=0, damping=damping)
        action = RaiseRisk(risk=3.0, steps=2)
        with Training(Scripted(LOUD), SavedActivations(), policy, on_alarm=[action], record=tmp_path) as run:
            active = []
            for _ in range(6):
                run.step()
                active.append(run.guard.active)
        # Layer 1 has two units, and the budget is one: that nearest the loss.
        assert active == [(), (), (UNITS[3],), (UNITS[3],), (), ()]
        with open_run(tmp_path) as record:
            raised = [(extra or {}).get("raised") for extra in record.steps().extra]
            assert raised == [None, None, *[{UNITS[2]: 3.0, UNITS[3]: 3.0}] * 2, None, None]
            again = replay(record)
            assert (again.num_different, again.notes) == (0, ())
            np.testing.assert_array_equal(again.steps.risk.max(axis=1) == 3.0, [r is not None for r in raised])

    def test_it_is_under_the_same_budget_as_the_norms(self):
        with Training(None, SavedActivations(), CALM) as run:
            run.guard.raise_risk(UNITS, steps=3)
            for _ in range(4):
                decision = run.step()
                assert int(decision.active.sum()) <= 1
            assert not decision.active.any()

    def test_the_greatest_of_several_counts(self):
        with Training(None) as run:
            run.guard.raise_risk(UNITS[:2], risk=2.0, steps=2)
            run.guard.raise_risk(UNITS[1:3], risk=3.0, steps=1)
            assert run.step().risk.tolist()[:3] == [2.0, 3.0, 3.0]
            assert run.step().risk.tolist()[:2] == [2.0, 2.0]
            assert run.step().risk.max() < 1

    def test_by_hand_it_begins_with_the_next_step(self):
        with Training(None) as run:
            decision = run.step()
            run.guard.raise_risk([UNITS[0]])
            assert decision.risk[0] < 1
            assert run.step().risk[0] == 2.0

    @pytest.mark.parametrize(
        ("wrong", "setting"),
        [
            ({"units": ["layers.0.q_porj"]}, "units"),
            ({"units": UNITS[0]}, "units"),
            ({"units": UNITS, "risk": 0.0}, "risk"),
            ({"units": UNITS, "risk": float("inf")}, "risk"),
            ({"units": UNITS, "steps": 0}, "steps"),
        ],
    )
    def test_what_cannot_be_meant_is_refused_in_four_parts(self, wrong, setting):
        with Training(None) as run, pytest.raises(ConfigError) as caught:
            run.guard.raise_risk(**wrong)
        assert caught.value.setting == setting
        if wrong["units"] == ["layers.0.q_porj"]:
            assert UNITS[0] in str(caught.value)

    def test_a_controller_that_knows_no_raised_risks_works_until_one_is_raised(self):
        class Plain(Controller):
            def update(self, norms, errors=None):
                return super().update(norms, errors)

        class Own(Policy):
            def start(self, units, recoverable=None):
                return Plain(units, CALM, recoverable)

        with Training(Scripted(LOUD), policy=Own()) as run:
            assert run.step(6).step == 6


class TestActions:
    def test_any_callable_will_do_and_is_called_once_an_alarm(self):
        seen = []
        with Training(Scripted(LOUD), on_alarm=[lambda alarm, guard: seen.append((alarm.step, guard))]) as run:
            run.step(10)
        assert seen == [(3, run.guard)]

    def test_one_that_fails_is_off_with_one_warning_and_the_others_and_training_go_on(self):
        seen = []

        def bad(alarm, guard):
            seen.append("bad")
            raise RuntimeError("no mail server")

        loud = {step: [0.9 * (step % 2)] * 2 for step in range(1, 13)}
        actions = [bad, lambda alarm, guard: seen.append("good")]
        with Training(Scripted(loud), on_alarm=actions) as run, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.step(6)
            run.guard.resolve()
        assert seen == ["bad", "good", "good", "good"]
        said = [str(w.message) for w in caught if "action" in str(w.message)]
        assert len(said) == 1
        assert "bad" in said[0]
        assert "no mail server" in said[0]

    def test_raising_the_risk_of_a_unit_that_does_not_exist_switches_the_action_off(self):
        action = RaiseRisk({"layer_1": ["layers.9"]})
        with Training(Scripted(LOUD), on_alarm=[action]) as run, pytest.warns(TrimtabWarning, match="RaiseRisk"):
            run.step(5)

    def test_one_may_read_the_guard_while_the_decision_is_taken(self):
        seen = []

        def look(alarm, guard):
            seen.append((guard.active, guard.alarms[-1] is alarm, guard.should_stop, guard.diagnosis().mechanism))
            guard.metrics()

        with Training(Scripted(LOUD), SavedActivations(), on_alarm=[look]) as run:
            run.step(5)
        assert seen == [((), True, False, "unknown")]

    def test_one_may_load_another_state_and_the_decision_is_then_not_taken(self):
        states = []
        with Training(Scripted(LOUD), on_alarm=[lambda alarm, guard: guard.load_state_dict(states[0])]) as run:
            run.step(2)
            states.append(run.guard.state_dict())
            decision = run.step()
            run.guard.resolve()
            assert run.guard.num_steps == 2
            with pytest.raises(AttributeError, match="loaded another state"):
                decision.risk  # noqa: B018

    def test_one_may_detach_the_guard(self):
        with Training(Scripted(LOUD), SavedActivations(), on_alarm=[lambda alarm, guard: guard.detach()]) as run:
            run.step(3)
            run.guard.resolve()
            with pytest.raises(ConfigError, match="detached"):
                run.guard.step()

    def test_stopping_sets_a_value_and_a_loop_goes_on_unless_it_looks(self):
        with Training(Scripted(LOUD), on_alarm=[StopTraining(save=False)]) as run:
            assert run.guard.stop_request is None
            run.step(2)
            assert not run.guard.should_stop
            run.step(3)
            assert run.guard.should_stop
            stop = run.guard.stop_request
            assert (stop.step, stop.save, stop.reason) == (3, False, run.guard.alarms[0].sentence)
            # A resumed run would stop at once if it were in the state.
            run.guard.load_state_dict(json.loads(json.dumps(run.guard.state_dict())))
            assert not run.guard.should_stop

    @pytest.mark.parametrize("wrong", [StopTraining(), StopTraining, [StopTraining], ["stop"], [None], 3])
    def test_what_is_no_list_of_actions_is_refused_and_the_model_left_as_it_was(self, wrong):
        model = build()
        with pytest.raises(ConfigError, match="on_alarm"):
            trimtab.attach(model, SavedActivations(), on_alarm=wrong)
        trimtab.attach(model).detach()

    def test_a_rule_that_is_none_is_refused(self):
        monitor = Scripted(LOUD)
        monitor.alarm_rules = {"size": 0.5}
        with pytest.raises(ConfigError, match="AlarmRule"):
            trimtab.attach(build(), monitors=[monitor])


class TestNotices:
    NOTICE = AlarmRule(Above(0.5, warmup=0), "The size of {places} is {value}.", level="notice")

    def test_one_is_recorded_and_is_no_alarm(self, tmp_path):
        called = []
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            monitor = Scripted(quiet(s3=[0.9, 0.9], s4=[0.9, 0.1], s7=[0.9, 0.1]), self.NOTICE)
            actions = [StopTraining(), lambda alarm, guard: called.append(alarm)]
            with Training(monitor, record=tmp_path, on_alarm=actions) as run:
                run.step(9)
        assert run.guard.alarms == ()
        assert [(n.step, n.places, n.level) for n in run.guard.notices] == [
            (3, ("layer_0", "layer_1"), "notice"),
            (7, ("layer_0",), "notice"),
        ]
        assert called == []
        assert not run.guard.should_stop
        assert run.guard.diagnosis().mechanism == "healthy"
        assert len(run.guard.diagnosis().evidence) == 2
        with open_run(tmp_path) as record:
            assert record.events("alarm") == []
            assert record.events("warning") == []
            assert [Alarm.from_dict(event.data) for event in record.events("notice")] == list(run.guard.notices)
            changes = [event.data["notice"] for event in record.events("note")]
            assert [(c["what"], c["alarm_step"]) for c in changes] == [("ended", 3), ("ended", 7)]
            assert record.config["alarm_rules"]["scripted"]["size"]["level"] == "notice"
            assert summarize(record).num_alarms == 0

    def test_one_changes_the_diagnosis_of_a_later_alarm(self):
        class Spectrum(Scripted):
            name, mechanism = "spectrum", "attention"

        inexact = AlarmRule(
            Above(0.5, warmup=0), "The size of {places}.", mechanism="inexact attention backward", level="notice"
        )
        run = Training(None)
        run.guard.detach()
        for notice_step, expected in ((3, "inexact attention backward"), (8, "attention dynamics")):
            model = build()
            monitors = [Scripted(quiet(**{f"s{notice_step}": [0.9, 0.1]}), inexact), Spectrum(quiet(s5=[0.9, 0.1]))]
            with trimtab.attach(model, policy=CALM, monitors=monitors) as guard:
                for _ in range(9):
                    model(torch.ones(2, WIDTH))["loss"].backward()
                    guard.step()
                    model.zero_grad()
            assert guard.diagnosis().mechanism == expected
            assert [alarm.mechanism for alarm in guard.alarms] == ["attention"]

    def test_a_resumed_run_has_those_from_before_and_an_older_state_has_none(self):
        monitor = Scripted(quiet(s3=[0.9, 0.9]), self.NOTICE)
        with Training(monitor) as run:
            run.step(4)
            state = json.loads(json.dumps(run.guard.state_dict()))
        with Training(Scripted({}, self.NOTICE)) as resumed:
            resumed.guard.load_state_dict(state)
            assert resumed.guard.notices == run.guard.notices != ()
            del state["alarms"]["notices"]
            resumed.guard.load_state_dict(state)
            assert resumed.guard.notices == ()

    def test_an_alarm_of_an_older_record_has_no_level_and_is_one(self):
        fields = {"step": 1, "first_step": 1, "monitor": "m", "mechanism": "m", "metric": "x", "places": [""]}
        assert Alarm.from_dict(fields | {"value": 1.0, "reference": 0.5, "sentence": "It is."}).level == "alarm"

    def test_calibration_leaves_its_rule_out(self):
        class Healthy:
            num_steps = 4000

            def readings(self, monitor, metric):
                return np.arange(4000), np.zeros((4000, 1)), ("",)

        alarmed, noticing = Scripted({}), Scripted({}, self.NOTICE)
        noticing.name = "noticing"
        found = calibrate(Healthy(), [alarmed, noticing], 1.0)
        assert list(found.found) == ["scripted"]
        assert found.left_out == {"noticing/size": "it gives notices, and no alarm"}

    def test_a_level_that_is_none_is_refused(self):
        with pytest.raises(ConfigError, match="level='loud': it is 'alarm' or 'notice'"):
            AlarmRule(Above(0.5), "It is.", level="loud")


def test_the_diagnosis_is_of_the_alarms_so_far():
    rule = AlarmRule(PeakDrop(0.3, ewma=1.0, warmup=0), "The routing has narrowed.", mechanism="router")
    with Training(Scripted(quiet(0.9, s4=[0.2, 0.9]), rule)) as run:
        run.step(3)
        assert run.guard.diagnosis().mechanism == "healthy"
        run.step()
        with pytest.warns(TrimtabWarning, match="routing has narrowed"):
            run.guard.resolve()
        found = run.guard.diagnosis()
        assert (found.mechanism, found.since_step) == ("router", 4)


class TestResume:
    @pytest.mark.parametrize("cut", [2, 3, 4, 6])
    def test_in_the_middle_of_an_episode_it_alarms_and_decides_as_the_uninterrupted_run(self, cut, tmp_path):
        values = quiet(s3=[0.9, 0.1], s4=[0.47, 0.9], s5=[0.47, 0.1], s7=[0.1, 0.9])
        settings = {"on_alarm": [RaiseRisk(risk=3.0, steps=3)]}
        runs = [Training(Scripted(values), SavedActivations(), record=tmp_path / name, **settings) for name in "ab"]
        whole, first = runs
        decisions = [whole.step() for _ in range(10)]
        first.step(cut)
        state = json.loads(json.dumps(first.guard.state_dict(), allow_nan=False))
        weights, optimizer = first.model.state_dict(), first.optimizer.state_dict()
        first.guard.detach()
        resumed = Training(Scripted(values), SavedActivations(), record=tmp_path / "b", **settings)
        resumed.model.load_state_dict(weights)
        resumed.optimizer.load_state_dict(optimizer)
        resumed.guard.load_state_dict(state)
        resumed.step_num = cut
        for decision in decisions[cut:]:
            np.testing.assert_array_equal(resumed.step().risk, decision.risk)
        assert resumed.guard.alarms == whole.guard.alarms
        assert len(whole.guard.alarms) == 2
        for run in (whole, resumed):
            run.guard.detach()
        for name in "ab":
            with open_run(tmp_path / name) as record:
                assert [event.step for event in record.events("alarm")] == [3, 7]
                assert record.readings("scripted", "size")[0].tolist() == list(range(1, 11))
                assert replay(record).num_different == 0

    def test_a_state_without_alarms_or_with_a_broken_one_starts_afresh(self):
        with Training(Scripted(LOUD)) as run:
            run.step(4)
            state = run.guard.state_dict()
            assert len(run.guard.alarms) == 1
            del state["alarms"], state["tensors"]
            run.guard.load_state_dict(state)
            assert run.guard.alarms == ()
            with pytest.warns(TrimtabWarning, match="state of the alarms"):
                run.guard.load_state_dict(state | {"alarms": {"alarms": [3]}})
            assert run.guard.alarms == ()

    def test_risks_raised_for_units_that_are_gone_are_let_go(self):
        with Training(None) as run:
            run.guard.raise_risk([UNITS[0]], steps=5)
            state = run.guard.state_dict()
        with trimtab.attach(build(), policy=CALM, units=UNITS[1:]) as guard:
            with pytest.warns(TrimtabWarning, match="gone"):
                guard.load_state_dict(state)
            assert guard.state_dict()["alarms"]["raised"] == []

    def test_tensors_of_a_monitor_are_saved_apart_and_come_back(self):
        with Training(Window(LOUD)) as run:
            run.guard._monitors._monitors[0].kept = torch.tensor([1.0, 2.0])
            state, tensors = run.guard.state_dict(), run.guard.tensor_state_dict()
        assert tensors["scripted"]["kept"].tolist() == [1.0, 2.0]
        json.dumps(state, allow_nan=False)
        monitor = Window(LOUD)
        with Training(monitor) as run:
            run.guard.load_state_dict(state)
            run.guard.load_tensor_state_dict(tensors)
            run.step()
        assert monitor.kept.tolist() == [1.0, 2.0]

    @pytest.mark.parametrize("tell", [True, False])
    def test_a_checkpoint_without_its_tensors_is_one_warning_and_a_note(self, tell, tmp_path):
        with Training(Window(LOUD)) as run:
            state = run.guard.state_dict()
        with Training(Window(LOUD), record=tmp_path) as run, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.guard.load_state_dict(state)
            if tell:
                run.guard.load_tensor_state_dict({}, "the file is torn")
            run.step(2)
        assert len(caught) == 1
        assert "windows start afresh" in str(caught[0].message)
        assert ("the file is torn" in str(caught[0].message)) == tell
        with open_run(tmp_path) as record:
            notes = [event.data for event in record.events("note") if "fresh_window" in event.data]
        assert notes == [{"fresh_window": ["scripted"], "problem": "the file is torn" if tell else None}]


# Two ranks

NUM_RANKS = 2


class Uneven(Scripted):
    """Rank 0 sees half of what is to be seen, and rank 1 the rest; in one run rank 1's monitor fails on the way."""

    def __init__(self, rank: int, fails: bool) -> None:
        # Only rank 1 is ever above the level by itself, and only from 1.0 on is the mean.
        values = quiet(s3=[0.1, 0.8] if rank else [0.1, 0.1], s5=[0.1, 1.9] if rank else [0.1, 0.1])
        super().__init__(values)
        self.fails = fails and rank == 1

    def observe(self, step: int) -> dict[str, Tensor]:
        if self.fails and step == 2:
            raise RuntimeError("on this rank alone")
        return super().observe(step)


def run_on_rank(rank: int, kind: str) -> dict[str, Any]:
    on_alarm = [] if kind == "recorded only" else [RaiseRisk(risk=3.0, steps=2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Training(Uneven(rank, kind == "one fails"), SavedActivations(), on_alarm=on_alarm) as run:
            decisions = [run.step() for _ in range(8)]
            alarms = [(alarm.step, alarm.places, alarm.value) for alarm in run.guard.alarms]
            return {"risks": [d.risk.tolist() for d in decisions], "active": run.guard.active, "alarms": alarms}


KINDS = ("acting", "recorded only", "one fails")


@pytest.fixture(scope="module")
def ranks(start_ranks) -> dict[str, list[Any]]:
    folder = start_ranks(__file__, NUM_RANKS)
    results = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(NUM_RANKS)]
    assert not any("error" in result for result in results), "\n".join(r.get("error", "") for r in results)
    return {kind: [result[kind] for result in results] for kind in KINDS}


@pytest.mark.slow
def test_what_reaches_a_decision_is_the_mean_over_the_ranks_and_equal_on_all(ranks):
    first, second = ranks["acting"]
    assert first["alarms"] == second["alarms"] == [(5, ("layer_1",), 1.0)]
    assert [max(risks) == 3.0 for risks in first["risks"]] == [step in (5, 6) for step in range(1, 9)]
    assert [[risk == 3.0 for risk in risks] for risks in first["risks"]] == [
        [risk == 3.0 for risk in risks] for risks in second["risks"]
    ]


@pytest.mark.slow
def test_without_an_action_that_decides_each_rank_judges_its_own_values(ranks):
    first, second = ranks["recorded only"]
    assert first["alarms"] == []
    assert [alarm[0] for alarm in second["alarms"]] == [3, 5]


@pytest.mark.slow
def test_a_monitor_that_fails_on_one_rank_leaves_the_others_values_in_force_on_both(ranks):
    first, second = ranks["one fails"]
    assert first == second
    assert first["alarms"] == []


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=NUM_RANKS)
    try:
        result: dict[str, Any] = {kind: run_on_rank(rank, kind) for kind in KINDS}
    except Exception:
        result = {"error": traceback.format_exc()}
    torch.save(result, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
