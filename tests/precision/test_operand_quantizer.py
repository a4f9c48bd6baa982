"""What a library's quantizer does to an activation, against the formats' own form where that has the same rule."""

import math

import pytest
import torch

from trimtab.formats import fake_quantize_with_stats, get, per_group, per_tensor, per_tile, per_token
from trimtab.precision.operand_quantizer import OperandQuantizer
from trimtab.precision.quantizer_stats import FEWEST_TOKENS, most_tokens_of, stats_row


def quantizer(granularity, fmt="e4m3"):
    """The rule of trimtab's own scales of float32."""
    fmt = get(fmt)
    return OperandQuantizer(
        fmt=fmt, granularity=granularity, factor_of=lambda amax: fmt.max_value / amax.clamp(min=1e-30)
    )


@pytest.mark.parametrize("granularity", [per_tensor(), per_token(), per_group(32), per_tile()], ids=str)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "int8"])
@pytest.mark.parametrize("tokens", [1, 7, 63, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_statistics_are_those_of_the_formats(granularity, fmt, tokens, dtype):
    x = torch.randn(tokens, 45, dtype=dtype, generator=torch.Generator().manual_seed(tokens))
    x[:, 3] *= 1e4
    x[0] = 0
    # A tensor's own dtype would round the values once more.
    wide = x.float() if dtype == torch.bfloat16 else x
    _, stats = fake_quantize_with_stats(wide, get(fmt), granularity, most_tokens=most_tokens_of(x))
    # A factor is the inverse of a scale, and each is rounded, by 2**-24 of a value whose error is 2**-8 of it or more.
    # An entry in the middle between two values may become the other one, which is as far from it.
    torch.testing.assert_close(
        quantizer(granularity, fmt).row(x), stats_row(stats, x), rtol=2.0**-16, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
def test_of_an_operand_without_tokens_no_error_is_known(shape):
    error, *others = quantizer(per_token()).row(torch.zeros(shape, dtype=torch.bfloat16)).tolist()
    assert math.isnan(error)
    assert others == [0, 0, 0]


def test_of_few_tokens_no_error_is_known_unless_they_are_not_finite():
    x = torch.ones(FEWEST_TOKENS - 1, 8)
    assert quantizer(per_token()).row(x)[0].isnan()
    x[0, 0] = torch.nan
    assert quantizer(per_token()).row(x)[0] == torch.inf


@pytest.mark.parametrize("granularity", [per_tensor(), per_token(), per_group(4)], ids=str)
def test_zeros_lose_nothing_and_what_is_not_finite_loses_all(granularity):
    x = torch.zeros(5, 8)
    assert quantizer(granularity).row(x).tolist() == [0, 0, 0, 0]
    for value in (float("nan"), float("inf"), -float("inf")):
        x[3, 2] = value
        assert quantizer(granularity).row(x).tolist() == [float("inf"), 1, 1, float("inf")]


def test_what_a_scale_clips_by_more_than_half_a_step_is_counted():
    clipping = OperandQuantizer(fmt=get("e2m1"), granularity=per_token(), factor_of=torch.ones_like)
    values, num_clipped = clipping.values(torch.tensor([[0.0, 7.0, 7.5, -8.0, 1.0]]))
    assert values.tolist() == [[0, 6, 6, -6, 1]]
    assert num_clipped == 2
