"""Which modules are units, under which names, in which order."""

import os

import pytest
import torch
from torch import nn

from trimtab.errors import ConfigError
from trimtab.precision import clean_fqn, find_units
from trimtab.precision.units import describe_filter


def names(model, selection=None):
    return [u.name for u in find_units(model, selection)]


def test_a_llama_has_seven_projections_a_layer_from_the_input_to_the_loss(tiny_llama):
    found = names(tiny_llama())
    assert len(found) == 28
    one_layer = [n.removeprefix("model.layers.0.") for n in found[:7]]
    assert one_layer == [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    assert [n.split(".")[2] for n in found] == sorted(n.split(".")[2] for n in found)


def test_a_gpt2_has_its_four_transposed_layers_a_block(tiny_gpt2):
    assert names(tiny_gpt2()) == [
        f"transformer.h.{i}.{n}" for i in range(2) for n in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]


def test_a_router_is_no_projection():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=20, num_hidden_layers=2, num_local_experts=2, **sizes))
    found = names(model)
    assert len([n for n in found if n.endswith(("q_proj", "k_proj", "v_proj", "o_proj"))]) == 8
    assert not [n for n in found if "router" in n or n.endswith(".gate")]

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.router, self.gate_proj = nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 4)

    assert names(nn.Sequential(Block())) == ["0.gate_proj"]


def test_a_plain_sequential_has_its_linear_layers():
    assert names(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))) == ["0", "2"]


def test_a_model_without_blocks_has_its_linear_layers_but_its_head():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

        def get_output_embeddings(self):
            return self.head

    assert names(Model()) == ["first"]

    class Silent(Model):
        def get_output_embeddings(self):
            raise NotImplementedError

    assert names(Silent()) == ["first", "head"]


def test_a_model_without_linear_layers_has_its_leaves():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.act = nn.Conv1d(1, 1, 1), nn.LayerNorm(4), nn.ReLU()

    assert names(Model()) == ["conv", "norm"]


def test_a_filter_is_asked_about_linear_layers_first_and_about_modules_then(tiny_llama):
    model = tiny_llama(num_layers=2)
    assert names(model, lambda module, fqn: "layers.1.mlp" in fqn)[0] == "model.layers.1.mlp.gate_proj"
    blocks = names(model, lambda module, fqn: type(module).__name__ == "LlamaDecoderLayer")
    assert blocks == ["model.layers.0", "model.layers.1"]
    nested = names(model, lambda module, fqn: type(module).__name__ in ("LlamaDecoderLayer", "LlamaMLP"))
    assert nested == blocks  # the outermost ones


def test_names_come_in_the_order_of_the_model_and_each_once(tiny_llama):
    model = tiny_llama(num_layers=1)
    picked = ["model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"]
    assert names(model, picked) == ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"]


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (
            ["model.layers.0.mlp.up_porj"],
            "the model has no such module. The nearest names are model.layers.0.mlp.up_proj",
        ),
        (["model.layers.0.mlp.act_fn"], "this module has none. Leave it out"),
        (["model.layers.0", "model.layers.0.mlp"], "another named unit contains it"),
        ([], "at least one unit is needed"),
        ("model.layers.0.mlp", "a list of names or a filter is needed. Write \\['model.layers.0.mlp'\\]"),
        (lambda module, fqn: False, "matches no module of this LlamaForCausalLM. Its linear layers .* such as model."),
    ],
)
def test_a_selection_that_cannot_be_meant_is_refused_with_what_to_do(tiny_llama, selection, message):
    with pytest.raises(ConfigError, match=message) as caught:
        find_units(tiny_llama(num_layers=1), selection)
    assert caught.value.setting == "units"


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential(nn.ReLU())])
def test_a_model_without_modules_to_watch_is_refused(model):
    with pytest.raises(ConfigError, match="has modules that own parameters"):
        find_units(model)


@pytest.mark.parametrize(
    ("wrapped", "plain"),
    [
        ("layers.0.q_proj", "layers.0.q_proj"),
        ("module.layers.0.q_proj", "layers.0.q_proj"),
        ("module.module.layers.0", "layers.0"),
        ("_orig_mod.layers.0", "layers.0"),
        ("module._orig_mod.layers.0", "layers.0"),
        ("_orig_mod.module.layers.0", "layers.0"),
        ("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.q", "layers.0.q"),
        ("layers.0._checkpoint_wrapped_module.mlp", "layers.0.mlp"),
        ("layers.0._checkpoint_wrapped_module", "layers.0"),
        ("layers.0._orig_mod._checkpoint_wrapped_module.q", "layers.0.q"),
        ("_orig_mod", ""),
        ("encoder.module.q", "encoder.module.q"),
        ("my_orig_mod.q", "my_orig_mod.q"),
        ("", ""),
    ],
)
def test_wrappers_leave_no_trace_in_a_name(wrapped, plain):
    assert clean_fqn(wrapped) == plain


def test_wrapped_models_have_the_units_of_the_plain_one(blocks):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain = names(blocks())
    assert names(torch.compile(blocks(), backend="eager")) == plain
    assert names(nn.DataParallel(blocks())) == plain
    wrapped = blocks()
    for i, block in enumerate(wrapped.layers):
        block.o = checkpoint_wrapper(block.o)
        wrapped.layers[i] = torch.compile(checkpoint_wrapper(block), backend="eager")
    assert names(wrapped) == plain
    is_block = lambda module, fqn: type(module).__name__ == "Block"  # noqa: E731
    assert names(wrapped, is_block) == names(blocks(), is_block)
    assert names(wrapped, plain[:2]) == plain[:2]
    # A name may also be given as the wrapped model spells it.
    assert names(torch.compile(blocks(), backend="eager"), ["_orig_mod." + plain[0]]) == [plain[0]]


def test_a_model_wrapped_in_ddp_has_the_units_of_the_plain_one(blocks, tmp_path):
    plain = names(blocks())
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        assert names(nn.parallel.DistributedDataParallel(blocks())) == plain
    finally:
        torch.distributed.destroy_process_group()


def test_a_weight_that_ties_two_groups_makes_them_one_unit():
    class Two(nn.Module):
        def __init__(self, a, b):
            super().__init__()
            self.a, self.b = a, b

    first, second, other = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    tied_a, tied_b = nn.Linear(2, 2), nn.Linear(2, 2)
    tied_a.weight, tied_b.weight = first.weight, second.weight
    model = nn.Sequential(Two(first, nn.ReLU()), Two(second, nn.ReLU()), Two(other, nn.ReLU()), Two(tied_a, tied_b))
    units = find_units(model, lambda module, fqn: isinstance(module, Two))
    assert [u.module_names for u in units] == [("0", "1", "3"), ("2",)]
    assert len({id(p) for u in units for p in u.parameters()}) == sum(len(u.parameters()) for u in units)
    assert units[0].num_parameters == 2 * 4 + 4 * 2


def test_a_module_registered_twice_is_one_unit():
    layer = nn.Linear(2, 2)
    units = find_units(nn.Sequential(layer, nn.Linear(2, 2), layer))
    assert [u.module_names for u in units] == [("0",), ("1",)]


def test_a_selection_is_named_for_the_record():
    def mine(module, fqn):
        return True

    assert describe_filter(None) == "projections"
    assert describe_filter(mine) == "mine"
    assert describe_filter(["a", "b"]) == "2 names"
