"""A converted layer against the plain one: only the weight gradient may differ, and it is exactly what it should be."""

import contextlib
import copy

import pytest
import torch
from torch import nn

from trimtab.precision import SavedActivations
from trimtab.precision.stored_copy import decode, encode

ROWS, LEADING = 5, 3

# Each makes an input whose last size is d. The names say what is odd about it.
LAYOUTS = {
    "1-D": lambda d: torch.randn(d),
    "2-D": lambda d: torch.randn(ROWS, d),
    "2-D of one row": lambda d: torch.randn(1, d),
    "2-D column major": lambda d: torch.randn(d, ROWS).t(),
    "2-D slice of column major": lambda d: torch.randn(d, ROWS + 2).t()[:ROWS],
    "2-D every second": lambda d: torch.randn(2 * ROWS, 2 * d)[::2, ::2],
    "2-D slice": lambda d: torch.randn(ROWS, d + 3)[:, :d],
    "2-D expanded": lambda d: torch.randn(1, d).expand(ROWS, d),
    "2-D empty": lambda d: torch.randn(0, d),
    "3-D": lambda d: torch.randn(LEADING, ROWS, d),
    "3-D transposed": lambda d: torch.randn(LEADING, d, ROWS).transpose(1, 2),
    "3-D batch last": lambda d: torch.randn(ROWS, LEADING, d).transpose(0, 1),
    "3-D column major": lambda d: torch.randn(d, LEADING, ROWS).permute(1, 2, 0),
    "3-D reversed": lambda d: torch.randn(d, ROWS, LEADING).permute(2, 1, 0),
    "3-D batch of one, column major": lambda d: torch.randn(1, d, ROWS).transpose(1, 2),
    "3-D expanded": lambda d: torch.randn(1, ROWS, d).expand(LEADING, ROWS, d),
    "3-D expanded inside": lambda d: torch.randn(LEADING, 1, d).expand(LEADING, ROWS, d),
    "3-D slice": lambda d: torch.randn(LEADING, ROWS, d + 3)[..., :d],
    "3-D empty": lambda d: torch.randn(0, ROWS, d),
    "4-D": lambda d: torch.randn(2, LEADING, ROWS, d),
    "4-D heads": lambda d: torch.randn(2, ROWS, LEADING, d).transpose(1, 2),
    "4-D column major": lambda d: torch.randn(1, 1, d, ROWS).transpose(2, 3),
}
PRECISIONS = {
    "float32": (torch.float32, False),
    "bfloat16": (torch.bfloat16, False),
    "float16": (torch.float16, False),
    "float64": (torch.float64, False),
    "autocast": (torch.float32, True),
    "autocast of bfloat16": (torch.bfloat16, True),
}
INCOMING = {
    "random": torch.randn,
    "expanded": lambda *shape: torch.ones(()).expand(shape),
    "transposed": lambda *shape: torch.randn(*shape[::-1]).permute(*reversed(range(len(shape)))),
}


def conv1d(d, out):
    from transformers.pytorch_utils import Conv1D

    layer = Conv1D(out, d)
    nn.init.normal_(layer.bias)
    return layer


