"""An INT8 base under adapters keeps the contract of a recipe."""

import pytest

from trimtab.precision.int8_base import Int8Base
from trimtab.testing import OperandRounding, RecipeContract

SETTINGS = [("projection", True), ("layer", False)]

# A code is a whole number to 127, and is off by half of one; the largest of a token, or of a row of the weight, is 127.
INT8 = OperandRounding(rtol=0.5 / 127, floor=1.0)
ROUNDING = {"input": INT8, "weight": INT8}


class TestInt8Base(RecipeContract):
    needs_adapters = True
    documented_changes = frozenset({"output", "input_gradient"})
    low_rounding = ROUNDING

    @pytest.fixture(autouse=True, params=SETTINGS, ids=lambda setting: "-".join(map(str, setting)))
    def settings(self, request):
        self.unit, self.cache_weights = request.param
        self.compiles_in_one_graph = self.unit == "projection"
        self.why_not_one_graph = "other settings compile alike, and compiling takes seconds"

    def recipe(self):
        return Int8Base(unit=self.unit, cache_weights=self.cache_weights)
