"""Which rows of a tensor are read where not all are: spread evenly, and in step with no period of them.

The rows of a batch repeat. Token p of every sequence lies a sequence further on, and the first token of each may be
like no other (the attention sink, padding on the left). Rows at equal distances fall in step with that: of 256 or 512
sequences they read the first tokens and nothing else.

Here the rows are cut into n strata of equal length, and of stratum i = 0 .. n - 1 the row that lies at the share
(37 (i + 1)**3 mod p) / p of it is read, p the next prime above n of which cubing permutes the residues. Within their
strata the places are then spread evenly. They follow no line either: sums of exp(2 pi j (a i**3 + b i) / p) over all
residues are at most 2 sqrt(p) (A. Weil, "On some exponential sums", 1948), where multiples of an irrational number,
the usual choice, fall in step with batches of some sizes: those of the golden ratio with 98 sequences. Without the
factor, the first cubes, which are small, would all lie at the beginnings of their strata; of those tried, 37 reads the
first positions of sequences the most evenly (tests/formats/test_sampling.py).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trimtab.errors import ConfigError

__all__ = ["num_rows", "rows_of", "spread_rows"]

_FACTOR = 37

# Places of the rows in units of a stratum's p-th part, and p, by their number and device; from there on it is two small
# kernels a tensor, without a copy from the host.
_places: dict[tuple[int, torch.device], tuple[Tensor, int]] = {}


def spread_rows(num: int, most: int | None, device: torch.device) -> Tensor | None:
    """The numbers of ``most`` of ``num`` rows, ascending, the same everywhere; None where all are to be read.

    Strata need not be of whole rows, so that each row is as likely as any other: of few more than ``most`` rows some
    are read twice. Strata of whole rows would be of two lengths, and their pattern in step with some batches.

    Args:
        num: Number of rows.
        most: How many to read; None reads all, as do ``num`` or more.
        device: Where the numbers are wanted.

    Raises: ConfigError: when ``most`` is below 1.

    Example:
        >>> spread_rows(12, 4, torch.device("cpu")).tolist(), spread_rows(4, 4, torch.device("cpu"))
        ([1, 3, 8, 10], None)
    """
    if most is None or num <= most:
        return None
    if most < 1:
        raise ConfigError("most_tokens", most, "at least 1 token is read.", "Set it to 1 or more, or None for all.")
    places, prime = _places_of(most, device)
    return torch.div(places * num, most * prime, rounding_mode="floor")


def num_rows(x: Tensor) -> int:
    """Number of rows, or tokens, of a tensor; one of no or one dimension is a row."""
    return math.prod(x.shape[:-1])


def rows_of(x: Tensor, rows: Tensor | None) -> Tensor:
    """These ``rows`` of ``x`` as a matrix; all of them, as a view where that can be, for None."""
    x = x.reshape(num_rows(x), x.shape[-1] if x.dim() else 1)
    return x if rows is None else x.index_select(0, rows)


def _places_of(num: int, device: torch.device) -> tuple[Tensor, int]:
    key = (num, device)
    # A tensor that a compiler traces is none that outlives the trace.
    is_traced = torch.compiler.is_compiling()
    known = None if is_traced else _places.get(key)
    if known is not None:
        return known
    prime = num + 1
    while prime % 3 != 2 or any(prime % divisor == 0 for divisor in range(2, math.isqrt(prime) + 1)):
        prime += 1
    places = torch.tensor([i * prime + _FACTOR * (i + 1) ** 3 % prime for i in range(num)], device=device)
    if not is_traced and type(places) is Tensor:
        _places[key] = places, prime
    return places, prime
