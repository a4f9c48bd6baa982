"""One alarm an episode, with its places; the same alarms after a resume."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.errors import ConfigError
from trimtab.monitors import Above, Alarm, AlarmRule, PeakDrop
from trimtab.monitors.alarms import AlarmWatch, Reading

HEADS = ("layer_0/head_0", "layer_0/head_1", "layer_1/head_0", "layer_1/head_1")
SENTENCE = "{num_places}: {places} at {value:.2f} over {reference:.2f}."


def watch(rule: AlarmRule, **settings) -> AlarmWatch:
    return AlarmWatch({"fake": {"size": rule}}, **settings)


def above(level: float = 0.5, fire_at: int | float = 1, **settings) -> AlarmRule:
    return AlarmRule(Above(level, warmup=0, **settings), SENTENCE, fire_at=fire_at)


def judge(watch: AlarmWatch, step: int, values, places=HEADS):
    return watch.judge(step, {"fake": {"size": Reading(tuple(places), np.array(values, dtype=np.float64))}})


def test_a_mechanism_that_fails_in_many_heads_is_one_alarm_with_their_places():
    alarms = judge(watch(above()), 7, [0.1, 0.6, 0.9, 0.7]).alarms
    assert alarms == (
        Alarm(
            step=7,
            first_step=7,
            monitor="fake",
            mechanism="fake",
            metric="size",
            places=HEADS[1:],
            value=0.9,
            reference=0.5,
            sentence=f"3: {', '.join(HEADS[1:])} at 0.90 over 0.50.",
        ),
    )


def test_places_that_join_are_told_and_are_no_alarm_and_the_episode_ends_when_all_have_cleared():
    one = watch(above())
    trace = [[0, 0.6, 0, 0], [0.6, 0.6, 0, 0], [0.6, 0, 0, 0.6], [0, 0, 0, 0.6], [0, 0, 0, 0], [0.6, 0, 0, 0]]
    judged = [judge(one, step, values) for step, values in enumerate(trace, start=1)]
    assert [len(j.alarms) for j in judged] == [1, 0, 0, 0, 0, 1]
    told = [(c.what, c.step, c.places, c.alarm_step) for j in judged for c in j.changes]
    assert told == [
        ("joined", 2, (HEADS[0],), 1),
        ("joined", 3, (HEADS[3],), 1),
        ("ended", 5, (HEADS[1], HEADS[0], HEADS[3]), 1),
    ]


@pytest.mark.parametrize(("fire_at", "first"), [(1, 1), (2, 2), (0.5, 2), (0.51, 3), (1.0, 4)])
def test_an_alarm_waits_for_enough_places_and_knows_since_when_the_first_one_gave_it(fire_at, first):
    one = watch(above(fire_at=fire_at))
    judged = [judge(one, step, [0.6] * step + [0.0] * (4 - step)) for step in (1, 2, 3, 4)]
    (alarm,) = [alarm for j in judged for alarm in j.alarms]
    assert (alarm.step, alarm.first_step, alarm.places) == (first, 1, HEADS[:first])


def test_places_that_clear_before_there_are_enough_are_no_episode():
    one = watch(above(fire_at=2))
    trace = [[0.6, 0, 0, 0], [0, 0, 0, 0], [0.6, 0.6, 0, 0]]
    judged = [judge(one, step, values) for step, values in enumerate(trace, start=1)]
    assert [change for j in judged for change in j.changes] == []
    assert [(a.step, a.first_step) for j in judged for a in j.alarms] == [(3, 3)]


def test_a_metric_that_is_not_observed_in_a_step_keeps_its_episode():
    one = watch(above())
    assert len(judge(one, 1, [0.6, 0, 0, 0]).alarms) == 1
    assert one.judge(2, {}).alarms == ()
    assert judge(one, 3, [np.nan] * 4).changes == ()
    assert judge(one, 4, [0.6, 0, 0, 0]).alarms == ()


def test_layers_that_come_and_go_are_followed_by_name():
    one = watch(above())
    judge(one, 1, [0.6, 0.1], ("a", "b"))
    assert judge(one, 2, [0.1, 0.47, 0.47], ("b", "a", "c")).alarms == ()  # above the level it clears at: a is still on
    (ended,) = judge(one, 3, [0.1], ("b",)).changes
    assert (ended.what, ended.places) == ("ended", ("a",))


def test_the_mechanism_is_the_rules_or_the_monitors_or_the_monitors_name():
    named = AlarmRule(Above(0.5, warmup=0), "Too large.", mechanism="its own")
    assert judge(watch(named, mechanisms={"fake": "size"}), 1, [1] * 4).alarms[0].mechanism == "its own"
    assert judge(watch(above(), mechanisms={"fake": "size"}), 1, [1] * 4).alarms[0].mechanism == "size"
    assert judge(watch(above(), mechanisms={"fake": ""}), 1, [1] * 4).alarms[0].mechanism == "fake"


def test_a_rule_that_cannot_judge_is_switched_off_alone_with_one_sentence():
    class Broken(Above):
        def advance(self, state, values):
            raise RuntimeError("no idea")

    said = []
    rules = {"fake": {"bad": AlarmRule(Broken(0.5), "."), "size": above()}}
    one = AlarmWatch(rules, say_once=lambda key, text: said.append(text))
    reading = Reading(HEADS, np.ones(4))
    assert [len(one.judge(s, {"fake": {"bad": reading, "size": reading}}).alarms) for s in (1, 2)] == [1, 0]
    assert len(said) == 1
    assert "'bad'" in said[0]
    assert "no idea" in said[0]


@given(st.lists(st.lists(st.sampled_from([0.1, 0.45, 0.6]), min_size=4, max_size=4), max_size=15), st.integers(0, 15))
@settings(max_examples=100, deadline=None)
def test_a_resume_in_the_middle_of_an_episode_gives_the_alarms_of_the_uninterrupted_run(trace, cut):
    whole, first, resumed = (watch(above(fire_at=2)) for _ in range(3))
    for step, values in enumerate(trace[:cut]):
        judge(whole, step, values)
        judge(first, step, values)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    for step, values in enumerate(trace[cut:], start=cut):
        assert judge(resumed, step, values) == judge(whole, step, values)


def test_a_state_of_another_kind_of_rule_starts_afresh():
    one = watch(above())
    judge(one, 1, [0.6] * 4)
    other = watch(AlarmRule(PeakDrop(0.3), "."))
    other.load_state_dict([one.state_dict()[0] | {"detector": {"places": ["a"]}}, {"monitor": "gone", "metric": "x"}])
    assert other.state_dict() == []


def test_many_places_are_named_in_part():
    sentence = above().said("size", [f"head_{i}" for i in range(9)], 1.0, 0.5)
    assert sentence == "9: head_0, head_1, head_2 and 6 more at 1.00 over 0.50."
    assert AlarmRule(Above(1.0), "In {places}.").said("size", [""], 1.0, 0.5) == "In the model."


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda: AlarmRule(0.5, "."), "detector"),
        (lambda: AlarmRule(Above(0.5), "{number}"), "sentence"),
        (lambda: AlarmRule(Above(0.5), "{value:q}"), "sentence"),
        (lambda: AlarmRule(Above(0.5), 3), "sentence"),
        (lambda: AlarmRule(Above(0.5), ".", fire_at=0), "fire_at"),
        (lambda: AlarmRule(Above(0.5), ".", fire_at=True), "fire_at"),
        (lambda: AlarmRule(Above(0.5), ".", fire_at=1.5), "fire_at"),
        (lambda: AlarmRule(Above(0.5), ".", fire_at=0.0), "fire_at"),
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused_in_four_parts(make, setting):
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.setting == setting
    assert caught.value.remedy.endswith(".")
