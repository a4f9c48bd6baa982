"""The policy of a record, built again from the settings that it was recorded with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from trimtab.control import Policy, PolicyLike, policy_from_dict
from trimtab.errors import ConfigError, TrimtabError, verbatim

__all__ = ["build_again", "score_settings"]


def build_again(settings: Any, threshold: Callable[[str, Any], Any], remedy: str) -> PolicyLike:
    """The policy whose ``to_dict`` a record holds, with the thresholds that the caller has for it.

    All policies of ``trimtab.control`` go by norms, channel errors, amaxes, raised risks, the step, and by what their
    settings hold: no decision needs more than is in the record. A policy of anybody else's is known by its settings
    alone, and is refused.

    Args:
        settings: What the record's config has as its policy.
        threshold: Of a threshold's name and its value, a schedule already built again, or the text that a plain
            function was recorded as: what to use.
        remedy: What to do about a policy that cannot be built again, a sentence.

    Raises:
        ConfigError: when it cannot be built again, with the reason.

    Example:
        >>> build_again(Policy(alpha=2.0).to_dict(), lambda name, recorded: recorded, "Pass one.") == Policy(alpha=2.0)
        True
    """
    if not isinstance(settings, Mapping):
        raise ConfigError("policy", settings, "the record's config holds no policy to build again.", remedy)
    scores = score_settings(settings)
    # A schedule that is a plain function is recorded as text, which no policy takes.
    plain = {**scores, "alpha": 1.0, "beta": 1.0}
    try:
        policy: Any = policy_from_dict(plain if scores is settings else {**settings, "scores": plain})
        thresholds = {name: threshold(name, _recorded(name, scores)) for name in ("alpha", "beta")}
        if isinstance(policy, Policy):
            return dataclasses.replace(policy, **thresholds)
        made: PolicyLike = dataclasses.replace(policy, scores=dataclasses.replace(policy.scores, **thresholds))
        return made
    except (TrimtabError, TypeError) as error:
        allowed = f"the recorded policy cannot be built again ({error})."
        raise ConfigError("policy", verbatim("(recorded)"), allowed, remedy) from None


def score_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the GNMR scores: a policy's own, or those that are recorded beside its choice.

    Example:
        >>> score_settings({"kind": "static_low", "scores": {"alpha": 2.0}})["alpha"]
        2.0
    """
    scores = settings.get("scores")
    return scores if isinstance(scores, Mapping) else settings


def _recorded(name: str, settings: Mapping[str, Any]) -> Any:
    """A threshold as recorded; text where it was a plain function."""
    if isinstance(settings.get(name), str):
        return settings[name]
    return getattr(Policy.from_dict({key: settings[key] for key in (name,) if key in settings}), name)
