"""Claims about ``torch.compile``: one graph, whatever is switched, and the results of eager mode."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trimtab.testing.recipe_hooks import RecipeHooks, assert_same, skip

__all__ = ["CompileClaims", "compiled"]

NUM_ASSIGNMENTS = 20


class CompileClaims(RecipeHooks):
    """A compiled model."""

    def test_switching_units_never_recompiles_and_gives_the_gradients_of_eager_mode(self) -> None:
        """One graph over 20 random assignments, with the backend that only traces."""
        if not self.compiles_in_one_graph:
            assert self.why_not_one_graph, "compiles_in_one_graph = False needs a reason, why_not_one_graph"
            skip(self.why_not_one_graph)
        generator = random.Random(0)
        with self.pair() as pair, compiled(pair.model) as (model, counter):
            for step in range(1, NUM_ASSIGNMENTS + 1):
                active = [generator.random() < 0.5 for _ in pair.conversion.units]
                batches = [self.batch(pair.model, seed=step), self.batch(pair.model, seed=-step)]
                results = []
                for one in (model, pair.model):
                    pair.conversion.begin_step(step)
                    # As a guard does it: the route is due, and the forward asks for it.
                    pair.conversion.pull = lambda active=active: pair.conversion.route(active)
                    found = self.gradients(one, *batches)
                    results.append({name.removeprefix("_orig_mod."): g for name, g in found.items()})
                assert_same(results[1], results[0], f"compiled, assignment {step}")
            assert counter.frame_count == 1, f"the model was compiled in {counter.frame_count} graphs"


@contextmanager
def compiled(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """``model``, compiled by the backend that only traces, and a counter of graphs; no recompilation is allowed.

    Raises: AssertionError: when the block would have the model compiled again.
    """
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    try:
        with warnings.catch_warnings(), torch._dynamo.config.patch(error_on_recompile=True):
            # By the compiler itself, which looks at autograd functions in a way that they warn about.
            warnings.filterwarnings("ignore", ".*autograd.function.Function.*instantiated")
            yield torch.compile(model, backend=counter, fullgraph=True), counter  # type: ignore[misc]
    except torch._dynamo.exc.RecompileError as error:
        raise AssertionError(f"switching units compiles the model anew: {error}") from error
    finally:
        torch._dynamo.reset()
