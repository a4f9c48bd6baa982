"""The low-cost and the recovery path of a unit, and how units are found."""

from trimtab.precision.grouping import Grouping
from trimtab.precision.operators import operators_of
from trimtab.precision.quantized_gemm import QuantizedGemm, QuantizedGemmConversion
from trimtab.precision.recipe import QUANTIZER_STATS, Conversion, PathCost, QuantizerObserver, Recipe
from trimtab.precision.saved_activations import SavedActivations, SavedActivationsConversion
from trimtab.precision.saved_bytes import SavedBytes, measure_saved_bytes, plain_saved_bytes
from trimtab.precision.units import Selection, Unit, clean_fqn, find_units, is_projection

__all__ = [
    "QUANTIZER_STATS",
    "Conversion",
    "Grouping",
    "PathCost",
    "QuantizedGemm",
    "QuantizedGemmConversion",
    "QuantizerObserver",
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
    "operators_of",
    "plain_saved_bytes",
]
