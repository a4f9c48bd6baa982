"""Where the query and key weights of each attention head are, by the module's class and config.

What is separate can be seen: a projection of queries and one of keys whose rows are those of the heads that the module
or its config counts. How a *fused* projection is packed cannot, so those are known by the name of their class. What
does not fit exactly is named with a reason; nothing is sliced by guess.

What is read is the bilinear form of a head's logits, x_i' Wq Wk' x_j: biases and positions are left out. A norm between
the projection and the logits divides each token by a number of its own, which is left out as well; its learned gain,
and a LayerNorm's subtraction of the mean, are linear and folded into the weights.

Shapes: weights of linear layers (out, in), "rows" (heads, d_head, in), "columns" what is returned: (heads, in, d_head).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trimtab.errors import ConfigError
from trimtab.monitors.spectrum import wide_product
from trimtab.precision.convertible import is_dtensor
from trimtab.precision.grouping import block_of
from trimtab.precision.units import linear_class, named_modules

__all__ = ["HeadLayout", "HeadLayouts", "Read", "find_head_layouts", "layer_names", "plain"]

Read = Callable[[Tensor], Tensor]
"""Gives the values of a parameter: whole where it is sharded, float32 or float64, without its graph."""


def plain(parameter: Tensor) -> Tensor:
    """The values of a parameter as they are: a ``Read``. Of a sharded one, all ranks gather them together.

    Example:
        >>> plain(nn.Parameter(torch.ones(2, dtype=torch.bfloat16)))
        tensor([1., 1.])
    """
    values: Any = parameter.detach()
    values = values.full_tensor() if is_dtensor(values) else values
    return values if values.dtype == torch.float64 else values.float()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeadLayout:
    """Where the heads of one attention module are.

    Args:
        name: The module's fully qualified name, without those of wrappers.
        num_heads: Query heads.
        num_kv_heads: Key heads; query head h uses key head ``h // (num_heads // num_kv_heads)``.
        read_query: Gives Wq from a ``Read``. Shape (num_heads, d_model, d_head).
        read_key: Gives Wk. Shape (num_kv_heads, d_model, d_head).
        parameters: The parameters that these read; asked anew each time, since a wrapper may replace them.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    read_query: Callable[[Read], Tensor]
    read_key: Callable[[Read], Tensor]
    parameters: Callable[[], list[nn.Parameter]]

    @torch.no_grad()
    def query_key(self, read: Read = plain) -> tuple[Tensor, Tensor]:
        """The weights of all heads, Wq and Wk: views of what ``read`` gives where that is possible.

        Args:
            read: How the value of a parameter is read.
        """
        return self.read_query(read), self.read_key(read)


@dataclass(frozen=True, slots=True)
class HeadLayouts:
    """What is known of a model's attention.

    Args:
        known: The layouts, from the input to the loss.
        skipped: Why there is none of the others, by name of the attention module.
    """

    known: tuple[HeadLayout, ...]
    skipped: Mapping[str, str]


