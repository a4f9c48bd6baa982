"""torchao's float8 training keeps the contract of a recipe."""

import pytest

from trimtab.precision.torchao_float8 import TorchaoFloat8
from trimtab.testing import RecipeContract

pytest.importorskip("torchao")


class TestTorchaoFloat8(RecipeContract):
    @pytest.fixture(autouse=True, params=["tensorwise", "rowwise", "rowwise_with_gw_hp"])
    def settings(self, request):
        self.config = request.param
        changed = ("output", "input_gradient") if "gw_hp" in self.config else RecipeContract.documented_changes
        self.documented_changes = frozenset(changed)
        self.compiles_in_one_graph = self.config == "tensorwise"
        self.why_not_one_graph = "other settings compile alike, and compiling takes seconds"

    def recipe(self):
        return TorchaoFloat8(self.config, emulate=True)
