"""One call a step: what it decides, when it waits, what it refuses to guess."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trimtab
from trimtab.control import Policy
from trimtab.errors import ConfigError, TrimtabWarning
from trimtab.faults import StoredCopyBurst, StoredCopyFaults
from trimtab.monitors import BaseMonitor
from trimtab.monitors.host_copy import HostCopy
from trimtab.precision import QuantizedGemm, SavedActivations
from trimtab.trace import open_run

WIDTH = 8


class Net(nn.Module):
    """Four projections in two blocks, a norm, an embedding, a router's gate, and a loss in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {"q_proj": nn.Linear(WIDTH, WIDTH), "o_proj": nn.Linear(WIDTH, WIDTH), "gate": nn.Linear(WIDTH, 2)}
            )
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            weight = layer["gate"](x).softmax(-1)
            x = x + weight[..., :1] * layer["o_proj"](torch.tanh(layer["q_proj"](x)))
        return {"loss": self.norm(x).square().mean() + x.square().mean()}


UNITS = ("layers.0.q_proj", "layers.0.o_proj", "layers.1.q_proj", "layers.1.o_proj")
IDS = torch.arange(10).reshape(2, 5)
# Acts from the second step on, on any growth above a half.
EAGER = Policy(alpha=1.5, beta=100.0, max_active=1, lock_steps=2)


