"""The factory makes the recipe that the command line names, loads no other's package, and ignores no setting."""

import subprocess
import sys
from dataclasses import fields

import pytest

from trimtab.errors import ConfigError
from trimtab.experiments.recipes import ADAPTER_RECIPES, RECIPE_SETTINGS, RECIPES, UNITS, make_recipe
from trimtab.experiments.settings import TrainSettings
from trimtab.precision import Recipe

CONVERTING = [name for name in RECIPES if name != "none"]


def test_the_names_are_a_contract():
    assert set(RECIPES) == {
        "saved-activations",
        "quantized-gemm",
        "int8-base",
        "torchao-float8",
        "torchao-mxfp8",
        "torchao-int8",
        "bnb-8bit",
        "bnb-4bit",
        "none",
    }
    assert set(ADAPTER_RECIPES) == {"int8-base", "torchao-int8", "bnb-8bit", "bnb-4bit"}


@pytest.mark.parametrize("name", CONVERTING)
def test_a_recipe_bears_the_name_that_it_was_asked_for_by(name):
    recipe = make_recipe(name)
    assert isinstance(recipe, Recipe)
    assert recipe.name == recipe.to_dict()["name"] == name


@pytest.mark.parametrize("name", CONVERTING)
@pytest.mark.parametrize("unit", UNITS)
def test_every_recipe_is_told_how_much_is_one_unit(name, unit):
    assert make_recipe(name, unit=unit).unit == unit


def test_to_only_watch_there_is_no_recipe():
    assert make_recipe("none") is None


def test_the_formats_and_widths_arrive():
    gemm = make_recipe("quantized-gemm", low_format="e2m1", high_format="bf16")
    assert (gemm.low, gemm.high) == ("e2m1", "bf16")
    saved = make_recipe("saved-activations", low_bits=2, high_bits=16, rounding="stochastic")
    assert (saved.low_bits, saved.high_bits, saved.rounding) == (2, 16, "stochastic")


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("low_bits", 2),
        ("high_bits", 16),
        ("rounding", "stochastic"),
        ("low_format", "e2m1"),
        ("high_format", "bf16"),
        ("unit", "block"),
    ],
)
def test_a_setting_is_read_or_refused_and_never_ignored(name, setting, value):
    if setting in RECIPES[name].reads:
        assert make_recipe(name, **{setting: value}).to_dict() != make_recipe(name).to_dict()
    else:
        with pytest.raises(ConfigError, match=rf"{setting}='?{value}'?: the recipe '{name}' does not read it\. Leave"):
            make_recipe(name, **{setting: value})


def test_a_name_that_is_almost_one_is_answered_with_it():
    with pytest.raises(ConfigError, match=r"recipe='int8base': it is one of .*Did you mean 'int8-base'\?"):
        make_recipe("int8base")


def test_the_command_line_leaves_out_what_the_factory_leaves_out():
    defaults = {field.name: field.default for field in fields(TrainSettings)}
    assert {setting: defaults[setting] for setting in RECIPE_SETTINGS} == RECIPE_SETTINGS


def test_the_table_loads_no_torch_and_a_recipe_no_library_of_another():
    code = (
        "import sys\nfrom trimtab.experiments.recipes import make_recipe\n"
        "print('torch' in sys.modules)\nmake_recipe('quantized-gemm')\n"
        "print([m for m in ('torchao', 'bitsandbytes', 'peft') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "[]"]
