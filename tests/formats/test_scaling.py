"""Scaled quantization, in codes and fused, against the slow truth of one block at a time."""

import math

import array_api_strict
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.errors import ConfigError
from trimtab.formats import (
    FORMATS,
    Granularity,
    dequantize,
    encode_e8m0,
    fake_quantize,
    get,
    per_block,
    per_group,
    per_tensor,
    per_tile,
    per_token,
    quantize,
)
from trimtab.formats.slow_scaling import fake_quantize_slowly, scale_of_block

GRANULARITIES = [per_tensor(), per_token(), per_group(3), Granularity(rows=2, columns=3), per_tile(), per_block()]
granularities = pytest.mark.parametrize("granularity", GRANULARITIES, ids=lambda g: f"{g.rows}x{g.columns}")
kinds = pytest.mark.parametrize("kind", ["float32", "e8m0"])
MAKERS = {"numpy": np.asarray, "torch": torch.from_numpy, "array_api_strict": array_api_strict.asarray}


def nasty(dtype):
    """Rows of (13, 7): ordinary, zeros, huge, subnormal, and what is not finite."""
    x = np.random.default_rng(0).standard_normal((13, 7))
    x *= 2.0 ** np.random.default_rng(1).integers(-8, 8, x.shape)
    limits = np.finfo(np.float32)
    x[1] = 0
    x[2, ::2] = -0.0
    x[3] = float(limits.max) * np.array([1, -1, 0.5, 0.1, 1e-3, 0, 1e-38])
    x[4] = float(limits.smallest_subnormal) * np.array([1, 0, 0, -3, 0, 0, 2])
    x[5] = float(limits.smallest_normal) * np.array([1, -0.5, 3, 100, 1e-3, 0, 7])
    x[6, 4], x[7, 0], x[8, 6] = np.nan, np.inf, -np.inf
    x[9] = 2.0 ** np.arange(-3, 4)
    x[10] = np.nextafter(np.float32(8), np.float32(0))
    if dtype == np.float64:
        x[11, 1], x[12, 0] = 1e300, np.nextafter(16.0, 0)
    return x.astype(dtype)


def check(x, fmt, granularity, kind, noise, assert_same_bits):
    expected, scales = fake_quantize_slowly(x, fmt, granularity, kind, noise)
    for make in MAKERS.values():
        array, draws = make(x), None if noise is None else make(noise)
        quantized = quantize(array, fmt, granularity, kind, draws)
        np.testing.assert_array_equal(np.asarray(quantized.scale), scales)
        assert np.asarray(quantized.scale).dtype == np.float32
        values = np.asarray(dequantize(quantized, array.dtype))
        fused = np.asarray(fake_quantize(array, fmt, granularity, kind, draws))
        assert values.dtype == fused.dtype == x.dtype
        np.testing.assert_array_equal(values, expected)
        if fmt.layout == "float" or make is torch.from_numpy:  # integer codes hold no sign of a zero
            assert_same_bits(fused, expected)
        else:
            np.testing.assert_array_equal(fused, expected)


@granularities
@kinds
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_every_way_gives_the_bits_of_the_slow_truth(fmt, granularity, kind, dtype, rounding, assert_same_bits):
    x = nasty(dtype)
    noise = np.random.default_rng(2).random(x.shape, dtype=np.float32) if rounding == "stochastic" else None
    check(x, fmt, granularity, kind, noise, assert_same_bits)


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 0), (0, 5), (2, 3, 5), (2, 0, 3), (), (2, 1, 3, 4)], ids=str)
@granularities
@kinds
def test_ragged_and_empty_shapes_too(shape, granularity, kind, assert_same_bits):
    x = np.asarray(np.random.default_rng(0).standard_normal(shape), dtype=np.float32)
    check(x, get("e2m1"), granularity, kind, None, assert_same_bits)


@pytest.mark.parametrize("granularity", [per_tile(), per_block()], ids=["tile", "block"])
@kinds
def test_more_than_one_block_of_the_real_size(granularity, kind, assert_same_bits):
    x = np.random.default_rng(0).standard_normal((130, 257)).astype(np.float32)
    check(x, get("e4m3"), granularity, kind, None, assert_same_bits)


