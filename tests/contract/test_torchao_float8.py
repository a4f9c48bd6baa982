"""torchao's float8 training keeps the contract of a recipe."""

import pytest

from trimtab.precision.torchao_float8 import TorchaoFloat8
from trimtab.testing import OperandRounding, RecipeContract

pytest.importorskip("torchao")

# 3 and 2 mantissa bits; normal numbers from 2**-6 and 2**-14. A scale that is rounded to a power of two puts the
# largest entry between half of the largest number, which is 448 and 57344, and that.
E4M3 = OperandRounding(rtol=2**-4, floor=2**-6 / 224, over="tensor")
E5M2 = OperandRounding(rtol=2**-3, floor=2**-14 / 28672, over="tensor")


class TestTorchaoFloat8(RecipeContract):
    @pytest.fixture(autouse=True, params=["tensorwise", "rowwise", "rowwise_with_gw_hp"])
    def settings(self, request):
        self.config = request.param
        changed = ("output", "input_gradient") if "gw_hp" in self.config else RecipeContract.documented_changes
        self.documented_changes = frozenset(changed)
        # Scaled by tensor, gradients are in E5M2.
        gradient = E5M2 if self.config == "tensorwise" else E4M3
        self.low_rounding = {"input": E4M3, "weight": E4M3, "output_gradient": gradient}
        self.compiles_in_one_graph = self.config == "tensorwise"
        self.why_not_one_graph = "other settings compile alike, and compiling takes seconds"

    def recipe(self):
        return TorchaoFloat8(self.config, emulate=True)
