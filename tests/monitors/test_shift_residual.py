"""Softmax does not see a shift of its row, so the gradients of a head's keys sum to zero, unless backward is biased."""

import json
import math

import pytest
import torch

from trimtab.errors import ConfigError
from trimtab.monitors.attention_keys import watch_keys
from trimtab.monitors.shift_residual import ShiftResidual, shift_residual
from trimtab.precision import find_units
from trimtab.precision.attention_backward import AttentionBackward

VOCABULARY = 50


def rotated(x):
    """Rotary position embeddings: channels i and i + d/2 turn together."""
    tokens, size = x.shape[-2:]
    angles = torch.arange(tokens)[:, None] * 100.0 ** (-torch.arange(size // 2) / (size // 2))
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def key_gradient(weights_of, mask=None, groups=1, dtype=torch.float64):
    """The gradient of post-RoPE keys under a loss that is nothing special."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, 9, 8, generator=generator, dtype=torch.float64).to(dtype)
        for heads in (4, 4 // groups, 4 // groups)
    )
    q, k = rotated(q).to(dtype), rotated(k).to(dtype).requires_grad_()
    keys, values = (t.repeat_interleave(groups, 1) for t in (k, v))
    logits = q @ keys.mT / math.sqrt(8)
    output = weights_of(logits if mask is None else logits.masked_fill(~mask, -torch.inf)) @ values
    (output.sin() + output**3).sum().backward()
    return k.grad


def softmax(logits):
    return logits.softmax(-1)


def with_sink(logits):
    return torch.cat([logits, torch.zeros_like(logits[..., :1])], -1).softmax(-1)[..., :-1]


def with_soft_cap(logits):
    return (2 * torch.tanh(logits / 2)).softmax(-1)


CAUSAL = torch.ones(9, 9, dtype=torch.bool).tril()
PADDED = torch.ones(2, 1, 1, 9, dtype=torch.bool)
PADDED[1, ..., 6:] = False


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("mask", [None, CAUSAL, PADDED, CAUSAL & PADDED])
def test_the_gradients_of_a_heads_keys_sum_to_zero(mask, groups):
    residual = shift_residual(key_gradient(softmax, mask, groups))
    assert residual.shape == (2, 4 // groups)
    assert (residual < 1e-12).all()


@pytest.mark.parametrize("weights_of", [with_sink, with_soft_cap, torch.sigmoid])
def test_the_invariance_does_not_hold_with_sinks_soft_caps_and_sigmoids(weights_of):
    assert (shift_residual(key_gradient(weights_of)) > 1e-3).all()


def test_the_residual_is_what_its_definition_says():
    grad = torch.randn(2, 3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    got = shift_residual(grad)
    for b in range(2):
        for h in range(3):
            total = [sum(grad[b, h, j, c].item() for j in range(5)) for c in range(4)]
            lengths = sum(math.sqrt(sum(grad[b, h, j, c].item() ** 2 for c in range(4))) for j in range(5))
            assert math.isclose(got[b, h], math.sqrt(sum(x * x for x in total)) / lengths, rel_tol=1e-12)


def test_zero_gradients_have_no_residual_and_broken_ones_no_number():
    assert shift_residual(torch.zeros(1, 2, 3, 4)).tolist() == [[0.0, 0.0]]
    assert shift_residual(torch.full((3, 4), torch.nan)).isnan()
    assert shift_residual(torch.full((3, 4), torch.inf)).isnan()
    one = torch.zeros(3, 4, dtype=torch.bfloat16)
    one[0] = 1
    assert shift_residual(one) == 1
    assert shift_residual(one).dtype == torch.float32


def llama(attention="sdpa", **settings):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, attn_implementation=attention, **(sizes | settings))
    )


def batch(step, sequences=4, tokens=32):
    """Tokens as unevenly spread as those of a text, half of which follow from the one before."""
    generator = torch.Generator().manual_seed(step)
    ids = (VOCABULARY * torch.rand(sequences, tokens, generator=generator) ** 3).long()
    for t in range(1, tokens):
        follows = torch.rand(sequences, generator=generator) < 0.5
        ids[:, t] = torch.where(follows, (ids[:, t - 1] * 3 + 1) % VOCABULARY, ids[:, t])
    return ids


def trained(num_steps, recipe=None, model=None, monitor=None, autocast=False, **inputs):
    """Residual and coherence by step: two tensors of shape (steps, places)."""
    model = model or llama()
    if monitor is None:
        monitor = ShiftResidual()
        monitor.start(model)
    conversion = recipe.convert(model, find_units(model, "half")) if recipe else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen = []
    for step in range(1, num_steps + 1):
        ids = batch(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(ids, labels=ids, **inputs).loss
        optimizer.zero_grad()
        loss.backward()
        seen.append(monitor.observe(step))
        optimizer.step()
    monitor.stop()
    if conversion is not None:
        conversion.undo()
    return (torch.stack([s[metric].clone() for s in seen]) for metric in ("residual", "coherence"))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("padded", [False, True])
def test_an_exact_backward_leaves_rounding_in_every_head_of_a_llama(attention, padded):
    mask = torch.ones(4, 32, dtype=torch.long)
    if padded:
        mask[0, 20:] = 0
        mask[1, :5] = 0
    residual, coherence = trained(3, model=llama(attention), attention_mask=mask)
    assert residual.shape == (3, 4)
    # Each of some hundred gradients is rounded a few times by 2**-24, in either direction.
    assert (residual < 1e-6).all()
    assert (coherence < 1e-2).all()
    if attention == "sdpa":  # the eager one computes its softmax in float32
        residual, _ = trained(3, model=llama(attention).double(), attention_mask=mask)
        assert (residual < 1e-14).all()


def test_bf16_leaves_less_than_a_wrong_delta_does():
    residual, coherence = trained(40, autocast=True)
    assert (residual.median() < 1e-3) & (residual.median() > 1e-5)
    assert (coherence[30:] < 0.5).all()


def test_a_biased_backward_is_coherent_and_gives_an_alarm():
    monitor = ShiftResidual()
    model = llama()
    monitor.start(model)
    residual, coherence = trained(35, AttentionBackward(None, bias=0.1), model, monitor)
    assert (residual[:10] >= 4e-3).all()
    assert coherence[30:].max() > 0.75
    rule = monitor.alarm_rules["coherence"]
    detectors = rule.detector.over(monitor.places("coherence"))
    alarms = [bool(detectors.update(values.double().numpy()).any()) for values in coherence]
    # The mean is above a half after 14 steps in one direction, and not before.
    assert not any(alarms[:13])
    assert all(alarms[20:])
    assert "biased" in rule.said("coherence", ["layer_0/head_0"], 0.9, 0.5)


@pytest.mark.parametrize("rounding", ["nearest", "truncate"])
def test_few_mantissa_bits_raise_the_residual_above_that_of_any_exact_backward(rounding):
    residual, _ = trained(10, AttentionBackward(1, rounding=rounding))
    assert (residual >= 4e-3).all()


def test_an_unbiased_error_is_not_coherent_even_at_its_onset():
    model, monitor = llama(), ShiftResidual()
    monitor.start(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    recipe, conversion, seen = AttentionBackward(1, rounding="nearest"), None, []
    for step in range(1, 81):
        if step == 21:
            conversion = recipe.convert(model, find_units(model, "half"))
        optimizer.zero_grad()
        model(batch(step), labels=batch(step)).loss.backward()
        seen.append(monitor.observe(step))
        optimizer.step()
    monitor.stop()
    conversion.undo()
    residual, coherence = (torch.stack([values[m].clone() for values in seen]) for m in ("residual", "coherence"))
    assert residual[20:].min() > 1e3 * residual[:20].max()
    assert (coherence < 0.5).all()


class Fed:
    """Hands a monitor gradients of keys whose sum is given."""

    def __init__(self, monitor):
        self.monitor = monitor
        monitor.start(torch.nn.Linear(1, 1))

    def step(self, *sums, size=1.0, layer=0):
        """``sums``: v of each micro-batch, shape (heads, d_head)."""
        for v in sums:
            k = torch.zeros(2, v.shape[0], 6, v.shape[1], dtype=v.dtype, requires_grad=True)
            rest = torch.randn(k.shape, dtype=v.dtype, generator=torch.Generator().manual_seed(0)) * size
            rest = rest - rest.mean((0, 2), keepdim=True) + v[None, :, None] / 12
            (watch_keys(k, layer) * rest).sum().backward()
        return self.monitor.observe(1)


def test_coherence_is_the_length_of_the_mean_direction():
    monitor = ShiftResidual(ema_factor=0.7, residual_floor=0.0)
    fed = Fed(monitor)
    generator = torch.Generator().manual_seed(1)
    mean = torch.zeros(3, 5, dtype=torch.float64)
    for size in (1e-9, 1.0, 1e9) * 4:
        parts = torch.randn(2, 3, 5, dtype=torch.float64, generator=generator) * size
        v = parts.sum(0)
        mean = 0.7 * mean + 0.3 * v / v.norm(dim=-1, keepdim=True)
        got = fed.step(*parts, size=size)["coherence"]
        assert torch.allclose(got, mean.norm(dim=-1), rtol=1e-6)
    monitor.stop()


def test_incoherent_noise_sinks_to_what_the_steps_allow_and_a_bias_to_one():
    for bias, expected in ((0.0, 1 / math.sqrt(39)), (10.0, 1.0)):
        monitor = ShiftResidual()
        fed = Fed(monitor)
        generator = torch.Generator().manual_seed(2)
        drawn = [fed.step(torch.randn(8, 64, generator=generator) + bias)["coherence"] for _ in range(300)]
        seen = torch.stack(drawn)[250:]
        # The mean square of a chi over 64 directions deviates by sqrt(2/64), over 8 heads by less.
        assert abs(seen.mean() / expected - 1) < 3 * math.sqrt(2 / 64 / 8)
        assert not (bias == 0 and (torch.stack(drawn) > 0.5).any())
        monitor.stop()


def test_an_inexact_backward_is_a_notice_and_a_single_bad_step_is_not():
    monitor = ShiftResidual()
    fed = Fed(monitor)
    rule = monitor.alarm_rules["residual"]
    assert (rule.level, rule.mechanism) == ("notice", "inexact attention backward")
    detectors, generator, told = None, torch.Generator().manual_seed(4), []
    for size in [1e-4] * 20 + [0.08] + [1e-4] * 20 + [0.5] * 5:
        values = fed.step(torch.randn(2, 64, generator=generator) * size)["residual"]
        detectors = detectors or rule.detector.over(monitor.places("residual"))
        told.append(bool(detectors.update(values.double().numpy()).any()))
    assert told.index(True) in (41, 42)
    assert all(told[42:])
    monitor.stop()


def test_a_dropped_step_leaks_nothing_into_the_next():
    monitor = ShiftResidual()
    fed = Fed(monitor)
    fed.monitor.observe = lambda step: {}  # a step that the loss scaler skips
    fed.step(torch.full((2, 4), torch.inf))
    del fed.monitor.observe
    monitor.drop(1)
    assert fed.step(torch.ones(2, 4))["coherence"].tolist() == pytest.approx([0.05, 0.05])
    monitor.stop()


def test_what_repeats_itself_below_the_floor_is_not_coherent():
    v = torch.ones(1, 4)
    for size, coherent in ((1.0, True), (1e5, False)):
        monitor = ShiftResidual()
        fed = Fed(monitor)
        for _ in range(14):
            got = fed.step(v, size=size)
        assert bool(got["coherence"] > 0.5) == coherent
        assert bool(got["residual"] > 1e-3) == coherent
        monitor.stop()


def test_a_step_that_overflowed_poisons_no_mean():
    monitor = ShiftResidual(ema_factor=0.5, residual_floor=0.0)
    fed = Fed(monitor)
    v = torch.ones(2, 4)
    fed.step(v)
    for broken in (torch.inf, torch.nan):
        got = fed.step(torch.stack([v[0] * broken, v[1]]))
        assert got["residual"].isnan().tolist() == got["coherence"].isnan().tolist() == [True, False]
    assert fed.step(v)["coherence"].tolist() == pytest.approx([0.75, 0.9375])
    monitor.stop()


def test_layers_are_in_the_order_of_their_numbers_and_missing_ones_have_no_value():
    monitor = ShiftResidual()
    fed = Fed(monitor)
    assert monitor.observe(1) == {}
    for layer, heads in ((10, 1), (2, 3)):
        fed.step(torch.ones(heads, 4), layer=layer)
    assert monitor.places("residual") == ("layer_2/head_0", "layer_2/head_1", "layer_2/head_2", "layer_10/head_0")
    got = fed.step(torch.ones(1, 4), layer=10)
    assert got["residual"].isnan().tolist() == got["coherence"].isnan().tolist() == [True, True, True, False]
    monitor.stop()


def test_a_resumed_monitor_goes_on_as_the_uninterrupted_one():
    def sums(n):
        generator = torch.Generator().manual_seed(3)
        return list(torch.randn(n, 2, 4, generator=generator) + 1)

    uninterrupted = ShiftResidual()
    fed = Fed(uninterrupted)
    values = [fed.step(v)["coherence"] for v in sums(8)]
    uninterrupted.stop()
    first = ShiftResidual()
    fed = Fed(first)
    for v in sums(8)[:3]:
        fed.step(v)
    state = json.loads(json.dumps(first.state_dict()))
    tensors = {name: t.clone() for name, t in first.tensor_state().items()}
    first.stop()
    second = ShiftResidual()
    second.load_state_dict(state)
    second.load_tensor_state(tensors)
    fed = Fed(second)
    again = [fed.step(v)["coherence"] for v in sums(8)[3:]]
    assert torch.equal(torch.stack(again), torch.stack(values[3:]))
    second.load_state_dict(state)  # without the tensors: afresh
    assert fed.step(sums(1)[0])["coherence"].tolist() == pytest.approx([0.05, 0.05])
    second.stop()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("ema_factor", 0),
        ("ema_factor", 1.0),
        ("ema_factor", math.nan),
        ("residual_floor", -1.0),
        ("residual_floor", "small"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused(setting, value):
    with pytest.raises(ConfigError, match=f"^{setting}="):
        ShiftResidual(**{setting: value})
