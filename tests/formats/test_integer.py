"""Rounding onto int2, int4 and int8, against ml_dtypes, NumPy and the scalar specification."""

import array_api_strict
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.errors import ConfigError
from trimtab.formats import FORMATS, IntegerFormat, get
from trimtab.formats.integer import round_scalar

LIBRARIES = {"numpy": np.asarray, "torch": torch.from_numpy, "array_api_strict": array_api_strict.asarray}
DTYPES = {"int2": ml_dtypes.int2, "int4": ml_dtypes.int4, "int8": np.dtype(np.int8)}

formats = pytest.mark.parametrize("name", list(FORMATS))
libraries = pytest.mark.parametrize("library", list(LIBRARIES))


def some_floats(limit, dtype, count=10_000):
    """Floats in and around the grid, every tie and its two neighbours among them."""
    rng = np.random.default_rng(0)
    ties = np.arange(-limit - 2, limit + 2) + 0.5
    near = np.concatenate([np.nextafter(ties.astype(dtype), dtype(s * np.inf)) for s in (-1, 1)])
    values = [ties.astype(dtype), near, np.arange(-limit - 2, limit + 3).astype(dtype), np.array([0.0, -0.0], dtype)]
    known = np.concatenate(values)
    spread = rng.uniform(-1.5 * limit, 1.5 * limit, count - known.size)
    return np.concatenate([known, spread.astype(dtype)])


def to_numpy(array):
    return np.asarray(array)


@formats
def test_the_grid_is_every_code_of_the_storage_type_but_its_most_negative_one(name):
    fmt = get(name)
    codes = np.arange(-(2 ** (fmt.bits - 1)), 2 ** (fmt.bits - 1))
    stored = codes.astype(DTYPES[name]).astype(np.float64)
    np.testing.assert_array_equal(stored, codes)  # all of them exist in the independent type
    np.testing.assert_array_equal(fmt.round(stored), np.clip(stored, -fmt.max_value, fmt.max_value))
    assert fmt.max_value == codes.max()


@formats
@libraries
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rounding_is_the_scalar_specification_in_every_library(name, library, dtype):
    fmt = get(name)
    values = some_floats(fmt.max_value, dtype)
    assert values.size == 10_000
    rounded = fmt.round(LIBRARIES[library](values))
    expected = [round_scalar(v, fmt.bits) for v in values.tolist()]
    assert to_numpy(rounded).dtype == dtype
    np.testing.assert_array_equal(to_numpy(rounded), expected)


@formats
def test_rounding_is_that_of_numpy_and_ml_dtypes_within_the_largest_value(name):
    fmt = get(name)
    values = some_floats(fmt.max_value, np.float32)
    values = values[np.abs(values) <= fmt.max_value]
    assert values.size > 6_000
    # The integer types of both truncate when cast to, so it is their grid that is compared, after np.rint.
    expected = np.rint(values).astype(DTYPES[name]).astype(np.float32)
    np.testing.assert_array_equal(fmt.round(values), expected)


@formats
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs_round_exactly_as_their_float64_value(name, dtype):
    fmt = get(name)
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    rounded = fmt.round(values)
    assert rounded.dtype == dtype
    expected = torch.from_numpy(fmt.round(values.double().numpy()))
    torch.testing.assert_close(rounded.double(), expected, rtol=0, atol=0, equal_nan=True)


@formats
@libraries
def test_what_is_not_finite_comes_back_as_nan_and_spares_its_neighbours(name, library):
    values = LIBRARIES[library](np.array([[np.nan, 1.0], [np.inf, -1.0], [-np.inf, 0.0]]))
    rounded = to_numpy(get(name).round(values))
    assert np.isnan(rounded[:, 0]).all()
    assert rounded[:, 1].tolist() == [1.0, -1.0, 0.0]


@formats
@given(values=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=8))
def test_rounding_is_idempotent_monotone_and_odd(name, values):
    fmt = get(name)
    values = np.sort(np.array(values))
    rounded = fmt.round(values)
    np.testing.assert_array_equal(fmt.round(rounded), rounded)
    assert (np.diff(rounded) >= 0).all()
    np.testing.assert_array_equal(fmt.round(-values), -rounded)
    assert (np.abs(rounded) <= fmt.max_value).all()


def test_arrays_of_another_device_stay_there():
    device = array_api_strict.Device("device1")
    rounded = get("int4").round(array_api_strict.asarray([9.0, float("nan")], device=device))
    assert rounded.device == device
    assert np.asarray(array_api_strict.asarray(rounded, device=array_api_strict.Device("CPU_DEVICE")))[0] == 7


def test_an_empty_array_stays_empty():
    assert get("int4").round(np.zeros((0, 3))).shape == (0, 3)


def test_an_unknown_format_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError) as caught:
        get("int5")
    assert str(caught.value).startswith("format='int5': the formats are int2, int4, int8.")
    assert caught.value.remedy.startswith("Use 'int")


def test_formats_are_data():
    assert get("int4") == IntegerFormat(name="int4", bits=4)
    assert [f.max_value for f in FORMATS.values()] == [1, 7, 127]
