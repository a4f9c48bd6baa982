"""From what a recipe knows of its quantizers to decisions, metrics and the record.

This file is also the script that each of several ranks runs.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import trimtab
from trimtab.control import MatchedRandom, Policy, robust
from trimtab.errors import ConfigError, TrimtabWarning
from trimtab.monitors.host_copy import HostCopy
from trimtab.monitors.quantizers import LONG_STEPS
from trimtab.precision import PathCost, SavedActivations, Unit
from trimtab.trace import open_run, replay

NUM_RANKS, WIDTH, NAN, INF = 2, 6, float("nan"), float("inf")
UNITS = tuple(f"layers.{i}.{name}" for i in range(2) for name in ("q_proj", "o_proj"))
# The first unit is only watched, so that the conversion's units are not the guard's.
RECOVERABLE = UNITS[1:]
# Thresholds that no norm of these tests comes near, so that errors alone decide.
POLICY = Policy(alpha=1e6, beta=1e6, error_limit=0.25, max_active=1, lock_steps=0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"q_proj": nn.Linear(WIDTH, 5), "o_proj": nn.Linear(5, WIDTH)}) for _ in range(2)
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = x + layer["o_proj"](torch.tanh(layer["q_proj"](x)))
        return {"loss": x.square().mean()}


class ToldConversion:
    """Converts nothing; its statistics are what the test tells it."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = [unit for unit in units if unit.name in RECOVERABLE]
        self.costs = [PathCost(low_saved_bytes=1.0, high_saved_bytes=2.0, flops=1.0) for _ in self.units]
        self.pull: Callable[[], None] | None = None
        self.active = [False] * len(self.units)
        self.undone = False
        self.shadow: bool | None = None
        self.told: Tensor | None = None

    def tell(self, *errors: float) -> None:
        """The error of each unit; the other statistics follow from it."""
        column = torch.tensor(errors)
        self.told = torch.stack([column, column / 2, column / 4, column * 8], dim=1)

    def observe_quantizers(self, shadow: bool) -> None:
        assert self.shadow is None
        self.shadow = shadow

    def take_quantizer_stats(self) -> Tensor | None:
        told, self.told = self.told, None
        return told

    def route(self, active: Sequence[bool]) -> None:
        self.active = list(active)

    def begin_step(self, step: int) -> None:
        pass

    def undo(self) -> None:
        self.undone = True

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class Told:
    """A recipe whose conversion knows what it was told."""

    name = "told"
    made: ToldConversion

    def convert(self, model: nn.Module, units: Sequence[Unit]) -> ToldConversion:
        self.made = ToldConversion(units)
        return self.made

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name}


class Blind(Told):
    """A recipe whose conversion cannot tell what its quantizers do."""

    name = "blind"

    def convert(self, model: nn.Module, units: Sequence[Unit]) -> Any:
        told = self.made = ToldConversion(units)

        class OnlyAConversion:
            units, costs, pull = told.units, told.costs, None
            route, begin_step, undo = told.route, told.begin_step, told.undo
            state_dict, load_state_dict = told.state_dict, told.load_state_dict

        return OnlyAConversion()


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def backward(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.ones(3, WIDTH))["loss"].backward()


def one_step(guard: trimtab.Guard, *errors: float, **settings: Any) -> trimtab.Decision:
    """A step after which the guard hears of these errors, one for each recoverable unit; none: nothing was seen."""
    backward(guard.model)
    if errors:
        guard.conversion.tell(*errors)
    return guard.step(**settings)


def test_the_unit_with_the_greatest_error_takes_the_recovery_path():
    with trimtab.attach(build(), Told(), policy=POLICY) as guard:
        decision = one_step(guard, 0.1, 0.5, 0.3)
        # The first unit is watched only: it has no error, and its risk is that of its norm.
        assert decision.risk[1:].tolist() == [np.float32(0.1) / 0.25, 2.0, np.float32(0.3) / 0.25]
        assert decision.risk[0] < 1e-5
        assert decision.active.tolist() == [False, False, True, False]
        assert guard.active == ("layers.1.q_proj",)
        assert guard.conversion.active == [False, True, False]
        assert one_step(guard, 0.1, NAN, INF).active.tolist() == [False, False, False, True]
        assert not one_step(guard).active.any()


