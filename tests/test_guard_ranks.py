"""Several ranks: same norms, same decisions, one writer. This file is also the script that each rank runs."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import trimtab
from trimtab.control import Policy
from trimtab.faults import StoredCopyBurst, StoredCopyFaults
from trimtab.precision import SavedActivations
from trimtab.trace import open_run, replay

NUM_RANKS, NUM_STEPS, WIDTH = 2, 8, 12
POLICY = Policy(alpha=1.05, beta=1.05, window_steps=2, max_active=1)
# Odd sizes, so that shards are uneven and one rank's can be empty.
BURST = StoredCopyBurst(unit="layers.0.o_proj", start_step=4, num_steps=2, factor=300.0, num_channels=3)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, 7)
        self.o_proj = nn.Linear(7, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.o_proj(torch.tanh(self.q_proj(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": self.head(x).square().mean()}


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def as_lists(decision: trimtab.Decision) -> list[Any]:
    return [np.asarray(x).tolist() for x in (decision.gnmr, decision.risk, decision.active, decision.lock)]


def whole(p: Tensor) -> Tensor:
    return (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()


def plain_step(model: nn.Module, step: int) -> None:
    """What all ranks together compute, on one."""
    loss = torch.stack([model(batch(step, r))["loss"] for r in range(NUM_RANKS)]).mean()
    loss.backward()


def train(model: nn.Module, guard: trimtab.Guard, rank: int, max_norm: float = 0.05) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    decisions, totals, grads, norms = [], [], [], []
    for step in range(1, NUM_STEPS + 1):
        model(batch(step, rank))["loss"].backward()
        reading = guard._norms.read()
        norms.append(guard._norms.unit_norms(reading.indices, reading.norms.numpy()).tolist())
        decision = guard.step(max_norm=max_norm)
        totals.append(whole(decision.grad_norm).item())
        grads.append([whole(p.grad) for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        decisions.append(as_lists(decision))
    return {
        "decisions": decisions,
        "totals": totals,
        "grads": grads,
        "norms": norms,
        "weights": [whole(p) for p in model.parameters()],
        "writes": guard._journal.writer is not None,
    }


def scenario_ddp(rank: int, folder: Path) -> dict[str, Any]:
    model = nn.parallel.DistributedDataParallel(build())
    with trimtab.attach(model, SavedActivations(), policy=POLICY, record=folder / "run") as guard:
        guard.inject(StoredCopyFaults([BURST]))
        return train(model, guard, rank)


def scenario_ddp_wrapped_after(rank: int, folder: Path) -> dict[str, Any]:
    inner = build()
    with trimtab.attach(inner, SavedActivations(), policy=POLICY) as guard:
        guard.inject(StoredCopyFaults([BURST]))
        return train(nn.parallel.DistributedDataParallel(inner), guard, rank)


def shard(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def count_collectives() -> Callable[[], int]:
    """Counts the all-reduces of ``GradientNorms.read`` until it is called."""
    calls, original = [], dist.all_reduce

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    dist.all_reduce = counting

    def stop() -> int:
        dist.all_reduce = original
        return len(calls)

    return stop


def scenario_fsdp_before(rank: int, folder: Path) -> dict[str, Any]:
    model = shard(build())
    collectives = count_collectives()
    with trimtab.attach(model, policy=POLICY, record=folder / "run") as guard:
        model(batch(0, rank))["loss"].backward()
        guard._norms.read()
        num_collectives = collectives()
        model.zero_grad()
        return train(model, guard, rank) | {"collectives": num_collectives}


def scenario_fsdp_after(rank: int, folder: Path) -> dict[str, Any]:
    model = build()
    with trimtab.attach(model, policy=POLICY) as guard:
        return train(shard(model), guard, rank)


def scenario_fsdp_after_a_step(rank: int, folder: Path) -> dict[str, Any]:
    """Sharded when the unsharded parameters have been read already, and still hold gradients."""
    model = build()
    with trimtab.attach(model, policy=POLICY) as guard:
        state = guard.state_dict()
        model(batch(0, rank))["loss"].backward()
        guard.step()
        guard.load_state_dict(state)
        return train(shard(model), guard, rank)


def scenario_fsdp_clip_of_torch(rank: int, folder: Path) -> dict[str, Any]:
    model, other = shard(build()), shard(build())
    result = {"same": [], "totals": []}
    with trimtab.attach(model) as guard:
        for step in range(1, 4):
            for m in (model, other):
                m.zero_grad()
                m(batch(step, rank))["loss"].backward()
            total = guard.step(max_norm=0.05).grad_norm
            expected = torch.nn.utils.clip_grad_norm_(other.parameters(), 0.05).full_tensor()
            result["totals"].append((whole(total).item(), expected.item()))
            pairs = zip(model.parameters(), other.parameters(), strict=True)
            result["same"].append(all(torch.equal(p.grad.to_local(), q.grad.to_local()) for p, q in pairs))
    return result


def scenario_fsdp_saved_activations(rank: int, folder: Path) -> dict[str, Any]:
    model = build()
    with trimtab.attach(shard(model), SavedActivations(), policy=POLICY) as guard:
        guard.inject(StoredCopyFaults([BURST]))
        return train(model, guard, rank)


def scenario_fsdp_saved_activations_after(rank: int, folder: Path) -> dict[str, Any]:
    model = build()
    with trimtab.attach(model, SavedActivations(), policy=POLICY) as guard:
        guard.inject(StoredCopyFaults([BURST]))
        return train(shard(model), guard, rank)


def scenario_fsdp_damping(rank: int, folder: Path) -> dict[str, Any]:
    """One rank's shard is not finite: the unit's gradient is gone on both."""
    model = shard(build())
    with trimtab.attach(model, policy=Policy(damping=True)) as guard:
        model(batch(1, rank))["loss"].backward()
        grad = model.layers[0].q_proj.weight.grad.to_local()
        if rank == 1:
            grad.fill_(torch.nan)
        decision = guard.step(max_norm=0.05)
        return {
            "failed": (np.asarray(decision.risk) == np.inf).tolist(),
            "total": whole(decision.grad_norm).item(),
            "grad": whole(model.layers[0].q_proj.weight.grad),
        }


@pytest.fixture(scope="module")
def folder(start_ranks: Callable[[str, int], Path]) -> Path:
    """What the ranks left behind: all scenarios in one start, for starting takes longest."""
    return start_ranks(__file__, NUM_RANKS)


def results_of(scenario: str, folder: Path) -> list[dict[str, Any]]:
    results = [torch.load(folder / scenario / f"{rank}.pt", weights_only=False) for rank in range(NUM_RANKS)]
    assert not any("error" in result for result in results), "\n".join(r.get("error", "") for r in results)
    return results


def on_one_rank(recipe: SavedActivations | None) -> dict[str, Any]:
    """The same training with the whole batch in one process."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    result: dict[str, Any] = {"norms": [], "totals": [], "decisions": []}
    with trimtab.attach(model, recipe, policy=POLICY) as guard:
        if recipe is not None:
            guard.inject(StoredCopyFaults([BURST]))
        for step in range(1, NUM_STEPS + 1):
            plain_step(model, step)
            reading = guard._norms.read()
            result["norms"].append(guard._norms.unit_norms(reading.indices, reading.norms.numpy()).tolist())
            decision = guard.step(max_norm=0.05)
            result["totals"].append(decision.grad_norm.item())
            result["decisions"].append(as_lists(decision))
            optimizer.step()
            optimizer.zero_grad()
    return result


