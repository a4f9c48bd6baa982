"""Bytes kept for backward on each path, measured: by the projections alone, and by the whole model.

python benchmarks/memory.py
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trimtab.precision import SavedActivations, find_units, plain_saved_bytes


def main() -> None:
    torch.manual_seed(0)
    batch, sequence = 2, 256
    for hidden, ffn, layers in ((128, 256, 4), (512, 1376, 4)):
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=hidden,
            intermediate_size=ffn,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            use_cache=False,
        )
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        units = find_units(model)
        ids = torch.randint(0, 256, (batch, sequence))

        def forward(model: torch.nn.Module = model, ids: torch.Tensor = ids) -> object:
            return model(input_ids=ids, labels=ids)

        plain = plain_saved_bytes(model, units, forward)
        print(f"bf16 LLaMA, width {hidden}, {layers} layers, {batch} x {sequence} tokens")
        print(f"  plain     projections {plain.units / 2**20:8.2f} MiB          model {plain.model / 2**20:8.2f} MiB")
        for bits in (8, 4, 2):
            conversion = SavedActivations(bits, 16).convert(model, units)
            kept = plain_saved_bytes(model, units, forward)
            conversion.undo()
            print(
                f"  {bits}-bit     projections {kept.units / 2**20:8.2f} MiB  {kept.units / plain.units:.3f}   "
                f"model {kept.model / 2**20:8.2f} MiB  {kept.model / plain.model:.3f}"
            )


if __name__ == "__main__":
    main()
