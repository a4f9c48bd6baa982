"""torchao's int8 weights under adapters keep the contract of a recipe."""

import pytest

from trimtab.precision.torchao_int8 import TorchaoInt8Base
from trimtab.testing import RecipeContract

pytest.importorskip("torchao")


class TestTorchaoInt8Base(RecipeContract):
    needs_adapters = True
    documented_changes = frozenset({"output", "input_gradient"})
    compiles_in_one_graph = False
    why_not_one_graph = "it compiles as BitsandbytesLinear does, and compiling takes seconds"

    def recipe(self):
        return TorchaoInt8Base()
