"""What people get wrong around a guard, and how scripts end: each is noticed, or does no harm."""

import copy
import os
import pickle
import signal
import subprocess
import sys
import time
import warnings

import pytest
import torch
from torch import nn

import trimtab
from trimtab.control import Policy
from trimtab.errors import ConfigError, TrimtabWarning
from trimtab.trace import RunWriter, UnitRow, open_run


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def train(model, guard, order, num_steps=6, **clear):
    """A loop whose three calls come in ``order``."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    calls = {
        "guard": lambda: guard.step(max_norm=1.0),
        "optimizer": optimizer.step,
        "clear": lambda: optimizer.zero_grad(**clear),
    }
    for _ in range(num_steps):
        model(torch.ones(2, 4)).square().sum().backward()
        for name in order:
            calls[name]()


@pytest.mark.parametrize("clear", [{"set_to_none": True}, {"set_to_none": False}])
def test_a_step_after_the_optimizer_is_said_once(clear):
    model = build()
    guard = trimtab.attach(model)
    with pytest.warns(TrimtabWarning, match=r"after optimizer\.step\(\)") as said:
        train(model, guard, ["optimizer", "guard", "clear"], **clear)
    assert len(said) == 1


def test_a_step_after_the_gradients_are_cleared_is_said_once():
    model = build()
    guard = trimtab.attach(model)
    with pytest.warns(TrimtabWarning, match="found no gradient") as said:
        train(model, guard, ["optimizer", "clear", "guard"])
    assert len(said) == 1


@pytest.mark.parametrize("clear", [{"set_to_none": True}, {"set_to_none": False}])
def test_the_right_order_is_never_complained_about(clear):
    model = build()
    guard = trimtab.attach(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, guard, ["guard", "optimizer", "clear"], num_steps=30, **clear)


def test_a_guard_that_nobody_can_name_is_detached_through_its_model():
    model = build()
    trimtab.attach(model)
    with pytest.raises(ConfigError, match=r"trimtab\.detach\(model\)"):
        trimtab.attach(nn.ModuleList([model]))
    assert trimtab.detach(nn.ModuleList([model]))
    assert not trimtab.detach(model)
    trimtab.attach(model).detach()


def test_an_unread_decision_is_copied_and_pickled_with_its_fields():
    model = build()
    with trimtab.attach(model, policy=Policy()) as guard:
        model(torch.ones(2, 4)).sum().backward()
        decision = guard.step()
        for made in (copy.deepcopy(decision), pickle.loads(pickle.dumps(decision))):
            assert made.risk.shape == (2,)
            assert made.grad_norm == decision.grad_norm
            assert not made.skipped
        with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
            _ = decision.nonsense


def test_losses_do_not_pile_up_when_step_is_never_called():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            return {"loss": self.linear(x).sum()}

    model = Model()
    guard = trimtab.attach(model)
    for _ in range(5000):
        model(torch.ones(1, 2))
    assert len(guard._losses) <= 4096


def test_a_script_that_never_detaches_records_its_last_step(tmp_path):
    code = (
        "import torch, trimtab\nfrom torch import nn\n"
        "model = nn.Sequential(nn.Linear(4, 4))\n"
        f"guard = trimtab.attach(model, record={str(tmp_path)!r})\n"
        "for _ in range(3):\n"
        "    model(torch.ones(2, 4)).sum().backward(); guard.step(); model.zero_grad()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with open_run(tmp_path) as run:
        assert run.steps().step.tolist() == [1, 2, 3]
        assert not run.finished


def test_only_the_launchers_first_rank_writes_before_the_process_group_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with trimtab.attach(build(), record=tmp_path / "second"):
        pass
    assert not (tmp_path / "second").exists()
    monkeypatch.setenv("RANK", "0")
    with trimtab.attach(build(), record=tmp_path / "first"):
        pass
    assert (tmp_path / "first" / "run.sqlite").exists()


@pytest.mark.parametrize("state", [{"value": float("nan")}, {"value": object()}, None])
def test_a_monitor_whose_state_no_checkpoint_can_hold_is_switched_off_and_not_the_run(state):
    class Monitor:
        name = "broken"

        def start(self, model):
            pass

        def observe(self, step):
            return {}

        def stop(self):
            pass

        def state_dict(self):
            if state is None:
                raise RuntimeError("no state")
            return state

        def load_state_dict(self, given):
            pass

    with trimtab.attach(build(), monitors=[Monitor()]) as guard:
        with pytest.warns(TrimtabWarning, match="'broken' failed and is off"):
            saved = guard.state_dict()
        assert saved["monitors"] == {}
        guard.load_state_dict(saved)


def test_everything_is_freed_without_the_collector_once_detached():
    import gc
    import weakref

    gc.collect()
    gc.disable()
    try:
        model = build()
        guard = trimtab.attach(model, trimtab.precision.SavedActivations(4, 8))
        model(torch.ones(2, 4)).sum().backward()
        guard.step()
        guard.detach()
        alive = weakref.ref(model)
        del model, guard
        assert alive() is None, gc.get_referrers(alive())
    finally:
        gc.enable()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_run_killed_while_its_data_workers_live_can_start_again_at_once(tmp_path):
    code = (
        "import os, time\nfrom trimtab.trace import RunWriter, UnitRow\n"
        f"writer = RunWriter({str(tmp_path)!r}, config={{}}, units=[UnitRow(name='u')])\n"
        "if os.fork() == 0:\n    time.sleep(30)\n    os._exit(0)\n"
        "print('ready', flush=True)\ntime.sleep(30)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout.readline().strip() == "ready"
        time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
        process.wait()
        RunWriter(tmp_path, config={}, units=[UnitRow(name="u")]).close()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()


def test_a_step_that_the_scaler_skips_repeats_its_stochastic_noise_and_its_faults():
    from trimtab.faults import StoredCopyBurst, StoredCopyFaults
    from trimtab.precision import SavedActivations

    def weights(skip: bool) -> list[torch.Tensor]:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        # Scales are powers of two: unscaling is exact, and the runs differ by the skipped step alone.
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
        guard = trimtab.attach(model, SavedActivations(4, 8, rounding="stochastic"), policy=Policy(max_active=0))
        guard.inject(StoredCopyFaults([StoredCopyBurst(unit="1", start_step=2, num_steps=2, factor=9.0)]))
        x = torch.linspace(-1, 1, 8).reshape(2, 4)
        step = 0
        while step < 4:
            overflow = skip and step == 1
            skip = skip and not overflow
            loss = model(x).square().sum()
            scaler.scale(loss * (float("inf") if overflow else 1.0)).backward()
            step += not guard.step(max_norm=1.0, scaler=scaler).skipped
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        guard.detach()
        return [p.detach().clone() for p in model.parameters()]

    for a, b in zip(weights(skip=False), weights(skip=True), strict=True):
        assert torch.equal(a, b)


def test_a_run_shorter_than_the_watchers_patience_is_told_at_its_end():
    model = build()
    guard = trimtab.attach(model)
    train(model, guard, ["optimizer", "clear"], num_steps=3)
    with pytest.warns(TrimtabWarning, match="stepped 3 times and guard.step was never called"):
        guard.detach()
