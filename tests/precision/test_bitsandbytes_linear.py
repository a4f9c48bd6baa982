"""bitsandbytes's products as the low-cost path; what it shares with others is tested in test_int8_base.py."""

import copy
import importlib
import logging
import random
import sys
import types

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import trimtab
from trimtab.errors import ConfigError, MissingExtraError
from trimtab.precision import bitsandbytes_linear as path
from trimtab.precision import find_units, measure_saved_bytes
from trimtab.precision.bitsandbytes_linear import BitsandbytesLinear

bnb = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install 'trimtab[bnb]'")
pytestmark = [
    # transformers, about a name of its own that peft still uses
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    # torch's compiler, which peft imports, about its own modules
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    # torchao, which peft imports, about a string of its own
    pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning"),
    # the compiler itself
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*instantiated"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def frozen(bias=False, dtype=torch.float32, inputs=64, outputs=32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, outputs, bias=bias)).to(dtype).requires_grad_(False)


def convert(model, bits=8, **settings):
    return BitsandbytesLinear(bits, **settings).convert(model, find_units(model))


def int8_layer(plain, threshold=0.0):
    """bitsandbytes's layer in place of a plain one, quantized as its documentation says."""
    layer = bnb.nn.Linear8bitLt(
        plain.in_features, plain.out_features, plain.bias is not None, has_fp16_weights=False, threshold=threshold
    )
    layer.load_state_dict(plain.state_dict())
    return layer.to("cpu").requires_grad_(False)


def four_bit_layer(plain, **settings):
    layer = bnb.nn.Linear4bit(plain.in_features, plain.out_features, plain.bias is not None, **settings)
    layer.weight = bnb.nn.Params4bit(plain.weight.data.clone(), requires_grad=False, module=layer, **settings)
    if plain.bias is not None:
        layer.bias = copy.deepcopy(plain.bias)
    return layer.to("cpu")


def both(model, theirs, x):
    """Output and input gradient of each."""
    found = []
    for module in (model, theirs):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        y.backward(torch.ones_like(y))
        found.append((y.detach(), leaf.grad))
    return found


@pytest.mark.parametrize("threshold", [0.0, 3.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_8_bits_both_products_are_bitsandbytes_own(dtype, threshold):
    model = frozen(dtype=dtype)
    # In evaluation its layer quantizes activations on a CPU too.
    theirs = int8_layer(model[0], threshold).eval()
    x = torch.randn(2, 9, 64, dtype=dtype)
    x[..., 5] *= 8
    convert(model, threshold=threshold)
    mine, expected = both(model, theirs, x)
    assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))
    assert not torch.equal(mine[0], nn.functional.linear(x, model[0].weight))


def nasty(dtype):
    """Magnitudes over the range of float16, tokens of zeros, of halves of a step, and of its smallest numbers."""
    generator = torch.Generator().manual_seed(0)
    size = torch.exp2(torch.randint(-22, 14, (48, 64), generator=generator).float())
    x = torch.randn(48, 64, generator=generator) * size
    x[0] = 0
    x[1] = torch.arange(64) - 0.5
    x[1, 0] = 127
    x[2] = torch.arange(64) * 2.0**-24
    x[3, 0] = 65280  # 2**16 - 2**8, which bfloat16 holds
    return x.to(dtype)


@pytest.mark.parametrize("make_x", [nasty, lambda dtype: torch.randn(48, 64).to(dtype)], ids=["nasty", "random"])
@pytest.mark.parametrize("threshold", [0.0, 3.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_observed_is_what_bitsandbytes_makes_of_the_input(dtype, threshold, make_x):
    model, x = frozen(dtype=dtype), make_x(dtype)
    conversion = convert(model, threshold=threshold)
    conversion.observe_quantizers(shadow=True)
    codes, amax, outliers = bnb.functional.int8_vectorwise_quant(x.to(torch.float16), threshold=threshold)
    values = codes.double() * amax.double()[:, None] / 127
    judged = torch.ones(64, dtype=torch.bool)
    if threshold:
        judged[outliers.long()] = False
        assert len(outliers) > 0
    of_x, values = x.double()[:, judged], values[:, judged]
    size = of_x.norm(dim=0)
    # Where all channels have outliers, none is left to judge.
    error = ((of_x - values).norm(dim=0) / size)[size > 0].mean() if judged.any() else torch.zeros(())
    flushed = ((values == 0) & (of_x != 0)).sum() / (of_x != 0).sum().clamp(min=1)
    expected = torch.stack([error, flushed, torch.zeros(()), x.to(torch.float16).abs().max()]).float()
    for active in (False, True):
        conversion.route([active])
        model(x)
        # Codes times scales are rounded once each, and so is every sum of the norms.
        torch.testing.assert_close(conversion.take_quantizer_stats()[0], expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("make_x", [nasty, lambda dtype: torch.randn(48, 64).to(dtype)], ids=["nasty", "random"])
def test_the_codes_behind_what_is_observed_are_bitsandbytes_own(make_x):
    x = make_x(torch.float16)
    codes, amax, _ = bnb.functional.int8_vectorwise_quant(x)
    values, _ = path._INT8.values(x)
    steps = (values.double() * 127 / amax.double().clamp(min=1e-30)[:, None]).round()
    assert torch.equal(steps, codes.double())


@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_observing_reads_nothing_back_to_the_host(threshold):
    """On the meta device there is nothing to read."""
    x = torch.empty(600, 64, dtype=torch.bfloat16, device="meta")
    assert path._row_in_int8(x, threshold).shape == (4,)


def test_an_outlier_in_a_token_that_is_not_looked_at_takes_its_channel_out():
    model = frozen()
    conversion = convert(model, threshold=6.0)
    conversion.observe_quantizers(shadow=False)
    x = torch.randn(5000, 64).clamp(-5, 5)
    # This channel alone loses all that it holds.
    x[:, 7] = 1e-3
    model(x)
    before = conversion.take_quantizer_stats()[0, 0]
    assert before > 1 / 64
    for place in range(7):
        outlying = x.clone()
        outlying[place, 7] = 100.0
        model(outlying)
        row = conversion.take_quantizer_stats()[0]
        assert row[0] < 1 / 64
        assert row[3] == 100.0


def test_a_layer_that_came_in_8_bits_is_observed_on_both_paths_by_the_threshold_it_came_with():
    rows = []
    for threshold in (0.0, 6.0):
        model = nn.Sequential(int8_layer(frozen()[0], threshold))
        conversion = convert(model)
        conversion.observe_quantizers(shadow=True)
        x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
        x[:, 5] *= 100
        for active in (False, True):
            conversion.route([active])
            model(x)
            rows.append(conversion.take_quantizer_stats())
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[2], rows[3])
    assert rows[2][0, 0] < 0.1 * rows[0][0, 0]


@pytest.mark.parametrize("active", [False, True])
def test_a_forward_that_is_recomputed_is_not_observed_twice(active):
    model = frozen().append(nn.Tanh())
    conversion = convert(model)
    conversion.observe_quantizers(shadow=True)
    conversion.route([active])
    y = checkpoint(model, torch.randn(9, 64, requires_grad=True), use_reentrant=False)
    assert conversion.take_quantizer_stats() is not None
    y.sum().backward()
    assert conversion.take_quantizer_stats() is None


@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_what_float16_does_not_hold_is_known_to_be_lost(threshold):
    model = frozen(dtype=torch.bfloat16)
    conversion = convert(model, threshold=threshold)
    conversion.observe_quantizers(shadow=False)
    x = torch.randn(9, 64, dtype=torch.bfloat16)
    x[2, 3] = 1e5
    model(x)
    assert conversion.take_quantizer_stats()[0].tolist() == [float("inf"), 1, 1, float("inf")]


def test_in_4_bits_observing_is_refused_with_the_reason_and_the_recipes_that_can():
    with pytest.raises(ConfigError, match=r"recipe='bnb-4bit': .* quantizes weights only: .*BitsandbytesLinear\(8\)"):
        trimtab.attach(frozen(), BitsandbytesLinear(4), units=["0"], quantizer_stats=True)


@pytest.mark.parametrize("settings", [{}, {"quant_type": "fp4"}, {"compress_statistics": False}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_4_bits_both_products_are_bitsandbytes_own(dtype, settings):
    model = frozen(dtype=dtype)
    theirs = four_bit_layer(model[0], **({"quant_type": "nf4"} | settings))
    x = torch.randn(2, 9, 64, dtype=dtype)
    convert(model, 4, **settings)
    mine, expected = both(model, theirs, x)
    assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))


def test_in_4_bits_another_dtype_can_be_computed_in():
    model = frozen()
    theirs = four_bit_layer(model[0], quant_type="nf4")
    theirs.compute_dtype, theirs.compute_type_is_set = torch.bfloat16, True
    convert(model, 4, compute_dtype=torch.bfloat16)
    mine, expected = both(model, theirs, torch.randn(9, 64))
    assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))
    assert mine[0].dtype == torch.float32


@pytest.mark.parametrize("bits", [4, 8])
def test_a_bias_is_added_and_never_cast_in_place(bits):
    model = frozen(bias=True)
    before = model[0].bias.clone()
    without = copy.deepcopy(model)
    without[0].bias = None
    convert(model, bits)
    convert(without, bits)
    x = torch.randn(9, 64)
    assert torch.equal(model(x), without(x) + before)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x)
    assert model[0].bias.dtype == torch.float32
    assert torch.equal(model[0].bias, before)


