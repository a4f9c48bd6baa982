"""Which units take the recovery path next: arrays of norms and errors in, a decision out. No torch, no I/O, no clock.

A *policy* holds settings and starts a *controller*; the controller turns each step's norms into a ``Decision``.

Words:
    unit: An operator, block or layer that is watched.
    recoverable unit: One with a low-cost path and a recovery path of higher fidelity. Others are scored, not switched.
    step: One optimizer step, however many micro-batches it accumulates. The first is 1.
    norm: L2 norm of the gradient of a unit's parameters, before clipping. 0 = not observed; NaN, infinite or
        negative = failed.
    history: What a unit's norms were so far, in one number, the mean.
    GNMR: Gradient-norm-to-mean ratio, norm / mean of the history before it.
    Delta: GNMR / mean of the unit's last ``window_steps`` GNMR values.
    channel error: What the unit's quantizer lost of its operand, |x - q(x)| / |x| averaged over the input channels.
        NaN = not known. It is seen by the precision path, not in the gradients.
    amax: Largest magnitude of that operand, judged by its ratio to the mean of the unit's earlier ones. NaN = not
        known.
    risk: max(GNMR/alpha, Delta/beta), error/error_limit and amax ratio/amax_limit where a limit is set, and the raised
        risk where there is one. A unit with a risk above 1 is risky.
    raised risk: What something beside norms and errors, an alarm, holds a unit's risk to be. NaN = none.
    active set: The units on the recovery path in the next step. Never more than the budget, whatever the norms.
    lock: For how many more decisions a unit stays a candidate without being risky.
    reason: Which term made a unit's risk, or that only its lock holds it.
    damping: Scaling a unit's gradient down in the step itself, where its norm is risky.

Source: Kong et al. 2026, Algorithms 1 and 2.

Example:
    >>> controller = robust(max_active=1).start(["q", "k"])
    >>> decision = controller.update([1.0, float("nan")])
    >>> [name for name, active in zip(controller.units, decision.active) if active]
    ['k']
"""

from trimtab.control.baselines import MatchedRandom, RandomController
from trimtab.control.checkpoint import LoadReport
from trimtab.control.controller import Controller
from trimtab.control.decision import Decision
from trimtab.control.policies import (
    POLICIES,
    AdaptStyle,
    DampingOnly,
    FixedSet,
    GsnrStyle,
    JacobianProxy,
    Oracle,
    StaticHigh,
    StaticLow,
    policy_from_dict,
)
from trimtab.control.policy import Policy
from trimtab.control.presets import PRESETS, paper, preset, robust
from trimtab.control.protocol import ControllerLike, PolicyLike
from trimtab.control.reasons import REASONS
from trimtab.control.reference import ReferenceController
from trimtab.control.schedules import TwoStage

__all__ = [
    "POLICIES",
    "PRESETS",
    "REASONS",
    "AdaptStyle",
    "Controller",
    "ControllerLike",
    "DampingOnly",
    "Decision",
    "FixedSet",
    "GsnrStyle",
    "JacobianProxy",
    "LoadReport",
    "MatchedRandom",
    "Oracle",
    "Policy",
    "PolicyLike",
    "RandomController",
    "ReferenceController",
    "StaticHigh",
    "StaticLow",
    "TwoStage",
    "paper",
    "policy_from_dict",
    "preset",
    "robust",
]