def find_head_layouts(
    model: nn.Module, own: Callable[[nn.Module, str], HeadLayout | None] | None = None
) -> HeadLayouts:
    """Look for the attention modules of ``model``, and for the heads of each.

    An attention module is the innermost one that says so in the name of its class and owns a linear layer, or that has
    a projection of queries beside one of keys.

    Known are, each with grouped and shared key heads:

    - separate projections (q_proj and k_proj as in Llama, Mistral, Qwen, Gemma, OLMo, Granite, StableLM, Cohere, and
      the mixtures of experts among them; or query and key, q and k, q_lin and k_lin, wq and wk), of any class that
      counts its heads, whose rows are then taken head after head; ``torch.nn.MultiheadAttention``;
    - fused ones of GPT-2, GPTBigCode, GPT-NeoX, BLOOM, Persimmon, Falcon, Phi-3, DBRX, and the gated queries of
      Qwen3-Next and Qwen3.5, of the classes in transformers;
    - latent attention of DeepSeek-V2, V3 and V3.2, GLM-4-MoE-Lite, MiniCPM3 and Youtu in transformers: the part without
      positions. Its weights are products of two low-rank factors and so larger than the parameters, and the norm
      between them is folded as above.

    Learned norms of queries and keys are known of classes in transformers, where it is known that they stand before
    the positions. Adapted projections (LoRA in peft) count with what the adapters that are active add.

    Args:
        model: The model, wrapped or not.
        own: Asked first about every module, as ``own(module, fqn)``: gives the layout of an attention of your own.

    Raises: ConfigError: when ``own`` gives something else than a ``HeadLayout`` or None.
    """
    modules = {"": model} | named_modules(model)
    found: dict[str, HeadLayout | str] = {}
    for name, module in modules.items():
        layout = own(module, name) if own is not None else None
        if layout is not None:
            if not isinstance(layout, HeadLayout):
                raise ConfigError("layouts", layout, "it gives a HeadLayout, or None.", "Return one of them.")
            found[name] = layout
        elif _is_attention(module):
            parts = _parts_of(module)
            found[name] = parts if isinstance(parts, str) else parts.named(name)
    known = {name for name, layout in found.items() if isinstance(layout, HeadLayout)}
    for name in list(found):
        around = [outer for outer in _ancestors(name) if outer in found]
        if known.intersection(around):
            del found[name]
        else:
            # What holds an attention module is none itself: a block's, say, that ends in a projection of its own.
            for outer in around:
                del found[outer]
    return HeadLayouts(
        tuple(layout for layout in found.values() if isinstance(layout, HeadLayout)),
        {name: reason for name, reason in found.items() if isinstance(reason, str)},
    )


def _ancestors(name: str) -> list[str]:
    """The names of what holds the module ``name``, from the model on."""
    parts = name.split(".") if name else []
    return [".".join(parts[:i]) for i in range(len(parts))]


def layer_names(layouts: Sequence[HeadLayout], model: nn.Module) -> list[str]:
    """``layer_<i>`` by the number of the block, or the modules' own names where these would not tell them apart."""
    modules = {"": model} | named_modules(model)
    blocks = [block_of(layout.name, modules) for layout in layouts]
    names = [f"layer_{block.rpartition('.')[2]}" for block in blocks if block is not None]
    return names if len(set(names)) == len(layouts) else [layout.name for layout in layouts]


@dataclass(frozen=True, slots=True, eq=False)
class _Matrix:
    """What a layer multiplies by, laid out (out, in).

    Args:
        shape: Its shape when it was looked at.
        read: Its values.
        parameters: What these are read from.
    """

    shape: tuple[int, int]
    read: Callable[[Read], Tensor]
    parameters: Callable[[], list[nn.Parameter]]


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """The queries of an attention module, or its keys: ``rows`` gives their weights, shape (heads, d_head, in)."""

    num_heads: int
    rows: Callable[[Read], Tensor]
    parameters: Callable[[], list[nn.Parameter]]

    def columns(self, read: Read) -> Tensor:
        """The weights as they are returned."""
        return self.rows(read).mT


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """Both sides of an attention module."""

    query: _Side
    key: _Side

    def named(self, name: str) -> HeadLayout:
        """The layout of the module ``name``."""

        def parameters() -> list[nn.Parameter]:
            return list({id(p): p for side in (self.query, self.key) for p in side.parameters()}.values())

        return HeadLayout(
            name=name,
            num_heads=self.query.num_heads,
            num_kv_heads=self.key.num_heads,
            read_query=self.query.columns,
            read_key=self.key.columns,
            parameters=parameters,
        )