def test_a_4_bit_weight_is_never_packed_for_inference():
    model = frozen()
    conversion = convert(model, 4)
    with torch.no_grad():
        model(torch.randn(3, 64))
        model.eval()(torch.randn(3, 64))
    leaf = torch.randn(3, 64, requires_grad=True)
    model(leaf).sum().backward()
    assert leaf.grad is not None
    assert not getattr(conversion._four_bit.get(model[0]).weight.quant_state, "packing_format_for_cpu", False)


def test_in_4_bits_each_input_is_multiplied_in_its_own_dtype_whatever_came_first():
    model, x = frozen(), torch.randn(9, 64)
    found = []
    for first in (torch.float32, torch.bfloat16):
        conversion = convert(model, 4)
        for dtype in (first, torch.bfloat16):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                y = model(x)
        found.append(y)
        conversion.undo()
    assert torch.equal(*found)


def test_a_kernel_that_passes_over_a_nan_does_not_hide_it():
    def blind(x, codes, state):
        return x.nan_to_num(0, 0, 0) @ codes.float().t()

    library = types.SimpleNamespace(MatmulLtState=bnb.MatmulLtState, matmul=blind)
    x = torch.ones(4, 8)
    x[1, 2], x[2, 3], x[3, 4] = float("nan"), -float("inf"), 1e6
    y = path._int8_product(library, torch.ones(2, 8, dtype=torch.int8), torch.ones(2), 0.0, x)
    assert y[0].tolist() == [8, 8]
    assert y[1:].isnan().all()


