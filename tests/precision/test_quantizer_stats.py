"""Rows of statistics: what is known of few tokens, and of the maximum over micro-batches."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import trimtab
from trimtab.control import Policy
from trimtab.errors import ConfigError
from trimtab.formats import fake_quantize_with_stats, get, per_tile
from trimtab.precision import Int8Base, QuantizedGemm, SavedActivations, find_units
from trimtab.precision.quantizer_stats import FEWEST_TOKENS, KeptStats, most_tokens_of, stats_row


def row_of(x, name="e2m3"):
    return stats_row(fake_quantize_with_stats(x, get(name), per_tile(), most_tokens=most_tokens_of(x))[1], x)


def test_the_error_of_fewer_than_four_tokens_is_not_known_and_the_rest_is():
    x = torch.tensor([[1.0, 2.0, 0.001]])
    for num in range(1, FEWEST_TOKENS):
        error, flushed, saturated, amax = row_of(x.expand(num, 3)).tolist()
        assert math.isnan(error)
        assert (flushed, saturated, amax) == (pytest.approx(1 / 3), 0, 2)
    assert row_of(x.expand(FEWEST_TOKENS, 3))[0] > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_reported_of_a_single_token(value):
    assert row_of(torch.tensor([[1.0, value]])).tolist() == [math.inf, 1, 1, math.inf]


def test_healthy_activations_of_so_many_tokens_stay_below_the_limit_and_of_one_they_do_not():
    """What the number is chosen by: SwiGLU activations on E2M3, at the limit of 0.3 for its errors."""
    generator = torch.Generator().manual_seed(0)
    largest = {}
    for num in (1, FEWEST_TOKENS):
        draws = (torch.randn(2, num, 512, generator=generator) for _ in range(100))
        errors = [
            fake_quantize_with_stats(F.silu(2 * a) * b, get("e2m3"), per_tile())[1].channel_error for a, b in draws
        ]
        largest[num] = max(errors)
    assert largest[1] > 0.3
    assert largest[FEWEST_TOKENS] < 0.15


def test_what_is_not_known_of_a_micro_batch_gives_way_to_what_is():
    kept = KeptStats(2)
    for error in (math.nan, 0.5, math.nan, 0.25):
        kept.note(0, torch.tensor([error, 0.0, 0.0, 1.0]))
    kept.note(1, torch.tensor([math.nan, 0.0, 0.0, 1.0]))
    stats = kept.take()
    assert stats[0].tolist() == [0.5, 0, 0, 1]
    assert stats[1, 0].isnan()
    assert stats[1, 3] == 1


@pytest.mark.parametrize("recipe", [SavedActivations(4, 8), QuantizedGemm("e2m3"), Int8Base()], ids=lambda r: r.name)
def test_a_unit_that_saw_one_token_is_not_judged(recipe):
    model = nn.Sequential(nn.Linear(16, 16))
    model.requires_grad_(not isinstance(recipe, Int8Base))
    conversion = recipe.convert(model, find_units(model))
    conversion.observe_quantizers(shadow=True)
    x = torch.randn(1, 16, requires_grad=True)
    for active in (False, True):
        conversion.route([active])
        model(x).sum().backward()
        stats = conversion.take_quantizer_stats()
        assert stats[0, 0].isnan()
        assert stats[0, 3] == x.abs().max()


def test_statistics_are_taken_from_a_sixteenth_of_many_tokens_and_from_256_at_most():
    for num, most in ((1, 64), (2047, 64), (2048, 128), (4095, 128), (4096, 256), (10**6, 256)):
        assert most_tokens_of(torch.empty(num, 3, device="meta")) == most
        assert most_tokens_of(torch.empty(1, num, 3, device="meta")) == most
    x = torch.randn(4096, 16)
    x[0] = 1000  # would be read alone, at equal distances or among all
    model = nn.Sequential(nn.Linear(16, 16)).requires_grad_(False)
    conversion = Int8Base().convert(model, find_units(model))
    conversion.observe_quantizers(shadow=True)
    from trimtab.precision.stored_copy import encode_with_stats

    expected = encode_with_stats(x, 8, most_tokens=256)[2].channel_error
    assert expected != encode_with_stats(x, 8)[2].channel_error
    for active in (False, True):
        conversion.route([active])
        model(x)
        assert conversion.take_quantizer_stats()[0, 0] == expected


@pytest.mark.parametrize("settings", [{"policy": Policy(error_limit=0.3)}, {"quantizer_stats": True}])
def test_a_low_cost_path_that_quantizes_nothing_is_refused_where_errors_are_asked_for(settings):
    model = nn.Sequential(nn.Linear(16, 16))
    with pytest.raises(
        ConfigError, match="tells what its quantizers do to activations, and low_bits=16 quantizes none"
    ):
        trimtab.attach(model, SavedActivations(16, 16), units=["0"], **settings)
    assert type(model[0]) is nn.Linear
    trimtab.attach(model, SavedActivations(16, 16), units=["0"]).detach()
