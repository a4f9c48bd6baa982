"""The low-cost and the recovery path of a unit, and how units are found."""

from trimtab.precision.recipe import Conversion, PathCost, Recipe
from trimtab.precision.saved_activations import SavedActivations, SavedActivationsConversion
from trimtab.precision.saved_bytes import SavedBytes, measure_saved_bytes, plain_saved_bytes
from trimtab.precision.units import Selection, Unit, clean_fqn, find_units, is_projection

__all__ = [
    "Conversion",
    "PathCost",
    "Recipe",
    "SavedActivations",
    "SavedActivationsConversion",
    "SavedBytes",
    "Selection",
    "Unit",
    "clean_fqn",
    "find_units",
    "is_projection",
    "measure_saved_bytes",
    "plain_saved_bytes",
]
