"""Packed codes come back, and take the bytes that are promised."""

import itertools

import array_api_strict
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.errors import ConfigError
from trimtab.formats import pack, packed_size, unpack

LIBRARIES = {"numpy": np.asarray, "torch": torch.from_numpy, "array_api_strict": array_api_strict.asarray}
widths = pytest.mark.parametrize("bits", [2, 4, 6, 8])


def codes_of(bits):
    return range(-(2 ** (bits - 1)), 2 ** (bits - 1))


@pytest.mark.parametrize("library", list(LIBRARIES))
@pytest.mark.parametrize(
    ("bits", "size"), [(2, 1), (2, 2), (2, 3), (2, 4), (2, 5), (4, 1), (4, 2), (4, 3), (6, 1), (6, 2), (8, 1)]
)
def test_every_row_of_codes_comes_back(library, bits, size):
    rows = np.array(list(itertools.product(codes_of(bits), repeat=size)), dtype=np.int8)
    packed = pack(LIBRARIES[library](rows), bits)
    assert tuple(packed.shape) == (len(rows), packed_size(size, bits))
    np.testing.assert_array_equal(np.asarray(unpack(packed, bits, size)), rows)


@widths
@pytest.mark.parametrize("size", [0, 1, 2, 3, 5, 7, 8, 9, 127, 128, 129])
def test_ragged_rows_in_any_number_of_dimensions_come_back(bits, size):
    rng = np.random.default_rng(size)
    for leading in [(), (1,), (3,), (2, 3), (0,), (2, 0, 3)]:
        codes = rng.integers(min(codes_of(bits)), max(codes_of(bits)) + 1, (*leading, size)).astype(np.int8)
        np.testing.assert_array_equal(unpack(pack(codes, bits), bits, size), codes)
        by_torch = unpack(pack(torch.from_numpy(codes), bits), bits, size)
        np.testing.assert_array_equal(by_torch.numpy(), codes)


@given(data=st.data(), bits=st.sampled_from([2, 4, 6, 8]), size=st.integers(0, 40))
def test_any_codes_come_back_and_the_libraries_agree_on_the_bytes(data, bits, size):
    code = st.integers(min(codes_of(bits)), max(codes_of(bits)))
    codes = np.array(data.draw(st.lists(code, min_size=size, max_size=size)), dtype=np.int8)[None]
    packed = {name: np.asarray(pack(make(codes), bits)) for name, make in LIBRARIES.items()}
    np.testing.assert_array_equal(packed["numpy"], packed["torch"])
    np.testing.assert_array_equal(packed["numpy"], packed["array_api_strict"])
    np.testing.assert_array_equal(unpack(packed["numpy"], bits, size), codes)


@widths
@given(size=st.integers(0, 300))
def test_packed_size_is_the_bytes_that_packed_codes_really_take(bits, size):
    packed = pack(torch.zeros(3, size, dtype=torch.int8), bits)
    assert packed.untyped_storage().nbytes() == 3 * packed_size(size, bits)
    assert packed_size(size, bits) == int(np.ceil(size * bits / 8))


@widths
def test_codes_that_are_not_contiguous_pack_like_their_copy(bits):
    codes = torch.randint(min(codes_of(bits)), max(codes_of(bits)) + 1, (7, 6), dtype=torch.int8).t()
    assert torch.equal(pack(codes, bits), pack(codes.contiguous(), bits))


@pytest.mark.parametrize("bits", [2, 4, 6])
def test_packing_leaves_the_codes_as_they_were(bits):
    codes = torch.tensor([[-1, 0, 1, -1, 1]], dtype=torch.int8)
    before = codes.clone()
    packed = pack(codes, bits)
    kept = packed.clone()
    unpack(packed, bits, 5)
    assert torch.equal(codes, before)
    assert torch.equal(packed, kept)


@pytest.mark.parametrize("library", list(LIBRARIES))
@widths
@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 127, 128, 129])
def test_unsigned_codes_come_back_unsigned_and_their_bytes_are_those_of_the_signed(library, bits, size):
    codes = np.random.default_rng(size).integers(0, 2**bits, (3, size)).astype(np.uint8)
    packed = pack(LIBRARIES[library](codes), bits)
    assert np.asarray(packed).dtype == np.uint8
    np.testing.assert_array_equal(np.asarray(unpack(packed, bits, size)), codes)
    signed = pack((codes << (8 - bits)).view(np.int8) >> (8 - bits), bits)
    np.testing.assert_array_equal(np.asarray(packed), signed.view(np.uint8))


def test_six_bits_place_the_last_quarter_above_the_rest():
    codes = np.array([0b000001, 0b000010, 0b000011, 0b11_01_10], dtype=np.uint8)
    assert pack(codes, 6).tolist() == [0b10_000001, 0b01_000010, 0b11_000011]


@pytest.mark.parametrize("bits", [0, 1, 3, 16])
def test_a_width_without_a_layout_is_refused(bits):
    for act in (lambda: pack(np.zeros(4, dtype=np.int8), bits), lambda: unpack(np.zeros(4, dtype=np.int8), bits, 4)):
        with pytest.raises(ConfigError, match="packed in 2, 4, 6 or 8 bits"):
            act()


@pytest.mark.parametrize("codes", [3, np.int8(3), np.zeros((), dtype=np.int8), [1, 2]])
def test_what_has_no_last_axis_is_refused(codes):
    for act, setting in ((lambda: pack(codes, 4), "codes"), (lambda: unpack(codes, 4, 1), "packed")):
        with pytest.raises(ConfigError, match=f"^{setting}=.*packed along the last axis of an array"):
            act()
