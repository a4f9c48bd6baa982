"""Bursts that corrupt a unit's stored copy: where, when, how much, and what the record says of them."""

import json

import pytest
import torch
from torch import nn

import trimtab
from trimtab.errors import ConfigError
from trimtab.faults import StoredCopyBurst, StoredCopyFaults, random_bursts
from trimtab.precision import SavedActivations
from trimtab.precision.stored_copy import decode, encode


class Attention(nn.Module):
    """q and k read one tensor; o another."""

    def __init__(self, width=8):
        super().__init__()
        self.q, self.k, self.o = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        return self.o(self.q(x) * self.k(x))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(Attention())


def burst(**changes):
    return StoredCopyBurst(
        **({"unit": "0.q", "start_step": 2, "num_steps": 3, "factor": 50.0, "num_channels": 3} | changes)
    )


def grads_of(model):
    """The gradients of one batch, the same each time."""
    model.zero_grad()
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    model(x).square().sum().backward()
    return {"x": x.grad} | {n: p.grad.clone() for n, p in model.named_parameters()}


def run_steps(guard, model, num_steps):
    """Gradients of each step; the model is not updated, so that only the fault makes a difference."""
    grads = []
    for _ in range(num_steps):
        grads.append(grads_of(model))
        guard.step()
        model.zero_grad()
    return grads


def different(one, other):
    return {n for n in one if not torch.equal(one[n], other[n])}


def test_only_the_named_units_weight_gradient_changes_and_only_in_its_steps(model):
    with trimtab.attach(model, SavedActivations(), policy=trimtab.Policy(alpha=1.0, beta=1.0, max_active=0)) as guard:
        clean = grads_of(model)
        guard.inject(StoredCopyFaults([burst()]))
        grads = run_steps(guard, model, 6)
    assert [different(clean, g) for g in grads] == [set(), {"0.q.weight"}, {"0.q.weight"}, {"0.q.weight"}, set(), set()]


def test_the_corruption_is_the_channels_times_the_factor_after_decoding(model):
    b = burst(unit="0", start_step=1, factor=-70.0)
    layer = nn.Sequential(nn.Linear(8, 8))
    x = torch.randn(5, 8)
    with trimtab.attach(layer, SavedActivations()) as guard:
        guard.inject(StoredCopyFaults([b]))
        layer(x).sum().backward()
    rows = decode(*encode(x, 4), bits=4, size=8, dtype=x.dtype)
    channels = b.channels(8)
    assert len(set(channels)) == 3
    rows[:, channels] *= -70.0
    assert torch.equal(layer[0].weight.grad, torch.ones(5, 8).t() @ rows)


def test_the_recovery_path_has_a_copy_of_its_own_and_is_spared(model):
    with trimtab.attach(
        model, SavedActivations(4, 8), policy=trimtab.Policy(alpha=1.0, beta=1.0, max_active=1)
    ) as guard:
        guard.route(["0.q"])
        clean = grads_of(model)
        guard.inject(StoredCopyFaults([burst(start_step=1)]))
        assert different(clean, grads_of(model)) == set()
        guard.route([])
        faulty = grads_of(model)
        guard.route(["0.k"])  # another unit's recovery does not help
        assert different(faulty, grads_of(model)) == {"0.k.weight"}


def test_two_faults_fall_both_and_the_later_burst_of_a_unit_holds(model):
    policy = trimtab.Policy(alpha=1.0, beta=1.0, max_active=0)
    with trimtab.attach(model, SavedActivations(), policy=policy) as guard:
        clean = grads_of(model)
        guard.inject(StoredCopyFaults([burst(start_step=1, num_steps=2)]))
        guard.inject(StoredCopyFaults([burst(unit="0.o", start_step=1, num_steps=3), burst(unit="0.k", start_step=2)]))
        grads = run_steps(guard, model, 3)
        assert [different(clean, g) for g in grads] == [
            {"0.q.weight", "0.o.weight"},
            {"0.q.weight", "0.k.weight", "0.o.weight"},
            {"0.k.weight", "0.o.weight"},
        ]
    early, late = burst(start_step=1, num_steps=9), burst(start_step=2, num_steps=1, factor=3.0)
    with trimtab.attach(model, SavedActivations(), policy=policy) as guard:
        guard.inject(StoredCopyFaults([late, early]))
        run_steps(guard, model, 1)
        channels, factor = guard.conversion.corruption(0)
        assert (channels.tolist(), factor) == (late.channels(8), 3.0)
        run_steps(guard, model, 1)
        channels, factor = guard.conversion.corruption(0)
        assert (channels.tolist(), factor) == (early.channels(8), 50.0)


