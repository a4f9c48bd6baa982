"""Blocks: every entry in exactly one, ragged edges included."""

import array_api_strict
import numpy as np
import pytest
import torch

from trimtab.errors import ConfigError
from trimtab.formats import Granularity, per_block, per_group, per_tensor, per_tile, per_token

SHAPES = [(1,), (7,), (0,), (3, 0), (0, 5), (5, 7), (4, 6), (130, 257), (2, 3, 5), (2, 0, 3), (), (2, 1, 3, 4)]
GRANULARITIES = [
    per_tensor(),
    per_token(),
    per_group(3),
    per_tile(),
    per_block(),
    Granularity(rows=2, columns=3),
    Granularity(rows=3, columns=1),
    Granularity(rows=2, columns=None),
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
granularities = pytest.mark.parametrize("granularity", GRANULARITIES, ids=lambda g: f"{g.rows}x{g.columns}")


@shapes
@granularities
@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy, array_api_strict.asarray])
def test_splitting_pads_with_zeros_and_joining_undoes_it(shape, granularity, make):
    array = np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)
    blocks = granularity.split(make(array))
    *leading, num_rows, rows, num_columns, columns = blocks.shape
    assert (*leading, num_rows, num_columns) == granularity.scale_shape(shape)
    assert rows <= (granularity.rows or 1)
    assert granularity.columns is None or columns <= granularity.columns
    assert np.asarray(blocks).sum(dtype=float) == array.sum(dtype=float)
    joined = granularity.join(blocks, shape)
    assert tuple(joined.shape) == shape
    np.testing.assert_array_equal(np.asarray(joined), array)


def test_what_fits_is_a_view():
    x = torch.randn(256, 384)
    for granularity in (per_tensor(), per_token(), per_group(32), per_tile(), per_block()):
        assert granularity.split(x).data_ptr() == x.data_ptr()


@pytest.mark.parametrize(("rows", "columns"), [(0, 1), (1, 0), (-1, None), (None, 4), (1, 1.5), (1, "a"), (True, 4)])
def test_a_block_that_cannot_be_is_refused(rows, columns):
    with pytest.raises(ConfigError):
        Granularity(rows=rows, columns=columns)
    assert Granularity(rows=np.int64(1), columns=np.int32(4)).scale_shape((2, 8)) == (2, 2)
