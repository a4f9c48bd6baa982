"""Optimizers that step inside backward and leave no gradient: noticed, said with what is lost, and no harm done."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import trimtab
from trimtab.control import Policy, robust
from trimtab.errors import TrimtabWarning
from trimtab.precision import SavedActivations
from trimtab.trace import open_run


def train(policy=None, max_norm=None, record=None, watch=True):
    """As torchtune and LOMO do: each parameter has an optimizer of its own, which frees the gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizers = {p: torch.optim.SGD([p], lr=1e-2) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    guard = trimtab.attach(model, SavedActivations(), policy=policy, record=record) if watch else None
    for _ in range(4):
        model(torch.ones(2, 4)).square().sum().backward()
        if guard is not None:
            guard.step(max_norm=max_norm)
    if guard is not None:
        guard.detach()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    ("policy", "max_norm", "is_lost"),
    [(Policy(), None, False), (Policy(), 1.0, True), (robust(damping=True), None, True)],
    ids=["watching", "clipping", "damping"],
)
def test_that_there_is_no_gradient_is_said_once_and_so_is_what_cannot_be_done(policy, max_norm, is_lost):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(policy, max_norm)
    said = [str(w.message) for w in caught if w.category is TrimtabWarning]
    assert len(said) == 1
    assert "steps inside backward leaves none to read" in said[0]
    assert ("Neither max_norm nor damping" in said[0]) == is_lost


@pytest.mark.filterwarnings("ignore::trimtab.TrimtabWarning")
def test_its_units_are_recorded_as_not_observed_and_stay_on_the_low_cost_path(tmp_path):
    train(Policy(alpha=1.01, beta=1.01), record=tmp_path)
    with open_run(tmp_path) as run:
        steps = run.steps()
    assert steps.step.tolist() == [1, 2, 3, 4]
    assert not steps.active.any()
    assert not np.nan_to_num(steps.norms).any()
    assert not steps.risk.any()
