"""Which rows are read where not all are: the same everywhere, and in step with no batch."""

import math

import numpy as np
import pytest
import torch

from trimtab.errors import ConfigError
from trimtab.formats import fake_quantize_with_stats, get, per_tile
from trimtab.formats.sampling import rows_of, spread_rows

CPU = torch.device("cpu")
BATCHES = [*range(1, 40), 48, 64, 96, 98, 100, 127, 128, 150, 158, 192, 250, 255, 256, 257, 384, 415, 512, 768, 1024]
LENGTHS = [2, 3, 5, 7, 8, 16, 17, 31, 32, 33, 64, 96, 97, 127, 128, 192, 256, 257, 384, 512, 1000, 1024, 2048]


def rows_slowly(num, most):
    """The definition, one stratum at a time."""
    primes = (p for p in range(most + 1, 2 * most + 99) if p % 3 == 2 and all(p % d for d in range(2, p)))
    prime = next(primes)
    return [(i * prime + 37 * pow(i + 1, 3, prime) % prime) * num // (most * prime) for i in range(most)]


def distance_from_even(rows, length):
    """Largest difference between the share of ``rows`` up to a position and that of all rows: Kolmogorov's distance."""
    counts = np.bincount(np.asarray(rows) % length, minlength=length)
    return np.abs(np.cumsum(counts) / len(rows) - np.arange(1, length + 1) / length).max(), counts


@pytest.mark.parametrize("most", [1, 4, 64, 128, 256])
def test_rows_are_those_of_the_definition_one_in_each_stratum(most):
    for num in (most + 1, 2 * most, 1000, 8192, 10**12 + 39):
        if num > most:
            rows = spread_rows(num, most, CPU).tolist()
            assert rows == rows_slowly(num, most)
            assert all(i * num // most <= row < (i + 1) * num / most for i, row in enumerate(rows))


def test_all_rows_are_read_where_there_are_no_more():
    assert spread_rows(5, None, CPU) is spread_rows(5, 5, CPU) is spread_rows(0, 5, CPU) is None
    x = torch.randn(2, 3, 4)
    assert torch.equal(rows_of(x, None), x.reshape(6, 4))
    assert torch.equal(rows_of(x, torch.tensor([5, 1])), x.reshape(6, 4)[[5, 1]])
    assert rows_of(torch.zeros(3, 0), None).shape == (3, 0)
    with pytest.raises(ConfigError, match="most_tokens=0: at least 1 token"):
        spread_rows(5, 0, CPU)


@pytest.mark.parametrize("most", [64, 128, 256])
def test_every_position_of_a_sequence_is_read_in_proportion_whatever_the_batch(most):
    """Of sequences side by side, the distance from all rows is that of rows drawn at random, or less, without luck.

    1.36 / sqrt(n) is what Kolmogorov's distance of n draws stays below 19 times out of 20. Of the first position alone
    a draw would read n / L, three standard deviations more or less, and counts are whole.
    """
    for batch in BATCHES:
        for length in LENGTHS:
            if batch * length <= most:
                continue
            rows = spread_rows(batch * length, most, CPU).tolist()
            distance, counts = distance_from_even(rows, length)
            assert distance <= 1.36 / math.sqrt(most), (batch, length)
            expected = most / length
            assert abs(counts[0] - expected) <= 1 + 3 * math.sqrt(expected), (batch, length)


def test_rows_at_equal_distances_and_at_multiples_of_the_golden_ratio_would_fail_this():
    evenly = range(0, 256 * 32, 32)
    assert distance_from_even(evenly, 32)[0] > 0.9
    golden = [int((i + i * 0.6180339887498949 % 1) * 98 * 512 / 256) for i in range(256)]
    assert distance_from_even(golden, 512)[0] > 0.25


@pytest.mark.parametrize(("batch", "length"), [(32, 256), (98, 84), (128, 64), (256, 32), (512, 16), (250, 64)])
@pytest.mark.parametrize("case", ["sink", "clean first", "padding"])
def test_the_sampled_error_is_that_of_all_tokens_where_the_first_of_each_sequence_is_like_no_other(batch, length, case):
    """An attention sink has four massive channels; padding on the left is zeros."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, length, 512, generator=generator)
    if case == "sink":
        x[:, 0] = x[0, 0]
        x[:, 0, :4] *= 2000
    else:
        x[:, 1:, :4] *= 2000
    if case == "padding":
        x[:, 0] = 0
    for name in ("e2m1", "e3m2"):
        full, some = (fake_quantize_with_stats(x, get(name), per_tile(), most_tokens=most)[1] for most in (None, 256))
        # A channel that is lost in a share p of its tokens has an error of sqrt(p), and |sqrt(p) - sqrt(q)| is at most
        # |p - q| / sqrt(p). Of 256 tokens the share of the first ones is known to 1 + 3 standard deviations, as above;
        # 0.02 is left to what differs from token to token.
        share = 1 / length
        deviation = (1 + 3 * math.sqrt(256 * share)) / 256
        # One tile of the four holds the massive channels.
        bound = 0.25 * deviation / math.sqrt(share) + 0.02
        assert abs(full.channel_error - some.channel_error) <= bound, (name, full, some)
        assert (full.channel_error > 0.15) == (some.channel_error > 0.15)


def test_statistics_of_some_tokens_are_those_of_these_tokens_alone():
    x = torch.randn(4, 300, 40, generator=torch.Generator().manual_seed(2)) ** 3
    rows = spread_rows(1200, 64, CPU)
    for kind in ("float32", "e8m0"):
        _, some = fake_quantize_with_stats(x, get("e2m1"), per_tile(), kind, most_tokens=64)
        _, alone = fake_quantize_with_stats(x.reshape(1200, 40)[rows], get("e2m1"), per_tile(), kind)
        assert (some.channel_error, some.flushed_share, some.saturated_share) == (
            alone.channel_error,
            alone.flushed_share,
            alone.saturated_share,
        )
        assert (some.saturated_share > 0) == (kind == "e8m0")
        assert some.amax == x.abs().max()
