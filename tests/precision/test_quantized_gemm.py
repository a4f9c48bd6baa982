import copy

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from torch import nn

import trimtab
from trimtab.errors import ConfigError, TrimtabWarning
from trimtab.formats import fake_quantize, get, per_block, per_tile, per_token
from trimtab.formats.slow_scaling import fake_quantize_slowly
from trimtab.precision import QUANTIZER_STATS, QuantizedGemm

LOW = ["e3m2", "e2m3", "e2m1"]


def layer(inputs=200, outputs=130, bias=True, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, outputs, bias=bias, dtype=dtype))


def gradients(module, x, grad):
    module.zero_grad()
    x = x.detach().requires_grad_()
    y = module(x)
    y.backward(grad)
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


def slowly(x, name, granularity):
    """``x`` as the scalar specification rounds it, in float64."""
    return fake_quantize_slowly(x.detach().numpy(), get(name), granularity)[0].astype(np.float64)


def slow_products(x, weight, bias, grad, forward, backward, scaling):
    """The output and the gradients of input, weight and bias, multiplied in float64."""
    rows, blocks = (per_tile(), per_block()) if scaling == "tile" else (per_token(), per_token())
    qx, qg, qw = slowly(x, forward, rows), slowly(grad, backward, rows), slowly(weight, forward, blocks)
    return qx @ qw.T + bias.detach().numpy(), qg @ qw, qg.T @ qx, grad.numpy().sum(0)


@pytest.mark.parametrize("scaling", ["tile", "token"])
@pytest.mark.parametrize(("low", "is_high"), [*((low, False) for low in LOW), ("e3m2", True)])
def test_each_path_is_the_three_products_of_operands_rounded_by_the_scalar_specification(low, is_high, scaling):
    model = layer()
    guard = trimtab.attach(model, QuantizedGemm(low, scaling=scaling), units=["0"])
    guard.route(["0"] if is_high else [])
    x, grad = torch.randn(7, 200), torch.randn(7, 130)
    forward, backward = ("e4m3", "e5m2") if is_high else (low, low)
    truth = slow_products(x, *model[0].parameters(), grad, forward, backward, scaling)
    for actual, expected, terms in zip(gradients(model, x, grad), truth, (201, 130, 7, 7), strict=True):
        # A float32 sum of n terms is wrong by at most n * 2**-24 times the sum of their magnitudes; each is below 64.
        np.testing.assert_allclose(actual.numpy(), expected, rtol=0, atol=terms * 2.0**-24 * terms * 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_bf16_recovery_path_is_the_plain_layer_bit_for_bit(dtype):
    model = layer(dtype=dtype)
    plain = copy.deepcopy(model)
    guard = trimtab.attach(model, QuantizedGemm(high="bf16"), units=["0"])
    guard.route(["0"])
    x, grad = torch.randn(2, 5, 200, dtype=dtype), torch.randn(2, 5, 130, dtype=dtype)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, x, grad), gradients(plain, x, grad), strict=True))


def test_a_backward_takes_the_path_of_its_forward_whatever_was_routed_in_between():
    model = layer()
    guard = trimtab.attach(model, QuantizedGemm(), units=["0"])
    x, grad = torch.randn(7, 200), torch.randn(7, 130)
    expected = gradients(model, x, grad)
    model.zero_grad()
    y = model(x.requires_grad_())
    guard.route(["0"])
    y.backward(grad)
    assert torch.equal(model[0].weight.grad, expected[2])


def test_one_switch_turns_every_projection_of_a_block(blocks):
    model = blocks()
    guard = trimtab.attach(model, QuantizedGemm(high="bf16", unit="block"))
    assert all(name.count(".") == 1 for name in guard.units)
    x = torch.randn(5, 8)
    plain = copy.deepcopy(model)
    guard.route(list(guard.units))
    assert torch.equal(model(x), plain(x))
    guard.route(list(guard.units)[1:])
    assert not torch.equal(model(x), plain(x))


def test_a_frozen_layer_is_quantized_too_and_keeps_no_input():
    model = layer()
    model.requires_grad_(False)
    model.append(nn.Linear(130, 3))
    guard = trimtab.attach(model, QuantizedGemm(), units=["0", "1"])
    assert [cost.low_saved_bytes for cost in guard.conversion.costs] == [0, 130 * 4]
    x = torch.randn(7, 200, requires_grad=True)
    model(x).sum().backward()
    assert model[0].weight.grad is None
    assert bool((x.grad != 0).any())


def test_what_cannot_be_converted_is_named_once_with_its_reason_and_the_rest_is_converted():
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"up": nn.Linear(4, 4), "down": nn.Linear(4, 4)})])})
    model["layers"][0]["down"].forward = lambda x: x
    with pytest.warns(TrimtabWarning, match=r"layers.0.down as it is: .* replaced its forward"):
        guard = trimtab.attach(model, QuantizedGemm(unit="block"))
    assert guard.units == ("layers.0",)
    assert len(guard.conversion.operators[0]) == 1


