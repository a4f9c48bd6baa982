"""Layers that read the same tensor keep one copy, for exactly as long as it is of use."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from trimtab.precision.stored_copy import decode, encode


def weakrefs_of_copies(kept, call):
    tensors = kept(call)
    references = [weakref.ref(t) for t in tensors]
    del tensors
    return references


def num_alive(references):
    gc.collect()
    return sum(r() is not None for r in references)


def num_int8():
    """Codes alive anywhere; 0-width leftovers of other tests aside."""
    gc.collect()
    return sum(issubclass(type(o), torch.Tensor) and o.dtype == torch.int8 for o in gc.get_objects())


def test_q_k_and_v_keep_one_copy_between_them(convert, blocks, kept):
    model = blocks(num_blocks=1)
    convert(model)
    assert len(kept(lambda: model(torch.randn(5, 8)))) == 2  # one for q, k, v; one for o


def test_a_unit_on_the_recovery_path_keeps_a_copy_of_its_own_width(convert, blocks, kept):
    model = blocks(num_blocks=1)
    conversion = convert(model)
    names = [u.name for u in conversion.units]
    conversion.route([n.endswith(".k") for n in names])
    copies = kept(lambda: model(torch.randn(5, 8)))
    assert sorted(c.shape[-1] for c in copies) == [4, 4, 8]


def test_a_llama_keeps_four_copies_a_layer(convert, tiny_llama, kept):
    model = tiny_llama()
    convert(model)
    ids = torch.randint(0, 50, (2, 9))
    # q, k, v; o; gate, up; down.
    assert len(kept(lambda: model(input_ids=ids).logits)) == 4 * 4


def test_a_tensor_modified_between_two_readers_is_copied_twice(convert, kept):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    convert(model)
    x = torch.randn(3, 8)
    first = x.clone()

    def call():
        a = model[0](x)
        x.mul_(-3)
        x[0, 0] += 5
        (a.sum() + model[1](x).sum()).backward()

    assert len(kept(call)) == 2
    for layer, source in ((model[0], first), (model[1], x)):
        rows = decode(*encode(source, 4), bits=4, size=8, dtype=x.dtype)
        assert torch.equal(layer.weight.grad, torch.ones(3, 8).t() @ rows)


def test_equal_tensors_that_are_not_the_same_are_copied_each(convert, kept):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    convert(model)
    x = torch.randn(3, 8)
    assert len(kept(lambda: (model[0](x), model[1](x.clone())))) == 2


def test_a_tensor_at_the_address_of_a_dead_one_is_not_mistaken_for_it(convert):
    model = nn.Sequential(nn.Linear(8, 8))
    convert(model)
    for i in range(50):
        x = torch.full((3, 8), 7.0 * (i + 1))  # a multiple of 7 is stored exactly
        model.zero_grad()
        model[0](x).sum().backward()
        assert torch.equal(model[0].weight.grad, torch.full((8, 8), 21.0 * (i + 1)))
        del x


def test_readers_in_two_autocast_dtypes_keep_two_copies(convert, kept):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    convert(model)
    x = torch.randn(3, 8)

    def call():
        a = model[0](x)
        with torch.autocast("cpu", torch.bfloat16):
            return a, model[1](x)

    assert len(kept(call)) == 2


def test_readers_under_autocast_share_their_copy(convert, kept):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    convert(model)
    x = torch.randn(3, 8)

    def call():
        with torch.autocast("cpu", torch.bfloat16):
            return model[0](x), model[1](x)

    assert len(kept(call)) == 1


def test_copies_are_let_go_with_the_graph_after_a_forward(convert, blocks, kept):
    model = blocks()
    convert(model)
    x = torch.randn(5, 8)
    outputs = []
    references = weakrefs_of_copies(kept, lambda: outputs.append(model(x)))
    assert num_alive(references) > 0  # the graph needs them
    outputs.clear()
    assert num_alive(references) == 0


def test_copies_are_let_go_when_a_forward_fails(convert, kept):
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            self.layer(x)
            raise ArithmeticError

    model = Failing()
    convert(model)
    x = torch.randn(3, 8)
    before = num_int8()
    with pytest.raises(ArithmeticError):
        model(x)
    assert num_int8() == before


def test_copies_of_a_submodule_call_are_let_go_when_its_input_dies(convert, blocks, kept):
    model = blocks()
    convert(model)
    inputs = [torch.randn(5, 8)]
    references = weakrefs_of_copies(kept, lambda: model.layers[0].q(inputs[0]))
    assert num_alive(references) == 1
    inputs.clear()
    assert num_alive(references) == 0


def test_copies_of_a_submodule_call_do_not_outlive_the_step(convert, blocks, kept):
    model = blocks()
    conversion = convert(model)
    x = torch.randn(5, 8)
    references = weakrefs_of_copies(kept, lambda: model.layers[0].q(x))
    conversion.begin_step(2)
    assert num_alive(references) == 0


def test_many_inputs_that_stay_alive_do_not_pile_up_copies(convert):
    model = nn.Sequential(nn.Linear(8, 8))
    convert(model)
    before = num_int8()
    inputs = [torch.randn(3, 8) for _ in range(20)]
    for x in inputs:
        model[0](x)
    assert num_int8() - before <= 4


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_fifty_steps_leave_no_tensor_behind(convert, blocks, rounding):
    model = blocks()
    conversion = convert(model, rounding=rounding)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def num_tensors():
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    counts = []
    for step in range(1, 51):
        conversion.begin_step(step)
        conversion.route([(step + i) % 3 == 0 for i in range(len(conversion.units))])
        model(torch.randn(5, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (5, 50):
            counts.append(num_tensors())
    assert counts[0] == counts[1]


def test_backward_of_two_graphs_reads_each_its_own_copy(convert):
    model = nn.Sequential(nn.Linear(8, 8))
    convert(model)
    a, b = torch.randn(3, 8), torch.randn(3, 8)
    together = copy.deepcopy(model[0].weight)
    (model(a).sum() + model(b).sum()).backward()
    rows = [decode(*encode(x, 4), bits=4, size=8, dtype=x.dtype) for x in (a, b)]
    expected = sum(torch.ones(3, 8).t() @ r for r in rows)
    torch.testing.assert_close(model[0].weight.grad, expected, rtol=4 * 2.0**-24, atol=4 * 2.0**-24)
    assert torch.equal(together, model[0].weight)
