"""Contract suites: what every recipe must keep, for those who write one outside of trimtab too."""

from trimtab.testing.models import AdaptedLinear, TinyModel, adapted_tiny_model, tiny_model
from trimtab.testing.recipe_contract import RecipeContract

__all__ = ["AdaptedLinear", "RecipeContract", "TinyModel", "adapted_tiny_model", "tiny_model"]
