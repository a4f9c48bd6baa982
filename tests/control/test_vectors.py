"""Every reference trace, through the slow form and the fast one in three array libraries."""

import json
import math
from pathlib import Path

import array_api_strict
import numpy as np
import pytest
import torch

from trimtab.control import Controller, Policy, ReferenceController

CASES = sorted((Path(__file__).parents[1] / "data" / "vectors").glob("control_*.json"))
SETTINGS = (
    "window_steps",
    "lock_steps",
    "max_active",
    "history",
    "ema_factor",
    "history_steps",
    "history_clip",
    "burn_in_steps",
    "act_from_step",
)
ARRAYS = {
    "numpy": np.asarray,
    "torch": lambda norms: torch.tensor(norms, dtype=torch.float64),
    "array_api_strict": array_api_strict.asarray,
}


def norm_of(entry):
    return 0.0 if entry is None else float(entry)


def assert_same_floats(actual, expected):
    np.testing.assert_allclose(np.asarray(actual, float), np.array(expected, float), rtol=1e-9, atol=0, equal_nan=True)


def test_there_are_reference_traces():
    assert len(CASES) == 12


@pytest.mark.parametrize("form", ["reference", *ARRAYS])
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem.removeprefix("control_"))
def test_a_reference_trace_is_reproduced(path, form):
    case = json.loads(path.read_text())
    policy = Policy(
        alpha=lambda step: case["alpha"][step - 1],
        beta=lambda step: case["beta"][step - 1],
        **{name: case[name] for name in SETTINGS if name in case},
    )
    slow = form == "reference"
    controller = (ReferenceController if slow else Controller)(case["units"], policy)
    to_array = list if slow else ARRAYS[form]
    expected = case["expected"]
    for t, norms in enumerate(case["norms"]):
        decision = controller.update(to_array([norm_of(entry) for entry in norms]))
        for name in ("gnmr", "delta", "risk"):
            assert_same_floats(getattr(decision, name), expected[name][t])
        for name in ("active", "lock"):
            np.testing.assert_array_equal(
                np.asarray(getattr(decision, name)), expected[name][t], err_msg=f"step {t + 1}"
            )
        assert decision.step == t + 1
        assert (decision.alpha, decision.beta) == (case["alpha"][t], case["beta"][t])
        assert decision.num_failed == sum(float(x) == math.inf for x in expected["risk"][t])
        assert decision.num_unobserved == sum(math.isnan(float(x)) for x in expected["gnmr"][t])


def test_the_comparison_sees_a_wrong_number_and_a_missing_score():
    with pytest.raises(AssertionError):
        assert_same_floats([1.0, 2.0], [1.0, 2.0 + 1e-8])
    with pytest.raises(AssertionError):
        assert_same_floats([1.0, 2.0], [1.0, "nan"])