def test_more_than_float16_holds_becomes_nan_and_no_number():
    model = frozen(dtype=torch.bfloat16)
    convert(model)
    x = torch.ones(3, 64, dtype=torch.bfloat16)
    x[1, 2] = 1e6
    assert model(x).isnan().any(1).tolist() == [False, True, False]


def test_products_are_not_announced_one_by_one(caplog):
    model = frozen()
    with caplog.at_level(logging.WARNING):
        convert(model)
        model(torch.randn(3, 64))
        assert caplog.records == []
        int8_layer(model[0]).eval()(torch.randn(3, 64))
        assert "inputs will be cast" in caplog.text


def test_random_numbers_of_the_process_are_not_drawn():
    model, x = frozen(), torch.ones(3, 64)
    for bits in (4, 8):
        before = torch.get_rng_state()
        convert(model, bits).undo()
        conversion = convert(model, bits)
        model(x)
        conversion.undo()
        assert torch.equal(torch.get_rng_state(), before)


def loaded_in_8_bits(threshold=0.0, bias=True):
    return nn.Sequential(int8_layer(frozen(bias)[0], threshold))


@pytest.mark.parametrize("has_run", [False, True], ids=["new", "used"])
@pytest.mark.parametrize("threshold", [0.0, 3.0])
def test_an_8_bit_layer_keeps_its_own_product_and_recovers_without_quantized_activations(has_run, threshold):
    model = loaded_in_8_bits(threshold)
    theirs, x = copy.deepcopy(model), torch.randn(2, 9, 64)
    x[..., 5] *= 8
    if has_run:
        model(x)
    dense = theirs[0].weight.CB.float() * (theirs[0].weight.SCB[:, None] * (1 / 127))
    conversion = convert(model)
    theirs[0].bias, bias = None, theirs[0].bias
    mine, (y, grad) = both(model, theirs.eval(), x)
    assert torch.equal(mine[0], y + bias)
    assert torch.equal(mine[1], grad)
    conversion.route([True])
    [(high, high_grad)] = both(model, model, x)[:1]
    assert torch.equal(high, nn.functional.linear(x, dense, bias))
    assert torch.equal(high_grad, grad)
    assert (high - y - bias).norm() > 0


