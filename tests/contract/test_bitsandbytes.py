"""bitsandbytes under adapters keeps the contract of a recipe."""

import pytest

from trimtab.precision.bitsandbytes_linear import BitsandbytesLinear
from trimtab.testing import RecipeContract

pytest.importorskip("bitsandbytes")


class TestBitsandbytesLinear(RecipeContract):
    needs_adapters = True
    documented_changes = frozenset({"output", "input_gradient"})

    @pytest.fixture(autouse=True, params=[8, 4])
    def settings(self, request):
        self.bits = request.param
        # On a CPU bitsandbytes has sizes that its 4-bit kernels do not take compiled, which takes longer than all else.
        self.odd_features = self.bits == 8
        self.observes_quantizers = self.bits == 8
        self.compiles_in_one_graph = self.bits == 8
        self.why_not_one_graph = "4 bits compile as 8 bits do, and compiling takes seconds"

    def recipe(self):
        return BitsandbytesLinear(self.bits)