def test_a_model_of_norms_alone_is_refused_with_the_reason():
    model = nn.Sequential(nn.LayerNorm(4))
    with pytest.raises(ConfigError, match="it is a LayerNorm, with no layer that multiplies by a weight"):
        trimtab.attach(model, QuantizedGemm())
    assert type(model[0]) is nn.LayerNorm


@pytest.mark.parametrize(
    ("setting", "value"),
    [("low", "e4m4"), ("high", "fp16"), ("unit", "model"), ("scaling", "row"), ("scale_kind", "x")],
)
def test_a_setting_that_is_none_of_the_allowed_is_refused(setting, value):
    with pytest.raises(ConfigError, match=f"{setting}="):
        QuantizedGemm(**{setting: value})


def test_autocast_multiplies_in_its_dtype_and_quantizes_the_master_weight():
    model = layer()
    guard = trimtab.attach(model, QuantizedGemm("e2m1", scale_kind="e8m0"), units=["0"])
    x = torch.randn(7, 200)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert model[0].weight.grad.dtype == torch.float32
    # Scales that are powers of two and codes of three bits are exact in bfloat16.
    qw = fake_quantize(model[0].weight.detach(), get("e2m1"), per_block(), "e8m0")
    qx = fake_quantize(x.bfloat16(), get("e2m1"), per_tile(), "e8m0")
    expected = torch.nn.functional.linear(qx, qw.bfloat16(), model[0].bias.bfloat16())
    assert torch.equal(y, expected)
    assert guard.units == ("0",)


class TestQuantizerStatistics:
    def observed(self, model, x, active=(), shadow=False):
        guard = trimtab.attach(model, QuantizedGemm(), units=["0"])
        guard.conversion.observe_quantizers(shadow)
        guard.route(list(active))
        y = model(x)
        rows = guard.conversion.take_quantizer_stats()
        guard.detach()
        return y, rows

    def test_the_error_is_the_mean_over_channels_of_what_each_lost(self):
        x = torch.randn(9, 200)
        x[:, 3] *= 1000
        x[:, 7] = 0
        _, rows = self.observed(layer(), x)
        q, used = slowly(x, "e3m2", per_tile()), x.any(0).numpy()
        lost = np.linalg.norm(x.numpy() - q, axis=0)[used] / np.linalg.norm(x.numpy(), axis=0)[used]
        row = dict(zip(QUANTIZER_STATS, rows[0].tolist(), strict=True))
        assert row["error"] == pytest.approx(lost.mean(), rel=1e-5)
        assert row["amax"] == x.abs().max()
        assert row["flushed_share"] == pytest.approx(((q == 0) & (x.numpy() != 0)).sum() / (x != 0).sum().item())

    def test_observing_changes_no_bit_of_the_output(self):
        model, x = layer(), torch.randn(9, 200)
        y, _ = self.observed(model, x)
        guard = trimtab.attach(model, QuantizedGemm(), units=["0"])
        assert torch.equal(model(x), y)
        guard.detach()

    def test_the_recovery_path_is_judged_by_the_low_one_in_shadow_and_not_at_all_otherwise(self):
        model, x = layer(), torch.randn(9, 200)
        _, low = self.observed(model, x)
        y, shadowed = self.observed(model, x, active=["0"], shadow=True)
        plain, none = self.observed(model, x, active=["0"])
        assert torch.equal(low, shadowed)
        assert none is None
        assert torch.equal(y, plain)

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_an_input_that_is_not_finite_has_an_infinite_error(self, bad):
        x = torch.randn(9, 200)
        x[2, 5] = bad
        y, rows = self.observed(layer(), x)
        assert rows[0, 0] == torch.inf
        assert bool(y[2].isnan().all())
        assert bool(y[[0, 1, 3]].isfinite().all())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*instantiated")  # by the compiler itself
@pytest.mark.parametrize("high", ["fp8", "bf16"])
def test_twenty_assignments_share_one_graph_and_give_the_gradients_of_eager_mode(blocks, high):
    torch._dynamo.reset()
    model = blocks()
    guard = trimtab.attach(model, QuantizedGemm(high=high))
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    x = torch.randn(5, 8)
    rng = np.random.default_rng(0)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(20):
            guard.route([unit for unit in guard.units if rng.random() < 0.5])
            grads = []
            for f in (compiled, model):
                model.zero_grad()
                f(x).square().sum().backward()
                grads.append([p.grad.clone() for p in model.parameters()])
            assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert counter.frame_count == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    torch._dynamo.reset()
