"""Recovery gaps as measured: what they say of a unit, and that measuring leaves nothing behind."""

import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from trimtab import attach
from trimtab.control import Oracle, Policy, StaticHigh
from trimtab.control.theory import penalty
from trimtab.errors import ConfigError
from trimtab.precision import QuantizedGemm, SavedActivations, find_units
from trimtab.precision.recovery_gap import measure_recovery_gaps
from trimtab.testing import tiny_model
from trimtab.testing.snapshots import changes_since, snapshot_of, values_of

NAMES = [f"layers.{b}.{half}_proj" for b in range(2) for half in ("self_attn.q", "mlp.down")]


def batch_fn(model):
    def run(number):
        ids = torch.randint(0, 48, (2, 8), generator=torch.Generator().manual_seed(number))
        return model(ids).square().mean()

    return run


def converted(recipe, model=None):
    model = model or tiny_model()
    return model, recipe.convert(model, find_units(model, None, grouping=getattr(recipe, "unit", "projection")))


def gradient(model, conversion, route, number=0):
    model.zero_grad()
    conversion.route(route)
    batch_fn(model)(number).backward()
    found = [torch.cat([p.grad.flatten() for p in unit.parameters()]).double() for unit in conversion.units]
    model.zero_grad()
    return found


def test_a_gap_is_the_penalty_of_the_difference_from_the_reference():
    model, conversion = converted(SavedActivations(2, 16))
    names = [unit.name for unit in conversion.units]
    everyone = [True] * len(names)
    reference = gradient(model, conversion, everyone)
    found = measure_recovery_gaps(model, conversion, batch_fn(model), eta=0.1, L=3.0, Gamma=2.0)
    assert list(found) == names
    for index in (0, 5, len(names) - 1):
        alone = gradient(model, conversion, [i != index for i in range(len(names))])
        norm, mu = float(reference[index].norm()), float((alone[index] - reference[index]).norm())
        one = found[names[index]]
        np.testing.assert_allclose([one.gradient_norm, one.mu_low, one.v_low], [norm, mu, mu**2], rtol=1e-5)
        assert (one.mu_high, one.v_high) == (0.0, 0.0)
        np.testing.assert_allclose(one.gap, float(penalty(0.1, norm, mu, 3.0, 2.0, mu**2)), rtol=1e-5)


def test_with_the_others_low_their_errors_count_on_both_sides():
    model, conversion = converted(QuantizedGemm("e2m1", "bf16", unit="block"))
    first = conversion.units[0].name
    low, recovered = gradient(model, conversion, [False, False]), gradient(model, conversion, [True, False])
    reference = gradient(model, conversion, [True, True])
    one = measure_recovery_gaps(model, conversion, batch_fn(model), others="low")[first]
    np.testing.assert_allclose(one.mu_low, float((low[0] - reference[0]).norm()), rtol=1e-5)
    np.testing.assert_allclose(one.mu_high, float((recovered[0] - reference[0]).norm()), rtol=1e-5)
    assert one.mu_high > 0


def test_fewer_bits_have_a_larger_gap():
    found = {}
    for bits in (2, 4, 8):
        model, conversion = converted(SavedActivations(bits, 16))
        found[bits] = measure_recovery_gaps(model, conversion, batch_fn(model), num_batches=2)
    for name in found[2]:
        assert found[2][name].gap > found[4][name].gap > found[8][name].gap > 0


def test_the_noise_of_stochastic_rounding_averages_out_in_mu_and_stays_in_v():
    model, conversion = converted(SavedActivations(4, 16, rounding="stochastic"))
    one, many = (
        measure_recovery_gaps(model, conversion, batch_fn(model), units=NAMES[:1], repeats=r)[NAMES[0]] for r in (1, 32)
    )
    assert one.v_low == pytest.approx(one.mu_low**2)
    # An unbiased mean over 32 has a 32nd of the second moment in expectation; 2 for its spread over so few.
    assert many.mu_low**2 < 2 * many.v_low / 32
    assert (many.mu_high, many.v_high) == (0.0, 0.0)


def test_a_noisy_recovery_path_has_a_second_moment_of_its_own():
    model, conversion = converted(SavedActivations(4, 8, rounding="stochastic"))
    one = measure_recovery_gaps(model, conversion, batch_fn(model), units=NAMES[:1], repeats=4)[NAMES[0]]
    assert one.mu_high == 0
    assert 0 < one.v_high < one.v_low / 18  # a step of 8 bits is an 18th of one of 4, and this goes by its square


