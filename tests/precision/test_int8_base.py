"""The frozen base in int8, and what every path of a frozen base promises.

Run as a script (``python test_int8_base.py rank folder``) it is one of the two ranks of the test of FSDP2.
"""

import copy
import gc
import importlib.util
import io
import math
import pickle
import random
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import trimtab
from trimtab.control import robust
from trimtab.errors import ConfigError, TrimtabWarning
from trimtab.precision import (
    Conversion,
    QuantizerObserver,
    Recipe,
    converted_class,
    find_units,
    measure_saved_bytes,
)
from trimtab.precision import int8_base as path
from trimtab.precision.bitsandbytes_linear import BitsandbytesLinear
from trimtab.precision.int8_base import Int8Base, runs_int_mm
from trimtab.precision.recipe import why_unobserved
from trimtab.precision.torchao_int8 import TorchaoInt8Base
from trimtab.precision.weight_copies import WeightCopies, _Kept

pytestmark = [
    # transformers, about a name of its own that peft still uses
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    # torch's compiler, which peft imports, about its own modules
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    # torchao, about a string of its own
    pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning"),
    # the compiler itself
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*instantiated"),
]
FLOAT32, HALF_ULP = 2.0**-24, {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float64: 2.0**-53}


def needs(package, recipe):
    missing = importlib.util.find_spec(package) is None
    return pytest.param(recipe, marks=pytest.mark.skipif(missing, reason=f"needs {package}"), id=recipe.name)


RECIPES = [
    pytest.param(Int8Base(), id="int8-base"),
    needs("bitsandbytes", BitsandbytesLinear(8)),
    needs("bitsandbytes", BitsandbytesLinear(4)),
    needs("torchao", TorchaoInt8Base()),
]
every_recipe = pytest.mark.parametrize("recipe", RECIPES)


def frozen(inputs=16, outputs=8, bias=True, dtype=torch.float32, transposed=False):
    """A model of one frozen layer."""
    torch.manual_seed(0)
    if transposed:
        from transformers.pytorch_utils import Conv1D

        layer = Conv1D(outputs, inputs)
        nn.init.normal_(layer.bias)
    else:
        layer = nn.Linear(inputs, outputs, bias=bias)
    return nn.Sequential(layer).to(dtype).requires_grad_(False)


def convert(model, recipe=None, **settings):
    return (recipe or Int8Base(**settings)).convert(model, find_units(model))


def output_and_gradient(model, x):
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    y.backward(torch.ones_like(y))
    return y.detach(), leaf.grad


def quantized_slowly(rows):
    """Codes and scales of each row, one number at a time, in float32 as specified."""
    codes, scales = np.zeros(rows.shape, dtype=np.int64), np.zeros(len(rows), dtype=np.float32)
    for i, row in enumerate(rows.astype(np.float32)):
        scales[i] = np.float32(max((abs(v) for v in row), default=0)) / np.float32(127)
        for j, value in enumerate(row):
            codes[i, j] = 0 if scales[i] == 0 else max(-127, min(127, int(np.rint(value / scales[i]))))
    return codes, scales.astype(np.float64)


def multiplied_slowly(x, weight, bias, grad):
    """The output, the input's gradient, and the sums of magnitudes that bound their roundings; all float64."""
    x, weight, bias, grad = (t.double().numpy() for t in (x, weight, bias, grad))
    (x_codes, x_scale), (w_codes, w_scale) = quantized_slowly(x), quantized_slowly(weight)
    product = (x_codes @ w_codes.T) * x_scale[:, None] * w_scale
    dense = w_codes * w_scale[:, None]
    return product + bias, grad @ dense, abs(product) + abs(bias), abs(grad) @ abs(dense)