@pytest.mark.parametrize("name", list(FORMATS))
@settings(max_examples=25)
@given(data=st.data(), kind=st.sampled_from(["float32", "e8m0"]), granularity=st.sampled_from(GRANULARITIES[:4]))
def test_any_numbers_of_any_magnitude_agree_with_the_slow_truth(name, data, kind, granularity):
    rows, columns = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    entries = data.draw(st.lists(st.floats(width=32), min_size=rows * columns, max_size=rows * columns))
    x = np.array(entries, dtype=np.float32).reshape(rows, columns)
    expected, _ = fake_quantize_slowly(x, get(name), granularity, kind)
    for make in MAKERS.values():
        np.testing.assert_array_equal(np.asarray(fake_quantize(make(x), get(name), granularity, kind)), expected)


@kinds
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_to_only_at_the_end(fmt, kind, dtype):
    x = torch.from_numpy(nasty(np.float32)).to(dtype)
    for granularity in GRANULARITIES:
        expected = fake_quantize(x.float(), fmt, granularity, kind).to(dtype)
        assert torch.equal(fake_quantize(x, fmt, granularity, kind).nan_to_num(9), expected.nan_to_num(9))
        by_codes = dequantize(quantize(x, fmt, granularity, kind), dtype)
        assert torch.equal(by_codes.nan_to_num(9), expected.nan_to_num(9))


@kinds
def test_what_is_not_finite_makes_its_own_block_nan_and_no_other(fmt, kind):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    for bad in (math.nan, math.inf, -math.inf):
        spoilt = x.clone()
        spoilt[2, 1] = bad
        out, whole = fake_quantize(spoilt, fmt, per_group(3), kind), fake_quantize(x, fmt, per_group(3), kind)
        assert out[2, :3].isnan().all()
        out[2, :3] = whole[2, :3]
        assert torch.equal(out, whole)


def test_the_largest_entry_meets_the_largest_value_and_zeros_stay_zeros(fmt):
    x = torch.tensor([[0.0, -0.0, 0.0], [1.0, -3.0, 0.0], [1e-44, 0.0, 0.0]])
    quantized = quantize(x, fmt, per_token())
    largest = fmt.decode(quantized.codes)[1, 1]
    assert largest == -fmt.max_value
    assert torch.equal(fake_quantize(x, fmt, per_token())[0], x[0])
    assert torch.isfinite(quantized.scale).all()


def test_e8m0_scales_are_those_of_the_mx_specification(fmt):
    rng = np.random.default_rng(0)
    powers = 2.0 ** np.arange(-149, 128)
    amax = np.concatenate([powers, np.nextafter(powers.astype(np.float32), np.float32(0)), rng.random(100)])
    amax = amax.astype(np.float32)[:, None]
    expected = [max(-127, min(127, math.frexp(a)[1] - 1 - fmt.max_exponent)) if a else -127 for a in amax.ravel()]
    for make in MAKERS.values():
        scale = quantize(make(amax), fmt, per_token(), "e8m0").scale
        np.testing.assert_array_equal(np.asarray(scale).ravel(), 2.0 ** np.array(expected))
        assert np.asarray(encode_e8m0(scale)).ravel().tolist() == [e + 127 for e in expected]


def test_e8m0_codes_are_those_of_ml_dtypes():
    codes = np.arange(256, dtype=np.uint8)
    scales = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    for make in MAKERS.values():
        np.testing.assert_array_equal(np.asarray(encode_e8m0(make(scales))), codes)


def test_the_slow_truth_of_a_scale_reads_as_one_would_say_it():
    assert scale_of_block([3.0, -14.0], get("int4"), "float32") == 2
    assert scale_of_block([3.0, -14.0], get("e2m1"), "e8m0") == 2
    assert scale_of_block([0.0], get("int4"), "float32") == 2.0**-126
    assert math.isnan(scale_of_block([0.0, math.inf], get("int4"), "float32"))


@pytest.mark.parametrize("act", [quantize, fake_quantize])
def test_an_unknown_kind_of_scale_and_noise_of_another_shape_are_refused(act):
    for x in (np.ones((2, 3), dtype=np.float32), torch.ones(2, 3)):
        with pytest.raises(ConfigError, match="scale_kind='e4m3': a scale is 'float32' or 'e8m0'"):
            act(x, get("e2m1"), per_token(), "e4m3")
        with pytest.raises(ConfigError, match="noise has the array's shape"):
            act(x, get("e2m1"), per_token(), "e8m0", x[0])
    with pytest.raises(ConfigError, match="a number format rounds"):
        act(torch.ones(2, dtype=torch.int32), get("e2m1"), per_token())
