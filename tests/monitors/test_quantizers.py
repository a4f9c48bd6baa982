"""What is read of the quantizers on one rank, and what is said of it; several ranks are in test_guard_quantizers.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trimtab.errors import ConfigError
from trimtab.monitors.quantizers import LONG_STEPS, QuantizerStats, quantizer_metrics, wants_quantizer_stats
from trimtab.precision import (
    QUANTIZER_STATS,
    BitsandbytesLinear,
    Int8Base,
    QuantizedGemm,
    QuantizerObserver,
    SavedActivations,
    TorchaoFloat8,
    TorchaoInt8Base,
    TorchaoMXFP8,
    find_units,
)
from trimtab.precision.attention_backward import AttentionBackwardConversion
from trimtab.precision.recipe import why_unobserved
from trimtab.precision.transformer_engine import TransformerEngineConversion
from trimtab.trace import QUANTIZER_COLUMNS

NAN = float("nan")


class Observed:
    """What a conversion has to offer here: two units, and statistics that the test sets."""

    def __init__(self) -> None:
        self.units = find_units(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), lambda m, fqn: True)
        self.next: Tensor | None = None
        self.shadows: list[bool] = []

    def observe_quantizers(self, shadow: bool) -> None:
        self.shadows.append(shadow)

    def take_quantizer_stats(self) -> Tensor | None:
        stats, self.next = self.next, None
        return stats


def start(observed: Observed, error_limit: float | None = 0.3, **more: Any) -> QuantizerStats:
    """The observed units are the guard's third and first, of four."""
    return QuantizerStats(SavedActivations(), observed, [2, 0], 4, error_limit, **more)


def errors(*values: float) -> dict[str, np.ndarray]:
    return {name: np.array(values, dtype=float) for name in QUANTIZER_STATS}


def test_the_record_keeps_every_statistic():
    assert ("error", *QUANTIZER_COLUMNS) == QUANTIZER_STATS


def test_values_go_to_the_guards_units():
    observed = Observed()
    stats = start(observed)
    observed.next = torch.tensor([[0.5, 0.1, 0.0, 3.0], [0.25, NAN, 0.5, 7.0]])
    read = stats.read()
    assert read.shape == (stats.size,) == (8,)
    values = stats.by_unit(read.numpy())
    assert values is not None
    assert tuple(values) == QUANTIZER_STATS
    np.testing.assert_array_equal(values["error"], [0.25, NAN, 0.5, NAN])
    np.testing.assert_array_equal(values["flushed_share"], [NAN, NAN, np.float32(0.1), NAN])
    np.testing.assert_array_equal(values["amax"], [7.0, NAN, 3.0, NAN])


def test_a_step_in_which_nothing_was_seen_reads_as_nothing():
    stats = start(Observed())
    read = stats.read()
    assert read.isnan().all()
    assert read.shape == (stats.size,)
    assert stats.by_unit(read.numpy()) is None


def test_what_is_dropped_is_not_read_in_the_next_step():
    observed = Observed()
    stats = start(observed)
    observed.next = torch.ones(2, 4)
    stats.drop()
    assert stats.read().isnan().all()


@pytest.mark.parametrize(
    ("error_limit", "amax_limit", "shadow"), [(0.3, None, True), (None, None, False), (None, 12.0, True)]
)
def test_units_on_the_recovery_path_are_observed_only_if_somebody_judges_them(error_limit, amax_limit, shadow):
    observed = Observed()
    start(observed, error_limit, amax_limit=amax_limit)
    assert observed.shadows == [shadow]


def test_a_conversion_that_cannot_tell_is_refused_by_the_name_of_its_recipe():
    class Blind:
        units = ()

    assert not isinstance(Blind(), QuantizerObserver)
    with pytest.raises(
        ConfigError, match=r"^recipe='saved-activations': the policy's error_limit=0\.3 needs"
    ) as caught:
        QuantizerStats(SavedActivations(), Blind(), [], 4, 0.3)
    assert caught.value.remedy == (
        "Choose SavedActivations, QuantizedGemm, Int8Base, TorchaoFloat8, TorchaoMXFP8 or BitsandbytesLinear(8), or "
        "another whose conversion is a trimtab.precision.QuantizerObserver, or leave it out."
    )
    with pytest.raises(ConfigError, match="quantizer_stats=True needs"):
        QuantizerStats(SavedActivations(), Blind(), [], 4, None)


