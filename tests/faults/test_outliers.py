"""Outlier channels: what a unit's quantizers see, what reaches its gradients, what its channel error says of it."""

import pytest
import torch
from torch import nn

import trimtab
from trimtab.control import Policy
from trimtab.errors import ConfigError
from trimtab.faults import OutlierChannels, OutlierFaults, random_outliers
from trimtab.formats import channel_error, fake_quantize, get, per_tile
from trimtab.precision import Int8Base, QuantizedGemm, SavedActivations, find_units
from trimtab.precision.outlier_channels import ChannelFactors
from trimtab.testing.compile_claims import compiled
from trimtab.testing.models import adapted_tiny_model, tiny_model

LOW = Policy(alpha=1e6, beta=1e6, max_active=0)
WIDTH, OUTPUTS, TOKENS = 160, 24, 40
FACTORS = (200.0, 1000.0)
by_factor = pytest.mark.parametrize("factor", FACTORS)


def burst(**changes):
    return OutlierChannels(**({"unit": "0", "start_step": 1, "num_steps": 3, "factor": 300.0} | changes))


def layer(dtype=torch.float32, frozen=False):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, OUTPUTS)).to(dtype).requires_grad_(not frozen)


def operands(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    return x, torch.randn(TOKENS, OUTPUTS, generator=generator).to(dtype)


def run(model, x, grad):
    """The output, and the gradients of input, weight and bias."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = model(x)
    y.backward(grad)
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def factors_of(fault, size=WIDTH, dtype=torch.float32):
    s = torch.ones(size, dtype=dtype)
    s[fault.channels(size)] = fault.factor
    return s


def assert_equal(got, expected):
    for one, other in zip(got, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@pytest.mark.parametrize("active", [False, True])
@pytest.mark.parametrize(
    "recipe",
    [
        QuantizedGemm("e2m3", "fp8"),
        QuantizedGemm("e3m2", "fp8", scaling="token"),
        QuantizedGemm("e2m1", "fp8", scale_kind="e8m0"),
        Int8Base(),
        Int8Base(cache_weights=False),
    ],
)
def test_it_is_a_layer_of_shrunken_weights_that_is_fed_enlarged_inputs(recipe, active):
    """The slow truth: a module that holds W / s, and is given x * s."""
    frozen = isinstance(recipe, Int8Base)
    fault, (x, grad) = burst(), operands()
    s = factors_of(fault)
    explicit = layer(frozen=frozen)
    explicit[0].weight.data = explicit[0].weight.data / s
    if frozen and active:  # unquantized: there is nothing to suffer
        explicit, s = layer(frozen=True), torch.ones(WIDTH)
    with torch.no_grad():
        enlarged = x * s
    conversion = recipe.convert(explicit, find_units(explicit))
    conversion.route([active])
    y, grad_x, *others = run(explicit, enlarged, grad)
    expected = [y, grad_x * s, *((others[0] / s, others[1]) if not frozen else others)]

    model = layer(frozen=frozen)
    with trimtab.attach(model, recipe, policy=Policy(max_active=1)) as guard:
        clean = run(model, x, grad)
        guard.inject(OutlierFaults([fault]))
        guard.route(["0"] if active else [])
        got = run(model, x, grad)
    if frozen:
        # There W / s is quantized and multiplied by s before the product with dY; here after it.
        torch.testing.assert_close(got[1], expected[1], rtol=1e-5, atol=1e-5)
        got[1] = expected[1]
    assert_equal(got, expected)
    assert (frozen and active) or not torch.equal(got[0], clean[0])


@by_factor
def test_an_unquantized_recovery_path_is_the_plain_layer(factor):
    x, grad = operands()
    expected = run(layer(), x, grad)
    model = layer()
    with trimtab.attach(model, QuantizedGemm("e2m3", "bf16"), policy=Policy(max_active=1)) as guard:
        guard.inject(OutlierFaults([burst(factor=factor)]))
        guard.route(["0"])
        assert_equal(run(model, x, grad), expected)


@by_factor
def test_the_low_path_suffers_and_fp8_suffers_less(factor):
    x, grad = operands()
    plain = run(layer(), x, grad)
    model = layer()
    with trimtab.attach(model, QuantizedGemm("e2m3", "fp8"), policy=Policy(max_active=1)) as guard:

        def losses():
            return [float((a - b).norm() / b.norm()) for a, b in zip(run(model, x, grad), plain, strict=True)][:3]

        clean = losses()
        guard.inject(OutlierFaults([burst(factor=factor)]))
        low = losses()
        guard.route(["0"])
        high = losses()
    # Output, input gradient and weight gradient.
    assert all(a > 3 * b for a, b in zip(low, clean, strict=True))
    assert all(a < b / 2 for a, b in zip(high, low, strict=True))


@by_factor
def test_nothing_but_the_grids_changes_the_function(factor):
    """Without grids, in float64, function and gradients are the plain layer's up to its rounding."""
    x, grad = operands(torch.float64)
    plain = run(layer(torch.float64), x, grad)
    fault = burst(factor=factor)
    factors = ChannelFactors(fault.channels, factor)
    weight = layer(torch.float64)[0].weight
    enlarged, reduced = factors.enlarged(x), factors.reduced(weight)
    bias = layer(torch.float64)[0].bias
    found = [enlarged @ reduced.t() + bias, factors.enlarged(grad @ reduced), factors.reduced(grad.t() @ enlarged)]
    for one, other in zip(found, plain[:3], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def errors_of(guard, model, x, grad):
    model.zero_grad()
    model(x).backward(grad)
    guard.step()
    return guard.metrics()["trimtab/quantizer/error_max"]


@pytest.mark.filterwarnings("ignore:guard.step was called twice")
@pytest.mark.parametrize(
    ("recipe", "limit", "factor"),
    [
        (QuantizedGemm("e2m3", "bf16"), 0.3, 200.0),
        (QuantizedGemm("e2m3", "fp8"), 0.3, 1000.0),
        (QuantizedGemm("e3m2"), 0.3, 1000.0),  # at 200 it has codes left for the others, and loses .22
        (Int8Base(), 0.4, 200.0),
        (Int8Base(), 0.4, 1000.0),
    ],
)
def test_the_channel_error_shows_it_on_both_paths_and_only_while_it_lasts(recipe, limit, factor):
    model = layer(frozen=isinstance(recipe, Int8Base))
    if isinstance(recipe, Int8Base):
        model = adapted_tiny_model(hidden_size=WIDTH)
        x, grad, unit = torch.arange(40).reshape(2, 20) % 48, torch.ones(2, 20, 48), None
    else:
        (x, grad), unit = operands(), "0"
    policy = Policy(alpha=1e6, beta=1e6, error_limit=limit, max_active=1.0, lock_steps=0)
    with trimtab.attach(model, recipe, policy=policy) as guard:
        unit = unit or guard.units[0]
        guard.inject(OutlierFaults([burst(unit=unit, start_step=3, num_steps=4, factor=factor)]))
        errors, active = [], []
        for _ in range(8):
            errors.append(errors_of(guard, model, x, grad))
            active.append(unit in guard.active)
    assert max(errors[:2] + errors[6:]) < 0.2
    assert min(errors[2:6]) > limit
    # From the decision of its third step on the unit is on the recovery path, and still judged by the low-cost one.
    assert active == [False, False, True, True, True, True, False, False]


def test_the_plain_relative_error_falls_and_must_not_be_judged_by():
    x, _ = operands()
    fault, e2m3 = burst(factor=500.0), get("e2m3")
    found = {}
    for name, seen in (("clean", x.detach()), ("outliers", x.detach() * factors_of(fault))):
        q = fake_quantize(seen, e2m3, per_tile())
        found[name] = float((seen - q).norm() / seen.norm()), float(channel_error(seen, q))
    assert found["outliers"][0] < found["clean"][0]
    assert found["outliers"][1] > 10 * found["clean"][1]


def test_it_holds_in_its_steps_on_its_unit_and_leaves_the_others_bit_for_bit():
    model = tiny_model(hidden_size=64)
    ids = torch.arange(24).reshape(2, 12) % 48

    def grads():
        model.zero_grad()
        model(ids).square().mean().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters()}

    with trimtab.attach(model, QuantizedGemm("e2m3"), policy=LOW) as guard:
        unit = guard.units[-1]
        clean, found = grads(), []
        guard.inject(OutlierFaults([burst(unit=unit, start_step=2, num_steps=2)]))
        for _ in range(4):
            found.append({n for n, g in grads().items() if not torch.equal(g, clean[n])})
            guard.step()
            model.zero_grad()
        guard.inject(faults := OutlierFaults([burst(unit=unit, start_step=5, num_steps=9)]))
        assert not torch.equal(grads()[f"{unit}.weight"], clean[f"{unit}.weight"])
        faults.end()
        assert all(torch.equal(g, clean[n]) for n, g in grads().items())
    assert found[0] == found[3] == set()
    assert f"{unit}.weight" in found[1] == found[2]


def test_a_unit_of_layers_of_several_widths_suffers_in_each():
    model = tiny_model(hidden_size=32, intermediate_size=96)
    ids = torch.arange(24).reshape(2, 12) % 48
    with trimtab.attach(model, QuantizedGemm("e2m3", unit="block"), policy=LOW, quantizer_stats=True) as guard:
        fault = burst(unit=guard.units[0], num_channels=40)
        guard.inject(OutlierFaults([fault]))
        model(ids).square().mean().backward()
        guard.step()
        assert guard.metrics()["trimtab/quantizer/error_max"] > 0.3
    assert fault.channels(32) == list(range(32))
    assert max(fault.channels(96)) >= 32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_it_keeps_the_dtype_of_the_layer(dtype):
    x, grad = operands(dtype)
    model = layer(dtype)
    with trimtab.attach(model, QuantizedGemm("e2m3", "fp8"), policy=LOW) as guard:
        guard.inject(OutlierFaults([burst()]))
        assert {t.dtype for t in run(model, x, grad)} == {dtype}


@pytest.mark.parametrize("recipe", [QuantizedGemm("e2m3", "fp8"), QuantizedGemm("e2m3", "bf16"), Int8Base()])
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*instantiated")
@pytest.mark.slow
def test_a_compiled_model_suffers_it_too_and_its_start_and_end_compile_nothing_anew(recipe):
    model = adapted_tiny_model() if isinstance(recipe, Int8Base) else tiny_model()
    units = find_units(model)
    conversion = recipe.convert(model, units)
    faults = OutlierFaults([burst(unit=conversion.units[0].name, start_step=2, num_steps=2)])
    ids = torch.arange(24).reshape(2, 12) % 48
    found = []
    with compiled(model) as (fast, counter):
        for step in range(1, 6):
            both = []
            for one in (fast, model):
                conversion.begin_step(step)
                list(faults.begin_step(step, conversion))
                conversion.route([step == 3] * len(conversion.units))
                model.zero_grad()
                one(ids).square().mean().backward()
                both.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            assert_equal(*both)
            found.append(both[0])
        assert counter.frame_count == 1
    conversion.undo()
    same = [all(torch.equal(a, b) for a, b in zip(found[0], grads, strict=True)) for grads in found]
    assert same == [True, False, False, True, True]


def test_each_burst_lands_in_the_record_with_all_that_it_takes_to_repeat_it(tmp_path):
    from trimtab.trace import open_run

    model, (x, grad) = layer(), operands()
    with trimtab.attach(model, QuantizedGemm(), record=tmp_path) as guard:
        guard.inject(OutlierFaults([burst(start_step=1, seed=4)]))
        run(model, x, grad)
        guard.step()
    with open_run(tmp_path) as record:
        (event,) = record.events("fault")
    assert (event.step, event.place, event.data.pop("fault")) == (1, "0", "outlier channels")
    assert OutlierChannels(**event.data) == burst(start_step=1, seed=4)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("start_step", 0),
        ("num_steps", 0),
        ("num_channels", 0),
        ("seed", -1),
        ("factor", 0.0),
        ("factor", -3.0),
        ("factor", float("nan")),
        ("factor", 1e300),
        ("factor", "50"),
    ],
)
def test_a_burst_that_cannot_be_meant_is_refused(setting, value):
    with pytest.raises(ConfigError) as caught:
        burst(**{setting: value})
    assert str(caught.value).startswith(f"{setting}={value!r}: ")
    assert caught.value.allowed
    assert caught.value.remedy


