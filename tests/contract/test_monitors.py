"""Every monitor keeps the contract of monitors."""

import pytest
import torch

from trimtab.monitors.alarms import AlarmRule
from trimtab.monitors.attention_spectrum import AttentionSpectrum
from trimtab.monitors.detectors import Above
from trimtab.monitors.protocol import BaseMonitor
from trimtab.monitors.residual_stream import ResidualNorm
from trimtab.monitors.router import Router
from trimtab.monitors.shift_residual import ShiftResidual
from trimtab.monitors.usual_signals import UsualSignals
from trimtab.precision.linear_conversion import in_backward
from trimtab.testing.monitor_contract import MonitorContract


class OnMixtral(MonitorContract):
    """The contract on a model of transformers, with experts and key heads that are shared."""

    def model(self):
        transformers = pytest.importorskip("transformers")
        config = transformers.MixtralConfig(
            vocab_size=48,
            hidden_size=32,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=32,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return transformers.MixtralForCausalLM(config).train()

    def loss(self, model, batch):
        return model(input_ids=batch, labels=batch).loss

    def checkpoint_blocks(self, model, use_reentrant):
        # The switch has another name in later versions of transformers, which warn about this one.
        settings = {"use_reentrant": use_reentrant}
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable(settings)
        else:
            model.gradient_checkpointing_enable(settings)
        model.enable_input_require_grads()


class TestRouter(OnMixtral):
    def monitor(self):
        return Router()


class TestRouterAtEverySecondStep(OnMixtral):
    def monitor(self):
        return Router(every_steps=2)


class TestUsualSignals(OnMixtral):
    needs_longer = frozenset({"loss_excess", "loss_rise"})

    def monitor(self):
        return UsualSignals(every_steps=1)


class TestUsualSignalsAtEverySecondStep(TestUsualSignals):
    def monitor(self):
        return UsualSignals(every_steps=2)


class TestUsualSignalsOfProjections(MonitorContract):
    def monitor(self):
        return UsualSignals(1, units="projection")

    def test_each_alarm_rule_has_its_metric(self):
        pytest.skip("the model returns no loss")


class TestResidualNorm(MonitorContract):
    def monitor(self):
        return ResidualNorm()


class TestResidualNormOnMixtral(OnMixtral):
    def monitor(self):
        return ResidualNorm()


class TestAttentionSpectrum(OnMixtral):
    # Its decompositions wait.
    observe_waits = True

    def monitor(self):
        return AttentionSpectrum(every_steps=1)


class TestShiftResidual(OnMixtral):
    # What is left of a sum that should be zero is rounding, and rounding depends on the order of what is added.
    rtol = 1.0

    def monitor(self):
        return ShiftResidual()


class Sizes(BaseMonitor):
    """A good monitor: sums of squares behind each block, with an average that a resumed run needs."""

    name = "sizes"

    def __init__(self):
        self.handles, self.sums, self.mean = [], [], None

    def start(self, model):
        self.sums = [torch.zeros(()) for _ in model.layers]
        self.handles = [
            block.register_forward_hook(self.hook(total)) for block, total in zip(model.layers, self.sums, strict=True)
        ]

    def hook(self, total):
        return Adds(self, total)

    def counts(self, module):
        return module.training and not in_backward()

    def add(self, total, output):
        total += output.detach().square().sum()

    def observe(self, step):
        total = torch.stack(self.sums)
        for one in self.sums:
            one.zero_()
        self.mean = total if self.mean is None else (self.mean + total) / 2
        return {"total": total, "mean": self.mean}

    def places(self, metric):
        return [f"layer_{i}" for i in range(len(self.sums))]

    def tensor_state(self):
        return {} if self.mean is None else {"mean": self.mean}

    def load_tensor_state(self, state):
        self.mean = state.get("mean")

    def stop(self):
        for handle in self.handles:
            handle.remove()


class Adds:
    def __init__(self, monitor=None, total=None):
        self.monitor, self.total = monitor, total

    def __call__(self, module, args, output):
        if self.monitor is not None and self.monitor.counts(module):
            self.monitor.add(self.total, output)

    def __deepcopy__(self, memo):
        return Adds()

    def __reduce__(self):
        return Adds, ()


def with_add(add):
    return type("Broken", (Sizes,), {"add": lambda self, total, output: add(total, output)})


def with_values(values):
    return type("Broken", (Sizes,), {"observe": lambda self, step: values(Sizes.observe(self, step))})


class Hooked(Sizes):
    def hook(self, total):
        return lambda module, args, output: total.add_(output.detach().square().sum()) and None


class Scales(Sizes):
    def hook(self, total):
        return lambda module, args, output: output * 1.001


class Stays(Sizes):
    def stop(self):
        for handle in self.handles[1:]:
            handle.remove()


class StopsOnlyOnce(Sizes):
    def stop(self):
        super().stop()
        del self.handles


class DropsTheMean(Sizes):
    def tensor_state(self):
        return {}


class NotForJson(Sizes):
    def state_dict(self):
        return {"mean": float("nan")}


class NeedsTensors(Sizes):
    def load_state_dict(self, state):
        self.mean = "to come"


class NamedTwice(Sizes):
    def places(self, metric):
        return ["layer"] * len(self.sums)


class SeesEvaluation(Sizes):
    def counts(self, module):
        return not in_backward()


class CountsTwice(Sizes):
    def counts(self, module):
        return module.training


class RulesNothing(Sizes):
    alarm_rules = {"totals": AlarmRule(Above(1.0), "Much.")}  # noqa: RUF012


BROKEN = [
    ("it_is_a_monitor_with_a_name_for_metrics", type("Broken", (Sizes,), {"name": "my/sizes"})),
    ("it_is_a_monitor_with_a_name_for_metrics", type("Broken", (Sizes,), {"stop": None})),
    ("watching_changes_no_bit_of_a_run", Scales),
    ("watching_changes_no_bit_of_a_run", with_add(lambda total, output: torch.rand(()))),
    ("the_model_is_given_back_as_it_was_found", Stays),
    ("the_model_is_given_back_as_it_was_found", StopsOnlyOnce),
    ("a_copy_of_a_watched_model_is_a_plain_model", Hooked),
    ("places_name_the_entries_of_each_value", with_values(lambda v: v | {"mean": v["mean"][:1]})),
    ("places_name_the_entries_of_each_value", NamedTwice),
    ("each_alarm_rule_has_its_metric", RulesNothing),
    ("a_healthy_run_has_values_and_none_is_infinite", with_values(lambda v: v | {"mean": v["mean"] / 0})),
    ("a_healthy_run_has_values_and_none_is_infinite", with_values(lambda v: v | {"mean": v["mean"] * torch.nan})),
    ("a_healthy_run_has_values_and_none_is_infinite", with_values(lambda v: {})),
    ("a_broken_model_is_no_exception", with_values(lambda v: {"total": 1 / int(v["total"].sum())})),
    ("a_batch_without_a_token_is_no_exception", with_add(lambda total, output: total.add_(output.detach().max()))),
    ("a_resumed_run_has_the_values_of_an_uninterrupted_one", DropsTheMean),
    ("a_resumed_run_has_the_values_of_an_uninterrupted_one", NotForJson),
    ("a_checkpoint_without_its_tensors_is_resumed_all_the_same", NeedsTensors),
    ("hooks_do_not_wait_for_the_device", with_add(lambda total, output: total.add_(output.sum().item()))),
    ("hooks_do_not_wait_for_the_device", with_add(lambda total, output: output.detach().cpu())),
    ("observing_does_not_wait_for_the_device", with_values(lambda v: {"total": v["total"].sum().item()})),
    ("observing_does_not_wait_for_the_device", with_values(lambda v: {"total": v["total"].tolist()[0]})),
    ("the_order_of_micro_batches_does_not_matter", with_add(lambda total, output: total.copy_(output.detach().sum()))),
    ("evaluation_between_micro_batches_is_not_seen", SeesEvaluation),
    ("a_recomputed_forward_is_not_counted_again", CountsTwice),
]


class Contract(MonitorContract):
    def __init__(self, monitor):
        self.monitor = monitor


CLAIMS = [name for name in dir(MonitorContract) if name.startswith("test_")]


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_good_monitor_meets_each_claim(claim):
    getattr(Contract(Sizes), claim)()


@pytest.mark.parametrize(("claim", "broken"), BROKEN)
def test_each_claim_fails_on_a_monitor_that_breaks_it(claim, broken):
    with pytest.raises((AssertionError, RuntimeError, TypeError, AttributeError)):
        getattr(Contract(broken), f"test_{claim}")()


def test_no_claim_was_left_out():
    assert {f"test_{claim}" for claim, _ in BROKEN} == set(CLAIMS)
