"""Notes of the user's own in the record, what is said while a guard attaches, and what it says of itself."""

import warnings

import pytest
import torch
from torch import nn

import trimtab
from trimtab.monitors import AttentionSpectrum, Router
from trimtab.precision import SavedActivations, find_units
from trimtab.trace import open_run


def test_a_note_is_in_the_record_at_the_step_observed_last(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4))
    with trimtab.attach(model, record=tmp_path) as guard:
        guard.note("before")
        model(torch.ones(2, 4)).sum().backward()
        guard.step()
        guard.note("data order", {"shard": 3}, place="0")
    with open_run(tmp_path) as run:
        notes = [(note.step, note.place, note.data) for note in run.events("note") if "about" in note.data]
    assert notes == [(0, "", {"about": "before"}), (1, "0", {"about": "data order", "shard": 3})]


def test_without_a_record_it_goes_nowhere():
    with trimtab.attach(nn.Sequential(nn.Linear(4, 4))) as guard:
        guard.note("nothing")


def test_what_is_said_while_a_guard_attaches_is_said_once_and_is_in_the_record(tmp_path):
    model = _with_a_layer_left_out()
    monitors = [Router(), AttentionSpectrum()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with trimtab.attach(model, SavedActivations(), units=["0", "1"], monitors=monitors, record=tmp_path):
            pass
    said = [str(one.message) for one in caught]
    for part in (
        "saved-activations leaves 0 as it is",
        "Router found no router",
        "AttentionSpectrum found no attention",
    ):
        assert len([text for text in said if part in text]) == 1, part
    with open_run(tmp_path) as run:
        events = run.events("warning")
    assert [event.data["message"] for event in events] == said
    assert all(event.step == 0 for event in events)
    (of_recipe,) = [one for one in caught if "as it is" in str(one.message)]
    assert of_recipe.filename == __file__, "it is said of the line that attaches"


def test_what_the_users_filters_pass_over_is_in_the_record_all_the_same(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with trimtab.attach(_with_a_layer_left_out(), SavedActivations(), units=["0", "1"], record=tmp_path):
            pass
    with open_run(tmp_path) as run:
        assert "as it is" in run.events("warning")[0].data["message"]


def test_a_warning_that_is_made_an_error_leaves_the_model_as_it_was(tmp_path):
    model = _with_a_layer_left_out()
    kinds = [type(module) for module in model.modules()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(trimtab.TrimtabWarning, match="as it is"):
            trimtab.attach(model, SavedActivations(), units=["0", "1"], record=tmp_path)
    assert [type(module) for module in model.modules()] == kinds
    assert not model._forward_hooks


def test_a_bare_conversion_warns_as_ever():
    model = _with_a_layer_left_out()
    with pytest.warns(trimtab.TrimtabWarning, match="as it is"):
        SavedActivations().convert(model, find_units(model, ["0", "1"])).undo()


def test_what_a_recipe_says_in_other_words_than_trimtabs_is_shown_and_not_recorded(tmp_path):
    class Talks(SavedActivations):
        def convert(self, model, units):
            warnings.warn("of another library", DeprecationWarning, stacklevel=1)
            return super().convert(model, units)

    with pytest.warns(DeprecationWarning, match="of another library") as said:
        trimtab.attach(nn.Sequential(nn.Linear(4, 4)), Talks(), record=tmp_path).detach()
    assert len(said) == 1
    with open_run(tmp_path) as run:
        assert run.events("warning") == []


def test_a_guard_says_in_one_line_what_it_watches():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    guard = trimtab.attach(model, SavedActivations(), units=["0", "1"])
    guard.route(["1"])
    assert repr(guard) == "<Guard of Sequential: 2 units, 2 of them recoverable, step 0, 1 active>"
    model(torch.ones(2, 4)).sum().backward()
    guard.step()
    assert "step 1" in repr(guard)
    guard.detach()
    assert repr(guard).endswith("step 1, detached>")


def _with_a_layer_left_out() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].forward = model[0].forward  # no recipe converts a layer whose forward is replaced
    return model
