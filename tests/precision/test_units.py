"""Which modules are units, under which names, in which order."""

import functools
import os
import sys

import pytest
import torch
from torch import nn

import trimtab
from trimtab.errors import ConfigError, TrimtabWarning
from trimtab.monitors.gradient_norms import GradientNorms
from trimtab.precision import SavedActivations, clean_fqn, find_units, units
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
            self.router_gate, self.modality_router = nn.Linear(4, 2), nn.Linear(4, 2)
            self.per_layer_input_gate, self.route_proj = nn.Linear(4, 4), nn.Linear(4, 4)

    assert names(nn.Sequential(Block())) == ["0.gate_proj", "0.per_layer_input_gate", "0.route_proj"]


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
        ("model.layers.0.mlp", "a list of names or a filter is needed. Write \\['model.layers.0.mlp'\\], or say"),
        ("blocks", "Write \\['blocks'\\], or say how much is one unit. Choose 'block'.$"),
        ("zzz", "Choose 'projection' or 'expert' or 'half' or 'block' or 'layer'.$"),
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

    assert describe_filter(None) == describe_filter("projection", "block") == "projections"
    assert describe_filter(None, "layer") == describe_filter("layer", "half") == "projections by block"
    assert describe_filter(mine, "half") == "mine by half"
    assert describe_filter(["a", "b"], "half") == "2 names"
    assert describe_filter(mine) == "mine"
    assert describe_filter(["a", "b"]) == "2 names"
    assert describe_filter(lambda module, fqn: True) == "<lambda>"
    assert describe_filter(functools.partial(mine, fqn="")) == "partial"


@pytest.mark.parametrize("nothing", [lambda module, fqn: False, functools.partial(lambda no, module, fqn: no, False)])
def test_a_filter_that_matches_nothing_is_shown_without_its_place_in_memory(blocks, nothing):
    with pytest.raises(ConfigError, match=r"^units=(<lambda>|partial): the filter matches no module") as caught:
        find_units(blocks(), nothing)
    assert "0x" not in str(caught.value)


class Adapter(nn.Module):
    """Holds a layer and its low-rank adapters as peft's layers do."""

    def __init__(self, base, adapters=("default",)):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        inner, outer = base.weight.shape[1], base.weight.shape[0]
        self.lora_A = nn.ModuleDict({a: nn.Linear(inner, 2, bias=False) for a in adapters})
        self.lora_B = nn.ModuleDict({a: nn.Linear(2, outer, bias=False) for a in adapters})

    def forward(self, x):
        return self.base_layer(x) + sum(self.lora_B[a](self.lora_A[a](x)) for a in self.lora_A)


def with_adapters(model, picked, make=Adapter):
    """Freeze ``model`` and put an adapter on each module whose name ends in one of ``picked``."""
    model.requires_grad_(False)
    for name, module in [(n, m) for n, m in model.named_modules() if n.endswith(picked)]:
        model.set_submodule(name, make(module))
    return model


def test_an_adapted_projection_is_one_unit_under_its_own_name(tiny_llama):
    model = with_adapters(tiny_llama(num_layers=2), ("q_proj", "up_proj"))
    assert names(model) == [f"model.layers.{i}.{n}" for i in range(2) for n in ("self_attn.q_proj", "mlp.up_proj")]
    assert names(torch.compile(model, backend="eager")) == names(model)
    assert names(model, lambda module, fqn: "0.self_attn.q_proj.lora" in fqn) == [
        f"model.layers.0.self_attn.q_proj.lora_{x}.default" for x in "AB"
    ]
    assert names(model, ["model.layers.0.mlp.up_proj.base_layer"]) == ["model.layers.0.mlp.up_proj.base_layer"]


def test_the_norm_of_an_adapted_projection_is_that_of_its_adapters(blocks):
    model = with_adapters(blocks(num_blocks=2), (".q", ".v"), lambda base: Adapter(base, ("one", "two")))
    found = find_units(model)
    norms = GradientNorms(model, found)
    model(torch.randn(3, 8)).square().sum().backward()
    reading = norms.read()
    expected = [
        torch.cat([p.grad.flatten() for n, p in unit.modules[0].named_parameters() if "lora" in n]).norm().item()
        for unit in found
    ]
    assert norms.unit_norms(reading.indices, reading.norms.numpy()) == pytest.approx(expected, rel=1e-5)
    assert min(expected) > 0
    assert [u.num_parameters for u in found] == [8 * 8 + 8 + 2 * 2 * (8 * 2)] * 4


def test_an_adapter_around_an_adapter_is_one_unit(blocks):
    model = with_adapters(blocks(num_blocks=1), (".q",))
    inner = model.layers[0].q
    model.layers[0].q = nn.Module()
    model.layers[0].q.base_layer, model.layers[0].q.lora_A = inner, nn.Linear(8, 2)
    assert names(model) == ["layers.0.q"]


