"""The worked example of a monitor says what it is meant to say."""

import numpy as np
import pytest
import torch
from torch import nn

import trimtab
from trimtab.errors import ConfigError
from trimtab.monitors.residual_stream import ResidualNorm
from trimtab.testing import tiny_model


def batch(seed):
    return torch.randint(0, 48, (2, 6), generator=torch.Generator().manual_seed(seed))


def slow_rms(model, ids):
    x = model.embed_tokens(ids)
    found = []
    for block in model.layers:
        x = block(x)
        found.append(np.sqrt(np.mean(x.detach().double().numpy() ** 2)))
    return np.array(found)


def test_it_is_the_largest_root_mean_square_of_the_micro_batches():
    model = tiny_model()
    expected = np.maximum(slow_rms(model, batch(0)), slow_rms(model, batch(1)))
    monitor = ResidualNorm()
    monitor.start(model)
    model(batch(0))
    model(batch(1))
    values = monitor.observe(1)
    assert values["rms"].numpy() == pytest.approx(expected, rel=1e-6)
    assert values["growth"].isnan().all()
    assert monitor.places("rms") == ["layer_0", "layer_1"]


def test_a_stream_that_jumps_gives_alarm_and_one_that_creeps_does_not():
    for factor, expected in ((1.02, False), (6.0, True)):
        model = tiny_model(num_blocks=1)
        monitor = ResidualNorm()
        monitor.start(model)
        detector = monitor.alarm_rules["growth"].detector.over(["layer_0"])
        fired = False
        for step in range(1, 21):
            model.embed_tokens.weight.data.mul_(factor if factor < 2 or step == 15 else 1.0)
            model(batch(step))
            fired |= bool(detector.update(monitor.observe(step)["growth"].tolist()).any())
        assert fired == expected


def test_a_layer_that_did_not_run_has_no_value_and_keeps_its_mean():
    model = tiny_model()
    monitor = ResidualNorm()
    monitor.start(model)
    model(batch(0))
    monitor.observe(1)
    assert monitor.observe(2)["growth"].isnan().all()
    model(batch(0))
    assert monitor.observe(3)["growth"].tolist() == [1.0, 1.0]


def test_outputs_that_are_tuples_begin_with_the_stream():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(4, 4)

        def forward(self, x):
            return self.up(x), None

    model = nn.ModuleDict({"layers": nn.ModuleList([Block()])})
    monitor = ResidualNorm()
    monitor.start(model)
    out, _ = model["layers"][0](torch.ones(3, 4))
    assert monitor.observe(1)["rms"].item() == pytest.approx(out.detach().square().mean().sqrt().item())


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ConfigError, match="no numbered blocks"):
        ResidualNorm().start(nn.ModuleDict({"up": nn.Linear(4, 4)}))


def test_in_a_compiled_model_it_is_in_the_same_graph():
    from torch._dynamo.testing import CompileCounterWithBackend

    model = tiny_model()
    monitor = ResidualNorm()
    monitor.start(model)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(1, 6):
            compiled(batch(step)).sum().backward()
            expected = slow_rms(tiny_model(), batch(step))
            assert monitor.observe(step)["rms"].numpy() == pytest.approx(expected, rel=1e-5)
    torch._dynamo.reset()
    assert counter.frame_count == 1


def test_what_a_skipped_step_has_shown_is_no_part_of_the_next_one():
    model, monitor = tiny_model(), ResidualNorm()
    monitor.start(model)
    model(batch(0))
    monitor.drop(1)
    assert monitor.observe(1)["rms"].isnan().all()


def test_a_guard_takes_it():
    model = tiny_model()
    with trimtab.attach(model, monitors=[ResidualNorm()]) as guard:
        model(batch(0)).sum().backward()
        guard.step()
        assert "residual_stream" in str(guard.metrics())