@pytest.mark.filterwarnings("ignore:guard.step was called twice")
def test_a_resumed_run_suffers_what_the_uninterrupted_one_did(model):
    policy = trimtab.Policy(alpha=1.0, beta=1.0, max_active=0)

    def corruptions(guard, num_steps):
        seen = []
        for _ in range(num_steps):
            c = guard.conversion.corruption(0)
            seen.append(None if c is None else (c[0].tolist(), c[1]))
            grads_of(model)
            guard.step()
        return seen

    faults = [burst(), burst(start_step=4, num_steps=2, factor=7.0)]
    with trimtab.attach(model, SavedActivations(), policy=policy) as guard:
        guard.inject(StoredCopyFaults(faults))
        uninterrupted = corruptions(guard, 7)
    for cut in range(1, 6):
        for inject_first in (True, False):
            with trimtab.attach(model, SavedActivations(), policy=policy) as guard:
                corruptions(guard, cut)
                state = json.loads(json.dumps(guard.state_dict()))
            with trimtab.attach(model, SavedActivations(), policy=policy) as guard:
                if inject_first:
                    guard.inject(StoredCopyFaults(faults))
                guard.load_state_dict(state)
                if not inject_first:
                    guard.inject(StoredCopyFaults(faults))
                assert corruptions(guard, 7 - cut) == uninterrupted[cut:]


