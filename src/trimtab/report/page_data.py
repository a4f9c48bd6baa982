"""From a run record to what the page shows: arrays small enough to travel, whose values are the record's own.

Shapes: B bins of steps, U units, P points in time, R readings, G groups of places.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.report.budget import budget_of
from trimtab.trace import Event, Run, RunSummary, Segment, summarize
from trimtab.trace.routed import RoutedSets, forced_units
from trimtab.trace.table import RawRow

__all__ = ["MAX_CELLS", "AlarmSpan", "Cells", "FaultSpan", "PageRun", "ReadingBands", "UnitTotals", "gather_run"]

MAX_CELLS = 440_000
"""Cells of all heat maps of a page together; 17 to 20 bytes each, so that the page stays under 15 MB."""
MAX_POINTS = 24_000
"""Points in time of all loss curves of a page together."""
MAX_READING_POINTS = 120_000
"""Points of all curves of readings of a page together."""
_MOST_POINTS_OF_A_RUN = 12_000
_MOST_POINTS_OF_A_READING = 400
_MOST_GAPS = 500
_POINT_COLUMNS = ("loss", "grad_norm", "lr", "elapsed_s")

ACTIVE, DAMPED, BY_HAND = 1, 2, 4
"""Bits of ``Cells.flags``."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Cells:
    """The heat map: for each unit and bin of steps the riskiest step, exactly as recorded. All (B, U).

    A bin of one step is that step. Of equal risks in a bin the earliest step stands for it.
    """

    first_step: int
    """First step of the first bin."""
    width_steps: int
    """Steps a bin."""
    step: NDArray[np.int32]
    """The step that is shown, counted from ``first_step``; -1: the record has none of the unit in the bin."""
    norm: NDArray[np.float64]
    """Norm in that step; so too the next ones. NaN where not given."""
    gnmr: NDArray[np.float32]
    delta: NDArray[np.float32]
    risk: NDArray[np.float32]
    error: NDArray[np.float64]
    """Channel error."""
    lock: NDArray[np.uint32]
    reason: NDArray[np.uint8]
    """Codes of ``trimtab.control.REASONS``."""
    flags: NDArray[np.uint8]
    """``ACTIVE``: decided onto the recovery path; ``DAMPED``; ``BY_HAND``: put onto it by hand in this step."""
    num_active: NDArray[np.uint32]
    """Steps of the bin whose decision put the unit on the recovery path."""
    num_steps: NDArray[np.uint32]
    """Observed steps of the bin. (B,)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitTotals:
    """One unit over the whole run."""

    name: str
    recoverable: bool
    num_active: int
    """Steps whose decision put it on the recovery path."""
    num_forced: int
    """Steps that ran with it on the recovery path by hand."""
    num_switches: int
    """Times that it entered the active set."""
    num_failed: int
    """Steps with a norm that was NaN, infinite or negative."""
    top_risk: float
    """NaN where there is none."""
    top_step: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class AlarmSpan:
    """One alarm or notice: an episode."""

    step: int
    first_step: int
    end_step: int | None
    """None: it had not ended when the page was made."""
    monitor: str
    metric: str
    places: tuple[str, ...]
    sentence: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultSpan:
    """One fault made on purpose."""

    step: int
    end_step: int
    """The step after its last one."""
    kind: str
    place: str
    details: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReadingBands:
    """A monitor's metric, summed up by layer."""

    monitor: str
    metric: str
    groups: tuple[str, ...]
    """Layers, or what else the places belong to."""
    num_places: tuple[int, ...]
    """Places of each group."""
    step: NDArray[np.int64]
    """(R,)"""
    low: NDArray[np.float32]
    """Least value over the places of a group; with few points to spare also over several steps. (R, G)"""
    mean: NDArray[np.float32]
    high: NDArray[np.float32]
    num_readings: int
    """Steps with a reading; more than R where several are one point."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PageRun:
    """All that the page shows of one run."""

    summary: RunSummary
    config: dict[str, Any]
    versions: dict[str, str]
    reason: str | None
    """Why the last start ended."""
    units: tuple[UnitTotals, ...]
    points: dict[str, NDArray[Any]]
    """Loss and so on by step; rows of the record, all of them or a choice that holds every peak. Each (P,)."""
    num_rows: int
    """Rows that ``points`` was chosen from."""
    cells: Cells | None
    """None: no step was observed."""
    budget: int | None
    """Most units on the recovery path at once; None where the policy does not say."""
    alarms: tuple[AlarmSpan, ...]
    notices: tuple[AlarmSpan, ...]
    diagnosis: tuple[str, str, tuple[str, ...]] | None
    """Mechanism, advice and evidence; None without an alarm or a notice."""
    faults: tuple[FaultSpan, ...]
    remarks: tuple[str, ...]
    """Warnings, gaps, restarts."""
    readings: tuple[ReadingBands, ...]
    step_seconds: float | None
    """Median time of a step."""
    saved_bytes: tuple[float, float, float] | None
    """Bytes that the recoverable units keep for backward, per token: all on the low-cost path, as the steps were run,
    all on the recovery path."""
    flops: float
    """FLOPs of the recoverable units, per token."""
    learning_steps: int
    """The policy only learns up to this step, and judges no norm until then; 0 where it judges from the start."""
    unread_monitors: tuple[str, ...]
    """Monitors without a reading in the record."""
    gaps: tuple[tuple[int, int], ...]
    """Where steps are missing, the longest of many: the last step before, and the first one after."""
    last_losses: float | None
    """Mean loss of the last tenth of the steps."""


def gather_run(run: Run, num_runs: int = 1) -> PageRun:
    """Read what the page shows of ``run``; the rows are read one by one, and never held all at once.

    Args:
        run: An open record. Rows that are written meanwhile may be left out.
        num_runs: Runs on the page, which share its size.

    Raises:
        RecordError: The record is damaged beyond its first step.
    """
    segments = run.segments
    with_rows = [segment for segment in segments if segment.num_rows]
    start = min((segment.start_step for segment in with_rows), default=0)
    last = run.last_step
    num_steps = max(1, last - start)
    units = run.unit_table
    num_bins = min(num_steps, max(1, MAX_CELLS // num_runs // max(1, len(units))))
    width = -(-num_steps // num_bins)
    num_bins = -(-num_steps // width)
    names = tuple(unit.name for unit in units)
    learning = _learning_steps(run.config)
    gathered, segments = run.fold(lambda: _Gather(names, start + 1, width, num_bins))
    summary = summarize(run)
    rows = gathered.rows()
    losses = rows["loss"][np.isfinite(rows["loss"])]
    return PageRun(
        summary=summary,
        config=run.config,
        versions=run.versions,
        reason=segments[-1].reason,
        units=gathered.totals(tuple(unit.recoverable for unit in units), learning),
        points=_thin(rows, min(_MOST_POINTS_OF_A_RUN, MAX_POINTS // num_runs)),
        num_rows=len(rows["step"]),
        cells=gathered.cells(),
        budget=budget_of(run.config, sum(unit.recoverable for unit in units)),
        alarms=_episodes(run.events("alarm"), run.events("note")),
        notices=_episodes(run.events("notice"), run.events("note")),
        diagnosis=_diagnosis(run.events("alarm"), run.events("notice")),
        faults=tuple(_fault(event) for event in run.events("fault")),
        remarks=_remarks(run.events(), segments, summary),
        readings=_readings(run, MAX_READING_POINTS // num_runs),
        step_seconds=_step_seconds(rows),
        saved_bytes=gathered.saved_bytes(),
        flops=sum(_cost(unit.costs, "flops") for unit in units if unit.recoverable),
        learning_steps=learning,
        unread_monitors=_unread(run),
        gaps=_gaps(rows["step"]),
        last_losses=float(losses[-max(1, len(losses) // 10) :].mean()) if len(losses) else None,
    )


@dataclass(slots=True, eq=False)
class _Place:
    """Where a segment's units lie among those of the page."""

    units: tuple[str, ...]
    source: Any
    target: Any
    saved_low: float
    saved_high: float
    saved_more: NDArray[np.float64]
    """What the recovery path keeps more, in the segment's units."""
    recoverable: NDArray[np.bool_]


