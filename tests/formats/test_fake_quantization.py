"""What the fused torch form promises beyond its values: statistics, graphs, gradients, its input left alone."""

import math

import pytest
import torch

from trimtab.formats import (
    channel_error,
    fake_quantize,
    fake_quantize_with_stats,
    get,
    per_block,
    per_group,
    per_tensor,
    per_token,
    quantize,
)
from trimtab.precision.stored_copy import encode_with_stats


def some_tensor(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("kind", ["float32", "e8m0"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("stochastic", [False, True])
def test_asking_for_statistics_changes_no_value(fmt, kind, dtype, stochastic):
    x = some_tensor(6, 10).to(dtype)
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) if stochastic else None
    values, _ = fake_quantize_with_stats(x, fmt, per_group(4), kind, noise)
    assert torch.equal(values, fake_quantize(x, fmt, per_group(4), kind, noise))


@pytest.mark.parametrize("kind", ["float32", "e8m0"])
def test_statistics_count_what_happened(fmt, kind):
    x = some_tensor(40, 50) ** 3
    x[:3] = 0
    values, stats = fake_quantize_with_stats(x, fmt, per_group(16), kind)
    nonzero = x != 0
    assert stats.amax == x.abs().max()
    assert stats.flushed_share.item() == pytest.approx(((values == 0) & nonzero).sum().item() / nonzero.sum().item())
    # More than half the last step beyond the largest value: no rounding errs by that much.
    half_step = 2.0 ** (fmt.max_exponent - fmt.mantissa_bits - 1)
    scale = quantize(x, fmt, per_group(16), kind).scale.repeat_interleave(16, -1)[:, :50]
    too_far = x.abs() - fmt.max_value * scale > half_step * scale
    assert stats.saturated_share.item() == pytest.approx(too_far.sum().item() / nonzero.sum().item())
    if kind == "float32":
        assert stats.saturated_share == 0
    elif fmt.name in ("e2m1", "e4m3"):
        assert stats.saturated_share > 0


def test_statistics_of_nothing_of_zeros_and_of_what_is_not_finite():
    for shape in ((0, 4), (3, 4), (4, 0), (2, 0, 3), (2, 3, 0), (0, 0), (0,)):
        x = torch.zeros(shape)
        found = [encode_with_stats(x, 4)[2]]
        found += [fake_quantize_with_stats(x, get("e2m1"), per_token(), kind)[1] for kind in ("float32", "e8m0")]
        for stats in found:
            assert (stats.amax, stats.flushed_share, stats.saturated_share, stats.channel_error) == (0, 0, 0, 0)
        assert channel_error(x, x) == 0
    _, stats = fake_quantize_with_stats(torch.tensor([[1.0, math.inf], [1.0, 2.0]]), get("e2m1"), per_token())
    assert stats.amax == math.inf
    assert stats.saturated_share == 0
    assert fake_quantize_with_stats(torch.tensor([1.0, math.nan]), get("e2m1"), per_token())[1].amax.isnan()


def test_statistics_and_values_are_computed_without_reading_a_number_back():
    # A meta tensor has no numbers: reading one would fail.
    x = torch.empty(5, 300, device="meta", dtype=torch.bfloat16)
    values, stats = fake_quantize_with_stats(x, get("e3m2"), per_block(), "e8m0", torch.empty_like(x))
    assert values.shape == x.shape
    assert stats.flushed_share.shape == stats.amax.shape == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_channel_error_is_that_of_its_definition_at_every_magnitude(dtype):
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(50, 7, generator=generator, dtype=torch.float64).to(dtype)
    base[:, 3] = 0
    base[:, 5] *= 1e-25  # its squares are below what float32 holds
    for factor in (1e-36, 1e-10, 1.0, 1e10, 1e37):
        x = base * factor
        q = fake_quantize(x, get("e2m1"), per_group(7))
        exact, rounded = x.double(), q.double()
        error = (exact - rounded).norm(dim=0) / exact.norm(dim=0)
        expected = error[~error.isnan()].mean()
        assert channel_error(x, q).item() == pytest.approx(expected.item(), rel=1e-5), factor
        assert channel_error(x, x) == 0
        stats = fake_quantize_with_stats(x, get("e2m1"), per_group(7))[1]
        assert stats.channel_error.item() == pytest.approx(expected.item(), rel=1e-5)
        flushed = ((q == 0) & (x != 0)).sum() / (x != 0).sum()
        assert stats.flushed_share.item() == pytest.approx(flushed.item())


@pytest.mark.parametrize("kind", ["float32", "e8m0"])
def test_it_traces_into_one_graph_with_the_same_values(fmt, kind):
    def quantized(x, noise):
        return fake_quantize(x, fmt, per_group(4), kind) + fake_quantize(x, fmt, per_tensor(), kind, noise)

    torch._dynamo.reset()
    x = some_tensor(5, 10).bfloat16()
    noise = torch.rand(x.shape)
    compiled = torch.compile(quantized, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, noise), quantized(x, noise))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's compiler, about its own modules
@pytest.mark.parametrize(("name", "kind"), [("e2m1", "e8m0"), ("e4m3", "float32"), ("int4", "float32")])
def test_compiled_code_gives_the_same_bits_and_still_shows_what_is_not_finite(name, kind):
    def quantized(x, noise):
        fmt = get(name)
        return fake_quantize(x, fmt, per_group(4), kind), fake_quantize(x, fmt, per_block(), kind, noise), fmt.round(x)

    torch._dynamo.reset()
    x = some_tensor(150, 12).bfloat16()
    x[3, 5], x[7, 2], x[9] = math.inf, math.nan, -0.0
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(1))
    for actual, expected in zip(torch.compile(quantized, fullgraph=True)(x, noise), quantized(x, noise), strict=True):
        assert expected[3, 5].isnan()
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def test_no_gradient_flows_and_the_input_is_left_alone(fmt):
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x = some_tensor(4, 128).to(dtype).requires_grad_()
        before, noise = x.detach().clone(), torch.full(x.shape, 0.25)
        for granularity in (per_tensor(), per_token(), per_block()):
            for each in (None, noise):
                assert not fake_quantize(x, fmt, granularity, noise=each).requires_grad
                assert not fmt.round(x, noise=each).requires_grad
        assert torch.equal(x, before)
        assert (noise == 0.25).all()


def test_a_transposed_tensor_is_quantized_as_its_copy(fmt):
    x = some_tensor(130, 200).t()
    for granularity in (per_tensor(), per_token(), per_group(32), per_block()):
        assert torch.equal(fake_quantize(x, fmt, granularity), fake_quantize(x.contiguous(), fmt, granularity))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("kind", ["float32", "e8m0"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_gpu_gives_the_same_bits(fmt, kind, dtype):
    x = some_tensor(130, 300).to(dtype)
    x[3, 5], x[7] = math.inf, 0
    for granularity in (per_tensor(), per_token(), per_group(32), per_block()):
        here, there = fake_quantize(x, fmt, granularity, kind), fake_quantize(x.cuda(), fmt, granularity, kind).cpu()
        assert torch.equal(here.nan_to_num(9), there.nan_to_num(9))
