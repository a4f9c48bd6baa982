"""Where the noise comes from: its own generator, new for each step, micro-batch and layer, and the same every time."""

import itertools

import pytest
import torch
from torch import nn

from trimtab.precision import SavedActivations


def weight_grads(conversion, model, step, num_micro_batches=2):
    """The weight gradient of each micro-batch of one step; the same input in all of them."""
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(9))
    conversion.begin_step(step)
    grads = []
    for _ in range(num_micro_batches):
        model.zero_grad()
        model(x).sum().backward()
        grads.append(torch.cat([m.weight.grad for m in model]))
    return grads


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))


def test_every_step_micro_batch_and_seed_draws_its_own_noise(convert, model):
    draws = []
    for seed in (0, 1, 2048, 2**40):
        conversion = convert(model, rounding="stochastic", seed=seed)
        for step in (1, 2, 4097):
            draws += weight_grads(conversion, model, step, num_micro_batches=3)
        conversion.undo()
    assert [1 for a, b in itertools.combinations(draws, 2) if torch.equal(a, b)] == []


def test_two_layers_draw_different_noise_for_equal_inputs(convert, model):
    convert(model, rounding="stochastic")
    x = torch.randn(6, 32)
    model[0](x).sum().backward()
    model[1](x.clone()).sum().backward()
    assert not torch.equal(model[0].weight.grad, model[1].weight.grad)


def test_a_step_done_again_draws_the_same_noise(convert, model):
    conversion = convert(model, rounding="stochastic")
    first = weight_grads(conversion, model, 7)
    weight_grads(conversion, model, 8)
    again = weight_grads(conversion, model, 7)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_resumed_run_draws_the_noise_of_the_uninterrupted_one(convert, model):
    conversion = convert(model, rounding="stochastic")
    weight_grads(conversion, model, 1)
    uninterrupted = weight_grads(conversion, model, 2)
    state = conversion.state_dict()
    conversion.undo()
    resumed = convert(model, rounding="stochastic")
    resumed.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(weight_grads(resumed, model, 2), uninterrupted, strict=True))


def test_an_evaluation_between_two_micro_batches_changes_no_noise(convert, model):
    conversion = convert(model, rounding="stochastic")
    expected = weight_grads(conversion, model, 1)
    conversion.begin_step(1)
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(9))
    for grad in expected:
        model.eval()
        with torch.no_grad():
            model(x)
        model(x)
        model.train()
        model.zero_grad()
        model(x).sum().backward()
        assert torch.equal(torch.cat([m.weight.grad for m in model]), grad)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_the_users_random_numbers_do_not_move(convert, model, rounding):
    conversion = convert(model, rounding=rounding)
    before = torch.get_rng_state()
    weight_grads(conversion, model, 1)
    conversion.undo()
    assert torch.equal(torch.get_rng_state(), before)


def test_the_mean_over_steps_is_the_exact_weight_gradient(convert):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 1, bias=False))
    conversion = convert(model, rounding="stochastic")
    num_steps = 2000
    x = torch.randn(1, 16)
    total = torch.zeros(16, dtype=torch.float64)
    for step in range(1, num_steps + 1):
        conversion.begin_step(step)
        model.zero_grad()
        model(x).sum().backward()
        total += model[0].weight.grad[0].double()
    scale = x.abs().max().double() / 7
    fraction = (x[0].double() / scale) % 1
    sigma = scale * (fraction * (1 - fraction) / num_steps).sqrt()
    # 3 sigma for all 16 at once is 4 for the largest of them; and the float32 roundings.
    bound = 4 * sigma + scale * 2.0**-20
    assert ((total / num_steps - x[0].double()).abs() <= bound).all()


def test_rounding_to_nearest_takes_no_seed_into_account(convert, model):
    grads = []
    for seed in (0, 1):
        conversion = convert(model, seed=seed)
        grads += weight_grads(conversion, model, 1)
        conversion.undo()
    assert all(torch.equal(grads[0], g) for g in grads[1:])
    assert SavedActivations().rounding == "nearest"


class ReadTogether(nn.Module):
    """Three layers that read one tensor, and so keep one copy of it in each width."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        return self.q(x) + self.k(x) + self.v(x)


def errors_of(conversion, model, active):
    """The channel error of each unit in two micro-batches of the first step."""
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(9), requires_grad=True)
    conversion.begin_step(1)
    conversion.route(active)
    found = []
    for _ in range(2):
        model(x).sum().backward()
        found.append(conversion.take_quantizer_stats()[:, 0])
    return torch.stack(found, 1)


def test_a_unit_on_the_recovery_path_is_judged_with_the_noise_that_its_low_width_copy_would_have(convert):
    torch.manual_seed(0)
    model = ReadTogether()
    conversion = convert(model, rounding="stochastic")
    conversion.observe_quantizers(shadow=True)
    low = errors_of(conversion, model, [False] * 3)
    assert low[0, 0] != low[0, 1]  # each micro-batch has noise of its own
    assert (low == low[0]).all()  # and the three have one copy
    # All on the recovery path, or only those that would read the copy that the first has made.
    for active in ([True] * 3, [False, True, True], [False, False, True]):
        assert torch.equal(errors_of(conversion, model, active), low)
    # Where the first makes none, the second makes the copy, with noise of its own; the third would read that.
    without = errors_of(conversion, model, [True, False, True])
    assert torch.equal(without[0], low[0])
    assert not torch.equal(without[1], low[1])
    assert torch.equal(without[2], without[1])
    # What to nearest errs by is less: two thirds, as the mean squares 1/12 and 1/6 of a step say.
    conversion.undo()
    conversion = convert(model)
    conversion.observe_quantizers(shadow=True)
    nearest = errors_of(conversion, model, [True] * 3)
    assert 0.6 < (nearest / low).mean() < 0.8
