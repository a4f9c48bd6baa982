"""Every policy by the name that the command line, configuration files and records use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from trimtab.control.baselines import MatchedRandom
from trimtab.control.policies.adapt_style import AdaptStyle
from trimtab.control.policies.damping_only import DampingOnly
from trimtab.control.policies.gsnr_style import GsnrStyle
from trimtab.control.policies.jacobian_proxy import JacobianProxy
from trimtab.control.policies.oracle import Oracle
from trimtab.control.policies.static import FixedSet, StaticHigh, StaticLow
from trimtab.control.policy import Policy
from trimtab.control.presets import PRESETS, preset
from trimtab.control.protocol import PolicyLike
from trimtab.errors import ConfigError, nearest_names

__all__ = ["POLICIES", "policy", "policy_from_dict"]


def _gnmr(name: str, settings: Mapping[str, Any], total_steps: int | None) -> Policy:
    return Policy.from_dict({**preset(name, total_steps=total_steps).to_dict(), **settings})


def _made(cls: type[Any], settings: Mapping[str, Any], total_steps: int | None) -> PolicyLike:
    made: PolicyLike = cls.from_dict(settings)
    return made


_KINDS = {
    "matched_random": MatchedRandom,
    **{cls.kind: cls for cls in (StaticLow, StaticHigh, FixedSet, AdaptStyle, GsnrStyle, JacobianProxy)},
    **{cls.kind: cls for cls in (DampingOnly, Oracle)},
}

POLICIES: Mapping[str, Callable[[Mapping[str, Any], int | None], PolicyLike]] = MappingProxyType(
    {
        **{name: partial(_gnmr, name) for name in PRESETS},
        **{name: partial(_made, cls) for name, cls in _KINDS.items()},
    }
)
"""What makes each policy, of its settings and the length of the run: GNMR's presets first, then what to compare with.
"""


def policy(name: str, settings: Mapping[str, Any] | None = None, *, total_steps: int | None = None) -> PolicyLike:
    """The policy of that name.

    Args:
        name: One of ``POLICIES``.
        settings: Its settings, as its ``from_dict`` takes them. Of a preset, what is to be other than it has it: GNMR
            with channel errors is ``policy("robust", {"error_limit": 0.3})``.
        total_steps: Length of the run where known; some presets need it.

    Raises:
        ConfigError: when there is no such policy (with the nearest name), or its settings are not valid.

    Example:
        >>> policy("paper", {"max_active": 2}).budget(10), policy("static_high").budget(10)
        (2, 10)
    """
    if name not in POLICIES:
        near = nearest_names(str(name), POLICIES)
        remedy = f"Did you mean {near[0]!r}?" if near else "Use one of them."
        raise ConfigError("policy", name, f"the policies are {', '.join(map(repr, POLICIES))}.", remedy)
    return POLICIES[name]({} if settings is None else settings, total_steps)


def policy_from_dict(values: Mapping[str, Any]) -> PolicyLike:
    """The policy whose ``to_dict`` gave ``values``: by their ``kind``, a GNMR ``Policy`` where they have none.

    Raises:
        ConfigError: when there is no such kind, or a setting is not valid.

    Example:
        >>> policy_from_dict(AdaptStyle(20).to_dict()) == AdaptStyle(20)
        True
    """
    if not isinstance(values, Mapping) or "kind" not in values:
        return Policy.from_dict(values)
    kind = values["kind"]
    if kind not in _KINDS:
        near = nearest_names(str(kind), _KINDS)
        remedy = f"Did you mean {near[0]!r}?" if near else f"The kinds are {', '.join(_KINDS)}."
        raise ConfigError("kind", kind, "no policy is of this kind.", remedy)
    return _made(_KINDS[kind], values, None)
