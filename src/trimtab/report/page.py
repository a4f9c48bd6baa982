"""What the page shows -> one HTML file that needs nothing else.

Every name in a record is somebody else's text: it goes through ``escape`` on its way into HTML, and through ``_json``
on its way into a script element. The page's own script is the only one that the page's policy lets run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import tempfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab._version import __version__
from trimtab.control import REASONS
from trimtab.errors import ConfigError, RecordError
from trimtab.report.page_data import AlarmSpan, FaultSpan, PageRun, UnitTotals, gather_run
from trimtab.report.settings import ReportSettings
from trimtab.trace import RunSummary, find_runs, open_run, record_path

__all__ = ["build_page", "records_of", "write_report"]

_MOST_ROWS = 200
"""Rows of a table; a run may have thousands of faults."""
_MOST_UNITS = 25
_WIDE = ' class="wide"'


def write_report(settings: ReportSettings) -> Path:
    """Write the page of the records that ``settings`` names.

    A record among several that cannot be read becomes a sentence on the page.

    Returns: Where the page is.

    Raises:
        ConfigError: when a path does not exist or holds no record, or the page cannot be written.
        RecordError: when none of the records can be read.
    """
    paths = records_of(settings.runs)
    runs: list[PageRun] = []
    refusals: list[str] = []
    last: RecordError | None = None
    for path in paths:
        try:
            with open_run(path) as run:
                runs.append(gather_run(run, len(paths)))
        except RecordError as error:
            last = error
            refusals.append(str(error))
    if last is not None and not runs:
        raise last
    _write(settings.out, build_page(runs, refusals))
    return settings.out


def build_page(runs: Sequence[PageRun], refusals: Sequence[str] = ()) -> str:
    """The page as text.

    Args:
        runs: At least one.
        refusals: A sentence for each record that could not be read.
    """
    names = _names(runs)
    style, script, template = (_asset(name) for name in ("page.css", "page.js", "page.html"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    content = {
        "title": escape("trimtab report: " + ", ".join(names)),
        "style": style,
        "script": script,
        "script_hash": digest,
        "version": escape(__version__),
        "refusals": _list([f"Left out: {text}" for text in refusals], "refusals"),
        "comparison": _comparison(runs, names) if len(runs) > 1 else "",
        "runs": "".join(_run(i, run, names[i]) for i, run in enumerate(runs)),
        "data": "".join(
            f'<script type="application/json" id="run-{i}-data">{_json(_run_data(run, names[i]))}</script>\n'
            for i, run in enumerate(runs)
        ),
    }
    # One pass: what is filled in is not looked at again, so that a unit called {{script}} stays a name.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: content[found[1]], template)


def records_of(paths: Sequence[Path]) -> list[Path]:
    """The records at or under ``paths``, each once.

    Raises: ConfigError: when a path does not exist or holds no record.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ConfigError("runs", str(path), "there is no such file or folder.", "Name a record or its folder.")
        here = [path] if path.is_file() else [record_path(path)] if record_path(path).is_file() else find_runs(path)
        if not here:
            raise ConfigError("runs", str(path), "no run record is in it.", "Pass record=... to attach to write one.")
        found += [record for record in here if record not in found]
    return found


def _write(out: Path, text: str) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=out.parent, prefix=out.name, suffix=".part")
        try:
            with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
                file.write(text)
            os.chmod(temporary, 0o644)
            os.replace(temporary, out)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise ConfigError("out", str(out), f"it cannot be written ({error}).", "Choose another place.") from None


def _asset(name: str) -> str:
    return (files("trimtab.report") / "assets" / name).read_text(encoding="utf-8")


def _names(runs: Sequence[PageRun]) -> list[str]:
    """What each run is called: its folder's name, with as much of the path before it as tells it from the others."""
    homes = [(run.summary.path.parent if run.summary.path.name == "run.sqlite" else run.summary.path) for run in runs]
    parts = [home.absolute().parts for home in homes]
    depth = 1
    while depth < max(map(len, parts)) and len({p[-depth:] for p in parts}) < len(parts):
        depth += 1
    return ["/".join(p[-depth:]) for p in parts]


