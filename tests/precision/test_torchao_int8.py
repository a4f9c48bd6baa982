"""torchao's int8 weight-only layer as the low-cost path; what it shares with others is tested in test_int8_base.py."""

import copy
import importlib
import sys

import pytest
import torch
from torch import nn

import trimtab
from trimtab.errors import ConfigError, MissingExtraError
from trimtab.precision import find_units
from trimtab.precision.torchao_int8 import TorchaoInt8Base

pytest.importorskip("torchao", reason="needs torchao: pip install 'trimtab[torchao]'")
pytestmark = [
    # transformers, about a name of its own that peft still uses
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    # torch's compiler, which peft imports, about its own modules
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    # torchao, about a string of its own
    pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning"),
]


def frozen(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32)).to(dtype).requires_grad_(False)


def convert(model, **settings):
    return TorchaoInt8Base(**settings).convert(model, find_units(model))


def quantized_by_torchao(model):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig(set_inductor_config=False))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_low_cost_path_is_torchaos_own_layer(dtype):
    model = frozen(dtype)
    bias, model[0].bias = model[0].bias, None
    theirs = quantized_by_torchao(copy.deepcopy(model))
    assert type(theirs[0].weight).__name__ == "Int8Tensor"
    convert(model)
    x = torch.randn(2, 7, 64, dtype=dtype, requires_grad=True)
    same = x.detach().clone().requires_grad_()
    y, expected = model(x), theirs(same)
    assert torch.equal(y, expected)
    grad = torch.randn_like(y)
    y.backward(grad)
    expected.backward(grad)
    dense = theirs[0].weight.dequantize()
    assert torch.equal(x.grad, (grad.reshape(-1, 32) @ dense).reshape(x.shape))
    # theirs scales the gradient and not the weight: each a rounding of every factor, besides those of 32 sums
    bound = 36 * torch.finfo(dtype).eps * (grad.abs() @ dense.abs())
    assert ((x.grad - same.grad).abs() <= bound).all()
    model[0].bias = bias
    assert torch.equal(model(x), y + bias)


def test_the_compilers_settings_and_random_numbers_are_left_alone():
    import torch._inductor.config as inductor

    model = frozen()
    random_state = torch.get_rng_state()
    # torchao itself would turn it on, and somebody may have had it done already
    with inductor.patch(coordinate_descent_tuning=False):
        before = inductor.get_config_copy()
        convert(model)
        model(torch.ones(3, 64, requires_grad=True)).sum().backward()
        assert inductor.get_config_copy() == before
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_weight_that_torchao_has_quantized_already_is_refused_with_the_remedy():
    model = quantized_by_torchao(frozen())
    with pytest.raises(ConfigError, match=r"torchao has quantized its weight already.* Load the model in bf16"):
        convert(model)


# peft, about merging adapters
@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without:UserWarning")
def test_a_base_that_torchao_quantized_before_peft_came_is_refused_with_the_remedy(tiny_llama):
    pytest.importorskip("peft", reason="needs peft: pip install 'trimtab[lora]'")
    from trimtab.experiments.lora import add_lora

    model = tiny_llama(num_layers=1)
    quantized_by_torchao(model.model)
    model = add_lora(model)
    with pytest.raises(ConfigError, match=r"torchao has quantized its weight already.* Load the model in bf16"):
        convert(model)


@pytest.mark.filterwarnings("ignore:.* as it is:trimtab.TrimtabWarning")
def test_a_weight_in_float64_is_left_out_beside_others():
    model = nn.Sequential(*frozen(), *frozen(torch.float64))
    assert [unit.name for unit in convert(model).units] == ["0"]
    with pytest.raises(ConfigError, match=r"1.*of torch.float64, which torchao does not quantize"):
        convert(model[1:])


def test_a_missing_torchao_is_named_with_the_extra_that_brings_it(monkeypatch):
    for name in [n for n in sys.modules if n.partition(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    with pytest.raises(MissingExtraError, match=r"needs the package 'torchao'.* pip install 'trimtab\[torchao\]'"):
        convert(frozen())


def test_another_interface_is_refused_naming_the_versions_before_the_model_is_touched(monkeypatch):
    quantization = importlib.import_module("torchao.quantization")
    monkeypatch.delattr(quantization, "Int8WeightOnlyConfig")
    model = frozen()
    with pytest.raises(MissingExtraError, match=r"torchao-int8 needs version .* of 'torchao', and .* is installed"):
        convert(model)
    assert type(model[0]) is nn.Linear
    assert "_trimtab_switch" not in model[0].__dict__


def test_a_unit_is_one_of_four_sizes():
    with pytest.raises(
        ConfigError, match="unit='model': it is one of 'projection', 'expert', 'half', 'block', 'layer'"
    ):
        TorchaoInt8Base(unit="model")


def test_observing_is_refused_since_only_weights_are_quantized():
    with pytest.raises(ConfigError, match=r"recipe='torchao-int8': .* quantizes weights only"):
        trimtab.attach(frozen(), TorchaoInt8Base(), units=["0"], quantizer_stats=True)
