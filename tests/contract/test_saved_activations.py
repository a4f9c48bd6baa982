"""Saved activations keep the contract of a recipe, in every width."""

import pytest

from trimtab.precision import SavedActivations
from trimtab.testing import OperandRounding, RecipeContract

SETTINGS = [
    (2, 4, "nearest", "projection"),
    (2, 8, "stochastic", "half"),
    (4, 8, "nearest", "projection"),
    (4, 8, "stochastic", "projection"),
    (8, 16, "stochastic", "block"),
    (16, 16, "nearest", "projection"),
]


class TestSavedActivations(RecipeContract):
    high_rtol_of = "row"

    @pytest.fixture(autouse=True, params=SETTINGS, ids=lambda setting: "-".join(map(str, setting)))
    def settings(self, request):
        self.low_bits, self.high_bits, self.rounding, self.unit = request.param
        self.documented_changes = frozenset({"weight_gradient"} if self.low_bits < 16 else ())
        self.is_stochastic = self.rounding == "stochastic"
        self.observes_quantizers = self.low_bits < 16
        self.high_is_exact = self.high_bits == 16
        # A token's largest entry meets the largest code, so a step is 1 / (2**(bits - 1) - 1) of it; to nearest errs by
        # half a step. The gradient that the copy is multiplied by is not rounded.
        steps = 1.0 if self.is_stochastic else 0.5
        self.high_rtol = steps / (2 ** (self.high_bits - 1) - 1)
        # In 2 bits that is half of a token's largest entry, or all of it: a wrong factor of 2 may not show.
        self.low_rounding = {"input": OperandRounding(rtol=steps / (2 ** (self.low_bits - 1) - 1), floor=1.0)}
        self.compiles_in_one_graph = (self.low_bits, self.high_bits) == (4, 8)
        self.why_not_one_graph = "other widths compile alike, and compiling takes seconds"

    def recipe(self):
        return SavedActivations(self.low_bits, self.high_bits, rounding=self.rounding, unit=self.unit)
