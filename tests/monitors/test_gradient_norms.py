from __future__ import annotations

import copy
import math
import sys

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trimtab.monitors import GradientNorms, gradient_norms
from trimtab.precision.units import find_units


class Block(nn.Module):
    """Projections with biases, a norm, and parameters of many sizes."""

    def __init__(self, width: int = 8, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"q_proj": nn.Linear(width, width), "up_proj": nn.Linear(width, 2 * width, bias=False)})
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 3)
        self.to(dtype)


def fill(model: nn.Module, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if p.requires_grad:
            p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)


def grads(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def unit_norms(norms: GradientNorms) -> dict[str, float]:
    reading = norms.read()
    values = norms.unit_norms(reading.indices, reading.norms.numpy())
    return dict(zip([u.name for u in norms.units], values.tolist(), strict=True))


def assert_same_clip(model: nn.Module, max_norm: float) -> None:
    """Ours and torch's clip of equal gradients agree in every bit of the total and of what is left."""
    other = copy.deepcopy(model)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    norms = GradientNorms(model, ())
    total = norms.clip(norms.read(), max_norm)
    expected = torch.nn.utils.clip_grad_norm_(other.parameters(), max_norm)
    assert total.dtype == expected.dtype
    torch.testing.assert_close(total, expected, rtol=0, atol=0, equal_nan=True)
    for mine, theirs in zip(grads(model), grads(other), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def random_model(generator: torch.Generator) -> nn.Module:
    """Up to sixty parameters, most of them tiny, in an order of its own."""
    model = nn.Module()
    count = int(torch.randint(1, 60, (), generator=generator))
    for i in range(count):
        size = (
            int(torch.randint(1, 6, (), generator=generator))
            if i % 5
            else int(torch.randint(1, 3000, (), generator=generator))
        )
        model.register_parameter(f"p{i}", nn.Parameter(torch.zeros(size)))
    return model


def test_float32_clipping_is_bit_for_bit_that_of_torch_over_many_random_models():
    generator = torch.Generator().manual_seed(0)
    for trial in range(300):
        model = random_model(generator)
        for p in model.parameters():
            if torch.rand((), generator=generator) > 0.1:
                p.grad = torch.randn(p.shape, generator=generator) * 10 ** torch.randn((), generator=generator)
        if any(p.grad is not None for p in model.parameters()):
            assert_same_clip(model, max_norm=10 ** (trial % 5 - 2))


@pytest.mark.parametrize("max_norm", [0.0, 1e-30, 0.5, 1e30, math.inf])
@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def test_every_bound_and_every_kind_of_gradient_clips_as_torch_does(max_norm, bad):
    model = Block()
    fill(model, 0)
    if bad is not None:
        model.layers[0]["q_proj"].weight.grad[0, 0] = bad
    assert_same_clip(model, max_norm)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_clip_as_torch_does(dtype):
    model = Block(dtype=dtype)
    fill(model, 1)
    assert_same_clip(model, 0.5)


def test_mixed_dtypes_clip_as_torch_does():
    model = Block()
    model.layers[0].to(torch.bfloat16)
    model.head.to(torch.float64)
    fill(model, 2)
    assert_same_clip(model, 0.5)


def test_frozen_parameters_and_missing_gradients_are_left_out():
    model = Block()
    model.layers[0]["q_proj"].weight.requires_grad_(False)
    model.norm.requires_grad_(False)
    fill(model, 3)
    assert_same_clip(model, 0.5)
    model.layers[1]["up_proj"].weight.grad = None
    assert_same_clip(model, 0.5)
    norms = unit_norms(GradientNorms(model, find_units(model)))
    assert norms["layers.1.up_proj"] == 0.0
    assert norms["layers.0.q_proj"] == model.layers[0]["q_proj"].bias.grad.norm().item()


def test_without_any_gradient_every_unit_is_unobserved_and_the_total_is_0():
    model = Block()
    norms = GradientNorms(model, find_units(model))
    assert norms.clip(norms.read(), 1.0).item() == 0.0
    assert set(unit_norms(norms).values()) == {0.0}


def test_a_unit_of_one_parameter_has_exactly_its_norm():
    generator = torch.Generator().manual_seed(4)
    model = Block()
    norms = GradientNorms(model, find_units(model))
    for _ in range(50):
        fill(model, int(torch.randint(10**6, (), generator=generator)))
        expected = torch.linalg.vector_norm(model.layers[0]["up_proj"].weight.grad).item()
        assert unit_norms(norms)["layers.0.up_proj"] == expected


def test_a_unit_of_several_parameters_has_the_root_of_their_squares():
    model = Block()
    fill(model, 5)
    linear = model.layers[1]["q_proj"]
    parts = [torch.linalg.vector_norm(p.grad).double() for p in linear.parameters()]
    expected = torch.stack(parts).square().sum().sqrt().item()
    # Squares, sum and root in float64, each rounded once: three halves of its epsilon, relative.
    assert unit_norms(GradientNorms(model, find_units(model)))["layers.1.q_proj"] == pytest.approx(
        expected, rel=1.5 * np.finfo(np.float64).eps, abs=0
    )


def test_a_unit_adds_squares_that_float32_could_not_hold():
    model = Block()
    linear = model.layers[0]["q_proj"]
    linear.weight.grad = torch.full((8, 8), 2e18)
    linear.bias.grad = torch.full((8,), 4e18)
    assert 64 * 2e18**2 + 8 * 4e18**2 > torch.finfo(torch.float32).max > 64 * 2e18**2
    assert math.isfinite(unit_norms(GradientNorms(model, find_units(model)))["layers.0.q_proj"])


def test_bf16_gradients_are_summed_in_float32():
    model = Block(width=64, dtype=torch.bfloat16)
    fill(model, 6)
    grad = model.layers[0]["up_proj"].weight.grad
    exact = grad.double().norm().item()
    # n squares added in float32 in any order: relative error below n * eps, halved by the root; bf16 alone has 2**-9.
    bound = grad.numel() * torch.finfo(torch.float32).eps / 2
    assert bound < 2**-9
    assert unit_norms(GradientNorms(model, find_units(model)))["layers.0.up_proj"] == pytest.approx(
        exact, rel=bound, abs=0
    )


def test_float64_gradients_keep_float64_norms():
    model = Block(dtype=torch.float64)
    for seed in range(50):
        fill(model, seed)
        expected = torch.linalg.vector_norm(model.layers[0]["up_proj"].weight.grad).item()
        assert unit_norms(GradientNorms(model, find_units(model)))["layers.0.up_proj"] == expected


def test_float16_gradients_near_their_largest_value_have_a_finite_norm():
    model = Block(dtype=torch.float16)
    for p in model.parameters():
        p.grad = torch.full_like(p, 6e4)
    assert all(math.isfinite(n) for n in unit_norms(GradientNorms(model, find_units(model))).values())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_gradients_are_read_and_clipped(dtype):
    model = nn.Sequential(nn.Linear(4, 4, dtype=dtype), nn.Linear(4, 2, dtype=dtype))
    model(torch.ones(3, 4, dtype=dtype)).abs().sum().backward()
    expected = (
        torch.linalg.vector_norm(model[1].weight.grad).item(),
        torch.linalg.vector_norm(model[1].bias.grad).item(),
    )
    assert unit_norms(GradientNorms(model, find_units(model)))["1"] == pytest.approx(
        math.hypot(*expected), rel=4 * np.finfo(np.float64).eps, abs=0
    )
    assert_same_clip(model, 0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_fails_only_its_own_unit(bad):
    model = Block()
    fill(model, 8)
    before = unit_norms(GradientNorms(model, find_units(model)))
    model.layers[1]["q_proj"].bias.grad[0] = bad
    after = unit_norms(GradientNorms(model, find_units(model)))
    assert not math.isfinite(after.pop("layers.1.q_proj"))
    before.pop("layers.1.q_proj")
    assert after == before


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4, sparse=True)
        self.layers = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, ids: Tensor) -> Tensor:
        return self.layers[0](self.embed(ids)).square().sum()


def test_a_sparse_gradient_counts_each_row_once_however_often_it_was_looked_up():
    torch.manual_seed(0)
    model = Sparse()
    ids = torch.tensor([1, 1, 7, 1])
    model(ids).backward()
    dense = copy.deepcopy(model)
    dense.zero_grad()
    dense.embed.sparse = False
    dense(ids).backward()
    norms = GradientNorms(model, find_units(model, ["embed", "layers.0"]))
    expected = torch.linalg.vector_norm(dense.embed.weight.grad).item()
    # At most three rows of four squares, added in another order than among the zeros of the dense gradient.
    assert unit_norms(norms)["embed"] == pytest.approx(expected, rel=12 * torch.finfo(torch.float32).eps, abs=0)


def test_sparse_gradients_clip_as_dense_ones_although_torch_itself_refuses():
    torch.manual_seed(0)
    model = Sparse()
    ids = torch.tensor([1, 1, 7, 1])
    model(ids).backward()
    dense = copy.deepcopy(model)
    dense.zero_grad()
    dense.embed.sparse = False
    dense(ids).backward()
    norms = GradientNorms(model, find_units(model))
    total = norms.clip(norms.read(), 0.1)
    expected = torch.nn.utils.clip_grad_norm_(dense.parameters(), 0.1)
    # float32 sums in another order: 12 squares of the embedding's rows, then one coefficient and one product.
    rel = 16 * torch.finfo(torch.float32).eps
    assert total.item() == pytest.approx(expected.item(), rel=rel, abs=0)
    torch.testing.assert_close(model.embed.weight.grad.to_dense(), dense.embed.weight.grad, rtol=rel, atol=0)
    torch.testing.assert_close(model.layers[0].weight.grad, dense.layers[0].weight.grad, rtol=rel, atol=0)


def test_a_tied_weight_is_counted_once_and_belongs_to_one_unit():
    model = Block()
    model.layers[1]["q_proj"].weight = model.layers[0]["q_proj"].weight
    fill(model, 9)
    units = find_units(model)
    assert [u.module_names for u in units if "q_proj" in u.name] == [("layers.0.q_proj", "layers.1.q_proj")]
    assert_same_clip(model, 0.5)
    tied = [model.layers[0]["q_proj"].weight, model.layers[0]["q_proj"].bias, model.layers[1]["q_proj"].bias]
    expected = math.sqrt(sum(p.grad.double().square().sum().item() for p in tied))
    # Each norm in float32 from at most 64 squares.
    assert unit_norms(GradientNorms(model, units))["layers.0.q_proj"] == pytest.approx(
        expected, rel=64 * torch.finfo(torch.float32).eps, abs=0
    )


@pytest.mark.parametrize("leave_old_gradients", [False, True])
def test_parameters_replaced_by_a_load_with_assign_are_found_again(leave_old_gradients):
    model = Block()
    norms = GradientNorms(model, find_units(model))
    fill(model, 10)
    unit_norms(norms)
    old = list(model.parameters())
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    if not leave_old_gradients:
        for p in old:
            p.grad = None
    fill(model, 11)
    assert unit_norms(norms) == unit_norms(GradientNorms(model, find_units(model)))
    assert {id(p) for p in norms.parameters} == {id(p) for p in model.parameters()}


def test_one_replaced_parameter_is_found_although_the_number_of_gradients_stays_the_same():
    model = Block()
    norms = GradientNorms(model, find_units(model))
    fill(model, 12)
    unit_norms(norms)
    model.layers[0]["up_proj"].weight = nn.Parameter(torch.zeros(16, 8))
    fill(model, 13)
    assert unit_norms(norms) == unit_norms(GradientNorms(model, find_units(model)))


def test_adapters_added_after_the_start_count_for_the_unit_they_were_added_to():
    model = Block()
    norms = GradientNorms(model, find_units(model))
    fill(model, 14)
    before = unit_norms(norms)["layers.0.up_proj"]
    up = model.layers[0]["up_proj"]
    up.adapter = nn.Sequential(nn.Linear(8, 2, bias=False), nn.Linear(2, 16, bias=False))
    up.weight.requires_grad_(False)
    fill(model, 14)
    up.weight.grad = None
    parts = [torch.linalg.vector_norm(layer.weight.grad).item() for layer in up.adapter]
    assert before != unit_norms(norms)["layers.0.up_proj"] == pytest.approx(math.hypot(*parts), rel=1e-15, abs=0)


def test_a_module_put_in_the_place_of_another_is_found_when_gradients_become_fewer():
    model = Block()
    norms = GradientNorms(model, ())
    fill(model, 16)
    norms.read()
    model.head = nn.Linear(8, 3)
    fill(model, 17)
    model.norm.zero_grad()
    norms.read()
    assert {id(p) for p in norms.parameters} == {id(p) for p in model.parameters()}


def test_gradients_that_come_and_go_look_nothing_up_again(monkeypatch):
    model = Block()
    norms = GradientNorms(model, find_units(model))
    monkeypatch.setattr(norms, "_collect", lambda: pytest.fail("the parameters are the same"))
    for seed in range(4):
        fill(model, seed)
        if seed % 2:
            model.layers[1].zero_grad()
        reading = norms.read()
        assert len(reading.indices) == len(grads(model))
        assert torch.equal(norms.total(reading), torch.nn.utils.get_total_norm(grads(model)))


def test_damping_scales_each_unit_zeroes_a_failed_one_and_renews_the_norms():
    model = Block()
    fill(model, 15)
    model.layers[0]["up_proj"].weight.grad[0, 0] = math.nan
    untouched = model.head.weight.grad.clone()
    quarter = model.layers[1]["q_proj"].weight.grad * 0.25
    norms = GradientNorms(model, find_units(model))
    reading = norms.read()
    scale = np.array([1.0, 0.0, 0.25, 1.0])
    assert [u.name for u in norms.units] == [
        "layers.0.q_proj",
        "layers.0.up_proj",
        "layers.1.q_proj",
        "layers.1.up_proj",
    ]
    norms.damp(reading, scale)
    assert not model.layers[0]["up_proj"].weight.grad.any()
    assert torch.equal(model.layers[1]["q_proj"].weight.grad, quarter)
    assert torch.equal(model.head.weight.grad, untouched)
    fresh = norms.read()
    assert torch.equal(fresh.norms, reading.norms)
    assert torch.equal(norms.total(reading), torch.nn.utils.get_total_norm(grads(model)))


class Experts(nn.Module):
    """Stacked weights of experts, with a bias each and a scale that belongs to none."""

    def __init__(self, num_experts: int = 5, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(num_experts, 6, 7, dtype=dtype))
        self.up_bias = nn.Parameter(torch.zeros(num_experts, 7, dtype=dtype))
        self.down = nn.Parameter(torch.zeros(num_experts, 7, 6, dtype=dtype))
        self.temperature = nn.Parameter(torch.zeros(num_experts, dtype=dtype))
        self.scale = nn.Parameter(torch.zeros((), dtype=dtype))


def mixture(dtype: torch.dtype = torch.float32) -> nn.Module:
    layers = [
        nn.ModuleDict(
            {"q": nn.Linear(6, 6, dtype=dtype), "experts": Experts(n, dtype), "o": nn.Linear(6, 6, dtype=dtype)}
        )
        for n in (5, 3)
    ]
    return nn.ModuleDict({"layers": nn.ModuleList(layers), "head": nn.Linear(6, 2, dtype=dtype)})


def expert_truth(model: nn.Module, layer: int, expert: int) -> float:
    """The norm of an expert's gradients, in float64."""
    experts = model.layers[layer]["experts"]
    rows = [getattr(experts, name).grad for name in ("up", "up_bias", "down", "temperature")]
    return math.sqrt(sum(g[expert].double().square().sum().item() for g in rows if g is not None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_norm_of_an_expert_is_that_of_its_rows(dtype):
    model = mixture(dtype)
    fill(model, 0)
    found = unit_norms(GradientNorms(model, find_units(model)))
    # At most 42 squares a row, in float32 or wider, in any order.
    rel = 42 * (torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)).eps
    for layer, num_experts in enumerate((5, 3)):
        for e in range(num_experts):
            truth = expert_truth(model, layer, e)
            assert found[f"layers.{layer}.experts.{e}"] == pytest.approx(truth, rel=rel, abs=0)


def test_the_norms_of_experts_change_no_bit_of_any_other_norm_or_of_clipping():
    model = mixture()
    fill(model, 1)
    norms, plain = GradientNorms(model, find_units(model)), GradientNorms(model, find_units(model, "block"))
    reading, without = norms.read(), plain.read()
    assert len(reading.norms) == len(reading.indices) + 4 * (5 + 3)
    assert torch.equal(reading.of_parameters, without.norms)
    assert torch.equal(norms.total(reading), torch.nn.utils.get_total_norm(grads(model)))
    other = copy.deepcopy(model)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        q.grad = p.grad.clone()
    total = norms.clip(reading, 0.5)
    assert torch.equal(total, torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5))
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_experts_without_tokens_have_norm_0_and_those_with_some_are_unchanged():
    model = mixture()
    fill(model, 2)
    before = unit_norms(GradientNorms(model, find_units(model)))
    for p in model.layers[0]["experts"].parameters():
        if p.dim():
            p.grad[2] = 0.0
    after = unit_norms(GradientNorms(model, find_units(model)))
    assert after.pop("layers.0.experts.2") == 0.0
    del before["layers.0.experts.2"]
    assert after == before


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_fails_only_its_own_expert(bad):
    model = mixture()
    fill(model, 3)
    before = unit_norms(GradientNorms(model, find_units(model)))
    model.layers[1]["experts"].down.grad[1, 0, 0] = bad
    after = unit_norms(GradientNorms(model, find_units(model)))
    assert not math.isfinite(after.pop("layers.1.experts.1"))
    del before["layers.1.experts.1"]
    assert after == before


def test_stacked_parameters_whose_gradients_come_and_go_keep_their_experts_apart():
    model = mixture()
    norms = GradientNorms(model, find_units(model))
    fill(model, 4)
    everything = unit_norms(norms)
    model.layers[0]["experts"].zero_grad()
    later = unit_norms(norms)
    assert [later[f"layers.0.experts.{e}"] for e in range(5)] == [0.0] * 5
    assert {n: v for n, v in later.items() if "0.experts" not in n} == {
        n: v for n, v in everything.items() if "0.experts" not in n
    }
    model.layers[1]["experts"].up.grad = None
    for e in range(3):
        assert unit_norms(norms)[f"layers.1.experts.{e}"] == pytest.approx(
            expert_truth(model, 1, e), rel=42 * torch.finfo(torch.float32).eps, abs=0
        )


def test_one_expert_may_be_watched_alone():
    model = mixture()
    fill(model, 5)
    everything = unit_norms(GradientNorms(model, find_units(model)))
    alone = GradientNorms(model, find_units(model, ["layers.0.experts.3", "layers.1.q"]))
    assert unit_norms(alone) == {n: everything[n] for n in ("layers.0.experts.3", "layers.1.q")}


def test_a_group_that_holds_experts_has_the_norm_of_the_whole_parameters():
    model = mixture()
    fill(model, 6)
    block = [p.grad for p in model.layers[0].parameters()]
    expected = math.sqrt(sum(g.double().square().sum().item() for g in block))
    found = unit_norms(GradientNorms(model, find_units(model, "block")))
    # At most 210 squares a parameter.
    assert found["layers.0"] == pytest.approx(expected, rel=210 * torch.finfo(torch.float32).eps, abs=0)


def test_experts_in_a_model_with_other_dtypes_beside_them_have_their_norms():
    model = mixture()
    model.layers[0].to(torch.bfloat16)
    model.head.to(torch.float64)
    fill(model, 7)
    found = unit_norms(GradientNorms(model, find_units(model)))
    for layer, e in ((0, 4), (1, 2)):
        rel = 42 * torch.finfo(torch.float32).eps
        assert found[f"layers.{layer}.experts.{e}"] == pytest.approx(expert_truth(model, layer, e), rel=rel, abs=0)


def test_damping_an_expert_touches_its_rows_alone_and_renews_every_norm():
    model = mixture()
    fill(model, 8)
    model.layers[0]["experts"].up.grad[3, 0, 0] = math.nan
    norms = GradientNorms(model, find_units(model))
    before = {n: p.grad.clone() for n, p in model.named_parameters()}
    scale = np.ones(len(norms.units))
    place = {u.name: i for i, u in enumerate(norms.units)}
    factors = {"layers.0.experts.3": 0.0, "layers.0.experts.1": 0.25, "layers.1.experts.2": 0.5, "layers.1.q": 0.75}
    for name, factor in factors.items():
        scale[place[name]] = factor
    reading = norms.read()
    norms.damp(reading, scale)
    for name, parameter in model.named_parameters():
        expected = before[name]
        for unit, factor in factors.items():
            layer, expert = unit.rsplit(".", 1)
            if expert.isdigit() and name.startswith(layer) and not name.endswith("scale"):
                expected[int(expert)] = 0.0 if factor == 0.0 else expected[int(expert)] * factor
            elif name.startswith(unit):
                expected = expected * factor
        assert torch.equal(parameter.grad, expected), name
    assert torch.equal(reading.norms, norms.read().norms)
    assert torch.equal(norms.total(reading), torch.nn.utils.get_total_norm(grads(model)))


def test_the_work_on_the_host_does_not_grow_with_the_experts():
    def work(num_experts: int) -> int:
        """The number of lines that run in this module for one step."""
        model = nn.ModuleDict({"layers": nn.ModuleList([Experts(num_experts)])})
        fill(model, 9)
        norms = GradientNorms(model, find_units(model))
        norms.read()
        count = 0

        def trace(frame, event, arg):
            nonlocal count
            count += event == "line" and frame.f_code.co_filename == gradient_norms.__file__
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            reading = norms.read()
            norms.unit_norms(reading.indices, reading.norms.numpy())
        finally:
            sys.settrace(before)
        return count

    assert work(3) == work(40) > 20
