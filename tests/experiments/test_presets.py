"""The presets are data that a run can be made from, and are of the sizes that they are called by."""

import subprocess
import sys

import pytest
import torch

from trimtab.control import PRESETS, Policy
from trimtab.errors import ConfigError
from trimtab.experiments.presets import RUN_PRESETS, run_preset
from trimtab.experiments.recipes import RECIPES, make_recipe
from trimtab.experiments.shape_run import make_shapes

pytest.importorskip("transformers", reason="needs transformers: pip install 'trimtab[hf]'")

# As the names say; moe-3.7b counts every expert.
SIZES = {
    "llama-60m": 60e6,
    "llama-130m": 130e6,
    "llama-350m": 350e6,
    "llama-1.3b": 1.3e9,
    "llama-3b": 3e9,
    "llama2-13b-lora": 13e9,
    "moe-3.7b": 3.7e9,
}


def num_parameters(config) -> int:
    """By hand: embeddings and head, and in each layer four projections, the experts or the MLP, and the norms."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    mlp, norms = 3 * hidden * config["intermediate_size"], 2 * hidden
    if "num_experts" in config:
        mlp = config["num_experts"] * (3 * hidden * config["moe_intermediate_size"] + hidden)
        norms += 2 * config["head_dim"]
    return 2 * config["vocab_size"] * hidden + hidden + layers * (4 * hidden**2 + mlp + norms)


def test_the_names_are_a_contract():
    assert set(RUN_PRESETS) == set(SIZES)
    assert all(run_preset(name).name == name for name in RUN_PRESETS)


@pytest.mark.parametrize("name", SIZES)
def test_a_preset_has_the_parameters_of_its_name_and_takes_no_memory_for_them(name):
    model = make_shapes(run_preset(name).config, torch.bfloat16)
    assert all(p.device.type == "meta" for p in model.parameters())
    found = sum(p.numel() for p in model.parameters())
    assert found == num_parameters(run_preset(name).config)
    # The name that is furthest off is 3b, of GaLore's config; the next is llama-350m.
    assert found == pytest.approx(SIZES[name], rel=0.11)


@pytest.mark.parametrize("preset", RUN_PRESETS.values(), ids=str)
def test_recipe_policy_and_lengths_can_be_made(preset):
    assert preset.recipe in RECIPES
    assert preset.policy in PRESETS
    recipe = make_recipe(preset.recipe, **preset.recipe_settings)
    assert recipe.name == preset.recipe
    assert bool(preset.lora_rank) == RECIPES[preset.recipe].needs_adapters
    assert isinstance(preset.make_policy(), Policy)
    assert preset.accumulation(2) * 2 * preset.batch == preset.total_batch
    assert 0 <= preset.warmup_steps < preset.steps


def test_the_published_budgets_are_the_papers():
    assert run_preset("llama-60m").make_policy().max_active == 4
    assert run_preset("llama2-13b-lora").make_policy().max_active == 10
    assert run_preset("llama2-13b-lora").config["num_hidden_layers"] == 40
    assert run_preset("moe-3.7b").high_fidelity_steps == 2500


def test_devices_that_do_not_share_a_step_evenly_are_refused():
    with pytest.raises(ConfigError, match=r"num_devices=3: 512 sequences a step .* Use a divisor of 2\."):
        run_preset("llama-60m").accumulation(3)


def test_a_name_that_is_almost_one_is_answered_with_it():
    with pytest.raises(ConfigError, match=r"preset='llama-60': it is one of .*Did you mean 'llama-60m'\?"):
        run_preset("llama-60")


def test_the_presets_and_the_settings_load_no_torch():
    code = "import sys, trimtab.experiments.presets, trimtab.experiments.plan_settings; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
