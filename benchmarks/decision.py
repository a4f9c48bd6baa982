"""Time of one decision: the vectorised controller, and its ratio to the plain-Python specification.

Run: python benchmarks/decision.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from trimtab.control import Controller, Policy, ReferenceController, robust

NUM_UNITS, NUM_UNITS_OF_REFERENCE = 50_000, 500
WARM_STEPS, TIMED_STEPS = 45, 20  # warm: the robust preset acts from step 40, the window is full long before

POLICIES: dict[str, Policy] = {
    "Policy()": Policy(),
    "robust()": robust(),
    "Policy(max_active=0.2)": Policy(max_active=0.2),
    'Policy(history="window")': Policy(history="window"),
}


def milliseconds_per_decision(update: Callable[[Any], object], traces: list[Any]) -> float:
    """The fastest of the timed decisions; slower ones measure the machine's other work."""
    elapsed_s = []
    for step in range(WARM_STEPS + TIMED_STEPS):
        start = time.perf_counter()
        update(traces[step % len(traces)])
        elapsed_s.append(time.perf_counter() - start)
    return 1e3 * min(elapsed_s[WARM_STEPS:])


def main() -> None:
    generator = np.random.default_rng(0)
    many = [np.exp(0.3 * generator.standard_normal(NUM_UNITS)) for _ in range(8)]
    few = [norms[:NUM_UNITS_OF_REFERENCE] for norms in many]
    print(f"{'policy':26} {NUM_UNITS:,} units   {NUM_UNITS_OF_REFERENCE} units   the same in plain Python")
    for name, policy in POLICIES.items():
        large = milliseconds_per_decision(Controller(NUM_UNITS, policy).update, many)
        small = milliseconds_per_decision(Controller(NUM_UNITS_OF_REFERENCE, policy).update, few)
        reference = ReferenceController(NUM_UNITS_OF_REFERENCE, policy)
        slow = milliseconds_per_decision(reference.update, [norms.tolist() for norms in few])
        print(f"{name:26} {large:9.2f} ms   {small:6.3f} ms   {slow:6.2f} ms = {slow / small:.0f} times as long")


if __name__ == "__main__":
    main()
