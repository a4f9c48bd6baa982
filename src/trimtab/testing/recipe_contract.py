"""What every recipe has to keep."""

from __future__ import annotations

from trimtab.testing.bad_input_claims import BadInputClaims
from trimtab.testing.compile_claims import CompileClaims
from trimtab.testing.conversion_claims import ConversionClaims
from trimtab.testing.cost_claims import CostClaims
from trimtab.testing.operand_claims import OperandClaims
from trimtab.testing.path_claims import PathClaims
from trimtab.testing.quantizer_claims import QuantizerClaims
from trimtab.testing.resume_claims import ResumeClaims
from trimtab.testing.step_claims import StepClaims

__all__ = ["RecipeContract"]


class RecipeContract(
    PathClaims,
    OperandClaims,
    ConversionClaims,
    CostClaims,
    StepClaims,
    BadInputClaims,
    ResumeClaims,
    QuantizerClaims,
    CompileClaims,
):
    """The claims that a recipe of ``trimtab.precision`` must meet, as tests that a subclass inherits.

    Subclass it in a test file under a name that the test runner collects, and give ``recipe``; what else can be given,
    see ``trimtab.testing.recipe_hooks.RecipeHooks``. Everything runs on the CPU in a few seconds, on a model of two
    blocks, and needs no test runner: a claim is a method, and a claim that does not apply raises ``unittest.SkipTest``.

    Example:
        >>> from trimtab.precision import SavedActivations
        >>> class TestMyRecipe(RecipeContract):
        ...     documented_changes = frozenset({"weight_gradient"})
        ...
        ...     def recipe(self):
        ...         return SavedActivations(4, 16)
        >>> TestMyRecipe().test_two_micro_batches_add_up()
    """
