"""The arms of a comparison by their names: which policy each has, and what falls on it. No torch here.

An arm is written as a name, or as ``name@setting=value,setting=value`` with settings of its policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from trimtab.control import MatchedRandom, Policy, PolicyLike, paper
from trimtab.control.policies import AdaptStyle, DampingOnly, FixedSet, GsnrStyle, JacobianProxy
from trimtab.control.policies.scored import ScoredPolicy
from trimtab.control.policy import budget_in_units
from trimtab.errors import ConfigError, nearest_names

if TYPE_CHECKING:
    from trimtab.experiments.arms import TrainingPlan

__all__ = ["ARM_KINDS", "ARM_NAMES", "ArmKind", "ArmName", "Given", "read_arm", "split_arms"]

_NEVER = 1e300
"""A threshold that no finite score of a run comes near."""

_FIXED_STREAM = 0xA2
"""Names the stream of random numbers that the fixed set is drawn from."""

_PROFILED_SHARE = 0.4
"""Of the run, what "adapt-style" profiles: bursts usually begin after a fifth of it, and it is to see some."""

Route = Literal["policy", "all", "oracle"]
"""Who puts units on the recovery path: the policy; nobody, for all are on it; or the gaps, as measured in the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """What a policy is made from.

    Args:
        plan: Model and schedule, with the seed of the run.
        max_active: The budget.
        error_limit: Limit of the channel error; None where no arm asks for it.
        units: Names of the units that the recipe can switch.
        counts: Of an arm with a reference, its active units after each step.
        reference: Of an arm with a reference, the reference's policy.
    """

    plan: TrainingPlan
    max_active: int | float
    error_limit: float | None = None
    units: Sequence[str] = ()
    counts: Sequence[int] = ()
    reference: PolicyLike | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmKind:
    """One way to train.

    Args:
        title: What the table calls it.
        make: Makes its policy.
        is_quantized: Whether the model is converted at all.
        has_faults: Whether the comparison's faults fall on it.
        route: Who routes.
        reference: Name of the arm whose number of active units it has in each step; empty for none.
        needs_limit: Whether it goes by channel errors.
        has_budget: Whether it spends the common budget; the others recover nothing, or everything.
        scores_decide: Whether what it does follows from the scores, so that recall and precision are its own.
    """

    title: str
    make: Callable[[Given, Mapping[str, Any]], PolicyLike]
    is_quantized: bool = True
    has_faults: bool = True
    route: Route = "policy"
    reference: str = ""
    needs_limit: bool = False
    has_budget: bool = True
    scores_decide: bool = False


@dataclass(frozen=True, slots=True)
class ArmName:
    """An arm as it was written, read.

    Args:
        text: As written.
        name: One of ``ARM_NAMES``.
        changes: Settings after the "@".
    """

    text: str
    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> ArmKind:
        """What the name stands for."""
        return ARM_KINDS[self.name]

    @property
    def title(self) -> str:
        """What the table calls it."""
        changes = ", ".join(f"{key}={value}" for key, value in self.changes.items())
        return f"{self.kind.title} ({changes})" if changes else self.kind.title

    @property
    def reference(self) -> str | None:
        """The arm, as written, whose counts it matches: its own kind's, or ``of``, with the same other settings.

        Example:
            >>> read_arm("random").reference, read_arm("random@of=gnmr-paper,alpha=2.0").reference
            ('gnmr', 'gnmr-paper@alpha=2.0')
        """
        if not self.kind.reference:
            return None
        _, _, written = self.text.partition("@")
        kept = [part for part in written.split(",") if part and part.partition("=")[0].strip() != "of"]
        return "@".join([str(self.changes.get("of", self.kind.reference)), *([",".join(kept)] if kept else [])])

    def policy(self, given: Given) -> PolicyLike:
        """Its policy.

        Raises: ConfigError: when its policy has no such setting, or not of this value, or what it needs is missing.
        """
        self.check_limit(given.error_limit)
        changes = dict(self.changes)
        if "max_active" in changes:
            if not self.kind.has_budget:
                allowed = f"the arm {self.name!r} spends no budget."
                raise ConfigError("max_active", changes["max_active"], allowed, "Leave it out.")
            given = replace(given, max_active=changes.pop("max_active"))
        return self.kind.make(given, changes)

    def check_limit(self, error_limit: float | None) -> None:
        """See that there is a limit of the channel error where the arm goes by one.

        Raises: ConfigError: when there is none.
        """
        if self.kind.needs_limit and error_limit is None and "error_limit" not in self.changes:
            raise ConfigError(
                "error_limit",
                None,
                f"the arm {self.text!r} goes by channel errors, and no limit is measured for this recipe's format.",
                f"Set one, or write {self.name}@error_history=ema,error_limit=1.5.",
            )

    def budget(self, max_active: int | float, num_units: int) -> int:
        """The most units that it may have on the recovery path."""
        if self.kind.route == "all":
            return num_units
        if not self.kind.has_budget:
            return 0
        return budget_in_units(self.changes.get("max_active", max_active), num_units)


