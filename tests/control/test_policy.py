"""Settings: what is refused, what a budget comes to, what survives a record, and the published values."""

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.control import PRESETS, MatchedRandom, Policy, TwoStage, paper, preset, robust
from trimtab.errors import ConfigError, TrimtabWarning

NAN = math.nan


def raises_at_once(step):
    raise RuntimeError("no table")


BAD_SETTINGS = [
    *[(name, value) for name in ("alpha", "beta") for value in (0, -1.5, NAN, math.inf, True, "1.5", None)],
    *[(name, lambda step, value=value: value) for name in ("alpha", "beta") for value in (0.0, NAN, -2, math.inf, "x")],
    ("alpha", raises_at_once),
    *[("window_steps", value) for value in (0, -1, 2.0, True, "5", None)],
    *[("lock_steps", value) for value in (-1, 1.0, False)],
    *[("max_active", value) for value in (-1, -0.1, 1.1, 4.0, NAN, math.inf, True, "4", None)],
    *[("history", value) for value in ("means", "", None, 3)],
    *[("ema_factor", value) for value in (-0.1, 1, 1.0, NAN, True, "x")],
    *[("history_steps", value) for value in (0, 1.5)],
    *[("history_clip", value) for value in (0, -1, 0.99, NAN, math.inf, True, "4")],
    *[("burn_in_steps", value) for value in (-1, 0.5)],
    *[("act_from_step", value) for value in (-1, 0.5)],
    *[("damping", value) for value in (1, None, "yes")],
    *[(name, value) for name in ("error_limit", "amax_limit") for value in (0, -0.3, NAN, math.inf, True, "0.3")],
]


@pytest.mark.parametrize(("setting", "value"), BAD_SETTINGS)
def test_a_setting_that_cannot_be_meant_is_refused_in_four_parts(setting, value):
    with pytest.raises(ConfigError) as caught:
        Policy(**{setting: value})
    error = caught.value
    assert error.setting == setting
    assert str(error).startswith(f"{setting}={value!r}: ")
    assert error.allowed.endswith(".")
    assert error.remedy.endswith((".", "?"))
    assert str(error).endswith(f"{error.allowed} {error.remedy}")


def test_the_message_of_the_house_style():
    with pytest.raises(ConfigError) as caught:
        Policy(window_steps=0)
    assert str(caught.value) == "window_steps=0: the short window needs at least 1 step. Set it to 1 or more."


def test_a_misspelt_history_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'window'"):
        Policy(history="windows")