_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
_SEPARATE = (("q_proj", "k_proj"), ("query", "key"), ("q", "k"), ("q_lin", "k_lin"), ("wq", "wk"))
_QUERY_NORMS, _KEY_NORMS = ("q_norm", "q_layernorm"), ("k_norm", "k_layernorm")
# Parts that come after the logits, or that queries and keys do not pass through.
_BESIDE = frozenset(
    [
        "v_proj",
        "value",
        "v",
        "v_lin",
        "wv",
        "o_proj",
        "out_proj",
        "o",
        "out_lin",
        "wo",
        "dense",
        "c_proj",
        "projection_layer",
        "gate_proj",
        "g_proj",
        "v_norm",
        "attn_sub_norm",
        "inner_attn_ln",
        "rotary_emb",
        "relative_attention_bias",
    ]
)
_BESIDE_PARAMETERS = frozenset({"sinks"})  # logits of keys that are not there
_NUM_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
_HEAD_WIDTH = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim", "dim_per_head")
# Classes in transformers whose query rows have those of a gate behind them, head by head.
_GATED_QUERIES = frozenset({"Qwen3NextAttention", "Qwen3_5Attention", "Qwen3_5MoeAttention"})
# Classes in transformers that rotate first and scale then: their gains cannot be folded into the weights.
_GAIN_AFTER_POSITIONS = frozenset({"TimesFm2_5Attention"})
# RMS norms in transformers that multiply by 1 + weight.
_GAIN_FROM_ZERO = frozenset(
    [
        "GemmaRMSNorm",
        "Gemma2RMSNorm",
        "Gemma3RMSNorm",
        "T5GemmaRMSNorm",
        "T5Gemma2RMSNorm",
        "VaultGemmaRMSNorm",
        "RecurrentGemmaRMSNorm",
        "Qwen3NextRMSNorm",
        "Qwen3_5RMSNorm",
        "Qwen3_5MoeRMSNorm",
        "Qwen4ExpTextRMSNorm",
        "MiniMaxM3VLRMSNorm",
        "Step3p7RMSNorm",
    ]
)
_LATENT = frozenset(
    [
        "DeepseekV2Attention",
        "DeepseekV3Attention",
        "DeepseekV32Attention",
        "Glm4MoeLiteAttention",
        "MiniCPM3Attention",
        "YoutuAttention",
    ]
)


def _is_attention(module: nn.Module) -> bool:
    """Whether a module is to be known or named: it attends by its name and multiplies, or projects q, k and v."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return False
    if {"q_proj", "k_proj", "v_proj"} <= module._modules.keys():
        return True
    if not _ATTENTION.search(type(module).__name__):
        return False
    return "in_proj_weight" in module._parameters or any(map(_multiplies, module.children()))


def _multiplies(module: nn.Module) -> bool:
    """Whether a module is a linear layer, of whatever library, or adapts one."""
    is_linear = linear_class(module) is not None or "linear" in type(module).__name__.lower()
    return is_linear or "base_layer" in module._modules


def _class_name(module: nn.Module) -> str:
    """The name of a module's class, with that of its package where torch has a class of that name."""
    name, package = type(module).__name__, type(module).__module__.partition(".")[0]
    return f"{package} {name}" if hasattr(nn, name) and package != "torch" else name


def _parts_of(module: nn.Module) -> _Parts | str:
    """Both sides of an attention module, or why they are not known."""
    for known, parts in _KNOWN.items():
        if _is_in_transformers(module, known):
            return parts(module)
    if isinstance(module, nn.MultiheadAttention):
        return _torch_parts(module)
    for q, k in _SEPARATE:
        if module._modules.get(q) is not None and module._modules.get(k) is not None:
            return _separate_parts(module, q, k)
    return f"its class {_class_name(module)} is not known"


def _is_in_transformers(module: nn.Module, names: frozenset[str]) -> bool:
    """Whether a module is of a class of transformers called so, or of a subclass, as conversions make them."""
    return _transformers_class(module, names) is not None


def _transformers_class(module: nn.Module, names: frozenset[str] | None = None) -> str | None:
    for c in type(module).__mro__:
        if c.__module__.startswith("transformers.models.") and (names is None or c.__name__ in names):
            return c.__name__
    return None


