"""Notes of the user's own in the record."""

import torch
from torch import nn

import trimtab
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
