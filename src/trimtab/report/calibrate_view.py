"""``trimtab calibrate``: thresholds from the record of a healthy run, as tables, JSON and code to paste."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from trimtab.errors import ConfigError, TrimtabError
from trimtab.report.settings import CalibrateSettings

__all__ = ["show_calibration"]


def show_calibration(settings: CalibrateSettings) -> None:
    """Print the thresholds that were found."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from trimtab.monitors import calibrate
    from trimtab.trace import open_run
    from trimtab.trace.what_if import changed, healthy_thresholds, recorded_policy, steps_to_calibrate

    rate = settings.false_per_1000
    with open_run(settings.path) as run:
        found = healthy_thresholds(run, rate)
        num_steps = run.num_steps
        if num_steps * rate < 1000:
            allowed = f"unit-steps of one step come together, and {rate:g} in 1,000 is not seen in so few steps."
            remedy = f"Record at least {steps_to_calibrate(run, rate)} steps, or allow more."
            raise ConfigError("record", f"{num_steps} steps", allowed, remedy)
        rules, left_out = _recorded_rules(run)
        calibration = calibrate(run, rules, rate) if rules else None
        try:
            policy = changed(recorded_policy(run), {"alpha": found.alpha, "beta": found.beta})
        except ConfigError:
            from trimtab.control import Policy

            policy = Policy(alpha=found.alpha, beta=found.beta)
    calibrated = {} if calibration is None else calibration.found
    left_out |= {} if calibration is None else calibration.left_out
    code = _code_to_paste(policy, calibrated)
    note = (
        f"{found.num_unit_steps} healthy unit-steps of {found.num_steps} steps. Were they independent, the rate would "
        f"be below {found.upper_per_1000:.3g} in 1,000 at 95%; a bad step shows in many units at once, so the bound is "
        "wider than that. Alarms: upper ends of exact one-sided 95% Poisson intervals."
    )
    if settings.json:
        alarms = {
            monitor: {
                metric: {
                    "detector": one.rule.detector.to_dict(),
                    "num_false": one.num_false,
                    "upper_per_1000_steps": one.upper_per_1000_steps,
                }
                for metric, one in metrics.items()
            }
            for monitor, metrics in calibrated.items()
        }
        scores = asdict(found) | {"upper_per_1000": found.upper_per_1000}
        print(
            json.dumps({"scores": scores, "alarms": alarms, "left_out": left_out, "note": note, "code": code}, indent=1)
        )
        return
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    for heading in ("what", "threshold"):
        table.add_column(heading, overflow="fold")
    for heading in ("false", "in 1,000", "at most"):
        table.add_column(heading, justify="right")
    triggers = (str(found.num_false), f"{1000 * found.num_false / found.num_unit_steps:.3g}")
    table.add_row(
        "GNMR, Delta", f"alpha={found.alpha:g}, beta={found.beta:g}", *triggers, f"{found.upper_per_1000:.3g}"
    )
    for monitor, metrics in calibrated.items():
        for metric, one in metrics.items():
            alarms_a_step = f"{1000 * one.num_false / num_steps:.3g}"
            bound = f"{one.upper_per_1000_steps:.3g}"
            detector = _detector_code(one.rule.detector)
            table.add_row(f"{monitor}/{metric}", detector, str(one.num_false), alarms_a_step, bound)
    console = Console()
    console.print(table)
    said = [note, *(f"{what}: {why}." for what, why in left_out.items())]
    if found.num_failed:
        said.append(f"{found.num_failed} unit-steps had a failed norm, which no threshold lets pass: is it healthy?")
    for line in said:
        console.print(f"- {line}", highlight=False, markup=False)
    print(f"\n{code}")


def _recorded_rules(run: Any) -> tuple[list[Any], dict[str, str]]:
    """The alarm rules of a record's monitors: as recorded, or else the defaults of ours; and what has none."""
    from types import SimpleNamespace

    from trimtab.monitors import AttentionSpectrum, ResidualNorm, Router, ShiftResidual, UsualSignals

    kinds: tuple[Any, ...] = (AttentionSpectrum, ResidualNorm, Router, ShiftResidual, UsualSignals)
    defaults = {kind.name: kind for kind in kinds}
    recorded = run.config.get("alarm_rules")
    rules: list[Any] = []
    left_out: dict[str, str] = {}
    for name in dict.fromkeys(monitor for monitor, _ in run.reading_keys):
        if isinstance(recorded, Mapping):
            own = {}
            for metric, values in recorded.get(name, {}).items():
                try:
                    own[metric] = _rule_from(values)
                except (TrimtabError, AttributeError, KeyError, TypeError) as error:
                    left_out[f"{name}/{metric}"] = f"the recorded rule cannot be built again ({error})"
        elif name in defaults:
            own = dict(defaults[name]().alarm_rules)
        else:
            left_out[name] = "the record holds no rules, and it is no monitor of trimtab"
            continue
        if own:
            rules.append(SimpleNamespace(name=name, alarm_rules=own))
    return rules, left_out


def _rule_from(values: Mapping[str, Any]) -> Any:
    """The inverse of ``AlarmRule.to_dict``."""
    from trimtab.monitors import Above, AlarmRule, AnyOf, Cusum, Floor, PeakDrop

    def detector_from(settings: Mapping[str, Any]) -> Any:
        rest = dict(settings)
        kind = rest.pop("detector")
        if kind == "AnyOf":
            return AnyOf(*map(detector_from, rest["detectors"]))
        return {detector.__name__: detector for detector in (Above, Cusum, Floor, PeakDrop)}[kind](**rest)

    return AlarmRule(**{**values, "detector": detector_from(values["detector"])})


def _code_to_paste(policy: Any, calibrated: Mapping[str, Mapping[str, Any]]) -> str:
    """Python that sets what was found; a monitor is called by its name."""
    set_ = {f.name: getattr(policy, f.name) for f in fields(policy) if getattr(policy, f.name) != f.default}
    lines = [
        "from trimtab import Policy",
        f"policy = Policy({', '.join(f'{name}={value!r}' for name, value in set_.items())})",
    ]
    detectors = {name for metrics in calibrated.values() for one in metrics.values() for name in _kinds(one.rule)}
    if detectors:
        lines.insert(1, f"from trimtab.monitors import {', '.join(sorted(detectors | {'AlarmRule'}))}")
    for monitor, metrics in calibrated.items():
        lines.append(f"{monitor}.alarm_rules = {{")
        for metric, one in metrics.items():
            rest = "" if one.rule.mechanism is None else f", mechanism={one.rule.mechanism!r}"
            rest += "" if one.rule.fire_at == 1 else f", fire_at={one.rule.fire_at!r}"
            rule = f"AlarmRule({_detector_code(one.rule.detector)}, {one.rule.sentence!r}{rest})"
            lines.append(f"    {metric!r}: {rule},")
        lines.append("}")
    return "\n".join(lines)


def _kinds(rule: Any) -> set[str]:
    return {type(one).__name__ for one in (rule.detector, *getattr(rule.detector, "detectors", ()))}


def _detector_code(detector: Any) -> str:
    parts = getattr(detector, "detectors", None)
    return repr(detector) if parts is None else f"AnyOf({', '.join(map(_detector_code, parts))})"