def read_arm(text: str) -> ArmName:
    """Read an arm as it is written.

    Raises: ConfigError: when there is no such arm, with the nearest name, or its settings cannot be read.

    Example:
        >>> arm = read_arm("gnmr@alpha=2.0,max_active=2")
        >>> arm.name, dict(arm.changes)
        ('gnmr', {'alpha': 2.0, 'max_active': 2})
    """
    name, at, written = str(text).partition("@")
    if name not in ARM_KINDS:
        near = nearest_names(name, ARM_KINDS)
        remedy = f"Did you mean {near[0]!r}?" if near else "Use one of them."
        raise ConfigError("arm", text, f"the arms are {', '.join(ARM_KINDS)}.", remedy)
    changes: dict[str, Any] = {}
    for part in written.split(",") if at else ():
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip() or key.strip() in changes:
            raise ConfigError(
                "arm", text, "settings come after '@' as key=value, with commas, each once.", "Write gnmr@alpha=2.0."
            )
        changes[key.strip()] = _value(value.strip())
    if ARM_KINDS[name].reference and (of := changes.get("of")) is not None:
        kind = ARM_KINDS.get(str(of))
        if kind is None or kind.reference or kind.route != "policy" or not kind.has_budget:
            raise ConfigError("of", of, "it is an arm whose policy switches units.", "Write of=gnmr-paper, say.")
    return ArmName(str(text), name, MappingProxyType(changes))


def split_arms(text: str) -> tuple[str, ...]:
    """The arms of a list with commas; those between the settings of one arm do not end it.

    Example:
        >>> split_arms("static-low, gnmr-paper@alpha=2.0,beta=1.5,random")
        ('static-low', 'gnmr-paper@alpha=2.0,beta=1.5', 'random')
    """
    arms: list[str] = []
    for piece in map(str.strip, text.split(",")):
        if arms and "=" in piece and "@" not in piece:
            arms[-1] += f",{piece}"
        else:
            arms.append(piece)
    return tuple(arms)