def test_a_recipe_that_cannot_suffer_it_is_refused_with_those_that_can():
    model = layer()
    for recipe in (None, SavedActivations()):
        with (
            trimtab.attach(model, recipe) as guard,
            pytest.raises(ConfigError, match=r'"quantized-gemm" and "int8-base".*Attach QuantizedGemm'),
        ):
            guard.inject(OutlierFaults([burst()]))
    with (
        trimtab.attach(model, QuantizedGemm()) as guard,
        pytest.raises(ConfigError, match=r"^unit='1': no converted unit has that name\. Nearest: 0"),
    ):
        guard.inject(OutlierFaults([burst(unit="1")]))


def test_random_outliers_are_those_of_the_seed_and_within_the_ranges():
    settings = {"num_bursts": 40, "first_step": 3, "last_step": 9, "num_steps": (2, 4)}
    bursts = random_outliers(["a", "b"], seed=4, **settings)
    assert bursts == random_outliers(["a", "b"], seed=4, **settings)
    assert bursts != random_outliers(["a", "b"], seed=5, **settings)
    assert {b.start_step for b in bursts} == set(range(3, 10))
    assert all(isinstance(b, OutlierChannels) and 200 <= b.factor <= 1000 for b in bursts)
    with pytest.raises(ConfigError, match=r"^units="):
        random_outliers([])