def normal(*shape, dtype=torch.float32, seed=1):
    """Rows of very different sizes, one of them zero."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    x = x * torch.logspace(-3, 3, len(x))[:, None]
    x[1::5] = 0
    return x.to(dtype)


@pytest.mark.parametrize("transposed", [False, True], ids=["linear", "conv1d"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(1, 3, 5), (7, 64, 33), (20, 24, 8), (0, 8, 8)])
def test_output_and_input_gradient_are_those_of_the_formula(tokens, inputs, outputs, dtype, transposed):
    model = frozen(inputs, outputs, dtype=dtype, transposed=transposed)
    layer = model[0]
    x, grad = normal(tokens, inputs, dtype=dtype), normal(tokens, outputs, dtype=dtype, seed=2)
    weight = layer.weight.t() if transposed else layer.weight
    output, grad_x, size, grad_size = multiplied_slowly(x, weight, layer.bias, grad)
    conversion = convert(model)
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    y.backward(grad)
    assert y.dtype == leaf.grad.dtype == dtype
    assert conversion.products == ("int_mm" if tokens else "emulated")
    # The integers are exact. Two scales and the bias make three roundings in float32, and one to the dtype.
    bound = 3 * FLOAT32 * size + HALF_ULP[dtype] * abs(output) * 1.01
    assert (abs(y.detach().double().numpy() - output) <= bound).all()
    # Each dequantized weight is rounded in float32 and to the dtype; a sum of n products errs by n roundings at most,
    # in the dtype that a CPU adds up in, and once more in the result.
    adds_in = max(HALF_ULP[dtype], 0 if dtype == torch.float64 else FLOAT32)
    bound = (FLOAT32 + HALF_ULP[dtype] + (outputs + 2) * adds_in) * 1.01 * grad_size
    assert (abs(leaf.grad.double().numpy() - grad_x) <= bound).all()


@pytest.mark.parametrize("inputs", [64, 1040, 4096])
def test_the_emulated_product_is_the_integer_one(monkeypatch, inputs):
    model = frozen(inputs, 8, bias=False)
    x = normal(20, inputs)
    conversion = convert(model)
    expected = model(x)
    monkeypatch.setattr(path, "runs_int_mm", lambda *shape: False)
    emulated = model(x)
    assert conversion.products == "mixed"
    if inputs * 127**2 < 2**24:
        assert torch.equal(emulated, expected)  # float32 holds every partial sum
    (x_codes, x_scale), (w_codes, w_scale) = quantized_slowly(x.numpy()), quantized_slowly(model[0].weight.numpy())
    sums = (abs(x_codes) @ abs(w_codes).T) * x_scale[:, None] * w_scale
    assert (abs((emulated - expected).double().numpy()) <= (inputs + 4) * FLOAT32 * sums).all()


def test_the_integer_product_is_asked_only_for_what_it_takes(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert runs_int_mm(1, 3, 5, cpu)
    assert not runs_int_mm(0, 8, 8, cpu)
    assert not runs_int_mm(4, 133_145, 4, cpu)  # 127 * 127 times as many is more than int32 holds
    assert runs_int_mm(4, 133_144, 4, cpu)
    monkeypatch.setattr(path, "_has_int_mm", lambda device: True)
    assert runs_int_mm(17, 8, 16, gpu)
    assert not any(runs_int_mm(*shape, gpu) for shape in [(16, 8, 16), (17, 12, 16), (17, 8, 12)])
    monkeypatch.setattr(path, "_has_int_mm", lambda device: False)
    assert not runs_int_mm(17, 8, 16, gpu)


def test_rows_of_zeros_stay_exactly_zero():
    model = frozen(bias=False)
    model[0].weight[3] = 0
    convert(model)
    x = normal(6, 16)
    y, grad = output_and_gradient(model, x)
    assert not y[1].any()
    assert not y[:, 3].any()
    assert grad.isfinite().all()


@every_recipe
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_token_that_is_not_finite_never_becomes_a_number(recipe, value):
    model = frozen(32, 64)
    convert(model, recipe)
    x = torch.randn(4, 32)
    x[2, 3] = value
    finite = model(x).isfinite()
    assert not finite[2].any()
    assert finite[[0, 1, 3]].all()


@every_recipe
def test_a_weight_that_is_not_finite_never_becomes_a_number(recipe):
    if recipe.name.startswith("bnb"):
        pytest.skip("bitsandbytes quantizes weights in its own way")
    model = frozen()
    model[0].weight[3, 2] = float("inf")
    convert(model, recipe)
    y, grad = output_and_gradient(model, torch.randn(4, 16))
    assert y.isnan().any(0).tolist() == [i == 3 for i in range(8)]
    assert not grad.isfinite().all()


@every_recipe
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (64,), (2, 1, 3, 64)])
def test_inputs_of_any_number_of_dimensions_are_multiplied(recipe, shape):
    model = frozen(64, 32)
    x = torch.randn(shape)
    expected, expected_grad = output_and_gradient(model, x)
    convert(model, recipe)
    y, grad = output_and_gradient(model, x)
    assert (y.shape, grad.shape) == (expected.shape, expected_grad.shape)
    if x.numel():
        assert 0 < (y - expected).norm() < 0.2 * expected.norm()


@every_recipe
@pytest.mark.parametrize("transposed", [False, True], ids=["linear", "conv1d"])
def test_autocast_shows_in_the_dtype_and_multiplies_what_it_casts(recipe, transposed):
    model = frozen(64, 32, transposed=transposed)
    conversion = convert(model, recipe)
    x = torch.randn(5, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, grad = output_and_gradient(model, x)
    assert (y.dtype, grad.dtype) == (torch.bfloat16, torch.float32)
    # The weight is quantized from what it is, in float32.
    assert torch.equal(y, conversion.low_product(0, x.bfloat16(), model[0].bias.bfloat16(), 0))


def test_an_emulated_product_is_not_cast_by_autocast(monkeypatch):
    model = frozen(64, 32)
    convert(model)
    x = torch.randn(5, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(x)
        monkeypatch.setattr(path, "runs_int_mm", lambda *shape: False)
        assert torch.equal(model(x), expected)


@every_recipe
def test_an_input_of_another_dtype_is_refused_as_by_torch(recipe):
    model = frozen()
    conversion = convert(model, recipe)
    for active in (False, True):
        conversion.route([active])
        with pytest.raises(RuntimeError, match="same dtype"):
            model(torch.randn(4, 16, dtype=torch.bfloat16))


@every_recipe
def test_a_trained_weight_is_refused_with_the_reason(recipe):
    with pytest.raises(ConfigError, match=rf"{recipe.name} can convert none of them.*0.* its weight is trained"):
        convert(nn.Sequential(nn.Linear(4, 4)), recipe)


@every_recipe
def test_a_weight_that_is_unfrozen_later_gets_its_gradient_from_the_plain_layer(recipe):
    model, x = frozen(64, 32), torch.randn(5, 64)
    expected = model(x)
    convert(model, recipe)
    model.requires_grad_(True)
    y = model(x)
    assert torch.equal(y, expected)
    y.sum().backward()
    assert model[0].weight.grad is not None


@every_recipe
def test_a_trained_bias_gets_its_gradient_and_a_frozen_layer_keeps_its_bias(recipe):
    model = frozen(64, 32)
    bias, before = model[0].bias, model[0].bias.clone()
    bias.requires_grad_(True)
    convert(model, recipe)
    x = torch.randn(2, 3, 64, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x).sum().backward()
    assert model[0].bias is bias
    assert bias.dtype == torch.float32
    assert torch.equal(bias, before)
    assert torch.equal(bias.grad, torch.full((32,), 6.0))
    assert model[0].weight.grad is None


@every_recipe
def test_neither_path_keeps_anything_for_backward(recipe):
    model = frozen(64, 32)
    conversion = convert(model, recipe)
    assert conversion.costs[0].flops == 4 * 64 * 32
    for active in (False, True):
        conversion.route([active])
        x = torch.randn(16, 64, requires_grad=True) * 1.0
        with measure_saved_bytes(model, conversion.units) as saved:
            y = model(x)
        assert saved.units == conversion.costs[0].low_saved_bytes == conversion.costs[0].high_saved_bytes == 0
        # Nor is it kept where no hook sees it.
        reference = weakref.ref(x)
        del x
        gc.collect()
        assert reference() is None
        y.sum().backward()


@every_recipe
def test_units_start_on_the_low_cost_path_and_recover_bit_for_bit(recipe):
    model, x = frozen(64, 32), torch.randn(5, 64)
    expected, expected_grad = output_and_gradient(model, x)
    conversion = convert(model, recipe)
    assert isinstance(recipe, Recipe)
    assert isinstance(conversion, Conversion)
    low, _ = output_and_gradient(model, x)
    assert 0 < (low - expected).norm() < 0.2 * expected.norm()
    conversion.route([True])
    high, high_grad = output_and_gradient(model, x)
    assert torch.equal(high, expected)
    assert torch.equal(high_grad, expected_grad)
    conversion.route([False])
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(x), expected)


@every_recipe
def test_a_backward_follows_its_forward_and_not_the_route_of_the_day(recipe):
    model, x = frozen(64, 32), torch.randn(5, 64)
    conversion = convert(model, recipe)
    found = {}
    for active in (False, True):
        conversion.route([active])
        _, found[active] = output_and_gradient(model, x)
    for active in (False, True):
        leaf = x.clone().requires_grad_()
        conversion.route([active])
        y = model(leaf)
        conversion.route([not active])
        y.sum().backward()
        assert torch.equal(leaf.grad, found[active])
    conversion.route([False])
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    conversion.undo()
    del conversion
    gc.collect()
    y.sum().backward()
    assert torch.equal(leaf.grad, found[False])


@every_recipe
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_changes_no_gradient(recipe, use_reentrant):
    model, x = nn.Sequential(*frozen(64, 64), nn.Tanh(), *frozen(64, 64)), torch.randn(5, 64)
    conversion = convert(model, recipe)
    conversion.route([False, True])
    _, expected = output_and_gradient(model, x)
    leaf = x.clone().requires_grad_()
    checkpoint(model, leaf, use_reentrant=use_reentrant).sum().backward()
    assert torch.equal(leaf.grad, expected)


def adapted(tiny_llama, dtype=torch.float32, **settings):
    """A small Llama with adapters that do something."""
    pytest.importorskip("peft", reason="needs peft: pip install 'trimtab[lora]'")
    from trimtab.experiments.lora import add_lora

    model = add_lora(tiny_llama(num_layers=2).to(dtype), **settings)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02, generator=generator)
    return model


def batch():
    ids = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "labels": ids}


@every_recipe
def test_adapters_are_the_units_and_their_frozen_bases_are_switched(recipe, tiny_llama, gradients):
    model = adapted(tiny_llama)
    plain = gradients(model, batch())
    random_state = torch.get_rng_state()
    conversion = convert(model, recipe)
    low = gradients(model, batch())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert len(conversion.units) == 14
    assert all(hasattr(u.modules[0], "lora_A") for u in conversion.units)
    assert all(name.endswith("base_layer") for name, m in model.named_modules() if "_trimtab_switch" in m.__dict__)
    assert low.keys() == plain.keys()
    assert all("lora_" in name for name in low)
    assert any(not torch.equal(low[n], plain[n]) for n in plain)
    conversion.route([True] * 14)
    high = gradients(model, batch())
    assert all(torch.equal(high[n], plain[n]) for n in plain)


@every_recipe
def test_the_state_of_an_adapted_model_is_the_same_on_every_path_and_afterwards(recipe, tiny_llama, gradients):
    model = adapted(tiny_llama)
    before = {n: p.clone() for n, p in model.state_dict().items()}
    classes = [type(m) for m in model.modules()]
    named = [(n, id(p)) for n, p in model.named_parameters()]

    def is_the_same():
        now = model.state_dict()
        assert list(now) == list(before)
        assert [(n, id(p)) for n, p in model.named_parameters()] == named
        return all(torch.equal(now[n], before[n]) and now[n].dtype == before[n].dtype for n in now)

    with trimtab.attach(model, recipe) as guard:
        for names in ([], guard.units[::2], guard.units):
            guard.route(names)
            model(**batch()).loss.backward()
            assert is_the_same()
            guard.step()
            model.zero_grad()
    assert is_the_same()
    assert [type(m) for m in model.modules()] == classes
    assert not any("_trimtab_switch" in m.__dict__ for m in model.modules())


@every_recipe
def test_a_copy_of_a_converted_model_is_a_plain_one(recipe, tiny_llama, gradients):
    model = adapted(tiny_llama)
    plain = gradients(model, batch())
    convert(model, recipe)
    gradients(model, batch())
    model.zero_grad()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ):
        assert {type(m) for m in other.modules() if isinstance(m, nn.Linear)} == {nn.Linear}
        found = gradients(other, batch())
        assert all(torch.equal(found[n], plain[n]) for n in plain)


@pytest.mark.parametrize("unit", ["half", "layer", "block"])
def test_a_larger_unit_takes_its_frozen_projections_without_adapters_along(tiny_llama, unit):
    model = adapted(tiny_llama, targets=["q_proj", "v_proj", "gate_proj", "up_proj"])
    with trimtab.attach(model, Int8Base(unit=unit)) as guard:
        converted = [name for name, m in model.named_modules() if "_trimtab_switch" in m.__dict__]
        assert len(guard.units) == (4 if unit == "half" else 2)
        assert len(converted) == 14
        assert sum(name.endswith("base_layer") for name in converted) == 8


@pytest.mark.slow
@every_recipe
def test_a_compiled_adapted_model_is_one_graph_whatever_is_switched(recipe, tiny_llama, gradients):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = adapted(tiny_llama)
    conversion = convert(model, recipe)
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    chance = random.Random(0)
    for step in range(1, 21):
        conversion.begin_step(step)
        conversion.route([chance.random() < 0.5 for _ in conversion.units])
        eager = gradients(model, batch())
        with torch._dynamo.config.patch(error_on_recompile=step > 1):
            model.zero_grad()
            compiled(**batch()).loss.backward()
        assert all(torch.equal(p.grad, eager[n]) for n, p in model.named_parameters() if p.requires_grad)
    assert backend.frame_count == 1
    assert sum(torch._dynamo.utils.counters["graph_break"].values()) == 0


@pytest.mark.slow
@every_recipe
def test_compiled_paths_keep_no_input_of_a_frozen_layer(recipe):
    torch._dynamo.reset()
    model = frozen(64, 32)
    conversion = convert(model, recipe)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for active in (False, True):
        conversion.route([active])
        x = torch.randn(16, 64, requires_grad=True)
        with measure_saved_bytes(model, []) as saved:
            y = compiled(x)
        assert saved.model == 1 + 24  # which path it was, and the layer's key
        y.sum().backward()


@pytest.mark.slow
@every_recipe
def test_compiled_paths_are_the_eager_ones_under_autocast_and_are_observed_alike(recipe):
    torch._dynamo.reset()
    model, x = frozen(64, 32), normal(6, 64)
    conversion = convert(model, recipe)
    observes = why_unobserved(conversion) is None
    if observes:
        conversion.observe_quantizers(shadow=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for active in (False, True):
        conversion.route([active])
        found = []
        for forward in (model, compiled):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                found.append(output_and_gradient(forward, x))
            if observes:
                found[-1] += (conversion.take_quantizer_stats(),)
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@every_recipe
def test_an_input_that_is_not_contiguous_is_multiplied_as_one_that_is(recipe):
    model, x = frozen(64, 32), torch.randn(64, 5).t()
    convert(model, recipe)
    assert not x.is_contiguous()
    found, expected = output_and_gradient(model, x), output_and_gradient(model, x.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Counted:
    """What a path makes of weights, and how often it did."""

    def __init__(self, model):
        self.times = 0
        self.layer = model[0]
        self.copies = WeightCopies(model, self.make)

    def make(self, layer):
        self.times += 1
        return layer.weight.detach().clone()

    def made(self):
        """How often the weight is made anew now; what is given is always right."""
        before = self.times
        assert torch.equal(self.copies.get(self.layer), self.layer.weight)
        return self.times - before


def test_a_weight_is_quantized_once_and_anew_after_any_change_that_is_counted():
    model = frozen()
    counted, layer = Counted(model), model[0]
    assert [counted.made() for _ in range(3)] == [1, 0, 0]

    def load():
        model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})

    def assign():
        model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}, assign=True)

    def replace():
        layer.weight = nn.Parameter(layer.weight + 1, requires_grad=False)

    def new_data():
        layer.weight.data = layer.weight.data + 1

    changes = (load, assign, replace, new_data, lambda: layer.weight.mul_(2), model.double, model.bfloat16)
    for change in changes:
        change()
        assert [counted.made(), counted.made()] == [1, 0], change


def test_another_weight_in_the_same_place_is_another_weight():
    model = frozen()
    counted, values = Counted(model), model[0].weight.numpy()
    model[0].weight = nn.Parameter(torch.from_numpy(values), requires_grad=False)
    counted.made()
    values += 1
    model[0].weight = nn.Parameter(torch.from_numpy(values), requires_grad=False)
    assert [counted.made(), counted.made()] == [1, 0]


def test_a_change_through_data_is_noticed_in_the_next_step():
    model = frozen()
    counted, layer = Counted(model), model[0]
    counted.made()
    layer.weight.data += 1
    assert counted.copies.get(layer) is not None
    assert counted.times == 1
    counted.copies.begin_step()
    assert [counted.made(), counted.made()] == [1, 0]
    counted.copies.begin_step()
    assert counted.made() == 0


class Comparisons(TorchDispatchMode):
    """Counts what compares entries, and what reads a number on the host."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("equal", "_local_scalar_dense", "is_nonzero", "nonzero", "ne", "eq"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_the_weights_of_all_layers_are_compared_once_a_step_together():
    model = nn.Sequential(*(nn.Linear(size, size) for size in (3, 16, 16, 16, 16))).requires_grad_(False)
    layers, made = list(model), []
    copies = WeightCopies(model, lambda layer: made.append(layer) or layer.weight.clone())
    for layer in layers:
        copies.get(layer)
    for step in range(3):
        copies.begin_step()
        layers[step].weight.data += 1
        made.clear()
        with Comparisons() as seen:
            for _ in range(4):  # micro-batches
                for layer in layers:
                    assert copies.get(layer).shape == layer.weight.shape
        assert made == [layers[step]]
        assert seen.names == ["ne"]


