"""Contract suites: what every recipe, monitor and policy must keep, for those who write one outside of trimtab too."""

from trimtab.testing.models import AdaptedLinear, TinyModel, adapted_tiny_model, tiny_model
from trimtab.testing.monitor_contract import MonitorContract
from trimtab.testing.operand_rounding import OperandRounding
from trimtab.testing.policy_contract import PolicyContract
from trimtab.testing.recipe_contract import RecipeContract

__all__ = [
    "AdaptedLinear",
    "MonitorContract",
    "OperandRounding",
    "PolicyContract",
    "RecipeContract",
    "TinyModel",
    "adapted_tiny_model",
    "tiny_model",
]