def errors_of(guard, model):
    """The channel error of each unit in one batch."""
    guard.conversion.take_quantizer_stats()
    grads_of(model)
    return dict(zip(guard.units, guard.conversion.take_quantizer_stats()[:, 0].tolist(), strict=True))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_the_channel_error_of_the_corrupted_unit_is_that_of_the_copy_as_it_reads_it(model, rounding):
    """Of layers that share the copy too; and a unit on the recovery path is judged by what the low-width copy is."""
    policy = trimtab.Policy(alpha=1.0, beta=1.0, max_active=1, error_limit=100.0)
    with trimtab.attach(model, SavedActivations(rounding=rounding), policy=policy) as guard:
        conversion = guard.conversion

        def errors(channels, route):
            conversion.begin_step(1)  # the same noise each time
            if channels:
                conversion.corrupt(0, channels, 50.0)
            guard.route(route)
            return errors_of(guard, model)

        channels = burst().channels(8)
        clean, faulty = errors([], []), errors(channels, [])
        recovered = errors(channels, ["0.q"])
        all_recovered = errors([], list(guard.units))
    assert max(clean.values()) < 1
    assert clean == all_recovered
    assert faulty["0.q"] == recovered["0.q"]
    # Three of eight channels are 50 times too large: 3/8 * 49 and what rounding adds or takes.
    assert faulty["0.q"] == pytest.approx(3 / 8 * 49, rel=0.1)
    assert [faulty[u] for u in ("0.k", "0.o")] == [clean[u] for u in ("0.k", "0.o")]
    if rounding == "nearest":  # otherwise "0.k" stores a copy of its own, with its own noise, where "0.q" stores none
        assert [recovered[u] for u in ("0.k", "0.o")] == [clean[u] for u in ("0.k", "0.o")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*instantiated")
def test_a_compiled_model_tells_the_same_error_of_a_corrupted_copy(model):
    from trimtab.testing.compile_claims import compiled

    found = []
    with trimtab.attach(model, SavedActivations(), quantizer_stats=True) as guard, compiled(model) as (fast, _):
        guard.inject(StoredCopyFaults([burst(start_step=1)]))
        for one in (model, fast):
            grads_of(one)
            found.append(guard.conversion.take_quantizer_stats())
    assert torch.equal(*found)
    assert found[0][0, 0] > 10


def test_each_burst_lands_in_the_record_with_all_that_it_takes_to_repeat_it(model, tmp_path):
    from trimtab.trace import open_run

    bursts = [burst(), burst(unit="0.o", start_step=1, num_steps=1, seed=5)]
    with trimtab.attach(model, SavedActivations(), record=tmp_path) as guard:
        guard.inject(StoredCopyFaults(bursts))
        run_steps(guard, model, 4)
    with open_run(tmp_path) as record:
        events = record.events("fault")
    assert [(e.step, e.place) for e in events] == [(1, "0.o"), (2, "0.q")]
    assert [e.data.pop("fault") for e in events] == ["stored copy"] * 2
    assert [StoredCopyBurst(**e.data) for e in events] == [bursts[1], bursts[0]]


def test_channels_are_those_of_the_seed():
    one = burst(seed=1).channels(64)
    assert one == burst(seed=1).channels(64) == sorted(set(one))
    assert one != burst(seed=1, start_step=3).channels(64)
    assert one != burst(seed=2).channels(64)
    assert burst(num_channels=16).channels(4) == [0, 1, 2, 3]
    assert burst().end_step == 5


def test_the_corruption_survives_a_move_to_another_dtype_and_gpt2(model):
    from transformers.pytorch_utils import Conv1D

    layer = nn.Sequential(Conv1D(4, 8))  # 8 inputs, 4 outputs
    with trimtab.attach(layer, SavedActivations()) as guard:
        layer.bfloat16()
        x = torch.randn(5, 8, dtype=torch.bfloat16)
        layer(x).sum().backward()
        clean = layer[0].weight.grad.clone()
        layer.zero_grad()
        b = burst(unit="0", start_step=1, factor=4.0)  # a power of two: exact in bfloat16
        guard.inject(StoredCopyFaults([b]))
        layer(x).sum().backward()
        clean[b.channels(8)] *= 4
        assert torch.equal(layer[0].weight.grad, clean)


def test_random_bursts_are_those_of_the_seed_and_within_the_ranges():
    settings = {"num_bursts": 50, "first_step": 3, "last_step": 9, "num_steps": (2, 4), "factor": (10.0, 20.0)}
    bursts = random_bursts(["a", "b", "c"], seed=4, **settings)
    assert bursts == random_bursts(["a", "b", "c"], seed=4, **settings)
    assert bursts != random_bursts(["a", "b", "c"], seed=5, **settings)
    assert len(bursts) == 50
    assert {b.unit for b in bursts} == {"a", "b", "c"}
    assert {b.start_step for b in bursts} == set(range(3, 10))
    assert {b.num_steps for b in bursts} == {2, 3, 4}
    assert all(10 <= b.factor <= 20 for b in bursts)
    assert [b.start_step for b in bursts] == sorted(b.start_step for b in bursts)
    assert (
        random_bursts(["a"], first_step=2, last_step=2, num_steps=(1, 1), factor=(3.0, 3.0), num_bursts=1)[0].num_steps
        == 1
    )


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("start_step", 0),
        ("start_step", float("nan")),
        ("num_steps", 0),
        ("num_steps", 1.5),
        ("num_channels", 0),
        ("num_channels", True),
        ("seed", -1),
        ("factor", float("nan")),
        ("factor", float("inf")),
        ("factor", "50"),
    ],
)
def test_a_burst_that_cannot_be_meant_is_refused(setting, value):
    with pytest.raises(ConfigError) as caught:
        burst(**{setting: value})
    assert str(caught.value).startswith(f"{setting}={value!r}: ")
    assert caught.value.allowed
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("setting", "changes"),
    [
        ("units", {"units": []}),
        ("units", {"units": "q_proj"}),
        ("num_bursts", {"num_bursts": 0}),
        ("last_step", {"first_step": 9, "last_step": 8}),
        ("last_step", {"first_step": 0}),
        ("num_steps", {"num_steps": (3, 2)}),
        ("num_steps", {"num_steps": (0, 2)}),
        ("factor", {"factor": (0.0, 2.0)}),
        ("factor", {"factor": (1.0, float("nan"))}),
    ],
)
def test_random_bursts_that_cannot_be_meant_are_refused(setting, changes):
    with pytest.raises(ConfigError) as caught:
        random_bursts(**({"units": ["a"]} | changes))
    assert caught.value.setting == setting
    assert caught.value.allowed
    assert caught.value.remedy


def test_a_fault_that_does_not_fit_the_recipe_is_refused(model):
    faults = StoredCopyFaults([burst()])
    with trimtab.attach(model) as guard, pytest.raises(ConfigError, match="only saved activations keep a copy"):
        guard.inject(faults)
    with trimtab.attach(model, SavedActivations(16, 16)) as guard, pytest.raises(ConfigError, match=r"^low_bits=16: "):
        guard.inject(faults)
    with trimtab.attach(model, SavedActivations()) as guard:
        with pytest.raises(ConfigError, match=r"^unit='0\.qq': no converted unit has that name\. Nearest: 0\.q"):
            guard.inject(StoredCopyFaults([burst(unit="0.qq")]))
        grads_of(model)
        guard.step()  # a refused fault is not applied
        assert guard.conversion.corruption(0) is None
