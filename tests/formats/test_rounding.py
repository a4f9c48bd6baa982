"""Rounding arrays, by the generic way and by torch's, against the scalar specification."""

import array_api_strict
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.errors import ConfigError
from trimtab.formats import (
    FORMATS,
    fake_quantize,
    fake_quantize_with_stats,
    get,
    per_token,
    quantize,
    rounding,
    torch_rounding,
)
from trimtab.formats.scalar import round_scalar

WAYS = {"generic": rounding.round_values, "fast": torch_rounding.round_values}
names = pytest.mark.parametrize("name", list(FORMATS))
floats = st.floats(allow_nan=False, allow_infinity=False) | st.floats(-500, 500, width=32) | st.floats(-8, 8, width=16)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rounding_is_the_scalar_specification_in_every_library(fmt, library, dtype, some_floats, assert_same_bits):
    values = some_floats(dtype)
    assert values.size >= 10_000
    rounded = np.asarray(fmt.round(library(values)))
    assert rounded.dtype == dtype
    assert_same_bits(rounded, [round_scalar(fmt, v) for v in values.tolist()])


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_half_precision_number_is_rounded_once(fmt, way, dtype, assert_same_bits):
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    rounded = WAYS[way](fmt, values)
    assert rounded.dtype == dtype
    assert_same_bits(rounded.double(), [round_scalar(fmt, v) for v in values.tolist()])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_numpy_s_half_precision_numbers_are_rounded_as_torch_s(fmt, dtype, assert_same_bits):
    patterns = np.arange(2**16, dtype=np.uint16)
    rounded = fmt.round(patterns.view(dtype))
    assert rounded.dtype == dtype
    as_torch = torch.from_numpy(patterns.view(np.int16)).view(torch.float16 if dtype == np.float16 else torch.bfloat16)
    assert_same_bits(rounded.astype(float), fmt.round(as_torch).double())


def test_every_dtype_holds_every_grid_value(grid):
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32):
        np.testing.assert_array_equal(grid.astype(dtype).astype(float), grid)


def test_a_float64_next_to_a_tie_is_not_rounded_to_the_tie_first(fmt, grid):
    ties = (grid[:-1] + grid[1:]) / 2
    above, below = np.nextafter(ties, np.inf), np.nextafter(ties, -np.inf)
    for round_array in (fmt.round, lambda v: fmt.round(torch.from_numpy(v)).numpy()):
        np.testing.assert_array_equal(round_array(above), grid[1:])
        np.testing.assert_array_equal(round_array(below), grid[:-1])


def test_what_is_not_finite_comes_back_as_nan_and_spares_its_neighbours(fmt, library):
    values = library(np.array([[np.nan, 1.0], [np.inf, -1.0], [-np.inf, 0.0]]))
    for noise in (None, library(np.zeros((3, 2)))):
        rounded = np.asarray(fmt.round(values, noise=noise))
        assert np.isnan(rounded[:, 0]).all()
        assert rounded[:, 1].tolist() == [1.0, -1.0, 0.0]


@names
@given(values=st.lists(floats, min_size=2, max_size=8))
def test_rounding_is_idempotent_monotone_and_odd(name, values):
    fmt = get(name)
    values = np.sort(np.array(values))
    for array in (values, torch.from_numpy(values)):
        rounded = fmt.round(array)
        np.testing.assert_array_equal(fmt.round(rounded), rounded)
        assert (np.diff(np.asarray(rounded)) >= 0).all()
        np.testing.assert_array_equal(fmt.round(-array), -rounded)
        assert (abs(rounded) <= fmt.max_value).all()


@names
@given(data=st.data(), values=st.lists(floats, min_size=1, max_size=8), noise_dtype=st.sampled_from(["f4", "f8"]))
def test_stochastic_rounding_is_the_scalar_specification_fixes_grid_points_and_is_odd(name, data, values, noise_dtype):
    fmt = get(name)
    width = 32 if noise_dtype == "f4" else 64
    draw = st.floats(0, 1, exclude_max=True, width=width)
    noise = np.array(data.draw(st.lists(draw, min_size=len(values), max_size=len(values))), dtype=noise_dtype)
    with np.errstate(over="ignore"):
        narrow = np.array(values, dtype=np.float32)
    for array in (np.array(values), np.nan_to_num(narrow)):
        expected = [round_scalar(fmt, v, n) for v, n in zip(array.tolist(), noise.tolist(), strict=True)]
        for make in (np.asarray, torch.from_numpy, array_api_strict.asarray):
            rounded = fmt.round(make(array), noise=make(noise))
            np.testing.assert_array_equal(np.asarray(rounded), expected)
            np.testing.assert_array_equal(np.asarray(fmt.round(rounded, noise=make(noise))), expected)
            np.testing.assert_array_equal(np.asarray(fmt.round(-make(array), noise=make(noise))), -np.array(expected))


