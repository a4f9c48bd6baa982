"""What the signals see of the faults: on one untreated run, each by its own policy's replay, in the same steps.

An arm that acts changes what its signal sees: a recovered unit's gradient is healthy, its channel error is not. So
the signals are compared on the run of the low-cost path, in which nothing is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.control import PolicyLike
from trimtab.experiments.compare.arms import read_arm
from trimtab.experiments.compare.comparison import Comparison
from trimtab.experiments.compare.measures import Window, detection
from trimtab.trace import open_run, replay

__all__ = ["SIGNALS", "first_scored_step", "signal_policies", "signals_of"]

SIGNALS: Mapping[str, str] = {"gnmr": "GNMR", "gnmr-paper": "GNMR, published", "error": "channel error"}
"""The signals, and what a table calls them."""


def signal_policies(comparison: Comparison) -> dict[str, PolicyLike]:
    """The policy whose risks are each signal's; the error's is without limits of GNMR.

    Example:
        >>> from trimtab.experiments.arms import TrainingPlan
        >>> made = Comparison(
        ...     name="a", title="A", recipe="saved-activations", arms=("static-low",), plan=TrainingPlan(), seeds=(0,)
        ... )
        >>> policies = signal_policies(made)
        >>> list(policies), policies["error"].error_history, policies["error"].error_limit
        (['gnmr', 'gnmr-paper', 'error'], 'ema', 1.5)
    """
    # Where no limit tells a fault from a healthy unit, a unit is judged against its own past.
    error = "direct-only" if comparison.limit is not None else "direct-only@error_history=ema,error_limit=1.5"
    arms = {"gnmr": "gnmr", "gnmr-paper": "gnmr-paper", "error": error}
    return {name: comparison.policy(read_arm(arm), comparison.seeds[0], units=("unit",)) for name, arm in arms.items()}


def first_scored_step(comparison: Comparison) -> int:
    """Up to this step nothing is scored, of no signal and of no arm: the latest step up to which one of them waits."""
    return max(policy.act_from_step for policy in map(_settings, signal_policies(comparison).values()))


def signals_of(
    comparison: Comparison, record: Path, windows: Sequence[Window], recoverable: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Recall and precision of each signal on a recorded run.

    Args:
        comparison: Of which.
        record: Of a run in which nothing was recovered.
        windows: Its faults.
        recoverable: Names of the units that the faults may fall on; the risks of others are left out.

    Returns: See ``detection``, by the names of ``SIGNALS``; the error's is left out where the record has none.
    """
    first_step, found = first_scored_step(comparison), {}
    with open_run(record) as run:
        for name, policy in signal_policies(comparison).items():
            steps = replay(run, policy).steps
            if name == "error" and np.isnan(steps.errors).all():
                continue
            columns = [steps.units.index(unit) for unit in recoverable]
            risk = np.zeros((comparison.plan.num_steps, len(columns)))
            risk[steps.step - 1] = np.nan_to_num(steps.risk[:, columns], nan=0.0, posinf=np.inf)
            found[name] = detection(risk, windows, recoverable, first_step=first_step)
    return found


def _settings(policy: Any) -> Any:
    return getattr(policy, "scores", policy)
