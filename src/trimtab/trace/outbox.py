"""The queue between training and the disk, and the thread that empties it."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections import deque

import numpy as np

from trimtab.errors import RecordError
from trimtab.trace.rows import Event, StepRow
from trimtab.trace.statements import Gap, Item, OpenSegment
from trimtab.trace.store import Store

__all__ = ["Outbox"]

COMMIT_STEPS = 50
COMMIT_INTERVAL_S = 1.0
RETRY_INTERVAL_S = 1.0
MAX_WAITING_ROWS = 10_000
MAX_WAITING_BYTES = 32 * 2**20
PATIENCE_S = 1.0
_BYTES_PER_UNIT = 73  # eight float64, an int64 and a bool
_BYTES_PER_READING = 300  # the array itself and the tuple around it; the names are shared by all rows


class Outbox:
    """Rows that wait for the disk, in bounded memory.

    Args:
        store: Where they go; from now on only the thread uses it.
        segment: The first segment, for the bound and for how the run ends.
    """

    def __init__(self, store: Store, segment: OpenSegment) -> None:
        self.warnings: deque[str] = deque()
        self._store = store
        self._segment = segment
        self._row_bytes = 1000 + _BYTES_PER_UNIT * len(segment.units)
        self._max_waiting = _most_waiting(self._row_bytes)
        self._changed = threading.Condition()  # over a re-entrant lock: a finalizer may run while this thread holds it
        self._waiting: deque[tuple[OpenSegment, Item]] = deque()
        self._commit_at = float("inf")
        self._gaps: dict[OpenSegment, Gap] = {}
        self._outage: str | None = None
        self._said: set[str] = set()
        self._patient = True
        self._num_flushes = self._num_flushed = 0
        self._stopping = False
        self._end: tuple[bool, str | None] = (False, None)
        self._thread = threading.Thread(target=self._run, name="trimtab-record", daemon=True)
        self._thread.start()

    def put(self, segment: OpenSegment, item: Item) -> None:
        """Queue ``item``; takes microseconds.

        Only steps that come in faster than a working disk takes them meet a full queue. Then this waits for room, but
        once for ``PATIENCE_S`` and no more until the disk has caught up: a hanging disk must not hold training.
        """
        with self._changed:
            self._segment = segment
            if isinstance(item, StepRow) and item.readings:
                self._max_waiting = min(self._max_waiting, _most_waiting(self._row_bytes + _reading_bytes(item)))
            if len(self._waiting) >= self._max_waiting:
                if self._outage is None and self._patient:
                    self._patient = self._changed.wait_for(self._has_room, PATIENCE_S)
                if not self._has_room():
                    self._drop_oldest()
                    if self._outage is None:
                        self._warn_once("the disk is slower than training")
            self._waiting.append((segment, item))
            if len(self._waiting) == 1:
                self._commit_at = min(self._commit_at, time.monotonic() + COMMIT_INTERVAL_S)
                self._changed.notify_all()
            elif len(self._waiting) == COMMIT_STEPS and self._outage is None:
                self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait for one attempt to write all that is queued; whether it succeeded."""
        with self._changed:
            self._num_flushes += 1
            ticket = self._num_flushes
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._num_flushed >= ticket or not self._thread.is_alive(), timeout_s)
            return self._num_flushed >= ticket and self._outage is None

    def stop(self, *, finished: bool, reason: str | None, pid: int, timeout_s: float = 60.0) -> None:
        """Write what is left and end the thread; nothing happens in a forked child."""
        if os.getpid() != pid:
            return
        with self._changed:
            self._stopping = True
            self._end = (finished, reason)
            self._changed.notify_all()
        # The garbage collector may drop the writer, and so come here, in any thread: also in this one.
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._due():
                    self._changed.wait(max(0.0, min(self._commit_at - time.monotonic(), 3600.0)))
                ticket, stopping, self._commit_at = self._num_flushes, self._stopping, float("inf")
                batch = list(self._waiting)
                self._waiting.clear()
                self._changed.notify_all()
                gaps, self._gaps = self._gaps, {}
            self._attempt(batch, gaps)
            with self._changed:
                self._num_flushed = ticket
                self._changed.notify_all()
                if stopping:
                    break
        self._finish()

    def _has_room(self) -> bool:
        return len(self._waiting) < self._max_waiting

    def _due(self) -> bool:
        if self._stopping or self._num_flushes > self._num_flushed or time.monotonic() >= self._commit_at:
            return True
        return self._outage is None and len(self._waiting) >= COMMIT_STEPS

    def _attempt(self, batch: list[tuple[OpenSegment, Item]], gaps: dict[OpenSegment, Gap]) -> None:
        if not batch and not gaps and self._outage is None:
            return
        if self._outage is not None and not gaps:
            gaps = {self._segment: _no_gap(batch)}
        try:
            self._store.write(batch, gaps, self._outage or "the disk is slower than training")
            self._outage, self._patient = None, True
        except Exception as error:  # a thread that dies would lose the rest of the run; training never hears of it
            with self._changed:
                for segment, gap in gaps.items():
                    if gap.num_steps or gap.num_events:
                        self._add_gap(segment, gap)
                self._outage = str(error) or type(error).__name__
                # What is wrong with the disk may pass; what is wrong with a row stays, and would block all others.
                if isinstance(error, (sqlite3.OperationalError, OSError, RecordError)):
                    self._waiting.extendleft(reversed(batch))
                else:
                    for segment, item in batch:
                        self._add_lost(segment, item)
                while len(self._waiting) > self._max_waiting:
                    self._drop_oldest()
                self._commit_at = time.monotonic() + RETRY_INTERVAL_S
                self._warn_once(self._outage)

    def _finish(self) -> None:
        with contextlib.suppress(Exception):
            self._store.finish(self._segment, *self._end)
        self._store.fold()
        self._store.close()

    def _warn_once(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            self.warnings.append(
                f"The run record {self._store.path} cannot be written: {reason}. Training goes on; the latest "
                f"{self._max_waiting} rows are kept in memory and written once that is possible, older ones are lost "
                "and marked as a gap."
            )

    def _drop_oldest(self) -> None:
        self._add_lost(*self._waiting.popleft())

    def _add_lost(self, segment: OpenSegment, item: Item) -> None:
        if isinstance(item, StepRow):
            self._add_gap(segment, Gap(item.step, item.step, num_steps=1))
        elif isinstance(item, Event):
            self._add_gap(segment, Gap(item.step, item.step, num_events=1))

    def _add_gap(self, segment: OpenSegment, gap: Gap) -> None:
        known = self._gaps.get(segment)
        if known is None:
            self._gaps[segment] = gap
            return
        known.first, known.last = min(known.first, gap.first), max(known.last, gap.last)
        known.num_steps += gap.num_steps
        known.num_events += gap.num_events


def _most_waiting(row_bytes: int) -> int:
    return max(2 * COMMIT_STEPS, min(MAX_WAITING_ROWS, MAX_WAITING_BYTES // row_bytes))


def _reading_bytes(row: StepRow) -> int:
    values = (values for by_metric in (row.readings or {}).values() for _, values in by_metric.values())
    return sum(_BYTES_PER_READING + np.asarray(one).nbytes for one in values)


def _no_gap(batch: list[tuple[OpenSegment, Item]]) -> Gap:
    """Where an outage that lost nothing is noted."""
    step = next((item.step for _, item in batch if isinstance(item, (StepRow, Event))), 0)
    return Gap(step, step)
