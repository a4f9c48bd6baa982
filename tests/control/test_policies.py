"""What each policy goes by, what it refuses, and how it is named; what all of them keep is in ``tests/contract``."""

import json

import numpy as np
import pytest

from trimtab.control import (
    POLICIES,
    AdaptStyle,
    Controller,
    DampingOnly,
    FixedSet,
    GsnrStyle,
    JacobianProxy,
    MatchedRandom,
    Oracle,
    Policy,
    PolicyLike,
    StaticHigh,
    StaticLow,
    paper,
    policy_from_dict,
    robust,
)
from trimtab.control.policies import policy
from trimtab.control.policies.jacobian_proxy import ratios
from trimtab.errors import ConfigError, TrimtabWarning

NAN, INF = float("nan"), float("inf")


def active_after(controller, trace):
    for norms in trace:
        decision = controller.update(norms)
    return decision.active.tolist()


# Static sets


def test_static_high_has_every_recoverable_unit_active_and_its_budget_is_all():
    controller = StaticHigh().start(["q", "k", "norm"], ["q", "k"])
    assert controller.budget == 2
    assert not controller.active.any()  # the first step runs as under any policy
    assert active_after(controller, [[NAN, 0.0, 1.0]]) == [True, True, False]


def test_static_low_has_no_budget():
    controller = StaticLow().start(4)
    assert controller.budget == StaticLow().budget(9) == 0
    assert active_after(controller, [[1.0, NAN, INF, 1e9]]) == [False] * 4


def test_a_fixed_set_is_active_from_the_first_decision_on():
    fixed = FixedSet(["v", "q", "v"])
    assert fixed.max_active == 2
    assert active_after(fixed.start(["q", "k", "v"]), [[1.0, 9.0, 1.0]]) == [True, False, True]


@pytest.mark.parametrize("units", ["q", 3, [1], None])
def test_a_fixed_set_is_a_list_of_names(units):
    with pytest.raises(ConfigError, match=r"^units="):
        FixedSet(units)


def test_a_fixed_set_names_units_that_exist_and_can_be_switched():
    with pytest.raises(ConfigError, match="Did you mean 'q_proj'"):
        FixedSet(["q_porj"]).start(["q_proj", "k_proj"])
    with pytest.raises(
        ConfigError, match=r"units='norm': this unit has no recovery path\. The units that have one are q"
    ):
        FixedSet(["norm"]).start(["q", "norm"], ["q"])
    watching = FixedSet(["q"]).start(["q", "norm"], [])  # without a recipe nothing can be switched
    assert active_after(watching, [[1.0, 1.0]]) == [False, False]


# Profile, then freeze


def test_adapt_style_freezes_the_top_share_of_its_profile():
    controller = AdaptStyle(3, share=0.5, score="norm").start(4)
    trace = np.array([[1.0, 4.0, 3.0, 2.0]] * 3)
    assert active_after(controller, trace[:2]) == [False] * 4
    assert active_after(controller, trace[2:]) == [False, True, True, False]
    assert active_after(controller, [[99.0, 0.1, NAN, 0.0]] * 20) == [False, True, True, False]


def test_adapt_style_goes_by_mean_gnmr_unless_told_otherwise():
    growing = [[100.0, 1.0], [100.0, 2.0], [100.0, 4.0]]
    assert active_after(AdaptStyle(3, share=1).start(2), growing) == [False, True]
    assert active_after(AdaptStyle(3, share=1, score="norm").start(2), growing) == [True, False]


def test_adapt_style_averages_what_was_observed_and_waits_for_something_to_be():
    controller = AdaptStyle(2, share=1, score="norm").start(2)
    assert active_after(controller, [[0.0, NAN]] * 4) == [False, False]
    assert active_after(controller, [[2.0, 0.0]]) == [True, False]
    sparse = AdaptStyle(3, share=1, score="norm").start(2)
    assert active_after(sparse, [[3.0, 2.0], [0.0, 2.0], [INF, 2.0]]) == [True, False]


