"""Small models for contract tests: numbered blocks of projections as a language model has them, plain or with adapters.

Building one draws no number from the global random streams, and the same arguments give the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["VOCABULARY", "AdaptedLinear", "TinyModel", "adapted_tiny_model", "nothing_to_convert", "tiny_model"]

VOCABULARY = 48


class TinyModel(nn.Module):
    """Embedding, blocks of attention and a gated MLP, norm, output head.

    Args:
        hidden_size: Width.
        intermediate_size: Width inside the MLP.
        num_blocks: Number of blocks.

    Attributes:
        run_block: Runs a block, ``run_block(block, x)``, where that is not to be a plain call: activation
            checkpointing, say.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, num_blocks: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, hidden_size)
        self.layers = nn.ModuleList(_Block(hidden_size, intermediate_size) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(hidden_size)
        self.lm_head = nn.Linear(hidden_size, VOCABULARY, bias=False)
        self.run_block: Callable[[nn.Module, Tensor], Tensor] | None = None

    def forward(self, ids: Tensor) -> Tensor:
        """The logits of ``ids``, shape (sequences, tokens)."""
        x = self.embed_tokens(ids)
        for block in self.layers:
            x = block(x) if self.run_block is None else self.run_block(block, x)
        return self.lm_head(self.norm(x))


class _Block(nn.Module):
    """One block; its output projections have biases."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(hidden_size)
        self.self_attn = _Attention(hidden_size)
        self.post_attention_layernorm = nn.LayerNorm(hidden_size)
        self.mlp = _GatedMLP(hidden_size, intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        """Both halves, each added to its input."""
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class _Attention(nn.Module):
    """Attention of one head; its three inputs are one tensor."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Every token attends to every other."""
        scores = self.q_proj(x) @ self.k_proj(x).transpose(-1, -2) / math.sqrt(x.shape[-1])
        return self.o_proj(scores.softmax(-1) @ self.v_proj(x))


class _GatedMLP(nn.Module):
    """The MLP; its two inputs are one tensor."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """The gated product, projected down."""
        return self.down_proj(torch.sigmoid(self.gate_proj(x)) * self.up_proj(x))


class AdaptedLinear(nn.Module):
    """A frozen linear layer with a trained low-rank update beside it, laid out as adapters are in peft.

    Args:
        base_layer: The layer.
        rank: Rank of the update.
    """

    def __init__(self, base_layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False)
        # Not zeros, as adapters start from: then no gradient would reach lora_A.
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output and the update."""
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def tiny_model(hidden_size: int = 32, intermediate_size: int = 64, num_blocks: int = 2) -> TinyModel:
    """A ``TinyModel`` in float32, in training mode.

    Example:
        >>> torch.equal(tiny_model().lm_head.weight, tiny_model().lm_head.weight)
        True
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TinyModel(hidden_size, intermediate_size, num_blocks)


def adapted_tiny_model(hidden_size: int = 32, intermediate_size: int = 64, num_blocks: int = 2) -> TinyModel:
    """``tiny_model``, frozen, each projection with an adapter that is trained.

    Example:
        >>> sorted({n.split(".")[-2] for n, p in adapted_tiny_model().named_parameters() if p.requires_grad})
        ['lora_A', 'lora_B']
    """
    model = tiny_model(hidden_size, intermediate_size, num_blocks).requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for half in [half for block in model.layers for half in block.children()]:
            for name, child in list(half.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(half, name, AdaptedLinear(child))
    return model


def nothing_to_convert() -> nn.Module:
    """A model that multiplies by no matrix."""
    return nn.ModuleDict({"layers": nn.ModuleList(nn.LayerNorm(32) for _ in range(2))})
