"""torchao's MXFP8 training keeps the contract of a recipe."""

import pytest

from trimtab.precision.torchao_mxfp8 import TorchaoMXFP8
from trimtab.testing import OperandRounding, RecipeContract

pytest.importorskip("torchao")

# E4M3 has 3 mantissa bits, and its normal numbers begin at 2**-6. A scale that is a power of two and rounded up puts
# the largest of a block between 224 and 448.
E4M3 = OperandRounding(rtol=2**-4, floor=2**-6 / 224, over="tensor")
ROUNDING = {"input": E4M3, "weight": E4M3, "output_gradient": E4M3}


class TestTorchaoMXFP8(RecipeContract):
    token_multiple = 32
    low_rounding = ROUNDING
    odd_features = False
    compiles_in_one_graph = False
    why_not_one_graph = "it compiles as TorchaoFloat8 does, and compiling takes seconds"

    def recipe(self):
        return TorchaoMXFP8(kernel_preference="emulated")
