"""What a monitor returns reaches the host as it was, by name of place, and a monitor that fails fails alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from trimtab.errors import ConfigError
from trimtab.monitors import BaseMonitor, Monitor, MonitorContext
from trimtab.monitors.group import MonitorGroup, monitor_metrics


class Fake(BaseMonitor):
    """Returns what it is told to, once a step."""

    def __init__(self, values: Mapping[str, Any], name: str = "fake", names: Mapping[str, Sequence[str]] = {}) -> None:
        self.values, self.name, self.names, self.calls = values, name, names, []

    def start(self, model: nn.Module) -> None:
        self.calls.append("start")

    def observe(self, step: int) -> Mapping[str, Any]:
        if isinstance(self.values, Exception):
            raise self.values
        return self.values

    def stop(self) -> None:
        self.calls.append("stop")

    def places(self, metric: str) -> Sequence[str]:
        return self.names.get(metric, ())


class OldStyle:
    """Knows the protocol only."""

    name = "old"

    def start(self, model):
        pass

    def observe(self, step):
        return {"norm": torch.tensor(2.0), "count": 3}

    def stop(self):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def say_nothing(key: str, text: str) -> None:
    raise AssertionError(text)


def group_of(*monitors, say=say_nothing) -> MonitorGroup:
    return MonitorGroup(monitors, say)


def read(group: MonitorGroup, norms: Tensor | None = None):
    """As the guard does: one copy, with something before it."""
    norms = torch.zeros(3) if norms is None else norms
    reading = group.observe(1, norms)
    whole = torch.cat([norms, reading.flat]).numpy()
    return reading.read(whole[len(whole) - reading.size :])


def test_a_monitor_needs_a_name_a_start_and_what_it_observes_and_no_more():
    class Least(BaseMonitor):
        name = "least"

        def start(self, model):
            pass

        def observe(self, step):
            return {}

    monitor = Least()
    assert isinstance(monitor, Monitor)
    assert isinstance(OldStyle(), Monitor)
    assert (monitor.state_dict(), monitor.tensor_state(), monitor.places("x"), dict(monitor.alarm_rules)) == (
        {}, {}, (), {},
    )  # fmt: skip
    for missing in ("start", "observe"):
        with pytest.raises(TypeError, match=missing):
            type("Half", (BaseMonitor,), {k: v for k, v in vars(Least).items() if k != missing})()


@given(
    st.lists(
        st.one_of(
            st.floats(width=32),
            st.lists(st.integers(0, 3), max_size=3).map(lambda shape: torch.rand(shape)),
            st.just(torch.arange(6).reshape(2, 3).t()),
            st.just(torch.tensor([True, False])),
            st.just(torch.tensor([0.5, 2.0], dtype=torch.float64)),
            st.just(torch.tensor([0.5, 2.0], dtype=torch.bfloat16)),
            st.just(np.array([0.1, 0.2])),
        ),
        max_size=6,
    )
)
@settings(max_examples=100, deadline=None)
def test_values_of_any_shape_come_back_flat_each_under_its_own_name(given_values):
    values = {f"metric_{i}": value for i, value in enumerate(given_values)}
    readings = read(group_of(Fake(values)))
    assert list(readings.get("fake", {})) == list(values)
    for name, value in values.items():
        flat = value.flatten().tolist() if isinstance(value, torch.Tensor) else np.asarray(value).reshape(-1).tolist()
        np.testing.assert_array_equal(readings["fake"][name].values, np.asarray(flat, dtype=np.float64))
        assert readings["fake"][name].values.dtype == np.float64
        assert len(readings["fake"][name].places) == len(flat)


def test_numbers_on_the_host_stay_exactly_as_they_are():
    third = 1 / 3
    assert read(group_of(Fake({"x": third})))["fake"]["x"].values.tolist() == [third]
    assert read(group_of(OldStyle()))["old"]["count"].values.tolist() == [3.0]


def test_what_a_monitor_writes_to_its_tensor_afterwards_changes_nothing():
    kept = torch.tensor([1.0, 2.0], requires_grad=True)
    group = group_of(Fake({"x": kept}))
    reading = group.observe(1, torch.zeros(0))
    assert not reading.flat.requires_grad
    with torch.no_grad():
        kept.fill_(9.0)
    assert reading.read(reading.flat.numpy())["fake"]["x"].values.tolist() == [1.0, 2.0]


def test_a_tensor_on_another_device_than_the_norms_comes_by_a_copy_of_its_own():
    # The meta device stands for an accelerator that the norms are on: what is on the CPU never goes there.
    reading = group_of(Fake({"x": torch.tensor([1.0, 2.0]), "y": 3.0})).observe(1, torch.zeros(3, device="meta"))
    assert reading.size == 0
    readings = reading.read(np.zeros(0))
    assert readings["fake"]["x"].values.tolist() == [1.0, 2.0]
    assert readings["fake"]["y"].values.tolist() == [3.0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_nothing_waits_for_the_accelerator_while_values_are_gathered():
    norms = torch.ones(3, device="cuda")
    group = group_of(Fake({"x": torch.ones(2, 2, device="cuda"), "y": torch.ones(2), "z": 0.5}))
    torch.cuda.set_sync_debug_mode("error")
    try:
        reading = group.observe(1, norms)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert reading.read(reading.flat.cpu().numpy())["fake"]["x"].values.tolist() == [1.0] * 4


def test_places_have_the_monitors_names_a_lone_value_is_the_model_and_others_are_numbered():
    names = {"entropy": ["layer_0", "layer_1"]}
    readings = read(group_of(Fake({"entropy": torch.rand(2), "total": 1.0, "more": torch.rand(2)}, names=names)))[
        "fake"
    ]
    assert readings["entropy"].places == ("layer_0", "layer_1")
    assert readings["total"].places == ("",)
    assert readings["more"].places == ("place_0", "place_1")


@pytest.mark.parametrize("names", [["a"], ["a", "a"], ["a", "b", "c"]])
def test_names_that_do_not_fit_are_numbers_and_one_warning(names):
    said = []
    group = group_of(Fake({"x": torch.rand(2)}, names={"x": names}), say=lambda key, text: said.append((key, text)))
    for _ in range(3):
        assert read(group)["fake"]["x"].places == ("place_0", "place_1")
    assert len({key for key, _ in said}) == 1
    assert "2 values" in said[0][1]


def test_a_metric_that_grows_asks_for_its_names_again():
    fake = Fake({"x": torch.rand(1)}, names={"x": ["a"]})
    group = group_of(fake)
    read(group)
    fake.values, fake.names = {"x": torch.rand(2)}, {"x": ["a", "b"]}
    assert read(group)["fake"]["x"].places == ("a", "b")


@pytest.mark.parametrize(
    "wrong",
    [RuntimeError("singular"), {"x": "much"}, {"x": torch.zeros(2, dtype=torch.complex64)}, 3],
)
def test_one_that_fails_is_off_with_one_warning_and_the_others_go_on(wrong):
    said = []
    bad, good = Fake(wrong, name="bad"), Fake({"x": 1.0}, name="good")
    group = group_of(bad, good, say=lambda key, text: said.append(text))
    assert [set(read(group)) for _ in range(2)] == [{"good"}, {"good"}]
    assert len(said) == 1
    assert "'bad' failed and is off" in said[0]
    assert bad.calls == ["stop"]


@pytest.mark.parametrize("part", ["places", "tensor_state", "load_tensor_state", "state_dict", "load_state_dict"])
def test_one_that_fails_in_anything_else_is_off_too(part):
    def fail(self, *_):
        raise RuntimeError("no")

    said = []
    bad = type("Bad", (Fake,), {part: fail})({"x": torch.rand(2)}, name="bad")
    group = group_of(bad, Fake({"x": 1.0}, name="good"), say=lambda key, text: said.append(text))
    group.observe(1, torch.zeros(0))
    group.tensor_state()
    group.load_tensor_state({"bad": {}})
    group.state_dict()
    group.load_state_dict({"bad": {}})
    assert group.names == ["good"]
    assert len(said) == 1


def test_tensors_go_to_the_monitor_they_came_from():
    class Window(Fake):
        def __init__(self, name, value):
            super().__init__({}, name=name)
            self.kept = torch.full((2,), value)

        def tensor_state(self):
            return {"kept": self.kept}

        def load_tensor_state(self, state):
            self.kept = state["kept"]

    saved = group_of(Window("a", 1.0), Window("b", 2.0), Fake({}, name="none"), OldStyle()).tensor_state()
    assert {name: {k: v.tolist() for k, v in state.items()} for name, state in saved.items()} == {
        "a": {"kept": [1.0, 1.0]},
        "b": {"kept": [2.0, 2.0]},
    }
    monitors = [Window("b", 0.0), Window("c", 0.0)]
    group_of(*monitors, OldStyle()).load_tensor_state(saved)
    assert [monitor.kept[0].item() for monitor in monitors] == [2.0, 0.0]


def test_a_monitor_is_told_the_optimizers_and_the_units_and_speaks_under_its_name():
    said = []
    fake = Fake({})
    context = MonitorContext(optimizers=list, say_once=said.append, units=("q",))
    group_of(fake, OldStyle()).start(nn.Linear(1, 1), context)
    assert fake.calls == ["start"]
    assert (fake.context.optimizers(), fake.context.units) == ([], ("q",))
    fake.context.say_once("no float32 weights.")
    assert said == ["The monitor 'fake': no float32 weights."]


def test_one_that_fails_to_drop_a_step_is_off_and_the_others_drop_it():
    class Dropping(Fake):
        def drop(self, step):
            self.calls.append(f"drop {step}")
            if self.name == "broken":
                raise RuntimeError("gone")

    monitors = [Dropping({}), Dropping({}), OldStyle()]
    monitors[0].name = "broken"
    said = []
    group = MonitorGroup(monitors, lambda key, text: said.append(text))
    group.drop(3)
    group.drop(4)
    assert [monitor.calls for monitor in monitors[:2]] == [["drop 3", "stop"], ["drop 3", "drop 4"]]
    assert said == ["The monitor 'broken' failed and is off from here on: RuntimeError('gone')."]


def test_two_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="'fake': two monitors"):
        group_of(Fake({}), Fake({}))


def test_metrics_for_a_logger_are_aggregates_and_on_request_each_place():
    names = {"entropy": ["layer_0", "layer_1/head_0"]}
    values = {"entropy": torch.tensor([0.25, 0.75]), "loss": 2.0, "gaps": torch.tensor([torch.nan, 1.0])}
    readings = read(group_of(Fake(values, name="router", names=names)))
    metrics = monitor_metrics(readings)
    assert metrics == {
        "trimtab/router/entropy_min": 0.25,
        "trimtab/router/entropy_mean": 0.5,
        "trimtab/router/entropy_max": 0.75,
        "trimtab/router/loss": 2.0,
        "trimtab/router/gaps_min": 1.0,
        "trimtab/router/gaps_mean": 1.0,
        "trimtab/router/gaps_max": 1.0,
    }
    detailed = monitor_metrics(readings, detail=True)
    assert {name for name in detailed if name not in metrics} == {
        "trimtab/router/layer_0/entropy",
        "trimtab/router/layer_1/head_0/entropy",
        "trimtab/router/place_0/gaps",
        "trimtab/router/place_1/gaps",
    }
    assert all(type(value) is float for value in detailed.values())
