"""Bytes kept for backward, measured; and what a unit is said to cost against what it takes."""

import copy
import gc

import pytest
import torch
from torch import nn

from trimtab.precision import find_units, measure_saved_bytes, plain_saved_bytes
from trimtab.precision.saved_bytes import SavedBytes


def test_a_storage_is_counted_once_and_parameters_are_not():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    x = torch.randn(4, 8)

    def forward():
        return model[0](x) + model[1](x) + model[0](x[:2]).sum()  # three savers, one storage

    counts = plain_saved_bytes(model, find_units(model), forward)
    assert counts.model == counts.units == 4 * 8 * 4
    assert repr(counts) == f"SavedBytes(model={counts.model}, units={counts.units})"
    assert counts.model == SavedBytes(model=128).model


def test_the_share_of_the_units_is_within_that_of_the_model(tiny_llama):
    model = tiny_llama(num_layers=1)
    ids = torch.randint(0, 50, (2, 9))
    counts = plain_saved_bytes(model, find_units(model), lambda: model(input_ids=ids).logits)
    assert 0 < counts.units < counts.model


def test_measuring_leaves_neither_hooks_nor_tensors_behind(blocks):
    model = blocks()
    x = torch.randn(5, 8)
    plain_saved_bytes(model, find_units(model), lambda: model(x))

    def num_tensors():
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    before = num_tensors()
    plain_saved_bytes(model, find_units(model), lambda: model(x))
    # Fewer when something of an earlier test goes meanwhile; never more.
    assert num_tensors() <= before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_measuring_changes_no_gradient(pair, blocks, gradients):
    plain, converted, conversion = pair(blocks())
    for model in (plain, converted):
        expected = gradients(model, torch.ones(5, 8))
        with measure_saved_bytes(model, conversion.units):
            got = gradients(model, torch.ones(5, 8))
        assert all(torch.equal(expected[n], got[n]) for n in expected)


def test_the_block_may_fail_and_leaves_no_hook(blocks):
    model = blocks()
    with pytest.raises(ArithmeticError), measure_saved_bytes(model, find_units(model)):
        raise ArithmeticError
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("low_bits", [2, 4, 8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("active", [False, True])
def test_a_unit_that_shares_with_nobody_takes_the_bytes_that_its_cost_says(convert, low_bits, dtype, active):
    num_tokens = 6
    for d in (1, 3, 33, 64):
        model = nn.Sequential(nn.Linear(d, 8)).to(dtype)
        conversion = convert(model, low_bits, 16)
        conversion.route([active])
        x = torch.randn(2, 3, d, dtype=dtype)
        counts = plain_saved_bytes(model, conversion.units, lambda model=model, x=x: model(x))
        cost = conversion.costs[0]
        assert counts.units == num_tokens * (cost.high_saved_bytes if active else cost.low_saved_bytes)
        assert counts.model == counts.units
        assert cost.flops == 6 * d * 8


def test_projections_of_a_bf16_llama_keep_little_more_than_a_quarter(convert, tiny_llama):
    model = tiny_llama(num_layers=2, hidden_size=256, intermediate_size=512).bfloat16()
    ids = torch.randint(0, 50, (2, 16))
    units = find_units(model)
    plain = plain_saved_bytes(model, units, lambda: model(input_ids=ids).logits)
    convert(copy.deepcopy(model))  # an untouched original: the copy is another model
    convert(model)
    counts = plain_saved_bytes(model, units, lambda: model(input_ids=ids).logits)
    # 4 bits of 16, and a float32 scale a token: 1/4 + 4 bytes over at least 2 * 256.
    assert counts.units / plain.units <= 0.25 + 4 / (2 * 256)
    assert counts.units / plain.units <= 0.28
    assert plain.model - counts.model <= plain.units - counts.units  # nothing is saved but what the units saved