def _stated(module: nn.Module, names: Sequence[str]) -> int | None:
    """A number that the module, or else its config, states under one of ``names``."""
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _matrix_of(module: nn.Module, what: str) -> _Matrix | str:
    """What the layer ``what`` multiplies by, or why that cannot be read."""
    if type(module).__module__.startswith("peft.") and hasattr(module, "base_layer"):
        return _adapted_matrix(module, what)
    base = linear_class(module)
    if base is None:
        return f"its {what} is a {_class_name(module)}"
    weight: Any = module._parameters.get("weight")
    if weight is None:
        return f"the weight of its {what} is no parameter of its own"
    if isinstance(weight, nn.parameter.UninitializedParameter):
        return f"the weight of its {what} has no shape before the first forward"
    if not weight.is_floating_point() or not (type(weight) is nn.Parameter or is_dtensor(weight)):
        return f"the weight of its {what} is quantized ({type(weight).__name__}, {weight.dtype})"
    if weight.dim() != 2:
        return f"the weight of its {what} has the shape {tuple(weight.shape)}"
    # GPT-2's layer in transformers keeps its weight as (in, out).
    is_transposed = base.__name__ == "Conv1D"
    shape = tuple(weight.shape)

    def read(read: Read) -> Tensor:
        values = read(module.get_parameter("weight"))
        if tuple(values.shape) != shape:
            raise RuntimeError(f"the weight of a {what} has become {tuple(values.shape)}, and was {shape}.")
        return values.mT if is_transposed else values

    out, into = reversed(shape) if is_transposed else shape
    return _Matrix((out, into), read, lambda: [module.get_parameter("weight")])


def _adapted_matrix(module: Any, what: str) -> _Matrix | str:
    """What a projection with adapters of peft multiplies by: the base's weight and the products of the active ones."""
    if type(module).__module__ != "peft.tuners.lora.layer" or type(module).__name__ != "Linear":
        return f"its {what} is adapted by a {type(module).__module__}.{type(module).__name__}"
    if module.lora_variant:
        return f"its {what} has an adapter that is no plain LoRA"
    base = _matrix_of(module.base_layer, what)
    if isinstance(base, str):
        return base

    def active() -> list[str]:
        if module.disable_adapters or module.merged:
            return []
        return [name for name in module.active_adapters if name in module.lora_A]

    def read(read: Read) -> Tensor:
        values = base.read(read)
        for name in active():
            update = wide_product(read(module.lora_B[name].weight), read(module.lora_A[name].weight))
            values = values + module.scaling[name] * update.to(values)
        return values

    def parameters() -> list[nn.Parameter]:
        adapters = [layer[name].weight for name in active() for layer in (module.lora_A, module.lora_B)]
        return [*base.parameters(), *adapters]

    return _Matrix(base.shape, read, parameters)


def _block(matrix: _Matrix, num_heads: int, width: int, start: int = 0) -> _Side:
    """The side whose heads lie one after the other in the rows of ``matrix``, from row ``start`` on."""
    stop = start + num_heads * width

    def rows(read: Read) -> Tensor:
        return matrix.read(read)[start:stop].unflatten(0, (num_heads, width))

    return _Side(num_heads, rows, matrix.parameters)


def _packed(matrix: _Matrix, groups: int, in_group: int, width: int, first: int, last: int) -> _Side:
    """The side whose heads are number ``first`` to ``last - 1`` of every group of ``in_group`` heads in ``matrix``."""

    def rows(read: Read) -> Tensor:
        return matrix.read(read).unflatten(0, (groups, in_group, width))[:, first:last].flatten(0, 1)

    return _Side(groups * (last - first), rows, matrix.parameters)


def _parts(query: _Side, key: _Side) -> _Parts | str:
    if query.num_heads % key.num_heads:
        return f"its {query.num_heads} query heads cannot share {key.num_heads} key heads evenly"
    return _Parts(query, key)


