"""torchao's own MXFP8 layer is the low-cost path, the plain product the recovery path, and trimtab only switches."""

import copy
import json
import pickle
import random
import sys
import types

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import trimtab
from trimtab.errors import ConfigError, MissingExtraError, TrimtabWarning
from trimtab.precision import Conversion, Recipe, find_units, measure_saved_bytes
from trimtab.precision import torchao_mxfp8 as path
from trimtab.precision.torchao_mxfp8 import TorchaoMXFP8

pytest.importorskip("torchao", reason="needs torchao: pip install 'trimtab[torchao]'")

MOVED = "torchao.prototype.moe_training.mxfp8_linear"


def in_mxfp8(layer, mode="rceil", wgrad_with_hp=False):
    """torchao's own layer, on copies of the weights."""
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    made = MXFP8Linear(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        dtype=layer.weight.dtype,
        kernel_preference=KernelPreference.EMULATED,
        scale_calculation_mode=ScaleCalculationMode(mode),
        wgrad_with_hp=wgrad_with_hp,
    )
    made.load_state_dict(layer.state_dict())
    made.weight.requires_grad_(layer.weight.requires_grad)
    return nn.Sequential(nn.Sequential(made))


def layer_of(inputs=64, outputs=32, *, bias=True, dtype=torch.float32, frozen=False):
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    layer.weight.requires_grad_(not frozen)
    return nn.Sequential(nn.Sequential(layer))


def everything(model, x, **autocast):
    """The output, and the gradients of the input and all parameters."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", **(autocast or {"enabled": False})):
        y = model(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad] + [p.grad.clone() for p in model.parameters() if p.requires_grad]


def assert_equal(a, b):
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def convert(model, recipe=None, units=None):
    return (recipe or TorchaoMXFP8()).convert(model, find_units(model, units))


@pytest.fixture
def blackwell(monkeypatch):
    """A GPU of capability 10.0 for weights on the meta device, which are taken to be made on one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))


@pytest.mark.parametrize("mode", ["rceil", "floor"])
@pytest.mark.parametrize("wgrad_with_hp", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bias", "frozen"), [(True, False), (False, False), (True, True)])
def test_the_low_cost_path_is_torchaos_layer_bit_for_bit(mode, wgrad_with_hp, dtype, bias, frozen):
    model = layer_of(bias=bias, dtype=dtype, frozen=frozen)
    x = torch.randn(2, 32, 64, dtype=dtype)
    theirs = everything(in_mxfp8(model[0][0], mode, wgrad_with_hp), x)
    plain = everything(model, x)
    convert(model, TorchaoMXFP8(scale_calculation_mode=mode, wgrad_with_hp=wgrad_with_hp))
    ours = everything(model, x)
    assert_equal(ours, theirs)
    assert not torch.equal(ours[0], plain[0])


def nasty(dtype):
    """Magnitudes over two hundred binades, blocks of zeros and powers of two, and the dtype's largest value.

    Not below 2**-110: torchao stores the scale 2**-127 where it divides by 2**-126, and so halves what comes close.
    """
    generator = torch.Generator().manual_seed(0)
    size = torch.exp2(torch.randint(-110, 100, (64, 4, 1), generator=generator).float())
    spread = torch.exp2(torch.randint(-12, 1, (64, 4, 32), generator=generator).float())
    x = ((1 + torch.rand(64, 4, 32, generator=generator)) * size * spread).flatten(1)
    x[0] = 0
    x[1] = torch.exp2(torch.arange(128.0) - 64)
    x[2] = 448.0
    x[3] = torch.arange(128) * 0.0625 + 1
    x[4, 0] = torch.finfo(dtype).max
    x[5] = torch.linspace(447, 513, 128)
    return (x * torch.randn(64, 128, generator=generator).sign()).to(dtype)


def as_torchao_cuts(x, mode):
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    made = MXTensor.to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode(mode))
    return made.dequantize(torch.float32)


