"""Four ranks on a mesh of two dimensions. This file is also the script that each rank runs."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
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


class Experts(nn.Module):
    """Stacked experts of which every forward uses all but number 1."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(num_experts, 4, 6))
        self.down = nn.Parameter(torch.randn(num_experts, 6, 4))

    def forward(self, x: Tensor) -> Tensor:
        for e in range(len(self.up)):
            x = x if e == 1 else x + torch.tanh(x @ self.up[e]) @ self.down[e]
        return x


def mixture(num_experts: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Experts(num_experts), nn.Linear(4, 4))


def expert_norms(model: nn.Module) -> dict[str, Any]:
    """The norms of all units, and those of the full gradients' rows."""
    norms = GradientNorms(model, find_units(model))
    reading = norms.read()
    found = norms.unit_norms(reading.indices, reading.norms.numpy())
    grads = full_grads(model)
    truth = []
    for unit in norms.units:
        rows = [
            g if unit.expert is None else g[unit.expert] for n, g in grads.items() if n.startswith(unit.module_names)
        ]
        truth.append(sum(g.double().square().sum().item() for g in rows) ** 0.5)
    return {"norms": found.tolist(), "truth": truth, "units": [u.name for u in norms.units]}


def scenario_experts_by_fsdp(rank: int) -> dict[str, Any]:
    """Experts that divide evenly over the ranks, unevenly, and such that some rank holds none."""
    found = {}
    for num_experts in (4, 5, 6, 3):
        model = shard_all(mixture(num_experts), make_mesh("dp"))
        model(torch.randn(7, 4, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
        found[num_experts] = expert_norms(model)
    model = shard_all(mixture(5), make_mesh("replicate", "shard"))
    model(torch.randn(7, 4, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
    return found | {"hsdp": expert_norms(model)}


def shard_all(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def scenario_mixtral_by_fsdp(rank: int) -> dict[str, Any]:
    """The experts of a Mixtral on two ranks, twice over, and those of the same model on one."""
    from torch.distributed.fsdp import fully_shard
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = MixtralConfig(vocab_size=20, num_hidden_layers=2, num_local_experts=5, **sizes)
    tokens = torch.tensor([[3, 4, 5, 3]])
    found = {}
    for name in ("whole", "sharded"):
        torch.manual_seed(0)
        model = MixtralForCausalLM(config)
        if name == "sharded":
            mesh = make_mesh("replicate", "shard")
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        with trimtab.attach(model) as guard:
            model(input_ids=tokens, labels=tokens).loss.backward()
            found[name] = expert_norms(model)["norms"]
            found[f"{name} unobserved"] = guard.step().num_unobserved
    return found


def placed_every_way(bad: bool = False) -> list[tuple[str, Any]]:
    """A stacked gradient under many placements; where a mesh dimension holds summands, all of them are equal."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = make_mesh("a", "b")
    whole = torch.randn(5, 3, 6, generator=torch.Generator().manual_seed(3))
    whole[2] = 0.0
    if bad:
        whole[4, 1, 2] = float("nan")
    ways: list[tuple[Any, Any]] = [
        (a, b) for a in (Shard(0), Shard(1), Shard(2), Replicate()) for b in (Shard(0), Shard(2), Replicate())
    ]
    placed = [(str(way), distribute_tensor(whole, mesh, way)) for way in ways]
    pending = [
        (str(way), DTensor.from_local(whole / 2, mesh, way))
        for way in ((Partial(), Replicate()), (Replicate(), Partial()))
    ]
    return [*placed, *pending]


def scenario_experts_in_every_placement(rank: int) -> dict[str, Any]:
    found = {}
    for way, tensor in placed_every_way():
        norms = sharded_norms([tensor, torch.ones(4)], [0])
        truth = full(tensor)
        found[way] = {
            "norms": norms.tolist(),
            "truth": [truth.norm().item(), 2.0, *truth.flatten(1).norm(dim=1).tolist()],
        }
    return found


def damped(tensor: Any) -> dict[str, Tensor]:
    """The full gradient after damping experts 0 and 3 and removing 4, which has failed; and what it is to be."""
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ParameterDict({"w": nn.Parameter(torch.zeros_like(tensor))})])})
    norms = GradientNorms(model, find_units(model))
    expected = full(tensor)
    model.layers[0].w.grad = tensor
    scale = torch.ones(len(expected))
    scale[0], scale[3], scale[4] = 0.5, 0.25, 0.0
    reading = norms.read()
    norms.damp(reading, scale.double().numpy())
    renewed = norms.read().norms
    return {
        "grad": full(tensor),
        "expected": (expected * scale[:, None, None]).nan_to_num(nan=0.0),
        "norms": reading.norms,
        "renewed": renewed,
    }


def scenario_damped_experts(rank: int) -> dict[str, Any]:
    return {way: damped(tensor) for way, tensor in placed_every_way(bad=True)}


class Squares(nn.Module):
    """Its gradient is twice its weight; works on DTensors as they are."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(torch.randn(num_experts, 4, 6))

    def forward(self) -> Tensor:
        return (self.up * self.up).sum()


def scenario_interleaved_experts(rank: int) -> dict[str, Any]:
    """Experts that expert parallelism has spread over one dimension before FSDP2 spreads them over another."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = make_mesh("dp", "ep")
    model = nn.ModuleDict({"layers": nn.ModuleList([Squares(8), Squares(8), Squares(4)])})
    for layer in model.layers:
        layer.up = nn.Parameter(distribute_tensor(layer.up.detach(), mesh["ep"], [Shard(0)]))
        fully_shard(layer, mesh=mesh["dp"])
    for layer in model.layers:
        layer().full_tensor().backward()
    grad: Any = model.layers[0].up.grad
    found = expert_norms(model) | {"placements": str(grad.placements)}
    return found | {"damped": damped(grad)}


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


# An expert has at most 96 weights a parameter; as above.
EXPERT_REL = 96 * EPS


@pytest.mark.slow
def test_experts_spread_by_fsdp_have_the_norms_of_whole_ones_on_every_rank(folder):
    results = results_of("experts_by_fsdp", folder)
    assert all(result == results[0] for result in results)
    for num_experts, found in results[0].items():
        assert len(found["norms"]) == (5 if num_experts == "hsdp" else num_experts) + 1
        assert found["norms"] == pytest.approx(found["truth"], rel=EXPERT_REL, abs=0)
        assert found["norms"][1] == 0.0
        assert min(found["norms"][:1] + found["norms"][2:]) > 0.0


@pytest.mark.slow
def test_a_mixtral_spread_over_two_ranks_has_the_expert_norms_of_one_process(folder):
    results = results_of("mixtral_by_fsdp", folder)
    assert all(result == results[0] for result in results)
    found = results[0]
    # Kernels sum in the same order on each rank; what differs are the orders of the sums that make the norms.
    assert found["sharded"] == pytest.approx(found["whole"], rel=EXPERT_REL, abs=0)
    assert found["sharded unobserved"] == found["whole unobserved"] == found["whole"].count(0.0) > 0


@pytest.mark.slow
def test_rows_in_every_placement_have_the_norms_of_the_full_tensor_on_every_rank(folder):
    results = results_of("experts_in_every_placement", folder)
    assert all(result == results[0] for result in results)
    for way, found in results[0].items():
        assert found["norms"] == pytest.approx(found["truth"], rel=EXPERT_REL, abs=0), way
        assert found["norms"][4] == 0.0


@pytest.mark.slow
def test_rows_that_lie_interleaved_over_the_ranks_are_put_in_order(folder):
    results = results_of("interleaved_experts", folder)
    assert all(result["norms"] == results[0]["norms"] for result in results)
    assert "StridedShard" in results[0]["placements"]
    assert results[0]["norms"] == pytest.approx(results[0]["truth"], rel=EXPERT_REL, abs=0)
    assert_damped(result["damped"] for result in results)


@pytest.mark.slow
def test_damping_an_expert_scales_its_rows_wherever_they_are(folder):
    results = results_of("damped_experts", folder)
    for way in results[0]:
        assert_damped(result[way] for result in results)


def assert_damped(results: Iterable[dict[str, Tensor]]) -> None:
    for found in results:
        assert torch.equal(found["grad"], found["expected"])
        assert torch.equal(found["norms"], found["renewed"])


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
