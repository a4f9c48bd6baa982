"""``trimtab replay``: what another policy would have decided, as a table, JSON or a picture."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict

from trimtab.errors import TrimtabWarning
from trimtab.report.settings import ReplaySettings

__all__ = ["show_replay"]


def show_replay(settings: ReplaySettings) -> int:
    """Print what was asked for.

    Returns: The exit status: 1 where the recorded policy does not give the recorded decisions.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from trimtab.control import preset
    from trimtab.trace import open_run
    from trimtab.trace.what_if import UNKNOWN, changed, recorded_policy, sweep, verify, what_if
    from trimtab.trace.what_if_picture import write_picture

    with open_run(settings.path) as run:
        run.events()  # no decision needs them, but what is lost of them is to be told
        if settings.verifies:
            verified, damage = verify(run), run.damage
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", TrimtabWarning)  # of the length of a run to come
                base = preset(settings.preset, total_steps=run.last_step) if settings.preset else recorded_policy(run)
            base = changed(base, settings.changes)
            name = ", ".join([*filter(None, [settings.preset]), *(f"{k}={v}" for k, v in settings.changes.items())])
            told = sweep(run, settings.grid, base) if settings.sweep else what_if(run, {name: base})
            damage = run.damage
    console = Console()
    if settings.verifies:
        notes = [*verified.notes, *([damage] if damage else [])]
        if settings.json:
            print(json.dumps({"is_exact": verified.is_exact, **asdict(verified), "notes": notes}, indent=1))
        elif verified.is_exact:
            which = f"all {verified.num_steps} steps" + ("" if damage is None else " that can be read")
            said = f"The recorded policy gives exactly the recorded decisions, in {which}."
            console.print(said, highlight=False)
        else:
            console.print(
                f"The recorded policy does not give the recorded decisions: of {verified.num_steps} steps, "
                f"{verified.num_different} unit-steps differ, first at step {verified.first_different_step}.",
                highlight=False,
            )
        for note in () if settings.json else notes:
            console.print(f"- {note}", highlight=False, markup=False)
        return 0 if verified.is_exact else 1
    if settings.plot is not None:
        write_picture(told, settings.plot)
    if settings.json:
        print(json.dumps(told.to_dict() | {"damage": damage}, indent=1))
        return 0
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("policy", overflow="fold", min_width=20)
    headings = ["recovered", "switches", "differ", *(["caught", "after", "false"] if told.faults else [])]
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, one in {"as recorded": told.recorded, **told.outcomes}.items():
        after = one.mean_latency_steps
        caught = [f"{one.num_caught}/{len(told.faults)}", "" if after is None else f"{after:.1f}", str(one.num_false)]
        table.add_row(
            escape(name),
            f"{one.recovered_share:.2%}",
            str(one.num_switches),
            str(one.num_different),
            *(caught if told.faults else []),
        )
    console.print(table)
    explained = "recovered: of the recoverable unit-steps. differ: unit-steps decided in another way than recorded."
    if told.faults:
        explained += (
            " caught: faults whose unit was on the recovery path while they lasted; after: how many of their steps had "
            "gone by. false: unit-steps on it outside any fault of the unit."
        )
    lines = [explained, UNKNOWN, *told.notes, *([damage] if damage else [])]
    if told.num_faults_elsewhere:
        lines.insert(1, f"{told.num_faults_elsewhere} recorded faults are at no unit, and are held against none.")
    if settings.plot is not None:
        lines.append(f"Picture: {settings.plot}")
    for note in lines:
        console.print(f"- {note}", highlight=False, markup=False)
    return 0