def test_the_names_and_defaults_are_the_contract():
    assert {item.name: item.default for item in dataclasses.fields(Policy)} == {
        "alpha": 1.5,
        "beta": 1.3,
        "error_limit": None,
        "error_history": "absolute",
        "error_ema_factor": 0.95,
        "amax_limit": None,
        "window_steps": 10,
        "lock_steps": 1,
        "max_active": 4,
        "history": "mean",
        "ema_factor": 0.95,
        "history_steps": 100,
        "history_clip": None,
        "burn_in_steps": 0,
        "act_from_step": 0,
        "damping": False,
    }
    with pytest.raises(TypeError):
        Policy(1.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Policy().alpha = 2.0


def test_numbers_of_numpy_are_taken_as_numbers():
    policy = Policy(alpha=np.float32(2), window_steps=np.int64(3), max_active=np.int32(5))
    assert policy == Policy(alpha=2.0, window_steps=3, max_active=5)
    json.dumps(policy.to_dict())


@pytest.mark.parametrize(
    ("max_active", "num_recoverable", "budget"),
    [
        (4, 10, 4),
        (4, 3, 3),
        (0, 10, 0),
        (0.0, 10, 0),
        (1.0, 10, 10),
        (1, 10, 1),
        (0.25, 10, 2),  # 2.5 rounds half to even
        (0.35, 10, 4),
        (0.01, 10, 1),
        (5e-324, 10, 1),
        (0.01, 0, 0),
        (4, 0, 0),
    ],
)
def test_a_count_is_a_count_and_a_share_is_rounded_but_never_to_nothing(max_active, num_recoverable, budget):
    assert Policy(max_active=max_active).budget(num_recoverable) == budget


@given(st.one_of(st.integers(0, 50), st.floats(0, 1)), st.integers(0, 50))
def test_no_budget_exceeds_the_recoverable_units(max_active, num_recoverable):
    assert 0 <= Policy(max_active=max_active).budget(num_recoverable) <= num_recoverable


def test_a_schedule_is_a_function_of_the_step_from_1():
    policy = Policy(alpha=lambda step: step + 0.5, beta=TwoStage(3, 2, switch_step=4))
    assert policy.thresholds(1) == (1.5, 3.0)
    assert policy.thresholds(4) == (4.5, 3.0)
    assert policy.thresholds(5) == (5.5, 2.0)


def test_thresholds_that_a_schedule_does_not_give_are_an_error_for_who_asks():
    with pytest.raises(ConfigError, match=r"beta=.*gave -1\.0 at step 2"):
        Policy(beta=lambda step: 3.0 - 2 * step if step > 1 else 1.0).thresholds(2)


@pytest.mark.parametrize("bad", [{"first": 0}, {"then": NAN}, {"switch_step": -1}, {"switch_step": 2.0}])
def test_a_two_stage_schedule_checks_its_own_settings(bad):
    with pytest.raises(ConfigError, match=rf"^{next(iter(bad))}="):
        TwoStage(**({"first": 1.5, "then": 1.1, "switch_step": 3} | bad))


@pytest.mark.parametrize(
    "policy",
    [Policy(), robust(), paper("lora", total_steps=400), Policy(max_active=1.0), Policy(max_active=1, history_clip=4)],
)
def test_settings_survive_json(policy):
    read = Policy.from_dict(json.loads(json.dumps(policy.to_dict(), allow_nan=False)))
    assert read == policy
    assert type(read.max_active) is type(policy.max_active)


def test_an_unknown_key_is_refused_with_the_nearest_valid_one():
    with pytest.raises(ConfigError, match=r"^max_activ=3: .* Did you mean 'max_active'\?"):
        Policy.from_dict({"max_activ": 3})
    with pytest.raises(ConfigError, match=r"^zzz=3: .*The settings are alpha, beta"):
        Policy.from_dict({"zzz": 3})
    with pytest.raises(ConfigError, match=r"^policy="):
        Policy.from_dict([1])


def test_a_schedule_of_another_make_is_written_down_but_not_read_back():
    @dataclasses.dataclass(frozen=True)
    class Linear:
        slope: float

        def __call__(self, step):
            return 1 + self.slope * step

    values = Policy(alpha=Linear(0.5)).to_dict()
    assert values["alpha"] == {"kind": "Linear", "slope": 0.5}
    with pytest.raises(ConfigError, match=r"^alpha\.kind='Linear': "):
        Policy.from_dict(values)
    values = Policy(alpha=float).to_dict()
    assert values["alpha"] == repr(float)
    with pytest.raises(ConfigError, match="cannot be read back"):
        Policy.from_dict(values)


@pytest.mark.parametrize(
    ("schedule", "setting"),
    [
        ({"kind": "two_stages"}, "alpha.kind"),
        ({}, "alpha.kind"),
        ({"kind": "two_stage", "first": 1, "then": 1, "switch": 3}, "alpha.switch"),
        ({"kind": "two_stage", "first": 1, "then": 1}, "alpha.switch_step"),
    ],
)
def test_a_schedule_that_is_none_is_refused(schedule, setting):
    with pytest.raises(ConfigError) as caught:
        Policy.from_dict({"alpha": schedule})
    assert caught.value.setting == setting


# Presets


def test_robust_is_the_ema_preset():
    assert robust() == Policy(
        alpha=4.0,
        beta=3.0,
        window_steps=5,
        lock_steps=10,
        max_active=0.2,
        history="ema",
        ema_factor=0.95,
        history_clip=4.0,
        burn_in_steps=20,
        act_from_step=40,
    )
    assert robust(max_active=4).max_active == 4
    assert robust(damping=True).damping


def test_robust_learns_through_the_warm_up():
    assert [(robust(warmup_steps=w).burn_in_steps, robust(warmup_steps=w).act_from_step) for w in (5, 20, 300)] == [
        (20, 40),
        (20, 40),
        (300, 320),
    ]
    assert robust(burn_in_steps=3).act_from_step == 23
    assert robust(act_from_step=0).act_from_step == 0


def test_robust_says_once_that_a_run_is_too_short():
    with pytest.warns(TrimtabWarning, match=r"total_steps=159: .*step 40.* 160 steps") as caught:
        robust(total_steps=159)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    robust(total_steps=160)  # a warning is an error in these tests


@pytest.mark.parametrize("bad", [{"warmup_steps": -1}, {"warmup_steps": 0.5}, {"total_steps": 0}, {"total_steps": "9"}])
def test_the_lengths_that_robust_takes_are_checked(bad):
    with pytest.raises(ConfigError, match=rf"^{next(iter(bad))}="):
        robust(**bad)


def test_the_published_settings():
    assert paper() == Policy(alpha=1.5, beta=1.3, window_steps=10, lock_steps=1, max_active=4)
    assert paper("activations-2.0") == Policy(alpha=2.0, beta=1.5)
    assert paper("activations-3.0") == Policy(alpha=3.0, beta=2.0)
    two_stage = TwoStage(1.5, 1.1, switch_step=25)
    assert paper("deepseek", total_steps=1000) == Policy(alpha=two_stage, beta=1.5, max_active=0.25)
    assert paper("lora", total_steps=1000) == Policy(alpha=two_stage, beta=1.5, window_steps=5, max_active=10)
    moe = paper("moe")
    assert moe.alpha == 0.9
    assert moe.act_from_step == 0
    assert paper("lora", total_steps=1000, max_active=3).max_active == 3
    assert paper(max_active=0).max_active == 0


@pytest.mark.parametrize("setting", ["deepseek", "lora"])
def test_a_two_stage_setting_asks_for_the_length_of_the_run(setting):
    with pytest.raises(ConfigError, match=r"^total_steps=None: .*2\.5%"):
        paper(setting)


def test_an_unknown_setting_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'deepseek'"):
        paper("deep-seek")


def test_every_preset_has_a_name_and_takes_the_length_of_the_run():
    names = ["robust", "paper", "paper-2.0", "paper-3.0", "paper-deepseek", "paper-lora", "paper-moe"]
    assert list(PRESETS) == names
    for name in names:
        assert isinstance(preset(name, total_steps=1000), Policy)
    assert preset("robust") == robust()
    with pytest.raises(ConfigError, match=r"^policy='papr': .*Did you mean 'paper'\?"):
        preset("papr")


# The random baseline


def test_matched_random_has_exactly_as_many_active_as_it_was_given():
    counts = [0, 1, 5, 9, 2, 3]
    policy = MatchedRandom(counts, seed=3)
    controller = policy.start(8, recoverable=[True, False] * 4)
    assert controller.budget == 4
    for count in counts:
        decision = controller.update(np.full(8, np.nan))
        assert decision.active.sum() == min(count, 4)
        assert not decision.active[1::2].any()
        assert (decision.lock == 0).all()


def test_matched_random_takes_each_unit_equally_often_and_depends_on_its_seed():
    num_steps, num_units, count = 400, 10, 3
    sets = {}
    for seed in (0, 1):
        controller = MatchedRandom([count] * num_steps, seed).start(num_units)
        sets[seed] = np.array([controller.update(np.ones(num_units)).active for _ in range(num_steps)])
    p = count / num_units
    bound = 4 * math.sqrt(p * (1 - p) / num_steps)  # 4 sigma of a unit's share, for 10 units: 6e-4
    assert (np.abs(sets[0].mean(axis=0) - p) < bound).all()
    assert (sets[0] != sets[1]).any()


def test_matched_random_scores_as_gnmr_does():
    trace = np.exp(np.random.default_rng(0).standard_normal((15, 4)))
    random, gnmr = MatchedRandom([1] * 15, 0, scores=Policy(max_active=2)).start(4), Policy(max_active=2).start(4)
    for norms in trace:
        a, b = random.update(norms), gnmr.update(norms)
        for name in ("gnmr", "delta", "risk", "scale"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def test_matched_random_scores_errors_but_chooses_by_none():
    trace = np.random.default_rng(0).random((12, 4))
    policy = MatchedRandom([2] * 12, 0, scores=Policy(error_limit=0.3))
    assert policy.error_limit == 0.3
    told, untold = policy.start(4), policy.start(4)
    for errors in trace:
        a, b = told.update([1.0] * 4, errors), untold.update([1.0] * 4)
        np.testing.assert_array_equal(a.risk, np.maximum(b.risk, errors / 0.3))
        np.testing.assert_array_equal(a.active, b.active)


def test_matched_random_says_once_that_its_counts_ran_out():
    controller = MatchedRandom([2], seed=0).start(3)
    controller.update([1.0] * 3)
    with pytest.warns(TrimtabWarning, match="1 were given, and this is step 2") as caught:
        assert not controller.update([1.0] * 3).active.any()
    assert caught[0].filename == __file__
    controller.update([1.0] * 3)


@pytest.mark.parametrize(("counts", "seed", "setting"), [([-1], 0, "counts"), ([1.0], 0, "counts"), ([1], -1, "seed")])
def test_matched_random_checks_its_settings(counts, seed, setting):
    with pytest.raises(ConfigError, match=rf"^{setting}="):
        MatchedRandom(counts, seed)