def _separate_parts(module: nn.Module, q: str, k: str) -> _Parts | str:
    """A projection of queries, one of keys."""
    if getattr(module, "is_kv_shared_layer", False):
        return "it takes its keys from another layer"
    strange = [name for name, _ in module.named_parameters(recurse=False) if name not in _BESIDE_PARAMETERS]
    strange += [
        name
        for name, child in module.named_children()
        if name not in (q, k, *_QUERY_NORMS, *_KEY_NORMS, *_BESIDE) and next(child.parameters(), None) is not None
    ]
    if strange:
        return f"what its {', '.join(strange[:3])} does to queries and keys is not known"
    num_heads = _stated(module, _NUM_HEADS)
    if num_heads is None:
        return "it does not say how many heads it has"
    of_query, of_key = _matrix_of(module.get_submodule(q), q), _matrix_of(module.get_submodule(k), k)
    if isinstance(of_query, str) or isinstance(of_key, str):
        return of_query if isinstance(of_query, str) else str(of_key)
    per_head = 2 if _is_in_transformers(module, _GATED_QUERIES) else 1
    width = _stated(module, _HEAD_WIDTH) or of_query.shape[0] // (num_heads * per_head)
    if of_query.shape[0] != num_heads * width * per_head:
        return f"its {q} has {of_query.shape[0]} rows, and {num_heads} heads of {width} have {num_heads * width}"
    num_kv_heads = _stated(module, _NUM_KV_HEADS) or of_key.shape[0] // width
    if of_key.shape[0] != num_kv_heads * width:
        return f"its {k} has {of_key.shape[0]} rows, and {num_kv_heads} heads of {width} have {num_kv_heads * width}"
    query = _packed(of_query, num_heads, 2, width, 0, 1) if per_head == 2 else _block(of_query, num_heads, width)
    return _normed(module, query, _block(of_key, num_kv_heads, width), width)


def _torch_parts(module: nn.MultiheadAttention) -> _Parts | str:
    """The attention of torch: one weight of queries, keys and values in this order, or one of each."""
    if torch.nn.utils.parametrize.is_parametrized(module):
        return "its weight is parametrized"
    heads, width = module.num_heads, module.head_dim

    def matrix(name: str) -> _Matrix:
        weight = module.get_parameter(name)
        return _Matrix(
            (weight.shape[0], weight.shape[1]),
            lambda read: read(module.get_parameter(name)),
            lambda: [module.get_parameter(name)],
        )

    if module.in_proj_weight is not None:
        fused = matrix("in_proj_weight")
        return _parts(_block(fused, heads, width), _block(fused, heads, width, module.embed_dim))
    return _parts(_block(matrix("q_proj_weight"), heads, width), _block(matrix("k_proj_weight"), heads, width))


def _fused(module: Any, name: str, num_rows: int) -> _Matrix | str:
    """The fused projection ``name``, if it has as many rows as the class gives it."""
    matrix = _matrix_of(module.get_submodule(name), name)
    if isinstance(matrix, _Matrix) and matrix.shape[0] != num_rows:
        return f"its {name} has {matrix.shape[0]} rows, and its heads need {num_rows}"
    return matrix


def _blocks_parts(module: Any, name: str, num_heads: int, num_kv_heads: int, width: int) -> _Parts | str:
    """[q | k | v], each head by head."""
    fused = _fused(module, name, (num_heads + 2 * num_kv_heads) * width)
    if isinstance(fused, str):
        return fused
    return _parts(_block(fused, num_heads, width), _block(fused, num_kv_heads, width, num_heads * width))


def _interleaved_parts(module: Any, name: str, num_kv_heads: int, in_group: int, width: int) -> _Parts | str:
    """Groups of heads, [q ... q | k | v] each."""
    fused = _fused(module, name, num_kv_heads * in_group * width)
    if isinstance(fused, str):
        return fused
    query = _packed(fused, num_kv_heads, in_group, width, 0, in_group - 2)
    key = _packed(fused, num_kv_heads, in_group, width, in_group - 2, in_group - 1)
    return _normed(module, query, key, width)


def _gpt2_parts(module: Any) -> _Parts | str:
    heads, width = module.num_heads, module.head_dim
    if not module.is_cross_attention:
        return _blocks_parts(module, "c_attn", heads, heads, width)
    query, key = _fused(module, "q_attn", heads * width), _fused(module, "c_attn", 2 * heads * width)
    if isinstance(query, str) or isinstance(key, str):
        return query if isinstance(query, str) else str(key)
    return _parts(_block(query, heads, width), _block(key, heads, width))


