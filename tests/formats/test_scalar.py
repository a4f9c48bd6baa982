"""The specification, one number at a time, against ml_dtypes."""

import math
from dataclasses import replace

import numpy as np
import pytest

from trimtab.errors import ConfigError
from trimtab.formats import FORMATS, Format, get
from trimtab.formats.scalar import decode_scalar, encode_scalar, round_scalar

MAX_VALUES = {"int2": 1, "int4": 7, "int8": 127, "e2m1": 6, "e2m3": 7.5, "e3m2": 28, "e4m3": 448, "e5m2": 57344}
# floor(log2(max)), from table 5 of the OCP MX specification; the integers', of whole numbers, by arithmetic.
MAX_EXPONENTS = {"int2": 0, "int4": 2, "int8": 6, "e2m1": 2, "e2m3": 2, "e3m2": 4, "e4m3": 8, "e5m2": 15}


def same(a, b):
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))


def on_grid(fmt, value):
    return fmt.layout == "float" or abs(value) <= fmt.max_value


def test_formats_are_data(fmt):
    assert replace(fmt) == fmt
    assert get(fmt.name) is fmt
    assert {f.name: f.max_value for f in FORMATS.values()} == MAX_VALUES
    assert {f.name: f.max_exponent for f in FORMATS.values()} == MAX_EXPONENTS


def test_a_format_of_ones_own_needs_no_code_but_its_numbers():
    e4m2 = Format(
        name="e4m2", bits=7, mantissa_bits=2, min_exponent=-6, max_value=448.0, layout="float", specials="none"
    )
    assert e4m2.round(np.array([1.0, 1.125, 1.375, 1e9])).tolist() == [1.0, 1.0, 1.5, 448.0]
    assert e4m2.encode(np.array([448.0])).tolist() == [0b0_1111_11]


def test_every_code_is_the_number_that_ml_dtypes_says(fmt, independent, codes):
    for code, expected in zip(codes.tolist(), codes.view(independent).astype(float).tolist(), strict=True):
        assert same(decode_scalar(fmt, code), expected), code


def test_every_number_has_the_code_that_ml_dtypes_gives_it(fmt, independent, codes):
    for code, value in zip(codes.tolist(), codes.view(independent).astype(float).tolist(), strict=True):
        if math.isfinite(value) and on_grid(fmt, value):
            assert encode_scalar(fmt, value) == code
            assert same(round_scalar(fmt, value), value)


def test_a_nan_gets_the_nan_code_that_ml_dtypes_gives_it(fmt, independent):
    code = encode_scalar(fmt, math.nan)
    if fmt.specials == "none":
        assert code == 0
    else:
        assert code == np.array([np.nan]).astype(independent).view(np.uint8)[0]


def test_rounding_is_that_of_ml_dtypes_within_the_largest_value(fmt, independent, some_floats):
    values = some_floats(np.float32)
    values = values[np.abs(values) <= fmt.max_value]
    assert values.size >= 8_000
    # Casting to the integer types truncates; their rounding is NumPy's.
    values_to_cast = np.rint(values) if fmt.layout == "integer" else values
    expected = values_to_cast.astype(independent).astype(float)
    for value, wanted in zip(values.tolist(), expected.tolist(), strict=True):
        got = round_scalar(fmt, value)
        assert got == wanted
        assert math.copysign(1, got) == math.copysign(1, value)


def test_beyond_the_largest_value_it_saturates_and_what_is_not_finite_is_nan(fmt):
    for value in (fmt.max_value * (1 + 2**-20), fmt.max_value * 2, 1e300):
        assert round_scalar(fmt, value) == fmt.max_value
        assert round_scalar(fmt, -value) == -fmt.max_value
        assert round_scalar(fmt, value, noise=0.0) == fmt.max_value
    assert all(math.isnan(round_scalar(fmt, v)) for v in (math.nan, math.inf, -math.inf))


def test_stochastic_rounding_takes_the_upper_neighbour_with_the_probability_of_its_nearness(fmt, grid):
    for low, high in zip(grid[:-1].tolist(), grid[1:].tolist(), strict=True):
        for share in (0.0, 0.25, 0.75):
            value = low + share * (high - low)
            # Noise in quarters, at the middle of each: exactly ``share`` of them rounds up.
            rounded = [round_scalar(fmt, value, noise=(i + 0.5) / 4) for i in range(4)]
            assert set(rounded) <= {low, high}
            assert sum(rounded) / 4 == value


def test_an_unknown_format_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError) as caught:
        get("int5")
    assert str(caught.value).startswith("format='int5': the formats are int2, int4, int8, e2m1,")
    assert caught.value.remedy.startswith("Use 'int")


@pytest.mark.parametrize("name", [None, [1], 4, ("e4m3",)])
def test_what_is_no_name_is_refused_as_a_format(name):
    with pytest.raises(ConfigError, match=r"^format=.*: the formats are int2, .* Use '"):
        get(name)
