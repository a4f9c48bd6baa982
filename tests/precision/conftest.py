import copy

import pytest
import torch
from torch import nn

from trimtab.precision import SavedActivations, find_units


@pytest.fixture
def convert():
    """Convert all units of a model; returns the conversion. ``undo`` is the test's own affair."""

    def run(model, low_bits=4, high_bits=8, *, units=None, **settings):
        recipe = SavedActivations(low_bits, high_bits, **settings)
        return recipe.convert(model, find_units(model, units))

    return run


@pytest.fixture
def pair(convert):
    """A plain model, its converted copy, and the conversion."""

    def run(model, *widths, **settings):
        converted = copy.deepcopy(model)
        return model, converted, convert(converted, *widths, **settings)

    return run


class Block(nn.Module):
    """q, k, v read one tensor; o reads another."""

    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        h = torch.tanh(x)
        return x + self.o(self.q(h) * torch.sigmoid(self.k(h)) + self.v(h))


class Blocks(nn.Module):
    """Blocks, each behind ``wrap`` (activation checkpointing, say)."""

    def __init__(self, num_blocks=3, width=8):
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.wrap = lambda block, x: block(x)

    def forward(self, x):
        for block in self.layers:
            x = self.wrap(block, x)
        return x


@pytest.fixture
def blocks():
    def make(num_blocks=3, width=8):
        torch.manual_seed(0)
        return Blocks(num_blocks, width)

    return make


@pytest.fixture
def tiny_llama():
    """A Llama of four layers; transformers is loaded only where it is asked for."""

    def make(num_layers=4, **settings):
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
        return LlamaForCausalLM(LlamaConfig(vocab_size=50, num_hidden_layers=num_layers, **(sizes | settings)))

    return make


@pytest.fixture
def tiny_gpt2():
    def make(num_layers=2):
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        sizes = {"n_embd": 32, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_layer=num_layers, n_positions=32, **sizes))

    return make


@pytest.fixture
def gradients():
    """Run ``model`` on ``inputs`` and return every parameter's gradient by name."""

    def run(model, *inputs):
        model.zero_grad()
        for x in inputs:
            y = model(x) if isinstance(x, torch.Tensor) else model(**x)
            (y.loss if hasattr(y, "loss") else y.square().sum()).backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    return run


@pytest.fixture
def kept():
    """The int8 copies that one call keeps, one of each distinct storage."""

    def run(call):
        storages = {}

        def pack(tensor):
            if tensor.dtype == torch.int8:
                storages[tensor.untyped_storage().data_ptr()] = tensor
            # The tensor itself would make a cycle of a node that saves its own output.
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            call()
        return list(storages.values())

    return run
