"""Optimizers that step inside backward and leave no gradient: watched by what comes before them, or else noticed."""

import gc
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import trimtab
from trimtab.control import Policy, robust
from trimtab.errors import ConfigError, TrimtabWarning
from trimtab.monitors.backward_norms import BackwardNorms
from trimtab.precision import SavedActivations
from trimtab.trace import open_run, replay

# Nervous enough to switch units in a few healthy steps.
NERVOUS = Policy(alpha=1.02, beta=1.02, window_steps=2, max_active=2, lock_steps=1)
LR, NUM_STEPS = 5e-2, 8


class Tied(nn.Module):
    """A model with a weight that is used twice, and a layer that some steps leave out."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(3))
        self.layers[1][2].to(dtype)
        self.layers[2][0].weight = self.layers[0][0].weight
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        for index, (inner, act, outer) in enumerate(self.layers):
            if index != 1 or self.num_calls % 3:
                x = x + outer(act(inner(x)).to(outer.weight.dtype)).to(x.dtype)
        return x


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 6, generator=generator) * (4 if step == 5 else 1) for step in range(NUM_STEPS)]


def step_in_backward(model):
    """As torchtune and LOMO do: each parameter has an optimizer of its own, which frees the gradient."""
    optimizers = {p: torch.optim.SGD([p], lr=LR) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    return [parameter.register_post_accumulate_grad_hook(step) for parameter in model.parameters()]


def ordinary_loop(folder, model, recipe=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with trimtab.attach(model, recipe, policy=NERVOUS, record=folder) as guard:
        for batch in batches():
            loss = model(batch).square().mean()
            loss.backward()
            guard.observe(loss=loss)
            guard.step()
            optimizer.step()
            optimizer.zero_grad()


def loop_in_backward(folder, model, recipe=None, attach_first=False):
    if not attach_first:
        step_in_backward(model)
    with trimtab.attach(model, recipe, policy=NERVOUS, record=folder, optimizer_in_backward=True) as guard:
        if attach_first:
            step_in_backward(model)
        for batch in batches():
            loss = model(batch).square().mean()
            loss.backward()
            assert all(p.grad is None for p in model.parameters())
            guard.observe(loss=loss)
            guard.step()


@pytest.mark.parametrize("attach_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("recipe", [None, SavedActivations()], ids=["watched", "recovered"])
def test_norms_decisions_and_weights_are_those_of_an_ordinary_loop_to_the_last_bit(
    recipe, dtype, attach_first, tmp_path
):
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Tied(dtype))
    ordinary_loop(tmp_path / "ordinary", models[0], recipe)
    loop_in_backward(tmp_path / "inside", models[1], recipe, attach_first)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)
    with open_run(tmp_path / "ordinary") as one, open_run(tmp_path / "inside") as other:
        expected, found = one.steps(), other.steps()
        assert other.finished
        assert [e.data for e in other.events("warning")] == []
        assert replay(other).num_different == 0
    assert found.units == expected.units
    assert expected.active.any() == (recipe is not None)
    assert (expected.norms == 0).any()  # of the layer that was left out
    for name in ("step", "norms", "gnmr", "delta", "risk", "active", "lock", "reason", "grad_norm", "lr", "loss"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)


def test_experts_of_stacked_parameters_have_the_norms_of_an_ordinary_loop(tmp_path):
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(0, 32, (2, 6), generator=torch.Generator().manual_seed(0))
    config = transformers.MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=8,
        use_cache=False,
    )
    for inside in (False, True):
        torch.manual_seed(0)
        model = transformers.MixtralForCausalLM(config).train()
        if inside:
            step_in_backward(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        folder = tmp_path / str(inside)
        with trimtab.attach(model, policy=NERVOUS, record=folder, optimizer_in_backward=inside) as guard:
            for _ in range(3):
                model(input_ids=ids, labels=ids).loss.backward()
                guard.step()
                if not inside:
                    optimizer.step()
                    optimizer.zero_grad()
    with open_run(tmp_path / "False") as one, open_run(tmp_path / "True") as other:
        expected, found = one.steps(), other.steps()
    assert sum("expert" in name for name in expected.units) >= 8
    np.testing.assert_array_equal(found.norms, expected.norms)
    np.testing.assert_array_equal(found.grad_norm, expected.grad_norm)


@pytest.mark.parametrize(
    ("setting", "settings", "reason"),
    [
        ("damping", {"policy": robust(damping=True)}, "before the guard decides"),
        ("max_norm", {"max_norm": 1.0}, "before the total norm is known"),
        ("scaler", {"scaler": torch.amp.GradScaler("cpu")}, "no such moment"),
    ],
)
def test_what_needs_all_gradients_at_once_is_refused_with_the_reason(setting, settings, reason):
    model = Tied()
    policy = settings.pop("policy", None)
    with (
        pytest.raises(ConfigError, match=reason) as caught,
        trimtab.attach(model, policy=policy, optimizer_in_backward=True) as guard,
    ):
        guard.step(**settings)
    assert str(caught.value).startswith(f"{setting}=")
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    trimtab.attach(model).detach()


def test_a_scaler_that_is_off_and_no_clipping_are_nothing_to_refuse():
    model = Tied()
    step_in_backward(model)
    with trimtab.attach(model, optimizer_in_backward=True) as guard:
        model(batches()[0]).sum().backward()
        assert float(guard.step(max_norm=None, scaler=torch.amp.GradScaler("cpu", enabled=False)).grad_norm) > 0


def test_our_hooks_run_before_those_that_are_there_and_leave_them_as_they_were():
    parameter = nn.Parameter(torch.ones(2))
    module = nn.Module()
    module.weight = parameter
    order = []
    handles = [parameter.register_post_accumulate_grad_hook(lambda p, i=i: order.append((i, p.grad))) for i in (1, 2)]
    norms = BackwardNorms(module, [])
    inner = norms._take
    norms._take = lambda *given: (order.append((0, None)), inner(*given))
    handles.append(parameter.register_post_accumulate_grad_hook(lambda p: order.append((3, p.grad))))
    (3 * parameter).sum().backward()
    assert [number for number, _ in order] == [0, 1, 2, 3]
    assert norms.read().norms.item() == pytest.approx(18**0.5)
    handles[0].remove()
    norms.stop()
    order.clear()
    parameter.sum().backward()
    assert [number for number, _ in order] == [2, 3]
    assert norms.read().indices == []


def test_a_guard_that_is_gone_leaves_no_hook_behind():
    model = nn.Sequential(nn.Linear(2, 2))
    handles = step_in_backward(model)
    before = [list(p._post_accumulate_grad_hooks.values()) for p in model.parameters()]
    with pytest.raises(ConfigError):
        trimtab.attach(model, SavedActivations(), units=["nowhere"], optimizer_in_backward=True)
    norms = BackwardNorms(model, [])
    assert len(model[0].weight._post_accumulate_grad_hooks) == 2
    del norms
    gc.collect()
    trimtab.attach(model, optimizer_in_backward=True).detach()
    assert [list(p._post_accumulate_grad_hooks.values()) for p in model.parameters()] == before
    for handle in handles:
        handle.remove()
    assert not model[0].weight._post_accumulate_grad_hooks


def test_a_parameter_that_is_replaced_or_trained_only_later_is_watched_too():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    norms = BackwardNorms(model, [])
    x = torch.ones(1, 2)

    def indices():
        model(x).sum().backward()
        return norms.read().indices

    assert indices() == [2, 3]
    model[0].requires_grad_(True)
    indices()  # here it is seen that more is trained
    assert indices() == [0, 1, 2, 3]
    model[1].weight = nn.Parameter(torch.ones(2, 2))
    norms.refresh()  # as the guard asks at each step
    assert indices() == [0, 1, 2, 3]


def said_by(loop):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop()
    return [str(w.message) for w in caught if w.category is TrimtabWarning]


def train(policy=None, max_norm=None, record=None, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    step_in_backward(model)
    with trimtab.attach(model, SavedActivations(), policy=policy, record=record, **settings) as guard:
        for _ in range(4):
            model(torch.ones(2, 4)).square().sum().backward()
            guard.step(max_norm=max_norm)


@pytest.mark.parametrize(
    ("policy", "max_norm", "is_lost"),
    [(Policy(), None, False), (Policy(), 1.0, True), (robust(damping=True), None, True)],
    ids=["watching", "clipping", "damping"],
)
def test_untold_that_there_is_no_gradient_is_said_once_with_the_remedy(policy, max_norm, is_lost):
    (said,) = said_by(lambda: train(policy, max_norm))
    assert "steps inside backward leaves none to read" in said
    assert "Attach with optimizer_in_backward=True" in said
    assert ("Neither max_norm nor damping" in said) == is_lost


@pytest.mark.filterwarnings("ignore::trimtab.TrimtabWarning")
def test_untold_its_units_are_recorded_as_not_observed_and_stay_on_the_low_cost_path(tmp_path):
    train(Policy(alpha=1.01, beta=1.01), record=tmp_path)
    with open_run(tmp_path) as run:
        steps = run.steps()
    assert steps.step.tolist() == [1, 2, 3, 4]
    assert not steps.active.any()
    assert not np.nan_to_num(steps.norms).any()
    assert not steps.risk.any()


def test_an_optimizer_for_each_of_many_parameters_is_not_taken_for_many_steps():
    def loop():
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(15)))
        step_in_backward(model)
        with trimtab.attach(model, optimizer_in_backward=inside) as guard:
            model(torch.ones(1, 2)).sum().backward()
            guard.step()

    inside = True
    assert said_by(loop) == []
    inside = False
    (said,) = said_by(loop)
    assert "optimizer_in_backward=True" in said


def passes(num_passes, calls):
    """``num_passes`` backward passes, and ``guard.step`` after those whose number is in ``calls``."""
    model = nn.Sequential(nn.Linear(2, 2))
    step_in_backward(model)
    with trimtab.attach(model, optimizer_in_backward=True) as guard:
        for number in range(1, num_passes + 1):
            model(torch.ones(1, 2)).sum().backward()
            for _ in range(calls.count(number)):
                guard.step()


@pytest.mark.parametrize(
    ("num_passes", "calls", "part"),
    [
        (6, [2, 4, 6], "after several backward passes"),
        (2, [1, 1, 1, 2], "no gradient had come in"),
        (25, [], "inside 20 backward passes"),
        (3, [], "inside 3 backward passes"),
    ],
)
def test_a_loop_that_calls_it_at_the_wrong_time_is_told_so_once(num_passes, calls, part):
    (said,) = said_by(lambda: passes(num_passes, calls))
    assert part in said


def test_gradients_of_dtensors_are_named_once_and_not_observed(monkeypatch, tmp_path):
    monkeypatch.setattr("trimtab.monitors.backward_norms.is_dtensor", lambda grad: grad.ndim == 2)
    (said,) = said_by(lambda: train(Policy(), record=tmp_path, optimizer_in_backward=True))
    assert "Gradients of DTensors are not observed" in said
    with open_run(tmp_path) as run:
        steps = run.steps()
    assert len(steps) == 4
    assert (steps.grad_norm > 0).all()  # that of the biases


def test_data_parallel_gradients_are_refused_for_they_are_not_added_up_yet():
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="adds the gradients of the ranks up after"):
        trimtab.attach(wrapped, optimizer_in_backward=True)


def test_one_call_a_backward_says_nothing():
    assert said_by(lambda: passes(5, [1, 2, 3, 4, 5])) == []