def test_the_weights_error_remains_on_the_recovery_path_of_an_8_bit_layer():
    plain = frozen(True)
    model, x = nn.Sequential(int8_layer(plain[0])), torch.randn(9, 64)
    conversion = convert(model)
    low = (model(x) - plain(x)).norm()
    conversion.route([True])
    assert 0 < (model(x) - plain(x)).norm() < low


def test_an_8_bit_layer_keeps_no_input_and_no_dense_weight_on_either_path():
    model = loaded_in_8_bits()
    conversion = convert(model)
    for active in (False, True):
        conversion.route([active])
        with measure_saved_bytes(model, conversion.units) as saved:
            y = model(torch.randn(16, 64, requires_grad=True))
        assert saved.units == conversion.costs[0].low_saved_bytes == conversion.costs[0].high_saved_bytes == 0
        y.sum().backward()


def test_an_8_bit_layer_is_given_back_as_it_was_found():
    model = loaded_in_8_bits()
    holds = {k: id(v) for k, v in {**vars(model[0].weight), **vars(model[0].state)}.items()}
    before = {k: v.clone() for k, v in model.state_dict().items()}
    conversion = convert(model)
    for active in (False, True):
        conversion.route([active])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(torch.randn(4, 64, requires_grad=True)).sum().backward()
        now = model.state_dict()
        assert list(now) == list(before)
        assert all(torch.equal(now[k], before[k]) for k in now)
    assert type(pickled := copy.deepcopy(model)[0]) is bnb.nn.Linear8bitLt
    assert "_trimtab_switch" not in pickled.__dict__
    conversion.undo()
    assert type(model[0]) is bnb.nn.Linear8bitLt
    assert {k: id(v) for k, v in {**vars(model[0].weight), **vars(model[0].state)}.items()} == holds
    assert model[0].bias.dtype == torch.float32


def loaded_llama(tiny_llama, folder, **quantization):
    """A small Llama, saved and loaded as a user loads it, with adapters that do something."""
    pytest.importorskip("peft", reason="needs peft: pip install 'trimtab[lora]'")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from trimtab.experiments.lora import add_lora

    tiny_llama(num_layers=2).save_pretrained(folder)
    config = BitsAndBytesConfig(**quantization)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map="cpu")
    model = add_lora(model.train())
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(1))
    return model


def batch():
    ids = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.slow
def test_a_model_loaded_in_8_bits_is_switched_under_its_adapters_and_compiles_once(tiny_llama, tmp_path, gradients):
    model = loaded_llama(tiny_llama, tmp_path, load_in_8bit=True)
    assert isinstance(model.base_model.model.model.layers[0].mlp.up_proj.base_layer, bnb.nn.Linear8bitLt)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    gradients(model, batch())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    conversion = convert(model)
    assert len(conversion.units) == 14
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    chance, different = random.Random(0), []
    for step in range(1, 21):
        conversion.begin_step(step)
        conversion.route([chance.random() < 0.5 for _ in conversion.units])
        eager = gradients(model, batch())
        with torch._dynamo.config.patch(error_on_recompile=step > 1):
            model.zero_grad()
            compiled(**batch()).loss.backward()
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
        assert all(torch.equal(found[n], eager[n]) for n in eager)
        different.append(found)
    assert any(not torch.equal(different[0][n], different[1][n]) for n in different[0])
    assert backend.frame_count == 1
    assert sum(torch._dynamo.utils.counters["graph_break"].values()) == 0
    now = model.state_dict()
    assert list(now) == list(before)
    assert all(torch.equal(now[k], before[k]) for k in now)


def test_a_model_loaded_in_4_bits_is_refused_with_the_remedy(tiny_llama, tmp_path):
    model = loaded_llama(tiny_llama, tmp_path, load_in_4bit=True, bnb_4bit_quant_type="nf4")
    for bits in (4, 8):
        with pytest.raises(ConfigError, match=r"in 4 bits already.*same product. Load the model in bf16, and let"):
            convert(model, bits)