@pytest.mark.parametrize("others", ["high", "low"])
@pytest.mark.parametrize(("num_batches", "repeats"), [(1, 1), (2, 3)])
def test_it_runs_as_often_as_it_says(others, num_batches, repeats):
    model, conversion = converted(SavedActivations(4, 8))
    run, calls = batch_fn(model), []

    def counted(number):
        calls.append(number)
        return run(number)

    measure_recovery_gaps(
        model, conversion, counted, units=NAMES[:2], others=others, num_batches=num_batches, repeats=repeats
    )
    assert len(calls) == num_batches * repeats * (2 + (1 if others == "high" else 2))
    assert set(calls) == set(range(num_batches))


class Noisy(nn.Module):
    """Dropout and a running mean about a projection."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.dropout, self.norm = nn.Dropout(0.3), nn.BatchNorm1d(8)

    def forward(self, x):
        for layer in self.layers:
            x = self.dropout(self.norm(torch.tanh(layer(x))))
        return x


def test_nothing_of_the_model_is_touched():
    torch.manual_seed(0)
    model = Noisy()
    model, conversion = converted(SavedActivations(4, 16, rounding="stochastic"), model)
    x = torch.randn(16, 8)
    conversion.begin_step(3)
    conversion.route([True, False])
    model(x).square().mean().backward()
    before, values, streams = snapshot_of(model), values_of(model), (torch.get_rng_state(), random.getstate())
    gradients = {n: (id(p.grad), p.grad.clone()) for n, p in model.named_parameters()}

    found = measure_recovery_gaps(
        model, conversion, lambda i: model(x).square().mean(), step=3, active_after=[True, False], repeats=2
    )
    assert not changes_since(before, model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name]), name
    for name, parameter in model.named_parameters():
        assert id(parameter.grad) == gradients[name][0]
        assert torch.equal(parameter.grad, gradients[name][1])
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert random.getstate() == streams[1]
    assert [conversion.is_active(i) for i in range(2)] == [True, False]
    # Dropout was the same in every run: the exact path beside itself has no perturbation.
    assert all(one.mu_high == 0 and one.mu_low < one.gradient_norm for one in found.values())


def test_it_gives_everything_back_when_a_batch_fails():
    model, conversion = converted(SavedActivations(4, 8))
    values = values_of(model)

    def fails(number):
        raise RuntimeError("out of data")

    with pytest.raises(RuntimeError, match="out of data"):
        measure_recovery_gaps(model, conversion, fails)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert not any(conversion.is_active(i) for i in range(len(conversion.units)))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_training_under_a_guard_goes_on_bit_for_bit_after_it(rounding, tmp_path):
    def train(measure_at):
        model = tiny_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run, losses, sets = batch_fn(model), [], []
        recipe = SavedActivations(4, 16, rounding=rounding)
        with attach(model, recipe, policy=Policy(alpha=0.9, max_active=3), quantizer_stats=True) as guard:
            for step in range(6):
                if step == measure_at:
                    found = measure_recovery_gaps(model, guard, run, units=NAMES)
                    assert list(found) == NAMES
                optimizer.zero_grad()
                loss = run(step)
                loss.backward()
                guard.step(max_norm=1.0)
                optimizer.step()
                losses.append(loss.item())
                sets.append(guard.active)
        return losses, sets, values_of(model)

    plain, measured = train(None), train(3)
    assert plain[0] == measured[0]
    assert plain[1] == measured[1]
    assert any(plain[1])
    assert all(torch.equal(plain[2][name], measured[2][name]) for name in plain[2])


def test_the_gaps_are_a_step_of_the_oracle():
    model, conversion = converted(SavedActivations(2, 16))
    found = measure_recovery_gaps(model, conversion, batch_fn(model), units=NAMES)
    oracle = Oracle([{name: one.gap for name, one in found.items()}], max_active=1).start(NAMES)
    chosen = NAMES[int(np.argmax(oracle.update([1.0] * len(NAMES)).active))]
    assert found[chosen].gap == max(one.gap for one in found.values())


def test_what_cannot_be_meant_is_refused():
    model, conversion = converted(SavedActivations(4, 8))
    run = batch_fn(model)
    for changes, setting in (
        ({"units": ["layers.0.self_attn.q_porj"]}, "units"),
        ({"num_batches": 0}, "num_batches"),
        ({"repeats": 1.5}, "repeats"),
        ({"others": "both"}, "others"),
        ({"active_after": [True]}, "active_after"),
    ):
        with pytest.raises(ConfigError) as caught:
            measure_recovery_gaps(model, conversion, run, **changes)
        assert caught.value.setting == setting
    conversion.undo()
    with warnings.catch_warnings(), attach(model, policy=StaticHigh()) as guard:
        warnings.simplefilter("ignore")
        with pytest.raises(ConfigError, match="no two paths"):
            measure_recovery_gaps(model, guard, run)
