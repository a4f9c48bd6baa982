"""torchao's own float8 layer is the low-cost path, the plain product the recovery path, and trimtab only switches."""

import copy
import dataclasses
import importlib.metadata
import json
import pickle
import random
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import trimtab
from trimtab.control import Policy
from trimtab.errors import ConfigError, MissingExtraError, TrimtabWarning
from trimtab.precision import Conversion, Recipe, find_units, measure_saved_bytes
from trimtab.precision import torchao_float8 as path
from trimtab.precision.torchao_float8 import TorchaoFloat8

pytest.importorskip("torchao", reason="needs torchao: pip install 'trimtab[torchao]'")

NAMES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def config_of(name, **settings):
    from torchao.float8 import Float8LinearConfig

    return dataclasses.replace(Float8LinearConfig.from_recipe_name(name), **settings)


def in_float8(model, config):
    """A copy of the model with torchao's layers, as torchao makes them."""
    from torchao.float8 import convert_to_float8_training

    return convert_to_float8_training(copy.deepcopy(model), config=config)


def layer_of(inputs=32, outputs=16, *, bias=True, dtype=torch.float32, frozen=False):
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
    return (recipe or TorchaoFloat8()).convert(model, find_units(model, units))


@pytest.fixture
def hopper(monkeypatch):
    """A GPU of capability 9.0 for weights on the meta device, which are taken to be made on one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bias", "frozen"), [(True, False), (False, False), (True, True)])
def test_the_low_cost_path_is_torchaos_layer_bit_for_bit(name, dtype, bias, frozen):
    model = layer_of(bias=bias, dtype=dtype, frozen=frozen)
    x = torch.randn(3, 5, 32, dtype=dtype)
    theirs = everything(in_float8(model, config_of(name, emulate=True)), x)
    plain = everything(model, x)
    convert(model, TorchaoFloat8(name))
    ours = everything(model, x)
    assert_equal(ours, theirs)
    assert not torch.equal(ours[0], plain[0])


@pytest.mark.parametrize("autocast", [{}, {"dtype": torch.bfloat16}], ids=["plain", "autocast"])
def test_the_recovery_path_is_the_plain_layer_bit_for_bit(autocast):
    model = layer_of()
    x = torch.randn(3, 5, 32)
    plain = everything(model, x, **autocast)
    convert(model).route([True])
    assert_equal(everything(model, x, **autocast), plain)


@pytest.mark.parametrize("users", [False, True], ids=["converted-here", "converted-by-the-user"])
def test_under_autocast_no_path_shows_in_a_dtype(users):
    """torchao asks for CUDA's autocast alone; what it then does on a CPU is given the input that it casts there."""
    model = layer_of()
    x = torch.randn(4, 32)
    theirs = everything(in_float8(model, config_of("tensorwise", emulate=True)), x.bfloat16())
    plain = everything(model, x, dtype=torch.bfloat16)
    if users:
        model = in_float8(model, config_of("tensorwise", emulate=True))
    conversion = convert(model)
    low = everything(model, x, dtype=torch.bfloat16)
    conversion.route([True])
    high = everything(model, x, dtype=torch.bfloat16)
    assert [t.dtype for t in low] == [t.dtype for t in high] == [torch.bfloat16, *[torch.float32] * 3]
    assert_equal(high, plain)
    assert torch.equal(low[0], theirs[0])
    assert_equal(low[2:], theirs[2:])


def test_layers_that_the_user_has_converted_are_switched_and_given_back_as_they_were():
    from torchao.float8.float8_linear import Float8Linear

    plain = layer_of()
    model = in_float8(plain, config_of("rowwise", emulate=True))
    x = torch.randn(8, 32)
    expected_low, expected_high = everything(model, x), everything(plain, x)
    state, layer = dict(model[0][0].__dict__), model[0][0]
    conversion = convert(model)
    assert_equal(everything(model, x), expected_low)
    conversion.route([True])
    assert_equal(everything(model, x), expected_high)
    with torch.no_grad():
        assert torch.equal(model.eval()(x), expected_low[0]), "an evaluation runs what the user has made of the layer"
    conversion.undo()
    model.train()
    assert type(layer) is Float8Linear
    assert layer.__dict__ == state
    assert_equal(everything(model, x), expected_low)


