"""When a signal gives an alarm: a few detectors for one signal, and the same for one signal a place.

Words:
    signal: What is judged: the value itself, or a moving average of it.
    reference: What the signal is held against: its peak, a level, a mean.
    on: Whether the detector gives alarm. It goes on and clears at two different limits, so that it does not flicker.

``update`` of a detector is meant to be read: one signal, plain Python. ``advance`` is the same over places, in NumPy,
and is tested against it on any input. No torch here. P: places.
"""

from __future__ import annotations

import copy
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trimtab.errors import ConfigError

__all__ = ["Above", "AnyOf", "Cusum", "Detector", "Floor", "PeakDrop", "PlaceDetector"]

State = dict[str, NDArray[Any]]
"""By name of the attribute, one entry a place. Each of shape (P,)."""

_LARGEST = sys.float_info.max


class Detector(ABC):
    """Settings and state of a detector for one signal.

    A subclass writes ``update``; it may write ``advance`` too, for speed. What ``update`` keeps are the attributes that
    ``initial`` names.

    Attributes:
        initial: The state before the first value, by attribute.
        seen: Values judged so far, those of the warm-up included.
        on: Whether there is an alarm now.
        signal: What was judged last.
        reference: What it was held against.
    """

    initial: ClassVar[Mapping[str, Any]] = {"seen": 0, "on": False, "signal": 0.0, "reference": 0.0}
    seen: int
    on: bool
    signal: float
    reference: float

    def __post_init__(self) -> None:
        self._check()
        for name, value in self.initial.items():
            setattr(self, name, value)

    def _check(self) -> None:  # noqa: B027
        """Refuse settings that cannot be meant."""

    @abstractmethod
    def update(self, value: float) -> bool:
        """Take the next value; whether there is an alarm after it. NaN is no value: nothing changes."""

    def over(self, places: Sequence[str]) -> PlaceDetector:
        """A fresh detector with these settings for each of ``places``."""
        return PlaceDetector(self, places)

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values, for the record."""
        settings = {name: value for name, value in vars(self).items() if name not in self.initial}
        return {"detector": type(self).__name__, **settings}

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values that JSON takes."""
        return {name: getattr(self, name) for name in self.initial}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` gave."""
        values = {name: type(start)(state[name]) for name, start in self.initial.items()}
        for name, value in values.items():
            setattr(self, name, value)

    def fresh(self, num_places: int) -> State:
        """The state of ``num_places`` signals before their first value."""
        return {name: np.full(num_places, value) for name, value in self.initial.items()}

    def advance(self, state: State, values: NDArray[np.float64]) -> None:
        """``update`` for each place, in place.

        Args:
            state: What ``fresh`` gave.
            values: Shape (P,).
        """
        one = copy.deepcopy(self)
        for place, value in enumerate(values.tolist()):
            for name, column in state.items():
                setattr(one, name, column[place].item())
            one.update(value)
            for name, column in state.items():
                column[place] = getattr(one, name)

    def judged(self, state: State) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What was judged last at each place, and what it was held against; two arrays of shape (P,)."""
        return state["signal"], state["reference"]


@dataclass(eq=False)
class PeakDrop(Detector):
    """A signal that has fallen from its peak.

    The signal is a moving average of the values; the reference is the greatest it has been. The alarm goes on when the
    signal is under ``(1 - drop)`` of its peak, and clears when it is back at ``(1 - drop + hysteresis)`` of it, or at
    the whole peak where that would be more.

    The first ``warmup`` values enter the average and nothing else: they give no alarm and set no peak. The first steps
    of a run are transients, and a peak out of them would be an alarm for as long as the run lasts.

    NaN and infinite values are no values: nothing changes. While the peak is 0 or less there is no share of it, and no
    alarm.

    Args:
        drop: Share of the peak that is to be lost. Above 0, below 1.
        hysteresis: Share of the peak to be regained. >= 0.
        ewma: Weight of the newest value in the average; 1 = no average. Above 0, up to 1.
        warmup: Values that only warm up. >= 0.

    Raises: ConfigError: when a setting is out of its range.

    Source: Huang et al. 2026 name the signals; this detector, and its constants, are ours.

    Example:
        >>> detector = PeakDrop(0.3, ewma=1.0, warmup=0)
        >>> [detector.update(value) for value in (1.0, 0.8, 0.6, 0.8, 0.9)]
        [False, False, True, True, False]
    """

    drop: float
    hysteresis: float = 0.15
    ewma: float = 0.5
    warmup: int = 3

    def _check(self) -> None:
        if not _is_number(self.drop) or not 0 < self.drop < 1:
            raise ConfigError("drop", self.drop, "it is a share of the peak, above 0 and below 1.", "Set 0.3, say.")
        _check_ewma(self.ewma)
        _check_common(self.hysteresis, self.warmup)

    @property
    def _clear(self) -> float:
        return min(1.0, 1 - self.drop + self.hysteresis)

    def update(self, value: float) -> bool:
        """Take the next value; whether there is an alarm after it."""
        if not math.isfinite(value):
            return self.on
        self.seen += 1
        self.signal = value if self.seen == 1 else self.ewma * value + (1 - self.ewma) * self.signal
        if self.seen <= self.warmup:
            return False
        self.reference = self.signal if self.seen == self.warmup + 1 else max(self.reference, self.signal)
        limit = self._clear if self.on else 1 - self.drop
        self.on = self.reference > 0 and self.signal < limit * self.reference
        return self.on

    def advance(self, state: State, values: NDArray[np.float64]) -> None:
        """``update`` for each place; see ``Detector.advance``."""
        usable = np.isfinite(values)
        values = np.where(usable, values, 0.0)
        seen, before, peak = state["seen"] + usable, state["signal"], state["reference"]
        average = self.ewma * values + (1 - self.ewma) * before
        signal = np.where(usable, np.where(seen == 1, values, average), before)
        judged = usable & (seen > self.warmup)
        reference = np.where(judged, np.where(seen == self.warmup + 1, signal, np.maximum(peak, signal)), peak)
        limit = np.where(state["on"], self._clear, 1 - self.drop)
        on = (reference > 0) & (signal < limit * reference)
        state.update(seen=seen, signal=signal, reference=reference, on=np.where(judged, on, state["on"]))


@dataclass(eq=False)
class _Level(Detector):
    """What ``Floor`` and ``Above`` share: a moving average of the values is held against a fixed level.

    A subclass says on which side of it there is an alarm.
    """

    level: float
    hysteresis: float = 0.15
    warmup: int = 3
    ewma: float = 1.0

    _sign: ClassVar[int]
    """1: alarm above the level; -1: under it."""

    def _check(self) -> None:
        if not _is_number(self.level) or not math.isfinite(self.level):
            raise ConfigError("level", self.level, "it is a finite number.", "Set 0.5, say.")
        _check_ewma(self.ewma)
        _check_common(self.hysteresis, self.warmup)

    @property
    def _clear(self) -> float:
        return self.level - self._sign * self.hysteresis * abs(self.level)

    def update(self, value: float) -> bool:
        """Take the next value; whether there is an alarm after it."""
        if math.isnan(value):
            return self.on
        self.seen += 1
        value = max(-_LARGEST, min(value, _LARGEST))
        self.signal = value if self.seen == 1 else self.ewma * value + (1 - self.ewma) * self.signal
        self.reference = float(self.level)
        if self.seen > self.warmup:
            limit = self._clear if self.on else self.level
            self.on = self.signal > limit if self._sign > 0 else self.signal < limit
        return self.on

    def advance(self, state: State, values: NDArray[np.float64]) -> None:
        """``update`` for each place; see ``Detector.advance``."""
        usable = ~np.isnan(values)
        seen, before = state["seen"] + usable, state["signal"]
        values = np.where(usable, np.clip(values, -_LARGEST, _LARGEST), 0.0)
        average = self.ewma * values + (1 - self.ewma) * before
        signal = np.where(usable, np.where(seen == 1, values, average), before)
        limit = np.where(state["on"], self._clear, self.level)
        on = signal > limit if self._sign > 0 else signal < limit
        state.update(
            seen=seen,
            signal=signal,
            reference=np.where(usable, float(self.level), state["reference"]),
            on=np.where(usable & (seen > self.warmup), on, state["on"]),
        )


@dataclass(eq=False)
class Floor(_Level):
    """A signal under a level.

    The alarm goes on when the signal, a moving average of the values, is under ``level``, and clears when it is back at
    ``level`` plus ``hysteresis`` times its size.

    NaN is no value: nothing changes. An infinite value counts as the largest number of its sign.

    Args:
        level: A signal under it gives alarm.
        hysteresis: Share of the level. >= 0.
        warmup: First values that give no alarm. >= 0.
        ewma: Weight of the newest value in the average; 1 = no average. Above 0, up to 1.

    Raises: ConfigError: when a setting is out of its range.

    Example:
        >>> detector = Floor(0.5, warmup=0)
        >>> [detector.update(value) for value in (0.6, 0.4, 0.55, 0.6)]
        [False, True, True, False]
    """

    _sign = -1


@dataclass(eq=False)
class Above(_Level):
    """A signal above a level.

    The alarm goes on when the signal, a moving average of the values, is above ``level``, and clears when it is down at
    ``level`` minus ``hysteresis`` times its size.

    NaN is no value: nothing changes. An infinite value counts as the largest number of its sign.

    Args:
        level: A signal above it gives alarm.
        hysteresis: Share of the level. >= 0.
        warmup: First values that give no alarm. >= 0.
        ewma: Weight of the newest value in the average; 1 = no average. Above 0, up to 1.

    Raises: ConfigError: when a setting is out of its range.

    Example:
        >>> detector = Above(0.5, warmup=0)
        >>> [detector.update(value) for value in (0.4, 0.6, 0.45, 0.4)]
        [False, True, True, False]
    """

    _sign = 1


@dataclass(eq=False)
class Cusum(Detector):
    """A signal whose mean has fallen, by the one-sided cumulative sum of its standardised values; for comparison.

    The first ``warmup`` values give the mean and the standard deviation, which then stay as they are: a healthy signal
    that drifts gives alarm in the end, which is why no monitor here uses it. The sum goes on at ``limit``, counts no
    further than twice that, and clears at 0.

    NaN is no value, nor is what float32 cannot hold: nothing changes.

    Args:
        slack: Standard deviations below the mean that are let pass. >= 0.
        limit: Of the sum, in standard deviations. Above 0.
        warmup: Values from which the mean comes. >= 2.

    Raises: ConfigError: when a setting is out of its range.

    Source: Page 1954, Continuous inspection schemes; 0.5 and 5 are the textbook's constants for a shift of one standard
        deviation.

    Example:
        >>> detector = Cusum(warmup=4)
        >>> [detector.update(value) for value in (1.0, 1.1, 0.9, 1.0, 1.0, 0.5)]
        [False, False, False, False, False, True]
    """

    initial: ClassVar[Mapping[str, Any]] = {**Detector.initial, "squares": 0.0, "total": 0.0}

    slack: float = 0.5
    limit: float = 5.0
    warmup: int = 20
    squares: float = field(init=False, default=0.0, repr=False)
    total: float = field(init=False, default=0.0, repr=False)

    def _check(self) -> None:
        if not _is_number(self.slack) or not 0 <= self.slack < math.inf:
            raise ConfigError("slack", self.slack, "it is a number of 0 or more.", "Set 0.5, say.")
        if not _is_number(self.limit) or not 0 < self.limit < math.inf:
            raise ConfigError("limit", self.limit, "it is a number above 0.", "Set 5, say.")
        _check_common(0.0, self.warmup, least=2)

    def update(self, value: float) -> bool:
        """Take the next value; whether there is an alarm after it."""
        if not abs(value) <= _FLOAT32_MAX:
            return self.on
        self.seen += 1
        self.signal = value
        if self.seen <= self.warmup:
            away = value - self.reference
            self.reference += away / self.seen
            self.squares += away * (value - self.reference)
            return False
        # A signal that never moved has no spread; then any fall that float32 can show is one.
        spread = max(math.sqrt(self.squares / (self.warmup - 1)), _EPSILON * abs(self.reference), _SMALLEST)
        self.total = min(max(0.0, self.total + (self.reference - value) / spread - self.slack), 2 * self.limit)
        self.on = self.total > (0.0 if self.on else self.limit)
        return self.on

    def advance(self, state: State, values: NDArray[np.float64]) -> None:
        """``update`` for each place; see ``Detector.advance``."""
        usable = np.abs(values) <= _FLOAT32_MAX
        values = np.where(usable, values, 0.0)
        seen, mean = state["seen"] + usable, state["reference"]
        warming, judged = usable & (seen <= self.warmup), usable & (seen > self.warmup)
        away = values - mean
        new_mean = np.where(warming, mean + away / np.maximum(seen, 1), mean)
        squares = np.where(warming, state["squares"] + away * (values - new_mean), state["squares"])
        spread = np.maximum(np.sqrt(squares / (self.warmup - 1)), np.maximum(_EPSILON * np.abs(new_mean), _SMALLEST))
        total = np.maximum(0.0, state["total"] + (new_mean - values) / spread - self.slack)
        total = np.where(judged, np.minimum(total, 2 * self.limit), state["total"])
        on = total > np.where(state["on"], 0.0, self.limit)
        state.update(seen=seen, reference=new_mean, squares=squares, total=total)
        state.update(signal=np.where(usable, values, state["signal"]), on=np.where(judged, on, state["on"]))


class AnyOf(Detector):
    """Several detectors of one signal; there is an alarm while any of them gives one.

    ``signal`` and ``reference`` are those of the first that gives alarm, or else of the first of all.

    Args:
        *detectors: At least one.

    Raises: ConfigError: when there is none.

    Example:
        >>> detector = AnyOf(PeakDrop(0.2, warmup=0), Floor(0.5, warmup=0))
        >>> detector.update(0.4), detector.reference  # no peak yet to fall from, but under the floor
        (True, 0.5)
    """

    def __init__(self, *detectors: Detector) -> None:
        if not detectors or not all(isinstance(d, Detector) for d in detectors):
            raise ConfigError("detectors", detectors, "it takes one detector or more.", "Pass PeakDrop(0.2), say.")
        self.detectors = tuple(copy.deepcopy(d) for d in detectors)
        self._report()

    def _report(self) -> None:
        one = next((d for d in self.detectors if d.on), self.detectors[0])
        self.seen, self.signal, self.reference = one.seen, one.signal, one.reference
        self.on = any(d.on for d in self.detectors)

    def update(self, value: float) -> bool:
        """Take the next value; whether there is an alarm after it."""
        for detector in self.detectors:
            detector.update(value)
        self._report()
        return self.on

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values, for the record."""
        return {"detector": type(self).__name__, "detectors": [d.to_dict() for d in self.detectors]}

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values that JSON takes."""
        return {f"{i}.{k}": v for i, d in enumerate(self.detectors) for k, v in d.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` gave."""
        for i, detector in enumerate(self.detectors):
            detector.load_state_dict(_part(state, i))
        self._report()

    def fresh(self, num_places: int) -> State:
        """The state of ``num_places`` signals before their first value."""
        parts = {f"{i}.{k}": v for i, d in enumerate(self.detectors) for k, v in d.fresh(num_places).items()}
        return parts | {"on": np.zeros(num_places, np.bool_)}

    def advance(self, state: State, values: NDArray[np.float64]) -> None:
        """``update`` for each place; see ``Detector.advance``."""
        state["on"] = np.zeros(len(values), np.bool_)
        for i, detector in enumerate(self.detectors):
            part = _part(state, i)
            detector.advance(part, values)
            state.update({f"{i}.{name}": column for name, column in part.items()})
            state["on"] = state["on"] | part["on"]

    def judged(self, state: State) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What was judged last at each place, and what it was held against; two arrays of shape (P,)."""
        parts = [_part(state, i) for i in range(len(self.detectors))]
        signal, reference = self.detectors[0].judged(parts[0])
        for detector, part in reversed(list(zip(self.detectors, parts, strict=True))):
            its_signal, its_reference = detector.judged(part)
            signal = np.where(part["on"], its_signal, signal)
            reference = np.where(part["on"], its_reference, reference)
        return signal, reference


