"""What a policy would have decided on the norms, channel errors, amaxes and raised risks of a recorded run."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.control import ControllerLike, PolicyLike
from trimtab.control.protocol import ask
from trimtab.errors import TrimtabError
from trimtab.trace.fast_replay import start_replay
from trimtab.trace.policies import build_again
from trimtab.trace.reader import Run, open_run
from trimtab.trace.segments import Segment
from trimtab.trace.table import RawRow, StepTable, TableBuilder

__all__ = ["Replay", "replay"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Replay:
    """The decisions of one policy along a run's live line. T: observed steps, U: units."""

    steps: StepTable
    """Scores in float64, active sets and locks as replayed; the rest as recorded. Skipped steps are left out."""
    recorded_active: NDArray[np.bool_]
    """The active sets that the run took. (T, U)"""
    notes: tuple[str, ...]
    """Why the decisions may not be what the run itself would have taken; empty when nothing is missing."""

    @property
    def num_different(self) -> int:
        """Unit-steps in which the replayed active set is not the recorded one."""
        return int(np.count_nonzero(self.steps.active != self.recorded_active))

    def __repr__(self) -> str:
        """One line; the arrays are in ``steps``."""
        num_steps, num_units = self.recorded_active.shape
        return f"<Replay of {num_steps} steps, {num_units} units: {self.num_different} unit-steps differ>"


def replay(run: Run | str | os.PathLike[str], policy: PolicyLike | None = None) -> Replay:
    """Take a run's decisions again from its recorded norms, channel errors, amaxes and raised risks, with any policy.

    A set routed by hand changes what ran, and so the norms, but no decision: it is in the row of the step that ran
    under it, as ``extra["routed_by_hand"]``, and replay passes it over.

    Args:
        run: The record, opened or its path.
        policy: What decides. None: the recorded policy with the thresholds that were in force at each step; the
            decisions are then exactly the recorded ones, whatever resumes lie between, for every policy of
            ``trimtab.control``.

    Returns:
        The decisions, and notes on what the record could not tell.

    Raises:
        ConfigError: ``policy`` is None, and the recorded config holds no policy that can be built again.

    Example:
        >>> import tempfile
        >>> from trimtab.control import Policy
        >>> from trimtab.trace import RunWriter, StepRow, open_run
        >>> folder, policy = tempfile.mkdtemp(), Policy(max_active=1)
        >>> controller = policy.start(["q", "k"])
        >>> units = [{"name": "q"}, {"name": "k"}]
        >>> with RunWriter(folder, config={"policy": policy.to_dict()}, units=units) as writer:
        ...     for step, norms in enumerate([[1.0, 1.0], [1.0, 9.0]], start=1):
        ...         made = controller.update(norms)
        ...         writer.write_step(StepRow(step=step, norms=norms, active=made.active))
        >>> with open_run(folder) as run:
        ...     replay(run).num_different, replay(run, Policy(max_active=0)).num_different
        (0, 1)
    """
    if not isinstance(run, Run):
        with open_run(run) as opened:
            return replay(opened, policy)
    player, _ = run.fold(lambda: _Player(run, policy))
    return player.result()


def raised_risks(raised: Mapping[str, float] | None, units: tuple[str, ...]) -> NDArray[np.float64] | None:
    """The risks of a row's ``extra["raised"]`` in the order of ``units``, NaN = none; None when nothing was raised."""
    if not raised:
        return None
    return np.array([raised.get(name, np.nan) for name in units], dtype=np.float64)


class _Player:
    def __init__(self, run: Run, policy: PolicyLike | None) -> None:
        self._run = run
        self._policy = policy
        self._notes: list[str] = []
        self._segment: Segment | None = None
        self._units: tuple[str, ...] = ()
        self._controller: ControllerLike | None = None
        self._judging: PolicyLike | None = None
        self._in_force: dict[str, float] = {}
        self._last_step = 0
        num_rows = run.num_steps
        self._table = TableBuilder(run.units, num_rows, np.float64)
        self._recorded = TableBuilder(run.units, num_rows)

    def add(self, segment: Segment, row: RawRow) -> None:
        if row.skipped:
            return
        if self._segment is None or segment.id != self._segment.id:
            self._enter(segment)
        assert self._controller is not None
        if row.step > self._last_step + 1:
            self._note(
                f"The record has no steps {self._last_step + 1} to {row.step - 1}; decisions after them may differ."
            )
        self._last_step = row.step
        self._recorded.add(row, self._units)
        if row.norms is None:
            self._note("Some rows hold no norms; no decision was taken for them.")
            self._table.add(row, self._units)
            return
        for name in ("alpha", "beta"):
            if not np.isnan(row.scalars[name]):
                self._in_force[name] = row.scalars[name]
        for held, limit, what in ((row.errors, "error_limit", "channel errors"), (row.amax, "amax_limit", "amaxes")):
            if held is None and getattr(self._policy, limit, None) is not None:
                self._note(f"Some steps hold no {what} for the policy's {limit}; they were judged without.")
        risks = raised_risks((row.extra or {}).get("raised"), self._units)
        amaxes = None if row.amax is None else row.amax.astype(np.float64)
        decision = ask(self._controller, self._judging, row.norms, row.errors, risks, amaxes)
        scalars = row.scalars | {"alpha": float(decision.alpha), "beta": float(decision.beta)}
        made = dataclasses.replace(
            row,
            scalars=scalars,
            gnmr=np.asarray(decision.gnmr),
            delta=np.asarray(decision.delta),
            risk=np.asarray(decision.risk),
            active=np.array(decision.active),
            lock=np.asarray(decision.lock),
            reason=None if decision.reason is None else np.asarray(decision.reason),
        )
        self._table.add(made, self._units)

    def result(self) -> Replay:
        return Replay(
            steps=self._table.build(), recorded_active=self._recorded.build().active, notes=tuple(self._notes)
        )

    def _enter(self, segment: Segment) -> None:
        """Go on into ``segment`` with the state that its controller had."""
        first = self._segment is None
        before, self._segment = self._controller, segment
        self._units = tuple(unit.name for unit in segment.units)
        self._in_force = {}  # a new one: the thresholds of the segment before hold on to theirs
        policy = self._policy if self._policy is not None else self._recorded_policy(segment)
        controller = start_replay(policy, self._units, [unit.recoverable for unit in segment.units])
        state = self._run.start_state(segment) if self._policy is None or before is None else None
        if state is None and before is not None:
            state = before.state_dict()
        if state is not None:
            try:
                controller.load_state_dict(state)
            except TrimtabError as error:
                self._note(f"The state at step {segment.start_step} could not be loaded ({error}); it starts fresh.")
        elif segment.start_step > 0:
            self._note(
                f"The record starts after step {segment.start_step}, without the controller's state there; "
                "decisions may differ."
            )
        if first:
            self._last_step = segment.start_step
        self._controller, self._judging = controller, policy

    def _recorded_policy(self, segment: Segment) -> PolicyLike:
        """The policy of ``segment``, with the thresholds that its rows say were in force."""
        remedy = "Pass replay a policy, or name one on the command line: --preset robust, say."
        return build_again(segment.config.get("policy"), self._threshold, remedy)

    def _threshold(self, name: str, recorded: Any) -> Any:
        in_force = self._in_force
        own = 1.0 if isinstance(recorded, str) else recorded
        return lambda step: in_force[name] if name in in_force else own(step) if callable(own) else own

    def _note(self, note: str) -> None:
        if note not in self._notes:
            self._notes.append(note)
