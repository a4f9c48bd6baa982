"""The low-cost and the recovery path of a unit, and how units are found."""

from trimtab.precision.attention_backward import AttentionBackward
from trimtab.precision.bitsandbytes_linear import BitsandbytesLinear
from trimtab.precision.grouping import Grouping
from trimtab.precision.int8_base import Int8Base
from trimtab.precision.operators import operators_of
from trimtab.precision.quantized_gemm import QuantizedGemm, QuantizedGemmConversion
from trimtab.precision.recipe import QUANTIZER_STATS, Conversion, PathCost, QuantizerObserver, Recipe
from trimtab.precision.saved_activations import SavedActivations, SavedActivationsConversion
from trimtab.precision.saved_bytes import SavedBytes, measure_saved_bytes, plain_saved_bytes
from trimtab.precision.torchao_float8 import TorchaoFloat8
from trimtab.precision.torchao_int8 import TorchaoInt8Base
from trimtab.precision.torchao_mxfp8 import TorchaoMXFP8
from trimtab.precision.transformer_engine import TransformerEngineFP8
from trimtab.precision.units import Selection, Unit, clean_fqn, find_units, is_projection

__all__ = [
    "QUANTIZER_STATS",
    "AttentionBackward",
    "BitsandbytesLinear",
    "Conversion",
    "Grouping",
    "Int8Base",
    "PathCost",
    "QuantizedGemm",
    "QuantizedGemmConversion",
    "QuantizerObserver",
    "Recipe",
    "SavedActivations",
    "SavedActivationsConversion",
    "SavedBytes",
    "Selection",
    "TorchaoFloat8",
    "TorchaoInt8Base",
    "TorchaoMXFP8",
    "TransformerEngineFP8",
    "Unit",
    "clean_fqn",
    "find_units",
    "is_projection",
    "measure_saved_bytes",
    "operators_of",
    "plain_saved_bytes",
]
