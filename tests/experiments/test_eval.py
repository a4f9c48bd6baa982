"""What ``trimtab eval`` says is what lm-eval says; its own files become lm-eval's tasks; checkpoints are found."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trimtab.cli import main
from trimtab.errors import ConfigError, MissingExtraError
from trimtab.experiments.byte_tokenizer import NEWLINE, byte_tokenizer
from trimtab.experiments.eval_settings import EvalSettings
from trimtab.experiments.eval_tasks import next_sentences, read_examples, task_config
from trimtab.experiments.evaluation import find_checkpoint, load_checkpoint, run_eval
from trimtab.experiments.text import load_corpus, read_speeches

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'trimtab[hf]'")
needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs lm_eval: pip install 'trimtab[eval]'"
)
needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="needs peft: pip install 'trimtab[lora]'"
)
# What other packages warn about in their own code.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

SPEECHES = Path(__file__).parents[2] / "examples" / "data" / "speeches_eval.jsonl"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A small random LLaMA on bytes, saved as transformers saves, without a tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(str(folder))
    return folder


@pytest.fixture
def texts(tmp_path) -> Path:
    path = tmp_path / "texts.jsonl"
    lines = ["Four score and seven years ago.", "The only thing we have to fear is fear itself; é."]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), encoding="utf-8")
    return path


def with_tokenizer(checkpoint: Path, folder: Path) -> Path:
    """The same checkpoint with the tokenizer of bytes beside it, as lm-eval wants it."""
    transformers.AutoModelForCausalLM.from_pretrained(str(checkpoint)).save_pretrained(str(folder))
    byte_tokenizer().save_pretrained(str(folder))
    return folder


@torch.no_grad()
def mean_loss(model, windows: torch.Tensor) -> float:
    return float(model(input_ids=windows, labels=windows).loss)


def by_hand(checkpoint: Path, config: dict, limit: int | None) -> dict:
    """What lm-eval makes of a checkpoint by itself."""
    import lm_eval

    arguments = {"pretrained": str(checkpoint), "prefix_token_id": NEWLINE}
    found = lm_eval.simple_evaluate(
        model="hf", model_args=arguments, tasks=[config], device="cpu", batch_size=3, limit=limit
    )
    return {k.removesuffix(",none"): v for k, v in found["results"][config["task"]].items() if k != "alias"}


@needs_lm_eval
@pytest.mark.slow
def test_the_figures_of_multiple_choice_are_those_of_lm_eval_by_hand(checkpoint, tmp_path):
    expected = by_hand(with_tokenizer(checkpoint, tmp_path / "by-hand"), task_config(SPEECHES, tmp_path), 8)
    results = run_eval(EvalSettings(path=checkpoint, tasks=(str(SPEECHES),), limit=8))
    found = results["tasks"]["speeches_eval"]
    assert results["tokenizer"] == "bytes"
    assert set(found) >= {"acc", "acc_norm", "acc_stderr"}
    assert {k: expected[k] for k in ("acc", "acc_norm", "acc_stderr", "acc_norm_stderr")} == {
        k: found[k] for k in ("acc", "acc_norm", "acc_stderr", "acc_norm_stderr")
    }


@needs_lm_eval
@pytest.mark.slow
def test_perplexity_is_that_of_lm_eval_and_of_a_forward_by_hand(checkpoint, texts, tmp_path):
    expected = by_hand(with_tokenizer(checkpoint, tmp_path / "by-hand"), task_config(texts, tmp_path), None)
    found = run_eval(EvalSettings(path=checkpoint, tasks=(str(texts),), out=tmp_path / "out" / "eval.json"))
    metrics = found["tasks"]["texts"]
    for name in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-6)
    model = transformers.AutoModelForCausalLM.from_pretrained(str(checkpoint))
    nats = num_bytes = 0.0
    for example in read_examples(texts):
        data = example["text"].encode()
        ids = torch.tensor([[NEWLINE, *data]])
        with torch.no_grad():
            nats += float(model(input_ids=ids, labels=ids).loss) * len(data)
        num_bytes += len(data)
    assert metrics["bits_per_byte"] == pytest.approx(nats / num_bytes / math.log(2), rel=1e-5)
    assert json.loads((tmp_path / "out" / "eval.json").read_text()) == found


@needs_lm_eval
@needs_peft
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["saved-activations", "int8-base"])
def test_a_run_of_trimtab_train_is_evaluated_as_it_was_validated(tmp_path, recipe):
    config = {"model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = "".join(f"The ship {i} sails to port {i * i % 97} at dawn. " for i in range(2000))
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "held.jsonl").write_text(json.dumps({"text": text[-400:]}) + "\n")
    out = tmp_path / "run"
    words = ["--model", str(tmp_path / "config.json"), "--data", str(tmp_path / "text.txt"), "--out", str(out)]
    words += ["--recipe", recipe, "--steps", "30", "--preset", "paper", "--learning-rate", "0.01"]
    assert main(["train", *words]) == 0
    found = run_eval(EvalSettings(path=out, tasks=(str(tmp_path / "held.jsonl"),)))
    assert found["checkpoint"] == str(out / "final")
    model, _ = load_checkpoint(out / "final")
    bits = mean_loss(model, torch.tensor([[NEWLINE, *text[-400:].encode()]])) / math.log(2)
    assert found["tasks"]["held"]["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    # The model that was validated, a random base under adapters too: the same windows give the same loss.
    validation = load_corpus([text], sequence=128).validation
    windows = validation[: len(validation) // 128 * 128].view(-1, 128)
    validated = json.loads((out / "summary.json").read_text())["val_loss"]
    assert mean_loss(model, windows) == pytest.approx(validated, rel=1e-5)
    if recipe == "int8-base":
        other = transformers.AutoConfig.from_pretrained(str(tmp_path))
        transformers.AutoModelForCausalLM.from_config(other).save_pretrained(str(tmp_path / "other"))
        model, _ = load_checkpoint(out / "final", tmp_path / "other")
        assert mean_loss(model, windows) != pytest.approx(validated, rel=1e-3)


@needs_lm_eval
@pytest.mark.slow
def test_without_network_a_named_task_is_refused_in_one_line(checkpoint):
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": str(checkpoint)}
    words = [sys.executable, "-m", "trimtab", "eval", str(checkpoint), "--tasks", "hellaswag"]
    done = subprocess.run(words, capture_output=True, text=True, env=offline)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("trimtab: error: tasks='hellaswag': its data cannot be had from here")
    assert "or name a file of your own" in last


@needs_lm_eval
def test_a_task_that_is_almost_one_is_answered_with_it(checkpoint):
    with pytest.raises(ConfigError, match=r"tasks='helaswag': it is neither .* Did you mean 'hellaswag'\?"):
        run_eval(EvalSettings(path=checkpoint, tasks=("helaswag",)))


def test_without_lm_eval_the_error_says_what_to_install(checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(MissingExtraError, match=r"trimtab eval needs .*pip install 'trimtab\[eval\]'"):
        run_eval(EvalSettings(path=checkpoint, tasks=("wikitext",)))


def test_the_tokenizer_of_bytes_gives_every_byte_of_any_text_back():
    tokenizer = byte_tokenizer()
    text = "".join(map(chr, range(1, 0x250))) + "漢字 \U0001f600"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == 256
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 0


@pytest.mark.parametrize("answer", [1, "B", "b", "two"])
def test_an_answer_is_a_number_a_letter_or_the_choice(tmp_path, answer):
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"question": "1 + 1?", "choices": ["one", "two"], "answer": answer}))
    assert read_examples(path) == [{"context": "1 + 1?", "choices": ["one", "two"], "answer": 1}]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["not json"], r"one.jsonl:1.*an example is"),
        (['{"text": "a"}', '{"context": "a", "choices": ["b", "c"], "answer": 2}'], r"one.jsonl:2.*an example is"),
        (['{"context": "a", "choices": ["b"], "answer": 0}'], "one of two or more choices"),
        (['{"text": "a"}', '{"context": "a", "choices": ["b", "c"], "answer": 0}'], "mixes texts and multiple choice"),
        ([""], "there is no example in it"),
    ],
)
def test_a_file_that_is_no_task_is_refused(tmp_path, lines, message):
    path = tmp_path / "one.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=message):
        read_examples(path)


def test_the_example_is_what_the_rule_gives_and_is_of_held_out_speeches():
    shipped = read_examples(SPEECHES)
    held_out = read_speeches()[10::20]
    assert shipped == next_sentences(held_out, 100, seed=0)
    assert shipped != next_sentences(held_out, 100, seed=1)
    whole = " ".join(" ".join(held_out).split())
    assert all(f"{e['context']} {e['choices'][e['answer']]}" in whole for e in shipped)
    assert {e["answer"] for e in shipped} == {0, 1, 2, 3}


@needs_peft
def test_adapters_find_their_base_where_they_say_or_where_they_are_told(checkpoint, tmp_path):
    from trimtab.experiments.lora import add_lora

    base = transformers.AutoModelForCausalLM.from_pretrained(str(checkpoint))
    adapted = add_lora(base, 2)
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_B" in name:
                p.fill_(0.1)
    adapted.save_pretrained(str(tmp_path / "adapters"))
    ids = torch.arange(8)[None]
    expected = adapted.eval()(input_ids=ids).logits
    for given in (None, checkpoint):
        model, tokenizer = load_checkpoint(tmp_path / "adapters", given)
        assert tokenizer is None
        assert torch.equal(model(input_ids=ids).logits, expected)
    with pytest.raises(ConfigError, match=r"the adapters in .* belong to a model that is not there"):
        load_checkpoint(tmp_path / "adapters", tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"base=.*the checkpoint is of a whole model"):
        load_checkpoint(checkpoint, checkpoint)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path, checkpoint):
    assert find_checkpoint(checkpoint) == checkpoint
    with pytest.raises(ConfigError, match="it holds no checkpoint"):
        find_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="there is no such folder"):
        EvalSettings(path=tmp_path / "nowhere", tasks=("wikitext",)).check_path()


@pytest.mark.parametrize(("setting", "value"), [("limit", 0), ("shots", -1), ("batch", 0), ("tasks", ())])
def test_a_setting_that_cannot_be_meant_is_refused(checkpoint, setting, value):
    with pytest.raises(ConfigError, match=f"{setting}="):
        EvalSettings(**{"path": checkpoint, "tasks": ("wikitext",), setting: value})
