"""A biased attention backward against its slow truth, and its switch."""

import copy
import gc
import math

import pytest
import torch
from torch import nn

from trimtab.errors import ConfigError, TrimtabWarning
from trimtab.precision import Conversion, find_units
from trimtab.precision.attention_backward import AttentionBackward, keep_mantissa
from trimtab.precision.recipe import Recipe

IDS = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(0))


def llama(attention="sdpa", key_heads=2, **settings):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=50, num_key_value_heads=key_heads, attn_implementation=attention, **(sizes | settings))
    )


def halves(model):
    return find_units(model, "half")


def gradients(model, **batch):
    model.zero_grad()
    loss = model(**({"input_ids": IDS, "labels": IDS} | batch)).loss
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters()}}


def different(one, other):
    assert one.keys() == other.keys()
    return {name for name in one if not torch.equal(one[name], other[name])}


def slow_truth(q, k, v, grad, mask, recipe, scale):
    """Attention's output and gradients, head by head and without autograd; shapes (batch, heads, tokens, d_head)."""
    groups = q.shape[1] // k.shape[1]
    output, dq, dk, dv = (torch.zeros_like(t) for t in (q, q, k, v))
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            keys, values, d_output = k[b, h // groups], v[b, h // groups], grad[b, h]
            logits = torch.einsum("id,jd->ij", q[b, h], keys) * scale
            p = logits.masked_fill(~mask[b], -torch.inf).softmax(-1)
            o = torch.einsum("ij,jd->id", p, values)
            delta = slow_delta(o, d_output, recipe)
            d_logits = p * (torch.einsum("id,jd->ij", d_output, values) - delta[:, None])
            output[b, h] = o
            dq[b, h] = torch.einsum("ij,jd->id", d_logits, keys) * scale
            dk[b, h // groups] += torch.einsum("ij,id->jd", d_logits, q[b, h]) * scale
            dv[b, h // groups] += torch.einsum("ij,id->jd", p, d_output)
    return output, dq, dk, dv


def slow_delta(o, grad, recipe):
    total = torch.zeros(len(o), dtype=o.dtype)
    for i in range(len(o)):
        for x, g in zip(o[i].tolist(), grad[i].tolist(), strict=True):
            kept = x if recipe.mantissa_bits is None else slow_mantissa(x, recipe.mantissa_bits, recipe.rounding)
            total[i] += g * kept + recipe.bias * abs(g * x)
    return total


def slow_mantissa(x, bits, rounding):
    if x == 0 or not math.isfinite(x):
        return x
    fraction, exponent = math.frexp(x)  # 0.5 <= |fraction| < 1
    steps = fraction * 2 ** (bits + 1)
    # Python's round goes to nearest, ties to even.
    return math.ldexp(math.trunc(steps) if rounding == "truncate" else round(steps), exponent - bits - 1)


class Attention(nn.Module):
    is_causal = True

    def __init__(self, groups):
        super().__init__()
        self.num_key_value_groups = groups


def eager(module, query, key, value, mask, scaling, dropout=0.0, **kwargs):
    key, value = (t.repeat_interleave(module.num_key_value_groups, 1) for t in (key, value))
    logits = query @ key.mT * scaling
    weights = (logits if mask is None else logits + mask).softmax(-1)
    weights = nn.functional.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2), weights


def sdpa():
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward


RECIPES = [
    AttentionBackward(1),
    AttentionBackward(3),
    AttentionBackward(1, rounding="nearest"),
    AttentionBackward(None, bias=0.1),
    AttentionBackward(2, bias=-0.3),
]


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("kind", ["sdpa", "eager", "causal", "padded"])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_the_gradients_are_those_of_a_delta_from_a_rounded_output(recipe, kind, groups):
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(2, heads, 7, 8, dtype=torch.float64, generator=generator)
        for heads in (4, 4 // groups, 4 // groups, 4)
    )
    mask = torch.ones(2, 7, 7, dtype=torch.bool)
    if kind in ("causal", "padded"):
        mask = mask.tril()
    if kind == "padded":
        mask[1, 2:, :2] = False
    given = {
        "sdpa": mask[:, None],
        "eager": None,
        "causal": None,
        "padded": torch.zeros(2, 1, 7, 7, dtype=torch.float64).masked_fill(~mask[:, None], -1e300),
    }[kind]
    attention = sdpa() if kind in ("sdpa", "causal") else eager
    expected = slow_truth(q, k, v, grad, mask, recipe, 0.3)
    for t in (q, k, v):
        t.requires_grad_()
    output, _ = recipe.around(attention, Attention(groups), q, k, v, given, scaling=0.3)
    output.backward(grad.transpose(1, 2))
    for one, other in zip(expected, (output.transpose(1, 2), q.grad, k.grad, v.grad), strict=True):
        assert torch.allclose(one, other, rtol=1e-11, atol=1e-12)


def test_dropout_is_in_the_exact_part_and_the_error_is_spread_by_the_weights_before_it():
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(1, 2, 5, 4, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(4)
    )
    recipe, module = AttentionBackward(None, bias=0.5), Attention(1).train()

    def run(attention):
        torch.manual_seed(3)
        output, _ = attention(module, q, k, v, None, scaling=0.5, dropout=0.4)
        found = torch.autograd.grad(output, (q, k, v), grad.detach().transpose(1, 2))
        return output.transpose(1, 2).detach(), found

    output, exact = run(eager)
    same, low = run(lambda *args, **kwargs: recipe.around(eager, *args, **kwargs))
    assert torch.equal(output, same)
    assert torch.equal(exact[2], low[2])
    p = (q @ k.mT * 0.5).softmax(-1)
    error = 0.5 * (grad * output).abs().sum(-1, keepdim=True)
    assert torch.allclose(low[0] - exact[0], -p * error @ k * 0.5, atol=1e-12)
    assert torch.allclose(low[1] - exact[1], (-p * error).mT @ q * 0.5, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rounding", ["truncate", "nearest"])
@pytest.mark.parametrize("bits", [1, 2, 7, 22])
def test_the_mantissa_is_that_of_its_slow_truth(bits, rounding, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, dtype=torch.float64, generator=generator) * 2.0 ** torch.randint(-9, 9, (500,))
    ties = torch.tensor([1.25, 1.75, -1.25, 1.5, 3.0, 1.99999, 0.0, -0.0, 2.0**-100], dtype=torch.float64)
    x = torch.cat([x, ties]).to(dtype)
    got = keep_mantissa(x, bits, rounding)
    assert got.tolist() == [slow_mantissa(value, bits, rounding) for value in x.tolist()]
    assert got.dtype == dtype


def test_what_is_not_finite_stays_as_it_is_and_enough_bits_change_nothing():
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.1])
    for rounding in ("truncate", "nearest"):
        got = keep_mantissa(x, 1, rounding)
        assert got[:2].tolist() == [torch.inf, -torch.inf]
        assert got[2].isnan()
        assert keep_mantissa(x[3:], 23, rounding).equal(x[3:])
    assert keep_mantissa(torch.tensor(3.4e38), 1, "nearest") == torch.inf


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_forward_is_exact_on_both_paths_and_the_backward_on_the_recovery_path(attention):
    model = llama(attention)
    plain = gradients(model)
    conversion = AttentionBackward(1).convert(model, halves(model))
    low = gradients(model)
    assert torch.equal(plain["loss"], low["loss"])
    assert "model.layers.0.self_attn.k_proj.weight" in different(plain, low)
    # Nothing below the last attention sees its error: not its values, its output projection, or what comes after it.
    last = {n for n in plain if "layers.1." in n or "lm_head" in n or n == "model.norm.weight"}
    assert last & different(plain, low) == {
        f"model.layers.1.{n}" for n in ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "input_layernorm.weight")
    }
    conversion.route([True] * len(conversion.units))
    assert not different(plain, gradients(model))
    conversion.route([False] * len(conversion.units))
    assert not different(low, gradients(model))
    conversion.undo()
    assert not different(plain, gradients(model))


