"""Update ratios and bounds are held against what they stand for; a loss tells when it leaves its course."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import trimtab
from trimtab.errors import ConfigError
from trimtab.monitors import usual_signals
from trimtab.monitors.usual_signals import LossSignals, UsualSignals
from trimtab.testing import tiny_model


def slow_ratio(before, after):
    moved = sum(((a - b).detach().double() ** 2).sum().item() for a, b in zip(after, before, strict=True))
    return math.sqrt(moved / sum((b.double() ** 2).sum().item() for b in before))


def of_projections(block):
    return [p for module in block.modules() if isinstance(module, nn.Linear) for p in module.parameters()]


def nudge(model, seed, size=1e-3):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(size * torch.randn(p.shape, generator=generator))


class TestUpdateRatio:
    def test_it_is_the_length_of_the_last_step_over_that_of_the_weights(self):
        model = tiny_model()
        monitor = UsualSignals(every_steps=1)
        monitor.start(model)
        assert monitor.observe(1)["update_ratio"].isnan().all()
        for step in (2, 3, 4):
            blocks = [of_projections(block) for block in model.layers]
            before = [[p.detach().clone() for p in block] for block in blocks]
            nudge(model, step)
            expected = [slow_ratio(old, new) for old, new in zip(before, blocks, strict=True)]
            assert monitor.observe(step)["update_ratio"].tolist() == pytest.approx(expected, rel=1e-5)
        assert monitor.places("update_ratio") == ["layer_0", "layer_1"]

    def test_of_large_parameters_a_sample_tells_it(self, monkeypatch):
        monkeypatch.setattr(usual_signals, "_MOST_SAMPLED", 500)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(64, 256, bias=False))
        with torch.no_grad():
            # Columns of different sizes: a sample of a few of them would not tell.
            model[0].weight *= torch.logspace(-1, 1, 256)
        monitor = UsualSignals(1, units=lambda module, fqn: True)
        monitor.start(model)
        monitor.observe(1)
        assert sum(len(sample) for sample in monitor._samples) <= 1000
        before = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1e-2 * p.abs() * torch.randn_like(p))
        expected = [slow_ratio([b], [a]) for b, a in zip(before, model.parameters(), strict=True)]
        # Squares of these weights have a relative spread of 1.9, so a mean of 400 of them has one of 10%, and a root of
        # the ratio of two about as much; 3 sigma.
        assert monitor.observe(2)["update_ratio"].tolist() == pytest.approx(expected, rel=0.3)

    def test_a_sample_is_not_caught_in_few_columns(self, monkeypatch):
        monkeypatch.setattr(usual_signals, "_MOST_SAMPLED", 64)
        columns = torch.arange(32.0).expand(64, 32)
        assert len(usual_signals._spaced(nn.Parameter(columns)).unique()) == 32

    def test_each_parameter_counts_by_its_size_and_not_by_its_sample(self, monkeypatch):
        monkeypatch.setattr(usual_signals, "_MOST_SAMPLED", 10)
        model = nn.Sequential(nn.Linear(100, 40))
        with torch.no_grad():
            model[0].weight.fill_(1.0)
            model[0].bias.fill_(1.0)
        monitor = UsualSignals(1, units=lambda module, fqn: True)
        monitor.start(model)
        monitor.observe(1)
        with torch.no_grad():
            model[0].bias += 1.0
        assert monitor.observe(2)["update_ratio"].item() == pytest.approx(math.sqrt(40 / 4040))

    def test_between_readings_no_copy_is_kept(self):
        model = tiny_model()
        monitor = UsualSignals(every_steps=4)
        monitor.start(model)
        for step in range(1, 9):
            values = monitor.observe(step)
            assert bool(values) == (step % 4 == 0)
            assert bool(monitor._samples) == (step % 4 == 3)
            nudge(model, step)
        assert values["update_ratio"].isfinite().all()

    def test_by_default_a_reading_comes_every_ten_steps_and_the_hooks_rest_in_between(self, monkeypatch):
        looked = []
        note = usual_signals._Bound.note
        monkeypatch.setattr(
            usual_signals._Bound, "note", lambda bound, *args: looked.append(step) or note(bound, *args)
        )
        model = tiny()
        monitor = UsualSignals()
        monitor.start(model)
        told = []
        for step in range(1, 21):
            model(ids(step))
            nudge(model, step)
            values = monitor.observe(step)
            told += [step] * ("update_ratio" in values and "attention_logit_bound" in values)
            if step in (10, 20):
                assert values["update_ratio"].isfinite().all()
                assert values["attention_logit_bound"].isfinite().all()
        assert told == [10, 20]
        # Whether the very first step is due is not known until it is over.
        assert sorted(set(looked)) == [1, 10, 20]

    def test_a_step_that_was_jumped_over_leaves_nothing_to_compare(self):
        model = tiny_model()
        monitor = UsualSignals(every_steps=1)
        monitor.start(model)
        monitor.observe(1)
        assert monitor.observe(7)["update_ratio"].isnan().all()
        assert monitor.observe(8)["update_ratio"].tolist() == [0.0, 0.0]

    def test_frozen_parameters_are_left_out(self):
        model = tiny_model()
        model.layers[0].requires_grad_(False)
        model.layers[1].self_attn.q_proj.requires_grad_(False)
        monitor = UsualSignals(every_steps=1)
        monitor.start(model)
        monitor.observe(1)
        with torch.no_grad():
            model.layers[1].self_attn.q_proj.weight += 100.0
        assert monitor.observe(2)["update_ratio"].tolist() == [0.0]
        assert monitor.places("update_ratio") == ["layer_1"]

    def test_weights_of_zero_have_no_ratio(self):
        model = tiny_model()
        monitor = UsualSignals(every_steps=1)
        monitor.start(model)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        monitor.observe(1)
        nudge(model, 0)
        assert monitor.observe(2)["update_ratio"].isnan().all()


def tiny(**settings):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attn_implementation="eager",
        **settings,
    )
    return transformers.LlamaForCausalLM(config).train()


def ids(seed):
    return torch.randint(0, 48, (2, 12), generator=torch.Generator().manual_seed(seed))


class TestAttentionLogitBound:
    def test_it_is_the_longest_query_times_the_longest_key_and_no_logit_is_larger(self):
        from trimtab.precision.attention_calls import attention_modules, place_around

        model = tiny()
        monitor = UsualSignals(every_steps=1)
        monitor.start(model)
        seen = {}

        def look(attention, module, q, k, *rest, **settings):
            keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
            logits = (q @ keys.mT * settings["scaling"]).amax().item()
            bound = (q.norm(dim=-1).amax(-1) * keys.norm(dim=-1).amax(-1) * settings["scaling"]).amax().item()
            seen.setdefault(module.layer_idx, []).append((logits, bound))
            return attention(module, q, k, *rest, **settings)

        undo = [place_around(module, look) for module in attention_modules(model).values()]
        for seed in (0, 1):
            model(ids(seed))
        found = monitor.observe(1)["attention_logit_bound"].tolist()
        for layer in (0, 1):
            assert found[layer] == pytest.approx(max(bound for _, bound in seen[layer]), rel=1e-5)
            assert found[layer] >= max(logit for logit, _ in seen[layer]) > 0
        assert monitor.observe(2)["attention_logit_bound"].isnan().all()
        assert monitor.places("attention_logit_bound") == ["layer_0", "layer_1"]
        for take_away in undo:
            take_away()

    def test_a_model_whose_attention_is_not_known_has_none(self):
        monitor = UsualSignals(every_steps=1)
        monitor.start(tiny_model())
        assert "attention_logit_bound" not in monitor.observe(1)

    def test_in_a_compiled_model_it_is_computed_in_the_same_graph(self):
        from torch._dynamo.testing import CompileCounterWithBackend

        expected = []
        for is_compiled in (False, True):
            model = tiny()
            monitor = UsualSignals(every_steps=1)
            monitor.start(model)
            torch._dynamo.reset()
            counter = CompileCounterWithBackend("aot_eager")
            run = torch.compile(model, backend=counter, fullgraph=True) if is_compiled else model
            found = []
            with torch._dynamo.config.patch(error_on_recompile=True):
                for step in range(1, 6):
                    run(ids(step)).logits.sum().backward()
                    found.append(monitor.observe(step)["attention_logit_bound"].tolist())
            torch._dynamo.reset()
            if is_compiled:
                assert found == [pytest.approx(values, rel=1e-5) for values in expected]
                assert counter.frame_count == 1
            expected = found
            monitor.stop()


class TestLossSignals:
    @staticmethod
    def slow(losses, warmup=20, factor=0.95):
        """The same in plain Python."""
        found, mean, deviation, lowest = [], 0.0, 0.0, math.inf
        for num, loss in enumerate(losses):
            excess = (loss - mean) / deviation if num >= warmup else math.nan
            away = loss - mean
            mean += max(1 / (num + 1), 1 - factor) * away
            if num:
                deviation += max(1 / num, 1 - factor) * (abs(away) - deviation)
            if num + 1 >= warmup:
                lowest = min(lowest, mean)
            found.append((excess, mean / lowest - 1 if num >= warmup else math.nan))
        return np.array(found).T

    @staticmethod
    def of(losses, **settings):
        signals = LossSignals(**settings)
        found = [signals.update(torch.tensor(float(loss))) for loss in losses]
        return np.array([[v["loss_excess"].item(), v["loss_rise"].item()] for v in found]).T

    def test_it_computes_what_it_says(self):
        losses = 3 + np.random.default_rng(0).normal(size=200) * 0.1
        # float32 keeps 7 digits of a mean, of which the excess takes a difference that is 30 times smaller.
        assert self.of(losses) == pytest.approx(self.slow(losses), rel=1e-3, abs=1e-4, nan_ok=True)

    @pytest.mark.parametrize("seed", range(5))
    def test_a_healthy_loss_stays_under_both_limits(self, seed):
        rng = np.random.default_rng(seed)
        steps = np.arange(2000)
        losses = 2 + 8 * np.exp(-steps / 100) + rng.normal(size=2000) * 0.1
        excess, rise = self.of(losses)
        assert np.nanmax(excess) < 8
        assert np.nanmax(rise) < 0.1

    def test_a_spike_is_an_excess_and_a_slow_rise_is_a_rise(self):
        rng = np.random.default_rng(0)
        losses = 3 + rng.normal(size=400) * 0.05
        spike, slow = losses.copy(), losses.copy()
        spike[300] = 5.0
        slow[300:] += np.linspace(0, 2, 100)
        excess, rise = self.of(spike)
        assert excess[300] > 8
        assert np.nanmax(rise) < 0.1
        excess, rise = self.of(slow)
        assert np.nanmax(excess) < 8
        assert rise[-1] > 0.1

    def test_a_loss_that_is_not_finite_is_an_excess_and_changes_nothing(self):
        losses = [3.0, 3.1] * 15
        for bad in (math.nan, math.inf, -math.inf):
            excess, rise = self.of([*losses, bad, 3.0])
            expected, _ = self.of([*losses, 3.0])
            assert excess[-2] == math.inf
            assert np.isnan(rise[-2])
            assert excess[-1] == expected[-1]

    def test_a_loss_that_never_moved_has_no_excess(self):
        excess, rise = self.of([2.5] * 40)
        assert excess[-1] == 0
        assert rise[-1] == 0

    def test_without_a_loss_there_is_nothing_to_say(self):
        signals = LossSignals()
        assert signals.update() == {}
        signals.update(torch.tensor(1.0))
        assert all(value.isnan() for value in signals.update().values())


def test_the_loss_is_that_of_the_model_and_its_alarms_come_with_a_spike():
    model = tiny()
    monitor = UsualSignals(every_steps=1000)
    monitor.start(model)
    rules = {metric: rule.detector.over([""]) for metric, rule in monitor.alarm_rules.items()}
    fired = []
    for step in range(1, 40):
        if step == 35:
            model.lm_head.weight.data.mul_(1000.0)
        model(input_ids=ids(step), labels=ids(step))
        values = monitor.observe(step)
        fired += [(step, m) for m, detector in rules.items() if detector.update([values[m].item()]).any()]
    assert fired[0] == (35, "loss_excess")
    assert (36, "loss_rise") in fired or (35, "loss_rise") in fired
    said = monitor.alarm_rules["loss_excess"].said("loss_excess", [""], 1.7e308, 8.0)
    assert len(said) < 100


@pytest.mark.filterwarnings("ignore:The (smoothed )?loss is:trimtab.errors.TrimtabWarning")
@pytest.mark.parametrize("is_told", [True, False])
def test_the_loss_is_the_one_that_the_guard_was_told(is_told, monkeypatch):
    monkeypatch.setattr(usual_signals, "LossSignals", lambda: LossSignals(warmup=1))
    model, found, own = tiny(), [], []
    with trimtab.attach(model, monitors=[UsualSignals()]) as guard:
        for step, loss in enumerate((1.0, 3.0, torch.tensor(5.0, dtype=torch.float64)), 1):
            model.zero_grad()
            # Two micro-batches: without being told, the loss is the mean of theirs.
            losses = [model(input_ids=ids(i), labels=ids(i)).loss for i in (2 * step, 2 * step + 1)]
            sum(losses).backward()
            own.append(sum(losses).item() / 2)
            if is_told:
                guard.observe(loss=loss)
            guard.step()
            found.append(guard.metrics()["trimtab/signals/loss_rise"])
    losses = [1.0, 3.0, 5.0] if is_told else own
    means = [sum(losses[:n]) / n for n in (1, 2, 3)]
    assert math.isnan(found[0])
    assert found[1:] == pytest.approx([means[n] / min(means[: n + 1]) - 1 for n in (1, 2)], rel=1e-4, abs=1e-6)


def test_what_a_skipped_step_has_shown_is_no_part_of_the_next_one():
    model, monitor = tiny(), UsualSignals(every_steps=1)
    monitor.start(model)
    model(input_ids=ids(1), labels=ids(1))
    expected = monitor.observe(1)["attention_logit_bound"]
    model.model.layers[0].self_attn.q_proj.weight.data.mul_(8.0)
    model(input_ids=ids(1), labels=ids(1))
    model.model.layers[0].self_attn.q_proj.weight.data.div_(8.0)
    monitor.drop(2)
    assert monitor._losses == []
    model(input_ids=ids(1), labels=ids(1))
    assert torch.equal(monitor.observe(2)["attention_logit_bound"], expected)


def test_what_can_not_be_meant_is_refused():
    with pytest.raises(ConfigError, match="every_steps=0"):
        UsualSignals(every_steps=0)
    with pytest.raises(ConfigError, match="no such module"):
        UsualSignals(units=["layers.7"]).start(tiny_model())
