"""bitsandbytes under adapters keeps the contract of a recipe."""

import pytest

from trimtab.precision.bitsandbytes_linear import BitsandbytesLinear
from trimtab.testing import OperandRounding, RecipeContract

pytest.importorskip("bitsandbytes")

# A code is a whole number to 127, and is off by half of one. bitsandbytes casts both operands and the product to
# float16 besides, which rounds by 2**-11 each time.
INT8 = OperandRounding(rtol=0.5 / 127 + 3 * 2**-11, floor=1.0)
# NF4 has its widest gap between -1 and -0.6962: half of it is 0.1519 of a block's largest magnitude. That is in 8 bits
# in its turn, on a grid whose widest gap is (1 - 0.1) / 64, half of which is 0.0071 of the largest one.
NF4 = OperandRounding(rtol=0.1519 + 0.0071, floor=1.0, over="tensor")


class TestBitsandbytesLinear(RecipeContract):
    needs_adapters = True
    documented_changes = frozenset({"output", "input_gradient"})

    @pytest.fixture(autouse=True, params=[8, 4])
    def settings(self, request):
        self.bits = request.param
        self.low_rounding = {"input": INT8, "weight": INT8} if self.bits == 8 else {"weight": NF4}
        # On a CPU bitsandbytes has sizes that its 4-bit kernels do not take compiled, which takes longer than all else.
        self.odd_features = self.bits == 8
        self.observes_quantizers = self.bits == 8
        self.compiles_in_one_graph = self.bits == 8
        self.why_not_one_graph = "4 bits compile as 8 bits do, and compiling takes seconds"

    def recipe(self):
        return BitsandbytesLinear(self.bits)
