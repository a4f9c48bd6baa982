"""Routers of each family are read as a slow reading in NumPy has them; padding and recomputation do not count."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import trimtab
from trimtab.errors import ConfigError, TrimtabWarning
from trimtab.monitors.alarms import AlarmRule
from trimtab.monitors.protocol import MonitorContext
from trimtab.monitors.router import Router
from trimtab.monitors.routing import router_conditioning, router_similarity

transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
FAMILIES = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "Qwen3Moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    "Olmoe": {"num_experts": 6, "num_experts_per_tok": 3},
    "DeepseekV3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "Llama4Text": {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 24,
        "head_dim": 8,
        "interleave_moe_layer_step": 1,
    },
}


def tiny(family):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(COMMON | FAMILIES[family]))
    config._attn_implementation = "eager"
    name = "Llama4" if family == "Llama4Text" else family
    model = getattr(transformers, f"{name}ForCausalLM")(config).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Routers start at zero in some, where no entropy can be told from another.
            if name.endswith(("gate.weight", "router.weight")):
                parameter.normal_(std=0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3)
    return model


def ids(seed=0, sequences=2, tokens=12):
    return torch.randint(0, 48, (sequences, tokens), generator=torch.Generator().manual_seed(seed))


def routers_of(model):
    return {n: m for n, m in model.named_modules() if n.endswith((".gate", "mlp.router", "feed_forward.router"))}


class SlowRouter:
    """Keeps every router's inputs and outputs and computes everything from them in NumPy."""

    def __init__(self, model, scores):
        self.scores = scores
        self.calls = {name: [] for name in routers_of(model)}
        self.modules = routers_of(model)
        for name, module in self.modules.items():
            module.register_forward_hook(lambda m, args, out, name=name: self.calls[name].append((args[0], out)))

    def logits(self, name, x):
        module = self.modules[name]
        weight = next(p for n, p in module.named_parameters() if n.endswith("weight"))
        bias = getattr(module, "bias", None)
        logits = x.detach().double().reshape(-1, x.shape[-1]) @ weight.detach().double().T
        return (logits if bias is None else logits + bias.detach().double()).numpy()

    def read(self, mask=None, top_k=None):
        found = {}
        for calls, name in [(self.calls[n], n) for n in self.modules]:
            entropies, percentiles, top, load = [], [], -math.inf, 0
            for x, output in calls:
                logits = self.logits(name, x)
                num_experts = logits.shape[1]
                keep = np.ones(len(logits), bool) if mask is None else mask.numpy().reshape(-1).astype(bool)
                chosen = [o for o in output if not o.is_floating_point()] if isinstance(output, tuple) else []
                chosen = chosen[0].numpy() if chosen else np.argsort(-logits, axis=1)[:, :top_k]
                logits, chosen = logits[keep], chosen[keep]
                p = 1 / (1 + np.exp(-logits)) if self.scores == "sigmoid" else np.exp(logits)
                p = p / p.sum(1, keepdims=True)
                entropy = -(p * np.log(p)).sum(1) / np.log(num_experts)
                entropies.append(entropy)
                percentiles.append(np.percentile(entropy, 5))
                top = max(top, logits.max())
                load = load + np.bincount(chosen.reshape(-1), minlength=num_experts)
            shares = load / load.sum()
            values = {
                "entropy_mean": np.concatenate(entropies).mean(),
                "entropy_p5": np.mean(percentiles),
                "max_logit": top,
                "load_entropy": -sum(s * math.log(s) for s in shares if s > 0) / math.log(num_experts),
                "busiest_share": shares.max(),
                "unused_experts": (load == 0).sum(),
            }
            for key, value in values.items():
                found.setdefault(key, []).append(value)
        return found


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_read_as_a_slow_reading_has_it(family):
    model = tiny(family)
    slow = SlowRouter(model, "sigmoid" if family in ("DeepseekV3", "Llama4Text") else "softmax")
    monitor = Router()
    monitor.start(model)
    for seed in (0, 1):
        model(ids(seed))
    values = monitor.observe(1)
    expected = slow.read(top_k=1 if family == "Llama4Text" else 2)
    for metric, want in expected.items():
        # Logits are float32 here and float64 there.
        assert values[metric].numpy() == pytest.approx(np.array(want), rel=1e-4, abs=1e-5), metric
    matrices = [next(p for n, p in m.named_parameters() if n.endswith("weight")) for m in slow.modules.values()]
    assert values["similarity"] == pytest.approx(torch.stack([router_similarity(w) for w in matrices]))
    assert values["conditioning"] == pytest.approx(torch.stack([router_conditioning(w) for w in matrices]))