def test_statistics_come_with_the_norms_in_one_copy_that_nothing_waits_for(monkeypatch):
    copies, reads = [], []
    start, read = HostCopy.__init__, HostCopy.read
    monkeypatch.setattr(HostCopy, "__init__", lambda self, t: (copies.append(len(t)), start(self, t))[1])
    monkeypatch.setattr(HostCopy, "read", lambda self: (reads.append(1), read(self))[1])
    with trimtab.attach(build(), Told(), policy=POLICY) as guard:
        num_parameters = len(list(guard.model.parameters()))
        decision = one_step(guard, 0.1, 0.5, 0.3)
        assert copies == [num_parameters + 2 + 4 * len(RECOVERABLE)]  # norms, total, loss, statistics
        assert not reads
        assert decision.active.tolist() == [False, False, True, False]
        assert len(reads) == 1


def test_damping_decides_by_errors_in_the_step_itself_and_scales_no_gradient_for_them():
    policy = Policy(alpha=1e6, beta=1e6, error_limit=0.25, max_active=1, damping=True)
    with trimtab.attach(build(), Told(), policy=policy) as guard:
        one_step(guard, 0.1, 0.1, 0.1)
        backward(guard.model)
        grads = [p.grad.clone() for p in guard.model.parameters()]
        guard.conversion.tell(0.1, 0.1, 0.5)
        decision = guard.step()
        assert guard.conversion.active == [False, False, True]
        assert (decision.scale == 1).all()
        for p, grad in zip(guard.model.parameters(), grads, strict=True):
            assert torch.equal(p.grad, grad)
        assert guard.metrics()["trimtab/quantizer/error_max"] == 0.5