@pytest.mark.parametrize(
    ("make", "bits", "reason"),
    [
        (lambda: bnb.nn.Linear8bitLt(8, 8, has_fp16_weights=True), 8, "kept in 16 bits and quantized in each forward"),
        (lambda: bnb.nn.Linear8bitLt(8, 8, has_fp16_weights=False), 8, "not quantized yet, which moving the model"),
        (lambda: int8_layer(nn.Linear(8, 8)), 4, "in 8 bits already, which bits=8 can switch"),
        (lambda: nn.Linear(8, 8).double().requires_grad_(False), 8, "of torch.float64, which bitsandbytes does not"),
        (lambda: nn.Linear(8, 8), 8, "its weight is trained"),
    ],
)
def test_a_layer_that_cannot_be_switched_is_refused_with_the_reason(make, bits, reason):
    with pytest.raises(ConfigError, match=reason):
        convert(nn.Sequential(make()), bits)


def test_a_layer_that_is_converted_already_is_refused():
    model = loaded_in_8_bits()
    convert(model)
    with pytest.raises(ConfigError, match="converted it already"):
        convert(model)


def test_the_name_says_the_bits_and_the_record_has_their_settings():
    assert BitsandbytesLinear().to_dict() == {
        "name": "bnb-8bit",
        "bits": 8,
        "unit": "projection",
        "threshold": 0.0,
    }
    assert BitsandbytesLinear(4, compute_dtype=torch.bfloat16).to_dict() == {
        "name": "bnb-4bit",
        "bits": 4,
        "unit": "projection",
        "quant_type": "nf4",
        "compress_statistics": True,
        "compute_dtype": "bfloat16",
    }


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"bits": 2}, "bits=2: bitsandbytes has 4 or 8"),
        ({"unit": "model"}, "unit='model': it is one of"),
        ({"threshold": -1.0}, "threshold=-1.0: a magnitude is 0 or more"),
        ({"threshold": float("nan")}, "threshold=nan: a magnitude"),
        ({"bits": 4, "quant_type": "int4"}, "quant_type='int4': it is 'nf4' or 'fp4'"),
        ({"bits": 4, "compute_dtype": torch.int8}, "compute_dtype=torch.int8: it is torch.float16"),
        ({"bits": 4, "threshold": 6.0}, "threshold=6.0: this is a setting of 8 bits. Leave it out, or set bits=8"),
        ({"quant_type": "fp4"}, "quant_type='fp4': this is a setting of 4 bits"),
        ({"compress_statistics": False}, "compress_statistics=False: this is a setting of 4 bits"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        BitsandbytesLinear(**settings)


def test_a_missing_bitsandbytes_is_named_with_the_extra_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingExtraError, match=r"needs the package 'bitsandbytes'.* pip install 'trimtab\[bnb\]'"):
        convert(frozen())


def test_another_interface_is_refused_naming_the_versions_before_the_model_is_touched(monkeypatch):
    monkeypatch.delattr(bnb.functional, "int8_vectorwise_quant")
    model = frozen()
    with pytest.raises(MissingExtraError, match=rf"needs version 0.50 .* and {bnb.__version__} is installed"):
        convert(model)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize(("bits", "what"), [(4, "nn.Params4bit"), (8, "functional.int8_vectorwise_quant")])
def test_an_interface_that_takes_other_arguments_is_refused_before_the_model_is_touched(monkeypatch, bits, what):
    def moved(renamed, other):
        """Takes none of the arguments that are given."""

    where, _, name = what.partition(".")
    monkeypatch.setattr(getattr(bnb, where), name, moved)
    model = frozen()
    with pytest.raises(MissingExtraError, match=r"needs version 0\.50 .* is installed \(.*argument"):
        convert(model, bits)
    assert type(model[0]) is nn.Linear


def test_importing_the_path_does_not_import_bitsandbytes():
    module = importlib.import_module("trimtab.precision.bitsandbytes_linear")
    assert "bitsandbytes" not in vars(module)


def test_a_guard_steers_the_products():
    model = nn.Sequential(frozen(True)[0], nn.Tanh(), nn.Linear(32, 4))
    x = torch.randn(9, 64)
    plain = model(x)
    with trimtab.attach(model, BitsandbytesLinear(4), units=["0"]) as guard:
        low = model(x)
        guard.route(["0"])
        assert torch.equal(model(x), plain)
        assert not torch.equal(low, plain)
