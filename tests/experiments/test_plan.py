"""A plan says what a run takes: against bytes that a model really keeps, and a record that was really written."""

import importlib.util
import json
import math
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from trimtab.cli import main
from trimtab.control import robust
from trimtab.errors import ConfigError
from trimtab.experiments.plan import make_plan
from trimtab.experiments.plan_settings import PlanSettings
from trimtab.experiments.presets import RUN_PRESETS
from trimtab.experiments.recipes import RECIPES, make_recipe
from trimtab.experiments.record_size import record_bytes
from trimtab.experiments.shape_run import ShapeRunError, make_shapes, saved_bytes_of_shapes
from trimtab.precision import find_units, measure_saved_bytes
from trimtab.trace import RunWriter, StepRow, UnitRow, record_path

pytest.importorskip("transformers", reason="needs transformers: pip install 'trimtab[hf]'")
pytestmark = [
    # transformers, about a name of its own that peft still uses
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    # torch's compiler, which peft imports, about its own modules
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]
needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="needs peft: pip install 'trimtab[lora]'"
)

CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TOKENS = (3, 17)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def settings(config: Path, **given) -> PlanSettings:
    return PlanSettings(model=str(config), batch=TOKENS[0], sequence=TOKENS[1], **given)


def really_saved(config: Path, dtype: str, recipe, lora_rank: int, active) -> int:
    """What the units of a real model keep in one forward, with some of them on the recovery path."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from trimtab.experiments.lora import add_lora

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(config)), dtype=getattr(torch, dtype))
    model.config.use_cache = False
    if lora_rank:
        model = add_lora(model, lora_rank)
    conversion = recipe.convert(model, find_units(model, grouping=recipe.unit))
    conversion.route(active(conversion))
    with measure_saved_bytes(model, conversion.units) as counts:
        keep = model(input_ids=torch.zeros(TOKENS, dtype=torch.int64))
    del keep
    return counts.units


def all_low(conversion):
    return [False] * len(conversion.units)


def all_high(conversion):
    return [True] * len(conversion.units)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("saved-activations", {}),
        ("saved-activations", {"low_bits": 2, "high_bits": 16, "unit": "half"}),
        ("quantized-gemm", {"unit": "block"}),
        pytest.param("int8-base", {"unit": "layer"}, marks=needs_peft),
    ],
    ids=str,
)
def test_the_saved_bytes_are_those_of_a_real_forward_on_both_paths(config, name, given, dtype):
    plan = make_plan(settings(config, recipe=name, dtype=dtype, **given))
    recipe, rank = make_recipe(name, **given), 8 * RECIPES[name].needs_adapters
    low, high = (really_saved(config, dtype, recipe, rank, path) for path in (all_low, all_high))
    assert plan.low_saved_bytes == pytest.approx(low, rel=0.02)
    assert plan.high_saved_bytes == pytest.approx(high, rel=0.02)


@pytest.mark.parametrize("unit", ["projection", "half", "block"])
def test_recovery_adds_no_more_than_the_bounds_say(config, unit):
    plan = make_plan(settings(config, unit=unit, max_active=3))
    recipe = make_recipe("saved-activations", unit=unit)
    generator = np.random.default_rng(0)

    def some(conversion):
        chosen = set(generator.permutation(len(conversion.units))[:3].tolist())
        return [i in chosen for i in range(len(conversion.units))]

    low = really_saved(config, "bfloat16", recipe, 0, all_low)
    added = [really_saved(config, "bfloat16", recipe, 0, some) - low for _ in range(4)]
    assert 0 < max(added) <= plan.shared_bound_bytes
    # Where what shares a copy switches together, each unit has its own, and the paper's bound holds as well.
    if unit != "projection":
        assert max(added) <= plan.memory_bound_bytes == plan.shared_bound_bytes


def test_the_papers_bound_is_that_of_its_formula(config):
    plan = make_plan(settings(config, max_active=2))
    # The two largest units are down-projections, which read 100 elements a token.
    assert plan.memory_bound_bytes == (8 - 4) / 8 * 2 * 100 * math.prod(TOKENS)


def test_a_whole_model_is_planned_as_find_units_sees_it(config):
    plan = make_plan(settings(config, accumulation=4))
    model = make_shapes(CONFIG, torch.float32)
    assert (plan.num_units, plan.num_recoverable) == (21, 21)
    assert plan.num_parameters == plan.num_trainable == sum(p.numel() for p in model.parameters())
    assert plan.tokens_per_step == 4 * plan.tokens_at_once == 4 * math.prod(TOKENS)
    in_units = sum(unit.num_parameters for unit in find_units(model))
    assert plan.unit_flops == 6 * in_units * plan.tokens_per_step
    assert plan.recovery_flops == 0.0
    assert "the same on both paths" in plan.flops_counted


def test_recovered_flops_are_those_of_the_largest_units_that_the_budget_allows(config):
    plan = make_plan(settings(config, recipe="quantized-gemm", max_active=2))
    assert plan.recovery_flops == 6 * 2 * 48 * 100 * plan.tokens_per_step


@needs_peft
def test_only_adapters_are_trained_over_a_frozen_base(config):
    plan = make_plan(settings(config, recipe="int8-base", lora_rank=2))
    plain = make_plan(settings(config))
    assert plan.num_trainable == plan.num_parameters - plain.num_parameters > 0
    assert plan.low_saved_bytes == plan.high_saved_bytes == plan.plain_saved_bytes


def test_every_expert_is_a_unit_and_gets_its_share_of_the_tokens(tmp_path):
    config = {
        **RUN_PRESETS["moe-3.7b"].config,
        "hidden_size": 32,
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 2,
        "vocab_size": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = make_plan(settings(tmp_path, recipe="quantized-gemm", dtype="float32"))
    assert plan.num_units == 2 * (4 + 8)
    experts = 2 * 8 * (3 * 32 * 24) * 2 / 8
    assert plan.unit_flops == 6 * (2 * 4 * 32 * 32 + experts) * plan.tokens_per_step
    # In each layer q, k and v read one tensor and o another, and each token goes through two experts' two products.
    assert plan.low_saved_bytes == 2 * math.prod(TOKENS) * (2 * 32 + 2 * (32 + 24)) * 4
    # A real forward keeps as much, and what lies between an expert's products.
    low = really_saved(tmp_path / "config.json", "float32", make_recipe("quantized-gemm"), 0, all_low)
    assert plan.low_saved_bytes < low


def test_without_a_recipe_there_are_no_paths(config):
    plan = make_plan(settings(config, recipe="none"))
    assert (plan.num_units, plan.num_recoverable, plan.max_active) == (21, 0, 0)
    assert plan.memory_bound_bytes == plan.unit_flops == 0
    assert plan.low_saved_bytes == plan.high_saved_bytes == plan.plain_saved_bytes > 0


def test_a_model_that_needs_numbers_is_planned_unit_by_unit_and_told_so(config, monkeypatch):
    def refuse(*_):
        raise ShapeRunError("RuntimeError: a number is needed")

    monkeypatch.setattr("trimtab.experiments.plan.saved_bytes_of_shapes", refuse)
    plan = make_plan(settings(config))
    assert plan.plain_saved_bytes is None
    assert "a number is needed" in plan.saved_counted
    # 4 bits and a scale of 4 bytes for each of seven inputs, six of which are as wide as the model.
    assert plan.low_saved_bytes == 3 * (6 * (24 + 4) + (50 + 4)) * math.prod(TOKENS)


def test_a_failing_forward_is_said_and_leaves_torch_as_it_was():
    model = make_shapes(CONFIG, torch.float32)
    model.model.norm.forward = lambda x: x.sum().item()
    ask = torch.is_autocast_enabled
    with pytest.raises(ShapeRunError, match="meta"):
        saved_bytes_of_shapes(model, find_units(model), TOKENS)
    assert torch.is_autocast_enabled is ask
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("num_units", [14, 80, 300, 900])
@pytest.mark.parametrize("quantizer_stats", [False, True])
def test_the_record_grows_as_the_formula_says(tmp_path, num_units, quantizer_stats):
    controller = robust().start(num_units)
    generator = np.random.default_rng(0)
    sizes = []
    for num_steps in (100, 400):
        folder = tmp_path / str(num_steps)
        units = [UnitRow(name=f"layers.{i}.q_proj") for i in range(num_units)]
        writer = RunWriter(folder, config={}, units=units)
        for step in range(1, num_steps + 1):
            decision = controller.update(generator.lognormal(size=num_units))
            numbers = generator.random(num_units)
            writer.write_step(
                StepRow(
                    step=step,
                    norms=decision.norms if hasattr(decision, "norms") else numbers,
                    gnmr=decision.gnmr,
                    delta=decision.delta,
                    risk=decision.risk,
                    active=decision.active,
                    lock=decision.lock,
                    errors=numbers if quantizer_stats else None,
                    quantizer=dict.fromkeys(("flushed_share", "saturated_share", "amax"), numbers)
                    if quantizer_stats
                    else None,
                    alpha=1.5,
                    beta=1.3,
                    loss=float(numbers[0]),
                    lr=1e-3 * float(numbers[1]),
                    grad_norm=float(numbers[2]),
                )
            )
        writer.close()
        sizes.append(record_path(folder).stat().st_size)
    grown = sizes[1] - sizes[0]
    assert record_bytes(num_units, 300, quantizer_stats=quantizer_stats) == pytest.approx(grown, rel=0.1)


@needs_peft
@pytest.mark.slow
def test_thirteen_billion_parameters_are_planned_in_little_memory():
    words = [sys.executable, "-m", "trimtab", "plan", "llama2-13b-lora", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    plan = json.loads(done.stdout)
    assert plan["num_units"] == 40
    assert plan["max_active"] == 10
    assert plan["num_parameters"] - plan["num_trainable"] == 13_015_864_320
    assert largest < 2 * 2**20  # KiB


def test_the_table_says_what_json_says(capsys, config):
    assert main(["plan", str(config), "--batch", "3", "--sequence", "17", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert main(["plan", str(config), "--batch", "3", "--sequence", "17"]) == 0
    said = capsys.readouterr().out
    assert f"{plan['num_parameters']:,}" in said
    assert "per 1,000 steps" in said


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "llama-60"}, r"model='llama-60': .*Did you mean 'llama-60m'\?"),
        ({"batch": 0}, "batch=0: it is at least 1"),
        ({"policy": "robus"}, r"policy='robus': .*Did you mean 'robust'\?"),
        ({"dtype": "bf16"}, r"dtype='bf16': it is one of 'bfloat16', 'float16', 'float32'"),
        ({"recipe": "int8-base", "lora_rank": 0}, "lora_rank=0: .*nothing would be trained"),
        ({"lora_rank": 4}, "lora_rank=4: .*adapters freeze them"),
        ({"recipe": "quantized-gemm", "low_bits": 2}, "low_bits=2: .*does not read it"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_meant_is_refused(config, given, message):
    with pytest.raises(ConfigError, match=message):
        PlanSettings(**{"model": str(config), **given})


def test_a_config_of_no_language_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ConfigError, match="transformers cannot make a causal LM of it"):
        make_plan(PlanSettings(model=str(tmp_path)))


def test_a_preset_gives_what_is_left_out_and_nothing_else():
    plain = PlanSettings(model="llama2-13b-lora")
    assert (plain.recipe_name, plain.recipe_settings["unit"], plain.adapter_rank) == ("int8-base", "layer", 16)
    other = PlanSettings(model="llama2-13b-lora", recipe="saved-activations", batch=2, accumulation=3)
    assert (other.recipe_settings["unit"], other.adapter_rank) == (None, 0)
    assert (other.num_sequences, other.num_tokens, other.num_micro_batches) == (2, 512, 3)
