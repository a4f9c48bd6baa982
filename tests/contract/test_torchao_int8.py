"""torchao's int8 weights under adapters keep the contract of a recipe."""

import pytest

from trimtab.precision.torchao_int8 import TorchaoInt8Base
from trimtab.testing import OperandRounding, RecipeContract

pytest.importorskip("torchao")

# A code is a whole number, and is off by half of one; the largest of a row of the weight is 127 or 127.5.
ROUNDING = {"weight": OperandRounding(rtol=0.5 / 127, floor=1.0)}


class TestTorchaoInt8Base(RecipeContract):
    needs_adapters = True
    documented_changes = frozenset({"output", "input_gradient"})
    low_rounding = ROUNDING
    compiles_in_one_graph = False
    why_not_one_graph = "it compiles as BitsandbytesLinear does, and compiling takes seconds"

    def recipe(self):
        return TorchaoInt8Base()