def _value(text: str) -> Any:
    """A number, true, false or none as such; else the text."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _changed(policy: Any, changes: Mapping[str, Any]) -> Any:
    """The policy with other settings: its own, or those of the scores beside."""
    if isinstance(policy, Policy):
        return Policy.from_dict({**policy.to_dict(), **changes})
    assert isinstance(policy, ScoredPolicy)
    own = {item.name for item in fields(policy)} - {"scores", "units", "max_active", "share"}
    scores = _changed(policy.scores, {key: value for key, value in changes.items() if key not in own})
    return replace(policy, scores=scores, **{key: value for key, value in changes.items() if key in own})


def _static(given: Given, changes: Mapping[str, Any]) -> PolicyLike:
    return _changed(given.plan.policy(max_active=0), changes)


def _gnmr(given: Given, changes: Mapping[str, Any]) -> PolicyLike:
    return _changed(given.plan.policy(max_active=given.max_active), changes)


def _gnmr_damping(given: Given, changes: Mapping[str, Any]) -> PolicyLike:
    return _changed(given.plan.policy(max_active=given.max_active, damping=True), changes)


def _paper(given: Given, changes: Mapping[str, Any]) -> PolicyLike:
    rest = dict(changes)
    setting = rest.pop("setting", "activations")
    published = paper(setting, total_steps=given.plan.num_steps, max_active=given.max_active)
    return _changed(published, rest)


def _direct(given: Given, changes: Mapping[str, Any], damping: bool = False) -> PolicyLike:
    policy = given.plan.policy(max_active=given.max_active, damping=damping)
    return _changed(policy, {"error_limit": given.error_limit, **changes})


def _direct_damping(given: Given, changes: Mapping[str, Any]) -> PolicyLike:
    return _direct(given, changes, damping=True)


def _direct_only(given: Given, changes: Mapping[str, Any]) -> PolicyLike:
    return _direct(given, {"alpha": _NEVER, "beta": _NEVER, **changes})


def _random(given: Given, changes: Mapping[str, Any]) -> PolicyLike:
    # Its settings are those of its reference, which it damps and is judged as.
    reference = given.reference
    scores = reference if isinstance(reference, Policy) else getattr(reference, "scores", given.plan.policy())
    return MatchedRandom(given.counts, given.plan.seed, scores=scores)


def _fixed(given: Given, changes: Mapping[str, Any]) -> PolicyLike:
    count = budget_in_units(given.max_active, len(given.units))
    # A stream of its own: from the seed alone it would hold the very units that permanent faults fall on.
    chosen = np.random.default_rng([given.plan.seed, _FIXED_STREAM]).choice(len(given.units), size=count, replace=False)
    return _changed(FixedSet([given.units[i] for i in sorted(chosen)], scores=given.plan.policy()), changes)


def _adapt(given: Given, changes: Mapping[str, Any]) -> PolicyLike:
    scores = given.plan.policy()
    profile_steps = max(1, scores.act_from_step, round(_PROFILED_SHARE * given.plan.num_steps))
    policy = AdaptStyle(profile_steps, share=given.max_active, scores=scores)
    return _changed(policy, changes)


def _gsnr(given: Given, changes: Mapping[str, Any]) -> PolicyLike:
    return _changed(GsnrStyle(max_active=given.max_active, scores=given.plan.policy()), changes)


def _jacobian(given: Given, changes: Mapping[str, Any]) -> PolicyLike:
    return _changed(JacobianProxy(max_active=given.max_active, scores=given.plan.policy()), changes)


def _damping(given: Given, changes: Mapping[str, Any]) -> PolicyLike:
    return _changed(DampingOnly(scores=given.plan.policy()), changes)


ARM_KINDS: Mapping[str, ArmKind] = MappingProxyType(
    {
        "unquantized-clean": ArmKind(
            title="unquantized, no faults", make=_static, is_quantized=False, has_faults=False, has_budget=False
        ),
        "static-low-clean": ArmKind(title="low-cost path, no faults", make=_static, has_faults=False, has_budget=False),
        "static-low": ArmKind(title="low-cost path", make=_static, has_budget=False),
        "static-high": ArmKind(title="recovery path", make=_static, route="all", has_budget=False),
        "gnmr": ArmKind(title="GNMR", make=_gnmr, scores_decide=True),
        "gnmr-paper": ArmKind(title="GNMR, published", make=_paper, scores_decide=True),
        "gnmr-damping": ArmKind(title="GNMR + damping", make=_gnmr_damping, scores_decide=True),
        "direct": ArmKind(title="GNMR + error", make=_direct, needs_limit=True, scores_decide=True),
        "direct-damping": ArmKind(
            title="GNMR + error + damping", make=_direct_damping, needs_limit=True, scores_decide=True
        ),
        "direct-only": ArmKind(title="error alone", make=_direct_only, needs_limit=True, scores_decide=True),
        "random": ArmKind(title="random, as GNMR", make=_random, reference="gnmr"),
        "random-direct": ArmKind(title="random, as GNMR + error", make=_random, reference="direct"),
        "fixed": ArmKind(title="fixed set", make=_fixed),
        "adapt-style": ArmKind(title="profiled for 40% of the run, then fixed", make=_adapt),
        "gsnr-style": ArmKind(title="norm's noise", make=_gsnr),
        "jacobian": ArmKind(title="norm ratio", make=_jacobian),
        "damping-only": ArmKind(title="damping only", make=_damping, has_budget=False, scores_decide=True),
        "oracle": ArmKind(title="oracle", make=_static, route="oracle"),
    }
)
"""Every arm by its name."""

ARM_NAMES = tuple(ARM_KINDS)
"""The names of the arms."""