def test_an_adapter_of_a_layer_that_owns_no_parameter_is_one_unit_too(blocks):
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", torch.zeros(8, 8))

    model = blocks(num_blocks=1).requires_grad_(False)
    model.layers[0].q = Adapter(Packed())
    assert names(model) == ["layers.0.q"]


def test_adapters_of_routers_norms_embeddings_and_heads_stay_out(tiny_llama):
    model = with_adapters(tiny_llama(num_layers=1), ("q_proj", "input_layernorm", "embed_tokens", "lm_head"), _shallow)
    model.model.layers[0].mlp.gate = Adapter(nn.Linear(4, 4))
    assert names(model) == ["model.layers.0.self_attn.q_proj"]


def _shallow(base):
    layer = nn.Module()
    layer.base_layer, layer.delta = base, nn.Parameter(torch.zeros(2))
    return layer


def test_an_adapted_norm_is_a_unit_where_nothing_else_is_trained(tiny_llama):
    model = with_adapters(tiny_llama(num_layers=1), ("input_layernorm",), _shallow)
    assert names(model) == ["model.layers.0.input_layernorm"]


def test_what_is_frozen_is_no_unit_unless_everything_is(tiny_llama):
    model = tiny_llama(num_layers=2)
    everything = names(model)
    model.model.layers[0].requires_grad_(False)
    assert names(model) == everything[7:]
    model.requires_grad_(False)
    assert names(model) == everything
    model.lm_head.requires_grad_(True)
    assert names(model) == ["lm_head"]
    assert names(model, ["model.layers.0.mlp"]) == ["model.layers.0.mlp"]


def _mixture(family):
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 20, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
    own = {
        "Mixtral": {"num_local_experts": 4},
        "Qwen3Moe": experts | {"head_dim": 8, "moe_intermediate_size": 8},
        "Qwen2Moe": experts | {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
        "Olmoe": experts,
        "GptOss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
        "DeepseekV3": latent
        | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 8, "first_k_dense_replace": 1},
    }
    config = getattr(transformers, f"{family}Config")(**sizes, **own[family])
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config)


@pytest.mark.filterwarnings("ignore:.* as it is:trimtab.TrimtabWarning")
@pytest.mark.parametrize(
    ("family", "per_layer", "first_sparse"),
    [
        ("Mixtral", 4, 0),
        ("Qwen3Moe", 4, 0),
        ("Qwen2Moe", 7, 0),
        ("Olmoe", 4, 0),
        ("GptOss", 4, 0),
        ("DeepseekV3", 8, 1),
    ],
)
def test_stacked_experts_are_a_unit_each_that_is_only_watched(family, per_layer, first_sparse):
    model = _mixture(family)
    guard = trimtab.attach(model, SavedActivations())
    experts = [f"model.layers.{i}.mlp.experts.{e}" for i in range(first_sparse, 2) for e in range(4)]
    switched = [u.name for u in guard.conversion.units]
    assert [n for n in guard.units if n not in switched] == experts
    assert len(switched) == 2 * per_layer
    assert not [n for n in guard.units if n.endswith((".gate", ".router", "shared_expert_gate"))]
    order = [n for n, _ in model.named_modules() if n in guard.units or f"{n}.0" in guard.units]
    assert list(dict.fromkeys(u.rpartition(".")[0] if u in experts else u for u in guard.units)) == order
    tokens = torch.randint(3, 20, (2, 6))
    model(input_ids=tokens, labels=tokens).loss.backward()
    decision = guard.step()
    idle = sum(
        not module.gate_up_proj.grad[e].any()
        for module in model.modules()
        if type(module).__name__.endswith("Experts")
        for e in range(4)
    )
    assert (decision.num_unobserved, decision.num_failed) == (idle, 0)
    guard.detach()


class Experts(nn.Module):
    """Weights of several experts in one parameter each, as transformers keeps them."""

    def __init__(self, num_experts=3, **others):
        super().__init__()
        self.up = nn.Parameter(torch.randn(num_experts, 4, 5))
        self.up_bias = nn.Parameter(torch.randn(num_experts, 5))
        self.down = nn.Parameter(torch.randn(num_experts, 5, 4))
        self.scale = nn.Parameter(torch.randn(1))
        for name, parameter in others.items():
            self.register_parameter(name, parameter)


def with_experts(**others):
    block = nn.ModuleDict({"q": nn.Linear(4, 4), "experts": Experts(**others), "o": nn.Linear(4, 4)})
    return nn.ModuleDict({"layers": nn.ModuleList([block])})


def test_an_expert_owns_its_row_of_every_parameter_that_has_one_a_expert():
    model = with_experts()
    found = find_units(model)
    assert [u.name for u in found] == ["layers.0.q", *(f"layers.0.experts.{e}" for e in range(3)), "layers.0.o"]
    assert [u.expert for u in found] == [None, 0, 1, 2, None]
    experts = model.layers[0]["experts"]
    for unit in found[1:4]:
        assert unit.modules == (experts,)
        assert unit.module_names == ("layers.0.experts",)
        assert unit.parameters() == [experts.up, experts.up_bias, experts.down]
        assert unit.num_parameters == 4 * 5 + 5 + 5 * 4


