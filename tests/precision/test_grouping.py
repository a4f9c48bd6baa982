"""Units larger than a projection: which modules make one, and what it is called."""

import pytest
import torch
from torch import nn

from trimtab.errors import ConfigError
from trimtab.precision import find_units
from trimtab.precision.grouping import block_of


def members(model, grouping, selection=None):
    return {u.name: u.module_names for u in find_units(model, selection, grouping)}


class Picked(nn.Module):
    """A layer with adapters, as peft keeps it."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(3, 4, 5))


def linear():
    return nn.Linear(4, 4)


def mixture(experts):
    attention = nn.ModuleDict({"q_proj": linear(), "o_proj": linear()})
    mlp = nn.ModuleDict({"gate": linear(), "experts": experts, "shared_expert": nn.ModuleDict({"up_proj": linear()})})
    return nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"self_attn": attention, "mlp": mlp})])})


def listed_experts():
    return nn.ModuleList(nn.ModuleDict({"up_proj": linear(), "down_proj": linear()}) for _ in range(2))


def test_a_block_of_a_llama_is_one_unit_under_the_name_of_the_layer(tiny_llama):
    model = tiny_llama(num_layers=2)
    projections = [u.name for u in find_units(model)]
    found = members(model, "block")
    assert list(found) == ["model.layers.0", "model.layers.1"]
    assert [n for names in found.values() for n in names] == projections
    assert members(model, "layer") == found
    assert [u.name for u in find_units(model, "layer")] == [u.name for u in find_units(model, "block", "half")]
    for unit in find_units(model, "block"):
        assert unit.num_parameters == sum(m.weight.numel() for m in unit.modules) == 4 * 64**2 + 3 * 64 * 128


def test_a_block_of_a_llama_has_an_attention_half_and_an_mlp_half(tiny_llama):
    found = members(tiny_llama(num_layers=2), "half")
    assert list(found) == [f"model.layers.{i}.{n}" for i in range(2) for n in ("self_attn", "mlp")]
    assert [len(names) for names in found.values()] == [4, 3, 4, 3]


def test_each_attention_of_a_t5_decoder_is_a_half_of_its_own():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    found = members(T5ForConditionalGeneration(config), "half")
    assert list(found) == [
        "encoder.block.0.layer.0.SelfAttention",
        "encoder.block.0.layer.1.DenseReluDense",
        "decoder.block.0.layer.0.SelfAttention",
        "decoder.block.0.layer.1.EncDecAttention",
        "decoder.block.0.layer.2.DenseReluDense",
    ]
    assert [len(names) for names in found.values()] == [4, 2, 4, 4, 2]


def test_a_half_that_only_the_whole_block_holds_is_called_as_its_first_member():
    block = nn.ModuleDict(
        {"self_attn": nn.ModuleDict({"q": linear(), "k": linear()}), "fc1": linear(), "fc2": linear()}
    )
    model = nn.ModuleDict({"layers": nn.ModuleList([block])})
    both = {"layers.0.self_attn": ("layers.0.self_attn.q", "layers.0.self_attn.k")}
    assert members(model, "half") == both | {"layers.0.fc1": ("layers.0.fc1", "layers.0.fc2")}
    # The attention is in the block although it is frozen, and so not picked.
    block["self_attn"].requires_grad_(False)
    assert members(model, "half") == {"layers.0.fc1": ("layers.0.fc1", "layers.0.fc2")}


def test_attention_projections_that_lie_directly_in_the_block_are_one_half():
    names = ("attn_q", "attn_out", "mlp_in", "mlp_out")
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({n: linear() for n in names})])})
    assert members(model, "half") == {
        "blocks.0.attn_q": ("blocks.0.attn_q", "blocks.0.attn_out"),
        "blocks.0.mlp_in": ("blocks.0.mlp_in", "blocks.0.mlp_out"),
    }


def test_a_norm_behind_the_attention_makes_no_half():
    block = nn.ModuleDict({"post_attention_norm": nn.Sequential(linear()), "mlp": nn.Sequential(linear())})
    model = nn.ModuleDict({"layers": nn.ModuleList([block])})
    assert list(members(model, "half")) == ["layers.0"]


def test_a_block_without_attention_is_one_half(blocks):
    assert list(members(blocks(2), "half")) == ["layers.0", "layers.1"]


@pytest.mark.parametrize("grouping", ["block", "half", "expert"])
def test_what_is_outside_numbered_blocks_stays_a_unit_of_its_own(tiny_llama, grouping):
    model = nn.ModuleDict({"embed": nn.Sequential(), "into": linear(), "out": linear()})
    assert members(model, grouping) == {"into": ("into",), "out": ("out",)}
    everything = members(tiny_llama(num_layers=1), grouping, lambda module, fqn: True)
    assert list(everything)[-1] == "lm_head"
    assert everything["lm_head"] == ("lm_head",)


def test_stacked_experts_are_one_member_of_their_block_or_half():
    model = mixture(Experts())
    [block] = find_units(model, "block")
    attention, mlp = find_units(model, "half")
    assert (attention.name, mlp.name) == ("layers.0.self_attn", "layers.0.mlp")
    assert mlp.module_names == ("layers.0.mlp.experts", "layers.0.mlp.shared_expert.up_proj")
    assert block.module_names == attention.module_names + mlp.module_names
    experts = model.layers[0]["mlp"]["experts"]
    assert block.expert is mlp.expert is None
    assert any(p is experts.gate_up_proj for p in mlp.parameters())
    assert mlp.num_parameters == 3 * 4 * 5 + 4 * 4 + 4


def test_a_half_that_is_nothing_but_stacked_experts_is_one_unit():
    model = mixture(Experts())
    del model.layers[0]["mlp"]["shared_expert"]
    assert members(model, "half")["layers.0.mlp.experts"] == ("layers.0.mlp.experts",)
    assert [u.expert for u in find_units(model, "half")] == [None, None]


def test_experts_that_are_modules_are_a_unit_each_where_that_is_asked_for():
    model = mixture(listed_experts())
    assert len(members(model, "projection")) == 2 + 4 + 1
    found = members(model, "expert")
    assert list(found) == [
        "layers.0.self_attn.q_proj",
        "layers.0.self_attn.o_proj",
        "layers.0.mlp.experts.0",
        "layers.0.mlp.experts.1",
        "layers.0.mlp.shared_expert.up_proj",
    ]
    assert found["layers.0.mlp.experts.1"] == tuple(f"layers.0.mlp.experts.1.{n}_proj" for n in ("up", "down"))
    stacked = mixture(Experts())
    assert members(stacked, "expert") == members(stacked, "projection")
    assert list(members(model, "block")) == ["layers.0"]


def test_what_a_filter_picks_is_grouped_and_what_a_list_names_is_not(tiny_llama):
    model = tiny_llama(num_layers=2)
    found = members(model, "block", lambda module, fqn: fqn.endswith(("q_proj", "up_proj")))
    assert found == {
        f"model.layers.{i}": (f"model.layers.{i}.self_attn.q_proj", f"model.layers.{i}.mlp.up_proj") for i in range(2)
    }
    named = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp", "model.layers.1"]
    assert list(members(model, "block", named)) == named


def test_adapters_are_grouped_like_the_projections_that_they_adapt(tiny_llama):
    model = tiny_llama(num_layers=1).requires_grad_(False)
    attention = model.model.layers[0].self_attn
    attention.q_proj, attention.v_proj = Picked(attention.q_proj), Picked(attention.v_proj)
    adapters = ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj")
    assert members(model, "block") == {"model.layers.0": adapters}
    assert members(model, "half") == {"model.layers.0.self_attn": adapters}


def test_a_weight_that_ties_two_blocks_makes_them_one_unit(blocks):
    model = blocks(3)
    model.layers[2].q.weight = model.layers[0].q.weight
    found = members(model, "block")
    assert list(found) == ["layers.0", "layers.1"]
    assert len(found["layers.0"]) == 8


def test_wrapped_models_have_the_groups_of_the_plain_one(blocks):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    wrapped = blocks()
    for i, block in enumerate(wrapped.layers):
        wrapped.layers[i] = torch.compile(checkpoint_wrapper(block), backend="eager")
    for grouping in ("half", "block"):
        assert members(wrapped, grouping) == members(nn.DataParallel(blocks()), grouping) == members(blocks(), grouping)


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("into", None),
        ("layers.1.attn.q", "layers.1"),
        ("layers.1.mlp.0", "layers.1"),
        ("stages.0.layers.1.attn.q", "stages.0.layers.1"),
        ("stages.0.into", "stages.0"),
        ("stages.0.experts.1.up", "stages.0"),
        ("experts.0.layers.1.up", "experts.0"),
        ("by_depth.7.up", "by_depth.7"),
    ],
)
def test_the_number_of_a_list_of_blocks_counts_before_that_of_a_sequential(name, block):
    modules = {
        "layers": nn.ModuleList(),
        "layers.1.mlp": nn.Sequential(),
        "stages": nn.Sequential(),
        "stages.0.layers": nn.ModuleList(),
        "stages.0.experts": nn.ModuleList(),
        "experts": nn.ModuleList(),
        "experts.0.layers": nn.ModuleList(),
        "by_depth": nn.ModuleDict(),
    }
    assert block_of(name, modules) == block


def test_a_grouping_that_does_not_exist_is_refused_with_the_nearest_one(blocks):
    with pytest.raises(ConfigError, match=r"grouping='blok': .*Choose 'block'\.$"):
        find_units(blocks(), None, "blok")