def _gpt_big_code_parts(module: Any) -> _Parts | str:
    if module.is_cross_attention:
        return "it attends to another sequence"
    if module.multi_query:
        return _blocks_parts(module, "c_attn", module.num_heads, 1, module.head_dim)
    return _interleaved_parts(module, "c_attn", module.num_heads, 3, module.head_dim)


def _gpt_neox_parts(module: Any) -> _Parts | str:
    return _interleaved_parts(module, "query_key_value", module.config.num_attention_heads, 3, module.head_size)


def _three_parts(module: Any) -> _Parts | str:
    return _interleaved_parts(module, "query_key_value", module.num_heads, 3, module.head_dim)


def _falcon_parts(module: Any) -> _Parts | str:
    if module.new_decoder_architecture:
        in_group = module.num_heads // module.num_kv_heads + 2
        return _interleaved_parts(module, "query_key_value", module.num_kv_heads, in_group, module.head_dim)
    if module.multi_query:
        return _interleaved_parts(module, "query_key_value", 1, module.num_heads + 2, module.head_dim)
    return _three_parts(module)


def _phi3_parts(module: Any) -> _Parts | str:
    heads = module.config.num_attention_heads
    return _blocks_parts(module, "qkv_proj", heads, module.num_key_value_heads, module.head_dim)


def _dbrx_parts(module: Any) -> _Parts | str:
    return _blocks_parts(module, "Wqkv", module.num_heads, module.num_key_value_heads, module.head_dim)


def _latent_parts(module: Any) -> _Parts | str:
    """Queries and keys that are projected down, normed and projected up: the part without positions comes first."""
    nope, heads = module.qk_nope_head_dim, module.num_heads
    query = _latent_side(module, ("q_a_proj", "q_a_layernorm", "q_b_proj"), nope, heads, module.qk_head_dim)
    if module.q_lora_rank is None:
        direct = _fused(module, "q_proj", heads * module.qk_head_dim)
        query = direct if isinstance(direct, str) else _leading(_block(direct, heads, module.qk_head_dim), nope)
    key_names = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
    key = _latent_side(module, key_names, nope, heads, nope + module.v_head_dim)
    if isinstance(query, str) or isinstance(key, str):
        return query if isinstance(query, str) else str(key)
    return _parts(query, key)


def _leading(side: _Side, width: int) -> _Side:
    """The first ``width`` rows of each head."""
    return _Side(side.num_heads, lambda read: side.rows(read)[:, :width], side.parameters)


def _latent_side(
    module: Any, names: tuple[str, str, str], width: int, num_heads: int, rows_per_head: int
) -> _Side | str:
    """The product of two projections with a norm between, of which each head's first ``width`` rows count."""
    down_name, norm_name, up_name = names
    if module._modules.get(up_name) is None:
        return f"it has no {up_name}"
    norm = module.get_submodule(norm_name)
    up = _fused(module, up_name, num_heads * rows_per_head)
    down = _matrix_of(module.get_submodule(down_name), down_name)
    if isinstance(up, str) or isinstance(down, str):
        return up if isinstance(up, str) else str(down)
    rank = up.shape[1]
    fold = _fold_of(norm, 1, rank)
    if isinstance(fold, str):
        return f"its {norm_name} is {fold}"
    heads = _leading(_block(up, num_heads, rows_per_head), width)

    def rows(read: Read) -> Tensor:
        # Below the latent rows of the keys' projection are those of the one key with positions.
        latent = fold.apply(down.read(read)[:rank].unsqueeze(0), read)[0]
        of_heads = heads.rows(read)
        return wide_product(of_heads, latent.to(of_heads))

    return _Side(num_heads, rows, lambda: [*up.parameters(), *down.parameters(), *fold.parameters()])


@dataclass(frozen=True, slots=True, eq=False)
class _Fold:
    """The linear part of a norm: what it does to the rows in front of it."""

    apply: Callable[[Tensor, Read], Tensor]
    parameters: Callable[[], list[nn.Parameter]]