@pytest.mark.parametrize("mode", ["rceil", "floor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make_x", [nasty, lambda dtype: torch.randn(64, 128).to(dtype)], ids=["nasty", "random"])
def test_what_is_observed_is_what_torchao_makes_of_the_input_bit_for_bit(mode, dtype, make_x):
    x, model = make_x(dtype), layer_of(128)
    conversion = convert(model, TorchaoMXFP8(scale_calculation_mode=mode))
    values, _ = conversion.paths[id(model[0][0])].quantizer.values(x)
    assert torch.equal(values, as_torchao_cuts(x, mode))


def test_a_block_that_torchao_makes_zero_is_told_to_be_lost():
    """With scales that are rounded up, one whose scale would be the smallest is not scaled at all."""
    x = torch.full((32, 64), 2.0**-119)
    x[:, 32:] = 2.0**-118
    assert as_torchao_cuts(x, "rceil").count_nonzero() == x.numel() / 2
    conversion = convert(model := layer_of())
    values, _ = conversion.paths[id(model[0][0])].quantizer.values(x)
    assert torch.equal(values, as_torchao_cuts(x, "rceil"))


@pytest.mark.parametrize("mode", ["rceil", "floor"])
@pytest.mark.parametrize("autocast", [{}, {"dtype": torch.bfloat16}], ids=["plain", "autocast"])
def test_both_paths_tell_what_torchao_loses_of_what_it_is_given(mode, autocast):
    model = layer_of()
    conversion = convert(model, TorchaoMXFP8(scale_calculation_mode=mode))
    conversion.observe_quantizers(shadow=True)
    x = torch.randn(2, 32, 64)  # few enough for all to be looked at
    x[..., 3] *= 3e5
    given = x.to(autocast.get("dtype", x.dtype)).flatten(0, 1)
    values = as_torchao_cuts(given, mode)
    size = given.double().norm(dim=0)
    error = ((given.double() - values.double()).norm(dim=0) / size).mean()
    flushed = ((values == 0) & (given != 0)).double().mean()
    # Scales that are rounded down clip what is beyond 448, here by more than the half of a step, which is 32 there.
    blocks = given.float().unflatten(1, (2, 32))
    scale = torch.exp2(torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True))) - 8)
    clipped = (blocks.abs() / scale > 464).double().mean() if mode == "floor" else torch.zeros(())
    assert (clipped > 0) == (mode == "floor")
    expected = torch.stack([error, flushed, clipped, given.abs().max()]).float()
    for active in (False, True):
        conversion.route([active])
        everything(model, x, **autocast)
        torch.testing.assert_close(conversion.take_quantizer_stats()[0], expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("mode", ["rceil", "floor"])
def test_observing_reads_nothing_back_to_the_host(mode):
    """On the meta device there is nothing to read."""
    conversion = convert(model := layer_of(), TorchaoMXFP8(scale_calculation_mode=mode))
    quantizer = conversion.paths[id(model[0][0])].quantizer
    assert quantizer.row(torch.empty(600, 64, dtype=torch.bfloat16, device="meta")).shape == (4,)


def test_a_nan_in_a_token_that_is_not_looked_at_is_known():
    model = layer_of()
    conversion = convert(model)
    conversion.observe_quantizers(shadow=False)
    for place in range(7):
        x = torch.randn(5024, 64)
        x[place, 0] = float("nan")
        model(x)
        assert conversion.take_quantizer_stats()[0].tolist() == [float("inf"), 1, 1, float("inf")]


@pytest.mark.parametrize("autocast", [{}, {"dtype": torch.bfloat16}], ids=["plain", "autocast"])
def test_the_recovery_path_is_the_plain_layer_bit_for_bit(autocast):
    model = layer_of()
    x = torch.randn(2, 16, 64)
    plain = everything(model, x, **autocast)
    convert(model).route([True])
    assert_equal(everything(model, x, **autocast), plain)


def test_under_autocast_it_is_torchaos_layer_in_the_dtype_of_autocast():
    """torchao's layer refuses weights of another dtype than its input, which is what autocast would give it."""
    model = layer_of()
    x = torch.randn(32, 64)
    theirs = everything(in_mxfp8(copy.deepcopy(model[0][0]).bfloat16()), x.bfloat16())
    convert(model)
    ours = everything(model, x, dtype=torch.bfloat16)
    assert [t.dtype for t in ours] == [torch.bfloat16, *[torch.float32] * 3]
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other.to(mine.dtype))


def test_an_evaluation_is_in_high_precision_and_takes_any_number_of_tokens():
    model = layer_of()
    x = torch.randn(3, 64)
    plain = model(x)
    convert(model)
    with torch.no_grad():
        assert torch.equal(model.eval()(x), plain)


def test_the_model_keeps_its_parameters_keys_and_random_numbers_and_gets_its_classes_back(tiny_llama):
    model = tiny_llama(num_layers=2)
    before = {name: id(p) for name, p in model.named_parameters()}
    keys, classes, random_state = list(model.state_dict()), [type(m) for m in model.modules()], torch.get_rng_state()
    conversion = convert(model)
    assert isinstance(conversion, Conversion)
    assert isinstance(TorchaoMXFP8(), Recipe)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert list(model.state_dict()) == keys
    assert torch.equal(torch.get_rng_state(), random_state)
    assert len(conversion.units) == 14
    conversion.undo()
    assert [type(m) for m in model.modules()] == classes
    assert not any("_trimtab_switch" in m.__dict__ for m in model.modules())


