"""Every sentence of the page of results follows from figures, by a rule that is hit here."""

import json

import pytest

from trimtab.errors import ConfigError
from trimtab.experiments.compare.measures import over_seeds
from trimtab.experiments.papers.page import judged_arms, results_page, scenario_lines
from trimtab.experiments.papers.repair import harm_of
from trimtab.experiments.papers.verdicts import outcome_of, verdicts_of
from trimtab.experiments.results_page import find_summaries, main

SEEDS = (0, 1, 2)


def arm(losses, **figures):
    return {
        "title": figures.pop("title", "an arm"),
        "scores_decide": True,
        "by_seed": {str(seed): {"val_loss": loss} for seed, loss in zip(SEEDS, losses, strict=False)},
        **{key: over_seeds([value]) for key, value in figures.items()},
    }


def seen(recall, event_recall, precision):
    """What the engine tells of a signal."""
    figures = {"recall": recall, "event_recall": event_recall, "precision": precision}
    return {key: over_seeds([value] * len(SEEDS)) for key, value in figures.items()}


def comparison(faults="outlier-bursts", seeds=SEEDS, **arms):
    """Harm is 1 nat a seed: 3 on the low-cost path, 2 without faults."""
    usual = {"static-low": arm([3.0, 3.1, 3.2]), "static-low-clean": arm([2.0, 2.1, 2.2])}
    return {
        "faults": faults,
        "seeds": list(seeds),
        "steps": 100,
        "num_parameters": 700_000,
        "num_units": 28,
        "arms": usual | {name.replace("_", "-"): figures for name, figures in arms.items()},
        "regime": "natural" if faults == "none" else "injected",
        "about": "Something is done.",
        "gnmr": "gnmr",
        "direct": "direct",
    }


def repaired(share, wobble=0.0):
    """Losses of an arm that repaired that share, on each seed by so much more or less."""
    return [3.0 + i / 10 - share + d for i, d in enumerate((-wobble, 0.0, wobble))]


def outcome(**arms):
    (found,) = verdicts_of(comparison(**arms), ["gnmr"])
    return found


def test_helped_needs_a_paired_difference_to_random_recovery_above_0():
    found = outcome(gnmr=arm(repaired(0.8, 0.02), title="GNMR"), random=arm(repaired(0.1, 0.02)))
    assert found.outcome == "helped"
    said = "GNMR: repaired 80% (75 to 85); against random 70 points more (70 to 70)."
    assert found.sentence.startswith(said)
    assert "more than as many units at random" in found.sentence


def test_a_difference_that_holds_in_every_seed_is_told_though_the_two_intervals_overlap():
    found = outcome(gnmr=arm(repaired(0.6, 0.1)), random=arm(repaired(0.5, 0.1)))
    assert found.interval[0] < 0.5
    assert found.outcome == "helped"


def test_a_difference_that_changes_from_seed_to_seed_is_not_told_from_random():
    found = outcome(gnmr=arm(repaired(0.5, 0.1)), random=arm(repaired(0.45, -0.1)))
    assert found.outcome == "as_random"
    assert "not told from as many units at random" in found.sentence


def test_less_than_random_recovery_is_said_as_that():
    found = outcome(gnmr=arm(repaired(0.4, 0.02)), random=arm(repaired(0.8, 0.02)))
    assert found.outcome == "below_random"
    assert "-40 points more" in found.sentence
    assert "less than as many units at random" in found.sentence


def test_random_recovery_that_diverged_is_no_missing_arm():
    found = outcome(gnmr=arm(repaired(0.8, 0.02)), random=arm([None, 2.5, 2.5]))
    assert found.outcome == "random_diverged"
    assert found.sentence.endswith("it diverged. Diverged: it, on 1 of 3 seeds.")


def test_damping_alone_is_compared_with_the_low_cost_path_only():
    figures = comparison(damping_only=arm(repaired(0.8, 0.02)), gnmr=arm(repaired(0.5)))
    (found,) = verdicts_of(figures, ["damping-only"])
    assert found.outcome == "damping"
    assert "recovers nothing; it only scales gradients back" in found.sentence
    (found,) = verdicts_of(comparison(damping_only=arm(repaired(-0.5, 0.02))), ["damping-only"])
    assert found.outcome == "worse"


def test_without_a_random_arm_it_is_not_said_to_be_better_than_one():
    found = outcome(gnmr=arm(repaired(0.5, 0.1)))
    assert found.outcome == "untested"
    assert "no arm with as many units at random" in found.sentence


def test_an_interval_with_0_in_it_tells_nothing():
    assert outcome(gnmr=arm(repaired(0.1, 0.3))).outcome == "not_told"
    assert "includes 0" in outcome(gnmr=arm(repaired(0.1, 0.3))).sentence


def test_an_interval_close_to_0_on_both_sides_is_next_to_nothing():
    assert outcome(gnmr=arm(repaired(0.01, 0.001))).outcome == "slight"
    assert outcome(gnmr=arm(repaired(-0.01, 0.001))).outcome == "slight"


