"""Time of one decision: the vectorised controller, and its ratio to the plain-Python specification."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from trimtab.control import Controller, Policy, ReferenceController, robust
from trimtab.experiments.bench.figures import Figure

__all__ = ["measure_decision"]

_WARM_STEPS, _TIMED_STEPS = 45, 20  # warm: the robust preset acts from step 40, the window is full long before
_POLICIES = {
    "Policy()": Policy(),
    "robust()": robust(),
    "Policy(max_active=0.2)": Policy(max_active=0.2),
    'Policy(history="window")': Policy(history="window"),
}


def measure_decision(num_units: int = 50_000, num_units_of_reference: int = 500) -> list[Figure]:
    """The fastest decision over many units and over few, and the plain-Python specification over the few.

    Args:
        num_units: Many units.
        num_units_of_reference: Few units.
    """
    generator = np.random.default_rng(0)
    many = [np.exp(0.3 * generator.standard_normal(num_units)) for _ in range(8)]
    few = [norms[:num_units_of_reference] for norms in many]
    figures = []
    for name, policy in _POLICIES.items():
        large = _best_ms(Controller(num_units, policy).update, many)
        small = _best_ms(Controller(num_units_of_reference, policy).update, few)
        reference = ReferenceController(num_units_of_reference, policy)
        slow = _best_ms(reference.update, [norms.tolist() for norms in few])
        figures += [
            Figure(name=f"{name}, {num_units:,} units", value=large, unit="ms"),
            Figure(name=f"{name}, {num_units_of_reference:,} units", value=small, unit="ms"),
            Figure(name=f"{name}, {num_units_of_reference:,} units in plain Python", value=slow / small, unit="times"),
        ]
    return figures


def _best_ms(update: Callable[[Any], object], traces: list[Any]) -> float:
    """The fastest of the timed decisions; slower ones measure the machine's other work."""
    elapsed_s = []
    for step in range(_WARM_STEPS + _TIMED_STEPS):
        start = time.perf_counter()
        update(traces[step % len(traces)])
        elapsed_s.append(time.perf_counter() - start)
    return 1e3 * min(elapsed_s[_WARM_STEPS:])
