"""Quantized products keep the contract of a recipe, on every grid."""

import pytest

from trimtab.formats import get
from trimtab.precision.quantized_gemm import QuantizedGemm
from trimtab.testing import OperandRounding, RecipeContract

SETTINGS = [
    ("e3m2", "fp8", "projection", "tile"),
    ("e3m2", "bf16", "half", "token"),
    ("e2m3", "fp8", "block", "token"),
    ("e2m1", "bf16", "projection", "tile"),
    ("e2m1", "fp8", "half", "tile"),
]


class TestQuantizedGemm(RecipeContract):
    # E4M3 rounds an entry by at most 2**-4 of itself, E5M2 one of the gradient by 2**-3; a product of both is off by
    # less than (1 + 2**-4) * (1 + 2**-3) - 1 = 0.1954. What flushes is below 2**-10 / 448 of the largest entry.
    high_rtol = 0.2

    @pytest.fixture(autouse=True, params=SETTINGS, ids="-".join)
    def settings(self, request):
        self.low, self.high, self.unit, self.scaling = request.param
        # The largest entry of what shares a scale meets the grid's largest value.
        low = get(self.low)
        rounding = OperandRounding(
            rtol=2.0 ** -(low.mantissa_bits + 1), floor=2.0**low.min_exponent / low.max_value, over="tensor"
        )
        self.low_rounding = {"input": rounding, "weight": rounding, "output_gradient": rounding}
        self.high_is_exact = self.high == "bf16"
        self.compiles_in_one_graph = (self.low, self.unit) == ("e3m2", "projection")
        self.why_not_one_graph = "other settings compile alike, and compiling takes seconds"

    def recipe(self):
        return QuantizedGemm(self.low, self.high, self.unit, scaling=self.scaling)
