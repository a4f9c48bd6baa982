"""A run in a dozen numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.trace.reader import Run
from trimtab.trace.routed import RoutedSets, forced_units
from trimtab.trace.segments import Segment
from trimtab.trace.table import RawRow

__all__ = ["RunSummary", "summarize"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """What one line about a run can say. Counts are over the live line, skipped steps left out."""

    path: Path
    """The record's file."""
    started_at: str
    """When the first segment started; ISO 8601, UTC."""
    finished: bool
    """Whether the last start ended on purpose."""
    num_segments: int
    """Starts of the run."""
    num_steps: int
    """Observed steps."""
    num_skipped: int
    """Steps that the loss scaler skipped."""
    num_missing: int
    """Steps between the first and the last that the record does not have."""
    first_step: int | None
    """First observed step; None when there is none."""
    last_step: int | None
    """Last observed step."""
    num_units: int
    """Watched units."""
    num_recoverable: int
    """Units with a recovery path."""
    recovered_share: float
    """Share of the recoverable unit-steps that the recovery path was decided for, 0 to 1."""
    num_switches: int
    """Times that a unit entered the active set, as decided."""
    num_forced_steps: int
    """Steps that ran under a set routed by hand, be it empty."""
    forced_share: float
    """Share of the recoverable unit-steps that such sets put on the recovery path, 0 to 1."""
    routed_share: float
    """Share of the recoverable unit-steps that ran on the recovery path: by hand where routed so, else as decided."""
    num_failed: int
    """Unit-steps with a NaN, infinite or negative norm."""
    num_unobserved: int
    """Unit-steps without a norm."""
    num_faults: int
    """Faults made on purpose."""
    num_alarms: int
    """Alarms raised."""
    last_loss: float | None
    """The last loss given; None when there is none."""
    policy: str
    """The policy in one line."""
    recipe: str
    """The recipe in one line; empty when the run only watches."""
    damage: str | None
    """What is lost of a damaged record."""


class _Tally:
    def __init__(self) -> None:
        self.num_steps = self.num_skipped = self.num_missing = 0
        self.first_step: int | None = None
        self.last_step: int | None = None
        self.num_active = self.num_unit_steps = 0
        self.num_switches = self.num_failed = self.num_unobserved = 0
        self.num_forced_steps = self.num_forced = self.num_routed = 0
        self.last_loss: float | None = None
        self._segment = 0
        self._recoverable: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._names: tuple[str, ...] = ()
        self._active: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._sets = RoutedSets()

    def add(self, segment: Segment, row: RawRow) -> None:
        if row.loss_given:
            self.last_loss = row.scalars["loss"]
        if row.skipped:
            self.num_skipped += 1
            return
        if segment.id != self._segment:
            self._enter(segment)
        self.num_steps += 1
        if self.last_step is None:
            self.first_step = row.step
        else:
            self.num_missing += max(0, row.step - self.last_step - 1)
        self.last_step = row.step
        if row.norms is not None:
            with np.errstate(invalid="ignore"):
                self.num_failed += int(np.count_nonzero(~(np.isfinite(row.norms) & (row.norms >= 0))))
            self.num_unobserved += int(np.count_nonzero(row.norms == 0))
        self.num_unit_steps += int(np.count_nonzero(self._recoverable))
        active = row.active if row.active is not None else np.zeros_like(self._active)
        self.num_active += int(np.count_nonzero(active & self._recoverable))
        self.num_switches += int(np.count_nonzero(active & ~self._active))
        self._active = active
        num_routed = int(np.count_nonzero(self._sets.take(row, self._names) & self._recoverable))
        self.num_routed += num_routed
        if forced_units(row.extra) is not None:
            self.num_forced_steps += 1
            self.num_forced += num_routed

    def _enter(self, segment: Segment) -> None:
        """Take the active set over to the units of another segment."""
        before = {name for name, on in zip(self._names, self._active, strict=True) if on}
        self._segment = segment.id
        self._names = tuple(unit.name for unit in segment.units)
        self._recoverable = np.array([unit.recoverable for unit in segment.units], np.bool_)
        self._active = np.array([name in before for name in self._names], np.bool_)


def summarize(run: Run) -> RunSummary:
    """Count what happened in ``run``, reading it once, row by row.

    Example:
        >>> import tempfile
        >>> from trimtab.trace import RunWriter, StepRow, open_run
        >>> folder = tempfile.mkdtemp()
        >>> with RunWriter(folder, config={}, units=[{"name": "q"}, {"name": "k"}]) as writer:
        ...     writer.write_step(StepRow(step=1, norms=[0.5, float("inf")], active=[False, True]))
        >>> with open_run(folder) as run:
        ...     summary = summarize(run)
        >>> summary.num_failed, summary.recovered_share, summary.num_switches
        (1, 0.5, 1)
    """
    tally, segments = run.fold(_Tally)
    num_unit_steps = max(1, tally.num_unit_steps)
    events = [event.kind for event in run.events()]
    live = run.live_segment
    return RunSummary(
        path=run.path,
        started_at=segments[0].started_at,
        finished=segments[-1].finished,
        num_segments=len(segments),
        num_steps=tally.num_steps,
        num_skipped=tally.num_skipped + events.count("skip"),
        num_missing=tally.num_missing,
        first_step=tally.first_step,
        last_step=tally.last_step,
        num_units=len(live.units),
        num_recoverable=sum(unit.recoverable for unit in live.units),
        recovered_share=tally.num_active / num_unit_steps,
        num_switches=tally.num_switches,
        num_forced_steps=tally.num_forced_steps,
        forced_share=tally.num_forced / num_unit_steps,
        routed_share=tally.num_routed / num_unit_steps,
        num_failed=tally.num_failed,
        num_unobserved=tally.num_unobserved,
        num_faults=events.count("fault"),
        num_alarms=events.count("alarm"),
        last_loss=tally.last_loss,
        policy=_one_line(live.config.get("policy")),
        recipe=_one_line(live.config.get("recipe")),
        damage=run.damage,
    )


def _one_line(settings: Any) -> str:
    """Settings as ``name(key=value, ...)``; those that are off are left out."""
    if settings is None:
        return ""
    if not isinstance(settings, Mapping):
        return str(settings)
    rest = dict(settings)
    name = next((str(rest.pop(key)) for key in ("name", "kind", "type") if isinstance(rest.get(key), str)), "")
    shown = ", ".join(
        f"{key}={_one_line(value) if isinstance(value, Mapping) else value}"
        for key, value in rest.items()
        if value is not None and value is not False
    )
    return f"{name}({shown})" if name else shown
