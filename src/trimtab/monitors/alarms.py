"""What raises an alarm, and what an alarm says: rules by metric, judged place by place, one alarm an episode.

A rule's level may be a *notice* instead: what is worth knowing beside an alarm and calls for none by itself.

An *episode* of a metric begins when enough of its places give alarm, and ends when none does any more. It is one alarm,
with the places it began with; a mechanism that fails in 200 heads is not 200 alarms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from numbers import Integral, Real
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from trimtab.errors import ConfigError
from trimtab.monitors.detectors import Detector, PlaceDetector

__all__ = ["Alarm", "AlarmLevel", "AlarmRule", "AlarmWatch", "EpisodeChange", "Judgement", "Reading"]

AlarmLevel = Literal["alarm", "notice"]
"""An alarm is warned of and acted on; a notice is kept, as evidence for the diagnosis."""

_SHOWN_PLACES = 3


@dataclass(frozen=True, slots=True)
class Reading:
    """The values of one metric at one step.

    Args:
        places: One name a value; the model itself is "".
        values: float64, NaN where a place has none. Shape (places,).
    """

    places: tuple[str, ...]
    values: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class AlarmRule:
    """What raises an alarm on one metric of a monitor.

    Args:
        detector: Judges each place on its own; only its settings are used.
        sentence: What an alarm says to the user: what has happened, and of what it is a sign. ``{value}``,
            ``{reference}``, ``{places}`` and ``{num_places}`` are filled in, in the manner of ``str.format``.
        mechanism: What it is a sign of, for the diagnosis; None: what the monitor says, its ``mechanism`` or its name.
        fire_at: How many places have to give alarm at once: an int is a count, a float a share of all of them.
        level: "alarm", or "notice" for what is harmless by itself and changes what an alarm means: it goes into the
            record and the diagnosis, and nothing else is done about it.

    Raises: ConfigError: when a setting cannot be meant.

    Example:
        >>> from trimtab.monitors.detectors import PeakDrop
        >>> rule = AlarmRule(PeakDrop(0.3), "The entropy of {places} fell to {value:.2f} from {reference:.2f}.")
        >>> rule.needed(8)
        1
    """

    detector: Detector
    sentence: str
    mechanism: str | None = None
    fire_at: int | float = 1
    level: AlarmLevel = "alarm"

    def __post_init__(self) -> None:
        if not isinstance(self.detector, Detector):
            raise ConfigError("detector", self.detector, "a rule judges by a detector.", "Pass PeakDrop(0.3), say.")
        fire_at = self.fire_at
        is_count = isinstance(fire_at, Integral) and not isinstance(fire_at, bool) and fire_at >= 1
        is_share = isinstance(fire_at, Real) and not isinstance(fire_at, Integral) and 0 < fire_at <= 1
        if not is_count and not is_share:
            raise ConfigError(
                "fire_at",
                fire_at,
                "an int counts places, 1 or more; a float is a share of them above 0, up to 1.",
                "Set 1 for any place.",
            )
        if self.level not in get_args(AlarmLevel):
            raise ConfigError("level", self.level, "it is 'alarm' or 'notice'.", "Choose one of the two.")
        try:
            self.said("", (), 0.0, 0.0)
        except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
            raise ConfigError(
                "sentence",
                self.sentence,
                f"it is a sentence that str.format can fill in ({error!r}).",
                "Use {value}, {reference}, {places}, {num_places}, or none.",
            ) from None

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values, for the record."""
        return {
            "detector": self.detector.to_dict(),
            "sentence": self.sentence,
            "mechanism": self.mechanism,
            "fire_at": self.fire_at,
            "level": self.level,
        }

    def needed(self, num_places: int) -> int:
        """How many of ``num_places`` have to give alarm at once."""
        if isinstance(self.fire_at, Integral):
            return int(self.fire_at)
        return max(1, math.ceil(self.fire_at * num_places))

    def said(self, metric: str, places: Sequence[str], value: float, reference: float) -> str:
        """The sentence, filled in."""
        shown = ", ".join(place or "the model" for place in places[:_SHOWN_PLACES])
        if len(places) > _SHOWN_PLACES:
            shown += f" and {len(places) - _SHOWN_PLACES} more"
        return self.sentence.format(
            value=value, reference=reference, places=shown, num_places=len(places), metric=metric
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm:
    """One episode of one metric, as it was when it was raised.

    Example:
        >>> alarm = Alarm(
        ...     step=7, first_step=6, monitor="router", mechanism="routing", metric="entropy_mean",
        ...     places=("layer_0",), value=0.5, reference=0.9, sentence="The routing entropy fell to 0.50.",
        ... )
        >>> Alarm.from_dict(alarm.to_dict()) == alarm
        True
    """

    step: int
    """Optimizer step at which it was raised."""
    first_step: int
    """The step at which the first of its places gave alarm; not after ``step``."""
    monitor: str
    """Name of the monitor."""
    mechanism: str
    """What it is a sign of."""
    metric: str
    """The monitor's metric."""
    places: tuple[str, ...]
    """Where, in the order of the metric's places; "" is the model."""
    value: float
    """What the detector judged, at the place where it is furthest from its reference; PeakDrop judges an average."""
    reference: float
    """What it was held against there: its peak, a level."""
    sentence: str
    """What has happened, for the user."""
    level: AlarmLevel = "alarm"
    """"notice": only evidence."""

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values."""
        return asdict(self) | {"places": list(self.places)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Alarm:
        """What ``to_dict`` gave; keys that are no field are left out, and one without a level is an alarm."""
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values or name != "level"}
        return cls(**known | {"places": tuple(values["places"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeChange:
    """Something about an ongoing episode that is no new alarm."""

    what: Literal["joined", "ended"]
    """Further places give alarm too, or none does any more."""
    step: int
    """Optimizer step."""
    monitor: str
    """Name of the monitor."""
    metric: str
    """The monitor's metric."""
    places: tuple[str, ...]
    """Those that joined; those that the episode had in all."""
    alarm_step: int
    """``step`` of the episode's alarm."""
    level: AlarmLevel = "alarm"
    """Of that alarm."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the readings of one step amount to.

    Args:
        alarms: Episodes that begin.
        changes: What happened in those that go on.
        notices: Episodes of rules of that level that begin.
    """

    alarms: tuple[Alarm, ...]
    changes: tuple[EpisodeChange, ...]
    notices: tuple[Alarm, ...] = ()


@dataclass(slots=True)
class _Episode:
    """Places that give alarm, raised as an alarm yet or not."""

    first_step: int
    alarm_step: int | None = None
    places: list[str] = field(default_factory=list)


class AlarmWatch:
    """Judges the readings of each step by the monitors' rules.

    Deterministic: the same readings give the same alarms, on every rank and after every resume.

    Args:
        rules: By monitor and metric.
        mechanisms: What each monitor's alarms are a sign of, where the rule does not say; its name where this does not.
        say_once: Warns, the first time for a key. A rule that cannot judge is switched off through it.

    Example:
        >>> from trimtab.monitors.detectors import Above
        >>> watch = AlarmWatch({"shift": {"coherence": AlarmRule(Above(0.5, warmup=0), "{places}: {value:.1f}.")}})
        >>> reading = Reading(("layer_0", "layer_1"), np.array([0.9, 0.1]))
        >>> [alarm.sentence for alarm in watch.judge(1, {"shift": {"coherence": reading}}).alarms]
        ['layer_0: 0.9.']
        >>> watch.judge(2, {"shift": {"coherence": reading}}).alarms
        ()
    """

    def __init__(
        self,
        rules: Mapping[str, Mapping[str, AlarmRule]],
        mechanisms: Mapping[str, str] | None = None,
        say_once: Callable[[str, str], None] | None = None,
    ) -> None:
        self._rules = {(monitor, metric): rule for monitor, own in rules.items() for metric, rule in own.items()}
        self._mechanisms = dict(mechanisms or {})
        self._say_once = say_once
        self._detectors: dict[tuple[str, str], PlaceDetector] = {}
        self._episodes: dict[tuple[str, str], _Episode] = {}

    def judge(self, step: int, readings: Mapping[str, Mapping[str, Reading]]) -> Judgement:
        """Take the readings of ``step``, by monitor and metric; one without a rule is passed over."""
        alarms: list[Alarm] = []
        changes: list[EpisodeChange] = []
        for key, rule in list(self._rules.items()):
            reading = readings.get(key[0], {}).get(key[1])
            if reading is None:
                continue
            try:
                self._judge_one(step, key, rule, reading, alarms, changes)
            except Exception as error:
                if self._say_once is None:
                    raise
                del self._rules[key]
                text = f"The alarm on {key[1]!r} of the monitor {key[0]!r} failed and is off from here on: {error!r}."
                self._say_once(f"alarm rule {key}", text)
        by_level = {level: tuple(a for a in alarms if a.level == level) for level in get_args(AlarmLevel)}
        return Judgement(by_level["alarm"], tuple(changes), by_level["notice"])

    def _judge_one(
        self,
        step: int,
        key: tuple[str, str],
        rule: AlarmRule,
        reading: Reading,
        alarms: list[Alarm],
        changes: list[EpisodeChange],
    ) -> None:
        monitor, metric = key
        detector = self._detectors.get(key)
        if detector is None:
            detector = self._detectors[key] = rule.detector.over(reading.places)
        elif detector.places != reading.places:
            detector.move_to(reading.places)
        on = detector.update(reading.values)
        places = [reading.places[i] for i in np.nonzero(on)[0]]
        if not places:
            ended = self._episodes.pop(key, None)
            if ended is not None and ended.alarm_step is not None:
                changes.append(_change("ended", step, key, rule, ended.places, ended.alarm_step))
            return
        episode = self._episodes.setdefault(key, _Episode(step))
        if episode.alarm_step is not None:
            joined = [place for place in places if place not in episode.places]
            if joined:
                episode.places += joined
                changes.append(_change("joined", step, key, rule, joined, episode.alarm_step))
        elif len(places) >= rule.needed(len(reading.places)):
            signal, reference = detector.judged()
            worst = max(np.nonzero(on)[0].tolist(), key=lambda i: abs(signal[i] - reference[i]))
            value, held_against = float(signal[worst]), float(reference[worst])
            episode.alarm_step, episode.places = step, places
            alarms.append(
                Alarm(
                    step=step,
                    first_step=episode.first_step,
                    monitor=monitor,
                    mechanism=rule.mechanism or self._mechanisms.get(monitor) or monitor,
                    metric=metric,
                    places=tuple(places),
                    value=value,
                    reference=held_against,
                    sentence=rule.said(metric, places, value, held_against),
                    level=rule.level,
                )
            )

    def state_dict(self) -> list[dict[str, Any]]:
        """The detectors and the ongoing episodes, as plain values that JSON takes."""
        return [
            {
                "monitor": monitor,
                "metric": metric,
                "detector": detector.state_dict(),
                "episode": asdict(episode) if (episode := self._episodes.get((monitor, metric))) else None,
            }
            for (monitor, metric), detector in self._detectors.items()
        ]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Take back what ``state_dict`` gave; a metric whose rule is of another kind now starts afresh."""
        self._detectors.clear()
        self._episodes.clear()
        for entry in state:
            key = (entry["monitor"], entry["metric"])
            if key not in self._rules:
                continue
            detector = self._rules[key].detector.over(())
            try:
                detector.load_state_dict(entry["detector"])
            except ValueError:
                continue
            self._detectors[key] = detector
            if entry["episode"] is not None:
                self._episodes[key] = _Episode(**entry["episode"])


def _change(
    what: Literal["joined", "ended"],
    step: int,
    key: tuple[str, str],
    rule: AlarmRule,
    places: Sequence[str],
    alarm_step: int,
) -> EpisodeChange:
    return EpisodeChange(
        what=what,
        step=step,
        monitor=key[0],
        metric=key[1],
        places=tuple(places),
        alarm_step=alarm_step,
        level=rule.level,
    )