@pytest.mark.parametrize("bad", [{"profile_steps": 0}, {"share": 1.5}, {"share": -1}, {"score": "gnrm"}, {"scores": 3}])
def test_adapt_style_checks_its_settings(bad):
    with pytest.raises(ConfigError, match=rf"^{next(iter(bad))}="):
        AdaptStyle(**({"profile_steps": 5} | bad))


# Signal to noise of norms


def test_gsnr_style_recovers_the_least_steady_norm_whatever_its_size():
    generator = np.random.default_rng(0)
    trace = np.array([1e6, 1.0, 1e-6]) * np.exp(np.array([0.1, 0.5, 0.2]) * generator.standard_normal((200, 3)))
    controller = GsnrStyle(max_active=1).start(3)
    assert active_after(controller, trace) == [False, True, False]
    # The rank is s/m. Exponential moments have the spread of (1 + f) / (1 - f) = 39 norms: 4 sigma of s.
    noise = np.sqrt(controller.memory["variance"]) / controller.memory["mean"]
    np.testing.assert_allclose(noise, [0.1, 0.5, 0.2], rtol=4 / np.sqrt(2 * 39))


def test_gsnr_style_calls_pure_noise_steady_as_its_docstring_warns():
    generator = np.random.default_rng(0)
    noise = np.linalg.norm(generator.standard_normal((50, 1000)), axis=1)  # no direction is common to any two
    unsteady = np.exp(0.1 * generator.standard_normal(50))
    controller = GsnrStyle(max_active=1).start(["pure noise", "signal"])
    assert active_after(controller, np.stack([noise, unsteady], axis=1)) == [False, True]


def test_gsnr_style_leaves_units_without_noise_alone():
    assert active_after(GsnrStyle(max_active=1.0).start(2), [[1.0, 1.0]] * 5) == [False, False]
    assert active_after(GsnrStyle(max_active=1.0).start(2), [[1.0, 9.0]]) == [False, False]
    assert active_after(GsnrStyle(max_active=1.0).start(2), [[1.0, 9.0], [1.0, 8.0]]) == [False, True]


@pytest.mark.parametrize("factor", [0, 1, -1, NAN, True, "x"])
def test_gsnr_style_checks_its_factor(factor):
    with pytest.raises(ConfigError, match=r"^factor="):
        GsnrStyle(factor=factor)


# Growth towards the input


def test_the_ratio_is_to_the_root_mean_square_of_the_units_behind():
    np.testing.assert_allclose(ratios(np.array([10.0, 3.0, 4.0])), [10 / np.sqrt(12.5), 0.75, 0.0])
    np.testing.assert_allclose(ratios(np.array([10.0, 3.0, 0.0, 4.0])), [10 / np.sqrt(12.5), 0.75, 0.0, 0.0])
    assert ratios(np.zeros(3)).tolist() == [0.0] * 3
    assert np.isfinite(ratios(np.array([1e308, 1e308, 5e-324]))).all()


def test_the_jacobian_proxy_recovers_where_gradients_grow_and_nowhere_else():
    assert active_after(JacobianProxy(max_active=1).start(4), [[3.0, 8.0, 2.0, 1.0]] * 3) == [False, True, False, False]
    assert active_after(JacobianProxy(max_active=1.0).start(4), [[1.0, 2.0, 3.0, 4.0]] * 3) == [False] * 4


def test_the_jacobian_proxy_averages_over_steps():
    burst = [[1.0, 1.0]] * 9 + [[5.0, 1.0]]
    assert active_after(JacobianProxy(max_active=1, factor=0.0).start(2), burst) == [True, False]
    smooth = JacobianProxy(max_active=1, factor=0.5).start(2)
    active_after(smooth, [[2.0, 1.0], [4.0, 1.0]])
    assert smooth.memory["mean"].tolist() == [3.0, 0.0]


# Damping alone


