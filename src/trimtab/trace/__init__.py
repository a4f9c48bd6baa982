"""The run record: one SQLite file a run, written while training goes on, readable at any moment.

Words:
    record: The file. It holds segments, units, steps and events.
    segment: One start of the run. A resume after step s begins one, and supersedes later rows of those before it.
    live line: The rows that count: those that no later segment has superseded.
    row: One optimizer step. Its active set is decided from its own norms, and routes the step after it.
    routed: The set that a step really ran under: forced by hand, or else decided in the row before. Switches are
        read off the rows; no event tells them.
    event: A fault, an alarm, a set forced by hand, a gap, at a step and a place.
    gap: Steps that could not be written, and are marked as lost.
    replay: The decisions of a policy, taken again from the recorded norms, channel errors and raised risks.
    what-if: The decisions that other policies would have taken along a run, counted beside the recorded ones.
    reading: What a monitor read in a step, a value a place. Kept as float32.
"""

from trimtab.trace.find import find_runs
from trimtab.trace.reader import Run, open_run
from trimtab.trace.replay import Replay, replay
from trimtab.trace.rows import QUANTIZER_COLUMNS, Event, StepRow, UnitRow
from trimtab.trace.schema import SCHEMA_VERSION, EventKind, record_path
from trimtab.trace.segments import Segment
from trimtab.trace.summary import RunSummary, summarize
from trimtab.trace.table import StepTable
from trimtab.trace.what_if import Outcome, Verification, WhatIf, recorded_policy, sweep, verify, what_if
from trimtab.trace.writer import RunWriter

__all__ = [
    "QUANTIZER_COLUMNS",
    "SCHEMA_VERSION",
    "Event",
    "EventKind",
    "Outcome",
    "Replay",
    "Run",
    "RunSummary",
    "RunWriter",
    "Segment",
    "StepRow",
    "StepTable",
    "UnitRow",
    "Verification",
    "WhatIf",
    "find_runs",
    "open_run",
    "record_path",
    "recorded_policy",
    "replay",
    "summarize",
    "sweep",
    "verify",
    "what_if",
]
