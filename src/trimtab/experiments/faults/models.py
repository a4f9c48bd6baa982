"""The small models that are watched, how they are trained, and every monitor that watches them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from trimtab.monitors.attention_spectrum import AttentionSpectrum
from trimtab.monitors.protocol import Monitor
from trimtab.monitors.residual_stream import ResidualNorm
from trimtab.monitors.router import Router
from trimtab.monitors.shift_residual import ShiftResidual
from trimtab.monitors.usual_signals import UsualSignals

__all__ = ["ModelKind", "WatchedPlan", "every_monitor", "make_model"]

ModelKind = Literal["dense", "moe", "qk_norm"]
"""A LLaMA, a Mixtral with a balancing loss, or a Qwen3, which norms its queries and keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchedPlan:
    """Model, optimizer and schedule of a watched run; what differs from one run to the next is not in it."""

    hidden: int = 128
    """Width of the model."""
    ffn: int = 256
    """Width of its MLPs; of an expert, half of it."""
    num_layers: int = 2
    """Decoder layers."""
    num_heads: int = 4
    """Attention heads."""
    num_experts: int = 8
    """Experts of a mixture, of which a token is sent to two."""
    aux_loss: float = 0.01
    """Weight of a mixture's balancing loss."""
    sequence: int = 64
    """Tokens of a sequence."""
    batch: int = 8
    """Sequences of a batch."""
    learning_rate: float = 1e-3
    """Learning rate of AdamW after the warm-up."""
    warmup_steps: int = 20
    """Steps of linear warm-up."""
    cosine_steps: int = 0
    """The learning rate falls along a cosine to zero at this step; 0 keeps it constant."""
    weight_decay: float = 0.1
    """Weight decay."""
    max_norm: float = 1.0
    """Clip the total gradient norm to this."""
    eval_every: int = 10
    """Steps from one look at the held-out loss to the next."""
    num_validation: int = 32
    """Held-out sequences, the same at each look."""

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then constant or a cosine to zero.

        Example:
            >>> WatchedPlan(cosine_steps=120).learning_rate_at(70), WatchedPlan().learning_rate_at(10)
            (0.0005, 0.0005)
        """
        rate = self.learning_rate
        if step < self.warmup_steps:
            return rate * step / self.warmup_steps
        if not self.cosine_steps:
            return rate
        done = (step - self.warmup_steps) / max(1, self.cosine_steps - self.warmup_steps)
        return rate * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def make_model(kind: ModelKind, plan: WatchedPlan, vocab_size: int, seed: int) -> nn.Module:
    """A small causal LM with random weights.

    Args:
        kind: Which.
        plan: Its sizes.
        vocab_size: Number of token ids.
        seed: Of the weights.
    """
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": plan.hidden,
        "num_hidden_layers": plan.num_layers,
        "num_attention_heads": plan.num_heads,
        "num_key_value_heads": plan.num_heads,
        "max_position_embeddings": max(256, plan.sequence),
        "use_cache": False,
    }
    if kind == "dense":
        return LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=plan.ffn))
    if kind == "qk_norm":
        head_dim = plan.hidden // plan.num_heads
        return Qwen3ForCausalLM(Qwen3Config(**sizes, intermediate_size=plan.ffn, head_dim=head_dim))
    config = MixtralConfig(
        **sizes,
        intermediate_size=plan.ffn // 2,
        num_local_experts=plan.num_experts,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=plan.aux_loss,
    )
    return MixtralForCausalLM(config)


def every_monitor(kind: ModelKind) -> list[Monitor]:
    """Every monitor that the model has something to show to, each with its default settings."""
    monitors: list[Monitor] = [AttentionSpectrum(), ShiftResidual(), UsualSignals(), ResidualNorm()]
    return [*monitors, Router()] if kind == "moe" else monitors