def build(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def backward(model: nn.Module, scale: float = 1.0) -> None:
    (model(IDS)["loss"] * scale).backward()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_equal(a: list[Tensor], b: list[Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the times that anything waited for the device."""
    count = [0]
    read = HostCopy.read

    def counting(self: HostCopy) -> np.ndarray:
        count[0] += 1
        return read(self)

    monkeypatch.setattr(HostCopy, "read", counting)
    return count


class TestLazyDecision:
    def test_nothing_waits_for_the_device_until_somebody_reads(self, reads):
        model = build()
        with trimtab.attach(model, policy=EAGER) as guard:
            backward(model)
            decision = guard.step(max_norm=1.0)
            assert repr(decision) == "PendingDecision(not read yet)"
            assert isinstance(decision.grad_norm, Tensor)
            assert not decision.skipped
            assert reads == [0]
            assert decision.gnmr.tolist() == [1.0] * 4
            assert reads == [1]
            decision.risk, decision.active, decision.num_failed, repr(decision)
            assert reads == [1]

    def test_the_next_forward_of_a_converted_model_takes_it(self, reads):
        model = build()
        with trimtab.attach(model, SavedActivations(), policy=EAGER) as guard:
            backward(model)
            guard.step()
            assert reads == [0]
            model.layers[0]["q_proj"](torch.ones(1, WIDTH))
            assert reads == [1]
            backward(model)
            assert reads == [1]

    def test_an_evaluation_takes_none(self, reads):
        model = build()
        with trimtab.attach(model, SavedActivations(), policy=EAGER) as guard:
            backward(model)
            guard.step()
            with torch.no_grad():
                model.eval()(IDS)
            assert reads == [0]

    def test_a_forward_in_watch_only_waits_for_nothing(self, reads):
        model = build()
        with trimtab.attach(model, policy=EAGER) as guard:
            backward(model)
            guard.step()
            backward(model)
            assert reads == [0]

    def test_a_decision_read_late_still_gives_its_own_step(self):
        model = build()
        with trimtab.attach(model, policy=EAGER) as guard:
            decisions = []
            for scale in (1.0, 10.0, 1.0):
                model.zero_grad()
                backward(model, scale)
                decisions.append(guard.step())
            assert [d.step for d in decisions] == [1, 2, 3]
            assert np.round(decisions[1].gnmr, 3).tolist() == [10.0] * 4
            assert decisions[0].gnmr.tolist() == [1.0] * 4
            assert (decisions[2].gnmr < 1).all()

    def test_a_decision_lost_to_a_load_says_so_instead_of_giving_another_ones_fields(self):
        model = build()
        with trimtab.attach(model, policy=EAGER) as guard:
            state = guard.state_dict()
            backward(model)
            lost = guard.step()
            guard.load_state_dict(state)
            with pytest.raises(AttributeError, match="never taken"):
                _ = lost.risk
            with pytest.raises(AttributeError, match="never taken"):
                _ = lost.num_failed

    def test_damping_waits_within_the_step(self, reads):
        model = build()
        with trimtab.attach(model, policy=Policy(damping=True)) as guard:
            backward(model)
            assert guard.step().step == 1
            assert reads[0] >= 1


class TestCadence:
    """Called once an optimizer step, and otherwise one warning."""

    def test_called_for_every_micro_batch_warns_exactly_once(self):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with trimtab.attach(model) as guard, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(4):
                for _ in range(3):
                    backward(model)
                    guard.step()
                optimizer.step()
                optimizer.zero_grad()
        assert [w.category for w in caught] == [TrimtabWarning]
        assert "called twice without an optimizer step" in str(caught[0].message)
        assert "once before each optimizer.step()" in str(caught[0].message)
        assert caught[0].filename == __file__

    def test_never_called_warns_exactly_once(self):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with trimtab.attach(model), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(60):
                backward(model)
                optimizer.step()
                optimizer.zero_grad()
        assert [w.category for w in caught] == [TrimtabWarning]
        assert "never called" in str(caught[0].message)

    def test_never_called_is_noticed_after_the_parameters_were_replaced(self):
        model = build()
        with trimtab.attach(model):
            model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(19):
                optimizer.step()
            with pytest.warns(TrimtabWarning, match="never called"):
                optimizer.step()

    def test_the_optimizer_of_another_model_is_none_of_ours(self):
        model, other = build(), build()
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        with trimtab.attach(model):
            for _ in range(30):
                backward(other)
                optimizer.step()

    @pytest.mark.parametrize("set_to_none", [True, False])
    @pytest.mark.parametrize("accumulate", [1, 3])
    @pytest.mark.parametrize(
        "make",
        [
            lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
            lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
            lambda p: torch.optim.Adagrad(p, lr=0.1),
        ],
        ids=["AdamW fused", "SGD foreach", "Adagrad"],
    )
    def test_a_healthy_loop_never_warns(self, make, accumulate, set_to_none):
        model = build()
        optimizer = make(model.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (1 + s))
        with trimtab.attach(model) as guard:
            for _ in range(25):
                for _ in range(accumulate):
                    backward(model)
                guard.step(max_norm=1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad(set_to_none=set_to_none)

    def test_a_closure_that_evaluates_several_times_a_step_never_warns(self):
        model = build()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")
        with trimtab.attach(model) as guard:

            def closure() -> Tensor:
                optimizer.zero_grad(set_to_none=False)
                loss = model(IDS)["loss"]
                loss.backward()
                return loss

            for _ in range(25):
                closure()
                guard.step()
                optimizer.step(closure)

    def test_an_update_by_hand_never_warns(self):
        model = build()
        with trimtab.attach(model) as guard:
            for _ in range(5):
                backward(model)
                guard.step()
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.1 * p.grad
                        p.grad.zero_()

    def test_two_optimizers_that_share_the_step_never_warn(self):
        model = build()
        halves = [list(model.layers[0].parameters()), list(model.layers[1].parameters())]
        optimizers = [torch.optim.SGD(half, lr=0.1) for half in halves]
        with trimtab.attach(model) as guard:
            for _ in range(25):
                backward(model)
                guard.step()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=False)


class Minimal:
    """A monitor that has no more than it must."""

    name = "minimal"

    def start(self, model: nn.Module) -> None: ...

    def observe(self, step: int) -> dict[str, float]:
        return {}

    def stop(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


def amp_loop(
    step: Callable[[nn.Module, torch.amp.GradScaler, Any], None], num_steps: int = 6, bad_steps: tuple[int, ...] = ()
) -> tuple[list[Tensor], list[Tensor], float]:
    """Loss-scaled training; ``step`` does what lies between backward and ``scaler.step``."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    seen = []
    for t in range(num_steps):
        loss = model(IDS)["loss"]
        if t in bad_steps:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        step(model, scaler, optimizer)
        seen += [p.grad.clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return weights(model), seen, scaler.get_scale()


def usual(model: nn.Module, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


class TestLossScaler:
    @pytest.mark.parametrize("user_unscales", [False, True])
    def test_gradients_and_weights_are_those_of_the_usual_loop_bit_for_bit(self, user_unscales):
        guards: list[trimtab.Guard] = []

        def guarded(model: nn.Module, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
            guards or guards.append(trimtab.attach(model))
            if user_unscales:
                scaler.unscale_(optimizer)
            guards[0].step(max_norm=0.05, scaler=scaler)

        mine, theirs = amp_loop(guarded), amp_loop(usual)
        assert_equal(mine[0], theirs[0])
        assert_equal(mine[1], theirs[1])
        assert mine[2] == theirs[2]
        assert guards[0].num_steps == 6

    def test_a_skipped_step_is_not_observed_but_noted(self, tmp_path):
        states, guards, decisions = [], [], []

        def guarded(model: nn.Module, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
            guards or guards.append(trimtab.attach(model, policy=EAGER, record=tmp_path))
            if len(decisions) in (0, 3, 4):
                guards[0].observe(lr=9.0, loss=9.0)
            decisions.append(guards[0].step(max_norm=0.05, scaler=scaler))
            states.append(guards[0].state_dict())

        clipped, _, scale = amp_loop(guarded, bad_steps=(0, 3, 4))
        guards[0].detach()
        assert [d.skipped for d in decisions] == [True, False, False, True, True, False]
        assert guards[0].num_steps == 3
        assert states[3] == states[4] == states[2]
        assert states[0]["controller"]["step"] == states[0]["step"] == 0
        assert decisions[3].gnmr.tolist() == decisions[2].gnmr.tolist()
        assert np.isnan(decisions[0].gnmr).all()
        assert not decisions[0].active.any()
        assert not decisions[3].grad_norm.isfinite()
        theirs = amp_loop(usual, bad_steps=(0, 3, 4))
        assert_equal(clipped, theirs[0])
        assert scale == theirs[2]
        with open_run(tmp_path) as run:
            assert [(e.kind, e.step) for e in run.events("skip")] == [("skip", 0), ("skip", 2), ("skip", 2)]
            assert run.steps().step.tolist() == [1, 2, 3]
            assert run.steps().lr.tolist() == [1e-2] * 3
            assert (run.steps().loss < 9).all()

    def test_monitors_drop_what_they_have_of_a_skipped_step_and_do_not_observe_it(self):
        calls: list[tuple[str, int]] = []

        class Sums(BaseMonitor):
            name = "sums"

            def start(self, model: nn.Module) -> None:
                pass

            def observe(self, step: int) -> dict[str, Tensor]:
                calls.append(("observe", step))
                return {}

            def drop(self, step: int) -> None:
                calls.append(("drop", step))

        guards: list[trimtab.Guard] = []

        def guarded(model: nn.Module, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
            guards or guards.append(trimtab.attach(model, monitors=[Sums(), Minimal()]))
            guards[0].step(scaler=scaler)

        amp_loop(guarded, num_steps=4, bad_steps=(0, 2))
        assert calls == [("drop", 1), ("observe", 1), ("drop", 2), ("observe", 2)]
        guards[0].detach()

    def test_a_disabled_scaler_is_none(self):
        model = build()
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        with trimtab.attach(model) as guard:
            scaler.scale(model(IDS)["loss"]).backward()
            assert not guard.step(scaler=scaler).skipped
            assert guard.num_steps == 1

    def test_two_optimizers_are_both_unscaled_and_the_step_counts_while_one_of_them_steps(self):
        model = build()
        first = torch.optim.SGD(model.layers[0].parameters(), lr=0.1)
        second = torch.optim.SGD(
            [*model.layers[1].parameters(), *model.embed.parameters(), *model.norm.parameters()], lr=0.1
        )
        plain = build()
        backward(plain)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        with trimtab.attach(model) as guard:
            scaler.scale(model(IDS)["loss"]).backward()
            guard.step(scaler=scaler)
            assert_equal([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
            for optimizer in (first, second):
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
            scaler.scale(model(IDS)["loss"]).backward()
            model.layers[1]["q_proj"].weight.grad[0, 0] = math.inf
            # Only the second optimizer will skip: what the first one steps on is clipped, by a total that is infinite.
            decision = guard.step(max_norm=1.0, scaler=scaler)
            assert not decision.skipped
            assert decision.num_failed == 1
            assert all(not p.grad.any() for p in model.layers[0].parameters())
            for optimizer in (first, second):
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
            scaler.scale(model(IDS)["loss"]).backward()
            for block in range(2):
                model.layers[block]["q_proj"].weight.grad[0, 0] = math.inf
            assert guard.step(max_norm=1.0, scaler=scaler).skipped

    def test_an_optimizer_prepared_by_accelerate_is_unscaled_once(self):
        accelerate = pytest.importorskip("accelerate")
        model, plain = build(), build()
        backward(plain)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        accelerate.Accelerator(cpu=True)
        prepared = accelerate.optimizer.AcceleratedOptimizer(inner, device_placement=False, scaler=scaler)
        with trimtab.attach(model) as guard:
            for _ in range(2):
                scaler.scale(model(IDS)["loss"]).backward()
                guard.step(scaler=scaler)
                assert_equal([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
                prepared.step()
                prepared.zero_grad()
                with torch.no_grad():
                    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                        p.copy_(q)

    @pytest.mark.parametrize("num_optimizers", [0, 2])
    def test_without_exactly_one_optimizer_for_each_parameter_it_does_not_guess(self, num_optimizers):
        model = build()
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(num_optimizers)]
        scaler = torch.amp.GradScaler("cpu")
        with trimtab.attach(model) as guard:
            scaler.scale(model(IDS)["loss"]).backward()
            with pytest.raises(ConfigError) as caught:
                guard.step(scaler=scaler)
        assert caught.value.setting == "scaler"
        assert caught.value.given == f"{len(optimizers)} optimizers"
        assert "unscale yourself" in caught.value.remedy

    def test_an_optimizer_that_took_the_place_of_a_deleted_one_is_found(self):
        model, plain = build(), build()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        with trimtab.attach(model) as guard:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            scaler.scale(model(IDS)["loss"]).backward()
            guard.step(scaler=scaler)
            scaler.step(optimizer)
            scaler.update()
            del optimizer
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            optimizer.zero_grad()
            scaler.scale(model(IDS)["loss"]).backward()
            guard.step(scaler=scaler)
            backward(plain)
            assert_equal([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])

    def test_parameters_replaced_after_the_guard_was_attached_are_unscaled(self):
        model, plain = build(), build()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        with trimtab.attach(model) as guard:
            model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler.scale(model(IDS)["loss"]).backward()
            guard.step(scaler=scaler)
            backward(plain)
            assert_equal([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
            scaler.step(optimizer)


class TestDamping:
    POLICY = Policy(alpha=1.5, beta=100.0, max_active=1, damping=True)

    def test_the_order_is_norms_risks_damping_total_of_what_is_left_clip(self, tmp_path):
        model, by_hand = build(), build()
        with trimtab.attach(model, policy=self.POLICY, record=tmp_path) as guard:
            backward(model)
            guard.step()
            model.zero_grad()
            for m in (model, by_hand):
                backward(m)
                m.layers[1]["o_proj"].weight.grad *= 8
                m.layers[0]["q_proj"].bias.grad.fill_(math.nan)
            decision = guard.step(max_norm=0.05)
            norms = [math.hypot(*(p.grad.norm().item() for p in by_hand.layers[1]["o_proj"].parameters()))]
        scale = decision.scale.tolist()
        assert decision.num_failed == 1
        assert scale[0] == 0.0
        assert scale[1:3] == [1.0, 1.0]
        assert 0 < scale[3] < 1
        for p in by_hand.layers[0]["q_proj"].parameters():
            p.grad.zero_()
        for p in by_hand.layers[1]["o_proj"].parameters():
            p.grad.mul_(scale[3])
        total = torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 0.05)
        assert torch.equal(decision.grad_norm, total)
        assert total > 0.05
        assert_equal([p.grad for p in model.parameters()], [p.grad for p in by_hand.parameters()])
        with open_run(tmp_path) as run:
            steps = run.steps()
        assert math.isnan(steps.norms[1, 0])
        # Squares, sum and root in float64 on both sides.
        assert steps.norms[1, 3] == pytest.approx(norms[0], rel=4 * np.finfo(np.float64).eps, abs=0)
        assert steps.grad_norm[1] == total.item()
        assert steps.extra[1]["damped"] == {UNITS[0]: 0.0, UNITS[3]: scale[3]}
        assert not (steps.extra[0] or {}).get("damped")

    def test_the_history_takes_the_undamped_norm(self):
        model = build()
        with trimtab.attach(model, policy=self.POLICY) as guard:
            for scale in (1.0, 8.0):
                model.zero_grad()
                backward(model, scale)
                guard.step()
            means = [u["mean"] for u in guard.state_dict()["controller"]["units"].values()]
            model.zero_grad()
            backward(model)
            reading = guard._norms.read()
            plain = guard._norms.unit_norms(reading.indices, reading.norms.numpy())
        # (1 + 8) / 2 times the plain norm; float32 gradients that differ by a factor of 8 are scaled exactly.
        assert means == pytest.approx((4.5 * plain).tolist(), rel=4 * np.finfo(np.float64).eps, abs=0)

    def test_a_failed_unit_cannot_break_the_weights(self):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with trimtab.attach(model, policy=self.POLICY) as guard:
            for step in range(4):
                backward(model)
                if step == 2:
                    for p in model.layers[0]["o_proj"].parameters():
                        p.grad.fill_(math.inf)
                guard.step(max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        assert all(p.isfinite().all() for p in model.parameters())


class TestRouting:
    @pytest.mark.filterwarnings("ignore:units picks the input embeddings:trimtab.TrimtabWarning")
    def test_units_that_the_recipe_cannot_switch_are_scored_and_never_routed(self, tmp_path):
        model = build()
        names = ["embed", "layers.0.q_proj", "layers.0.gate", "layers.1.q_proj", "norm"]
        policy = Policy(alpha=1e-6, beta=1e-6, max_active=5)
        with trimtab.attach(model, SavedActivations(), policy=policy, units=names, record=tmp_path) as guard:
            assert guard.units == tuple(names)
            for _ in range(3):
                model.zero_grad()
                backward(model)
                decision = guard.step()
                assert (decision.risk > 1).all()
                # The gate is a linear layer that was asked for by name, so it is switched.
                assert decision.active.tolist() == [False, True, True, True, False]
            assert guard.active == ("layers.0.q_proj", "layers.0.gate", "layers.1.q_proj")
        with open_run(tmp_path) as run:
            assert [u.recoverable for u in run.unit_table] == [False, True, True, True, False]
            assert (run.steps().risk > 1).all()

    def test_a_routers_gate_is_no_unit_by_default(self):
        with trimtab.attach(build()) as guard:
            assert guard.units == UNITS

    def test_the_decision_of_a_step_routes_the_next_one(self):
        model = build()
        with trimtab.attach(model, SavedActivations(), policy=EAGER) as guard:
            widths = lambda: [guard.conversion.bits_in_force(i) for i in range(4)]  # noqa: E731
            backward(model)
            guard.step()
            assert widths() == [4] * 4
            model.zero_grad()
            backward(model)
            for p in model.layers[0]["o_proj"].parameters():
                p.grad *= 9
            guard.step()
            assert widths() == [4, 8, 4, 4]
            assert guard.active == ("layers.0.o_proj",)

    def test_a_route_by_hand_holds_until_the_next_decision_and_is_recorded(self, tmp_path):
        model = build()
        with trimtab.attach(model, SavedActivations(), policy=Policy(max_active=0), record=tmp_path) as guard:
            backward(model)
            guard.step()
            guard.route(["layers.1.o_proj", "layers.0.q_proj"])
            assert guard.active == ("layers.0.q_proj", "layers.1.o_proj")
            model.zero_grad()
            backward(model)
            assert [guard.conversion.bits_in_force(i) for i in range(4)] == [8, 4, 4, 8]
            guard.step()
            assert guard.active == ()
            assert [guard.conversion.bits_in_force(i) for i in range(4)] == [4] * 4
        with open_run(tmp_path) as run:
            [forced] = run.events("forced")
            assert (forced.step, forced.data) == (2, {"units": ["layers.0.q_proj", "layers.1.o_proj"]})
            assert run.steps().extra[1] == {"routed_by_hand": ["layers.0.q_proj", "layers.1.o_proj"]}
            assert not run.steps().extra[0]

    @pytest.mark.parametrize("names", [["layers.0.q_porj"], ["norm"]])
    def test_a_route_to_what_is_no_recoverable_unit_is_refused(self, names):
        with (
            trimtab.attach(build(), SavedActivations()) as guard,
            pytest.raises(ConfigError, match="nearest names are"),
        ):
            guard.route(names)

    @pytest.mark.parametrize("late", [False, True])
    def test_a_step_that_had_begun_under_another_set_says_so(self, late, tmp_path):
        model = build()
        with trimtab.attach(model, SavedActivations(), policy=Policy(max_active=0), record=tmp_path) as guard:
            if late:
                backward(model)
            guard.route(["layers.1.o_proj"])
            backward(model)
            guard.step()
            model.zero_grad()
            backward(model)
            guard.step()
        with open_run(tmp_path) as run:
            first, second = run.steps().extra
            assert (first or {}).get("routed_late", False) == late
            assert not second

    def test_a_set_that_comes_with_a_loaded_state_is_not_late_whatever_ran_before(self, tmp_path):
        model = build()
        with trimtab.attach(model, SavedActivations(), policy=Policy(max_active=0), record=tmp_path) as guard:
            guard.route(["layers.1.o_proj"])
            state = guard.state_dict()
            backward(model)
            guard.load_state_dict(state)
            model.zero_grad()
            backward(model)
            guard.step()
        with open_run(tmp_path) as run:
            assert run.steps().extra[0] == {"routed_by_hand": ["layers.1.o_proj"]}

    def test_a_retried_step_runs_under_the_set_from_its_start(self, tmp_path):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        with trimtab.attach(model, SavedActivations(), policy=Policy(max_active=0), record=tmp_path) as guard:
            for factor in (float("inf"), 1.0):
                optimizer.zero_grad()
                scaler.scale(model(IDS)["loss"] * factor).backward()
                if factor != 1.0:
                    guard.route(["layers.1.o_proj"])
                guard.step(scaler=scaler)
                scaler.step(optimizer)
                scaler.update()
        with open_run(tmp_path) as run:
            assert run.steps().extra[-1] == {"routed_by_hand": ["layers.1.o_proj"]}

    def test_an_evaluation_before_it_makes_no_route_late(self, tmp_path):
        model = build()
        with trimtab.attach(model, SavedActivations(), policy=Policy(max_active=0), record=tmp_path) as guard:
            model.eval()
            with torch.no_grad():
                model(IDS)
            model.train()
            guard.route(["layers.1.o_proj"])
            backward(model)
            guard.step()
        with open_run(tmp_path) as run:
            assert run.steps().extra[0] == {"routed_by_hand": ["layers.1.o_proj"]}

    @pytest.mark.parametrize("names", [None, 5, [None], [3], b"x", [["layers.0.q_proj"]]])
    def test_a_route_to_what_is_no_list_of_names_is_refused(self, names):
        with trimtab.attach(build(), SavedActivations()) as guard, pytest.raises(ConfigError, match="a list of names"):
            guard.route(names)

    def test_a_detached_guard_routes_nothing(self):
        guard = trimtab.attach(build(), SavedActivations())
        guard.detach()
        with pytest.raises(ConfigError, match="detached"):
            guard.route(["layers.0.q_proj"])

    def test_the_record_says_what_the_recovery_path_was_made_of_however_late_it_ran(self, tmp_path):
        model = build()
        with trimtab.attach(model, QuantizedGemm(), policy=Policy(max_active=0), record=tmp_path) as guard:
            for step in range(1, 4):
                if step == 3:
                    guard.route(["layers.0.q_proj"])
                model.zero_grad()
                backward(model)
                guard.step()
        with open_run(tmp_path) as run:
            products = run.events("note")[-1].data["products"]
        assert products["high_forward"] == "emulated: the device has no FP8 products"
        assert {name.partition("_")[0] for name in products} == {"low", "high"}

    def test_a_route_without_a_recipe_is_refused(self):
        with trimtab.attach(build()) as guard, pytest.raises(ConfigError, match="no recovery path"):
            guard.route(["layers.0.q_proj"])


class TestFaults:
    def test_each_start_is_recorded_once_however_many_faults_are_injected(self, tmp_path):
        model = build()
        bursts = [StoredCopyBurst(unit=u, start_step=1, num_steps=2, factor=50.0) for u in UNITS[:2]]
        with trimtab.attach(model, SavedActivations(), record=tmp_path) as guard:
            for burst in bursts:
                guard.inject(StoredCopyFaults([burst]))
            for _ in range(3):
                model.zero_grad()
                backward(model)
                guard.step()
        with open_run(tmp_path) as run:
            assert [(e.step, e.place) for e in run.events("fault")] == [(1, UNITS[0]), (1, UNITS[1])]

    def test_two_sets_of_faults_hold_side_by_side(self):
        model = build()
        bursts = [StoredCopyBurst(unit=u, start_step=1, num_steps=2, factor=50.0) for u in UNITS[:2]]
        with trimtab.attach(model, SavedActivations()) as guard:
            for burst in bursts:
                guard.inject(StoredCopyFaults([burst]))
            for step in (1, 2, 3):
                assert [guard.conversion.corruption(i) is not None for i in range(2)] == [step < 3] * 2
                model.zero_grad()
                backward(model)
                guard.step()

    def test_a_burst_changes_the_weight_gradient_of_its_unit_alone_and_only_in_its_steps(self):
        model, plain = build(), build()
        recipe = SavedActivations()
        burst = StoredCopyBurst(unit="layers.1.o_proj", start_step=2, num_steps=1, factor=50.0, num_channels=4)
        with trimtab.attach(model, recipe) as guard, trimtab.attach(plain, recipe) as other:
            guard.inject(StoredCopyFaults([burst]))
            for step in (1, 2, 3):
                for m, g in ((model, guard), (plain, other)):
                    m.zero_grad()
                    backward(m)
                    g.step()
                different = [
                    name
                    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True)
                    if not torch.equal(p.grad, q.grad)
                ]
                assert different == (["layers.1.o_proj.weight"] if step == 2 else [])

    def test_a_fault_that_does_not_fit_is_refused(self):
        fault = StoredCopyFaults([StoredCopyBurst(unit="layers.9", start_step=1, num_steps=1, factor=2.0)])
        with trimtab.attach(build()) as guard, pytest.raises(ConfigError, match="saved activations"):
            guard.inject(fault)
        with trimtab.attach(build(), SavedActivations()) as guard, pytest.raises(ConfigError, match="Nearest"):
            guard.inject(fault)


class TestRecord:
    def test_a_row_has_the_loss_of_the_step_its_learning_rate_and_its_norm(self, tmp_path):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses, totals = [], []
        with trimtab.attach(model, record=tmp_path) as guard:
            for step in range(4):
                optimizer.param_groups[0]["lr"] = 0.5 / (1 + step)
                parts = []
                for _ in range(2):
                    loss = model(IDS)["loss"]
                    (loss / 2).backward()
                    parts.append(loss.detach())
                losses.append(torch.stack(parts).mean().item())
                totals.append(guard.step(max_norm=1.0).grad_norm.item())
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    model(IDS)  # an evaluation's loss is not the step's
        with open_run(tmp_path) as run:
            steps = run.steps()
            assert run.finished
        assert steps.loss.tolist() == losses
        assert steps.lr.tolist() == [0.5, 0.25, 0.5 / 3, 0.125]
        assert steps.grad_norm.tolist() == totals

    def test_a_loss_outside_training_or_of_many_elements_is_not_the_steps(self, tmp_path):
        class Odd(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(2, 2)

            def forward(self, x: Tensor) -> dict[str, Tensor]:
                loss = self.linear(x).square()
                return {"loss": loss if self.training else loss.mean()}

        model = Odd()
        with trimtab.attach(model, record=tmp_path) as guard:
            model.train()(torch.ones(1, 2))["loss"].mean().backward()
            model.eval()(torch.ones(1, 2))["loss"].backward()
            guard.step()
        with open_run(tmp_path) as run:
            assert np.isnan(run.steps().loss).all()

    @pytest.mark.parametrize("read", ["at once", "damping", "late"])
    def test_the_learning_rate_is_that_of_its_own_step_whenever_the_decision_is_read(self, read, tmp_path):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with trimtab.attach(model, policy=Policy(damping=read == "damping"), record=tmp_path) as guard:
            for step in range(4):
                optimizer.param_groups[0]["lr"] = float(step)
                backward(model)
                decision = guard.step()
                if read == "at once":
                    assert decision.step == step + 1
                optimizer.step()
                optimizer.zero_grad()
        with open_run(tmp_path) as run:
            assert run.steps().lr.tolist() == [0.0, 1.0, 2.0, 3.0]

    def test_what_is_observed_by_hand_belongs_to_the_step_that_follows(self, tmp_path):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=9.0)
        with trimtab.attach(model, record=tmp_path) as guard:
            for step in range(3):
                model.zero_grad()
                backward(model)
                guard.observe(loss=float(step), lr=step / 8)
                guard.step()
            optimizer.step()
        with open_run(tmp_path) as run:
            assert run.steps().loss.tolist() == [0.0, 1.0, 2.0]
            assert run.steps().lr.tolist() == [0.0, 0.125, 0.25]

    def test_an_exception_leaves_the_record_unfinished_and_the_model_free(self, tmp_path):
        model = build()

        def dies() -> None:
            with trimtab.attach(model, SavedActivations(), record=tmp_path) as guard:
                backward(model)
                guard.step()
                raise RuntimeError("power cut")

        with pytest.raises(RuntimeError, match="power cut"):
            dies()
        with open_run(tmp_path) as run:
            assert not run.finished
            assert run.num_steps == 1
        trimtab.attach(model).detach()

    def test_a_warning_is_kept_in_the_record(self, tmp_path):
        model = build()
        with trimtab.attach(model, record=tmp_path) as guard:
            backward(model)
            guard.step()
            backward(model)
            with pytest.warns(TrimtabWarning):
                guard.step()
        with open_run(tmp_path) as run:
            assert "called twice" in run.events("warning")[0].data["message"]


class Probe:
    """A monitor that reports, until told to fail."""

    def __init__(self, name: str = "probe", fails: str = "") -> None:
        self.name, self.fails, self.calls = name, fails, []
        self.model: nn.Module | None = None

    def start(self, model: nn.Module) -> None:
        self.calls.append("start")
        if self.fails == "start":
            raise RuntimeError("no such head layout")
        self.model = model
        self.handle = model.register_forward_hook(lambda *_: None)

    def observe(self, step: int) -> dict[str, Any]:
        self.calls.append(step)
        if self.fails == "observe" and step == 2:
            raise RuntimeError("singular")
        if self.fails == "value" and step == 2:
            return {"norm": "much"}
        return {"norm": max(p.grad.norm() for p in self.model.parameters())}

    def stop(self) -> None:
        self.calls.append("stop")
        self.handle.remove()
        if self.fails == "stop":
            raise RuntimeError("gone already")

    def state_dict(self) -> dict[str, Any]:
        return {"calls": len(self.calls)}

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state


class TestMonitors:
    def test_one_reads_the_gradients_before_damping_and_clipping(self, tmp_path):
        model, plain = build(), build()
        backward(plain)
        largest = max(p.grad.norm().item() for p in plain.parameters())
        probe = Probe()
        with trimtab.attach(model, monitors=[probe], record=tmp_path) as guard:
            backward(model)
            guard.step(max_norm=1e-3)
            assert guard.metrics()["trimtab/probe/norm"] == largest
        assert probe.calls == ["start", 1, "stop"]
        with open_run(tmp_path) as run:
            assert run.steps().extra[0]["monitors"] == {"trimtab/probe/norm": largest}
            assert run.config["monitors"] == ["probe"]

    @pytest.mark.parametrize("fails", ["observe", "value"])
    def test_one_that_fails_is_switched_off_with_one_warning_and_training_goes_on(self, fails):
        model = build()
        bad, good = Probe("bad", fails), Probe("good")
        with trimtab.attach(model, monitors=[bad, good]) as guard, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(4):
                model.zero_grad()
                backward(model)
                guard.step()
            assert set(guard.metrics()) > {"trimtab/good/norm"}
            assert "trimtab/bad/norm" not in guard.metrics()
        assert [w.category for w in caught] == [TrimtabWarning]
        assert "'bad' failed and is off" in str(caught[0].message)
        assert bad.calls == ["start", 1, 2, "stop"]
        assert good.calls == ["start", 1, 2, 3, 4, "stop"]
        assert not model._forward_hooks

    def test_one_that_cannot_start_leaves_the_model_as_it_was(self):
        model = build()
        with pytest.raises(RuntimeError, match="head layout"):
            trimtab.attach(model, SavedActivations(), monitors=[Probe("good"), Probe("bad", "start")])
        assert [type(m) for m in model.modules()] == [type(m) for m in Net().modules()]
        assert not model._forward_hooks
        trimtab.attach(model).detach()

    def test_one_that_cannot_stop_does_not_keep_the_rest_from_being_undone(self):
        model = build()
        trimtab.attach(model, SavedActivations(), monitors=[Probe("bad", "stop"), good := Probe("good")]).detach()
        assert good.calls == ["start", "stop"]
        assert [type(m) for m in model.modules()] == [type(m) for m in Net().modules()]


def test_metrics_are_flat_floats_with_the_documented_names():
    model = build()
    with trimtab.attach(model, SavedActivations(), policy=EAGER) as guard:
        assert guard.metrics() == {}
        for scale in (1.0, 4.0):
            model.zero_grad()
            backward(model, scale)
            model.layers[0]["o_proj"].weight.grad = model.layers[0]["o_proj"].bias.grad = None
            guard.step()
        metrics = guard.metrics()
    assert all(type(v) is float for v in metrics.values())
    assert metrics.pop("trimtab/gnmr/mean") == pytest.approx(4.0, rel=1e-12)
    assert metrics.pop("trimtab/gnmr/max") == pytest.approx(4.0, rel=1e-12)
    assert metrics.pop("trimtab/risk/max") == pytest.approx(4.0 / 1.5, rel=1e-12)
    assert metrics == {
        "trimtab/delta/max": 1.0,
        "trimtab/control/num_risky": 3.0,
        "trimtab/control/num_active": 1.0,
        "trimtab/control/active_share": 0.25,
        "trimtab/control/num_failed": 0.0,
        "trimtab/control/num_unobserved": 1.0,
    }
