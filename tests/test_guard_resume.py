"""A run that was saved and loaded decides, trains and records as the uninterrupted one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trimtab
from trimtab.control import Policy, robust
from trimtab.errors import ConfigError, TrimtabWarning
from trimtab.faults import StoredCopyBurst, StoredCopyFaults
from trimtab.precision import SavedActivations
from trimtab.trace import open_run, replay

WIDTH, NUM_STEPS = 16, 24
UNITS = tuple(f"layers.{i}.{n}" for i in range(2) for n in ("q_proj", "o_proj"))
BURSTS = [
    StoredCopyBurst(unit="layers.0.o_proj", start_step=8, num_steps=6, factor=400.0, num_channels=4),
    StoredCopyBurst(unit="layers.1.q_proj", start_step=12, num_steps=6, factor=900.0, num_channels=4, seed=1),
]
POLICIES = {
    "ema": robust(burn_in_steps=3, act_from_step=4, max_active=1, lock_steps=3, alpha=1.5, beta=1.5),
    "mean": Policy(alpha=1.3, beta=1.2, window_steps=3, lock_steps=2, max_active=2),
    "window": Policy(alpha=1.3, beta=1.2, history="window", history_steps=5, max_active=1, damping=True),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"q_proj": nn.Linear(WIDTH, WIDTH), "o_proj": nn.Linear(WIDTH, WIDTH)}) for _ in range(2)
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = x + self.dropout(layer["o_proj"](torch.tanh(layer["q_proj"](x))))
        return {"loss": x.square().mean()}


class Run:
    """One process of a training run: model, optimizer, guard and faults."""

    def __init__(self, policy: Policy, record: Path | None = None, rounding: str = "nearest") -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.guard = trimtab.attach(self.model, SavedActivations(4, 8, rounding=rounding), policy=policy, record=record)
        self.guard.inject(StoredCopyFaults(BURSTS))
        self.decisions: dict[int, list[list[float]]] = {}

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            torch.manual_seed(100 + step)
            for _ in range(2):
                (self.model(torch.randn(4, 5, WIDTH))["loss"] / 2).backward()
            decision = self.guard.step(max_norm=1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            fields = (decision.gnmr, decision.delta, decision.risk, decision.active, decision.lock, decision.scale)
            self.decisions[step] = [np.asarray(f).tolist() for f in fields]

    def save(self) -> dict[str, Any]:
        state = json.dumps(self.guard.state_dict(), allow_nan=False)
        optimizer = {"state": self.optimizer.state_dict()}
        weights = {k: v.clone() for k, v in self.model.state_dict().items()}
        return {"guard": state, "optimizer": _copied(optimizer), "weights": weights}

    def load(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["weights"])
        self.optimizer.load_state_dict(_copied(saved["optimizer"])["state"])
        self.guard.load_state_dict(json.loads(saved["guard"]))


def _copied(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {k: _copied(v) for k, v in state.items()}
    return [_copied(v) for v in state] if isinstance(state, list) else state


@pytest.fixture(scope="module")
def whole() -> dict[tuple[str, str], Run]:
    runs = {}
    for name, policy in POLICIES.items():
        for rounding in ("nearest", "stochastic"):
            run = runs[name, rounding] = Run(policy, rounding=rounding)
            run.train(1, NUM_STEPS)
            # Otherwise the comparison below would prove nothing.
            assert any(any(fields[3]) for fields in run.decisions.values())
    return runs


@pytest.mark.parametrize("at", [1, 3, 8, 13, 18])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_resumed_at_any_step_decides_and_trains_as_the_uninterrupted_one(policy, rounding, at, whole):
    first = Run(POLICIES[policy], rounding=rounding)
    first.train(1, at)
    saved = first.save()
    second = Run(POLICIES[policy], rounding=rounding)
    second.load(saved)
    second.train(at + 1, NUM_STEPS)
    expected = whole[policy, rounding]
    assert repr(first.decisions | second.decisions) == repr(expected.decisions)
    for mine, theirs in zip(second.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert second.guard.num_steps == NUM_STEPS


def test_saving_changes_nothing(whole):
    run = Run(POLICIES["ema"])
    for step in range(1, NUM_STEPS + 1):
        run.train(step, step)
        run.save()
    assert repr(run.decisions) == repr(whole["ema", "nearest"].decisions)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_record_of_a_resumed_run_reads_as_one_line_and_replays_to_its_own_decisions(policy, whole, tmp_path):
    first = Run(POLICIES[policy], record=tmp_path)
    first.train(1, 10)
    saved = first.save()
    first.train(11, 15)  # lost: the process dies before the next checkpoint
    first.guard.close(finished=False)
    second = Run(POLICIES[policy], record=tmp_path)
    second.load(saved)
    second.train(11, NUM_STEPS)
    second.guard.detach()
    expected = whole[policy, "nearest"].decisions
    with open_run(tmp_path) as run:
        steps = run.steps()
        assert steps.step.tolist() == list(range(1, NUM_STEPS + 1))
        assert steps.active.tolist() == [expected[t][3] for t in range(1, NUM_STEPS + 1)]
        assert steps.lock.tolist() == [expected[t][4] for t in range(1, NUM_STEPS + 1)]
        assert [(e.step, e.place) for e in run.events("fault")] == [(b.start_step, b.unit) for b in BURSTS]
        assert run.finished
        played = replay(run)
        assert played.num_different == 0
        assert played.notes == ()
        assert played.steps.gnmr.tolist() == [expected[t][0] for t in range(1, NUM_STEPS + 1)]


def test_a_run_rewound_in_its_own_process_goes_on_from_there(whole, tmp_path):
    run = Run(POLICIES["ema"], record=tmp_path)
    run.train(1, 9)
    saved = run.save()
    run.train(10, 14)
    run.load(saved)
    run.train(10, NUM_STEPS)
    run.guard.detach()
    assert repr(run.decisions) == repr(whole["ema", "nearest"].decisions)
    with open_run(tmp_path) as record:
        assert record.steps().step.tolist() == list(range(1, NUM_STEPS + 1))
        assert [(e.step, e.place) for e in record.events("fault")] == [(b.start_step, b.unit) for b in BURSTS]
        assert replay(record).num_different == 0


def test_a_saved_state_never_runs_ahead_of_the_record(tmp_path):
    run = Run(POLICIES["ema"], record=tmp_path)
    run.train(1, 7)
    run.save()
    with open_run(tmp_path) as record:  # as another process would find it after a kill
        assert record.last_step == 7
    run.guard.detach()


def test_a_start_without_a_state_counts_on_and_the_record_says_that_the_history_is_fresh(tmp_path):
    first = Run(POLICIES["ema"], record=tmp_path)
    first.train(1, 10)
    first.guard.close(finished=False)
    second = Run(POLICIES["ema"], record=tmp_path)
    second.guard.start_from(10)
    second.train(11, NUM_STEPS)
    second.guard.detach()
    assert second.guard.num_steps == NUM_STEPS
    with open_run(tmp_path) as run:
        assert run.steps().step.tolist() == list(range(1, NUM_STEPS + 1))
        assert replay(run).num_different == 0
        assert [(e.step, e.place) for e in run.events("fault")] == [(b.start_step, b.unit) for b in BURSTS]


def test_a_route_by_hand_survives_a_save_and_one_from_before_the_load_does_not():
    run = Run(POLICIES["ema"])
    run.train(1, 2)
    unforced = run.save()
    run.guard.route([UNITS[3]])
    forced = run.save()
    run.load(unforced)
    assert run.guard.active == ()
    other = Run(POLICIES["ema"])
    other.load(forced)
    assert other.guard.active == (UNITS[3],)
    other.train(3, 3)
    assert other.guard.active == ()


def test_a_checkpoint_of_other_units_loads_what_matches_and_names_the_rest_once():
    run = Run(POLICIES["mean"])
    run.train(1, 5)
    state = run.guard.state_dict()
    torch.manual_seed(0)
    model = Net()
    with trimtab.attach(
        model, SavedActivations(), policy=POLICIES["mean"], units=["layers.0.q_proj", "layers.1"]
    ) as guard:
        with pytest.warns(TrimtabWarning) as caught:
            report = guard.load_state_dict(state)
        assert len(caught) == 1
        message = str(caught[0].message)
        assert report.new == ("layers.1",)
        assert report.gone == UNITS[1:]
        assert "new here: layers.1" in message
        assert all(name in message for name in UNITS[1:])
        loaded = guard.state_dict()
        assert loaded["controller"]["units"][UNITS[0]] == state["controller"]["units"][UNITS[0]]
        assert loaded["controller"]["units"]["layers.1"]["seen"] == 0
        assert guard.num_steps == 5


def test_a_forced_unit_that_cannot_be_switched_any_more_is_let_go():
    run = Run(POLICIES["mean"])
    run.guard.route([UNITS[0], UNITS[1]])
    state = run.guard.state_dict()
    model = Net()
    model.layers[0]["q_proj"].forward = model.layers[0]["q_proj"].forward  # somebody else's: not convertible
    with pytest.warns(TrimtabWarning, match="layers.0.q_proj as it is"):
        guard = trimtab.attach(model, SavedActivations(), policy=POLICIES["mean"])
    with guard:
        guard.load_state_dict(state)
        assert guard.active == (UNITS[1],)


@pytest.mark.parametrize("watch_only_first", [True, False])
def test_a_state_loads_whether_or_not_the_other_run_had_a_recipe(watch_only_first):
    recipes = [None, SavedActivations()]
    recipes = recipes if watch_only_first else recipes[::-1]
    with trimtab.attach(Net(), recipes[0]) as first, trimtab.attach(Net(), recipes[1]) as second:
        assert second.load_state_dict(json.loads(json.dumps(first.state_dict()))).new == ()


@pytest.mark.parametrize(
    "broken",
    [
        None,
        [],
        {},
        {"version": 2},
        {"version": 1, "controller": {}},
        lambda s: {k: v for k, v in s.items() if k != "step"},
        lambda s: {k: v for k, v in s.items() if k != "monitors"},
        lambda s: s | {"controller": {"version": 99}},
    ],
)
def test_what_is_no_state_is_refused_and_changes_nothing(broken):
    run = Run(POLICIES["mean"])
    run.train(1, 3)
    before = run.guard.state_dict()
    with pytest.raises(ConfigError):
        run.guard.load_state_dict(broken(before) if callable(broken) else broken)
    assert run.guard.state_dict() == before
