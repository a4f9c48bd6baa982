"""How many units a recorded run may have on the recovery path at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab.control import Policy
from trimtab.errors import ConfigError

__all__ = ["budget_of"]


def budget_of(config: Mapping[str, Any], num_recoverable: int) -> int | None:
    """The budget that the policy of a recorded config stands for; None where it does not say.

    Example:
        >>> budget_of({"policy": {"max_active": 0.2}}, 28), budget_of({}, 28)
        (6, None)
    """
    policy = config.get("policy")
    most = policy.get("max_active") if isinstance(policy, Mapping) else None
    if not isinstance(most, (int, float)) or not num_recoverable:
        return None
    try:
        return Policy(max_active=most).budget(num_recoverable)
    except ConfigError:
        return None
