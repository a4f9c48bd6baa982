"""The models and runs of Kong et al. 2026 as data: config, recipe, policy and lengths. No torch here.

The widths and depths of the LLaMA models, and how long they train on C4, are those of GaLore (Zhao et al. 2024,
arXiv:2403.03507, appendix C, and configs/llama_*.json and scripts/benchmark_c4 of its repository jiaweizzhao/GaLore),
on which the paper's models of these sizes are built. What neither says is ours, and each preset says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from trimtab.control import Policy, preset
from trimtab.errors import ConfigError, nearest_names

__all__ = ["RUN_PRESETS", "RunPreset", "run_preset"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPreset:
    """A model and how it is trained.

    Example:
        >>> run_preset("llama-60m").tokens_per_step
        131072
    """

    name: str
    """On the command line."""
    about: str
    """What it is, and what of it is ours, in a sentence or two."""
    config: Mapping[str, Any]
    """The model's config, as transformers reads it."""
    recipe: str
    """A name of ``RECIPES``."""
    recipe_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of ``make_recipe`` that differ from its defaults."""
    policy: str = "paper"
    """A name of ``trimtab.control.PRESETS``."""
    steps: int
    """Optimizer steps."""
    warmup_steps: int
    """Steps of linear warm-up of the learning rate."""
    learning_rate: float
    """Peak learning rate of AdamW."""
    total_batch: int
    """Sequences an optimizer step, over all devices and micro-batches."""
    batch: int
    """Sequences that a device holds at once."""
    sequence: int
    """Tokens of a sequence."""
    lora_rank: int = 0
    """Rank of LoRA adapters on every projection; 0 trains the whole model."""
    lora_alpha: int = 16
    """Adapters are scaled by this over their rank."""
    high_fidelity_share: float = 0.0
    """Share of the steps, at the start, in which every unit is on the recovery path; no budget holds there."""

    def __post_init__(self) -> None:
        if self.total_batch % self.batch:
            raise ConfigError(
                "batch", self.batch, f"the {self.total_batch} sequences of a step are whole batches.", "Set a divisor."
            )

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step, over all devices."""
        return self.total_batch * self.sequence

    @property
    def high_fidelity_steps(self) -> int:
        """Steps of the high-fidelity warm-up."""
        return round(self.high_fidelity_share * self.steps)

    def accumulation(self, num_devices: int = 1) -> int:
        """Micro-batches an optimizer step on each of ``num_devices``, as under torchrun.

        Raises: ConfigError: when the step's sequences do not come out even.
        """
        if num_devices < 1 or self.total_batch % (self.batch * num_devices):
            raise ConfigError(
                "num_devices",
                num_devices,
                f"{self.total_batch} sequences a step are to be shared out in batches of {self.batch}.",
                f"Use a divisor of {self.total_batch // self.batch}.",
            )
        return self.total_batch // (self.batch * num_devices)

    def make_policy(self) -> Policy:
        """The policy, for the preset's number of steps."""
        return preset(self.policy, total_steps=self.steps)


def run_preset(name: str) -> RunPreset:
    """The preset of that name.

    Raises: ConfigError: when there is none, with the nearest name.
    """
    if name not in RUN_PRESETS:
        near = nearest_names(name, RUN_PRESETS)
        remedy = f"Did you mean {near[0]!r}?" if near else "Use one of them."
        raise ConfigError("preset", name, f"it is one of {', '.join(map(repr, RUN_PRESETS))}.", remedy)
    return RUN_PRESETS[name]


def _llama(hidden: int, intermediate: int, heads: int, layers: int, **changed: Any) -> Mapping[str, Any]:
    return MappingProxyType(
        {
            "model_type": "llama",
            "vocab_size": 32000,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_attention_heads": heads,
            "num_hidden_layers": layers,
            "max_position_embeddings": 1024,
            "rms_norm_eps": 1e-6,
        }
        | changed
    )


def _on_c4(
    size: str, config: Mapping[str, Any], *, steps: int, batch: int, learning_rate: float, about: str = ""
) -> RunPreset:
    """4-bit saved activations, 512 sequences of 256 tokens a step, a tenth of the steps of warm-up."""
    return RunPreset(
        name=f"llama-{size.lower()}",
        about=f"LLaMA {size} on C4 with 4-bit saved activations; GaLore's config and lengths"
        + (f", {about}." if about else ", full-rank AdamW's learning rate is ours."),
        config=config,
        recipe="saved-activations",
        steps=steps,
        warmup_steps=steps // 10,
        learning_rate=learning_rate,
        total_batch=512,
        batch=batch,
        sequence=256,
    )


# hidden, intermediate, heads, layers: configs/llama_60m, _130m, _350m, _1b and _3b.json of GaLore's repository, whose
# file for 1.3 billion parameters is called 1b. Lengths: its scripts; batch: what they put on one device.
_ALL = (
    _on_c4("60M", _llama(512, 1376, 8, 8), steps=10_000, batch=256, learning_rate=1e-3),
    _on_c4("130M", _llama(768, 2048, 12, 12), steps=20_000, batch=256, learning_rate=1e-3),
    _on_c4("350M", _llama(1024, 2736, 16, 24), steps=60_000, batch=128, learning_rate=1e-3),
    _on_c4("1.3B", _llama(2048, 5461, 32, 24), steps=100_000, batch=16, learning_rate=6e-4),
    _on_c4(
        "3B",
        _llama(2560, 6848, 32, 32),
        steps=120_000,  # GaLore trains 1.3B for 100,000 steps, and 7B for 150,000
        batch=16,
        learning_rate=4e-4,
        about="of which it has no script for this size: steps, batch and learning rate are ours",
    ),
    RunPreset(
        name="llama2-13b-lora",
        about="LoRA on Llama-2-13B over an INT8 base, 10 of 40 decoder layers on BF16 at most. Rank, lengths and "
        "learning rate are ours.",
        # Touvron et al. 2023 (arXiv:2307.09288), and the config.json of its 13B model.
        config=_llama(5120, 13824, 40, 40, max_position_embeddings=4096, rms_norm_eps=1e-5),
        recipe="int8-base",
        recipe_settings=MappingProxyType({"unit": "layer"}),
        policy="paper-lora",
        steps=1_000,
        warmup_steps=50,
        learning_rate=2e-4,
        total_batch=128,
        batch=8,
        sequence=512,
        lora_rank=16,
        lora_alpha=32,
    ),
    RunPreset(
        name="moe-3.7b",
        about="A mixture of experts of 3.7 billion parameters: our configuration of that size, for the paper's is not "
        "public. All units are on the recovery path in the first 5% of the steps; lengths are ours.",
        config=MappingProxyType(
            {
                "model_type": "qwen3_moe",
                "vocab_size": 32000,
                "hidden_size": 1536,
                "intermediate_size": 4096,
                "moe_intermediate_size": 640,
                "num_experts": 48,
                "num_experts_per_tok": 6,
                "num_attention_heads": 12,
                "num_key_value_heads": 12,
                "head_dim": 128,
                "num_hidden_layers": 24,
                "max_position_embeddings": 2048,
                "tie_word_embeddings": False,
            }
        ),
        recipe="quantized-gemm",
        policy="paper-moe",
        steps=50_000,
        warmup_steps=2_500,
        learning_rate=4e-4,
        total_batch=256,
        batch=4,
        sequence=1024,
        high_fidelity_share=0.05,
    ),
)

RUN_PRESETS: Mapping[str, RunPreset] = MappingProxyType({p.name: p for p in _ALL})
"""The presets by their names on the command line."""
