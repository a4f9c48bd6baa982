"""Four ranks on a mesh of two dimensions. This file is also the script that each rank runs."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import trimtab
from trimtab.errors import ConfigError
from trimtab.monitors import GradientNorms
from trimtab.monitors.sharded import sharded_norms
from trimtab.precision import SavedActivations, find_units

NUM_RANKS, WIDTH, HIDDEN = 4, 16, 32
EPS = torch.finfo(torch.float32).eps


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.gate_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.gate_proj(x)) * self.up(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(seed: int) -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed))


def make_mesh(*names: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2,) * len(names) if len(names) > 1 else (NUM_RANKS,), mesh_dim_names=names)


def tensor_parallel(model: Net, mesh: Any) -> Net:
    """The bias of ``down`` stays whole on every rank of the dimension, as a DTensor all the same."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for layer in model.layers:
        parallelize_module(
            layer,
            mesh,
            {
                "up": ColwiseParallel(use_local_output=False),
                "gate_proj": ColwiseParallel(use_local_output=False),
                "down": RowwiseParallel(),
            },
        )
    return model


def shard(model: Net, mesh: Any) -> Net:
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def backward(model: nn.Module, seed: int) -> None:
    model.zero_grad()
    model(batch(seed)).square().sum().backward()


def full(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def full_grads(model: nn.Module) -> dict[str, Tensor]:
    return {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def norms_and_truth(model: nn.Module) -> dict[str, Any]:
    norms = GradientNorms(model, find_units(model))
    reading = norms.read()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return {
        "norms": reading.norms.tolist(),
        "truth": [full(g).norm().item() for g in grads],
        "sizes": [g.numel() for g in grads],
        "placements": [str(g.placements) for g in grads],
    }


def scenario_fsdp_on_tensor_parallel(rank: int) -> dict[str, Any]:
    mesh = make_mesh("dp", "tp")
    model = shard(tensor_parallel(build(), mesh["tp"]), mesh["dp"])
    backward(model, mesh.get_local_rank("dp"))
    with pytest.raises(ConfigError, match="sharded by tensor parallelism"):
        trimtab.attach(model, SavedActivations())
    return norms_and_truth(model)


def scenario_tensor_parallel(rank: int) -> dict[str, Any]:
    model = tensor_parallel(build(), make_mesh("tp"))
    backward(model, 0)
    with pytest.raises(ConfigError, match="sharded by tensor parallelism"):
        trimtab.attach(model, SavedActivations())
    with trimtab.attach(model) as guard:
        return norms_and_truth(model) | {"total": full(guard.step(max_norm=1.0).grad_norm).item()}


def scenario_hsdp(rank: int) -> dict[str, Any]:
    model = shard(build(), make_mesh("replicate", "shard"))
    backward(model, rank)
    return norms_and_truth(model)


def scenario_pending_sums(rank: int) -> dict[str, Any]:
    """Gradients of which each rank of a dimension still holds a summand."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = make_mesh("a", "b")
    placements = [(Partial(), Shard(0)), (Shard(1), Partial()), (Partial(), Partial()), (Replicate(), Shard(0))]
    tensors: list[Any] = [DTensor.from_local(batch(rank if p[0] != Replicate() else 9), mesh, p) for p in placements]
    return {
        "norms": sharded_norms(tensors).tolist(),
        "truth": [full(t).norm().item() for t in tensors],
        "sizes": [t.numel() for t in tensors],
    }


def scenario_hsdp_saved_activations(rank: int) -> dict[str, Any]:
    """The gradients of a converted model, and those of the same model whole on one rank, rank by rank."""
    whole = build()
    grads = []
    with trimtab.attach(whole, SavedActivations()):
        for r in range(NUM_RANKS):
            backward(whole, r)
            grads.append(full_grads(whole))
    model = shard(build(), make_mesh("replicate", "shard"))
    with trimtab.attach(model, SavedActivations()) as guard:
        assert guard.conversion is not None
        backward(model, rank)
        return {"converted": len(guard.conversion.units), "grads": full_grads(model), "alone": grads}


def scenario_tensor_parallel_after_conversion(rank: int) -> dict[str, Any]:
    mesh = make_mesh("tp")
    plain = tensor_parallel(build(), mesh)
    model = build()
    with trimtab.attach(model, SavedActivations()):
        for m in (plain, tensor_parallel(model, mesh)):
            backward(m, 0)
    return {"grads": full_grads(model), "plain": full_grads(plain)}


@pytest.fixture(scope="module")
def folder(start_ranks: Callable[[str, int], Path]) -> Path:
    """What the ranks left behind: all scenarios in one start, for starting takes longest."""
    return start_ranks(__file__, NUM_RANKS)


def results_of(scenario: str, folder: Path) -> list[dict[str, Any]]:
    results = [torch.load(folder / f"{scenario}.{rank}.pt", weights_only=False) for rank in range(NUM_RANKS)]
    assert not any("error" in result for result in results), "\n".join(r.get("error", "") for r in results)
    return results


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["fsdp_on_tensor_parallel", "tensor_parallel", "hsdp", "pending_sums"])
def test_norms_on_any_mesh_are_those_of_the_full_tensors_and_equal_on_every_rank(scenario, folder):
    results = results_of(scenario, folder)
    assert all(result["norms"] == results[0]["norms"] for result in results)
    for norm, truth, size in zip(*(results[0][key] for key in ("norms", "truth", "sizes")), strict=True):
        # n squares added in float32 in any order: relative error below n * eps, halved by the root; in both norms.
        assert norm == pytest.approx(truth, rel=size * EPS, abs=0)
    if scenario == "fsdp_on_tensor_parallel":
        assert any("StridedShard" in placements for placements in results[0]["placements"])
    if scenario == "tensor_parallel":
        assert len({result["total"] for result in results}) == 1
        truth = torch.tensor(results[0]["truth"]).norm().item()
        assert results[0]["total"] == pytest.approx(truth, rel=2 * WIDTH * HIDDEN * EPS, abs=0)


@pytest.mark.slow
def test_a_hybrid_sharded_model_is_converted_and_has_the_gradients_of_a_whole_converted_one(folder):
    for result in results_of("hsdp_saved_activations", folder):
        assert result["converted"] == 6
        for name, grad in result["grads"].items():
            parts = torch.stack([grads[name] for grads in result["alone"]])
            # The summands are equal bit for bit; three sums and up to two divisions round once each.
            bound = 5 * EPS * parts.abs().mean(0).max().item()
            torch.testing.assert_close(grad, parts.mean(0), rtol=0, atol=bound)


@pytest.mark.slow
def test_tensor_parallelism_that_comes_after_conversion_gets_the_plain_gradients(folder):
    for result in results_of("tensor_parallel_after_conversion", folder):
        assert result["grads"].keys() == result["plain"].keys()
        assert all(torch.equal(result["grads"][n], result["plain"][n]) for n in result["plain"])


def main(rank: int, folder: Path) -> None:
    warnings.simplefilter("error", trimtab.TrimtabWarning)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=NUM_RANKS)
    for name, scenario in [(n[len("scenario_") :], f) for n, f in globals().items() if n.startswith("scenario_")]:
        try:
            result = scenario(rank)
        except Exception:
            result = {"error": f"rank {rank}: {traceback.format_exc()}"}
        torch.save(result, folder / f"{name}.{rank}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
