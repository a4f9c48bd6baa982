"""Which entries share a scale, and the view of an array in which each such block has axes of its own.

Shapes: an array is (..., R, C), seen as ``...`` matrices of R rows and C columns; a block has r rows and c columns, so
there are nR = ceil(R / r) by nC = ceil(C / c) of them in a matrix. Blocks are laid out as (..., nR, r, nC, c).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from trimtab.errors import ConfigError
from trimtab.formats.arrays import library_of, padded

__all__ = ["BLOCK_AXES", "Granularity", "per_block", "per_group", "per_tensor", "per_tile", "per_token"]

BLOCK_AXES = (-3, -1)
"""The axes of a blocked view that lie within a block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Granularity:
    """The shape of the blocks of the last two dimensions that share a scale.

    Blocks at the edges may be smaller. An array of one dimension is a matrix of one row.

    Args:
        rows: Rows of a block, or None for the whole array, all its dimensions, as one block.
        columns: Columns of a block, or None for as many as there are.

    Raises: ConfigError: when a size is no whole number from 1, or ``columns`` is given without ``rows``.
    """

    rows: int | None
    columns: int | None

    def __post_init__(self) -> None:
        for setting, size in (("rows", self.rows), ("columns", self.columns)):
            if size is None:
                continue
            if isinstance(size, bool) or not isinstance(size, (int, np.integer)):
                raise ConfigError(setting, size, "the size of a block is a whole number.", "Set it to 32, say.")
            if size < 1:
                raise ConfigError(setting, size, "a block needs at least 1.", "Set it to 1 or more.")
        if self.rows is None and self.columns is not None:
            raise ConfigError("columns", self.columns, "the whole array has no columns.", "Set rows too.")

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape (..., nR, nC) of the scales of an array; (1, 1) for the whole array as one block.

        Example:
            >>> per_group(32).scale_shape((2, 5, 100)), per_block().scale_shape((300, 128))
            ((2, 5, 4), (3, 1))
        """
        matrix, (rows, columns) = self._sizes(tuple(shape))
        return (*matrix[:-2], -(-matrix[-2] // rows), -(-max(matrix[-1], 1) // columns))

    def split(self, array: Any) -> Any:
        """The blocked view (..., nR, r, nC, c); a copy, padded with zeros, where blocks do not fit.

        Zeros change no block's largest magnitude.
        """
        xp = library_of(array)
        matrix, (rows, columns) = self._sizes(tuple(array.shape))
        *_, num_rows, num_columns = self.scale_shape(tuple(array.shape))
        if tuple(array.shape) != matrix:
            array = xp.reshape(array, matrix)
        array = padded(padded(array, -2, num_rows * rows), -1, num_columns * columns)
        return xp.reshape(array, (*matrix[:-2], num_rows, rows, num_columns, columns))

    def join(self, blocks: Any, shape: tuple[int, ...]) -> Any:
        """Undo ``split`` for an array of this shape."""
        xp = library_of(blocks)
        matrix, _ = self._sizes(tuple(shape))
        *leading, num_rows, rows, num_columns, columns = blocks.shape
        array = xp.reshape(blocks, (*leading, num_rows * rows, num_columns * columns))
        if tuple(array.shape) != matrix:
            array = array[..., : matrix[-2], : matrix[-1]]
        return array if tuple(array.shape) == tuple(shape) else xp.reshape(array, tuple(shape))

    def _sizes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, int]]:
        """The shape of the array as matrices, and ``(r, c)``, no larger than a matrix and at least 1."""
        if self.rows is None:
            matrix: tuple[int, ...] = (1, math.prod(shape))
        else:
            matrix = (*shape[:-2], *(1,) * (2 - len(shape)), *shape[-2:])
        rows = max(1, min(self.rows or 1, matrix[-2]))
        columns = max(1, min(self.columns or matrix[-1], matrix[-1]))
        return matrix, (rows, columns)


def per_tensor() -> Granularity:
    """One scale for the whole array."""
    return Granularity(rows=None, columns=None)


def per_token() -> Granularity:
    """One scale a row: a token of an activation, an output channel of a weight."""
    return Granularity(rows=1, columns=None)


def per_group(size: int) -> Granularity:
    """One scale for ``size`` neighbours along the last dimension; 32 is the block of the OCP MX formats."""
    return Granularity(rows=1, columns=size)


def per_tile() -> Granularity:
    """One scale for 1x128 entries.

    Source: DeepSeek-V3 Technical Report, section 3.3.2, for activations and their gradients.
    """
    return Granularity(rows=1, columns=128)


def per_block() -> Granularity:
    """One scale for 128x128 entries.

    Source: DeepSeek-V3 Technical Report, section 3.3.2, for weights.
    """
    return Granularity(rows=128, columns=128)
