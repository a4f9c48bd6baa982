"""Each fault holds for its steps and no other, falls where it says, and lands in the record."""

import copy
import json
import math

import pytest
import torch
from torch import nn

import trimtab
from trimtab.errors import ConfigError
from trimtab.faults import (
    BiasedAttentionBackward,
    BitFlips,
    LargeLearningRate,
    NonFiniteGradient,
    RouterFault,
    SmallBatch,
    biased_attention_backward,
)
from trimtab.precision.attention_backward import AttentionBackward

IDS = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(0))


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Routed(nn.Module):
    """Routers beside experts, and a loss that balances them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.router_aux_loss_coef = 0.25
        self.layers = nn.ModuleList(
            nn.ModuleDict({"mlp": nn.ModuleDict({"gate": nn.Linear(6, 3, bias=False), "experts": nn.Linear(6, 6)})})
            for _ in range(2)
        )

    @property
    def weights(self):
        return [layer["mlp"]["gate"].weight.detach().clone() for layer in self.layers]


@pytest.fixture
def model():
    return Layers()


def llama(**settings):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, num_key_value_heads=2, **(sizes | settings)))


def llama_gradients(model):
    model.zero_grad()
    model(input_ids=IDS, labels=IDS).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}


def different(one, other):
    return {n for n in one if not torch.equal(one[n], other[n])}


def attention_errors(model, guard, clean, num_steps):
    """In which steps the gradients are not the clean ones."""
    found = []
    for step in range(1, num_steps + 1):
        if different(clean, llama_gradients(model)):
            found.append(step)
        guard.step()
    return found


@pytest.mark.filterwarnings("ignore:guard.step was called twice")
@pytest.mark.parametrize("recipe", [None, AttentionBackward(23)], ids=["no recipe", "attention backward"])
def test_attention_is_biased_in_its_steps_with_and_without_the_recipe(recipe):
    model = llama()
    clean = llama_gradients(model)
    policy = trimtab.Policy(alpha=1.0, beta=1.0, max_active=0)
    with trimtab.attach(model, recipe, policy=policy) as guard:
        guard.inject(BiasedAttentionBackward(model, start_step=2, num_steps=2))
        assert attention_errors(model, guard, clean, 5) == [2, 3]


def test_the_recovery_path_escapes_a_biased_attention_backward():
    model = llama()
    clean = llama_gradients(model)
    with trimtab.attach(model, AttentionBackward(23)) as guard:
        guard.inject(BiasedAttentionBackward(model, units=["model.layers.1.self_attn"]))
        assert different(clean, llama_gradients(model))
        guard.route(["model.layers.1.self_attn"])
        assert not different(clean, llama_gradients(model))


def test_a_biased_attention_backward_holds_for_its_block():
    model = llama()
    clean = llama_gradients(model)
    with biased_attention_backward(model, bias=0.1):
        biased = llama_gradients(model)
    with biased_attention_backward(model, units=["model.layers.1.self_attn"]):
        one = llama_gradients(model)
    with pytest.raises(RuntimeError), biased_attention_backward(model):
        raise RuntimeError
    assert not different(clean, llama_gradients(model))
    assert {n for n in different(clean, biased) if "layers.1." in n} == {
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.1.input_layernorm.weight",
    }
    assert different(clean, one)


def test_a_biased_attention_backward_that_falls_nowhere_is_refused(model):
    with trimtab.attach(model) as guard, pytest.raises(ConfigError, match="no attention of transformers"):
        guard.inject(BiasedAttentionBackward(model))
    attended = llama()
    with trimtab.attach(attended, AttentionBackward()) as guard:
        with pytest.raises(ConfigError, match=r"Nearest: model\.layers\.0\.self_attn"):
            guard.inject(BiasedAttentionBackward(attended, units=["model.layers.0.self_atn"]))
        clean = llama_gradients(attended)
    with trimtab.attach(attended) as guard:
        exact = llama_gradients(attended)
        guard.inject(BiasedAttentionBackward(attended, start_step=9))
        assert not different(exact, llama_gradients(attended))
        assert different(exact, clean)


@pytest.mark.parametrize("guarded", [True, False])
def test_the_learning_rate_is_large_in_its_steps_and_a_scheduler_does_not_notice(model, guarded):
    optimizer = torch.optim.SGD([{"params": model.layers[0].parameters()}, {"params": model.layers[1].weight}], lr=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    fault = LargeLearningRate(optimizer, factor=10.0, start_step=2, num_steps=2)
    guard = trimtab.attach(model)
    if guarded:
        guard.inject(fault)
    steps = []
    for step in range(1, 6):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        before = [model.layers[i].weight.detach().clone() for i in range(2)]
        guard.step()
        if guarded or step not in (2, 3):
            optimizer.step()
        else:
            with fault:
                optimizer.step()
        moved = {round((b - model.layers[i].weight).mean().item(), 5) for i, b in enumerate(before)}
        assert len(moved) == 1
        steps.append(moved.pop())
        scheduler.step()
    assert steps == pytest.approx([0.5, 2.5, 1.25, 0.0625, 0.03125], rel=1e-3)
    assert optimizer.param_groups[0]["lr"] == 0.5**6
    assert not optimizer._optimizer_step_pre_hooks
    guard.detach()


@pytest.mark.parametrize("in_closure", [True, False])
def test_the_learning_rate_is_large_in_its_steps_where_a_closure_has_the_guards_step_or_has_it_not(model, in_closure):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    moved = []
    with trimtab.attach(model) as guard:
        guard.inject(LargeLearningRate(optimizer, factor=10.0, start_step=2, num_steps=2))
        for _ in range(5):

            def closure():
                for p in model.parameters():
                    p.grad = torch.ones_like(p)
                if in_closure:
                    guard.step()
                return torch.zeros(())

            before = model.layers[0].weight.detach().clone()
            if in_closure:
                optimizer.step(closure)
            else:
                closure()
                guard.step()
                optimizer.step(closure=closure)
            moved.append((before - model.layers[0].weight).mean().item())
    assert moved == pytest.approx([0.5, 5.0, 5.0, 0.5, 0.5], rel=1e-4)


@pytest.mark.parametrize("change", ["scale", "tilt"])
@pytest.mark.parametrize("saved", range(6))
def test_a_guard_resumed_anywhere_has_changed_the_routers_as_often_as_the_uninterrupted_one(change, saved):
    def run(model, guard, num_steps):
        for _ in range(num_steps):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            guard.step()

    def faults(model):
        return [
            RouterFault(model, change, amount=2.0, start_step=2, num_steps=2),
            BitFlips(model, "layers.0.mlp.experts.weight", bit=0, start_step=2, num_steps=3),
        ]

    weights = []
    for is_cut in (False, True):
        model = Routed()
        with trimtab.attach(model, units=["layers.0.mlp.experts"]) as guard:
            for fault in faults(model):
                guard.inject(fault)
            run(model, guard, saved if is_cut else 6)
            state, checkpoint = guard.state_dict(), copy.deepcopy(model.state_dict())
            if not is_cut:
                weights.append(checkpoint)
        if is_cut:
            model = Routed()
            model.load_state_dict(checkpoint)
            with trimtab.attach(model, units=["layers.0.mlp.experts"]) as guard:
                guard.load_state_dict(json.loads(json.dumps(state)))
                for fault in faults(model):
                    guard.inject(fault)
                run(model, guard, 6 - saved)
                weights.append(copy.deepcopy(model.state_dict()))
    for name, weight in weights[0].items():
        assert torch.allclose(weight, weights[1][name], atol=1e-6), name


def test_a_fault_that_the_checkpoint_does_not_know_begins_even_at_its_first_step():
    model = Routed()
    before = model.weights
    with trimtab.attach(model, units=["layers.0.mlp.experts"]) as guard:
        guard.load_state_dict(guard.state_dict())
        guard.inject(RouterFault(model, "scale", amount=2.0, start_step=1))
        assert torch.equal(model.weights[0], 2 * before[0])


def test_batches_are_small_in_their_steps(model):
    fault = SmallBatch(num_samples=2, start_step=2, num_steps=2)
    with trimtab.attach(model) as guard:
        guard.inject(fault)
        sizes = []
        for batch in fault.batches({"ids": torch.zeros(8, 4), "n": 3, "pair": (torch.zeros(8),)} for _ in range(4)):
            sizes.append((len(batch["ids"]), batch["n"], len(batch["pair"][0])))
            model(batch["ids"]).sum().backward()
            guard.step()
            model.zero_grad()
    assert sizes == [(8, 3, 8), (2, 3, 2), (2, 3, 2), (8, 3, 8)]


def test_batches_of_transformers_and_named_tuples_keep_their_class():
    from collections import namedtuple

    from transformers import BatchEncoding

    pair = namedtuple("pair", ["x", "y"])
    with SmallBatch(num_samples=1) as fault:
        cut = fault.cut(BatchEncoding({"input_ids": torch.zeros(3, 2)}))
        assert isinstance(cut, BatchEncoding)
        assert cut["input_ids"].shape == (1, 2)
        assert fault.cut(pair(torch.zeros(3), [torch.tensor(1.0)])) == pair(torch.zeros(1), [torch.tensor(1.0)])


def run(model, guard, num_steps):
    """Parameters and gradients of each step, as they are after its backward."""
    seen = []
    for _ in range(num_steps):
        model.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        seen.append({n: (p.detach().clone(), p.grad.clone()) for n, p in model.named_parameters()})
        guard.step()
    return seen


def changed(clean, seen, part):
    return [
        {n: int((clean[n][part] != s[n][part]).sum()) for n in clean if different_in(clean, s, n, part)} for s in seen
    ]


def different_in(clean, seen, name, part):
    return not torch.equal(clean[name][part].nan_to_num(1e30), seen[name][part].nan_to_num(1e30))


@pytest.mark.filterwarnings("ignore:guard.step was called twice")
def test_bits_of_a_gradient_flip_in_their_steps(model):
    policy = trimtab.Policy(alpha=1.0, beta=1.0, max_active=0)
    with trimtab.attach(model, policy=policy) as guard:
        clean = run(model, guard, 1)[0]
        name = "layers.1.weight"
        guard.inject(BitFlips(model, name, bit=0, flips_in="gradient", num_flips=3, start_step=3, num_steps=2, seed=5))
        seen = run(model, guard, 4)
    assert changed(clean, seen, 1) == [{}, {name: 3}, {name: 3}, {}]
    for s in seen:
        assert torch.equal(s[name][1].abs(), clean[name][1].abs())  # only signs
    assert not torch.equal(seen[1][name][1], seen[2][name][1])  # other elements at each step
    assert changed(clean, seen, 0) == [{}] * 4


@pytest.mark.filterwarnings("ignore:guard.step was called twice")
def test_bits_of_a_weight_flip_once_a_step_and_stay(model):
    name, before = "layers.0.weight", copy.deepcopy(model)
    with trimtab.attach(model) as guard:
        fault = BitFlips(model, name, bit=0, start_step=2, num_steps=2, num_flips=2, seed=1)
        guard.inject(fault)
        seen = run(model, guard, 1)
        list(fault.begin_step(2, None))  # a step that the scaler skipped begins again
        seen += run(model, guard, 4)
    flips = [int((s[name][0] != before.layers[0].weight).sum()) for s in seen]
    assert flips[:2] == [0, 2]
    assert flips[2] in (0, 2, 4)
    assert flips[2:] == [flips[2]] * 3
    again = copy.deepcopy(before)
    with BitFlips(again, name, bit=0, num_flips=2, start_step=2, seed=1):
        assert torch.equal(again.layers[0].weight, seen[1][name][0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_bit_is_counted_from_the_sign_in_every_dtype(dtype):
    layer = nn.Linear(1, 1, bias=False).to(dtype)
    lowest = torch.finfo(dtype).bits - 1
    for bit, expected in ((0, -1.5), (1, math.nan), (lowest, 1.5 + torch.finfo(dtype).eps)):
        nn.init.constant_(layer.weight, 1.5)
        with BitFlips(layer, "weight", bit=bit):
            got = layer.weight.item()
        assert got == expected or (math.isnan(expected) and not math.isfinite(got)), bit


def test_the_seed_chooses_what_flips():
    layer = nn.Linear(64, 64)

    def flipped(**settings):
        other = copy.deepcopy(layer)
        with BitFlips(other, "weight", bit=0, **settings):
            return (other.weight != layer.weight).nonzero().tolist()

    assert flipped(seed=1) == flipped(seed=1) != flipped(seed=2)
    assert flipped(seed=1, start_step=2) != flipped(seed=1)
    assert len(flipped(num_flips=5)) == 5


@pytest.mark.filterwarnings("ignore:guard.step was called twice")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_units_gradient_is_not_finite_in_its_steps(model, value):
    policy = trimtab.Policy(alpha=1.0, beta=1.0, max_active=0)
    with trimtab.attach(model, policy=policy) as guard:
        clean = run(model, guard, 1)[0]
        guard.inject(NonFiniteGradient(model, "layers.1", value=value, start_step=3, num_steps=1, seed=2))
        seen = run(model, guard, 3)
    assert [sum(c.values()) for c in changed(clean, seen, 1)] == [0, 1, 0]
    broken = torch.cat([g.flatten() for _, g in seen[1].values()])
    assert int((~broken.isfinite()).sum()) == 1
    assert all(n.startswith("layers.1.") for n in changed(clean, seen, 1)[1])


def test_routers_are_scaled_for_a_while_and_keep_what_they_learn():
    model = Routed()
    before = model.weights
    fault = RouterFault(model, "scale", amount=4.0, start_step=2, num_steps=2)
    for step, factor in ((1, 1), (2, 4), (2, 4), (3, 4), (4, 1), (5, 1)):
        list(fault.begin_step(step, None))
        assert all(torch.equal(b * factor, w) for b, w in zip(before, model.weights, strict=True)), step
    with RouterFault(model, "scale", amount=4.0, routers=["layers.1.mlp.gate"]) as fault, torch.no_grad():
        assert fault.place == "layers.1.mlp.gate"
        assert torch.equal(model.weights[0], before[0])
        model.layers[1]["mlp"]["gate"].weight.add_(1.0)
    assert torch.equal(model.weights[1], (before[1] * 4 + 1) / 4)


def test_a_tilt_makes_the_rows_of_a_router_alike_and_is_taken_back():
    model = Routed()
    before = model.weights
    with RouterFault(model, "tilt", amount=5.0, seed=3):
        tilted = model.weights
        for b, t in zip(before, tilted, strict=True):
            added = t - b
            assert torch.allclose(added[0], added[2], atol=1e-6)
            assert added[0].norm().item() == pytest.approx(5.0, rel=1e-5)
            assert torch.nn.functional.cosine_similarity(t[0], t[1], dim=0) > 0.9
        assert not torch.allclose(tilted[0] - before[0], tilted[1] - before[1])
    assert all(torch.allclose(b, w, atol=1e-6) for b, w in zip(before, model.weights, strict=True))


def test_a_run_resumed_within_a_router_fault_ends_as_the_uninterrupted_one():
    model = Routed()
    before = model.weights
    first = RouterFault(model, "tilt", start_step=2, num_steps=3)
    for step in (1, 2, 3):
        list(first.begin_step(step, None))
    resumed = RouterFault(copy.deepcopy(model), "tilt", start_step=2, num_steps=3)
    for step in (4, 5):
        list(resumed.begin_step(step, None))
    assert all(torch.allclose(b, w, atol=1e-6) for b, w in zip(before, resumed.model.weights, strict=True))


def test_the_balancing_loss_is_off_in_its_steps():
    model = Routed()
    fault = RouterFault(model, "no_aux_loss", start_step=2, num_steps=2)
    seen = []
    for step in range(1, 5):
        list(fault.begin_step(step, None))
        seen.append(model.router_aux_loss_coef)
    assert seen == [0.25, 0.0, 0.0, 0.25]


def test_routers_of_transformers_are_found():
    from transformers import MixtralConfig, MixtralForCausalLM

    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, num_local_experts=3,
        )
    )  # fmt: skip
    assert RouterFault(model, "tilt").routers == ("model.layers.0.mlp.gate", "model.layers.1.mlp.gate")
    with RouterFault(model, "no_aux_loss"):
        assert model.router_aux_loss_coef == 0.0
    assert model.router_aux_loss_coef > 0


def test_each_fault_lands_in_the_record_with_all_that_it_takes_to_repeat_it(model, tmp_path):
    from trimtab.trace import open_run

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    faults = [
        LargeLearningRate(optimizer, factor=3.0, start_step=2),
        SmallBatch(num_samples=2, start_step=1, num_steps=4),
        BitFlips(model, "layers.0.weight", bit=31, start_step=2, seed=7),
        NonFiniteGradient(model, "layers.1", start_step=3),
    ]
    with trimtab.attach(model, record=tmp_path) as guard:
        for fault in faults:
            guard.inject(fault)
        for _ in range(3):
            model(torch.ones(3, 4)).sum().backward()
            guard.step()
            optimizer.step()
            optimizer.zero_grad()
    with open_run(tmp_path) as record:
        events = {e.data["fault"]: e for e in record.events("fault")}
    assert {kind: (e.step, e.place) for kind, e in events.items()} == {
        "learning rate": (2, "optimizer"),
        "small batch": (1, "batch"),
        "bit flips": (2, "layers.0.weight"),
        "non-finite gradient": (3, "layers.1"),
    }
    for fault in faults:
        data = events[fault.kind].data
        assert data["num_steps"] == fault.num_steps
        assert data["seed"] == fault.seed
        assert data == json.loads(json.dumps(data))
        assert fault.settings().items() <= data.items()
        fault.end()


@pytest.mark.parametrize(
    ("setting", "make"),
    [
        ("start_step", lambda m: SmallBatch(start_step=0)),
        ("num_steps", lambda m: SmallBatch(num_steps=0)),
        ("num_samples", lambda m: SmallBatch(num_samples=0)),
        ("seed", lambda m: BitFlips(m, "layers.0.weight", bit=1, seed=-1)),
        ("bit", lambda m: BitFlips(m, "layers.0.weight", bit=32)),
        ("flips_in", lambda m: BitFlips(m, "layers.0.weight", bit=1, flips_in="both")),
        ("num_flips", lambda m: BitFlips(m, "layers.0.weight", bit=1, num_flips=0)),
        ("parameter", lambda m: BitFlips(m, "layers.0.wieght", bit=1)),
        ("unit", lambda m: NonFiniteGradient(m, "layers.7")),
        ("unit", lambda m: NonFiniteGradient(m.requires_grad_(False), "layers.1")),
        ("value", lambda m: NonFiniteGradient(m, "layers.1", value=1.0)),
        ("factor", lambda m: LargeLearningRate(torch.optim.SGD(m.parameters()), factor=0.0)),
        ("change", lambda m: RouterFault(Routed(), "break")),
        ("change", lambda m: RouterFault(m, "no_aux_loss")),
        ("model", lambda m: RouterFault(m, "tilt")),
        ("amount", lambda m: RouterFault(Routed(), "tilt", amount=math.inf)),
        ("routers", lambda m: RouterFault(Routed(), "tilt", routers=["layers.0.mlp.gat"])),
        ("mantissa_bits", lambda m: BiasedAttentionBackward(m, mantissa_bits=0)),
    ],
)
def test_a_fault_that_cannot_be_meant_is_refused(model, setting, make):
    with pytest.raises(ConfigError, match=f"^{setting}=") as caught:
        make(model)
    assert caught.value.allowed
    assert caught.value.remedy