def test_damping_only_damps_as_the_scores_say_and_recovers_nothing():
    scores = Policy(max_active=2, damping=True)
    only, both = DampingOnly(scores=Policy()).start(2), scores.start(2)
    trace = np.exp(np.random.default_rng(0).standard_normal((30, 2)))
    for norms in trace:
        a, b = only.update(norms), both.update(norms)
        np.testing.assert_array_equal(a.scale, b.scale)
        assert not a.active.any()
    assert DampingOnly().damping
    assert DampingOnly().scores == robust()


# The oracle


def test_the_oracle_takes_the_largest_positive_gaps_of_each_step():
    gaps = [{"a": 1.0, "b": 2.0, "c": 2.0}, {"a": -1.0, "b": 0.0, "c": NAN}, {"b": 1e-9}]
    controller = Oracle(gaps, max_active=1).start(["a", "b", "c"])
    sets = [controller.update([1.0, NAN, 0.0]).active.tolist() for _ in gaps]
    assert sets == [[False, False, True], [False] * 3, [False, True, False]]
    with pytest.warns(TrimtabWarning, match="those of 3 steps were given, and this is step 4"):
        assert not controller.update([1.0] * 3).active.any()
    controller.update([1.0] * 3)


@pytest.mark.parametrize("gaps", [[{"a": INF}], [{"a": "1"}], [[1.0, 2.0]]])
def test_the_oracle_is_given_finite_gaps_by_name(gaps):
    with pytest.raises(ConfigError, match=r"^gaps"):
        Oracle(gaps)


def test_the_oracle_refuses_gaps_of_a_unit_that_is_none():
    with pytest.raises(ConfigError, match="Did you mean 'q_proj'"):
        Oracle([{"q_porj": 1.0}]).start(["q_proj"])


# What they share