def nasty(dtype, tokens=48, channels=64):
    """Magnitudes over sixty binades, zeros, a token of nothing else, ties of E4M3, and the dtype's largest value."""
    generator = torch.Generator().manual_seed(0)
    size = torch.exp2(torch.randint(-30, 14, (tokens, channels), generator=generator).float())
    x = torch.randn(tokens, channels, generator=generator) * size
    x[0] = 0
    x[1] = torch.arange(channels) * 0.0625 + 1
    x[2] = 1e-14
    x[3, ::2] = 0
    x[4, 0] = torch.finfo(dtype).max
    return x.to(dtype)


def as_torchao_casts(x, config):
    """What torchao makes of the input of the forward product; its codes and scale, multiplied in float32."""
    from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic

    cast = config.cast_config_input
    made = hp_tensor_to_float8_dynamic(
        x,
        cast.target_dtype,
        None,
        scaling_granularity=cast.scaling_granularity,
        axiswise_dim=get_maybe_axiswise_dim(-1, cast.scaling_granularity),
        round_scales_to_power_of_2=config.round_scales_to_power_of_2,
    )
    return made._data.float() / made._scale


def in_e5m2():
    from torchao.float8 import CastConfig

    e5m2 = CastConfig(target_dtype=torch.float8_e5m2)
    return config_of("tensorwise", cast_config_input=e5m2, cast_config_input_for_grad_weight=e5m2)


def without_its_input_cast():
    """A configuration that multiplies forward in high precision, and backward in float8."""
    from torchao.float8 import CastConfig, Float8LinearConfig
    from torchao.float8.config import ScalingType

    off = CastConfig(scaling_type=ScalingType.DISABLED)
    return Float8LinearConfig(
        cast_config_input=off,
        cast_config_weight=off,
        cast_config_weight_for_grad_input=CastConfig(),
        cast_config_grad_output=CastConfig(),
        cast_config_grad_output_for_grad_weight=CastConfig(scaling_type=ScalingType.DISABLED),
        emulate=True,
    )


def observed_configs():
    yield from map(config_of, NAMES)
    yield config_of("tensorwise", round_scales_to_power_of_2=True)
    yield config_of("rowwise", round_scales_to_power_of_2=False)
    yield in_e5m2()