def test_worse_than_the_low_cost_path_is_called_harm():
    found = outcome(gnmr=arm(repaired(-0.5, 0.1)))
    assert found.outcome == "worse"
    assert "did harm" in found.sentence


def test_where_there_is_no_harm_nothing_is_said_to_be_repaired():
    without = comparison(gnmr=arm(repaired(0.8)))
    without["arms"]["static-low-clean"] = arm([3.1, 3.0, 3.2])
    assert not harm_of(without)["did_harm"]
    assert [v.outcome for v in verdicts_of(without, ["gnmr"])] == ["no_harm"]
    (line,) = scenario_lines(without)
    assert "**no harm to repair** that these seeds tell, since it is not above 0 on every seed" in line
    assert "The faults cost the low-cost path" in line
    # Harm on every seed of which one speaks louder than the others together.
    without["arms"]["static-low-clean"] = arm([2.99, 3.09, 2.6])
    assert "since it is no more than twice its standard error" in scenario_lines(without)[0]


def test_without_faults_the_harm_is_that_of_the_low_cost_path_itself():
    natural = comparison(faults="none", gnmr=arm(repaired(0.8, 0.02)), unquantized_clean=arm([2.0, 2.1, 2.2]))
    del natural["arms"]["static-low-clean"]
    assert harm_of(natural)["mean"] == pytest.approx(1.0)
    lines = scenario_lines(natural)
    assert "The low-cost path cost 1.0000 nats a token over the unquantized model" in lines[0]
    assert "80%" in lines[1]


def test_one_seed_tells_nothing():
    one = comparison(seeds=(0,), gnmr=arm([2.2]))
    assert harm_of(one)["did_harm"] is None
    (found,) = verdicts_of(one, ["gnmr"])
    assert found.outcome == "one_seed"
    assert found.share is None
    lines = scenario_lines(one)
    assert "1.0000 nats a token" in lines[0]
    assert "one seed: whether that is more than chance is not known" in lines[0]
    assert "One seed has no interval" in lines[1]


def test_an_arm_that_diverged_on_some_seed_has_no_share_however_well_the_others_did():
    found = outcome(gnmr=arm([2.0, None, 2.2]))
    assert found.outcome == "diverged"
    assert found.share is None
    assert found.sentence.endswith("Diverged: this arm on 1 of 3 seeds.")


@pytest.mark.parametrize(
    ("name", "words"),
    [("static-low", "the low-cost path on 2 of 3 seeds"), ("static-low-clean", "without faults on 2 of 3 seeds")],
)
def test_a_reference_that_diverged_is_neither_harm_nor_none(name, words):
    figures = comparison(gnmr=arm(repaired(0.5)))
    figures["arms"][name] = arm([None, 3.0, None])
    assert harm_of(figures)["did_harm"] is None
    lines = scenario_lines(figures)
    assert "has no figure" in lines[0]
    assert words in lines[0]
    assert "no harm" not in " ".join(lines)
    assert [v.outcome for v in verdicts_of(figures, ["gnmr"])] == ["diverged"]


def test_a_share_without_an_interval_tells_nothing():
    found = {"did_harm": True, "share": 0.5, "interval": None}
    assert outcome_of(found, num_seeds=3) == "no_interval"


def test_an_arm_that_is_missing_is_no_figure():
    bare = comparison(gnmr=arm(repaired(0.5)))
    del bare["arms"]["static-low-clean"]
    assert [v.outcome for v in verdicts_of(bare, ["gnmr", "not-run"])] == ["unknown"]
    assert "is not known" in scenario_lines(bare)[0]
    assert outcome_of(None, num_seeds=3) == "unknown"


def test_the_channel_error_is_set_beside_gnmr():
    def said(ours, theirs):
        return scenario_lines(comparison(gnmr=arm(theirs), direct=arm(ours)))[-1]

    assert "more was repaired than by gradient norms" in said(repaired(0.9, 0.02), repaired(0.1, 0.02))
    assert "less was repaired" in said(repaired(0.1, 0.02), repaired(0.9, 0.02))
    assert "Neither is told to repair more" in said(repaired(0.5, 0.2), repaired(0.4, -0.2))
    # Seed by seed the one is better, though they vary more than they differ.
    assert "more was repaired" in said(repaired(0.5, 0.2), repaired(0.4, 0.2))
    assert "no figure. Diverged: an arm on 1 of 3 seeds" in said([None, 2.0, 2.0], repaired(0.4))


def test_a_budget_that_is_mostly_full_is_told_of_policies_that_choose_anew():
    full = comparison(gnmr=arm(repaired(0.5), full_share=0.7, title="GNMR"), direct=arm(repaired(0.5), full_share=0.4))
    assert [line for line in scenario_lines(full) if "budget" in line] == [
        "- GNMR: the budget was full in 70% of the steps; how often a unit was left out is not counted."
    ]
    full["arms"]["gnmr"]["scores_decide"] = False
    assert not [line for line in scenario_lines(full) if "budget" in line]