@pytest.mark.parametrize("make", [StaticHigh, lambda **kw: AdaptStyle(2, **kw), lambda **kw: GsnrStyle(**kw)])
def test_scores_are_gnmrs_and_damping_and_errors_as_these_have_them(make):
    scores = Policy(damping=True, error_limit=0.3)
    compared = make(scores=scores)
    assert compared.damping
    assert compared.error_limit == 0.3
    one, other = compared.start(3), scores.start(3)
    for norms in np.exp(np.random.default_rng(1).standard_normal((12, 3))):
        a, b = one.update(norms, [0.1, 0.5, NAN]), other.update(norms, [0.1, 0.5, NAN])
        for name in ("gnmr", "delta", "risk", "scale"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
        assert (a.lock == 0).all()
        assert "locked" not in a.reasons


def test_a_failed_norm_changes_no_rank():
    plain, broken = (JacobianProxy(max_active=2).start(3) for _ in range(2))
    active_after(plain, [[4.0, 2.0, 1.0], [4.0, 0.0, 1.0]])
    active_after(broken, [[4.0, 2.0, 1.0], [4.0, NAN, 1.0]])
    for name, values in plain.memory.items():
        np.testing.assert_array_equal(values, broken.memory[name])


def test_a_state_of_gnmr_gives_the_scores_and_starts_the_memory_of_a_rank_anew():
    gnmr, style = Policy().start(["q", "k"]), GsnrStyle().start(["q", "k"])
    active_after(gnmr, [[1.0, 2.0], [1.5, 2.0]])
    style.update([5.0, 5.0])
    assert not style.load_state_dict(gnmr.state_dict()).new
    assert style.step == 2
    assert not style.memory["count"].any()
    np.testing.assert_array_equal(style.update([3.0, 3.0]).gnmr, gnmr.update([3.0, 3.0]).gnmr)
    Policy().start(["q", "k"]).load_state_dict(style.state_dict())


def test_a_smaller_budget_keeps_the_units_nearest_the_loss():
    wide, narrow = (Oracle([{}, {}], max_active=n).start(3) for n in (3, 1))
    state = wide.state_dict()
    for unit in state["units"].values():
        unit["active"] = True
    narrow.load_state_dict(state)
    assert narrow.active.tolist() == [False, False, True]


@pytest.mark.parametrize("value", [-1.0, NAN, INF, "1", True, None])
def test_a_broken_memory_is_refused_and_changes_nothing(value):
    controller = GsnrStyle().start(["q", "k"])
    active_after(controller, [[1.0, 2.0], [2.0, 2.0]])
    before = json.dumps(controller.state_dict())
    state = json.loads(before)
    state["units"]["k"]["rank"]["mean"] = value
    with pytest.raises(ConfigError, match=r"units\['k'\]\.rank\.mean"):
        controller.load_state_dict(state)
    assert json.dumps(controller.state_dict()) == before


# Names


def test_every_policy_has_a_name_gnmrs_presets_first():
    assert list(POLICIES) == [
        "robust",
        "paper",
        "paper-2.0",
        "paper-3.0",
        "paper-deepseek",
        "paper-lora",
        "paper-moe",
        "matched_random",
        "static_low",
        "static_high",
        "fixed_set",
        "adapt_style",
        "gsnr_style",
        "jacobian_proxy",
        "damping_only",
        "oracle",
    ]
    needed = {
        "matched_random": {"counts": [1], "seed": 0},
        "fixed_set": {"units": ["unit_0"]},
        "adapt_style": {"profile_steps": 5},
        "oracle": {"gaps": [{"unit_0": 1.0}]},
    }
    for name in POLICIES:
        made = policy(name, needed.get(name), total_steps=1000)
        assert isinstance(made, PolicyLike)
        made.start(2).update([1.0, 1.0])


def test_settings_of_a_preset_are_changed_by_name():
    assert policy("paper", {"error_limit": 0.3}) == Policy(error_limit=0.3)
    assert policy("paper-lora", {"max_active": 3}, total_steps=400) == paper("lora", total_steps=400, max_active=3)
    with pytest.raises(ConfigError, match="Did you mean 'error_limit'"):
        policy("robust", {"error_limits": 0.3})


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'static_high'"):
        policy("static-high")
    with pytest.raises(ConfigError, match="Did you mean 'oracle'"):
        policy_from_dict({"kind": "oracel"})


@pytest.mark.parametrize(
    "made",
    [
        StaticLow(),
        StaticHigh(scores=robust(error_limit=0.3)),
        FixedSet(["q"]),
        AdaptStyle(5, share=2),
        GsnrStyle(max_active=0.5),
        JacobianProxy(factor=0.5),
        DampingOnly(),
        Oracle([{"q": 1.0, "k": NAN}]),
        MatchedRandom([1, 2], seed=3),
        robust(),
    ],
)
def test_settings_of_every_kind_are_read_back_from_json(made):
    read = policy_from_dict(json.loads(json.dumps(made.to_dict(), allow_nan=False)))
    assert read == made
    assert type(read) is type(made)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "gsnr_style", "factr": 0.5}, r"^factr=0\.5: GsnrStyle has no such setting\. Did you mean 'factor'"),
        ({"kind": "adapt_style"}, r"^profile_steps=\(missing\): AdaptStyle needs it"),
        ({"kind": "matched_random", "counts": [1]}, r"^seed=\(missing\)"),
    ],
)
def test_settings_that_are_unknown_or_missing_are_named(values, message):
    with pytest.raises(ConfigError, match=message):
        policy_from_dict(values)


def test_settings_of_another_kind_are_refused():
    with pytest.raises(ConfigError, match=r"^kind='oracle': GsnrStyle reads 'gsnr_style'"):
        GsnrStyle.from_dict({"kind": "oracle"})
    with pytest.raises(ConfigError, match=r"^policy="):
        GsnrStyle.from_dict([1])


def test_a_budget_is_read_as_gnmrs_is():
    for num_units in (0, 3, 10):
        for max_active in (0, 2, 0.25, 1.0):
            expected = Policy(max_active=max_active).budget(num_units)
            assert GsnrStyle(max_active=max_active).budget(num_units) == expected
            assert JacobianProxy(max_active=max_active).budget(num_units) == expected
            assert Oracle([], max_active=max_active).budget(num_units) == expected
            assert AdaptStyle(1, share=max_active).budget(num_units) == expected
    assert isinstance(DampingOnly().start(2), Controller)
