"""Time of taking a long record's decisions again, and where it goes: reading rows, deciding, and the rest.

Run: python benchmarks/replay.py
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from trimtab.control import Policy, robust
from trimtab.trace import RunWriter, StepRow, UnitRow, open_run
from trimtab.trace.what_if import sweep, verify, what_if

MOST_UNSAVED = 500  # rows that are handed to the writer before it is waited for; it drops what it cannot keep up with


class Nothing:
    """A fold that lets every row go: the time of reading alone."""

    def add(self, segment: Any, row: Any) -> None:
        """Keep nothing."""


def norms_of(num_steps: int, num_units: int) -> Iterator[np.ndarray]:
    generator = np.random.default_rng(0)
    for _ in range(num_steps):
        norms = np.exp(0.3 * generator.standard_normal(num_units))
        norms[generator.random(num_units) < 1e-3] *= 30
        yield norms


def write_record(folder: str, policy: Policy, num_steps: int, num_units: int) -> None:
    names = [f"unit_{index}" for index in range(num_units)]
    controller = policy.start(names)
    units = [UnitRow(name=name) for name in names]
    with RunWriter(folder, config={"policy": policy.to_dict()}, units=units) as writer:
        for step, norms in enumerate(norms_of(num_steps, num_units), start=1):
            made = controller.update(norms)
            scores = {name: getattr(made, name) for name in ("gnmr", "delta", "risk", "active", "lock")}
            writer.write_step(StepRow(step=step, norms=norms, alpha=made.alpha, beta=made.beta, **scores))
            if step % MOST_UNSAVED == 0:
                writer.flush()


def seconds(do: Callable[[], Any]) -> tuple[float, float]:
    """Elapsed, and of this process alone: the first counts a busy machine's other work too."""
    start, own = time.perf_counter(), time.process_time()
    do()
    return time.perf_counter() - start, time.process_time() - own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--units", type=int, default=2_000)
    arguments = parser.parse_args()
    policy = robust()
    with tempfile.TemporaryDirectory() as folder:
        write_record(folder, policy, arguments.steps, arguments.units)
        controller = policy.start(arguments.units)
        drawn = list(norms_of(min(200, arguments.steps), arguments.units))
        for norms in drawn:
            controller.update(norms)
        _, alone = seconds(lambda: [controller.update(norms) for norms in drawn])
        with open_run(folder) as run:
            timed = {
                "read the rows": seconds(lambda: run.fold(Nothing)),
                "verify": seconds(lambda: verify(run)),
                "what_if, 1 policy": seconds(lambda: what_if(run, {"paper": Policy()})),
                "sweep, 9 policies": seconds(lambda: sweep(run, {"alpha": [1.5, 2, 3], "max_active": [2, 4, 8]})),
            }
            assert verify(run).is_exact
    print(f"{arguments.steps:,} steps x {arguments.units:,} units")
    for name, (elapsed_s, own_s) in timed.items():
        print(f"{name:20} {elapsed_s:7.2f} s, {own_s:7.2f} s of this process")
    print(f"the controller alone {alone / len(drawn) * arguments.steps:7.2f} s for as many decisions of one policy")


if __name__ == "__main__":
    main()