# Data for the script


def _json(value: object) -> str:
    """JSON that is safe inside a script element: no character of it can end or comment out the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _array(values: NDArray[Any]) -> dict[str, Any]:
    """An array for the script: little-endian, the first bytes of all values, then the second ones, deflated.

    Exponents are much alike: apart from the digits, they all but vanish.
    """
    little = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    planes = little.reshape(-1).view(np.uint8).reshape(-1, little.itemsize).T
    return {
        "type": f"{little.dtype.kind}{little.itemsize}",
        "shape": list(values.shape),
        "z": base64.b64encode(zlib.compress(planes.tobytes(), 6)).decode(),
    }


def _run_data(run: PageRun, name: str) -> dict[str, Any]:
    points = run.points
    cells = run.cells
    kinds = {"step": np.int32, "loss_given": np.uint8}
    data: dict[str, Any] = {
        "name": name,
        "units": [unit.name for unit in run.units],
        "reasons": list(REASONS),
        "points": {
            key: _array(points[key].astype(kinds[key]) if key in kinds else points[key])
            for key in ("step", "loss", "loss_given", "grad_norm", "num_active", "num_entered", "saved_bytes")
        },
        "loss_given": run.summary.last_loss is not None,
        "num_forced_steps": run.summary.num_forced_steps,
        "learning_steps": run.learning_steps,
        "gaps": run.gaps,
        "budget": run.budget,
        "saved_bytes": run.saved_bytes,
        "alarms": [asdict(alarm) for alarm in run.alarms],
        "notices": [asdict(notice) for notice in run.notices],
        "faults": sorted([min(fault.step, fault.end_step - 1), fault.end_step] for fault in run.faults),
        "cells": None,
        "readings": [
            {
                "monitor": bands.monitor,
                "metric": bands.metric,
                "groups": bands.groups,
                "step": _array(bands.step.astype(np.int32)),
                "mean": _array(bands.mean),
                # With one place a group and all steps shown, the three are one.
                "band": None
                if np.array_equal(bands.low, bands.high, equal_nan=True)
                else [_array(bands.low), _array(bands.high)],
            }
            for bands in run.readings
        ],
    }
    if cells is not None:
        columns = ("step", "norm", "gnmr", "delta", "risk", "lock", "reason", "flags", "num_active", "num_steps")
        data["cells"] = {
            "first": cells.first_step,
            "width": cells.width_steps,
            **{key: _array(getattr(cells, key)) for key in columns},
            "error": None if np.isnan(cells.error).all() else _array(cells.error),
        }
    return data


# Static parts


def _run(i: int, run: PageRun, name: str) -> str:
    blocks = [
        f'<section class="run" id="run-{i}" aria-labelledby="run-{i}-name">',
        f'<h2 id="run-{i}-name">{escape(name)}</h2>',
        _facts(run),
        _learning(run),
        _diagnosis(run),
        _list(run.remarks, "remarks"),
    ]
    if not len(run.points["step"]):
        blocks.append("<p>The run is in its first step, or was stopped in it: there is nothing to draw yet.</p>")
    else:
        blocks.append(f'<div class="charts" data-run="{i}"><noscript>The charts need JavaScript.</noscript></div>')
    blocks += [
        _units(run.units, run.summary.num_steps),
        _episodes("Alarms", run.alarms),
        _episodes("Notices", run.notices),
        _faults(run.faults),
        _costs(run),
        "</section>",
    ]
    return "\n".join(block for block in blocks if block)


def _state(run: PageRun) -> str:
    state = "finished" if run.summary.finished else "not finished: still running, or stopped on its way"
    return state + (f" ({run.reason})" if run.reason else "")


def _facts(run: PageRun) -> str:
    s = run.summary
    steps = f"{s.num_steps:,}" + (f", from {s.first_step:,} to {s.last_step:,}" if s.first_step is not None else "")
    if s.num_skipped:
        steps += f"; {s.num_skipped:,} skipped by the loss scaler"
    model = str(run.config.get("model", "not recorded"))
    num_parameters = run.config.get("num_parameters")
    if isinstance(num_parameters, int):
        many = num_parameters >= 100_000
        model += f", {num_parameters / 1e6:,.2f}M parameters" if many else f", {_count(num_parameters, 'parameter')}"
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    facts = [
        ("model", model),
        ("recipe", s.recipe or "none, watch only"),
        ("monitors", ", ".join(map(str, _listed(run.config.get("monitors")))) or "none"),
        ("state", _state(run)),
        ("steps", steps),
        ("units", f"{s.num_units:,}, {s.num_recoverable:,} of them recoverable"),
        ("budget", _budget(run)),
        ("recovered", f"{s.recovered_share:.2%} of recoverable unit-steps, {_count(s.num_switches, 'switch', 'es')}"),
        ("by hand", _by_hand(s)),
        ("norms", f"{s.num_failed:,} failed, {s.num_unobserved:,} not observed"),
        ("last loss", "not given" if s.last_loss is None else _number(s.last_loss)),
        ("learning", _learning_fact(run)),
        ("started", s.started_at),
        ("versions", versions or "not recorded"),
        ("policy", s.policy or "not recorded"),
    ]
    rows = "".join(
        f"<div{_WIDE if name in ('policy', 'versions') else ''}><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in facts
        if value
    )
    return f'<dl class="facts">{rows}</dl>'


def _budget(run: PageRun) -> str:
    if run.budget is not None:
        return f"{_count(run.budget, 'unit')} on the recovery path at once"
    return "not stated" if run.summary.num_recoverable else "none: no unit is recoverable"


def _by_hand(s: RunSummary) -> str:
    if not s.num_forced_steps:
        return ""
    return f"{_count(s.num_forced_steps, 'step')} routed by hand, {s.forced_share:.2%} of recoverable unit-steps"


def _learning_fact(run: PageRun) -> str:
    until = run.learning_steps
    return f"up to step {until:,}; norms are judged from step {until + 1:,} on" if until else ""


def _learning(run: PageRun) -> str:
    """A line while the policy has judged nothing."""
    until, last = run.learning_steps, run.summary.last_step
    if last is None or last > until:
        return ""
    title, when = "Not judged yet.", f"At step {last:,} the policy has judged nothing yet"
    if run.summary.finished:
        title, when = "Not judged.", f"The run ended at step {last:,}, before the policy judged anything"
    text = (
        f"{when}: it only learns up to step {until:,}, and judges gradient norms and acts from step {until + 1:,} on. "
        "Until then no risk says that a unit is healthy."
    )
    return f'<div class="diagnosis open"><p><strong>{title}</strong> {escape(text)}</p></div>'


def _listed(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else ()


def _diagnosis(run: PageRun) -> str:
    """What the alarms amount to. Without one the bar is green only if every monitor has read, and nothing failed."""
    mechanism, advice, evidence = run.diagnosis or ("", "", ())
    kind = "diagnosis"
    if mechanism in ("", "healthy"):
        if run.alarms:  # of somebody else's making
            return ""
        kind, mechanism, advice = _without_alarm(run)
    more = f"<details><summary>Evidence ({len(evidence)})</summary>{_list(evidence)}</details>" if evidence else ""
    text = f"<strong>Diagnosis: {escape(mechanism)}.</strong> {escape(advice)}"
    return f'<div class="{kind}"><p>{text}</p>{more}</div>'


def _without_alarm(run: PageRun) -> tuple[str, str, str]:
    """Class, title and text of the bar of a run in which nothing has given alarm."""
    unread, failures = run.unread_monitors, _failures(run)
    if not _listed(run.config.get("monitors")):
        kind, title, text = "diagnosis open", "none", "No monitor was on; nothing could give alarm."
    elif unread:
        names = ", ".join(unread)
        so_far = "" if run.summary.finished else " yet"
        kind, title = "diagnosis open", f"not judged{so_far}"
        text = f"Nothing has given alarm, but the record has no reading of {names}{so_far}."
    else:
        kind, title, text = "diagnosis healthy", "healthy", "Nothing has given alarm."
    if failures:
        kind, title = "diagnosis", "none" if title == "healthy" else title
        text += f" Still, something is wrong: {' and '.join(failures)}."
    return kind, title, text


def _failures(run: PageRun) -> list[str]:
    loss, num_failed = run.summary.last_loss, run.summary.num_failed
    said = [] if loss is None or math.isfinite(loss) else ["the last loss is not finite"]
    return said + ([f"{_count(num_failed, 'gradient norm')} failed"] if num_failed else [])


def _units(units: Sequence[UnitTotals], num_steps: int) -> str:
    if not units or not num_steps:
        return ""
    ranked = sorted(units, key=lambda u: (-u.num_active, -u.num_failed, -_rank(u.top_risk)))[:_MOST_UNITS]
    is_forced = any(unit.num_forced for unit in units)
    rows = [
        (
            unit.name,
            f"{unit.num_active / num_steps:.1%}" if unit.recoverable else "watched only",
            *((f"{unit.num_forced / num_steps:.1%}",) if is_forced else ()),
            f"{unit.num_switches:,}",
            f"{unit.num_failed:,}",
            "" if unit.top_step is None else _number(unit.top_risk),
            "" if unit.top_step is None else f"{unit.top_step:,}",
        )
        for unit in ranked
    ]
    more = f" (the first {_MOST_UNITS} of {len(units):,})" if len(units) > _MOST_UNITS else ""
    by_hand = ("by hand",) if is_forced else ()
    heads = ("unit", "steps on recovery path", *by_hand, "switches", "failed norms", "greatest risk", "at step")
    return _fold(f"Units by time on the recovery path{more}", _table(heads, rows))


def _rank(risk: float) -> float:
    return -1.0 if math.isnan(risk) else risk


def _episodes(title: str, episodes: Sequence[AlarmSpan]) -> str:
    rows = [
        (
            f"{alarm.step:,}",
            f"{alarm.first_step:,} to " + ("the end" if alarm.end_step is None else f"{alarm.end_step:,}"),
            f"{alarm.monitor}/{alarm.metric}",
            ", ".join(place or "the model" for place in alarm.places[:4]) + (", …" if len(alarm.places) > 4 else ""),
            alarm.sentence,
        )
        for alarm in episodes
    ]
    heads = ("step", "lasted", "metric", "places", "what")
    return _fold(f"{title} ({len(rows):,})", _table(heads, rows)) if rows else ""


def _faults(faults: Sequence[FaultSpan]) -> str:
    rows = [
        (
            f"{fault.step:,}",
            f"{fault.end_step - fault.step:,}",
            fault.kind,
            fault.place or "the whole run",
            ", ".join(f"{key} {_plain(value)}" for key, value in fault.details.items()),
        )
        for fault in faults
    ]
    heads = ("from step", "steps", "fault", "place", "details")
    return _fold(f"Faults made on purpose ({len(rows):,})", _table(heads, rows)) if rows else ""


def _costs(run: PageRun) -> str:
    rows: list[tuple[str, ...]] = []
    if run.saved_bytes is not None:
        low, actual, high = run.saved_bytes
        rows = [
            ("all on the low-cost path", f"{low:,.0f}", f"{low / high:.1%}"),
            ("as it was, on average", f"{actual:,.0f}", f"{actual / high:.1%}"),
            ("all on the recovery path", f"{high:,.0f}", "100.0%"),
        ]
    said = []
    if run.flops:
        said.append(f"The recoverable units' products take {run.flops:,.0f} FLOPs per token, forward and backward.")
    if run.step_seconds is not None:
        said.append(f"A step took {_milliseconds(run.step_seconds)} ms (median), measuring and recording included.")
    if not rows and not said:
        return ""
    table = _table(("recoverable units", "bytes kept for backward, per token", "of the recovery path"), rows)
    return _fold("Costs", (table if rows else "") + "".join(f"<p>{escape(text)}</p>" for text in said), is_open=True)


def _comparison(runs: Sequence[PageRun], names: Sequence[str]) -> str:
    models = list(dict.fromkeys(str(run.config.get("model", "not recorded")) for run in runs))
    is_forced = any(run.summary.num_forced_steps for run in runs)
    heads = (
        "run", "state", "recipe", "steps", "recovered", *(("by hand",) if is_forced else ()),
        "switches", "faults", "alarms", "last loss", "mean of last tenth", "ms a step", "bytes kept per token",
    )  # fmt: skip
    body = ""
    for i, (run, name) in enumerate(zip(runs, names, strict=True)):
        s = run.summary
        kept = "" if run.saved_bytes is None else f"{run.saved_bytes[1]:,.0f}"
        values = (
            "finished" if s.finished else "not finished",
            (s.recipe or "none").split("(")[0],
            f"{s.num_steps:,}",
            f"{s.recovered_share:.1%}",
            *((f"{s.forced_share:.1%}" if s.num_forced_steps else "",) if is_forced else ()),
            f"{s.num_switches:,}",
            f"{s.num_faults:,}",
            f"{s.num_alarms:,}",
            "" if s.last_loss is None else _number(s.last_loss),
            "" if run.last_losses is None else _number(run.last_losses),
            "" if run.step_seconds is None else _milliseconds(run.step_seconds),
            kept,
        )
        cells = "".join(f"<td>{escape(value)}</td>" for value in values)
        link = f'<a href="#run-{i}">{escape(name)}</a>'
        body += f'<tr><th scope="row"><span class="swatch" data-series="{i}"></span>{link}</th>{cells}</tr>'
    note = ""
    if len(models) > 1:
        note = (
            f"<p>The runs are of different models ({escape(', '.join(models))}): their losses can only be compared "
            "where text and tokenizer are the same.</p>"
        )
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    return (
        '<section id="comparison" aria-labelledby="comparison-name">'
        '<h2 id="comparison-name">Runs beside each other</h2>'
        f'{note}<div class="chart-box" id="overlay"></div>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="Summary of the runs">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows[:_MOST_ROWS])
    more = f"<p>And {len(rows) - _MOST_ROWS:,} more.</p>" if len(rows) > _MOST_ROWS else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Table">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{more}"
    )


def _fold(title: str, content: str, is_open: bool = False) -> str:
    return f"<details{' open' if is_open else ''}><summary>{escape(title)}</summary>{content}</details>"


def _list(texts: Iterable[str], kind: str = "") -> str:
    texts = list(texts)
    shown = texts[:_MOST_ROWS] + ([f"And {len(texts) - _MOST_ROWS:,} more."] if len(texts) > _MOST_ROWS else [])
    items = "".join(f"<li>{escape(text)}</li>" for text in shown)
    return f'<ul class="{kind}">{items}</ul>' if shown else ""


def _number(value: float) -> str:
    if math.isnan(value):
        return "not a number" if value != value else ""
    if math.isinf(value):
        return "failed" if value > 0 else "-inf"
    return f"{value:.4g}" if abs(value) < 1e-3 or abs(value) >= 1e5 else f"{value:,.4f}".rstrip("0").rstrip(".")


def _milliseconds(seconds: float) -> str:
    """Three digits, which is more than a median of step times is good for.

    Example:
        >>> _milliseconds(0.0804546), _milliseconds(0.0012), _milliseconds(12.3456)
        ('80.5', '1.2', '12,346')
    """
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _count(number: int, name: str, plural: str = "s") -> str:
    return f"{number:,} {name}{'' if number == 1 else plural}"


def _plain(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
