"""The stored copy of an activation against a scalar truth."""

import math

import numpy as np
import pytest
import torch

from trimtab.formats import packed_size
from trimtab.precision.stored_copy import decode, encode, stored_bytes_per_token

UNIT_ROUNDOFF = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24, torch.float64: 2.0**-53}
SIZES = (1, 2, 3, 5, 127)

widths = pytest.mark.parametrize("bits", [2, 4, 8])
dtypes = pytest.mark.parametrize("dtype", list(UNIT_ROUNDOFF), ids=lambda d: str(d)[6:])


def round_trip(x, bits, noise=None):
    packed, scale = encode(x, bits, noise)
    return decode(packed, scale, bits=bits, size=x.shape[-1], dtype=x.dtype)


def truth_of_row(row, bits, noise=None):
    """One row, one number at a time, in float32; returns (codes, scale, values)."""
    limit = 2 ** (bits - 1) - 1
    row = [np.float32(v) for v in row]
    scale = np.float32(max(abs(v) for v in row)) / np.float32(limit)
    codes, values = [], []
    for i, v in enumerate(row):
        ratio = v if scale == 0 else np.float32(v / scale)
        whole = math.floor(ratio)
        code = round(float(ratio)) if noise is None else whole + (noise[i] >= 1 - (float(ratio) - whole))
        codes.append(max(-limit, min(limit, code)))
        values.append(np.float32(codes[-1]) * scale)
    return codes, scale, values


@widths
@dtypes
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_row_is_stored_as_the_scalar_truth_says(bits, dtype, size, rounding):
    generator = torch.Generator().manual_seed(size)
    x = (torch.randn(20, size, generator=generator, dtype=torch.float64) * 3).to(dtype)
    x[0] = 0
    noise = torch.rand(x.shape, generator=generator) if rounding == "stochastic" else None
    out = round_trip(x, bits, noise)
    assert out.dtype == dtype
    for i, row in enumerate(x.double().tolist()):
        _, scale, values = truth_of_row(row, bits, None if noise is None else noise[i].tolist())
        assert encode(x, bits, noise)[1][i].item() == scale
        expected = torch.tensor(np.array(values)).to(dtype)
        assert torch.equal(out[i], expected)


@widths
@dtypes
@pytest.mark.parametrize("size", SIZES)
def test_rounding_to_nearest_errs_by_half_a_scale_at_most(bits, dtype, size):
    x = (torch.randn(200, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 5).to(dtype)
    _, scale = encode(x, bits)
    error = (round_trip(x, bits).double() - x.double()).abs()
    # Half a scale; and the roundings of float(x), x/scale and code*scale in float32 and of the result in its dtype.
    u = UNIT_ROUNDOFF[torch.float32]
    bound = scale.double() / 2 + x.double().abs() * 4 * u + scale.double() * (2 ** (bits - 1)) * UNIT_ROUNDOFF[dtype]
    assert (error <= bound).all()
    if size > 1 and bits < 8:
        assert (error > scale.double() / 4).any()  # the bound is of the right size


@widths
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_row_of_zeros_stays_exactly_zero_among_other_rows(bits, rounding):
    x = torch.randn(4, 33, generator=torch.Generator().manual_seed(1))
    x[[1, 3]] = 0
    noise = torch.full_like(x, 1 - 2.0**-24) if rounding == "stochastic" else None
    out = round_trip(x, bits, noise)
    assert (out[[1, 3]] == 0).all()
    assert (out[[0, 2]] != 0).any()


@widths
@dtypes
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_holds_something_not_finite_comes_back_as_nan_and_spares_the_others(bits, dtype, rounding, bad):
    x = torch.randn(3, 67, generator=torch.Generator().manual_seed(2)).to(dtype)
    clean = round_trip(x, bits)
    x[1, 40] = bad
    noise = torch.zeros(x.shape) + 0.5 if rounding == "stochastic" else None
    packed, scale = encode(x, bits, noise)
    assert torch.isnan(scale[1]).all()  # so that no device's cast of NaN to an integer matters
    out = decode(packed, scale, bits=bits, size=67, dtype=dtype)
    assert torch.isnan(out[1]).all()
    assert torch.isfinite(out[[0, 2]]).all()
    if noise is None:
        assert torch.equal(out[[0, 2]], clean[[0, 2]])


@widths
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=lambda d: str(d)[6:])
def test_the_largest_numbers_do_not_overflow_on_their_way_back(bits, dtype):
    largest = torch.tensor(torch.finfo(dtype).max, dtype=dtype)
    values = [largest]
    for _ in range(300):
        values.append(torch.nextafter(values[-1], torch.zeros((), dtype=dtype)))
    x = torch.stack(values)[:, None] * torch.tensor([1.0, -1.0], dtype=dtype)
    out = round_trip(x, bits)
    assert torch.isfinite(out).all()
    relative = ((out.double() - x.double()) / x.double()).abs()
    assert (relative <= 4 * UNIT_ROUNDOFF[torch.float32] + UNIT_ROUNDOFF[dtype]).all()


