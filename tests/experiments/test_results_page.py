"""Every sentence of the page of results follows from figures, by a rule that is hit here."""

import json

import pytest

from trimtab.errors import ConfigError
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
        **{key: {"mean": value, "sd": None, "n": 1} for key, value in figures.items()},
    }


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


def test_helped_needs_an_interval_above_that_of_random_recovery():
    found = outcome(gnmr=arm(repaired(0.8, 0.02), title="GNMR"), random=arm(repaired(0.1, 0.02)))
    assert found.outcome == "helped"
    assert found.sentence.startswith("GNMR: repaired 80% (78 to 82); at random 10% (8 to 12).")
    assert "more than as many units at random" in found.sentence


def test_overlapping_intervals_are_not_told_from_random():
    found = outcome(gnmr=arm(repaired(0.5, 0.2)), random=arm(repaired(0.3, 0.2)))
    assert found.outcome == "as_random"
    assert "not told from as many units at random" in found.sentence


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
    assert "**no harm to repair**" in line
    assert "The faults cost the low-cost path" in line


def test_without_faults_the_harm_is_that_of_the_low_cost_path_itself():
    natural = comparison(faults="none", gnmr=arm(repaired(0.8, 0.02)), unquantized_clean=arm([2.0, 2.1, 2.2]))
    del natural["arms"]["static-low-clean"]
    assert harm_of(natural)["mean"] == pytest.approx(1.0)
    lines = scenario_lines(natural)
    assert "The low-cost path cost 1.0000 nats a token over the unquantized model" in lines[0]
    assert "80%" in lines[1]


def test_one_seed_tells_nothing():
    one = comparison(seeds=(0,), gnmr=arm([2.2]))
    (found,) = verdicts_of(one, ["gnmr"])
    assert found.outcome == "one_seed"
    assert "80%" in found.sentence
    assert "One seed" in found.sentence


def test_a_loss_that_is_no_number_or_an_arm_that_is_missing_is_no_figure():
    assert outcome(gnmr=arm([None, None, None])).outcome == "unknown"
    bare = comparison(gnmr=arm(repaired(0.5)))
    del bare["arms"]["static-low-clean"]
    assert [v.outcome for v in verdicts_of(bare, ["gnmr", "not-run"])] == ["unknown"]
    assert "is not known" in scenario_lines(bare)[0]
    assert outcome_of(None, None) == "unknown"


def test_the_channel_error_is_set_beside_gnmr():
    def said(ours, theirs):
        return scenario_lines(comparison(gnmr=arm(theirs), direct=arm(ours)))[-1]

    assert "more was repaired than by gradient norms" in said(repaired(0.9, 0.02), repaired(0.1, 0.02))
    assert "less was repaired" in said(repaired(0.1, 0.02), repaired(0.9, 0.02))
    assert "intervals overlap" in said(repaired(0.5, 0.2), repaired(0.4, 0.2))


def test_a_budget_that_is_mostly_full_is_told_of_policies_that_choose_anew():
    full = comparison(gnmr=arm(repaired(0.5), full_share=0.7, title="GNMR"), direct=arm(repaired(0.5), full_share=0.4))
    assert [line for line in scenario_lines(full) if "budget" in line] == [
        "- GNMR: the budget was full in 70% of the steps, so that it decided which units were left out."
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
        gnmr=arm(repaired(0.01, 0.001), title="GNMR", recall=0.25, precision=0.5),
        direct=arm(repaired(0.9, 0.02), title="error", recall=1.0, precision=0.75),
        random_direct=arm(repaired(0.2, 0.02)),
    )
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
        "`runs/experiment-deepseek/summary.json` | abc1234 | 3 | 1.5 | 2.13.0",
        "`trimtab experiment deepseek --seeds 3`",
        "- **No harm to repair**: deepseek, harmless.",
        "- **Recovery helped, more than at random**:\n  - deepseek, harmed: error 90%",
        "- **It repaired next to nothing**:\n  - deepseek, harmed: GNMR 1%",
        "- **It did harm**: nowhere.",
        "| deepseek | harmed | injected | GNMR (`gnmr`) | 25.0% | 50.0% | 1% (1 to 1) |",
        "| deepseek | harmed | injected | GNMR and channel error (`direct`) | 100.0% | 75.0% | 90% (88 to 92) |",
        "With the channel error more was repaired than by gradient norms alone.",
        "### A table",
        "- A note.",
    ):
        assert words in text, words


def test_a_page_of_nothing_or_of_two_runs_of_one_experiment_is_refused(written, tmp_path, capsys):
    assert main([str(tmp_path / "empty")]) == 2
    assert "Run trimtab experiment activations first." in capsys.readouterr().err
    (written / "again").mkdir()
    content = (written / "experiment-deepseek" / "summary.json").read_text()
    (written / "again" / "summary.json").write_text(content)
    with pytest.raises(ConfigError, match="two runs of the experiment 'deepseek'"):
        find_summaries(written)