def test_operands_may_lie_in_memory_in_any_order():
    """torchao's layer wants rows; those of a transposed view are copied for it."""
    model = layer_of()
    x = torch.randn(64, 32)
    convert(model)
    expected = everything(model, x.t().contiguous())
    assert_equal(everything(model, x.t()), expected)
    layer = model[0][0]
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    assert_equal(everything(model, x.t()), expected)


def test_no_tokens_are_an_empty_output_of_the_plain_layer():
    model = layer_of()
    convert(model)
    y = model(torch.zeros(0, 64))
    y.sum().backward()
    assert y.shape == (0, 32)
    assert torch.equal(model[0][0].weight.grad, torch.zeros(32, 64))


def test_an_input_of_another_dtype_is_refused_on_both_paths_as_by_torch():
    model = layer_of()
    conversion = convert(model)
    for active in (False, True):
        conversion.route([active])
        with pytest.raises(RuntimeError, match="same dtype"):
            model(torch.randn(32, 64, dtype=torch.bfloat16))


def test_a_dtype_that_torchao_cannot_round_is_refused():
    model = layer_of(dtype=torch.float16)
    with pytest.raises(ConfigError, match=r"its weight is of torch.float16, and MXFP8 is made of bfloat16 or float32"):
        convert(model)
    assert type(model[0][0]) is nn.Linear


def test_the_products_of_a_gpu_are_of_bfloat16_alone(monkeypatch):
    monkeypatch.setattr(path, "can_multiply", lambda device, capability: True)
    model = layer_of()
    assert convert(model).products == "scaled_mm"
    with pytest.raises(ConfigError, match=r"dtype=torch.float32: MXFP8 is made of bfloat16\. Use bfloat16 weights, or"):
        model(torch.randn(32, 64))


@pytest.mark.parametrize("frozen", [False, True])
def test_costs_are_what_a_unit_is_measured_to_keep(frozen):
    model = layer_of(frozen=frozen)
    conversion = convert(model)
    x = torch.randn(32, 64, requires_grad=True)
    for active, expected in ((False, "low_saved_bytes"), (True, "high_saved_bytes")):
        conversion.route([active])
        with measure_saved_bytes(model, conversion.units) as saved:
            keep = model(x)
        del keep
        assert saved.units == getattr(conversion.costs[0], expected) * 32
    assert conversion.costs[0].high_saved_bytes == (0 if frozen else 64 * 4)
    assert conversion.costs[0].flops == 6 * 64 * 32