@widths
def test_a_double_beyond_float32_comes_back_as_nan_and_not_as_a_number(bits):
    x = torch.tensor([[1e39, 1.0], [1.0, 1.0]], dtype=torch.float64)
    out = round_trip(x, bits)
    assert torch.isnan(out[0]).all()
    # 1 comes back as limit * (1/limit), after a rounding of each in float32.
    assert ((out[1] - 1).abs() <= 2 * UNIT_ROUNDOFF[torch.float32]).all()


@widths
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_subnormal_rows_err_by_little_and_never_turn_into_nan(bits, rounding):
    smallest = 2.0**-149
    x = torch.arange(-40, 41, dtype=torch.float64).mul(smallest).float().reshape(27, 3)
    limit = 2 ** (bits - 1) - 1
    noise = torch.full_like(x, 0.5) if rounding == "stochastic" else None
    out = round_trip(x, bits, noise)
    # The scale is itself rounded to a multiple of the smallest number: limit times half of that comes on top.
    bound = x.double().abs().amax(-1, keepdim=True) / limit * (0.5 if noise is None else 1) + smallest * (limit + 1)
    assert ((out.double() - x.double()).abs() <= bound).all()


@widths
@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 3), (3, 0), (0, 0)])
def test_an_empty_batch_has_an_empty_copy(bits, shape):
    x = torch.zeros(shape)
    packed, scale = encode(x, bits)
    assert packed.shape == (*shape[:-1], packed_size(shape[-1], bits))
    assert scale.shape == (*shape[:-1], 1)
    assert round_trip(x, bits).shape == shape


@widths
def test_stochastic_rounding_is_unbiased(bits):
    generator = torch.Generator().manual_seed(3)
    num_draws = 4000
    x = torch.randn(7, 9, generator=generator)
    total = torch.zeros_like(x, dtype=torch.float64)
    for _ in range(num_draws):
        total += round_trip(x, bits, torch.rand(x.shape, generator=generator))
    scale = encode(x, bits)[1].double()
    fraction = (x.double() / scale) % 1
    # A Bernoulli variable of variance f(1-f); 5 sigma over 63 entries (3 sigma of the largest of them), and the
    # float32 rounding of ratio + noise, at most half a spacing of 2**(bits-1).
    sigma = scale * (fraction * (1 - fraction) / num_draws).sqrt()
    bound = 5 * sigma + scale * 2.0 ** (bits - 1 - 24) + x.double().abs() * 2.0**-22
    deviation = (total / num_draws - x.double()).abs()
    assert (deviation <= bound).all()
    # All entries together, 3 sigma: independent errors, each divided by its own.
    inner = sigma > 0
    pooled = ((total / num_draws - x.double())[inner] / sigma[inner]).sum() / math.sqrt(int(inner.sum()))
    assert abs(pooled) <= 3 + 0.1


def test_noise_never_moves_a_code_that_is_whole():
    codes = torch.arange(-127.0, 128.0)
    for noise in (0.0, 0.5, 1 - 2.0**-24):
        packed, scale = encode(codes[None], 8, torch.full((1, 255), noise))
        assert scale == 1
        assert packed[0].tolist() == codes.tolist()


@widths
def test_a_copy_takes_the_bytes_that_its_cost_says(bits):
    for size in (*SIZES, 64):
        packed, scale = encode(torch.randn(11, size), bits)
        real = packed.untyped_storage().nbytes() + scale.untyped_storage().nbytes()
        assert real == 11 * stored_bytes_per_token(size, bits, 2)


@widths
def test_encoding_leaves_its_input_and_its_noise_as_they_were(bits):
    x, noise = torch.randn(5, 9), torch.rand(5, 9)
    before = x.clone(), noise.clone()
    encode(x, bits)
    encode(x, bits, noise)
    assert torch.equal(x, before[0])
    assert torch.equal(noise, before[1])


@widths
def test_layouts_do_not_change_what_is_stored(bits):
    x = torch.randn(6, 10, generator=torch.Generator().manual_seed(5))
    for other in (x.t().contiguous().t(), x[None].expand(1, 6, 10)[0], torch.stack([x, x], -1)[..., 0]):
        for ours, theirs in zip(encode(other, bits), encode(x, bits), strict=True):
            assert torch.equal(ours, theirs)
    expanded = x[:1].expand(6, 10)
    assert torch.equal(round_trip(expanded, bits), round_trip(expanded.contiguous(), bits))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler warns of its own imports
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_compiled_encoder_also_marks_a_row_that_is_not_finite(bad):
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(3))
    x[1, 4] = bad
    packed, scale = torch.compile(encode)(x, 4)
    assert torch.isnan(scale[1]).all()
    out = decode(packed, scale, bits=4, size=16, dtype=x.dtype)
    assert torch.equal(out.isnan().any(-1), torch.tensor([False, True, False]))
