"""The settings of GNMR: when a unit counts as risky, and how many may be on the recovery path."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, get_args

from trimtab.control.schedules import Threshold, schedule_from_dict, schedule_to_dict, threshold_at
from trimtab.errors import ConfigError, nearest_names

if TYPE_CHECKING:
    from trimtab.control.controller import Controller

__all__ = ["ErrorHistory", "History", "Policy", "budget_in_units", "budget_setting", "is_real", "whole_number"]

History = Literal["mean", "ema", "window"]
"""What a norm is compared with: the mean of all, an exponential mean, or the mean of the last ``history_steps``."""

ErrorHistory = Literal["absolute", "ema"]
"""What a channel error is compared with: nothing, or an exponential mean of the unit's earlier ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """When a unit counts as risky, and how many units may be on the recovery path at once.

    The defaults are the first published setting with the full mean; ``robust()`` is the one to train with.

    Raises:
        ConfigError: when a setting is out of its range: which one, what it was, what is allowed, what to do.

    Source: Kong et al. 2026, Algorithms 1 and 2. ``history`` other than "mean", ``history_clip``, ``burn_in_steps``,
    ``act_from_step`` and ``damping`` are ours: the full mean is dominated by the large norms at the start of a run.
    So are ``error_limit`` and ``amax_limit``: a norm only shows a gradient that grows, and a fault may make none grow.

    Example:
        >>> Policy.from_dict(Policy(max_active=0.25).to_dict()) == Policy(max_active=0.25)
        True

        What was measured for INT4 compares a unit's channel error and its amax with its own earlier ones:

        >>> int4 = Policy(max_active=1, error_limit=1.5, error_history="ema", amax_limit=12.0)
        >>> controller = int4.start(["q", "down"])
        >>> for amaxes in ([3.0, 40.0], [3.1, 38.0], [60.0, 41.0]):
        ...     decision = controller.update([1.0, 1.0], [0.1, 0.85], amaxes=amaxes)
        >>> decision.active.tolist(), decision.reasons
        ([True, False], ('amax', 'none'))
    """

    alpha: Threshold = 1.5
    """A GNMR above it is a risk above 1. A number > 0, or a function of the optimizer step (1 for the first update)."""

    beta: Threshold = 1.3
    """A Delta above it is a risk above 1. A number > 0, or a function of the optimizer step."""

    error_limit: float | None = None
    """A channel error above it is a risk above 1. > 0, None = not judged. Measured: 0.3 for floats of 6 and 8 bits in
    tiles of 128, 0.4 for INT8 per tensor; for INT4 no limit tells a fault from a healthy unit, so that errors are to be
    judged by their own history: 1.5 with ``error_history="ema"``, beside an ``amax_limit``. For INT2 neither does."""

    error_history: ErrorHistory = "absolute"
    """What a channel error is compared with: "absolute" takes it as it is; "ema" divides it by an exponential mean of
    the unit's earlier ones, so that ``error_limit`` (then above 1) is a ratio. A unit without a mean has the ratio 1.
    An error enters the mean as at most ``error_limit`` times the mean; one of 0, or that is not finite, never does."""

    error_ema_factor: float = 0.95
    """Share of the old mean that stays at an update of an "ema" error history, and of that of amaxes.
    0 <= factor < 1."""

    amax_limit: float | None = None
    """The largest magnitude of a unit's operand, divided by an exponential mean of its earlier ones: above it is a risk
    above 1. > 0, None = not judged. Measured for INT4: 12. A unit without a mean has the ratio 1. An amax enters the
    mean as at most twice the mean (ours: clipped at the limit itself, a fault that lasts would soon be the mean);
    one of 0, or that is not finite, never does."""

    window_steps: int = 10
    """Recent GNMR values that Delta compares with, in steps in which the unit was observed. >= 1."""

    lock_steps: int = 1
    """Decisions for which a unit stays a candidate after its risk has fallen again. >= 0."""

    max_active: int | float = 4
    """The budget. An int is a count >= 0; a float is a share of the recoverable units, 0.0 to 1.0."""

    history: History = "mean"
    """What a norm is compared with: "mean" of all earlier ones, "ema", or "window"."""

    ema_factor: float = 0.95
    """Share of the old mean that stays at an update of an "ema" history. 0 <= factor < 1."""

    history_steps: int = 100
    """Norms in a "window" history. >= 1."""

    history_clip: float | None = None
    """A norm enters the history as at most this many times the mean, once 10 have entered. >= 1, None = unclipped."""

    burn_in_steps: int = 0
    """A unit's first observations that do not enter its history; the same of its errors and amaxes. >= 0."""

    act_from_step: int = 0
    """At steps up to this one, norms are a risk only where they failed. >= 0. Channel errors that are compared with no
    history count from the first step; with one, and of amaxes, only those that are not finite do."""

    damping: bool = False
    """Scale the gradient of a unit with a risky norm down in the step itself, to its mean; recovery helps from the next
    step on. Channel error and amax say nothing about the size of a gradient, and scale none."""

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            value = threshold_at(name, getattr(self, name), 1)
            if not callable(getattr(self, name)):
                object.__setattr__(self, name, value)
        limit = self.error_limit
        if limit is not None:
            if not is_real(limit) or not 0 < limit < math.inf:
                allowed = "a limit of the channel error is a finite number above 0."
                raise ConfigError("error_limit", limit, allowed, "Set 0.3 for instance, or None to judge norms alone.")
            object.__setattr__(self, "error_limit", float(limit))
        self._check_error_history()
        if self.amax_limit is not None:
            if not is_real(self.amax_limit) or not 0 < self.amax_limit < math.inf:
                allowed = "a limit of the ratio of amax to its mean is a finite number above 0."
                raise ConfigError("amax_limit", self.amax_limit, allowed, "Set 12 for instance, or None to judge none.")
            object.__setattr__(self, "amax_limit", float(self.amax_limit))
        for name, least, reason in (
            ("window_steps", 1, "the short window needs at least 1 step."),
            ("lock_steps", 0, "a lock lasts 0 or more steps."),
            ("history_steps", 1, "a window history needs at least 1 step."),
            ("burn_in_steps", 0, "burn-in lasts 0 or more observations."),
            ("act_from_step", 0, "it is an optimizer step, 0 or more."),
        ):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least, reason))
        object.__setattr__(self, "max_active", budget_setting(self.max_active))
        _check_choice("history", self.history, get_args(History))
        object.__setattr__(self, "ema_factor", _share("ema_factor", self.ema_factor))
        clip = self.history_clip
        if clip is not None:
            if not is_real(clip) or not 1 <= clip < math.inf:
                allowed = "it is a finite number of 1 or more: below 1 every update would pull the mean towards 0."
                raise ConfigError("history_clip", clip, allowed, "Set 4 for instance, or None to clip nothing.")
            object.__setattr__(self, "history_clip", float(clip))
        if not isinstance(self.damping, bool):
            raise ConfigError("damping", self.damping, "it is True or False.", "Set one of them.")

    def _check_error_history(self) -> None:
        _check_choice("error_history", self.error_history, get_args(ErrorHistory))
        limit = self.error_limit
        if self.error_history == "ema" and limit is not None and limit <= 1:
            allowed = 'with error_history="ema" it is a ratio above 1: what enters the mean is clipped to it.'
            raise ConfigError("error_limit", limit, allowed, 'Set 1.5 for instance, or error_history="absolute".')
        object.__setattr__(self, "error_ema_factor", _share("error_ema_factor", self.error_ema_factor))

    def budget(self, num_recoverable: int) -> int:
        """The most units that may be active at once.

        Args:
            num_recoverable: Units that have a recovery path.

        Returns:
            ``max_active`` itself where it is a count, otherwise that share of the units, rounded half to even, and at
            least 1 if the share is above 0. Never more than ``num_recoverable``.

        Example:
            >>> Policy(max_active=0.01).budget(10), Policy(max_active=0.25).budget(10), Policy(max_active=4).budget(3)
            (1, 2, 3)
        """
        return budget_in_units(self.max_active, num_recoverable)

    def thresholds(self, step: int) -> tuple[float, float]:
        """Alpha and beta at ``step``; the first update is step 1.

        Raises:
            ConfigError: when a schedule raises, or gives what is no finite number above 0. (A ``Controller`` keeps its
                last valid threshold instead, so that training goes on.)

        Example:
            >>> Policy(alpha=lambda step: 1.0 + step).thresholds(2)
            (3.0, 1.3)
        """
        return threshold_at("alpha", self.alpha, step), threshold_at("beta", self.beta, step)

    def start(
        self, units: int | Sequence[str], recoverable: Sequence[bool] | Sequence[str] | None = None
    ) -> Controller:
        """Start a controller with these settings.

        Args:
            units: Number of units, or their names from the input to the loss.
            recoverable: None for all, a mask over the units, or the names of those with a recovery path.

        Raises:
            ConfigError: see ``Controller``.

        Example:
            >>> Policy(max_active=0.5).start(["q", "k", "v"], recoverable=["q", "k"]).budget
            1
        """
        from trimtab.control.controller import Controller  # it needs Policy itself

        return Controller(units, self, recoverable)

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain JSON-able values; a function that is no dataclass becomes its ``repr``.

        Example:
            >>> Policy().to_dict()["alpha"]
            1.5
        """
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return values | {name: schedule_to_dict(values[name]) for name in ("alpha", "beta")}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Policy:
        """Read settings back; those that are not given keep their defaults.

        Raises:
            ConfigError: when a key is unknown (with the nearest valid one), or a value is out of its range.

        Example:
            >>> Policy.from_dict({"lock_step": 3})
            Traceback (most recent call last):
            trimtab.errors.ConfigError: lock_step=3: a policy has no such setting. Did you mean 'lock_steps'?
        """
        if not isinstance(values, Mapping):
            raise ConfigError("policy", values, "it is a mapping from settings to values.", "Pass a dict.")
        known = [item.name for item in fields(cls)]
        for key in values:
            if key not in known:
                near = nearest_names(str(key), known)
                remedy = f"Did you mean {near[0]!r}?" if near else f"The settings are {', '.join(known)}."
                raise ConfigError(str(key), values[key], "a policy has no such setting.", remedy)
        read = dict(values)
        for name in ("alpha", "beta"):
            if name in read:
                read[name] = schedule_from_dict(name, read[name])
        return cls(**read)


def is_real(value: object) -> bool:
    """Whether ``value`` is a real number, and no bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _check_choice(setting: str, value: object, choices: Sequence[str]) -> None:
    """Raises: ConfigError: when ``value`` is none of ``choices``, with the nearest."""
    if value not in choices:
        near = nearest_names(str(value), choices)
        remedy = f"Did you mean {near[0]!r}?" if near else "Use one of them."
        raise ConfigError(setting, value, f"it is one of {', '.join(map(repr, choices))}.", remedy)