def test_a_step_that_the_loss_scaler_skips_drops_what_its_quantizers_did():
    with trimtab.attach(build(), Told(), policy=POLICY) as guard:
        optimizer = torch.optim.SGD(guard.model.parameters(), lr=0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        for factor, errors in ((INF, (9.0, 9.0, 9.0)), (1.0, ())):
            guard.model.zero_grad()
            if errors:
                guard.conversion.tell(*errors)
            scaler.scale(guard.model(torch.ones(3, WIDTH))["loss"] * factor).backward()
            decision = guard.step(scaler=scaler)
            assert decision.skipped == (factor == INF)
            assert not decision.active.any()
            scaler.step(optimizer)
            scaler.update()
        assert guard.num_steps == 1
        assert "trimtab/quantizer/error_max" not in guard.metrics()


def test_metrics_say_what_is_known_of_the_latest_step():
    with trimtab.attach(build(), Told(), policy=POLICY) as guard:
        one_step(guard, 0.25, NAN, 0.75)
        metrics = {k: v for k, v in guard.metrics().items() if "/quantizer/" in k}
        assert metrics == {
            "trimtab/quantizer/error_max": 0.75,
            "trimtab/quantizer/error_mean": 0.5,
            "trimtab/quantizer/flushed_share_max": 0.375,
            "trimtab/quantizer/saturated_share_max": 0.1875,
            "trimtab/quantizer/amax_max": 6.0,
        }
        one_step(guard)
        assert not any("/quantizer/" in k for k in guard.metrics())


def test_with_detail_metrics_name_what_is_known_of_each_unit_too():
    with trimtab.attach(build(), Told(), policy=POLICY) as plain:
        one_step(plain, 0.25, NAN, 0.75)
        aggregates = {k: v for k, v in plain.metrics().items() if "/quantizer/" in k}
    with trimtab.attach(build(), Told(), policy=POLICY, monitor_detail=True) as guard:
        one_step(guard, 0.25, NAN, 0.75)
        metrics = {k: v for k, v in guard.metrics().items() if "/quantizer/" in k}
    of_units = {
        f"trimtab/quantizer/{unit}/{name}": error * factor
        for unit, error in ((RECOVERABLE[0], 0.25), (RECOVERABLE[2], 0.75))
        for name, factor in (("error", 1), ("flushed_share", 0.5), ("saturated_share", 0.25), ("amax", 8))
    }
    assert metrics == aggregates | of_units


def test_the_record_holds_them_and_replay_decides_by_them(tmp_path):
    errors = np.random.default_rng(0).random((30, 3)).astype(np.float32) / 2
    policy = robust(error_limit=0.25, max_active=1, lock_steps=2)
    with trimtab.attach(build(), Told(), policy=policy, record=tmp_path) as guard:
        decisions = [one_step(guard, *step_errors.tolist()) for step_errors in errors]
        decisions.append(one_step(guard))
        active = [d.active.tolist() for d in decisions]
    with open_run(tmp_path) as run:
        table, made = run.steps(), replay(run)
        assert run.config["policy"]["error_limit"] == 0.25
        np.testing.assert_array_equal(table.errors[:-1, 1:], errors)
        assert np.isnan(table.errors[:, 0]).all()
        assert np.isnan(table.errors[-1]).all()
        np.testing.assert_array_equal(table.flushed_share[:-1, 1:], errors / 2)
        np.testing.assert_array_equal(table.saturated_share[:-1, 1:], errors / 4)
        np.testing.assert_array_equal(table.amax[:-1, 1:], errors * 8)
        assert table.active.tolist() == active
        assert made.num_different == 0
        assert made.notes == ()
        assert table.active.any()
        assert replay(run, robust(max_active=1)).steps.active.sum() == 0


def test_a_resumed_guard_goes_on_as_an_uninterrupted_one():
    errors = np.random.default_rng(1).random((12, 3)).tolist()
    policy = Policy(alpha=1e6, beta=1e6, error_limit=0.6, max_active=1, lock_steps=3)
    with trimtab.attach(build(), Told(), policy=policy) as whole, trimtab.attach(build(), Told(), policy=policy) as cut:
        for step_errors in errors[:6]:
            one_step(whole, *step_errors)
        cut.load_state_dict(whole.state_dict())
        for step_errors in errors[6:]:
            a, b = one_step(whole, *step_errors), one_step(cut, *step_errors)
            for name in ("risk", "active", "lock"):
                np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def test_what_was_seen_before_a_load_is_not_of_the_step_after_it():
    with trimtab.attach(build(), Told(), policy=POLICY) as guard:
        state = guard.state_dict()
        guard.conversion.tell(9.0, 9.0, 9.0)
        guard.load_state_dict(state)
        assert not one_step(guard).active.any()


class TestWhenTheyAreObserved:
    @pytest.mark.parametrize(
        ("policy", "setting", "shadow"),
        [
            (Policy(), None, None),
            (Policy(), False, None),
            (Policy(), True, False),
            (Policy(error_limit=0.3), None, True),
            (Policy(error_limit=0.3), True, True),
            (MatchedRandom([1], seed=0, scores=Policy(error_limit=0.3)), None, True),
        ],
    )
    def test_if_the_policy_judges_errors_or_the_user_asks(self, policy, setting, shadow):
        with trimtab.attach(build(), Told(), policy=policy, quantizer_stats=setting) as guard:
            assert guard.conversion.shadow is shadow
            one_step(guard, 0.5, 0.5, 0.5)
            assert ("trimtab/quantizer/error_max" in guard.metrics()) == (shadow is not None)

    def test_without_a_limit_they_are_recorded_and_decide_nothing(self, tmp_path):
        with trimtab.attach(build(), Told(), policy=Policy(), quantizer_stats=True, record=tmp_path) as guard:
            assert not one_step(guard, 9.0, 9.0, 9.0).active.any()
        with open_run(tmp_path) as run:
            assert run.steps().errors[0, 1:].tolist() == [9.0] * 3
            assert replay(run, POLICY).steps.active[0].tolist() == [False, False, False, True]

    def test_a_limit_that_nobody_observes_for_is_refused(self):
        model = build()
        for recipe, setting, message in (
            (Told(), False, r"^quantizer_stats=False: .*error_limit=0\.25"),
            (None, None, r"^recipe=None: the policy's error_limit=0\.25"),
            (Blind(), None, r"^recipe='blind': the policy's error_limit=0\.25"),
        ):
            with pytest.raises(ConfigError, match=message) as caught:
                trimtab.attach(model, recipe, policy=POLICY, quantizer_stats=setting)
            assert caught.value.remedy.endswith(".")
        with pytest.raises(ConfigError, match=r"^recipe='blind': quantizer_stats=True"):
            trimtab.attach(model, Blind(), quantizer_stats=True)

    def test_a_refusal_leaves_nothing_on_the_model(self):
        model, recipe = build(), Blind()
        with pytest.raises(ConfigError):
            trimtab.attach(model, recipe, policy=POLICY)
        assert recipe.made.undone
        assert not model._forward_hooks
        trimtab.attach(model, Told(), policy=POLICY).detach()

    def test_a_recipe_that_cannot_tell_is_fine_while_nobody_asks(self):
        with trimtab.attach(build(), Blind(), policy=Policy()) as guard:
            backward(guard.model)
            assert guard.step().step == 1


class TestTooManyForLong:
    def test_it_is_said_once(self):
        with trimtab.attach(build(), Told(), policy=POLICY) as guard, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(1, LONG_STEPS + 20):
                one_step(guard, 0.5, 0.1, 0.4)
                guard.resolve()
                assert len(caught) == (step >= LONG_STEPS)
        assert [w.category for w in caught] == [TrimtabWarning]
        assert "a finer scale or a wider format" in str(caught[0].message)

    def test_as_many_units_as_the_budget_are_no_reason(self):
        with trimtab.attach(build(), Told(), policy=POLICY) as guard:
            for _ in range(LONG_STEPS + 20):
                one_step(guard, 0.5, 0.1, 0.2)


# With this one the largest magnitudes alone decide; the first of a unit is what its later ones are compared with.
BY_AMAX = Policy(alpha=1e6, beta=1e6, amax_limit=12.0, max_active=1, lock_steps=0)


class TestAmaxes:
    def test_a_unit_whose_amax_jumps_is_routed_and_one_that_was_always_large_is_not(self):
        with trimtab.attach(build(), Told(), policy=BY_AMAX) as guard:
            assert guard.conversion.shadow
            for _ in range(3):
                assert not one_step(guard, 0.1, 5.0, 0.1).active.any()
            decision = one_step(guard, 2.0, 5.0, 0.1)
            assert decision.reasons == ("none", "amax", "none", "none")
            assert guard.active == RECOVERABLE[:1]
            assert one_step(guard, 2.0, 5.0, 0.1).active.any()  # it lasts, and does not become the mean at once
            assert not one_step(guard, 0.1, 5.0, 0.1).active.any()

    def test_a_broken_operand_is_routed_at_once_and_is_not_what_later_ones_are_compared_with(self):
        with trimtab.attach(build(), Told(), policy=BY_AMAX) as guard:
            assert one_step(guard, 0.1, INF, 0.1).active.tolist() == [False, False, True, False]
            assert not one_step(guard, 0.1, 0.1, 0.1).active.any()
            assert one_step(guard, 0.1, 2.0, NAN).active.tolist() == [False, False, True, False]

    def test_the_record_holds_them_and_replay_decides_by_them_across_a_resume(self, tmp_path):
        told = np.random.default_rng(0).lognormal(0, 1.5, (40, 3)).tolist()
        policy = robust(max_active=1, lock_steps=2, burn_in_steps=3, act_from_step=5, amax_limit=4.0)
        with trimtab.attach(build(), Told(), policy=policy, record=tmp_path) as guard:
            for values in told[:25]:
                one_step(guard, *values)
                if guard.num_steps == 20:
                    state = guard.state_dict()
        with trimtab.attach(build(), Told(), policy=policy, record=tmp_path) as guard:
            guard.load_state_dict(state)
            reasons = {reason for values in told[20:] for reason in one_step(guard, *values).reasons}
        assert "amax" in reasons
        with open_run(tmp_path) as run:
            made, table = replay(run), run.steps()
            assert run.config["policy"]["amax_limit"] == 4.0
            assert table.step.tolist() == list(range(1, 41))
            assert made.num_different == 0
            assert made.notes == ()
            np.testing.assert_array_equal(made.steps.reason, table.reason)
            assert replay(run, robust(max_active=1, lock_steps=2, burn_in_steps=3, act_from_step=5)).num_different > 0

    def test_quantizers_are_observed_for_them_and_a_limit_that_nobody_observes_for_is_refused(self):
        policy = MatchedRandom([1], seed=0, scores=BY_AMAX)
        with trimtab.attach(build(), Told(), policy=policy) as guard:
            assert guard.conversion.shadow
        for recipe, setting, message in (
            (Told(), False, r"^quantizer_stats=False: the policy's amax_limit=12\.0 judges"),
            (None, None, r"^recipe=None: the policy's amax_limit=12\.0 needs"),
            (Blind(), None, r"^recipe='blind': the policy's amax_limit=12\.0 needs"),
        ):
            with pytest.raises(ConfigError, match=message):
                trimtab.attach(build(), recipe, policy=policy, quantizer_stats=setting)

    def test_more_units_than_the_budget_for_long_are_told_once(self):
        with trimtab.attach(build(), Told(), policy=BY_AMAX) as guard, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            one_step(guard, 0.1, 0.1, 0.1)
            for step in range(1, LONG_STEPS + 20):
                one_step(guard, 90.0, 0.1, 90.0)
                guard.resolve()
                assert len(caught) == (step >= LONG_STEPS)
        assert "2 units are above amax_limit=12, and" in str(caught[0].message)

    def test_without_a_limit_a_controller_that_takes_no_amaxes_is_asked_for_none(self):
        class Older:
            """A policy of before amaxes."""

            def start(self, units: Sequence[str], recoverable: Sequence[bool]) -> Any:
                controller = Policy(error_limit=0.25).start(units, recoverable)
                update = controller.update
                controller.update = lambda norms, errors=None, risks=None: update(norms, errors, risks)
                return controller

            def to_dict(self) -> dict[str, Any]:
                return {"kind": "older"}

        with trimtab.attach(build(), Told(), policy=Older(), quantizer_stats=True) as guard:
            guard.raise_risk([UNITS[1]])
            assert one_step(guard, 0.1, 0.1, 0.1).reasons[1] == "raised"

    @pytest.mark.filterwarnings("ignore:guard.step was called twice")
    def test_channels_that_grow_in_a_run_on_4_bit_activations_are_seen_on_both_paths_while_they_last(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
        factor = 1.0

        def enlarge(module: nn.Module, args: tuple[Tensor]) -> Tensor:
            scale = torch.ones(32)
            scale[:2] = factor
            return args[0] * scale

        model[2].register_forward_pre_hook(enlarge)
        active, reasons = [], set()
        units = lambda m, fqn: isinstance(m, nn.Linear)  # noqa: E731
        with trimtab.attach(model, SavedActivations(4, 8), policy=BY_AMAX, units=units) as guard:
            for step in range(12):
                factor = 40.0 if 5 <= step < 9 else 1.0
                model.zero_grad()
                model(torch.randn(16, 32)).square().mean().backward()
                reasons |= set(guard.step().reasons)
                active.append(guard.active)
        assert active == [()] * 5 + [("2",)] * 4 + [()] * 3
        assert reasons == {"none", "amax"}


# Several ranks

# What each rank sees, step after step; None is a rank that has seen nothing, as one whose experts had no tokens.
SEEN: list[list[tuple[float, ...] | None]] = [
    [(0.5, 0.125, NAN), (0.25, 0.375, NAN)],
    [None, (0.125, 0.5, 0.25)],
    [(NAN, 0.25, 0.5), (0.25, NAN, INF)],
    [None, None],
]
AGREED = [[0.5, 0.375, NAN], [0.125, 0.5, 0.25], [0.25, 0.25, INF], [NAN] * 3]


def train(model: nn.Module, rank: int, policy: Policy, folder: Path) -> dict[str, Any]:
    num_reductions = [0]
    original = dist.all_reduce

    def counting(*args: Any, **kwargs: Any) -> Any:
        num_reductions[0] += 1
        return original(*args, **kwargs)

    decisions, per_step = [], []
    with trimtab.attach(model, Told(), policy=policy, record=folder / "run") as guard:
        for seen in SEEN:
            model.zero_grad()
            model(torch.full((3, WIDTH), 1.0 + rank))["loss"].backward()
            if seen[rank] is not None:
                guard.conversion.tell(*seen[rank])
            dist.all_reduce, num_reductions[0] = counting, 0
            try:
                decision = guard.step()
            finally:
                dist.all_reduce = original
            per_step.append(num_reductions[0])
            decisions.append([np.asarray(x).tolist() for x in (decision.risk, decision.active)])
        return {"decisions": decisions, "reductions": per_step, "metrics": guard.metrics()}


def scenario_ddp(rank: int, folder: Path) -> dict[str, Any]:
    return train(nn.parallel.DistributedDataParallel(build()), rank, POLICY, folder)


def scenario_ddp_damping(rank: int, folder: Path) -> dict[str, Any]:
    policy = Policy(alpha=1e6, beta=1e6, error_limit=0.25, max_active=1, lock_steps=0, damping=True)
    return train(nn.parallel.DistributedDataParallel(build()), rank, policy, folder)


def scenario_fsdp(rank: int, folder: Path) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    model = build()
    for layer in model.layers:
        for name in ("q_proj", "o_proj"):
            fully_shard(layer[name])
    return train(fully_shard(model), rank, POLICY, folder)


def scenario_fsdp_replicas(rank: int, folder: Path) -> dict[str, Any]:
    """Replicas of one shard each: they saw different data, although nothing is sharded between them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (NUM_RANKS, 1), mesh_dim_names=("replicas", "shards"))
    return train(fully_shard(build(), mesh=mesh), rank, POLICY, folder)


@pytest.fixture(scope="module")
def folder(start_ranks: Callable[[str, int], Path]) -> Path:
    """What the ranks left behind: all scenarios in one start, for starting takes longest."""
    return start_ranks(__file__, NUM_RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [name[len("scenario_") :] for name in globals() if name.startswith("scenario_")])
def test_all_ranks_take_the_largest_that_any_of_them_has_seen_and_decide_alike(scenario, folder):
    first, second = (torch.load(folder / scenario / f"{rank}.pt", weights_only=False) for rank in range(NUM_RANKS))
    assert "error" not in first, first["error"]
    assert "error" not in second, second["error"]
    assert repr(first["decisions"]) == repr(second["decisions"])
    assert first["metrics"] == second["metrics"]
    wanted = [[False, True, False, False], [False, False, True, False], [False, False, False, True], [False] * 4]
    assert [active for _, active in first["decisions"]] == wanted
    with open_run(folder / scenario / "run") as run:
        table = run.steps()
        np.testing.assert_array_equal(table.errors[:, 1:], AGREED)
        np.testing.assert_array_equal(table.amax[:, 1:], np.array(AGREED) * 8)
        assert replay(run).num_different == 0
    # The only collective of a step, or the second one where the norms of shards are summed.
    for result in (first, second):
        assert result["reductions"] == [2 if scenario.startswith("fsdp") else 1] * len(SEEN)


def main(rank: int, folder: Path) -> None:
    warnings.simplefilter("error", trimtab.TrimtabWarning)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=NUM_RANKS)
    for name, scenario in [(n[len("scenario_") :], f) for n, f in globals().items() if n.startswith("scenario_")]:
        place = folder / name
        place.mkdir(exist_ok=True)
        try:
            result = scenario(rank, place)
        except Exception:
            result = {"error": f"rank {rank}: {traceback.format_exc()}"}
        torch.save(result, place / f"{rank}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
