"""What the tests of formats share: the formats' independent types, array libraries, and floats around a grid."""

import array_api_strict
import ml_dtypes
import numpy as np
import pytest
import torch

from trimtab.formats import FORMATS

INDEPENDENT = {
    "int2": ml_dtypes.int2,
    "int4": ml_dtypes.int4,
    "int8": np.int8,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
LIBRARIES = {"numpy": np.asarray, "torch": torch.from_numpy, "array_api_strict": array_api_strict.asarray}


@pytest.fixture(params=list(FORMATS))
def fmt(request):
    return FORMATS[request.param]


@pytest.fixture
def independent(fmt):
    """The format's type in ml_dtypes."""
    return np.dtype(INDEPENDENT[fmt.name])


@pytest.fixture(params=list(LIBRARIES))
def library(request):
    """Makes an array of a library from one of NumPy."""
    return LIBRARIES[request.param]


@pytest.fixture
def codes(fmt):
    """Every bit pattern of the format, in its storage type."""
    patterns = np.arange(2**fmt.bits, dtype=np.uint8)
    if fmt.layout == "float":
        return patterns
    return (patterns << (8 - fmt.bits)).view(np.int8) >> (8 - fmt.bits)


@pytest.fixture
def grid(fmt, independent, codes):
    """Every finite value of the independent type within the symmetric range, ascending, float64."""
    values = codes.view(independent).astype(np.float64)
    return np.unique(values[np.abs(values) <= fmt.max_value])


@pytest.fixture
def some_floats(grid):
    """10,000 or more floats of a dtype: grid points, all ties, their neighbours, and a spread over many magnitudes."""

    def make(dtype, count=10_000):
        rng = np.random.default_rng(0)
        dtype = np.dtype(dtype)
        ties = (grid[:-1] + grid[1:]) / 2
        beyond = [grid[-1] + (grid[-1] - ties[-1]), 2 * grid[-1], float(np.finfo(dtype).max)]
        known = np.concatenate([grid, ties, beyond, -np.array(beyond), [0.0, -0.0]]).astype(dtype)
        with np.errstate(over="ignore"):
            near = [np.nextafter(known, dtype.type(s * np.inf)) for s in (-1, 1)]
        known = np.concatenate([known, *near, [np.finfo(dtype).smallest_subnormal]])
        spread = rng.uniform(-1.2, 1.2, count) * grid[-1] * 2.0 ** rng.integers(-20, 2, count)
        values = np.concatenate([known, spread]).astype(dtype)
        return values[np.isfinite(values)]

    return make


@pytest.fixture
def assert_same_bits():
    """Asserts equal values, NaN where NaN is expected, and zeros of the expected sign."""

    def check(actual, expected):
        actual, expected = np.asarray(actual), np.asarray(expected)
        np.testing.assert_array_equal(actual, expected)
        numbers = ~np.isnan(expected)
        np.testing.assert_array_equal(np.signbit(actual)[numbers], np.signbit(expected)[numbers])

    return check