@every_recipe
def test_a_forward_asks_for_no_number_of_each_layer(recipe, tiny_llama):
    model = adapted(tiny_llama)
    conversion = convert(model, recipe)
    model(**batch())
    plain = [name for name in forward_alone(model) if name != "ne"]
    conversion.begin_step(2)
    with Comparisons() as seen:
        model(**batch())
    assert "equal" not in seen.names
    # Those of the model itself, which are there without a step too.
    assert [name for name in seen.names if name != "ne"] == plain
    conversion.undo()


def forward_alone(model):
    with Comparisons() as seen:
        model(**batch())
    return seen.names


@pytest.mark.parametrize("shape", [(192, 77), (64, 4096), (1, 5), (3072, 9)])
def test_entries_that_are_compared_keep_to_no_row_and_no_column(shape):
    weight = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    entries = _Kept(weight, [], None).sample.long()
    assert len(entries) == 64
    for axis, numbers in enumerate((entries // shape[1], entries % shape[1])):
        # Half of what as many random draws would meet at least.
        assert len(set(numbers.tolist())) >= 0.5 * shape[axis] * (1 - (1 - 1 / shape[axis]) ** 64)
    assert len(_Kept(torch.zeros(0, 4), [], None).sample) == 0


@every_recipe
def test_adapters_that_are_merged_into_the_base_are_multiplied_from_the_next_step_on(recipe, tiny_llama):
    model = adapted(tiny_llama)
    conversion = convert(model, recipe)
    conversion.begin_step(1)
    model(**batch())
    model.merge_adapter()
    conversion.begin_step(2)
    merged = model(**batch()).logits
    conversion.undo()
    anew = convert(model, recipe)
    assert torch.equal(model(**batch()).logits, merged)
    anew.undo()


@every_recipe
def test_merging_in_the_middle_of_a_step_shows_in_the_next_forward(recipe, tiny_llama):
    model = adapted(tiny_llama)
    conversion = convert(model, recipe)
    conversion.begin_step(1)
    apart = model(**batch()).logits
    model.merge_adapter()
    merged = model(**batch()).logits
    model.unmerge_adapter()
    again = model(**batch()).logits
    conversion.undo()
    # Where weights were rounded to be merged, they come back to their rounding only.
    assert torch.allclose(again, apart, atol=1e-3)
    model.merge_adapter()
    anew = convert(model, recipe)
    assert torch.allclose(model(**batch()).logits, merged, atol=1e-3)
    assert not torch.allclose(merged, model.get_base_model()(**batch()).logits * 0 + apart, atol=1e-9)
    anew.undo()


def test_without_a_cache_weights_are_quantized_in_each_forward_and_backward(monkeypatch):
    model, x = frozen(), torch.randn(5, 16)
    cached = convert(model)
    expected = output_and_gradient(model, x)
    assert len(cached._weights._kept) == 1
    cached.undo()
    assert len(cached._weights._kept) == 0
    conversion = convert(model, cache_weights=False)
    found = output_and_gradient(model, x)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(conversion._weights._kept) == 0


def test_int8_weights_take_a_byte_an_element_and_a_scale_a_channel():
    model = frozen(64, 32)
    conversion = convert(model)
    model(torch.randn(5, 64))
    codes, scale = conversion._weights.get(model[0])
    assert codes.untyped_storage().nbytes() + scale.untyped_storage().nbytes() == 64 * 32 + 4 * 32


def test_statistics_are_those_of_the_low_cost_path_on_either_path():
    model, x = frozen(64, 32), normal(6, 64)
    conversion = convert(model)
    assert isinstance(conversion, QuantizerObserver)
    assert conversion.take_quantizer_stats() is None
    conversion.observe_quantizers(shadow=True)
    rows = []
    for active in (False, True):
        conversion.route([active])
        model(x)
        rows.append(conversion.take_quantizer_stats())
        assert conversion.take_quantizer_stats() is None
    assert torch.equal(*rows)
    codes, scales = quantized_slowly(x.numpy())
    error = x.double().numpy() - codes * scales[:, None]
    expected = (np.linalg.norm(error, axis=0) / np.linalg.norm(x.double().numpy(), axis=0)).mean()
    flushed = ((codes == 0) & (x.numpy() != 0)).sum() / (x.numpy() != 0).sum()
    np.testing.assert_allclose(rows[0][0], [expected, flushed, 0, x.abs().max()], rtol=1e-5)
    conversion.observe_quantizers(shadow=False)
    model(x)
    assert conversion.take_quantizer_stats() is None
    x[0, 0] = float("nan")
    conversion.route([False])
    model(x)
    assert conversion.take_quantizer_stats()[0].tolist() == [float("inf"), 1, 1, float("inf")]


def test_a_unit_on_the_recovery_path_under_autocast_is_judged_by_what_is_cast():
    model, x = frozen(64, 32), normal(6, 64)
    conversion = convert(model)
    conversion.observe_quantizers(shadow=True)
    rows = []
    for active in (False, True):
        conversion.route([active])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(x)
        rows.append(conversion.take_quantizer_stats())
    assert torch.equal(*rows)


@pytest.mark.parametrize("active", [False, True])
def test_a_forward_that_is_recomputed_is_not_observed_twice(active):
    model = frozen(16, 16).append(nn.Tanh())
    conversion = convert(model)
    conversion.observe_quantizers(shadow=True)
    conversion.route([active])
    y = checkpoint(model, torch.randn(4, 16, requires_grad=True), use_reentrant=False)
    assert conversion.take_quantizer_stats() is not None
    y.sum().backward()
    assert conversion.take_quantizer_stats() is None


def test_a_policy_with_an_error_limit_puts_a_broken_unit_on_the_recovery_path(tiny_llama):
    model = adapted(tiny_llama)
    with trimtab.attach(model, Int8Base(), policy=robust(error_limit=1e-9)) as guard:
        model(**batch()).loss.backward()
        guard.step()
        assert len(guard.active) > 0


@pytest.mark.parametrize("setting", ["unit", "cache_weights"])
def test_a_setting_that_cannot_be_meant_is_refused(setting):
    with pytest.raises(ConfigError, match=f"{setting}='often': it is"):
        Int8Base(**{setting: "often"})
    assert Int8Base().to_dict() == {"name": "int8-base", "unit": "projection", "cache_weights": True}


def test_a_replica_of_data_parallel_runs_plainly_and_says_so():
    model, x = frozen(), torch.randn(3, 16)
    expected = model(x)
    convert(model)
    replica = model[0]._replicate_for_data_parallel()
    replica._parameters = dict(model[0]._parameters)
    converted_class.warn_about_replicas.cache_clear()
    with pytest.warns(TrimtabWarning, match="as nn.DataParallel makes one .* Use DistributedDataParallel"):
        assert torch.equal(replica(x), expected)


@pytest.mark.slow
def test_a_sharded_base_computes_the_same_and_no_rank_keeps_whole_weights(start_ranks):
    folder = start_ranks(__file__, 2)
    for rank in range(2):
        results = torch.load(folder / f"{rank}.pt")
        assert all("FSDP2 shards its weight" in said for said in results["refused"])
        for when in ("before", "after", "after_a_step"):
            assert results[when]["kept"] == 0, when
            assert all(torch.equal(results["whole"]["found"][n], results[when]["found"][n]) for n in ("y", "grad")), (
                when
            )


class Adapter(nn.Module):
    """Holds a frozen layer and its low-rank adapters as peft's layers do."""

    def __init__(self, width):
        super().__init__()
        self.base_layer = nn.Linear(width, width).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(width, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, width, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class Layered(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Adapter(16), nn.Tanh(), Adapter(16)) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def why_refused(model, recipe):
    try:
        convert(model, recipe).undo()
    except ConfigError as error:
        return str(error)
    return ""


def main(rank: int, folder: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    results = {}
    for when in ("whole", "before", "after", "after_a_step"):
        torch.manual_seed(0)
        model = Layered()

        def shard(model=model):
            for layer in model.layers:
                fully_shard(layer)
            fully_shard(model)

        x = torch.randn(5, 16, requires_grad=True)
        if when == "before":
            shard()
            results["refused"] = [
                why_refused(model, recipe)
                for package, recipe in (("bitsandbytes", BitsandbytesLinear(8)), ("torchao", TorchaoInt8Base()))
                if importlib.util.find_spec(package) is not None
            ]
        conversion = convert(model)
        conversion.route([False, True, False, False])
        if when == "after_a_step":
            model(x).sum().backward()
            model.zero_grad()
            x.grad = None
        if when.startswith("after"):
            shard()
        y = model(x)
        y.sum().backward()
        kept = sum(id(layer) in conversion._weights._kept for layer in conversion.layers)
        results[when] = {"found": {"y": y.detach(), "grad": x.grad}, "kept": kept}
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
