"""torchao's MXFP8 training keeps the contract of a recipe."""

import pytest

from trimtab.precision.torchao_mxfp8 import TorchaoMXFP8
from trimtab.testing import RecipeContract

pytest.importorskip("torchao")


class TestTorchaoMXFP8(RecipeContract):
    token_multiple = 32
    odd_features = False
    compiles_in_one_graph = False
    why_not_one_graph = "it compiles as TorchaoFloat8 does, and compiling takes seconds"

    def recipe(self):
        return TorchaoMXFP8(kernel_preference="emulated")