def _normed(module: nn.Module, query: _Side, key: _Side, width: int) -> _Parts | str:
    """Both sides with the module's norms of queries and keys, if it has any, folded in."""
    sides = []
    for side, names in ((query, _QUERY_NORMS), (key, _KEY_NORMS)):
        norms = {name: child for name in names if (child := module._modules.get(name)) is not None}
        if len(norms) > 1:
            return f"it has {' and '.join(norms)}"
        for name, norm in norms.items():
            is_learned = next(norm.parameters(), None) is not None
            if is_learned and (
                _transformers_class(module) is None or _is_in_transformers(module, _GAIN_AFTER_POSITIONS)
            ):
                return f"whether the gain of its {name} is applied before the positions is not known"
            fold = _fold_of(norm, side.num_heads, width)
            if isinstance(fold, str):
                return f"its {name} is {fold}"
            side = _with_fold(side, fold)
        sides.append(side)
    return _parts(*sides)


def _with_fold(side: _Side, fold: _Fold) -> _Side:
    return _Side(
        side.num_heads,
        lambda read: fold.apply(side.rows(read), read),
        lambda: [*side.parameters(), *fold.parameters()],
    )


def _norm_kind(norm: nn.Module) -> Literal["rms", "rms from zero", "layer"] | None:
    """What kind of norm a module is: a gain of ``weight`` or of 1 + ``weight``, a LayerNorm; None is not known."""
    forward = type(norm).forward
    if forward is nn.LayerNorm.forward:
        return "layer"
    if forward is nn.RMSNorm.forward:
        return "rms"
    name = _transformers_class(norm)
    if name is None:
        return None
    if name in _GAIN_FROM_ZERO:
        return "rms from zero"
    if name == "CohereLayerNorm":
        return "layer"
    return "rms" if name.endswith("RMSNorm") else None


def _fold_of(norm: nn.Module, num_heads: int, width: int) -> _Fold | str:
    """What ``norm`` does to rows of shape (heads, d_head, in), or in words what it is that is not known."""
    if isinstance(norm, nn.Identity):
        return _Fold(lambda rows, read: rows, list)
    if _is_in_transformers(norm, frozenset({"StableLmLayerNormPerHead"})):
        each = [_fold_of(one, 1, width) for one in norm.get_submodule("norms").children()]
        folds = [fold for fold in each if isinstance(fold, _Fold)]
        if len(folds) != num_heads:
            return f"{len(folds)} norms of {num_heads} heads"
        return _Fold(
            lambda rows, read: torch.cat([f.apply(r, read) for f, r in zip(folds, rows.split(1), strict=True)]),
            lambda: [p for fold in folds for p in fold.parameters()],
        )
    kind = _norm_kind(norm)
    weight: Any = norm._parameters.get("weight")
    if kind is None and next(norm.parameters(), None) is not None:
        return f"a {type(norm).__name__}"
    if weight is not None and weight.numel() not in (width, num_heads * width):
        return f"a norm of {weight.numel()} for {num_heads} heads of {width}"
    is_whole = weight is not None and weight.dim() == 1 and weight.numel() != width

    def apply(rows: Tensor, read: Read) -> Tensor:
        if kind == "layer":
            rows = rows - rows.mean((0, 1) if is_whole else 1, keepdim=True)
        if weight is None:
            return rows
        gain = read(norm.get_parameter("weight")).reshape(-1, width, 1)
        return rows * ((1 + gain if kind == "rms from zero" else gain).to(rows))

    return _Fold(apply, lambda: [norm.get_parameter("weight")] if weight is not None else [])


_KNOWN: dict[frozenset[str], Callable[[Any], _Parts | str]] = {
    frozenset({"GPT2Attention"}): _gpt2_parts,
    frozenset({"GPTBigCodeAttention"}): _gpt_big_code_parts,
    frozenset({"GPTNeoXAttention"}): _gpt_neox_parts,
    frozenset({"BloomAttention", "PersimmonAttention"}): _three_parts,
    frozenset({"FalconAttention"}): _falcon_parts,
    frozenset({"Phi3Attention"}): _phi3_parts,
    frozenset({"DbrxAttention"}): _dbrx_parts,
    _LATENT: _latent_parts,
}