@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*instantiated")  # by the compiler itself
def test_a_compiled_model_is_one_graph_whatever_is_switched(tiny_llama):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = tiny_llama(num_layers=2, hidden_size=32, intermediate_size=64)
    conversion = convert(model)
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    tokens = torch.randint(0, 50, (2, 16))
    chance = random.Random(0)

    def gradients(run):
        model.zero_grad()
        run(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    seen = set()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(20):
            conversion.route([chance.random() < 0.5 for _ in conversion.units])
            eager, found = gradients(model), gradients(compiled)
            assert all(torch.equal(found[name], eager[name]) for name in eager)
            seen.add(tuple(found["model.embed_tokens.weight"].flatten().tolist()))
    assert backend.frame_count == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    assert len(seen) == 20, "each assignment is another computation"


@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*instantiated")  # by the compiler itself
def test_a_compiled_layer_sees_autocast_and_refuses_tokens_as_in_eager_mode():
    torch._dynamo.reset()
    model = layer_of()
    conversion = convert(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 16, 64)
    for active in (False, True):
        conversion.route([active])
        assert_equal(everything(compiled, x, dtype=torch.bfloat16), everything(model, x, dtype=torch.bfloat16))
    conversion.route([False])
    with pytest.raises(ConfigError, match="tokens=30"):
        compiled(x[:, :15])


def test_a_number_of_tokens_that_cannot_be_cut_is_refused_on_the_low_cost_path_alone():
    model = layer_of()
    conversion = convert(model)
    x = torch.randn(2, 5, 64)
    with pytest.raises(ConfigError, match=r"tokens=10: MXFP8 needs a multiple of 32 tokens.*Pad the batch") as caught:
        model(x)
    assert (caught.value.setting, caught.value.given) == ("tokens", 10)
    conversion.route([True])
    assert model(x).shape == (2, 5, 32)
    free = layer_of()
    convert(free, TorchaoMXFP8(wgrad_with_hp=True))
    assert_equal(everything(free, x), everything(in_mxfp8(layer_of()[0][0], wgrad_with_hp=True), x))


@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*instantiated")  # by the compiler itself
@pytest.mark.parametrize("is_compiled", [False, True])
def test_any_number_of_tokens_is_taken_where_there_is_no_backward(is_compiled):
    """As torchao's own layer does, when a model in training mode generates."""
    torch._dynamo.reset()
    model, x = layer_of(), torch.randn(2, 5, 64)
    convert(model)
    with torch.no_grad():
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if is_compiled else model
        assert torch.equal(run(x), in_mxfp8(layer_of()[0][0])(x))


@pytest.mark.parametrize(("inputs", "outputs"), [(48, 32), (32, 48)])
def test_a_layer_of_a_size_that_cannot_be_cut_is_left_plain(inputs, outputs):
    with pytest.raises(ConfigError, match=rf"{inputs} inputs and {outputs} outputs, and MXFP8 needs multiples of 32"):
        convert(layer_of(inputs, outputs))
    model = nn.Sequential(nn.Sequential(nn.Linear(inputs, outputs), nn.Linear(32, 32)))
    with pytest.warns(TrimtabWarning, match=r"leaves 0\.0 as it is"):
        conversion = TorchaoMXFP8().convert(model, find_units(model, lambda m, name: name == "0", "block"))
    assert conversion.layers == (model[0][1],)


def test_what_cannot_be_converted_is_refused_with_the_reason(tiny_gpt2):
    with pytest.raises(ConfigError, match="no layer with the transposed weight of a Conv1D"):
        convert(tiny_gpt2())
    model = layer_of()
    convert(model)
    with pytest.raises(ConfigError, match="another recipe has converted it already"):
        convert(model)
    with pytest.raises(ConfigError, match="its class MXFP8Linear computes its forward in its own way"):
        convert(in_mxfp8(layer_of()[0][0]))
    with pytest.raises(ConfigError, match="its device has no MXFP8 products, and kernel_preference='auto'"):
        convert(layer_of(), TorchaoMXFP8(kernel_preference="auto"))


def test_products_are_emulated_where_the_device_has_none(blackwell, monkeypatch):
    assert convert(layer_of()).products == "emulated"
    assert convert(layer_of().to("meta")).products == "scaled_mm"
    assert convert(layer_of().to("meta"), TorchaoMXFP8(kernel_preference="emulated")).products == "emulated"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert convert(layer_of().to("meta")).products == "emulated"


def test_settings_say_what_came_of_them():
    said = json.loads(json.dumps(convert(layer_of(), TorchaoMXFP8("block", wgrad_with_hp=True)).to_dict()))
    version = said.pop("torchao")
    assert version.startswith("0.")
    assert said == {
        "name": "torchao-mxfp8",
        "unit": "block",
        "kernel_preference": None,
        "scale_calculation_mode": "rceil",
        "wgrad_with_hp": True,
        "products": "emulated",
    }


def test_a_guard_switches_it_and_gives_the_model_back(tiny_llama):
    model = tiny_llama(num_layers=1)
    guard = trimtab.attach(model, TorchaoMXFP8("block"))
    tokens = torch.randint(0, 50, (2, 16))
    losses = []
    for names in ([], ["model.layers.0"]):
        guard.route(names)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss.item())
        guard.step()
        model.zero_grad()
    guard.detach()
    assert losses[0] != losses[1] == model(input_ids=tokens, labels=tokens).loss.item()
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"unit": "model"}, "unit='model': it is one of 'projection'"),
        ({"kernel_preference": "triton"}, "kernel_preference='triton': it is one of 'auto', 'emulated', None"),
        ({"scale_calculation_mode": "even"}, "scale_calculation_mode='even': it is one of 'rceil', 'floor'"),
        ({"wgrad_with_hp": None}, "wgrad_with_hp=None"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        TorchaoMXFP8(**settings)


@pytest.mark.parametrize("missing", ["torchao", MOVED])
def test_a_torchao_that_is_missing_or_moved_is_named_with_what_is_needed(monkeypatch, missing):
    model = layer_of()
    if missing == "torchao":
        for name in [name for name in sys.modules if name == missing or name.startswith(f"{missing}.")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(sys, "path", [])
        said = r"torchao-mxfp8 needs the package 'torchao', which is not installed.*'trimtab\[torchao\]'"
    else:
        monkeypatch.setitem(sys.modules, missing, types.ModuleType(missing))
        said = r"torchao-mxfp8 needs version 0\.18 of 'torchao', and \S+ is installed.*'trimtab\[torchao\]'"
    with pytest.raises(MissingExtraError, match=said) as caught:
        convert(model)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert type(model[0][0]) is nn.Linear


def test_a_layer_that_takes_other_settings_is_a_moved_interface(monkeypatch):
    class MXFP8Linear(nn.Linear):
        pass

    module = types.ModuleType(MOVED)
    module.MXFP8Linear = MXFP8Linear
    monkeypatch.setitem(sys.modules, MOVED, module)
    model = layer_of()
    with pytest.raises(MissingExtraError, match=r"needs version 0\.18 of 'torchao'") as caught:
        convert(model)
    assert isinstance(caught.value.__cause__, TypeError)
    assert type(model[0][0]) is nn.Linear
