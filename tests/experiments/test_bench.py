"""What trimtab bench measures and says; never how long anything takes."""

import json
import math
import sys

import pytest
import torch

from trimtab.cli import main
from trimtab.errors import ConfigError, MissingExtraError
from trimtab.experiments.bench.figures import ratio
from trimtab.experiments.bench.settings import MEASURES, BenchSettings
from trimtab.experiments.bench.step import build


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"only": ("desision",)}, ["only='desision'", "Did you mean 'decision'?"]),
        ({"only": (",",)}, ["only=", "Name one"]),
        ({"threads": 0}, ["threads=0", "at least 1"]),
        ({"threads": 100_000}, ["threads=100000", "torch's own"]),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused(settings, parts):
    with pytest.raises(ConfigError) as caught:
        BenchSettings(**settings)
    assert all(part in str(caught.value) for part in parts)


def test_measures_are_named_apart_by_spaces_or_commas_and_taken_in_one_order():
    assert BenchSettings().measures == MEASURES
    assert BenchSettings(only=("formats", "step,decision")).measures == ("decision", "step", "formats")


def test_a_ratio_is_the_median_of_pairs_not_the_ratio_of_medians():
    found = ratio("a", [1.0, 10.0, 9.0], [1.0, 1.0, 10.0], "of b")
    assert found.value == 1.0
    assert found.low <= found.value <= found.high


@pytest.mark.slow
def test_everything_is_measured_and_told_to_machines(capsys):
    threads = torch.get_num_threads()
    assert main(["bench", "--quick", "--json", "--threads", "1"]) == 0
    assert torch.get_num_threads() == threads
    told = json.loads(capsys.readouterr().out)
    assert (told["quick"], told["threads"], told["device"]) == (True, 1, "cpu")
    assert list(told["figures"]) == list(MEASURES)
    for figures in told["figures"].values():
        assert len({figure["name"] for figure in figures}) == len(figures) >= 5
        assert all(math.isfinite(figure["value"]) for figure in figures)
    names = {figure["name"] for figure in told["figures"]["step"]}
    assert {"watched", "static 4-bit", "GNMR 4/8", "static 8-bit"} < names


def test_what_is_left_out_is_not_measured_and_tables_go_to_stdout(capsys):
    assert main(["bench", "--quick", "--only", "decision"]) == 0
    said = capsys.readouterr().out
    assert "robust()" in said
    assert "untouched" not in said


def test_without_transformers_a_step_is_not_timed_and_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'trimtab\[hf\]'"):
        build(1)
