"""A guard on mixtures of experts: every stacked expert is scored, decided on and recorded as a unit of its own."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trimtab
from trimtab.control import Policy
from trimtab.precision import Conversion, SavedActivations, Unit
from trimtab.trace import open_run

FAMILIES = ["Mixtral", "Qwen3Moe", "GptOss"]
NUM_EXPERTS = 6


def build(family: str) -> nn.Module:
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 20, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    experts = {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2}
    own = {
        "Mixtral": experts,
        "Qwen3Moe": {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "head_dim": 8, "moe_intermediate_size": 8},
        "GptOss": experts | {"head_dim": 8},
    }
    config = getattr(transformers, f"{family}Config")(**sizes, **own[family])
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config)


def batches(num: int) -> list[Tensor]:
    """So few tokens that some experts get none."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 20, (1, 3), generator=generator) for _ in range(num)]


def idle_experts(model: nn.Module) -> set[str]:
    """The experts whose gradients are all zero, or absent."""
    found = set()
    for name, module in model.named_modules():
        if name.endswith("mlp.experts"):
            grads = [p.grad for p in module.parameters()]
            found |= {f"{name}.{e}" for e in range(NUM_EXPERTS) if not any(g[e].any() for g in grads)}
    return found


def backward(model: nn.Module, tokens: Tensor) -> Tensor:
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss


@pytest.mark.filterwarnings("ignore:.* as it is:trimtab.TrimtabWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_expert_is_scored_and_recorded_and_those_without_tokens_are_not_observed(family, tmp_path):
    model = build(family)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    idle, expected, totals = [], [], []
    with trimtab.attach(model, SavedActivations(), record=tmp_path) as guard:
        units = guard.units
        assert len([u for u in units if ".experts." in u]) == 2 * NUM_EXPERTS
        for tokens in batches(4):
            backward(model, tokens)
            idle.append(idle_experts(model))
            expected.append([expert_norm(model, u) if ".experts." in u else None for u in units])
            decision = guard.step(max_norm=1.0)
            totals.append(decision.grad_norm.item())
            optimizer.step()
            optimizer.zero_grad()
            assert len(decision.risk) == len(units)
            assert decision.num_unobserved == len(idle[-1])
            assert decision.num_failed == 0
            metrics = guard.metrics()
            assert metrics["trimtab/control/num_unobserved"] == len(idle[-1])
            assert math.isfinite(metrics["trimtab/gnmr/max"])
    assert all(idle)
    with open_run(tmp_path) as record:
        assert record.units == units
        assert record.steps().grad_norm.tolist() == totals
        sizes = {u.name: u.num_parameters for u in record.unit_table}
        experts = model.get_submodule("model.layers.0.mlp.experts")
        assert sizes["model.layers.0.mlp.experts.0"] == sum(p[0].numel() for p in experts.parameters())
        for row, norms in zip(record.steps().norms, expected, strict=True):
            for recorded, truth in zip(row, norms, strict=True):
                # float32 sums of at most 768 squares a row, in any order.
                rel = 768 * torch.finfo(torch.float32).eps
                assert truth is None or recorded == pytest.approx(truth, rel=rel, abs=0)


def expert_norm(model: nn.Module, unit: str) -> float:
    name, _, expert = unit.rpartition(".")
    rows = [p.grad[int(expert)] for p in model.get_submodule(name).parameters()]
    return math.sqrt(sum(r.double().square().sum().item() for r in rows))


def train(family: str, watch: bool, **settings: Any) -> tuple[dict[str, Tensor], list[Tensor]]:
    model = build(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = trimtab.attach(model, **settings) if watch else None
    totals = []
    for tokens in batches(5):
        backward(model, tokens)
        if guard is not None:
            totals.append(guard.step(max_norm=0.5).grad_norm)
        else:
            totals.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    if guard is not None:
        guard.detach()
    return model.state_dict(), totals


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("units", [None, "block"])
def test_watching_experts_leaves_training_as_it_was_bit_for_bit(family, units, tmp_path):
    weights, totals = train(family, watch=False)
    watched_weights, watched_totals = train(family, watch=True, units=units, record=tmp_path)
    assert all(torch.equal(weights[name], watched_weights[name]) for name in weights)
    assert all(torch.equal(a, b) for a, b in zip(totals, watched_totals, strict=True))


def test_a_failed_expert_is_the_only_one_that_damping_removes():
    model = build("Mixtral")
    failing, name = 2, "model.layers.1.mlp.experts"
    with trimtab.attach(model, policy=Policy(max_active=0, damping=True)) as guard:
        backward(model, torch.arange(3, 20).unsqueeze(0))
        grad = model.get_submodule(name).down_proj.grad
        expected = grad.clone()
        grad[failing, 0, 0] = math.nan
        expected[failing] = 0.0
        decision = guard.step()
        assert [u for u, risk in zip(guard.units, decision.risk, strict=True) if risk > 1] == [f"{name}.{failing}"]
        assert torch.equal(grad, expected)
        assert math.isfinite(decision.grad_norm)


def test_a_resumed_run_decides_on_experts_as_an_uninterrupted_one():
    model = build("Mixtral")
    data = batches(6)
    states, decisions = [], []
    with trimtab.attach(model) as guard:
        for tokens in data:
            backward(model, tokens)
            decisions.append(copy.copy(guard.step()))
            states.append(json.loads(json.dumps(guard.state_dict())))
            model.zero_grad()
    with trimtab.attach(model) as guard:
        report = guard.load_state_dict(states[2])
        assert not report.new
        assert not report.gone
        for tokens, before in zip(data[3:], decisions[3:], strict=True):
            backward(model, tokens)
            np.testing.assert_array_equal(guard.step().gnmr, before.gnmr)
            model.zero_grad()


class ByHalf:
    """A recipe that asks for larger units than projections."""

    name, unit = "by-half", "half"

    def convert(self, model: nn.Module, units: Sequence[Unit]) -> Conversion:
        # The MLP half holds stacked experts, which this recipe does not convert.
        return SavedActivations().convert(model, units)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "unit": self.unit}


@pytest.mark.filterwarnings("ignore:.* as it is:trimtab.TrimtabWarning")
@pytest.mark.parametrize(
    ("recipe", "units", "described", "num_units"),
    [
        (None, None, "projections", 2 * (4 + NUM_EXPERTS)),
        (None, "block", "projections by block", 2),
        (None, "layer", "projections by block", 2),
        (ByHalf(), None, "projections by half", 4),
        (ByHalf(), "projection", "projections", 2 * (4 + NUM_EXPERTS)),
    ],
)
def test_the_record_says_how_much_is_one_unit(recipe, units, described, num_units, tmp_path):
    with trimtab.attach(build("Mixtral"), recipe, units=units, record=tmp_path) as guard:
        assert len(guard.units) == num_units
    with open_run(tmp_path) as record:
        assert record.config["units"] == described
