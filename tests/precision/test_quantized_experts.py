import copy

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from torch import nn

import trimtab
from trimtab.precision import QuantizedGemm

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def mixtral():
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL))


def gpt_oss():
    """Transposed weights, biases, and gates that are interleaved."""
    torch.manual_seed(0)
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**SMALL, head_dim=8))


def gradients(model, tokens=9):
    model.zero_grad()
    ids = torch.arange(2 * tokens).reshape(2, tokens) * 7 % 64
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    return [output.logits.detach(), *(p.grad.clone() for p in model.parameters())]


def expert_rows(model, guard_units):
    return [u for u in guard_units if ".experts." in u]


@pytest.mark.parametrize("make", [mixtral, gpt_oss])
def test_every_expert_is_a_unit_and_with_all_on_the_plain_path_nothing_has_changed(make):
    model = make()
    plain = copy.deepcopy(model)
    guard = trimtab.attach(model, QuantizedGemm(high="bf16"))
    assert len(expert_rows(model, guard.units)) == 2 * 4
    guard.route(list(guard.units))
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(plain), strict=True))


@pytest.mark.parametrize("make", [mixtral, gpt_oss])
def test_our_way_through_the_experts_is_theirs_up_to_the_order_of_sums(make):
    model = make().double()
    model.config._experts_implementation = "eager"  # the others know no float64
    plain = copy.deepcopy(model)
    guard = trimtab.attach(model, QuantizedGemm(high="bf16"), units=lambda module, fqn: fqn.endswith("experts"))
    guard.conversion.observe_quantizers(True)  # or else experts that are all on the plain path run as theirs
    guard.route(list(guard.units))
    for ours, theirs in zip(gradients(model), gradients(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_only_the_expert_on_the_low_path_is_quantized():
    model = mixtral()
    experts = model.model.layers[1].mlp.experts
    guard = trimtab.attach(model, QuantizedGemm(high="bf16"))
    low = "model.layers.1.mlp.experts.2"
    guard.route([u for u in guard.units if u != low])
    hidden = torch.randn(6, 32)
    shares = torch.ones(6, 1)
    for expert in range(4):
        chosen = torch.full((6, 1), expert)
        ours = experts(hidden, chosen, shares)
        theirs = type(experts).__mro__[1].forward(experts, hidden, chosen, shares)
        close = torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)
        assert close == (expert != 2)


def test_an_expert_without_tokens_has_a_gradient_of_exactly_zero_and_is_not_observed():
    model = mixtral()
    guard = trimtab.attach(model, QuantizedGemm())
    gradients(model, tokens=1)
    decision = guard.step()
    norms = [torch.linalg.vector_norm(block.mlp.experts.down_proj.grad, dim=(1, 2)) for block in model.model.layers]
    unused = int(sum((n == 0).sum() for n in norms))
    assert unused > 0
    assert decision.num_unobserved >= unused


def test_a_block_has_one_switch_for_its_attention_and_all_of_its_experts():
    model = mixtral()
    guard = trimtab.attach(model, QuantizedGemm(high="bf16", unit="block"))
    assert guard.units == ("model.layers.0", "model.layers.1")
    number = guard.conversion.layers.index(model.model.layers[1].mlp.experts)
    assert guard.conversion.units_of_experts(number) == [1, 1, 1, 1]


def test_detaching_gives_the_experts_their_class_and_forward_back():
    model = mixtral()
    before = {name: type(module) for name, module in model.named_modules()}
    guard = trimtab.attach(model, QuantizedGemm())
    guard.detach()
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_experts_of_an_unknown_kind_are_left_alone_and_the_reason_is_said():
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4, 4))

        def forward(self, x):
            return torch.einsum("td,eod->to", x, self.weight)

    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"up": nn.Linear(4, 4), "experts": Stack()})])})
    with pytest.warns(trimtab.TrimtabWarning, match="Stack computes its experts in its own way"):
        guard = trimtab.attach(model, QuantizedGemm(unit="block"))
    assert type(model["layers"][0]["experts"]) is Stack
    assert guard.units == ("layers.0",)


def test_statistics_are_kept_of_each_expert_that_had_tokens():
    model = mixtral()
    guard = trimtab.attach(model, QuantizedGemm(), quantizer_stats=True)
    gradients(model, tokens=1)
    rows = guard.conversion.take_quantizer_stats()
    assert rows.shape == (len(guard.units), 4)
    unseen = rows[:, 3].isnan()  # the largest magnitude
    assert bool(unseen.any())
    assert not bool(unseen.all())
    assert bool(rows[:, 0].isnan().all())  # so few tokens tell no error
    gradients(model, tokens=40)
    rows = guard.conversion.take_quantizer_stats()
    assert not bool(rows[:, 0].isnan().any())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*instantiated")  # by the compiler itself
@pytest.mark.parametrize("make", [mixtral, gpt_oss])
def test_experts_and_projections_share_one_graph_across_assignments(make):
    torch._dynamo.reset()
    model = make()
    guard = trimtab.attach(model, QuantizedGemm())
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    rng = np.random.default_rng(0)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(20):
            guard.route([unit for unit in guard.units if rng.random() < 0.5])
            assert all(torch.equal(a, b) for a, b in zip(gradients(compiled), gradients(model), strict=True))
    assert counter.frame_count == 1
    torch._dynamo.reset()