def test_static_and_random_arms_are_measures_and_are_not_judged():
    found = comparison(gnmr=arm([2.0] * 3), random=arm([2.0] * 3), static_high=arm([2.0] * 3), fixed=arm([2.0] * 3))
    assert judged_arms(found) == ["gnmr", "fixed"]


def summary(**comparisons):
    return {
        "experiment": "deepseek",
        "title": "Products",
        "command": "trimtab experiment deepseek --seeds 3 --only harmed harmless",
        "worker_seconds": 180.0,
        "seeds": list(SEEDS),
        "steps": None,
        "notes": ["A note."],
        "comparisons": comparisons,
        "tables": [
            {
                "title": "A table",
                "note": "",
                "columns": [{"key": "recall", "title": "recall", "kind": "percent"}],
                "rows": [{"scenario": "harmed", "arm": "gnmr", "title": "GNMR", "cells": {"recall": 0.25}}],
            }
        ],
        "source": {"commit": "abc1234", "modified": False, "version": "0.1"},
        "versions": {"torch": "2.13.0"},
        "seconds": 90.0,
    }


@pytest.fixture
def written(tmp_path):
    harmless = comparison()
    harmless["arms"]["static-low-clean"] = harmless["arms"]["static-low"]
    harmed = comparison(
        gnmr=arm(repaired(0.01, 0.001), title="GNMR", recall=0.0, precision=0.0),
        direct=arm(repaired(0.9, 0.02), title="error", recall=0.0, precision=0.0),
        random_direct=arm(repaired(0.2, 0.02)),
    )
    harmed["signals"] = {
        "gnmr": seen(0.25, 0.5, 0.5),
        "gnmr-paper": seen(0.125, 0.25, None),
        "error": seen(1.0, 1.0, 0.75),
    }
    harmed["source"] = {"commit": "def5678", "modified": False, "version": "0.1"}
    folder = tmp_path / "runs"
    (folder / "experiment-deepseek").mkdir(parents=True)
    content = summary(harmed=harmed, harmless=harmless)
    (folder / "experiment-deepseek" / "summary.json").write_text(json.dumps(content))
    return folder


def test_the_page_says_where_recovery_helped_and_where_not_and_of_which_commit(written, tmp_path, capsys):
    page = tmp_path / "docs" / "results.md"
    # What is no experiment's summary is passed over.
    (written / "demo").mkdir()
    (written / "demo" / "summary.json").write_text('{"arms": {}}')
    (written / "demo" / "parts").mkdir()
    (written / "demo" / "parts" / "summary.json").write_text("cut sh")
    assert main([str(written), "-o", str(page)]) == 0
    assert str(page) in capsys.readouterr().out
    text = page.read_text()
    assert text == results_page(find_summaries(written))
    for words in (
        "`runs/experiment-deepseek/summary.json` | def5678 | 3 | 3.0 | 2.13.0",
        "`trimtab experiment deepseek --seeds 3 --only harmed harmless`",
        "- **No harm to repair that these seeds tell**: deepseek, harmless.",
        "- **Recovery helped, more than at random**:\n  - deepseek, harmed: error 90%",
        "- **It repaired next to nothing**:\n  - deepseek, harmed: GNMR 1%",
        "- **It did harm**: nowhere.",
        # Of the untreated runs, and not of the arms, whose own figures are 0 here.
        "| deepseek | harmed | GNMR, robust | 25.0% | 50.0% | 50.0% | `gnmr` | 1% (1 to 1) |",
        "| deepseek | harmed | GNMR, published (1.5, 1.3) | 12.5% | 25.0% | - | - | - |",
        "| deepseek | harmed | channel error | 100.0% | 100.0% | 75.0% | `direct` | 90% (85 to 95) |",
        "With the channel error more was repaired than by gradient norms alone.",
        "- A note.",
    ):
        assert words in text, words


def test_tables_are_made_anew_from_the_figures(tmp_path):
    (tmp_path / "runs").mkdir()
    content = summary(**{"injected-e2m3": comparison(gnmr=arm(repaired(0.5, 0.02), full_share=0.25))})
    (tmp_path / "runs" / "summary.json").write_text(json.dumps(content))
    page = results_page(find_summaries(tmp_path / "runs"))
    assert "### A table" not in page
    assert "### Injected, E2M3: quality and triggers" in page
    assert "25.0%" in page


def test_a_page_of_nothing_or_of_two_runs_of_one_experiment_is_refused(written, tmp_path, capsys):
    assert main([str(tmp_path / "empty")]) == 2
    assert "Run trimtab experiment activations first." in capsys.readouterr().err
    (written / "again").mkdir()
    content = (written / "experiment-deepseek" / "summary.json").read_text()
    (written / "again" / "summary.json").write_text(content)
    with pytest.raises(ConfigError, match="two runs of the experiment 'deepseek'"):
        find_summaries(written)