def test_of_stacked_experts_only_the_named_one_suffers_it():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
        )
    )
    experts, name = model.model.layers[0].mlp.experts, "model.layers.0.mlp.experts.2"
    hidden, chosen, shares = torch.randn(40, 32), torch.arange(40).reshape(40, 1) % 4, torch.ones(40, 1)

    def run_experts():
        experts.zero_grad()
        y = experts(hidden, chosen, shares)
        y.square().sum().backward()
        return y.detach(), experts.gate_up_proj.grad.clone()

    with trimtab.attach(model, QuantizedGemm("e2m3"), policy=LOW, quantizer_stats=True) as guard:
        clean = run_experts()
        guard.inject(OutlierFaults([burst(unit=name, num_channels=4)]))
        guard.conversion.take_quantizer_stats()
        faulty = run_experts()
        errors = dict(zip(guard.units, guard.conversion.take_quantizer_stats()[:, 0].tolist(), strict=True))
    others = torch.arange(40) % 4 != 2
    assert torch.equal(faulty[0][others], clean[0][others])
    assert not torch.equal(faulty[0][~others], clean[0][~others])
    assert [torch.equal(faulty[1][e], clean[1][e]) for e in range(4)] == [True, True, False, True]
    assert {unit for unit, error in errors.items() if error > 0.3} == {name}
