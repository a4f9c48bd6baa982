"""How large a run record grows, by formula: the bytes of a step's row, and the pages of SQLite that they fill.

Source: the arrays are those of ``trimtab.trace.encoding``; the pages are those of SQLite's file format
(https://www.sqlite.org/fileformat2.html, sections 1.6 and 2): a row that does not fit a page goes to pages of its own.
"""

from __future__ import annotations

__all__ = ["record_bytes", "row_bytes"]

_NORMS, _SCORES, _LOCK = 8, 3 * 4, 1  # bytes a unit: float64; GNMR, Delta and risk in float32; locks up to 255 steps
_ERRORS, _QUANTIZER = 8, 3 * 4  # bytes a unit where quantizers are observed
_SCALARS = 52  # loss, learning rate, norm, alpha, beta and time in 8 bytes each, and the counts in as few as they need
_HEADER = 36  # a type a column, and the lengths of the arrays

_PAGE = 4096
_LEAF = _PAGE - 8  # what cells and their pointers share
_MOST_ON_LEAF = _PAGE - 35
_LEAST_ON_LEAF = (_PAGE - 12) * 32 // 255 - 23
_ON_OVERFLOW = _PAGE - 4
_CELL = 6  # pointer, length and number of a row
_INDEX_ENTRY = 13


def row_bytes(num_units: int, *, quantizer_stats: bool = False) -> int:
    """Bytes of a step's row.

    Args:
        num_units: Watched units.
        quantizer_stats: Whether channel errors and what else the quantizers say are in it.

    Example:
        >>> row_bytes(40) - row_bytes(0)
        845
    """
    a_unit = _NORMS + _SCORES + _LOCK + (_ERRORS + _QUANTIZER if quantizer_stats else 0)
    return _HEADER + _SCALARS + a_unit * num_units + (num_units + 7) // 8


def record_bytes(num_units: int, num_steps: int, *, quantizer_stats: bool = False) -> float:
    """Bytes by which ``num_steps`` steps make a record longer.

    Not counted, for they depend on the run: events (switches, alarms, faults), and what monitors read.

    Args:
        num_units: Watched units.
        num_steps: Optimizer steps.
        quantizer_stats: As for ``row_bytes``.

    Example:
        >>> record_bytes(280, 1000) > 5 * record_bytes(40, 1000)
        True
    """
    row = row_bytes(num_units, quantizer_stats=quantizer_stats)
    if row <= _MOST_ON_LEAF:
        a_page = max(1, _LEAF // (row + _CELL))
        return num_steps * (_PAGE / a_page + _INDEX_ENTRY)
    local = _LEAST_ON_LEAF + (row - _LEAST_ON_LEAF) % _ON_OVERFLOW
    if local > _MOST_ON_LEAF:
        local = _LEAST_ON_LEAF
    overflow = -(-(row - local) // _ON_OVERFLOW)
    a_page = max(1, _LEAF // (local + 4 + _CELL))
    return num_steps * (overflow * _PAGE + _PAGE / a_page + _INDEX_ENTRY)