class PlaceDetector:
    """One detector a place, all with the same settings.

    Args:
        detector: The settings; its own state is not used.
        places: One name a place; unique.

    Attributes:
        places: Their names.

    Example:
        >>> detectors = Floor(0.5, warmup=0).over(["layer_0", "layer_1"])
        >>> detectors.update([0.4, 0.6]).tolist()
        [True, False]
    """

    def __init__(self, detector: Detector, places: Sequence[str]) -> None:
        self._detector = detector
        self.places = tuple(places)
        self._state = detector.fresh(len(self.places))

    def update(self, values: ArrayLike) -> NDArray[np.bool_]:
        """Take the next value of each place; where there is an alarm after them. Shape (P,)."""
        given = np.asarray(values, dtype=np.float64)
        if given.shape != (len(self.places),):
            raise ValueError(f"values: got shape {given.shape}, but there are {len(self.places)} places.")
        self._detector.advance(self._state, given)
        return self.on

    @property
    def on(self) -> NDArray[np.bool_]:
        """Where there is an alarm now. Shape (P,)."""
        return np.array(self._state["on"], dtype=np.bool_)

    def judged(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What was judged last at each place, and what it was held against; two arrays of shape (P,)."""
        return self._detector.judged(self._state)

    def move_to(self, places: Sequence[str]) -> None:
        """Go on over other places: those of the same name keep their state, new ones start afresh."""
        before, state = self._state, self._detector.fresh(len(places))
        index = {name: i for i, name in enumerate(self.places)}
        pairs = [(i, index[name]) for i, name in enumerate(places) if name in index]
        new, old = np.array(pairs, dtype=np.intp).reshape(-1, 2).T
        for name, column in state.items():
            column[new] = before[name][old]
        self.places, self._state = tuple(places), state

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values that JSON takes: by attribute, one entry a place."""
        return {"places": list(self.places), **{name: column.tolist() for name, column in self._state.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` gave, by name of place, and go on over the places that it was saved over.

        Raises: ValueError: when it is no such state; nothing is changed then.
        """
        try:
            places = tuple(map(str, state["places"]))
            loaded = self._detector.fresh(len(places))
            for name, column in loaded.items():
                column[:] = state[name]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"no state of {type(self._detector).__name__} over places: {error!r}") from None
        self.places, self._state = places, loaded


_FLOAT32_MAX = float(np.finfo(np.float32).max)
_EPSILON = float(np.finfo(np.float32).eps)
_SMALLEST = float(np.finfo(np.float32).tiny)


def _part(state: Mapping[str, Any], index: int) -> dict[str, Any]:
    prefix = f"{index}."
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _check_ewma(ewma: object) -> None:
    if not _is_number(ewma) or not 0 < ewma <= 1:  # type: ignore[operator]
        raise ConfigError("ewma", ewma, "it is a weight above 0, up to 1.", "Set 1 for no average.")


def _check_common(hysteresis: object, warmup: object, least: int = 0) -> None:
    if not _is_number(hysteresis) or not 0 <= hysteresis < math.inf:  # type: ignore[operator]
        raise ConfigError("hysteresis", hysteresis, "it is a share of 0 or more.", "Set 0.15, or 0 for none.")
    if isinstance(warmup, bool) or not isinstance(warmup, Integral) or warmup < least:
        raise ConfigError("warmup", warmup, f"it counts values, {least} or more.", f"Set an int of {least} or more.")