@pytest.mark.parametrize("family", FAMILIES)
def test_places_are_the_layers_that_have_routers(family):
    monitor = Router()
    monitor.start(tiny(family))
    expected = ["layer_1"] if family == "DeepseekV3" else ["layer_0", "layer_1"]
    assert monitor.places("entropy_mean") == expected


@pytest.mark.parametrize("family", ["Mixtral", "DeepseekV3"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_padding_does_not_count(family, dtype):
    model = tiny(family)
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, 7:] = 0
    slow = SlowRouter(model, "sigmoid" if family == "DeepseekV3" else "softmax")
    monitor = Router()
    monitor.start(model)
    model(ids(), attention_mask=mask.to(dtype))
    values = monitor.observe(1)
    for metric, want in slow.read(mask).items():
        assert values[metric].numpy() == pytest.approx(np.array(want), rel=1e-4, abs=1e-5), metric


def test_a_mask_given_by_position_is_found_and_one_of_another_size_is_left_alone():
    model, mask = tiny("Mixtral"), torch.ones(2, 12, dtype=torch.int64)
    mask[:, 5:] = 0
    monitor = Router()
    monitor.start(model)
    found = []
    for arguments, keywords in (((ids(), mask), {}), ((ids(),), {"attention_mask": mask}), ((ids(),), {})):
        model(*arguments, **keywords)
        found.append(monitor.observe(1)["entropy_mean"])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    monitor._forward.mask = torch.zeros(1, 5)
    model.model(ids())
    assert torch.equal(monitor.observe(2)["entropy_mean"], found[2])


def test_a_micro_batch_of_padding_alone_changes_nothing():
    model = tiny("Mixtral")
    monitor = Router()
    monitor.start(model)
    mask = torch.ones(2, 12, dtype=torch.int64)
    model(ids(), attention_mask=mask)
    alone = monitor.observe(1)
    model(ids(), attention_mask=mask)
    model(ids(1), attention_mask=0 * mask)
    both = monitor.observe(2)
    assert all(torch.equal(alone[metric], both[metric]) for metric in alone)


# By transformers, which renames the switch for checkpointing.
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputed_forward_is_not_counted_again(use_reentrant):
    model = tiny("Mixtral")
    monitor = Router()
    monitor.start(model)
    model(input_ids=ids(), labels=ids()).loss.backward()
    tokens = [tally.sums[1].item() for tally in monitor._tallies]
    plain = monitor.observe(1)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    model(input_ids=ids(), labels=ids()).loss.backward()
    assert [tally.sums[1].item() for tally in monitor._tallies] == tokens == [24, 24]
    assert all(torch.equal(plain[metric], value) for metric, value in monitor.observe(2).items())


def test_evaluation_does_not_count():
    model = tiny("Mixtral")
    monitor = Router()
    monitor.start(model)
    model.eval()(ids())
    assert monitor.observe(1)["entropy_mean"].isnan().all()


def test_a_step_is_forgotten_once_it_was_observed():
    model = tiny("Mixtral")
    monitor = Router()
    monitor.start(model)
    model(ids(0))
    first = monitor.observe(1)
    kept = {metric: value.clone() for metric, value in first.items()}
    model(ids(1))
    second = monitor.observe(2)
    assert all(torch.equal(first[metric], kept[metric]) for metric in kept)
    monitor.observe(3)
    model(ids(1))
    assert all(torch.equal(value, second[metric]) for metric, value in monitor.observe(4).items())
    model(ids(0))
    monitor.drop(5)  # skipped by the loss scaler
    model(ids(1))
    assert all(torch.equal(value, second[metric]) for metric, value in monitor.observe(5).items())


def test_between_readings_nothing_is_computed_or_returned():
    model = tiny("Mixtral")
    monitor = Router(every_steps=3)
    monitor.start(model)
    for step in range(1, 7):
        model(ids(step))
        counted = monitor._tallies[0].sums[1].item()
        values = monitor.observe(step)
        assert bool(values) == (step % 3 == 0)
        # The first step's number is not known before it is observed.
        assert bool(counted) == (step % 3 == 0 or step == 1)


@pytest.mark.parametrize("where", ["the compiled model", "the model"])
def test_compiled_hooks_stay_in_one_graph_and_read_what_eager_ones_read(where):
    from torch._dynamo.testing import CompileCounterWithBackend

    model = tiny("Mixtral")
    model.config._experts_implementation = "batched_mm"
    eager = Router()
    eager.start(model)
    expected = []
    masks = [torch.ones(2, 12, dtype=torch.int64).tril(step) for step in range(5)]
    for step, mask in enumerate(masks):
        model(ids(step), attention_mask=mask)
        expected.append(eager.observe(step))
    eager.stop()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monitor = Router()
    if where == "the model":
        monitor.start(model)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    if where == "the compiled model":
        monitor.start(compiled)
    try:
        with torch._dynamo.config.patch(error_on_recompile=True):
            for step, mask in enumerate(masks):
                compiled(ids(step), attention_mask=mask).logits.sum().backward()
                values = monitor.observe(step)
                for metric, want in expected[step].items():
                    assert values[metric] == pytest.approx(want, rel=1e-5, abs=1e-6), metric
    finally:
        torch._dynamo.reset()
    assert counter.frame_count == 1
    assert monitor.places("similarity") == ["layer_0", "layer_1"]


def test_a_copy_of_a_watched_model_is_not_watched():
    model = tiny("Mixtral")
    monitor = Router()
    monitor.start(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(ids())
        assert monitor.observe(1)["entropy_mean"].isnan().all()


class Gated(nn.Module):
    """A hand-written mixture whose gate is a linear layer."""

    def __init__(self, top_k=2, experts=4, called="gate"):
        super().__init__()
        if top_k is not None:
            self.top_k = top_k
        self.add_module(called, nn.Linear(8, experts, bias=False))
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(experts))
        self.called = called

    def forward(self, x):
        shares = getattr(self, self.called)(x).softmax(-1)
        return sum(expert(x) * shares[..., i, None] for i, expert in enumerate(self.experts))


def gated(**settings):
    torch.manual_seed(0)
    return nn.Sequential(Gated(**settings), Gated(**settings)).train()


def test_a_linear_gate_chooses_its_greatest_logits():
    model, x = gated(), torch.randn(3, 5, 8)
    monitor = Router()
    monitor.start(model)
    model(x)
    values = monitor.observe(1)
    chosen = model[0].gate(x).topk(2, -1).indices
    share = np.bincount(chosen.flatten().numpy(), minlength=4).max() / chosen.numel()
    assert values["busiest_share"][0].item() == pytest.approx(share)
    assert monitor.places("busiest_share") == ["layer_0", "layer_1"]


def test_how_many_are_chosen_is_not_guessed():
    model = gated(top_k=None)
    monitor = Router()
    monitor.start(model)
    model(torch.randn(3, 5, 8))
    values = monitor.observe(1)
    assert values["busiest_share"].isnan().all()
    assert values["entropy_mean"].isfinite().all()


def test_a_filter_finds_what_no_name_tells():
    model = gated(called="switchboard")
    said = []
    monitor = Router()
    monitor.bind(MonitorContext(optimizers=list, say_once=said.append))
    monitor.start(model)
    assert monitor.observe(1) == {}
    assert len(said) == 1
    assert "Sequential" in said[0]
    monitor = Router(lambda module, fqn: fqn.endswith("switchboard"))
    monitor.start(model)
    model(torch.randn(3, 5, 8))
    assert monitor.observe(1)["entropy_mean"].shape == (2,)


class Nested(nn.Module):
    """A router with a linear layer inside, which puts out shares and no logits."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 4, bias=False)
        self.scale = nn.Parameter(torch.full((8,), 2.0))

    def forward(self, x):
        shares = self.proj(x * self.scale).softmax(-1)
        weights, chosen = shares.topk(2, -1)
        return shares, weights, chosen


def test_logits_are_taken_from_the_layer_inside_that_computes_them():
    torch.manual_seed(0)
    block = nn.ModuleDict({"router": Nested(), "experts": nn.ModuleList(nn.Linear(8, 8) for _ in range(4))})
    model = nn.ModuleDict({"layers": nn.ModuleList([block])}).train()
    monitor = Router()
    monitor.start(model)
    x = torch.randn(7, 8)
    shares, _, chosen = block["router"](x)
    values = monitor.observe(1)
    logits = block["router"].proj(2 * x).detach()
    assert values["entropy_mean"].item() == pytest.approx(slow_mean_entropy(shares.detach()))
    assert values["max_logit"].item() == pytest.approx(logits.max().item())
    assert values["busiest_share"].item() == pytest.approx(chosen.flatten().bincount().max().item() / 14)
    assert values["conditioning"].item() == pytest.approx(router_conditioning(block["router"].proj.weight).item())


def slow_mean_entropy(shares):
    p = shares.double().numpy()
    return -(p * np.log(p)).sum(1).mean() / math.log(p.shape[1])


def test_gates_that_are_no_routers_are_left_alone():
    block = nn.ModuleDict({"gate": nn.Linear(8, 16), "up": nn.Linear(8, 16), "shared_expert_gate": nn.Linear(8, 1)})
    monitor = Router()
    with pytest.warns(TrimtabWarning, match="found no router"):
        monitor.start(nn.ModuleDict({"layers": nn.ModuleList([block])}))
    assert monitor.places("similarity") == []


def test_routers_of_different_sizes_keep_their_order():
    torch.manual_seed(0)
    model = nn.Sequential(Gated(experts=4), Gated(experts=6), Gated(experts=4)).train()
    x = torch.randn(3, 5, 8)
    monitor = Router()
    monitor.start(model)
    model(x)
    values = monitor.observe(1)
    assert values["similarity"] == pytest.approx(torch.stack([router_similarity(m.gate.weight) for m in model]))
    for i, part in enumerate(model):
        alone = Router()
        alone.start(part)
        part(x if i == 0 else model[:i](x))
        assert alone.observe(1)["load_entropy"].item() == pytest.approx(values["load_entropy"][i].item())


def test_checkpointed_hand_written_models_count_once():
    model, x = gated(), torch.randn(3, 5, 8, requires_grad=True)
    monitor = Router()
    monitor.start(model)
    checkpoint(model, x, use_reentrant=False).sum().backward()
    assert [tally.sums[1].item() for tally in monitor._tallies] == [15, 15]


def test_a_broken_router_is_nan_and_the_other_is_not():
    model = gated()
    with torch.no_grad():
        model[1].gate.weight.fill_(torch.nan)
    monitor = Router()
    monitor.start(model)
    model(torch.randn(3, 5, 8))
    values = monitor.observe(1)
    for metric in ("entropy_mean", "entropy_p5", "max_logit", "similarity", "conditioning"):
        assert values[metric].isnan().tolist() == [False, True], metric


def test_settings_that_cannot_be_meant_are_refused():
    with pytest.raises(ConfigError, match="every_steps=0"):
        Router(every_steps=0)
    with pytest.raises(ConfigError, match="select='gate'"):
        Router("gate")
    with pytest.raises(ConfigError, match="scores='tanh'"):
        Router(scores="tanh")
    with pytest.raises(ConfigError, match="matches no module"):
        Router(lambda module, fqn: False).start(gated())
    with pytest.raises(ConfigError, match="a row an expert"):
        Router(lambda module, fqn: fqn == "0.experts").start(gated())


def test_a_fall_of_the_entropy_gives_alarm_and_a_low_one_from_the_start_too():
    rule = Router.alarm_rules["entropy_mean"]
    assert isinstance(rule, AlarmRule)
    for signal, expected in (
        ([0.9] * 6, False),
        ([0.9] * 6 + [0.52] * 6, True),
        ([0.45] * 6, True),
        ([0.9] * 6 + [0.6] * 6, False),
    ):
        places = rule.detector.over(["layer_0"])
        assert bool(np.array([places.update([value]) for value in signal]).any()) == expected
    assert set(Router.alarm_rules) == {"entropy_mean"}


@pytest.mark.filterwarnings("ignore::trimtab.errors.TrimtabWarning")
def test_a_guard_takes_it_and_tells_when_the_routing_narrows():
    model, told = tiny("Mixtral"), []
    with trimtab.attach(model, monitors=[Router()], on_alarm=[lambda alarm, guard: told.append(alarm)]) as guard:
        for step in range(1, 13):
            if step == 8:
                model.model.layers[1].mlp.gate.weight.data.mul_(30.0)
            model(input_ids=ids(step), labels=ids(step)).loss.backward()
            guard.step()
            model.zero_grad()
        guard.resolve()
        assert 0 < guard.metrics()["trimtab/router/entropy_mean_min"] < 0.8
    assert [(alarm.metric, alarm.places, alarm.step >= 8) for alarm in told] == [("entropy_mean", ("layer_1",), True)]
