"""Every causal LM family, built small, is watched by every monitor for three steps; the docs say what was found.

``python tests/coverage/test_families.py`` writes docs/coverage.md anew.
"""

from __future__ import annotations

import copy
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import trimtab
from trimtab.monitors import AttentionSpectrum, ResidualNorm, Router, ShiftResidual, UsualSignals, find_head_layouts
from trimtab.precision import find_units

transformers = pytest.importorskip("transformers")

TABLE = Path(__file__).parents[2] / "docs" / "coverage.md"

BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = BASE | {"num_key_value_heads": 2}
WIDE = GROUPED | {"head_dim": 16}
EXPERTS = GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL = GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = BASE | {
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

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", GROUPED),
    "Mistral": ("Mistral", GROUPED),
    "Qwen2": ("Qwen2", GROUPED),
    "Qwen3": ("Qwen3", WIDE),
    "Gemma": ("Gemma", WIDE),
    "Gemma 2": ("Gemma2", WIDE),
    "Gemma 3": ("Gemma3", WIDE),
    "Phi-3": ("Phi3", GROUPED),
    "Phi": ("Phi", BASE),
    "GPT-2": ("GPT2", BASE),
    "GPT-NeoX": ("GPTNeoX", BASE),
    "Falcon": ("Falcon", BASE | {"alibi": False, "bias": False, "multi_query": True}),
    "OLMo 2": ("Olmo2", GROUPED),
    "Granite": ("Granite", GROUPED),
    "StableLM": ("StableLm", GROUPED),
    "Cohere": ("Cohere", GROUPED),
    "SmolLM3": ("SmolLM3", GROUPED),
    "BLOOM": ("Bloom", BASE),
    "OPT": ("OPT", BASE | {"ffn_dim": 32, "word_embed_proj_dim": 64, "max_position_embeddings": 64}),
    "Mixtral": ("Mixtral", LOCAL),
    "Qwen2-MoE": ("Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 16}),
    "Qwen3-MoE": ("Qwen3Moe", EXPERTS | {"head_dim": 16}),
    "OLMoE": ("Olmoe", EXPERTS),
    "DeepSeek-V3": ("DeepseekV3", LATENT),
    "gpt-oss": ("GptOss", LOCAL | {"head_dim": 16}),
    "Mamba": ("Mamba", {k: v for k, v in BASE.items() if "heads" not in k and k != "intermediate_size"}),
}


def build(family: str) -> torch.nn.Module:
    name, settings = FAMILIES[family]
    torch.manual_seed(0)
    config_class = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_config(config_class(**settings))
    return model.train()


def train(model: torch.nn.Module, guard: trimtab.Guard | None) -> list[torch.Tensor]:
    """Three steps; the weights after them."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        ids = torch.randint(3, 64, (2, 12))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if guard is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            guard.step(max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def monitors() -> list[Any]:
    return [AttentionSpectrum(every_steps=1), ShiftResidual(), Router(), UsualSignals(), ResidualNorm()]


def measure(family: str) -> dict[str, str]:
    """A row of the table; fails where watching changes a weight or a monitor raises."""
    model = build(family)
    plain = train(copy.deepcopy(model), None)
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        guard = trimtab.attach(model, monitors=monitors())
        watched = train(model, guard)
        metrics = guard.metrics()
        guard.detach()
    said = [str(w.message) for w in caught if issubclass(w.category, trimtab.TrimtabWarning)]
    assert not [s for s in said if "failed and is off" in s], said
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True)), "watching changed a weight"
    layouts = find_head_layouts(model)
    heads = ", ".join(sorted({f"{x.num_heads}/{x.num_kv_heads}" for x in layouts.known}))
    reason = next(iter(layouts.skipped.values()), "no attention module")
    shift = metrics.get("trimtab/shift_residual/residual_max", metrics.get("trimtab/shift_residual/residual"))
    entropy = metrics.get("trimtab/router/entropy_mean_mean", metrics.get("trimtab/router/entropy_mean"))
    return {
        "family": family,
        "units": str(len(find_units(model))),
        "attention update spectrum": f"{len(layouts.known)} layers, heads {heads}"
        if layouts.known
        else f"none: {reason}",
        "shift residual": _measured(shift, _about(said, "shift_residual", "keys")),
        "router": _measured(entropy, "no router"),
    }


def _measured(value: float | None, reason: str) -> str:
    return "read" if value is not None and not math.isnan(value) else f"none: {reason}"


def _about(said: list[str], *words: str) -> str:
    for sentence in said:
        if any(word in sentence for word in words):
            return sentence.split("layers like it: ")[-1].rstrip(".")
    return "no attention is called through transformers' interface"


def table() -> str:
    rows = [measure(family) for family in FAMILIES]
    columns = list(rows[0])
    lines = [
        "# Coverage",
        "",
        "Made by `python tests/coverage/test_families.py`: a tiny random model of each family, all monitors attached,",
        "three steps, with weights bit for bit those of the unwatched run.",
        f"transformers {transformers.__version__}.",
        "",
        "Units are those of the default selection; 4/2 is 4 query heads and 2 key heads a layer.",
        "",
        "| " + " | ".join(columns) + " |",
        "| " + " | ".join("---" for _ in columns) + " |",
        *("| " + " | ".join(row[c] for c in columns) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_covered_as_the_docs_say(family: str) -> None:
    row = "| " + " | ".join(measure(family).values()) + " |"
    assert row in TABLE.read_text(encoding="utf-8").splitlines(), row


def test_at_least_nineteen_families_are_covered() -> None:
    assert len(FAMILIES) >= 19


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    TABLE.write_text(table(), encoding="utf-8")
    sys.stdout.write(TABLE.read_text(encoding="utf-8"))