def test_the_largest_noise_leaves_grid_points_alone(fmt, grid, library):
    values = grid.astype(np.float32)
    noise = np.full(values.shape, np.nextafter(np.float32(1), np.float32(0)))
    np.testing.assert_array_equal(np.asarray(fmt.round(library(values), noise=library(noise))), values)


def test_stochastic_rounding_is_unbiased_and_takes_only_the_two_neighbours(fmt, grid):
    rng = np.random.default_rng(0)
    values = np.repeat(rng.uniform(grid[0], grid[-1], 20), 4_000).astype(np.float32)
    rounded = fmt.round(values, noise=rng.random(values.shape, dtype=np.float32)).astype(np.float64)
    above = np.searchsorted(grid, values)
    low, high = grid[above - 1], grid[above]
    assert ((rounded == low) | (rounded == high)).all()
    # The variance of one draw is that of a coin between the neighbours; 4 standard errors, 20 means a format.
    deviation = np.sqrt((values - low) * (high - values) / 4_000)[::4_000]
    error = rounded.reshape(20, -1).mean(-1) - values[::4_000]
    assert (np.abs(error) <= 4 * deviation).all()


def test_noise_of_another_shape_is_refused(fmt, library):
    with pytest.raises(ConfigError, match=r"noise.shape=\(3,\): noise has the array's shape, here \(2, 3\)"):
        fmt.round(library(np.zeros((2, 3))), noise=library(np.zeros(3)))


@pytest.mark.parametrize("array", [np.arange(3), torch.arange(3), np.zeros(3, dtype=np.longdouble)])
def test_a_dtype_that_would_be_rounded_twice_or_not_at_all_is_refused(array):
    with pytest.raises(ConfigError, match="a number format rounds float16, bfloat16, float32, float64"):
        get("e4m3").round(array)


@pytest.mark.parametrize("thing", [[0.5, 2.5], 1.5, None, "1.5"])
def test_what_is_no_array_is_refused(thing):
    fmt = get("e4m3")
    acts = (fmt.round, fmt.encode, fmt.decode, lambda x: quantize(x, fmt, per_token()))
    for act in (*acts, lambda x: fake_quantize(x, fmt, per_token())):
        with pytest.raises(ConfigError, match=r"^array=.*an array of NumPy, torch or another array-API library"):
            act(thing)
    with pytest.raises(ConfigError, match=r"noise\.shape=None"):
        fmt.round(np.zeros(2), noise=[0.5, 0.5])
    with pytest.raises(ConfigError, match="statistics are taken of torch tensors"):
        fake_quantize_with_stats(thing, fmt, per_token())


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_another_byte_order_is_refused_by_that_name(dtype):
    foreign = np.zeros((2, 3), dtype=np.dtype(dtype).newbyteorder())
    for act in (get("e4m3").round, lambda x: quantize(x, get("int4"), per_token())):
        with pytest.raises(ConfigError, match="in the machine's native byte order"):
            act(foreign)
        act(foreign.astype(foreign.dtype.newbyteorder("=")))


def test_arrays_of_another_device_stay_there(fmt):
    device = array_api_strict.Device("device1")
    rounded = fmt.round(array_api_strict.asarray([1e9, float("nan")], device=device))
    assert rounded.device == device
    assert fmt.encode(rounded).device == fmt.decode(fmt.encode(rounded)).device == device
    there = array_api_strict.asarray(rounded, device=array_api_strict.Device("CPU_DEVICE"))
    assert np.asarray(there)[0] == fmt.max_value


def test_rounding_leaves_its_input_as_it_was_and_keeps_shapes(fmt):
    for shape in [(), (0, 3), (2, 3, 4)]:
        x = torch.linspace(-3, 3, 24)[: int(np.prod(shape))].reshape(shape)
        kept, noise = x.clone(), torch.full(shape, 0.5)
        assert fmt.round(x).shape == fmt.round(x, noise).shape == fmt.round(x.numpy()).shape == shape
        assert torch.equal(x, kept)
    x = torch.randn(6, 5)
    assert torch.equal(fmt.round(x.t()), fmt.round(x).t())


def test_torch_s_own_float8_casts_give_the_same_bits(fmt, some_floats, assert_same_bits):
    values = torch.from_numpy(some_floats(np.float32)).clamp(-fmt.max_value, fmt.max_value)
    if not torch_rounding.has_cast(fmt, values.dtype):
        assert fmt.layout == "integer" or fmt.name == "e2m1"
        return
    assert_same_bits(torch_rounding.round_by_cast(fmt, values.clone()), rounding.round_values(fmt, values))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_gpu_gives_the_same_bits(fmt, dtype, some_floats, assert_same_bits):
    values = torch.from_numpy(some_floats(np.float64)).to(dtype)
    noise = torch.rand(values.shape)
    assert_same_bits(fmt.round(values.cuda()).double().cpu(), fmt.round(values).double())
    assert_same_bits(fmt.round(values.cuda(), noise.cuda()).double().cpu(), fmt.round(values, noise).double())