def test_stacked_weights_that_disagree_on_the_number_of_experts_are_one_unit():
    model = with_experts(shared=nn.Parameter(torch.zeros(2, 4, 4)))
    assert names(model) == ["layers.0.q", "layers.0.experts", "layers.0.o"]


def test_a_filter_that_picks_the_experts_picks_each_and_a_list_says_itself_which():
    model = with_experts()
    assert names(model, lambda module, fqn: isinstance(module, Experts)) == [f"layers.0.experts.{e}" for e in range(3)]
    assert names(model, ["layers.0.experts"]) == ["layers.0.experts"]
    assert names(model, ["layers.0.o", "layers.0.experts.2", "layers.0.experts.0"]) == [
        "layers.0.experts.0",
        "layers.0.experts.2",
        "layers.0.o",
    ]
    assert [u.expert for u in find_units(model, ["layers.0.experts.2"])] == [2]
    assert names(model, names(model)) == names(model)
    with pytest.raises(ConfigError, match="another named unit contains it"):
        find_units(model, ["layers.0.experts", "layers.0.experts.1"])
    for absent in ("layers.0.experts.3", "layers.0.experts.01", "layers.0.q.0"):
        with pytest.raises(ConfigError, match="the model has no such module"):
            find_units(model, [absent])


def test_embeddings_and_the_head_among_the_units_are_warned_about_once(tiny_llama):
    model = tiny_llama(num_layers=1)
    picked = ["model.embed_tokens", "model.layers.0.self_attn.q_proj", "lm_head"]
    message = r"embeddings \(model.embed_tokens\).*head \(lm_head\).*Narrow the filter"
    with pytest.warns(TrimtabWarning, match=message) as caught:
        guard = trimtab.attach(model, SavedActivations(), units=picked)
    assert len(caught) == 1
    guard.detach()


def test_experts_that_two_modules_share_are_a_unit_each():
    model = nn.ModuleDict({"layers": nn.ModuleList([Experts(), Experts()])})
    for name, parameter in model.layers[0].named_parameters():
        setattr(model.layers[1], name, parameter)
    found = find_units(model)
    assert [(u.name, u.module_names) for u in found] == [(f"layers.0.{e}", ("layers.0", "layers.1")) for e in range(3)]
    assert found[0].num_parameters == 4 * 5 + 5 + 5 * 4


def test_parts_of_a_router_stay_out():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
            self.up = nn.Linear(4, 4)

    assert names(nn.Sequential(Block())) == ["0.up"]


def test_a_parameter_of_three_dimensions_makes_no_experts_of_other_modules():
    class Owner(nn.Module):
        def __init__(self, *shape):
            super().__init__()
            self.table = nn.Parameter(torch.zeros(shape))

    class PositionEmbedding(Owner):
        pass

    class Block(Owner):
        def __init__(self):
            super().__init__(2, 3, 3)
            self.conv, self.norm = nn.Conv1d(2, 2, 3), nn.LayerNorm((2, 2, 2))
            self.weighted = nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 2, 3))
            self.scale, self.position, self.router = Owner(1, 4, 4), PositionEmbedding(2, 3, 4), Owner(2, 3, 4)
            self.lazy = nn.LazyConv1d(2, 3)
            self.up = nn.Linear(4, 4)

    model = nn.ModuleDict({"outside": Owner(2, 3, 4), "layers": nn.ModuleList([Block(), Owner(2, 3, 4)])})
    assert names(model) == ["layers.0.up", "layers.1.0", "layers.1.1"]


def test_the_output_head_is_asked_for_once(monkeypatch):
    calls = []
    monkeypatch.setattr(units, "output_head", lambda model: calls.append(model))
    with torch.device("meta"):
        model = nn.ModuleDict({f"n{i}": nn.Linear(1, 1, bias=False) for i in range(8000)})
    assert len(find_units(model)) == 8000
    assert len(calls) == 1


@pytest.mark.parametrize("prefix", ["", "n"])
def test_twice_the_units_are_twice_the_work(prefix):
    def work(size):
        """The number of bytecodes that run in this package."""
        count = 0

        def trace(frame, event, arg):
            nonlocal count
            if frame.f_code.co_filename != units.__file__:
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            count += event == "opcode"
            return trace

        model = nn.ModuleDict({f"{prefix}{i}": nn.Linear(1, 1, bias=False) for i in range(size)})
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            assert len(find_units(model)) == size
        finally:
            sys.settrace(before)
        return count

    work(1)  # the first use compiles patterns
    one, two, three = work(100), work(200), work(300)
    # Each further unit runs the same bytecodes.
    assert three - two == two - one > 100
