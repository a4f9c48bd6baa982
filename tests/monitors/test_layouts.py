"""Every layout against the queries and keys that the model itself computes from the same input."""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trimtab.errors import ConfigError
from trimtab.monitors.layouts import HeadLayout, find_head_layouts, layer_names, plain

transformers = pytest.importorskip("transformers")

BASE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "attn_implementation": "eager",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**BASE, "num_key_value_heads": 2}
WIDE_HEADS = {**GROUPED, "head_dim": 24}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    **BASE,
    "num_key_value_heads": 4,
    "q_lora_rank": 10,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
FALCON = {**BASE, "alibi": False, "bias": False}

# By name of the configuration: its class, its settings, and what may scale a token: nothing, its norm, or the norm of
# each of its heads.
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("Llama", GROUPED, "exact"),
    "llama, one key head": ("Llama", {**GROUPED, "num_key_value_heads": 1}, "exact"),
    "llama, wide heads": ("Llama", WIDE_HEADS, "exact"),
    "llama, biases": ("Llama", {**GROUPED, "attention_bias": True}, "exact"),
    "mistral": ("Mistral", GROUPED, "exact"),
    "qwen2": ("Qwen2", GROUPED, "exact"),
    "qwen3": ("Qwen3", WIDE_HEADS, "per head"),
    "gemma": ("Gemma", WIDE_HEADS, "exact"),
    "gemma2": ("Gemma2", WIDE_HEADS, "exact"),
    "gemma3": ("Gemma3", WIDE_HEADS, "per head"),
    "phi3": ("Phi3", GROUPED, "exact"),
    "gpt2": ("GPT2", BASE, "exact"),
    "gpt_bigcode": ("GPTBigCode", {**BASE, "multi_query": False}, "exact"),
    "gpt_bigcode, one key head": ("GPTBigCode", {**BASE, "multi_query": True}, "exact"),
    "gpt_neox": ("GPTNeoX", BASE, "exact"),
    "bloom": ("Bloom", BASE, "exact"),
    "persimmon": ("Persimmon", {**BASE, "qk_layernorm": True}, "per head"),
    "falcon": ("Falcon", {**FALCON, "multi_query": False}, "exact"),
    "falcon, one key head": ("Falcon", {**FALCON, "multi_query": True}, "exact"),
    "falcon, new": ("Falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}, "exact"),
    "olmo2": ("Olmo2", GROUPED, "per token"),
    "granite": ("Granite", GROUPED, "exact"),
    "stablelm": ("StableLm", GROUPED, "exact"),
    "stablelm, normed": ("StableLm", {**GROUPED, "qk_layernorm": True}, "per head"),
    "phi, normed": ("Phi", {**GROUPED, "qk_layernorm": True}, "per head"),
    "cohere": ("Cohere", GROUPED, "exact"),
    "cohere, normed": ("Cohere", {**GROUPED, "use_qk_norm": True}, "per head"),
    "mixtral": ("Mixtral", {**GROUPED, "num_local_experts": 4}, "exact"),
    "qwen3_moe": ("Qwen3Moe", {**WIDE_HEADS, **EXPERTS}, "per head"),
    "qwen3_next": (
        "Qwen3Next",
        {**WIDE_HEADS, **EXPERTS, "layer_types": ["full_attention"] * 2, "shared_expert_intermediate_size": 16},
        "per head",
    ),
    "olmoe": ("Olmoe", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}, "per token"),
    "dbrx": (
        "Dbrx",
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "vocab_size": 64,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 1e6, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 2, "moe_top_k": 1},
            "attn_implementation": "eager",
        },
        "exact",
    ),
    "deepseek_v2": ("DeepseekV2", LATENT, "per token"),
    "deepseek_v3": ("DeepseekV3", LATENT, "per token"),
    "deepseek_v3, direct queries": ("DeepseekV3", {**LATENT, "q_lora_rank": None}, "per token"),
    "deepseek_v32": ("DeepseekV32", {**LATENT, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}, "per token"),
    "glm4_moe_lite": ("Glm4MoeLite", LATENT, "per token"),
    "minicpm3": ("MiniCPM3", LATENT, "per token"),
    "youtu": ("Youtu", LATENT, "per token"),
    "qwen3_5": ("Qwen3_5", {**WIDE_HEADS, "layer_types": ["full_attention"] * 2}, "per head"),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {**WIDE_HEADS, **EXPERTS, "layer_types": ["full_attention"] * 2, "shared_expert_intermediate_size": 16},
        "per head",
    ),
    "gpt_oss": (
        "GptOss",
        {**WIDE_HEADS, **PLAIN_ROPE, "num_local_experts": 4, "num_experts_per_tok": 2},
        "exact",
    ),
}


