"""Other policies than GNMR under the same budget, to compare it with, and every policy by its name.

A policy here says in one file what it goes by. Each scores as GNMR does beside, so that its record reads the same; the
scores choose nothing. None of them makes the first step other than it is: the decision taken from step 1 routes step 2.
They wait for the norms, where a ``Controller`` does not.
"""

from trimtab.control.policies.adapt_style import AdaptStyle
from trimtab.control.policies.damping_only import DampingOnly
from trimtab.control.policies.gsnr_style import GsnrStyle
from trimtab.control.policies.jacobian_proxy import JacobianProxy
from trimtab.control.policies.oracle import Oracle
from trimtab.control.policies.registry import POLICIES, policy, policy_from_dict
from trimtab.control.policies.scored import ChoosingController, Observed, ScoredPolicy
from trimtab.control.policies.static import FixedSet, StaticHigh, StaticLow

__all__ = [
    "POLICIES",
    "AdaptStyle",
    "ChoosingController",
    "DampingOnly",
    "FixedSet",
    "GsnrStyle",
    "JacobianProxy",
    "Observed",
    "Oracle",
    "ScoredPolicy",
    "StaticHigh",
    "StaticLow",
    "policy",
    "policy_from_dict",
]