@pytest.mark.parametrize("make_x", [nasty, lambda dtype: torch.randn(48, 64).to(dtype)], ids=["nasty", "random"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_observed_is_what_torchao_makes_of_the_input_bit_for_bit(dtype, make_x):
    x = make_x(dtype)
    for config in observed_configs():
        model = layer_of(64)
        quantizer = convert(model, TorchaoFloat8(config)).paths[id(model[0][0])].quantizer
        whole = x.abs().amax().float() if config.cast_config_input.scaling_granularity.value == "tensorwise" else None
        expected = as_torchao_casts(x, config)
        for step in (1, 5):
            values, saturated_share = quantizer.values(x[::step], whole)
            assert torch.equal(values, expected[::step])
            assert saturated_share == 0


def test_observing_reads_nothing_back_to_the_host():
    """On the meta device there is nothing to read."""
    for config in observed_configs():
        quantizer = convert(model := layer_of(64), TorchaoFloat8(config)).paths[id(model[0][0])].quantizer
        assert quantizer.row(torch.empty(600, 64, dtype=torch.bfloat16, device="meta")).shape == (4,)


def row_of(x, values):
    """The statistics by their definition, of numbers that are in the unit's hands."""
    x, values = x.double(), values.double()
    size = x.norm(dim=0)
    errors = ((x - values).norm(dim=0) / size)[size > 0]
    flushed = ((values == 0) & (x != 0)).sum() / (x != 0).sum()
    return torch.stack([errors.mean(), flushed, torch.zeros(()), x.abs().max()]).float()


@pytest.mark.parametrize("users", [False, True], ids=["converted-here", "converted-by-the-user"])
@pytest.mark.parametrize("autocast", [{}, {"dtype": torch.bfloat16}], ids=["plain", "autocast"])
@pytest.mark.parametrize("name", NAMES)
def test_both_paths_tell_what_torchao_loses_of_what_it_is_given(name, autocast, users):
    model, config = layer_of(), config_of(name, emulate=True)
    model = in_float8(model, config) if users else model
    conversion = convert(model, None if users else TorchaoFloat8(config))
    conversion.observe_quantizers(shadow=True)
    x = torch.randn(5, 12, 32)  # few enough for all to be looked at
    x[..., 3] *= 3e5
    given = x.to(autocast.get("dtype", x.dtype)).flatten(0, 1)
    expected = row_of(given, as_torchao_casts(given, config))
    for active in (False, True):
        conversion.route([active])
        everything(model, x, **autocast)
        torch.testing.assert_close(conversion.take_quantizer_stats()[0], expected, rtol=1e-5, atol=0)
    conversion.observe_quantizers(shadow=False)
    everything(model, x, **autocast)
    assert conversion.take_quantizer_stats() is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", range(7))
def test_no_token_that_is_not_looked_at_hides_the_largest_value_or_a_nan(name, place):
    model = layer_of()
    conversion = convert(model, TorchaoFloat8(name))
    conversion.observe_quantizers(shadow=False)
    x = torch.randn(5000, 32)
    x[place, 0] = 1e6
    model(x)
    row = conversion.take_quantizer_stats()[0]
    assert row[3] == 1e6
    # With one scale for all of them, every token suffers from the largest.
    assert (row[0] > 0.3) == (name == "tensorwise")
    x[place, 0] = float("nan")
    model(x)
    assert conversion.take_quantizer_stats()[0].tolist() == [float("inf"), 1, 1, float("inf")]


@pytest.mark.parametrize("active", [False, True])
def test_a_forward_that_is_recomputed_is_not_observed_twice(active):
    model = layer_of().append(nn.Tanh())
    conversion = convert(model)
    conversion.observe_quantizers(shadow=True)
    conversion.route([active])
    y = checkpoint(model, torch.randn(16, 32, requires_grad=True), use_reentrant=False)
    assert conversion.take_quantizer_stats() is not None
    y.sum().backward()
    assert conversion.take_quantizer_stats() is None


def test_a_layer_whose_input_is_not_cast_is_not_observed():
    plain = nn.Sequential(nn.Sequential(nn.Linear(32, 32)), nn.Sequential(nn.Linear(32, 16)))
    model = copy.deepcopy(plain)
    model[0] = in_float8(plain[0], without_its_input_cast())
    conversion = convert(model)
    conversion.observe_quantizers(shadow=True)
    everything(model, torch.randn(16, 32))
    rows = conversion.take_quantizer_stats()
    assert rows[0].isnan().all()
    assert not rows[1].isnan().any()


def test_where_no_input_is_cast_observing_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match="as it is configured, this one quantizes no layer's input"):
        trimtab.attach(layer_of(), TorchaoFloat8(without_its_input_cast()), quantizer_stats=True)


class Outlying(nn.Module):
    """Two layers; the second is given outlier channels as large as ``factor``."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.ModuleDict({"proj": nn.Linear(32, 32)}) for _ in range(2))
        self.factor = 1.0

    def forward(self, x):
        h = torch.tanh(self.blocks[0]["proj"](x))
        return self.blocks[1]["proj"](torch.cat([h[..., :2] * self.factor, h[..., 2:]], -1))


@pytest.mark.parametrize("users", [False, True], ids=["converted-here", "converted-by-the-user"])
def test_a_policy_with_an_error_limit_keeps_a_unit_on_the_recovery_path_while_its_input_has_outlier_channels(users):
    # Thresholds that no norm comes near, so that errors alone decide; no lock, so that each step decides anew.
    policy = Policy(alpha=1e12, beta=1e12, error_limit=0.3, max_active=1, lock_steps=0)
    model = Outlying()
    model = in_float8(model, config_of("tensorwise", emulate=True)) if users else model
    x = torch.randn(16, 32)
    routed, errors = [], []
    with trimtab.attach(model, TorchaoFloat8(), policy=policy) as guard:
        for step in range(9):
            model.factor = 1e6 if 3 <= step < 6 else 1.0
            model.zero_grad()
            model(x).mean().backward()
            guard.step()
            routed.append(guard.active)
            errors.append(guard.metrics()["trimtab/quantizer/error_max"])
    assert routed == [()] * 3 + [("blocks.1.proj",)] * 3 + [()] * 3
    assert [error > 0.3 for error in errors] == [False] * 3 + [True] * 3 + [False] * 3
    assert errors[3] == errors[4] == errors[5], "a unit on the recovery path is judged by its low-cost path"


def test_an_evaluation_of_plain_layers_is_in_high_precision():
    model = layer_of()
    x = torch.randn(8, 32)
    plain = model(x)
    convert(model)
    with torch.no_grad():
        assert torch.equal(model.eval()(x), plain)
    assert not torch.equal(model.train()(x), plain)


def test_the_model_keeps_its_parameters_keys_and_random_numbers_and_gets_its_classes_back(tiny_llama):
    model = tiny_llama(num_layers=2)
    before = {name: id(p) for name, p in model.named_parameters()}
    keys, classes, random_state = list(model.state_dict()), [type(m) for m in model.modules()], torch.get_rng_state()
    conversion = convert(model)
    assert isinstance(conversion, Conversion)
    assert isinstance(TorchaoFloat8(), Recipe)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert list(model.state_dict()) == keys
    assert torch.equal(torch.get_rng_state(), random_state)
    assert len(conversion.units) == 14
    conversion.undo()
    assert [type(m) for m in model.modules()] == classes
    assert not any("_trimtab_switch" in m.__dict__ for m in model.modules())


def test_a_copy_of_the_model_is_plain(tiny_llama):
    model = layer_of()
    convert(model)
    x = torch.randn(4, 32)
    assert torch.equal(copy.deepcopy(model)(x), layer_of()(x))


def test_weights_that_replace_the_first_are_the_ones_that_are_multiplied():
    """FSDP and functional calls put other tensors in the place of the parameters, even outside of them."""
    model, x = layer_of(), torch.randn(4, 32)
    convert(model)
    other = nn.Linear(32, 16)
    expected = in_float8(nn.Sequential(other), config_of("tensorwise", emulate=True))(x)
    swapped = {f"0.0.{name}": tensor for name, tensor in other.named_parameters()}
    assert torch.equal(torch.func.functional_call(model, swapped, (x,)), expected)
    layer = model[0][0]
    for name, parameter in other.named_parameters():
        del layer._parameters[name]
        layer.__dict__[name] = parameter.detach()
    assert torch.equal(model(x), expected)


def test_no_tokens_are_an_empty_output_of_the_plain_layer():
    model = layer_of()
    convert(model)
    y = model(torch.zeros(0, 32))
    y.sum().backward()
    assert y.shape == (0, 16)
    assert torch.equal(model[0][0].weight.grad, torch.zeros(16, 32))


def test_an_input_of_another_dtype_is_refused_on_both_paths_as_by_torch():
    model = layer_of()
    conversion = convert(model)
    for active in (False, True):
        conversion.route([active])
        with pytest.raises(RuntimeError, match="same dtype"):
            model(torch.randn(4, 32, dtype=torch.bfloat16))


@pytest.mark.parametrize("frozen", [False, True])
def test_costs_are_what_a_unit_is_measured_to_keep(frozen):
    model = layer_of(64, 32, frozen=frozen)
    conversion = convert(model)
    x = torch.randn(16, 64, requires_grad=True)
    for active, expected in ((False, "low_saved_bytes"), (True, "high_saved_bytes")):
        conversion.route([active])
        with measure_saved_bytes(model, conversion.units) as saved:
            keep = model(x)
        del keep
        assert saved.units == getattr(conversion.costs[0], expected) * 16
    assert conversion.costs[0].high_saved_bytes == (0 if frozen else 64 * 4)
    assert conversion.costs[0].flops == 6 * 64 * 32


def assignments(count, units, seed=0):
    chance = random.Random(seed)
    return [[chance.random() < 0.5 for _ in range(units)] for _ in range(count)]


@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*instantiated")  # by the compiler itself
@pytest.mark.parametrize("users", [False, True], ids=["converted-here", "converted-by-the-user"])
@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_model_is_one_graph_whatever_is_switched(tiny_llama, users, name):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = tiny_llama(num_layers=2, hidden_size=32, intermediate_size=64)
    if users:
        model.model = in_float8(model.model, config_of(name, emulate=True))
    conversion = convert(model, TorchaoFloat8(name))
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    tokens = torch.randint(0, 50, (2, 16))

    def gradients(run):
        model.zero_grad()
        run(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    seen = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for active in assignments(20, len(conversion.units)):
            conversion.route(active)
            eager, found = gradients(model), gradients(compiled)
            assert all(torch.equal(found[name], eager[name]) for name in eager)
            seen.append(found["model.embed_tokens.weight"])
    assert backend.frame_count == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    assert len({tuple(g.flatten().tolist()) for g in seen}) == len(seen), "each assignment is another computation"


@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*instantiated")  # by the compiler itself
@pytest.mark.parametrize("frozen", [False, True])
def test_a_compiled_layer_sees_autocast_as_in_eager_mode(frozen):
    torch._dynamo.reset()
    model = layer_of(frozen=frozen)
    conversion = convert(model, TorchaoFloat8("rowwise"))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 8, 32)
    for active in (False, True):
        conversion.route([active])
        assert_equal(everything(compiled, x, dtype=torch.bfloat16), everything(model, x, dtype=torch.bfloat16))


def test_a_guard_switches_it_and_gives_the_model_back(tiny_llama):
    model = tiny_llama(num_layers=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = trimtab.attach(model, TorchaoFloat8("rowwise"))
    tokens = torch.randint(0, 50, (2, 16))
    for names in ([], ["model.layers.0.mlp.up_proj"]):
        guard.route(names)
        model(input_ids=tokens, labels=tokens).loss.backward()
        guard.step()
        optimizer.step()
        optimizer.zero_grad()
    guard.detach()
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear


def test_settings_say_what_came_of_them():
    conversion = convert(layer_of(), TorchaoFloat8("rowwise_with_gw_hp"))
    said = json.loads(json.dumps(conversion.to_dict()))
    assert conversion.products == said["products"] == "emulated"
    assert said["name"] == TorchaoFloat8.name == "torchao-float8"
    assert said["torchao"] == importlib.metadata.version("torchao")
    [config] = said["configs"]
    assert config["emulate"] is True
    assert config["cast_config_input"]["target_dtype"] == "float8_e4m3fn"
    assert config["cast_config_input_for_grad_weight"]["scaling_type"] == "disabled"
    given = config_of("tensorwise", pad_inner_dim=True)
    assert json.loads(json.dumps(TorchaoFloat8(given).to_dict()))["config"]["pad_inner_dim"] is True


def test_products_are_not_emulated_where_that_is_asked_for_and_the_device_has_them():
    conversion = convert(layer_of(), TorchaoFloat8(emulate=False))
    assert conversion.products == "scaled_mm"
    model = nn.Sequential(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16)))
    model[0][1] = in_float8(layer_of(), config_of("tensorwise"))[0][0]
    conversion = convert(model)
    assert conversion.products == "mixed"
    assert [c["emulate"] for c in conversion.to_dict()["configs"]] == [True, False]


def test_products_follow_the_weights_to_a_gpu(hopper):
    model = layer_of()
    conversion = convert(model)
    assert conversion.products == "emulated"
    model.to("meta")
    assert conversion.products == "scaled_mm"
    assert convert(layer_of().to("meta"), TorchaoFloat8(config_of("tensorwise", emulate=True))).products == "emulated"


def test_a_gpu_that_has_no_float8_products_emulates_them_or_says_so(hopper, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert convert(layer_of().to("meta")).products == "emulated"
    with pytest.raises(ConfigError, match="its GPU has no float8 products, and emulate=False"):
        convert(layer_of().to("meta"), TorchaoFloat8(emulate=False))


@pytest.mark.parametrize(("inputs", "outputs"), [(24, 16), (16, 24)])
@pytest.mark.parametrize("settings", [{}, {"pad_inner_dim": True}])
def test_a_layer_of_a_size_that_a_gpu_cannot_multiply_is_left_plain(hopper, inputs, outputs, settings):
    config = config_of("tensorwise", **settings)
    with pytest.raises(ConfigError, match=rf"{inputs} inputs and {outputs} outputs.*multiples of 16"):
        convert(layer_of(inputs, outputs).to("meta"), TorchaoFloat8(config))
    model = nn.Sequential(nn.Sequential(nn.Linear(inputs, outputs), nn.Linear(16, 16))).to("meta")
    with pytest.warns(TrimtabWarning, match=r"leaves 0.0 as it is"):
        conversion = TorchaoFloat8(config).convert(model, find_units(model, lambda m, name: name == "0", "block"))
    assert conversion.layers == (model[0][1],)
    assert convert(layer_of(inputs, outputs)).products == "emulated", "emulation takes any size"


@pytest.mark.parametrize(
    ("name", "settings", "is_refused"),
    [
        ("tensorwise", {}, True),
        ("rowwise", {}, True),
        ("rowwise_with_gw_hp", {}, False),
        ("tensorwise", {"pad_inner_dim": True}, False),
        ("tensorwise", {"emulate": True}, False),
    ],
)
def test_a_number_of_tokens_that_a_gpu_cannot_multiply_is_refused_before_torchao_is_asked(
    hopper, name, settings, is_refused
):
    model = layer_of().to("meta")
    conversion = convert(model, TorchaoFloat8(config_of(name, **settings)))
    assert conversion.forward_of(model[0][0], torch.Size((2, 16, 32)), active=False)
    assert conversion.forward_of(model[0][0], torch.Size((3, 5, 32)), active=True) is None
    if not is_refused:
        assert conversion.forward_of(model[0][0], torch.Size((3, 5, 32)), active=False)
        return
    with pytest.raises(ConfigError, match="tokens=15: a GPU's float8 products need a multiple of 16 tokens") as caught:
        conversion.forward_of(model[0][0], torch.Size((3, 5, 32)), active=False)
    assert (caught.value.setting, caught.value.given) == ("tokens", 15)


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("tensorwise", {}, (True, True, True)),
        ("tensorwise", {"pad_inner_dim": True}, (True, True, False)),
        ("rowwise_with_gw_hp", {}, (True, True, False)),
    ],
)
def test_what_must_be_a_multiple_of_16_is_what_the_three_products_of_torch_refuse(name, settings, expected):
    from torch._subclasses.fake_tensor import FakeTensorMode

    config = config_of(name, **settings)
    assert path._must_be_multiples_of_16(config) == expected

    def runs(tokens, inputs, outputs):
        pad = 16 if config.pad_inner_dim else 1
        shapes = [(tokens, inputs, outputs), (tokens, outputs, inputs), (outputs, tokens, inputs)]
        if name == "rowwise_with_gw_hp":
            shapes.pop()
        for m, k, n in shapes:
            k = -(-k // pad) * pad
            a = torch.empty(m, k, device="cuda", dtype=torch.float8_e4m3fn)
            b = torch.empty(n, k, device="cuda", dtype=torch.float8_e4m3fn).t()
            one = torch.ones((), device="cuda")
            try:
                torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16)
            except RuntimeError:
                return False
        return True

    with FakeTensorMode(allow_non_fake_inputs=True):
        assert runs(16, 16, 16)
        found = tuple(not runs(*sizes) for sizes in ((16, 24, 16), (16, 16, 24), (24, 16, 16)))
    assert found == expected


def test_what_cannot_be_converted_is_refused_with_the_reason(tiny_gpt2):
    with pytest.raises(ConfigError, match="no layer with the transposed weight of a Conv1D"):
        convert(tiny_gpt2())
    model = layer_of()
    convert(model)
    for recipe in (TorchaoFloat8(), TorchaoFloat8("rowwise")):
        with pytest.raises(ConfigError, match="another recipe has converted it already"):
            convert(model, recipe)
    users = in_float8(layer_of(), config_of("tensorwise", emulate=True))
    convert(users)
    with pytest.raises(ConfigError, match="another recipe has converted it already"):
        convert(users)

    class Own(nn.Linear):
        def forward(self, input):
            return super().forward(input) * 2

    with pytest.raises(ConfigError, match="its class Own computes its forward in its own way"):
        convert(nn.Sequential(nn.Sequential(Own(32, 16))))


def test_a_weight_of_a_class_with_products_of_its_own_is_refused():
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    model = layer_of()
    config = in_float8(model, config_of("tensorwise"))[0][0].linear_mm_config
    wrapped = WeightWithDynamicFloat8CastTensor(model[0][0].weight.detach(), config, torch.float8_e4m3fn)
    model[0][0].weight = nn.Parameter(wrapped)
    with pytest.raises(ConfigError, match="its weight is a WeightWithDynamicFloat8CastTensor, which multiplies in"):
        convert(model)


def test_weights_that_are_gathered_in_float8_are_refused():
    config = config_of("tensorwise", enable_fsdp_float8_all_gather=True)
    with pytest.raises(ConfigError, match="enable_fsdp_float8_all_gather=True: weights that arrive in float8"):
        TorchaoFloat8(config)
    with pytest.raises(ConfigError, match="enable_fsdp_float8_all_gather has its weight arrive in float8"):
        convert(in_float8(layer_of(), config))


def test_a_setting_that_the_users_layers_do_not_have_is_refused():
    model = in_float8(layer_of(), config_of("rowwise", emulate=True))
    with pytest.raises(ConfigError, match=r"config='tensorwise': 0.0 is a Float8Linear of another configuration"):
        convert(model, TorchaoFloat8("tensorwise"))
    with pytest.raises(ConfigError, match=r"config=Float8LinearConfig: 0.0 is a Float8Linear of another"):
        convert(model, TorchaoFloat8(config_of("tensorwise")))
    with pytest.raises(ConfigError, match=r"emulate=False: 0.0 is a Float8Linear that has it otherwise"):
        convert(model, TorchaoFloat8(emulate=False))
    assert convert(model, TorchaoFloat8("rowwise")).products == "emulated"


def sharded(users):
    """A model that FSDP2 has sharded before it is converted, and one that it shards afterwards."""
    from torch.distributed.fsdp import fully_shard

    for is_first in (True, False):
        model = in_float8(layer_of(), config_of("rowwise", emulate=True)) if users else layer_of()
        conversion = None if is_first else convert(model, TorchaoFloat8("rowwise"))
        fully_shard(model[0])
        fully_shard(model)
        yield model, conversion or convert(model, TorchaoFloat8("rowwise"))


def main(rank, folder):
    """What each rank finds of sharded models on both paths."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = {}
    for users in (False, True):
        for when, (model, conversion) in zip(("before", "after"), sharded(users), strict=True):
            for active in (False, True):
                conversion.route([active])
                y, *gradients = everything(model, torch.randn(4, 32, generator=torch.Generator().manual_seed(1)))
                whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]
                found[users, when, active] = [y, *whole]
    torch.save(found, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_both_paths_of_a_model_that_fsdp2_shards_are_those_of_the_whole_model(start_ranks):
    folder = start_ranks(__file__, 2)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    model = layer_of()
    expected = {
        True: everything(model, x),
        False: everything(in_float8(model, config_of("rowwise", emulate=True)), x),
    }
    for rank in (0, 1):
        found = torch.load(folder / f"{rank}.pt")
        assert len(found) == 8
        for (_, _, active), tensors in found.items():
            assert_equal(tensors, expected[active])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"config": "colwise"}, "config='colwise': it is a Float8LinearConfig or one of 'tensorwise'"),
        ({"config": {}}, "config={}"),
        ({"unit": "model"}, "unit='model': it is one of 'projection'"),
        ({"emulate": "yes"}, "emulate='yes'"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        TorchaoFloat8(**settings)


@pytest.mark.parametrize("missing", ["torchao", "torchao.float8"])
def test_a_torchao_that_is_missing_or_moved_is_named_with_what_is_needed(monkeypatch, missing):
    model = layer_of()
    for name in [name for name in sys.modules if name == missing or name.startswith(f"{missing}.")]:
        monkeypatch.delitem(sys.modules, name)
    if missing == "torchao":
        monkeypatch.setattr(sys, "path", [])
        monkeypatch.setattr(sys, "path_importer_cache", {})
        said = r"torchao-float8 needs the package 'torchao', which is not installed.*'trimtab\[torchao\]'"
    else:
        monkeypatch.setitem(sys.modules, missing, types.ModuleType(missing))
        found = importlib.metadata.version("torchao")
        said = rf"torchao-float8 needs version 0.18 of 'torchao', and {found} is installed.*'trimtab\[torchao\]'"
    with pytest.raises(MissingExtraError, match=said) as caught:
        convert(model)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert (again.package, again.found) == ("torchao", caught.value.found)
    assert type(model[0][0]) is nn.Linear


def test_a_layer_that_is_made_otherwise_than_we_make_it_is_a_moved_interface(monkeypatch):
    from torchao.float8.float8_linear import Float8Linear

    monkeypatch.setattr(Float8Linear, "from_float", classmethod(lambda cls, module: cls))
    model = layer_of()
    with pytest.raises(MissingExtraError, match=r"needs version 0.18 of 'torchao'"):
        convert(model)
    assert type(model[0][0]) is nn.Linear


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