class _Gather:
    """Takes the rows one by one and pools them into the cells."""

    def __init__(self, names: tuple[str, ...], first_step: int, width: int, num_bins: int) -> None:
        self.names, self.first_step, self.width, self.num_bins = names, first_step, width, num_bins
        self.places: dict[int, _Place] = {}
        self.columns: dict[str, list[float]] = {}
        self.segment_of: list[int] = []
        shape = (self.num_bins, len(self.names))
        self._at = np.full(shape, -1, np.int32)
        self._key = np.full(shape, -np.inf)
        self._arrays: dict[str, NDArray[Any]] = {
            "norms": np.full(shape, np.nan),
            "gnmr": np.full(shape, np.nan, np.float32),
            "delta": np.full(shape, np.nan, np.float32),
            "risk": np.full(shape, np.nan, np.float32),
            "errors": np.full(shape, np.nan),
            "lock": np.zeros(shape, np.uint32),
            "reason": np.zeros(shape, np.uint8),
        }
        self._flags = np.zeros(shape, np.uint8)
        self._num_active = np.zeros(shape, np.uint32)
        self._num_steps = np.zeros(self.num_bins, np.uint32)
        self._active = np.zeros(len(self.names), np.bool_)
        self._sets = RoutedSets()
        self._forced = np.zeros(len(self.names), np.int64)
        self._switches = np.zeros(len(self.names), np.int64)
        self._failed = np.zeros(len(self.names), np.int64)
        self._index = {name: u for u, name in enumerate(self.names)}
        self._saved = [0.0, 0.0, 0.0]
        for name in ("step", *_POINT_COLUMNS, "loss_given", "skipped", "num_active", "num_entered", "saved_bytes"):
            self.columns[name] = []

    def add(self, segment: Segment, row: RawRow) -> None:
        """Take the next row."""
        place = self.places.get(segment.id) or self._place(segment)
        b = (row.step - self.first_step) // self.width
        if not 0 <= b < self.num_bins:  # written after we asked for the last step
            return
        active = np.zeros(len(segment.units), np.bool_) if row.active is None else row.active & place.recoverable
        ours = np.zeros(len(self.names), np.bool_)
        ours[place.target] = active[place.source]
        entered = ours & ~self._active
        routed = self._sets.take(row, place.units) & place.recoverable
        saved = place.saved_low + float(routed @ place.saved_more)
        self.segment_of.append(segment.id)
        values = {name: row.scalars[name] for name in _POINT_COLUMNS} | {
            "step": row.step,
            "loss_given": float(row.loss_given),
            "skipped": float(row.skipped),
            "num_active": np.nan if row.skipped else int(active.sum()),
            "num_entered": 0 if row.skipped else int(entered.sum()),
            "saved_bytes": np.nan if row.skipped else saved,
        }
        for name, column in self.columns.items():
            column.append(values[name])
        if row.skipped:
            return
        self._active = ours
        self._switches += entered
        if forced_units(row.extra) is not None:
            self._forced[np.arange(len(self.names))[place.target]] += routed[place.source]
        for i, value in enumerate((place.saved_low, saved, place.saved_high)):
            self._saved[i] += value
        self._num_steps[b] += 1
        self._num_active[b] += ours
        self._pool(b, row, place, active)

    def _pool(self, b: int, row: RawRow, place: _Place, active: NDArray[np.bool_]) -> None:
        if row.norms is None and row.risk is None:
            return
        source = place.source
        target = np.arange(len(self.names))[place.target]
        if row.norms is not None:
            with np.errstate(invalid="ignore"):
                failed = ~(np.isfinite(row.norms) & (row.norms >= 0))
            self._failed[target] += failed[source]
        # Where no risk was recorded, the norm itself says which step is worth showing.
        rank = row.risk if row.risk is not None else row.norms
        assert rank is not None
        key = np.nan_to_num(np.asarray(rank, np.float64), nan=-1.0, posinf=np.inf, neginf=np.inf)[source]
        better = key > self._key[b, target]
        where, there = target[better], np.arange(len(active))[source][better]
        self._key[b, where] = key[better]
        self._at[b, where] = row.step - self.first_step
        for name, table in self._arrays.items():
            values = getattr(row, name)
            table[b, where] = (0 if table.dtype.kind == "u" else np.nan) if values is None else values[there]
        flags = active[there].astype(np.uint8)
        for flag, named in ((DAMPED, (row.extra or {}).get("damped")), (BY_HAND, forced_units(row.extra))):
            if named:
                ours = np.zeros(len(self.names), np.bool_)
                ours[[self._index[name] for name in named if name in self._index]] = True
                flags |= (ours[where] * flag).astype(np.uint8)
        self._flags[b, where] = flags

    def _place(self, segment: Segment) -> _Place:
        names = tuple(unit.name for unit in segment.units)
        if names == self.names:
            source: Any = slice(None)
            target: Any = slice(None)
        else:
            pairs = [(i, self._index[name]) for i, name in enumerate(names) if name in self._index]
            source, target = np.array(pairs, dtype=np.intp).reshape(-1, 2).T
        recoverable = np.array([unit.recoverable for unit in segment.units], np.bool_)
        low, high = (
            np.array([_cost(unit.costs, name) for unit in segment.units]) * recoverable
            for name in ("low_saved_bytes", "high_saved_bytes")
        )
        place = _Place(names, source, target, float(low.sum()), float(high.sum()), high - low, recoverable)
        self.places[segment.id] = place
        return place

    def rows(self) -> dict[str, NDArray[Any]]:
        """One value a row of the record."""
        arrays: dict[str, NDArray[Any]] = {name: np.array(column, np.float64) for name, column in self.columns.items()}
        arrays["step"] = arrays["step"].astype(np.int64)
        arrays["segment"] = np.array(self.segment_of, np.int64)
        return arrays

    def cells(self) -> Cells | None:
        """The heat map."""
        if not self._num_steps.any() or not self.names:
            return None
        return Cells(
            first_step=self.first_step,
            width_steps=self.width,
            step=self._at,
            norm=self._arrays["norms"],
            gnmr=self._arrays["gnmr"],
            delta=self._arrays["delta"],
            risk=self._arrays["risk"],
            error=self._arrays["errors"],
            lock=self._arrays["lock"],
            reason=self._arrays["reason"],
            flags=self._flags,
            num_active=self._num_active,
            num_steps=self._num_steps,
        )

    def totals(self, recoverable: tuple[bool, ...], learning_steps: int) -> tuple[UnitTotals, ...]:
        """One line a unit; a risk of 0 of the steps in which the policy only learns is none."""
        risk = np.nan_to_num(self._arrays["risk"], nan=-1.0, posinf=np.inf)
        risk[(self._at + self.first_step <= learning_steps) & (risk == 0)] = -1.0
        top = risk.argmax(axis=0) if self.names else np.zeros(0, int)
        return tuple(
            UnitTotals(
                name=name,
                recoverable=recoverable[u],
                num_active=int(self._num_active[:, u].sum()),
                num_forced=int(self._forced[u]),
                num_switches=int(self._switches[u]),
                num_failed=int(self._failed[u]),
                top_risk=float(self._arrays["risk"][top[u], u]) if risk[top[u], u] >= 0 else float("nan"),
                top_step=int(self._at[top[u], u]) + self.first_step if risk[top[u], u] >= 0 else None,
            )
            for u, name in enumerate(self.names)
        )

    def saved_bytes(self) -> tuple[float, float, float] | None:
        """Mean over the steps; None where no unit has such costs."""
        num_steps = int(self._num_steps.sum())
        if not num_steps or self._saved[2] <= 0:
            return None
        low, actual, high = (value / num_steps for value in self._saved)
        return low, actual, high