def build(name: str) -> nn.Module:
    """The model, with gains that are not 1 and biases that are 0."""
    kind, settings, _ = MODELS[name]
    torch.manual_seed(0)
    config = {k: f"{k}TextConfig" for k in ("Gemma3", "Qwen3_5", "Qwen3_5Moe")}.get(kind, f"{kind}Config")
    head = {"GPT2": "GPT2LMHeadModel"}.get(kind, f"{kind}ForCausalLM")
    model = getattr(transformers, head)(getattr(transformers, config)(**settings))
    with torch.no_grad():
        for parameter_name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape) * (0.3 if p.dim() > 1 else 0.5) + (p.dim() == 1))
            if parameter_name.endswith("bias"):
                p.zero_()
    return model.eval()


def layouts_of(model: nn.Module) -> list[HeadLayout]:
    found = find_head_layouts(model)
    assert not found.skipped
    return list(found.known)


def seen_by_attention(model: nn.Module, attention: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """The input of ``attention``, and the queries and keys of each of its heads, of several sequences of one token.

    A first token is not rotated. Shapes (tokens, d_model), (tokens, heads, d_head), (tokens, kv_heads, d_head).
    """
    seen: dict[str, Tensor] = {}
    module: Any = sys.modules[type(attention).__module__]

    def spy(owner: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if owner is attention:
            seen["query"], seen["key"] = query[:, :, 0], key[:, :, 0]
        return honest(owner, query, key, value, *args, **kwargs)

    def note(owner: nn.Module, args: Any, kwargs: Any) -> None:
        seen["input"] = (args[0] if args else kwargs["hidden_states"])[:, 0]

    def note_fused(owner: nn.Module, args: Any, output: Tensor) -> None:
        split = getattr(attention, "_split_heads", None) or attention._reshape
        query, key, _ = split(output)
        by_token = (lambda t: t[:, :, 0]) if hasattr(attention, "_reshape") else (lambda t: t[:, 0])
        seen["query"], seen["key"] = by_token(query), by_token(key)

    with pytest.MonkeyPatch.context() as patch:
        handles = [attention.register_forward_pre_hook(note, with_kwargs=True)]
        if hasattr(module, "eager_attention_forward"):
            honest = module.eager_attention_forward
            patch.setattr(module, "eager_attention_forward", spy)
        else:
            handles.append(attention.query_key_value.register_forward_hook(note_fused))
        model(input_ids=torch.arange(3, 14)[:, None])
        for handle in handles:
            handle.remove()
    return seen["input"].detach(), seen["query"].detach(), seen["key"].detach()


def assert_same_up_to(scale: str, got: Tensor, expected: Tensor) -> None:
    """Equal, or equal but for one positive factor a token, or one a token and head. Shapes (tokens, heads, d_head)."""
    if scale != "exact":
        dims = (-2, -1) if scale == "per token" else (-1,)
        got, expected = (t / t.square().sum(dims, keepdim=True).sqrt() for t in (got, expected))
    # The model computes in float32, over sums of at most 64 terms.
    bound = 64 * torch.finfo(torch.float32).eps * float(expected.abs().max())
    torch.testing.assert_close(got, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("name", MODELS)
def test_the_heads_are_those_that_the_model_computes_with(name):
    model = build(name)
    layouts = layouts_of(model)
    assert len(layouts) == 2
    for layout in layouts:
        attention = model.get_submodule(layout.name)
        x, query, key = seen_by_attention(model, attention)
        wq, wk = layout.query_key()
        assert not wq.requires_grad
        assert (layout.num_heads, layout.num_kv_heads) == (len(wq), len(wk))
        if key.shape[1] != len(wk):  # the model has repeated them already, each for the query heads that share it
            key = key[:, :: key.shape[1] // len(wk)]
        scale = MODELS[name][2]
        if "direct" in name:
            assert_same_up_to("exact", torch.einsum("td,hdk->thk", x, wq), query[..., : wq.shape[-1]])
        else:
            assert_same_up_to(scale, torch.einsum("td,hdk->thk", x, wq), query[..., : wq.shape[-1]])
        assert_same_up_to(scale, torch.einsum("td,hdk->thk", x, wk), key[..., : wk.shape[-1]])


def test_the_comparison_tells_heads_that_are_swapped_and_rows_that_are_shifted():
    model = build("qwen3")
    layout = layouts_of(model)[0]
    x, query, _ = seen_by_attention(model, model.get_submodule(layout.name))
    wq, _ = layout.query_key()
    for wrong in (wq.flip(0), wq.roll(1, -1), wq * torch.linspace(1, 1.1, wq.shape[-1])):
        with pytest.raises(AssertionError):
            assert_same_up_to("per head", torch.einsum("td,hdk->thk", x, wrong), query)


@pytest.mark.parametrize("name", ["gpt2", "olmo2", "deepseek_v3", "falcon, new", "stablelm, normed", "gemma3"])
def test_the_parameters_named_are_those_that_are_read(name):
    for layout in layouts_of(build(name)):
        read: list[Tensor] = []
        layout.query_key(lambda p, read=read: read.append(p) or plain(p))
        assert {id(p) for p in read} == {id(p) for p in layout.parameters()}


def test_every_gain_from_zero_in_transformers_is_known_as_one():
    """Of the norms that stand between a projection and the logits there, by the text of its modules."""
    from trimtab.monitors.layouts import _GAIN_AFTER_POSITIONS, _GAIN_FROM_ZERO

    folder = Path(inspect.getfile(transformers)).parent / "models"
    norms: set[str] = set()
    late: set[str] = set()
    for path in folder.glob("*/modeling_*.py"):
        text = path.read_text(encoding="utf-8")
        classes = dict(re.findall(r"^class (\w+)\([^\n]*\):\n(.*?)(?=^\S|\Z)", text, re.DOTALL | re.MULTILINE))
        for name, body in classes.items():
            used = set(re.findall(r"self\.[qk]_(?:layer)?norm = (\w+RMSNorm)\(", body))
            norms |= {n for n in used if re.search(r"1(?:\.0)? \+ self\.weight", classes.get(n, ""))}
            rotated, normed = body.find("apply_rot"), body.find("self.q_norm(")
            is_learned = any("self.weight" in classes.get(n, "") for n in used)
            if is_learned and "self.q_proj" in body and 0 < rotated < normed:
                late.add(name)
    assert {"Gemma3RMSNorm", "Qwen3NextRMSNorm"} <= norms <= _GAIN_FROM_ZERO
    assert late <= _GAIN_AFTER_POSITIONS


class Attention(nn.Module):
    """An attention of nobody's, with what a test gives it."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, parts.pop(name, None) or nn.Linear(16, 16))
        for name, part in parts.items():
            setattr(self, name, part)


def in_block(attention: nn.Module) -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"attn": attention})])})


class Quantized(torch.Tensor):
    """Some library's quantized weight."""


def with_weight(weight: Any) -> nn.Linear:
    layer = nn.Linear(16, 16)
    del layer.weight
    layer.register_parameter("weight", weight)
    return layer


class FusedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv = nn.Linear(16, 48)


NOT_KNOWN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no number of heads": (lambda: Attention(), "does not say how many heads"),
    "rows that do not fit": (lambda: Attention(num_heads=4, head_dim=8), "16 rows, and 4 heads of 8 have 32"),
    "keys that do not fit": (lambda: Attention(num_heads=4, num_kv_heads=3), "16 rows, and 3 heads of 4 have 12"),
    "heads that cannot share": (lambda: Attention(num_heads=4, k_proj=nn.Linear(16, 12)), "share 3 key heads"),
    "a strange part": (lambda: Attention(num_heads=4, q_conv=nn.Conv1d(4, 4, 3)), "what its q_conv does"),
    "a strange parameter": (
        lambda: Attention(num_heads=4, q_scale=nn.Parameter(torch.ones(4))),
        "what its q_scale does",
    ),
    "a norm at a place unknown": (lambda: Attention(num_heads=4, q_norm=nn.RMSNorm(4)), "before the positions"),
    "keys of another layer": (lambda: Attention(num_heads=4, is_kv_shared_layer=True), "from another layer"),
    "a projection of its own kind": (lambda: Attention(num_heads=4, q_proj=nn.Conv1d(16, 16, 1)), "q_proj is a Conv1d"),
    "a shape to come": (
        lambda: Attention(num_heads=4, q_proj=with_weight(nn.parameter.UninitializedParameter())),
        "no shape before",
    ),
    "a flat weight": (lambda: Attention(num_heads=4, q_proj=with_weight(nn.Parameter(torch.ones(8)))), "shape (8,)"),
    "a quantized class": (
        lambda: Attention(
            num_heads=4, q_proj=with_weight(nn.Parameter(torch.ones(16, 16).as_subclass(Quantized), False))
        ),
        "quantized (Quantized",
    ),
    "codes": (
        lambda: Attention(
            num_heads=4, q_proj=with_weight(nn.Parameter(torch.ones(16, 16, dtype=torch.int8), requires_grad=False))
        ),
        "torch.int8",
    ),
    "a computed weight": (
        lambda: Attention(num_heads=4, q_proj=nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))),
        "no parameter of its own",
    ),
    "a fused projection of nobody's": (FusedAttention, "FusedAttention is not known"),
}


@pytest.mark.parametrize("case", NOT_KNOWN)
def test_what_is_not_known_is_named_with_its_reason(case):
    make, reason = NOT_KNOWN[case]
    found = find_head_layouts(in_block(make()))
    assert not found.known
    assert list(found.skipped) == ["layers.0.attn"]
    assert reason in found.skipped["layers.0.attn"]


@pytest.mark.parametrize("counted", ["num_heads", "n_heads", "num_attention_heads"])
def test_a_class_of_ones_own_is_known_where_it_counts_its_heads(counted):
    attention = Attention(**{counted: 4}, k_proj=nn.Linear(16, 8), rotary=nn.Identity(), drop=nn.Dropout())
    (layout,) = find_head_layouts(in_block(attention)).known
    assert (layout.num_heads, layout.num_kv_heads) == (4, 2)
    wq, wk = layout.query_key()
    assert torch.equal(wq[1], attention.q_proj.weight[4:8].T)
    assert torch.equal(wk[1], attention.k_proj.weight[4:8].T)


@pytest.mark.parametrize("settings", [{}, {"kdim": 8, "vdim": 8}])
def test_torchs_own_attention_is_known(settings):
    attention = nn.MultiheadAttention(16, 4, batch_first=True, **settings).eval()
    (layout,) = find_head_layouts(attention).known
    assert layout.name == ""
    x, y = torch.randn(1, 5, 16), torch.randn(1, 3, settings.get("kdim", 16))
    wq, wk = layout.query_key()
    logits = torch.einsum("ti,hik,hjk,sj->hts", x[0], wq, wk, y[0]) / 2
    _, seen = attention(x, y, y, average_attn_weights=False)
    torch.testing.assert_close(logits.softmax(-1), seen[0])


def test_the_reading_is_of_the_weights_as_they_are_now():
    model = build("llama")
    layout = layouts_of(model)[0]
    projection = model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        projection.weight.zero_()
    assert not layout.query_key()[0].any()
    projection.weight = nn.Parameter(torch.ones_like(projection.weight))
    assert (layout.query_key()[0] == 1).all()


def test_sixteen_bits_are_read_as_float32():
    wq, wk = layouts_of(build("llama").bfloat16())[0].query_key()
    assert (wq.dtype, wk.dtype) == (torch.float32, torch.float32)


def test_wrappers_change_neither_names_nor_layouts():
    model = build("llama")
    names = [layout.name for layout in layouts_of(model)]
    compiled = torch.compile(model, backend="eager")
    assert [layout.name for layout in layouts_of(compiled)] == names
    assert names[0] == "model.layers.0.self_attn"


def test_layers_are_called_by_the_number_of_their_block_or_else_by_name():
    model = build("llama")
    assert layer_names(layouts_of(model), model) == ["layer_0", "layer_1"]
    both = nn.ModuleDict({"encoder": build("llama"), "decoder": build("llama")})
    layouts = layouts_of(both)
    assert layer_names(layouts, both) == [layout.name for layout in layouts]


def test_an_attention_of_ones_own_can_be_given():
    fused = FusedAttention()

    def own(module: nn.Module, fqn: str) -> HeadLayout | None:
        if not isinstance(module, FusedAttention):
            return None
        weight = module.qkv.weight
        return HeadLayout(
            name=fqn,
            num_heads=4,
            num_kv_heads=4,
            read_query=lambda read: read(weight)[:16].unflatten(0, (4, 4)).mT,
            read_key=lambda read: read(weight)[16:32].unflatten(0, (4, 4)).mT,
            parameters=lambda: [weight],
        )

    found = find_head_layouts(in_block(fused), own)
    assert not found.skipped
    assert found.known[0].name == "layers.0.attn"
    with pytest.raises(ConfigError, match="HeadLayout"):
        find_head_layouts(in_block(fused), lambda module, fqn: "fused")


def adapted_model(model: nn.Module, **settings: Any) -> Any:
    """The model with adapters of rank 3 that add something."""
    with warnings.catch_warnings():
        # What peft and its dependencies say of themselves, and of what transformers is renaming.
        warnings.simplefilter("ignore")
        peft = pytest.importorskip("peft")
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=12, **settings))
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_" in name:
                p.normal_(std=0.3)
    return adapted


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3"])
def test_adapters_count_with_what_they_add(name):
    model = build(name)
    before = [layout.query_key() for layout in layouts_of(model)]
    targets = {"llama": ["q_proj", "k_proj"], "gpt2": ["c_attn"], "phi3": ["qkv_proj"]}[name]
    adapted = adapted_model(model, target_modules=targets, fan_in_fan_out=name == "gpt2")
    layouts = layouts_of(adapted)
    assert len(layouts) == 2
    trained = {id(p) for p in adapted.parameters() if p.requires_grad}
    assert trained.intersection(map(id, layouts[0].parameters()))
    for layout, (wq, _) in zip(layouts, before, strict=True):
        attention = adapted.get_submodule(layout.name)
        x, query, key = seen_by_attention(adapted, attention)
        new_wq, new_wk = layout.query_key()
        assert not torch.allclose(new_wq, wq)
        assert_same_up_to("exact", torch.einsum("td,hdk->thk", x, new_wq), query)
        assert_same_up_to("exact", torch.einsum("td,hdk->thk", x, new_wk), key)
    with adapted.disable_adapter():
        assert torch.equal(layouts[0].query_key()[0], before[0][0])
    adapters_on = layouts[0].query_key()[0]
    adapted.merge_adapter()
    torch.testing.assert_close(layouts[0].query_key()[0], adapters_on)


def test_adapters_that_are_no_plain_sum_are_named():
    found = find_head_layouts(adapted_model(build("llama"), target_modules=["q_proj"], use_dora=True))
    assert "no plain LoRA" in next(iter(found.skipped.values()))
