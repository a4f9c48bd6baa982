"""Codes of arrays, against ml_dtypes and the scalar specification."""

import numpy as np
import torch

from trimtab.formats import pack, unpack
from trimtab.formats.scalar import encode_scalar, round_scalar


def test_every_code_is_the_number_that_ml_dtypes_says_in_every_library(
    fmt, independent, codes, library, assert_same_bits
):
    assert_same_bits(fmt.decode(library(codes)), codes.view(independent).astype(np.float32))


def test_codes_of_any_integer_dtype_and_dtypes_of_any_float_mean_the_same(fmt, codes, assert_same_bits):
    expected = fmt.decode(codes)
    assert expected.dtype == np.float32
    if fmt.layout == "float":
        assert_same_bits(fmt.decode(codes.view(np.int8)), expected)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        decoded = fmt.decode(torch.from_numpy(codes), dtype)
        assert decoded.dtype == dtype
        assert_same_bits(decoded.double(), expected.astype(float))


def test_every_grid_point_has_the_bits_that_ml_dtypes_gives_it(fmt, independent, codes, library):
    values = codes.view(independent).astype(np.float32)
    with np.errstate(invalid="ignore"):
        kept = np.abs(values) <= fmt.max_value
    encoded = np.asarray(fmt.encode(library(values[kept])))
    assert encoded.dtype == codes.dtype
    np.testing.assert_array_equal(encoded, codes[kept])


def test_encoding_any_float_rounds_it_and_takes_the_code_of_the_specification(fmt, library, some_floats):
    values = np.concatenate([some_floats(np.float32), np.array([np.nan, np.inf, -np.inf], dtype=np.float32)])
    noise = np.random.default_rng(0).random(values.shape, dtype=np.float32)
    for each in (None, noise):
        noises = [None] * values.size if each is None else each.tolist()
        expected = [encode_scalar(fmt, round_scalar(fmt, v, n)) for v, n in zip(values.tolist(), noises, strict=True)]
        encoded = fmt.encode(library(values), noise=None if each is None else library(each))
        np.testing.assert_array_equal(np.asarray(encoded), expected)


def test_codes_survive_packing_in_the_formats_own_width(fmt, library, codes):
    rows = library(np.tile(codes, (2, 1))[:, :-1])
    packed = pack(rows, fmt.bits)
    np.testing.assert_array_equal(np.asarray(unpack(packed, fmt.bits, rows.shape[-1])), np.asarray(rows))