def _share(setting: str, value: Any) -> float:
    """``value`` as the share of an old mean that stays."""
    if not is_real(value) or not 0 <= value < 1:
        raise ConfigError(setting, value, "it is a share of at least 0 and below 1.", "Set 0.95 for instance.")
    return float(value)


def whole_number(setting: str, value: Any, least: int, reason: str) -> int:
    """``value`` as an int of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigError(setting, value, "it is a whole number.", f"Set an int of {least} or more.")
    if value < least:
        raise ConfigError(setting, value, reason, f"Set it to {least} or more.")
    if int(value) > 2**53:
        # Arrays of any library hold it, and so does JSON.
        raise ConfigError(setting, value, "no run has that many steps.", "Set a smaller one.")
    return int(value)


def budget_in_units(max_active: int | float, num_recoverable: int) -> int:
    """The most units that ``max_active`` allows of ``num_recoverable``; see ``Policy.budget``."""
    if isinstance(max_active, int):
        return min(max_active, num_recoverable)
    least = 1 if max_active > 0 and num_recoverable > 0 else 0
    return min(max(round(max_active * num_recoverable), least), num_recoverable)


def budget_setting(value: Any, setting: str = "max_active") -> int | float:
    """A budget as an int count or a float share."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        if value < 0:
            raise ConfigError(setting, value, "a count of units is 0 or more.", "Set it to 0 or more.")
        return int(value)
    if not is_real(value) or not 0 <= value <= 1:
        allowed = "an int is a count of units, 0 or more; a float is a share of them, 0.0 to 1.0."
        raise ConfigError(setting, value, allowed, "Set 4 or 0.25 for instance.")
    return float(value)