@pytest.mark.parametrize(
    ("recipe", "can_tell"),
    [
        (SavedActivations(), True),
        (QuantizedGemm(), True),
        (Int8Base(), True),
        (TorchaoFloat8(), True),
        (TorchaoMXFP8(), True),
        (BitsandbytesLinear(8), True),
        (BitsandbytesLinear(4), False),
        (TorchaoInt8Base(), False),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_recipes_that_the_refusal_names_are_those_that_can_tell(recipe, can_tell):
    package = {"torchao": "torchao", "bnb": "bitsandbytes"}.get(recipe.name.partition("-")[0])
    if package is not None:
        pytest.importorskip(package)
    model = nn.Sequential(nn.Linear(64, 64))
    model.requires_grad_(isinstance(recipe, SavedActivations | QuantizedGemm | TorchaoFloat8 | TorchaoMXFP8))
    conversion = recipe.convert(model, find_units(model))
    assert (why_unobserved(conversion) is None) == can_tell
    if can_tell:
        QuantizerStats(recipe, conversion, [0], 1, 0.3)
        return
    with pytest.raises(ConfigError, match="this one quantizes weights only"):
        QuantizerStats(recipe, conversion, [0], 1, 0.3)


@pytest.mark.parametrize("conversion", [AttentionBackwardConversion, TransformerEngineConversion])
def test_paths_without_a_quantizer_of_activations_that_we_see_do_not_tell(conversion):
    assert not hasattr(conversion, "observe_quantizers")


def test_quantizers_are_observed_if_the_policy_judges_them_or_the_user_asks():
    recipe = SavedActivations()
    wanted = {(s, e): wants_quantizer_stats(s, e, recipe) for s in (None, True) for e in (None, 0.3)}
    assert wanted == {(None, None): False, (None, 0.3): True, (True, None): True, (True, 0.3): True}
    assert not wants_quantizer_stats(False, None, recipe)
    assert not wants_quantizer_stats(None, None, None)
    assert wants_quantizer_stats(None, None, recipe, 12.0)


@pytest.mark.parametrize(
    ("setting", "error_limit", "recipe", "message"),
    [
        (False, 0.3, SavedActivations(), r"^quantizer_stats=False: .*error_limit=0\.3 judges"),
        ("yes", None, SavedActivations(), r"^quantizer_stats='yes': it is True, False or None"),
        (1, None, SavedActivations(), r"^quantizer_stats=1: it is True, False or None"),
        (None, 0.3, None, r"^recipe=None: the policy's error_limit=0\.3 needs"),
        (True, None, None, r"^recipe=None: quantizer_stats=True needs"),
    ],
)
def test_settings_that_contradict_one_another_are_refused(setting, error_limit, recipe, message):
    with pytest.raises(ConfigError, match=message) as caught:
        wants_quantizer_stats(setting, error_limit, recipe)
    assert caught.value.allowed.endswith(".")
    assert caught.value.remedy.endswith(".")


class TestTooManyForLong:
    def test_more_units_than_the_budget_for_long_are_told_with_what_to_do(self):
        stats = start(Observed())
        said = [stats.too_many_for_long(errors(0.4, 0.2, np.inf), 1) for _ in range(LONG_STEPS)]
        assert said[:-1] == [None] * (LONG_STEPS - 1)
        assert "error_limit=0.3" in said[-1]
        assert f"{LONG_STEPS} steps" in said[-1]
        assert "a finer scale or a wider format" in said[-1]

    def test_as_many_as_the_budget_are_no_problem(self):
        stats = start(Observed())
        assert not any(stats.too_many_for_long(errors(0.4, 0.3, 0.5, NAN), 2) for _ in range(3 * LONG_STEPS))

    @pytest.mark.parametrize("between", [errors(0.1, 0.4), errors(NAN, NAN), None])
    def test_one_step_without_begins_the_count_anew(self, between):
        stats = start(Observed())
        for _ in range(3):
            for _ in range(LONG_STEPS - 1):
                assert stats.too_many_for_long(errors(0.4, 0.4), 1) is None
            assert stats.too_many_for_long(between, 1) is None

    def test_another_state_begins_the_count_anew(self):
        stats = start(Observed())
        for _ in range(LONG_STEPS - 1):
            stats.too_many_for_long(errors(0.4, 0.4), 1)
        stats.restart()
        assert stats.too_many_for_long(errors(0.4, 0.4), 1) is None

    def test_without_a_limit_nothing_is_flagged(self):
        stats = start(Observed(), error_limit=None)
        assert not any(stats.too_many_for_long(errors(9.0, 9.0), 0) for _ in range(2 * LONG_STEPS))

    def test_ratios_are_above_their_limit_where_the_decision_says_so(self):
        by_both = start(Observed(), error_limit=1.5, error_history="ema", amax_limit=12.0)
        reasons = ("error", "amax", "gnmr", "locked")
        said = [by_both.too_many_for_long(errors(9.0, 9.0, 9.0, 9.0), 1, reasons) for _ in range(LONG_STEPS)]
        assert "2 units are above error_limit=1.5 or amax_limit=12, and" in said[-1]
        by_error = start(Observed(), error_limit=1.5, error_history="ema")
        assert not any(by_error.too_many_for_long(errors(9.0, 9.0), 1, reasons[1:3]) for _ in range(2 * LONG_STEPS))
        assert not any(by_error.too_many_for_long(errors(9.0, 9.0), 1) for _ in range(2 * LONG_STEPS))

    def test_a_unit_above_both_limits_is_one_unit(self):
        stats = start(Observed(), amax_limit=12.0)
        assert not any(stats.too_many_for_long(errors(0.9, 0.1), 1, ("amax", "none")) for _ in range(2 * LONG_STEPS))


def test_statistics_of_another_dtype_are_read_as_the_record_keeps_them():
    observed = Observed()
    stats = start(observed)
    observed.next = torch.full((2, 4), 0.1, dtype=torch.float64)
    assert stats.read().tolist() == [float(np.float32(0.1))] * 8


def test_metrics_are_over_the_units_that_are_known():
    values = errors(0.5, NAN, 0.25)
    values["flushed_share"] = np.array([NAN, NAN, NAN])
    values["amax"] = np.array([3.0, np.inf, NAN])
    assert quantizer_metrics(values) == {
        "trimtab/quantizer/error_max": 0.5,
        "trimtab/quantizer/error_mean": 0.375,
        "trimtab/quantizer/saturated_share_max": 0.5,
        "trimtab/quantizer/amax_max": np.inf,
    }
    assert quantizer_metrics(None) == {}


def test_a_broken_operand_shows_in_the_largest_error_and_not_in_the_mean():
    metrics = quantizer_metrics(errors(np.inf, 0.25))
    assert metrics["trimtab/quantizer/error_max"] == np.inf
    assert metrics["trimtab/quantizer/error_mean"] == 0.25
