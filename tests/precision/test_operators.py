"""Which modules compute what a unit stands for."""

import pytest
import torch
from torch import nn

from trimtab.precision import find_units, operators_of


def linear():
    return nn.Linear(4, 4)


class Adapter(nn.Module):
    """Holds a layer and its low-rank adapters as peft's layers do."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 4, bias=False)})


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(3, 4, 5))


class Model(nn.Module):
    """Two blocks with everything that is no operator in them, between embeddings and a head."""

    def __init__(self, experts=None):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(4),
                    "self_attn": nn.ModuleDict({"q": linear(), "v": linear(), "q_norm": nn.LayerNorm(4)}),
                    "mlp": nn.ModuleDict({"gate": linear(), "up": linear(), "experts": experts or nn.Identity()}),
                }
            )
            for _ in range(2)
        )
        self.head = linear()

    def get_output_embeddings(self):
        return self.head


def adapted(*names):
    """A frozen model with adapters on these modules of its blocks."""
    model = Model().requires_grad_(False)
    for block in model.layers:
        for name in names:
            block.set_submodule(name, Adapter(block.get_submodule(name)))
    return model


def operators(model, selection=None, grouping="projection"):
    """The names of each unit's operators, by the unit's name."""
    names = {id(module): name for name, module in model.named_modules()}
    return {u.name: [names[id(m)] for m in operators_of(model, u)] for u in find_units(model, selection, grouping)}


def test_a_projection_computes_itself_and_tied_ones_compute_each():
    model = Model()
    model.layers[1]["mlp"]["up"].weight = model.layers[0]["mlp"]["up"].weight
    found = operators(model)
    assert found["layers.0.self_attn.q"] == ["layers.0.self_attn.q"]
    assert found["layers.0.mlp.up"] == ["layers.0.mlp.up", "layers.1.mlp.up"]


def test_an_adapted_projection_computes_what_is_adapted_however_deep():
    model = adapted("self_attn.q")
    model.layers[1]["self_attn"]["q"] = Adapter(model.layers[1]["self_attn"]["q"])
    assert operators(model) == {
        "layers.0.self_attn.q": ["layers.0.self_attn.q.base_layer"],
        "layers.1.self_attn.q": ["layers.1.self_attn.q.base_layer.base_layer"],
    }


@pytest.mark.parametrize("selection", ["block", ["layers.0", "layers.1"]])
def test_a_block_computes_its_projections_and_no_router_norm_or_embedding(selection):
    assert operators(Model(), selection) == {
        f"layers.{i}": [f"layers.{i}.{n}" for n in ("self_attn.q", "self_attn.v", "mlp.up")] for i in range(2)
    }


def test_an_adapted_head_that_is_named_computes_what_is_adapted():
    model = adapted("self_attn.q")
    model.embedding, model.head = nn.Embedding(7, 4), Adapter(nn.Linear(4, 7))
    model.get_output_embeddings = lambda: model.head
    assert operators(model, ["head"]) == {"head": ["head.base_layer"]}


def test_a_model_named_as_a_whole_computes_everything_but_its_head():
    model = nn.ModuleDict({"body": Model(), "into": linear()})
    found = operators(model, ["body", "into"])
    assert found["body"] == [f"body.layers.{i}.{n}" for i in range(2) for n in ("self_attn.q", "self_attn.v", "mlp.up")]
    plain = nn.ModuleDict({"body": Model()})
    del plain["body"].layers
    plain["body"].into = linear()
    assert operators(plain, ["body"]) == {"body": ["body.into"]}


def test_a_block_of_which_two_projections_are_adapted_computes_the_frozen_rest_too():
    model = adapted("self_attn.q")
    block = ["self_attn.q.base_layer", "self_attn.v", "mlp.up"]
    assert operators(model, "block") == {f"layers.{i}": [f"layers.{i}.{n}" for n in block] for i in range(2)}


def test_a_half_computes_nothing_of_the_other_half():
    model = adapted("self_attn.q", "self_attn.v")
    assert operators(model, "half") == {
        f"layers.{i}.self_attn": [f"layers.{i}.self_attn.{n}.base_layer" for n in "qv"] for i in range(2)
    }


def test_what_a_filter_left_out_although_it_is_trained_is_not_computed_by_the_block():
    found = operators(Model(), lambda module, fqn: fqn.endswith(".v"), "block")
    assert found == {f"layers.{i}": [f"layers.{i}.self_attn.v"] for i in range(2)}


def test_a_block_watched_by_parts_of_its_adapters_computes_what_they_adapt():
    found = operators(adapted("self_attn.q"), lambda module, fqn: "lora_B" in fqn, "block")
    assert found["layers.1"] == [f"layers.1.{n}" for n in ("self_attn.q.base_layer", "self_attn.v", "mlp.up")]


def test_stacked_experts_are_computed_by_the_module_that_holds_them():
    model = Model(Experts())
    del model.layers[1]
    found = operators(model)
    assert [found[f"layers.0.mlp.experts.{e}"] for e in range(3)] == [["layers.0.mlp.experts"]] * 3
    everything = ["layers.0.self_attn.q", "layers.0.self_attn.v", "layers.0.mlp.up", "layers.0.mlp.experts"]
    assert operators(model, "block") == {"layers.0": everything}
    assert operators(model, ["layers.0.mlp.experts"]) == {"layers.0.mlp.experts": ["layers.0.mlp.experts"]}
    model.layers[0]["mlp"]["experts"].requires_grad_(False)
    assert operators(model, "block") == {"layers.0": everything}


def test_what_multiplies_nothing_has_no_operator():
    found = operators(Model(), ["embed", "layers.0.norm", "head"])
    assert found == {"embed": [], "layers.0.norm": [], "head": ["head"]}


def test_blocks_that_a_weight_ties_compute_the_projections_of_both():
    model = Model()
    model.layers[1]["mlp"]["up"].weight = model.layers[0]["mlp"]["up"].weight
    [found] = operators(model, "block").values()
    assert found == [f"layers.{i}.{n}" for i in range(2) for n in ("self_attn.q", "self_attn.v", "mlp.up")]


def test_a_wrapped_model_has_the_operators_of_the_plain_one():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = adapted("self_attn.q")
    plain = [operators_of(model, unit) for unit in find_units(model, "block")]
    for i, block in enumerate(model.layers):
        model.layers[i] = torch.compile(checkpoint_wrapper(block), backend="eager")
    for wrapped in (model, nn.DataParallel(model)):
        assert [operators_of(wrapped, unit) for unit in find_units(wrapped, "block")] == plain