def test_all_bits_are_the_exact_backward_bit_for_bit():
    for attention in ("sdpa", "eager"):
        model = llama(attention)
        plain = gradients(model)
        conversion = AttentionBackward(23).convert(model, halves(model))
        assert not different(plain, gradients(model))
        conversion.undo()


def test_a_unit_is_switched_alone_and_mlp_halves_are_left_out():
    model = llama()
    conversion = AttentionBackward(1).convert(model, halves(model))
    assert [u.name for u in conversion.units] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert len(conversion.costs) == 2
    low = gradients(model)
    conversion.route([False, True])
    only = gradients(model)
    name = "model.layers.{}.self_attn.k_proj.weight"
    conversion.route([True, True])
    plain = gradients(model)
    assert torch.equal(only[name.format(1)], plain[name.format(1)])
    assert not torch.equal(only[name.format(0)], plain[name.format(0)])
    assert not torch.equal(low[name.format(1)], plain[name.format(1)])
    conversion.undo()


def test_a_route_that_is_due_is_pulled_before_the_first_attention():
    model = llama()
    plain = gradients(model)
    conversion = AttentionBackward(1).convert(model, halves(model))
    pulled = []

    def pull():
        pulled.append(True)
        conversion.route([True, True])

    conversion.pull = pull
    assert not different(plain, gradients(model))
    assert pulled == [True]
    conversion.undo()


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_have_the_gradients_of_plain_ones(reentrant):
    model = llama().train()
    conversion = AttentionBackward(1).convert(model, halves(model))
    expected = gradients(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert not different(expected, gradients(model))
    conversion.undo()


def test_under_autocast_the_error_is_that_of_the_dtype_in_force():
    model = llama()
    with torch.autocast("cpu", torch.bfloat16):
        plain = gradients(model)
        conversion = AttentionBackward(1).convert(model, halves(model))
        low = gradients(model)
    conversion.undo()
    single = gradients(llama())
    conversion = AttentionBackward(1).convert(other := llama(), halves(other))
    expected = gradients(other)
    conversion.undo()
    name = "model.layers.1.self_attn.k_proj.weight"
    error, reference = low[name] - plain[name], expected[name] - single[name]
    assert reference.norm() > 0
    # O itself has 8 bits there, so it may fall on the other side of one of its two codes.
    assert torch.nn.functional.cosine_similarity(error.flatten(), reference.flatten(), dim=0) > 0.9


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.slow
def test_a_compiled_model_has_the_path_in_force():
    torch._dynamo.reset()
    model = llama(num_hidden_layers=1)
    conversion = AttentionBackward(1).convert(model, halves(model))
    low = gradients(model)
    compiled = torch.compile(model, backend="aot_eager")
    conversion.route([True])
    plain = gradients(model)
    for active, expected in ((False, low), (True, plain), (False, low)):
        conversion.route([active])
        got = gradients(compiled)
        got = {n.removeprefix("_orig_mod."): g for n, g in got.items()}
        assert all(torch.allclose(expected[n], got[n], atol=1e-6) for n in expected)
    conversion.undo()


def test_a_copy_is_a_plain_model_and_undo_leaves_nothing():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = llama()
    before = [set(m.__dict__) for m in model.modules()]
    plain = gradients(model)
    conversion = AttentionBackward(1).convert(model, halves(model))
    assert not different(plain, gradients(copy.deepcopy(model)))
    assert list(model.state_dict()) == list(llama().state_dict())
    conversion.undo()
    conversion.undo()
    assert [set(m.__dict__) for m in model.modules()] == before
    gc.collect()  # what other tests have let go of
    assert "get_interface" not in ALL_ATTENTION_FUNCTIONS.__dict__


def test_it_is_a_recipe_and_the_guard_steers_it(tmp_path):
    import trimtab

    assert isinstance(AttentionBackward(), Recipe)
    model = llama()
    plain = gradients(model)
    with trimtab.attach(model, AttentionBackward(1)) as guard:
        assert isinstance(guard.conversion, Conversion)
        names = [n for n in guard.units if n.endswith("self_attn")]
        guard.route(names)
        assert not different(plain, gradients(model))
        guard.route([])
        assert different(plain, gradients(model))
        guard.step()
    assert not different(plain, gradients(model))


def test_what_has_no_attention_of_its_own_is_refused_and_says_why():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    plain = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2)])})
    with pytest.raises(ConfigError, match=r"can convert none of them.*no attention of transformers"):
        AttentionBackward().convert(plain, halves(plain))
    model = Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, attn_implementation="eager",
        )
    )  # fmt: skip
    with pytest.raises(ConfigError, match="soft-cap"):
        AttentionBackward().convert(model, halves(model))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("mantissa_bits", 0),
        ("mantissa_bits", 52),
        ("mantissa_bits", 1.0),
        ("rounding", "up"),
        ("bias", math.nan),
        ("bias", "0.1"),
        ("unit", "block"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused(setting, value):
    with pytest.raises(ConfigError, match=f"^{setting}="):
        AttentionBackward(**{setting: value})


def test_attention_that_is_left_as_it_is_is_named():
    model = llama()
    model.model.layers[1].self_attn.softcap = 30.0
    with pytest.warns(TrimtabWarning, match=r"leaves model\.layers\.1\.self_attn as it is: a soft-cap"):
        conversion = AttentionBackward().convert(model, halves(model))
    assert [u.name for u in conversion.units] == ["model.layers.0.self_attn"]
    conversion.undo()
