"""A page of results from the experiments' summaries.

Every sentence follows from their figures by the rules of ``verdicts``, and every table from ``tables``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.experiments.compare.arms import read_arm
from trimtab.experiments.papers.layout import COLUMNS
from trimtab.experiments.papers.repair import harm_of
from trimtab.experiments.papers.source import source_text
from trimtab.experiments.papers.tables import cell_text, figure_of, markdown_grid, markdown_table
from trimtab.experiments.papers.verdicts import Outcome, budget_line, direct_line, harm_line, verdicts_of

__all__ = ["judged_arms", "results_page", "scenario_lines"]

_RULES = """## How to read it

- *Natural*: the low-cost path is all that is done to the model; its harm is its loss over that of the unquantized
  model. *Injected*: faults on purpose; the harm is what they cost the low-cost path.
- *Repaired*: of that harm, the share that an arm did not suffer, as a ratio of means over seeds, with the middle 95% of
  resampled seeds. There is harm to repair where its mean is above twice its standard error over the seeds; with three
  seeds that is a low bar.
- It *helped* where its interval lies above 0, and above that of an arm with as many units on the recovery path in each
  step, chosen at random. *Next to nothing*: the interval lies within 5% on both sides of 0.
- *Recall*: of the faulty unit-steps, those with a risk above 1 (a recovered unit's gradient is healthy again, and its
  risk falls). *Precision*: of the risks above 1, those in a fault.
- Every sentence about a scenario is made from its figures by fixed rules (`trimtab.experiments.papers.verdicts`)."""

_GROUPS: Sequence[tuple[str, Sequence[Outcome]]] = (
    ("Recovery helped, more than at random", ("helped",)),
    ("It helped, but is not told from random, or there is no random arm beside it", ("as_random", "untested")),
    ("It is not told whether it helped", ("not_told", "one_seed")),
    ("It repaired next to nothing", ("slight",)),
    ("It did harm", ("worse",)),
    ("No figure", ("unknown",)),
)
_NOT_JUDGED = ("random", "random-direct")


def judged_arms(comparison: Mapping[str, Any]) -> list[str]:
    """The arms that something is said of: those that recover or damp by a rule."""
    kinds = {arm: read_arm(arm) for arm in comparison["arms"]}
    return [
        arm
        for arm, one in kinds.items()
        if one.name not in _NOT_JUDGED and (one.kind.has_budget or one.kind.scores_decide)
    ]


def scenario_lines(comparison: Mapping[str, Any]) -> list[str]:
    """What a scenario's figures say, as the items of a list."""
    lines = [harm_line(comparison)]
    harm = harm_of(comparison)
    if harm is None or harm["did_harm"]:
        for verdict in verdicts_of(comparison, judged_arms(comparison)):
            lines.append(verdict.sentence)
        direct = direct_line(comparison, comparison["gnmr"], comparison["direct"])
        lines += [direct] if direct else []
    for arm in judged_arms(comparison):
        budget = budget_line(comparison, arm)
        lines += [budget] if budget else []
    return [f"- {line}" for line in lines]


def results_page(summaries: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """The page.

    Args:
        summaries: Of each experiment, where its file is and what it holds, in the order of the page.
    """
    parts = [
        "# Results of the paper's experiments, in small",
        "This page is generated: `python -m trimtab.experiments.results_page runs -o docs/experiments/results.md`.",
        _sources(summaries),
        _RULES,
        "## In short\n\n" + _in_short(summaries),
        "## GNMR and the channel error\n\n" + _signals(summaries),
    ]
    for _, summary in summaries:
        parts.append(_section(summary))
    return "\n\n".join(parts) + "\n"


def _sources(summaries: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    headings = ["command", "file", "commit", "seeds", "minutes", "torch"]
    rows = []
    for path, summary in summaries:
        steps = "" if summary["steps"] is None else f" --steps {summary['steps']}"
        count = len(summary["seeds"])
        first = "" if summary["seeds"][0] == 0 else f" --first-seed {summary['seeds'][0]}"
        rows.append(
            [
                f"`trimtab experiment {summary['experiment']} --seeds {count}{first}{steps}`",
                f"`{path}`",
                source_text(dict(summary["source"])),
                str(count),
                f"{summary['seconds'] / 60:.1f}",
                str(summary["versions"].get("torch", "-")),
            ]
        )
    return markdown_grid(headings, rows, num_words=3)


def _in_short(summaries: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Where recovery helped and where it did not: each scenario and arm under its outcome."""
    unharmed: list[str] = []
    harmed: list[str] = []
    by_outcome: dict[Outcome, list[tuple[str, str]]] = {one: [] for _, outcomes in _GROUPS for one in outcomes}
    for _, summary in summaries:
        for name, comparison in summary["comparisons"].items():
            place = f"{summary['experiment']}, {name}"
            harm = harm_of(comparison)
            if harm is not None and not harm["did_harm"]:
                unharmed.append(place)
                continue
            harmed.append(place)
            for verdict in verdicts_of(comparison, judged_arms(comparison)):
                if verdict.outcome in by_outcome:
                    share = "" if verdict.share is None else f" {verdict.share:.0%}"
                    by_outcome[verdict.outcome].append((place, f"{verdict.title}{share}"))
    lines = [f"- **No harm to repair**: {_listed(unharmed)}.", f"- Harm: {_listed(harmed)}."]
    for title, outcomes in _GROUPS:
        found = [pair for outcome in outcomes for pair in by_outcome[outcome]]
        if not found:
            lines.append(f"- **{title}**: nowhere.")
            continue
        lines.append(f"- **{title}**:")
        for place in dict.fromkeys(place for place, _ in found):
            lines.append(f"  - {place}: {', '.join(arm for other, arm in found if other == place)}")
    return "\n".join(lines)


def _listed(places: Sequence[str]) -> str:
    return "; ".join(places) if places else "nowhere"


def _signals(summaries: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Recall, precision and repaired share of both signals, in each scenario that has both or one."""
    headings = ["experiment", "scenario", "regime", "signal", "recall", "precision", "repaired"]
    rows = []
    for _, summary in summaries:
        for name, comparison in summary["comparisons"].items():
            for signal, arm in (("GNMR", comparison["gnmr"]), ("GNMR and channel error", comparison["direct"])):
                if arm is None or arm not in comparison["arms"]:
                    continue
                keys = ("recall", "precision", "repaired")
                cells = [cell_text(figure_of(comparison, arm, key), COLUMNS[key].kind) for key in keys]
                rows.append([summary["experiment"], name, comparison["regime"], f"{signal} (`{arm}`)", *cells])
    return markdown_grid(headings, rows, num_words=4) + "\n\nA dash: no faults to recall, no risk above 1, or no harm."


def _section(summary: Mapping[str, Any]) -> str:
    parts = [f"## {summary['title']} (`{summary['experiment']}`)"]
    parts.append("\n".join(f"- {note}" for note in summary["notes"]))
    for name, comparison in summary["comparisons"].items():
        parts.append(
            f"### {name} ({comparison['regime']})\n\n{comparison['about']} {comparison['steps']} steps, "
            f"{comparison['num_parameters'] / 1e6:.2f}M parameters, {comparison['num_units']} units."
        )
        parts.append("\n".join(scenario_lines(comparison)))
    parts += [markdown_table(table, "###") for table in summary["tables"]]
    return "\n\n".join(part for part in parts if part)