def _cost(costs: Any, name: str) -> float:
    value = costs.get(name)
    return float(value) if isinstance(value, (int, float)) and np.isfinite(value) else 0.0


def _learning_steps(config: dict[str, Any]) -> int:
    policy = config.get("policy")
    steps = policy.get("act_from_step") if isinstance(policy, dict) else None
    return steps if isinstance(steps, int) and steps > 0 else 0


def _unread(run: Run) -> tuple[str, ...]:
    monitors = run.config.get("monitors")
    have_read = {monitor for monitor, _ in run.reading_keys}
    return tuple(str(name) for name in (monitors if isinstance(monitors, list) else ()) if name not in have_read)


def _gaps(step: NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
    """Where steps are missing; of very many the longest, since a gap that is no pixel wide is not seen.

    Example:
        >>> _gaps(np.array([1, 2, 5, 6]))
        ((2, 5),)
    """
    apart = np.diff(step)
    found = np.flatnonzero(apart > 1)
    if len(found) > _MOST_GAPS:
        found = np.sort(found[np.argsort(-apart[found], kind="stable")[:_MOST_GAPS]])
    return tuple((int(step[i]), int(step[i + 1])) for i in found)


def _thin(rows: dict[str, NDArray[Any]], most: int) -> dict[str, NDArray[Any]]:
    """All rows, or of each run of them those with the least and the greatest loss and the greatest gradient norm."""
    total = len(rows["step"])
    if total <= most:
        return rows
    kept: set[int] = {0, total - 1}
    edges = np.linspace(0, total, max(2, most // 4) + 1).astype(int)
    picks: tuple[tuple[str, Callable[[NDArray[Any]], Any]], ...] = (
        ("loss", np.argmin),
        ("loss", np.argmax),  # NaN counts as greatest: what went wrong is kept
        ("grad_norm", np.argmax),
        ("num_entered", np.argmax),
    )
    for begin, end in pairwise(edges.tolist()):
        for name, pick in picks if end > begin else ():
            kept.add(begin + int(pick(rows[name][begin:end])))
    index = np.array(sorted(kept))
    return {name: values[index] for name, values in rows.items()}


def _step_seconds(rows: dict[str, NDArray[Any]]) -> float | None:
    elapsed, segment, step = rows["elapsed_s"], rows["segment"], rows["step"]
    next_to = (np.diff(segment) == 0) & (np.diff(step) == 1)
    times = np.diff(elapsed)[next_to]
    times = times[np.isfinite(times)]
    return float(np.median(times)) if len(times) else None


def _episodes(events: Sequence[Event], notes: Sequence[Event]) -> tuple[AlarmSpan, ...]:
    """Alarms, or notices; what became of them is in the notes, by kind."""
    ended: dict[tuple[Any, Any, Any], int] = {}
    for note in notes:
        change = note.data.get(events[0].kind) if events else None
        if isinstance(change, dict) and change.get("what") == "ended":
            ended[change.get("monitor"), change.get("metric"), change.get("alarm_step")] = note.step
    spans = []
    for event in events:
        data = event.data
        places = data.get("places")
        first = data.get("first_step")
        spans.append(
            AlarmSpan(
                step=event.step,
                first_step=first if isinstance(first, int) and first <= event.step else event.step,
                end_step=ended.get((data.get("monitor"), data.get("metric"), data.get("step"))),
                monitor=str(data.get("monitor", "")),
                metric=str(data.get("metric", "")),
                places=tuple(map(str, places)) if isinstance(places, list) else (event.place,),
                sentence=str(data.get("sentence", "")),
            )
        )
    return tuple(spans)


def _diagnosis(alarms: Sequence[Event], notices: Sequence[Event]) -> tuple[str, str, tuple[str, ...]] | None:
    if not alarms and not notices:
        return None
    # Loads torch, which a run without them has no need to wait for.
    from trimtab.monitors.alarms import Alarm
    from trimtab.monitors.diagnosis import diagnose

    known = []
    for event in (*alarms, *notices):
        try:
            known.append(Alarm.from_dict(event.data))
        except (KeyError, TypeError):  # an alarm of somebody else's making
            continue
    if not known:
        return None
    found = diagnose(known)
    return found.mechanism, found.advice, found.evidence


def _fault(event: Event) -> FaultSpan:
    details = dict(event.data)
    kind = str(details.pop("fault", details.pop("kind", "fault")))
    begin, length = details.pop("start_step", event.step), details.pop("num_steps", None)
    begin = begin if isinstance(begin, int) else event.step
    end = begin + length if isinstance(length, int) and length > 0 else event.step + 1
    if details.get("unit") == event.place:
        del details["unit"]
    return FaultSpan(step=event.step, end_step=end, kind=kind, place=event.place, details=details)


def _remarks(events: Sequence[Event], segments: Sequence[Segment], summary: RunSummary) -> tuple[str, ...]:
    said = []
    if summary.damage:
        said.append(f"The record is damaged: {summary.damage}")
    if summary.num_missing:
        said.append(f"{summary.num_missing} steps between the first and the last are not in the record.")
    for segment in segments[1:]:
        said.append(f"Started again after step {segment.start_step}, at {segment.started_at}.")
    for event in events:
        if event.kind == "gap":
            lost = event.data.get("num_steps", "some")
            said.append(f"Step {event.step}: {lost} rows could not be written ({event.data.get('reason', '')}).")
        elif event.kind == "warning":
            said.append(f"Step {event.step}: {event.data.get('message', '')}")
    return tuple(said)


_LAYER = re.compile(r"^(layer_\d+)(?:/|$)")
_NUMBER = re.compile(r"\.(\d+)\.")


def _group(place: str) -> str:
    """The layer that a place belongs to; itself where it names none."""
    if not place:
        return "the model"
    if found := _LAYER.match(place):
        return found[1]
    if found := _NUMBER.search(place):
        return f"layer_{found[1]}"
    return place


def _readings(run: Run, most_points: int) -> tuple[ReadingBands, ...]:
    keys = run.reading_keys
    bands = []
    # What is left is shared by the metrics that are left: one with few groups leaves more to the others.
    for i, (monitor, metric) in enumerate(keys):
        step, values, places = run.readings(monitor, metric)
        if not len(step) or not places:
            continue
        names = [_group(place) for place in places]
        groups = tuple(dict.fromkeys(names))
        share = most_points // (len(keys) - i)
        num_points = min(len(step), _MOST_POINTS_OF_A_READING, max(8, share // len(groups)))
        most_points = max(0, most_points - num_points * len(groups))
        column = np.array([groups.index(name) for name in names])
        edges = np.linspace(0, len(step), num_points + 1).astype(int)[:-1]
        low, mean, high = (np.full((num_points, len(groups)), np.nan, np.float32) for _ in range(3))
        for g in range(len(groups)):
            of_group = values[:, column == g].astype(np.float64)
            known = ~np.isnan(of_group)
            count = np.add.reduceat(known.sum(axis=1), edges)
            with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
                total = np.add.reduceat(np.where(known, of_group, 0.0).sum(axis=1), edges)
                mean[:, g] = np.where(count > 0, total / count, np.nan)
                low[:, g] = np.minimum.reduceat(np.where(known, of_group, np.inf).min(axis=1), edges)
                high[:, g] = np.maximum.reduceat(np.where(known, of_group, -np.inf).max(axis=1), edges)
            low[count == 0, g] = high[count == 0, g] = np.nan
        bands.append(
            ReadingBands(
                monitor=monitor,
                metric=metric,
                groups=groups,
                num_places=tuple(names.count(group) for group in groups),
                step=step[edges],
                low=low,
                mean=mean,
                high=high,
                num_readings=len(step),
            )
        )
    return tuple(bands)
