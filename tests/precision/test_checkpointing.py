"""Activation checkpointing changes no gradient, no noise and no route."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

reentrancies = pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
roundings = pytest.mark.parametrize("rounding", ["nearest", "stochastic"])


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert [n for n in one if not torch.equal(one[n], other[n])] == []


@reentrancies
@roundings
@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "whole model"])
def test_gradients_are_those_without_checkpointing(convert, blocks, gradients, use_reentrant, rounding, whole):
    model = blocks()
    conversion = convert(model, rounding=rounding)
    conversion.route([i % 3 == 0 for i in range(len(conversion.units))])
    inputs = [torch.randn(5, 8, requires_grad=True) for _ in range(2)]
    conversion.begin_step(3)
    expected = gradients(model, *inputs)
    conversion.begin_step(3)
    if whole:
        model.zero_grad()
        for x in inputs:
            checkpoint(model, x, use_reentrant=use_reentrant).square().sum().backward()
        got = {n: p.grad for n, p in model.named_parameters()}
    else:
        model.wrap = lambda block, x: checkpoint(block, x, use_reentrant=use_reentrant)
        got = gradients(model, *inputs)
    assert_same(expected, got)


@reentrancies
@roundings
@pytest.mark.parametrize("make", ["tiny_llama", "tiny_gpt2"])
def test_gradients_are_those_without_the_checkpointing_of_transformers(
    request, convert, gradients, use_reentrant, rounding, make
):
    model = request.getfixturevalue(make)(num_layers=2)
    conversion = convert(model, rounding=rounding)
    batches = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 50, (2, 2, 9))]
    expected = gradients(model.train(), *batches)
    conversion.begin_step(1)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    model.config.use_cache = False
    assert_same(expected, gradients(model, *batches))


@reentrancies
def test_a_pending_route_is_pulled_in_the_forward_and_never_in_a_recomputation(convert, blocks, use_reentrant):
    model = blocks()
    conversion = convert(model)
    pulled = []
    model.wrap = lambda block, x: checkpoint(block, x, use_reentrant=use_reentrant)

    def pull():
        pulled.append(torch._C._current_graph_task_id())

    conversion.pull = pull
    y = model(torch.randn(5, 8, requires_grad=True))
    assert pulled == [-1]
    conversion.pull = pull  # the next step's, already waiting while this step still runs backward
    y.square().sum().backward()
    assert pulled == [-1]
    assert conversion.pull is pull


@reentrancies
def test_the_route_that_was_due_is_the_one_that_the_recomputation_stores_by(convert, blocks, gradients, use_reentrant):
    model = blocks()
    conversion = convert(model)
    x = torch.randn(5, 8, requires_grad=True)
    conversion.route([True] * len(conversion.units))
    expected = gradients(model, x)
    conversion.route([False] * len(conversion.units))
    model.wrap = lambda block, x: checkpoint(block, x, use_reentrant=use_reentrant)
    conversion.pull = lambda: conversion.route([True] * len(conversion.units))
    assert_same(expected, gradients(model, x))


def test_a_recomputed_model_keeps_no_copy_in_between(convert, blocks, kept):
    model = blocks()
    convert(model)
    model.wrap = lambda block, x: checkpoint(block, x, use_reentrant=False)
    assert kept(lambda: model(torch.randn(5, 8, requires_grad=True))) == []


@reentrancies
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_checkpointed_layer_alone_stores_its_input_again(convert, gradients, use_reentrant, rounding):
    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.checkpointed = False

        def forward(self, x):
            return checkpoint(self.layer, x, use_reentrant=use_reentrant) if self.checkpointed else self.layer(x)

    model = Alone()
    conversion = convert(model, rounding=rounding)
    x = torch.randn(5, 8, requires_grad=True)
    conversion.begin_step(1)
    expected = gradients(model, x)
    conversion.begin_step(1)
    model.checkpointed = True
    assert_same(expected, gradients(model, x))