def run(model, x, incoming, autocast=False):
    """Output, and the gradients of input, weight and bias."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        y = model(x)
    torch.manual_seed(1)
    y.backward(incoming(*y.shape).to(y.dtype))
    bias = getattr(model[0], "bias", None)
    return y.detach(), x.grad, model[0].weight.grad, None if bias is None else bias.grad


def assert_same_bits(one, other):
    if one is None:
        assert other is None
        return
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    assert torch.equal(one, other)


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_output_input_gradient_and_bias_gradient_are_those_of_the_plain_layer_bit_for_bit(
    pair, layout, precision, bias
):
    dtype, autocast = PRECISIONS[precision]
    for d, out in ((1, 7), (7, 1), (48, 33), (127, 64)):
        torch.manual_seed(d)
        plain, converted, _ = pair(nn.Sequential(nn.Linear(d, out, bias=bias)).to(dtype))
        x = LAYOUTS[layout](d).to(dtype)
        for incoming in INCOMING.values():
            expected, got = (run(m, x, incoming, autocast) for m in (plain, converted))
            for i in (0, 1, 3):
                assert_same_bits(expected[i], got[i])


# The plain layer views its input as rows, which these layouts do not allow.
NO_ROWS = ("3-D transposed", "3-D batch last", "3-D expanded", "3-D expanded inside", "3-D reversed", "4-D heads")


@pytest.mark.parametrize("layout", [n for n in LAYOUTS if n not in NO_ROWS])
@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_the_transposed_layer_of_gpt2_keeps_its_bits_too(pair, layout, precision):
    dtype, autocast = PRECISIONS[precision]
    d, out = 48, 33
    torch.manual_seed(d)
    plain, converted, conversion = pair(nn.Sequential(conv1d(d, out)).to(dtype))
    x = LAYOUTS[layout](d).to(dtype)
    expected, got = (run(m, x, torch.randn, autocast) for m in (plain, converted))
    for i in (0, 1, 3):
        assert_same_bits(expected[i], got[i])
    assert conversion.input_size(0) == d


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_with_16_bits_the_weight_gradient_is_the_plain_one_too(pair, layout, precision):
    dtype, autocast = PRECISIONS[precision]
    plain, converted, _ = pair(nn.Sequential(nn.Linear(48, 33)).to(dtype), 16, 16)
    x = LAYOUTS[layout](48).to(dtype)
    for expected, got in zip(*(run(m, x, torch.randn, autocast) for m in (plain, converted)), strict=True):
        assert_same_bits(expected, got)


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize("active", [False, True], ids=["low-cost path", "recovery path"])
@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
def test_the_weight_gradient_is_the_product_with_the_decoded_copy(convert, layout, precision, active, kind):
    dtype, autocast = PRECISIONS[precision]
    x = LAYOUTS[layout](48).to(dtype)
    if kind == "Conv1D":
        x = x.contiguous()
    model = nn.Sequential(nn.Linear(48, 33) if kind == "Linear" else conv1d(48, 33)).to(dtype)
    convert(model, 2, 8).route([active])
    y, _, weight_grad, _ = run(model, x, torch.randn, autocast)
    cast = x.to(torch.bfloat16) if autocast else x
    copy_of_x = decode(*encode(cast, 8 if active else 2), bits=8 if active else 2, size=48, dtype=cast.dtype)
    torch.manual_seed(1)
    grad = torch.randn(y.shape).to(y.dtype).reshape(-1, 33)
    rows = copy_of_x.reshape(-1, 48)
    expected = grad.t().mm(rows) if kind == "Linear" else rows.t().mm(grad)
    assert_same_bits(expected.to(dtype), weight_grad)


def test_the_weight_gradient_really_is_quantized(pair):
    plain, converted, _ = pair(nn.Sequential(nn.Linear(48, 33)))
    x = torch.randn(ROWS, 48)
    assert not torch.equal(run(plain, x, torch.randn)[2], run(converted, x, torch.randn)[2])


@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8)], ids=["2-D", "3-D"])
def test_an_output_may_be_modified_in_place(pair, kind, shape):
    layer = nn.Linear(8, 8) if kind == "Linear" else conv1d(8, 8)
    plain, converted, _ = pair(nn.Sequential(layer, nn.ReLU(inplace=True)))
    x = torch.randn(shape)
    for expected, got in zip(*(run(m, x, torch.randn) for m in (plain, converted)), strict=True):
        if got is not None and got.shape != layer.weight.shape:
            assert_same_bits(expected, got)
    y = converted[0](x)
    y.mul_(2)
    y[0] = 0
    y.sum().backward()


def test_a_layer_takes_its_input_by_the_name_it_has_in_the_plain_layer(convert):
    model = nn.Sequential(nn.Linear(8, 8), conv1d(8, 8))
    convert(model)
    x = torch.randn(2, 8)
    assert torch.equal(model[0](input=x), model[0](x))
    assert torch.equal(model[1](x=x), model[1](x))
    with pytest.raises(TypeError):
        model[0](x=x)


def test_a_frozen_weight_runs_the_plain_layer_and_keeps_no_copy(pair, kept):
    plain, converted, _ = pair(nn.Sequential(nn.Linear(8, 8)))
    for model in (plain, converted):
        model[0].weight.requires_grad_(False)
    x = torch.randn(3, 8)
    assert kept(lambda: converted(x)) == []
    for expected, got in zip(*(run(m, x, torch.randn) for m in (plain, converted)), strict=True):
        assert_same_bits(expected, got)


def test_a_frozen_bias_and_an_input_without_gradient_get_none(convert):
    model = nn.Sequential(nn.Linear(8, 8))
    convert(model)
    model[0].bias.requires_grad_(False)
    x = torch.randn(3, 8)
    model(x).sum().backward()
    assert model[0].weight.grad is not None
    assert model[0].bias.grad is None
    assert x.grad is None


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("training", [True, False])
def test_without_gradients_the_plain_layer_runs_and_nothing_is_kept(pair, blocks, kept, monkeypatch, context, training):
    plain, converted, conversion = pair(blocks())
    monkeypatch.setattr(conversion, "store", None)  # would fail if it were called
    converted.train(training)
    x = torch.randn(3, 8)
    with context():
        assert torch.equal(plain(x), converted(x))
        assert kept(lambda: converted(x)) == []


def test_evaluation_with_gradients_gives_the_plain_output(pair, blocks):
    plain, converted, _ = pair(blocks())
    x = torch.randn(3, 8)
    assert torch.equal(plain.eval()(x), converted.eval()(x))


def test_a_tensor_of_inference_mode_is_not_copied(convert, kept):
    model = nn.Sequential(nn.Linear(8, 8))
    convert(model)
    with torch.inference_mode():
        x = torch.randn(3, 8)
    with torch.no_grad():
        assert model(x).shape == (3, 8)


@pytest.mark.parametrize("make", ["tiny_llama", "tiny_gpt2"])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_transformer_keeps_its_loss_and_every_gradient_but_those_of_the_projections(
    request, pair, gradients, make, autocast
):
    plain, converted, conversion = pair(request.getfixturevalue(make)())
    ids = torch.randint(0, 50, (2, 9))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        losses = [m(input_ids=ids, labels=ids).loss.item() for m in (plain, converted)]
        expected, got = (gradients(m, {"input_ids": ids, "labels": ids}) for m in (plain, converted))
    assert losses[0] == losses[1]
    weights = {f"{u.name}.weight" for u in conversion.units}
    assert expected.keys() == got.keys()
    assert {n for n in expected if not torch.equal(expected[n], got[n])} == weights


def test_a_converted_layer_trains_where_it_is_moved_to_another_dtype(convert):
    model = nn.Sequential(nn.Linear(8, 8))
    convert(model)
    model.to(torch.bfloat16)
    model(torch.randn(3, 8, dtype=torch.bfloat16)).sum().backward()
    assert model[0].weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_nan_in_the_input_is_visible_in_the_weight_gradient(convert, bits):
    model = nn.Sequential(nn.Linear(8, 8))
    convert(model, bits, 8)
    x = torch.randn(3, 8)
    x[1, 2] = float("inf")
    model(x)[[0, 2]].sum().backward()  # its row gets no gradient: 0 * NaN is NaN all the same
    assert torch.isnan(model[0].weight.grad).all()


def test_each_bad_setting_is_refused_by_its_name():
    for settings, setting in [
        ({"low_bits": 3}, "low_bits"),
        ({"low_bits": 4.0}, "low_bits"),
        ({"low_bits": True}, "low_bits"),
        ({"low_bits": "4"}, "low_bits"),
        ({"high_bits": 32}, "high_bits"),
        ({"low_bits": 8, "high_bits": 4}, "high_bits"),
        ({"rounding": "up"}, "rounding"),
        ({"seed": -1}, "seed"),
        ({"seed": 0.5}, "seed"),
    ]:
        with pytest.raises(ValueError, match=f"^{setting}=") as caught:
            SavedActivations(**settings)
        assert caught.value.allowed
        assert caught.value.remedy


def test_a_copy_of_the_settings_is_the_settings():
    recipe = SavedActivations(2, 16, rounding="stochastic", seed=3)
    settings = copy.deepcopy(recipe).to_dict()
    assert settings.pop("name") == "saved-activations"
    assert SavedActivations(**settings) == recipe