# Of the gradients, at most 84 squares in float32 a parameter, and sums in another order before that.
ROUNDING = 84 * torch.finfo(torch.float32).eps


def assert_decided_as(result: dict[str, Any], alone: dict[str, Any]) -> None:
    """Equal up to rounding: norms of the first step, which training has not carried on yet, and every active set."""
    np.testing.assert_allclose(result["norms"][0], alone["norms"][0], rtol=ROUNDING)
    # No risk is so near to 1 that rounding could decide.
    assert min(abs(risk - 1) for fields in alone["decisions"] for risk in fields[1]) > 100 * ROUNDING
    assert [d[2] for d in result["decisions"]] == [d[2] for d in alone["decisions"]]
    assert any(any(d[2]) for d in result["decisions"])


def assert_equal_on_both(results: list[dict[str, Any]]) -> None:
    first, second = results
    for key in ("decisions", "totals", "norms"):
        assert repr(first[key]) == repr(second[key])
    # Something was decided.
    assert any(risk > 1 for fields in first["decisions"] for risk in fields[1])
    for a, b in zip(first["weights"], second["weights"], strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["ddp", "ddp_wrapped_after"])
def test_ddp_decides_equally_on_both_ranks_and_as_one_rank_with_the_whole_batch(scenario, folder):
    results = results_of(scenario, folder)
    assert_equal_on_both(results)
    assert_decided_as(results[0], on_one_rank(SavedActivations()))
    if scenario == "ddp":
        assert [r["writes"] for r in results] == [True, False]
        with open_run(folder / scenario / "run") as run:
            assert len(run.segments) == 1
            assert run.finished
            assert run.steps().active.tolist() == [d[2] for d in results[0]["decisions"]]
            assert replay(run).num_different == 0


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["fsdp_before", "fsdp_after", "fsdp_after_a_step"])
def test_norms_of_a_fully_sharded_model_are_those_of_the_whole_one(scenario, folder):
    results = results_of(scenario, folder)
    assert_equal_on_both(results)
    alone = on_one_rank(None)
    np.testing.assert_allclose(results[0]["norms"][0], alone["norms"][0], rtol=ROUNDING)
    np.testing.assert_allclose(results[0]["totals"][0], alone["totals"][0], rtol=ROUNDING)
    if scenario == "fsdp_before":
        assert [r["collectives"] for r in results] == [1, 1]
        with open_run(folder / scenario / "run") as run:
            assert run.steps().norms.tolist() == results[0]["norms"]


@pytest.mark.slow
def test_a_fully_sharded_model_is_clipped_as_by_torch(folder):
    for result in results_of("fsdp_clip_of_torch", folder):
        assert all(result["same"])
        assert all(mine == theirs for mine, theirs in result["totals"])


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["fsdp_saved_activations", "fsdp_saved_activations_after"])
def test_saved_activations_work_under_fully_shard(scenario, folder):
    results = results_of(scenario, folder)
    assert_equal_on_both(results)
    assert_decided_as(results[0], on_one_rank(SavedActivations()))


@pytest.mark.slow
def test_a_shard_that_is_not_finite_on_one_rank_fails_its_unit_on_both(folder):
    for result in results_of("fsdp_damping", folder):
        assert result["failed"] == [True, False, False, False]
        assert not result["grad"].any()
        assert np.isfinite(result["total"])


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
