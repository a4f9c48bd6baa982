"""A page of results from the experiments' summaries.

Every sentence follows from their figures by the rules of ``verdicts``, and every table from ``tables``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.experiments.compare.arms import read_arm
from trimtab.experiments.papers.repair import harm_of, is_natural
from trimtab.experiments.papers.tables import cell_text, figure_of, markdown_grid, markdown_table
from trimtab.experiments.papers.verdicts import Outcome, budget_line, direct_line, harm_line, verdicts_of
from trimtab.experiments.source import source_text

__all__ = ["judged_arms", "results_page", "scenario_lines", "sources_text"]

_RULES = """## How to read it

- *Natural*: the low-cost path is all that is done to the model; its harm is its loss over that of the unquantized
  model. *Injected*: faults on purpose; the harm is what they cost the low-cost path.
- Runs of one seed share weights, data and faults, and are compared seed by seed. Every interval is a 95% one, of
  Student's t over the seeds; with three seeds these are wide, and "not told" does not mean "no effect".
  Each is of one arm by itself: nothing corrects for how many arms are looked at, and of many some mislead by chance.
- *Repaired*: of that harm, the share that an arm did not suffer, as a ratio of means over seeds; its interval takes the
  harm of each seed as it was. There is harm to repair where it is above 0 on every seed and its mean is more than twice
  its standard error; one harmless cause in some fourteen passes that with three seeds.
- It *helped* where that interval lies above 0; *more than at random* where an arm with as many units on the recovery
  path in each step, chosen at random, repaired less, by an interval of the difference of the two shares above 0.
  *Next to nothing*: the interval lies within 5% on both sides of 0.
- *Diverged*: a loss is no finite number. Such a seed is never left out: there is then no share. (1/3) after a mean says
  that it is of one seed of three.
- *Recall*: of the faulty unit-steps, those with a risk above 1. *Event recall*: of the faults, those with one at least
  once. *Precision*: of the risks above 1, those in a fault or soon after it. All signals are measured on the same runs,
  in which nothing is recovered, with the same tolerance and from the same step on. A signal that is often above 1 finds
  long faults by chance: read its event recall beside its precision.
- Step times are of a CPU on which every low format is emulated, in processor time of one thread. The unquantized model
  runs under a guard too, so that what watching costs is in every arm and cancels out of their ratios.
- Every sentence about a scenario is made from its figures by fixed rules (`trimtab.experiments.papers.verdicts`)."""

_GROUPS: Sequence[tuple[str, Sequence[Outcome]]] = (
    ("Recovery helped, more than at random", ("helped",)),
    ("It helped, but is not told from random", ("as_random",)),
    ("It helped, but less than random", ("below_random",)),
    ("It helped, and random recovery has no figure: it diverged", ("random_diverged",)),
    ("It helped; there is no random arm beside it", ("untested",)),
    ("It helped against the low-cost path by damping, which recovers nothing", ("damping",)),
    ("It is not told whether it helped", ("not_told", "no_interval")),
    ("One seed, by which nothing is told", ("one_seed",)),
    ("It repaired next to nothing", ("slight",)),
    ("It did harm", ("worse",)),
    ("A loss diverged, so that there is no share", ("diverged",)),
    ("No figure", ("unknown",)),
)
_SIGNALS = (("gnmr", "GNMR, robust"), ("gnmr-paper", "GNMR, published (1.5, 1.3)"), ("error", "channel error"))
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
    if harm is None or harm["did_harm"] is not False:
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
    headings = ["command", "file", "source", "seeds", "worker minutes", "torch"]
    rows = []
    for path, summary in summaries:
        rows.append(
            [
                f"`{summary['command']}`",
                f"`{path}`",
                sources_text(summary),
                str(len(summary["seeds"])),
                f"{summary['worker_seconds'] / 60:.1f}",
                str(summary["versions"].get("torch", "-")),
            ]
        )
    return markdown_grid(headings, rows, num_words=3)


def sources_text(summary: Mapping[str, Any]) -> str:
    """The source of an experiment's figures: that of its parts, for a start that found them finished trained none.

    Example:
        >>> parts = {"commit": "abc1234", "modified": False, "version": "0.1"}
        >>> now = {"commit": "def5678", "modified": True, "version": "0.1"}
        >>> sources_text({"comparisons": {"one": {"source": parts}}, "source": now})
        'abc1234'
    """
    sources = [one["source"] for one in summary["comparisons"].values() if one.get("source")]
    return "; ".join(dict.fromkeys(source_text(dict(one)) for one in sources or [summary["source"]]))


def _in_short(summaries: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Where recovery helped and where it did not: each scenario and arm under its outcome."""
    unharmed: list[str] = []
    harmed: list[str] = []
    open_ones: list[str] = []
    by_outcome: dict[Outcome, list[tuple[str, str]]] = {one: [] for _, outcomes in _GROUPS for one in outcomes}
    for _, summary in summaries:
        for name, comparison in summary["comparisons"].items():
            place = f"{summary['experiment']}, {name}"
            harm = harm_of(comparison)
            if harm is not None and harm["did_harm"] is False:
                unharmed.append(place)
                continue
            (open_ones if harm is None or harm["did_harm"] is None else harmed).append(place)
            for verdict in verdicts_of(comparison, judged_arms(comparison)):
                if verdict.outcome in by_outcome:
                    share = "" if verdict.share is None else f" {verdict.share:.0%}"
                    by_outcome[verdict.outcome].append((place, f"{verdict.title}{share}"))
    lines = [
        f"- **No harm to repair that these seeds tell**: {_listed(unharmed)}.",
        f"- Harm: {_listed(harmed)}.",
        f"- Whether there was harm is open (one seed, a loss that diverged, an arm that is missing): "
        f"{_listed(open_ones)}.",
    ]
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
    """What each signal sees of the faults in the same untreated runs, and what an arm that goes by it repaired."""
    headings = ["experiment", "scenario", "signal", "recall", "event recall", "precision", "acting arm", "repaired"]
    rows = []
    for _, summary in summaries:
        for name, comparison in summary["comparisons"].items():
            for signal, title in _SIGNALS:
                seen = (comparison.get("signals") or {}).get(signal)
                if seen is None or is_natural(comparison):
                    continue
                cells = [cell_text(seen.get(key), "percent") for key in ("recall", "event_recall", "precision")]
                arm = _acting(comparison, signal)
                repaired = "-" if arm is None else cell_text(figure_of(comparison, arm, "repaired"), "share")
                rows.append([summary["experiment"], name, title, *cells, "-" if arm is None else f"`{arm}`", repaired])
    if not rows:
        return "No faults were injected, or no low-cost path was run that signals could be measured on."
    return markdown_grid(headings, rows, num_words=3) + (
        "\n\nRecall and precision are of the low-cost path's runs, in which nothing acts on a signal. *Repaired* is of "
        "an arm that does, and of that alone. A dash: no risk above 1, no such arm, or no harm that is told."
    )


def _acting(comparison: Mapping[str, Any], signal: str) -> str | None:
    """The arm that goes by that signal alone; for the channel error the one beside gradient norms where there is none.

    Example:
        >>> arms = {"gnmr": {}, "gnmr-paper@setting=moe": {}, "direct": {}}
        >>> [_acting({"arms": arms}, signal) for signal in ("gnmr", "gnmr-paper", "error")]
        ['gnmr', None, 'direct']
    """
    if signal != "error":
        # Another setting of its thresholds would see other things.
        return signal if signal in comparison["arms"] else None
    names = ("direct-only", "direct")
    return next((arm for name in names for arm in comparison["arms"] if read_arm(arm).name == name), None)


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
