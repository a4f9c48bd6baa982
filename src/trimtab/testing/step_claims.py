"""Claims about a training step: when the route is asked for, and what of training must not notice the recipe."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trimtab.testing.layer_runs import run_alone
from trimtab.testing.recipe_hooks import RecipeHooks, assert_same, skip

__all__ = ["StepClaims"]

_SEEDS = (1_932_871_043, 3_107_556_201)
"""Of the streams, where a claim about them begins; numbers that are no step, seed or constant of a recipe."""


class StepClaims(RecipeHooks):
    """Routes, random streams, checkpointing, autocast, accumulation and evaluation."""

    def test_a_due_route_is_pulled_once_before_the_next_forward_computes(self) -> None:
        """The first layer that runs is on the new route already."""
        model = self.model()
        with self.converted(model) as conversion:
            n, batch = len(conversion.units), self.batch(model)
            conversion.route([True] * n)
            expected = self.gradients(model, batch)
            conversion.begin_step(1)
            conversion.route([False] * n)
            pulls: list[bool] = []

            def pull() -> None:
                pulls.append(_in_backward())
                conversion.route([True] * n)

            conversion.pull = pull
            got = self.gradients(model, batch)
            assert pulls == [False], f"a due route was pulled {len(pulls)} times, {sum(pulls)} of them in a backward"
            assert conversion.pull is None, "pull is not None after it was called"
            assert_same(expected, got, "the forward that pulled the route did not run on it")
            self.gradients(model, batch)
            assert len(pulls) == 1, "a route that was pulled was pulled again"

    def test_a_due_route_is_pulled_where_a_layer_is_called_alone(self) -> None:
        """A loop may call parts of a model and never the model."""
        with self.pair() as pair:
            pulls: list[bool] = []
            pair.conversion.pull = lambda: pulls.append(True)
            layer = next(iter(pair.layers.values()))
            run_alone(layer, self.operands_alone(layer))
            assert pulls == [True], f"a layer that ran by itself pulled the due route {len(pulls)} times"

    def test_checkpointing_changes_no_gradient(self) -> None:
        """On each path, with both kinds of recomputation, over two micro-batches."""
        for use_reentrant in (True, False):
            with self.pair() as pair:
                batches = [self.batch(pair.model, seed=seed) for seed in (0, 1)]
                expected = {}
                for where, active in pair.routes().items():
                    pair.conversion.begin_step(1)
                    pair.conversion.route(active)
                    expected[where] = self.gradients(pair.model, *batches)
                self.checkpoint_blocks(pair.model, use_reentrant)
                for where, active in pair.routes().items():
                    pair.conversion.begin_step(1)
                    pair.conversion.route(active)
                    got = self.gradients(pair.model, *batches)
                    assert_same(expected[where], got, f"checkpointing, use_reentrant={use_reentrant}, {where}")

    def test_a_forward_recomputed_in_backward_takes_the_route_of_the_first_one(self) -> None:
        """A route that comes due in between waits for the next forward."""
        for use_reentrant in (True, False):
            model = self.model()
            with self.converted(model) as conversion:
                n, batch = len(conversion.units), self.batch(model)
                conversion.route([True] * n)
                expected = self.gradients(model, batch)
                self.checkpoint_blocks(model, use_reentrant)
                conversion.begin_step(1)
                conversion.route([False] * n)
                pulls: list[bool] = []

                def pull(route: Callable[..., None] = conversion.route, n: int = n, pulls: list = pulls) -> None:
                    pulls.append(_in_backward())
                    route([True] * n)

                where = f"checkpointing, use_reentrant={use_reentrant}"
                conversion.pull = pull
                model.zero_grad()
                loss = self.loss(model, batch)
                assert pulls == [False], f"{where}: the forward pulled the due route {len(pulls)} times"
                conversion.pull = waiting = lambda n=n, route=conversion.route: route([False] * n)
                loss.backward()
                got = {"the loss": loss.detach().reshape(())} | {
                    k: p.grad for k, p in model.named_parameters() if p.grad is not None
                }
                assert conversion.pull is waiting, f"{where}: a route was pulled in a backward"
                assert_same(expected, got, f"{where}, with a route pulled in the forward and one due in the backward")

    def test_two_micro_batches_add_up(self) -> None:
        """The gradient of both is the sum of each one's."""
        with self.pair() as pair:
            model, conversion = pair.model, pair.conversion
            batches = [self.batch(model, seed=seed) for seed in (0, 1)]
            for where, active in pair.routes().items():
                conversion.route(active)
                conversion.begin_step(1)
                one, other = (self.gradients(model, batch) for batch in batches)
                conversion.begin_step(1)
                got = self.gradients(model, *batches)
                assert_same({n: one[n] + other[n] for n in one}, got, f"accumulation, {where}")

    def test_random_streams_are_left_where_the_plain_model_leaves_them(self) -> None:
        """Those of torch, NumPy and Python, through conversion, forward, backward and evaluation on each path.

        Begun at two states that no recipe would set: one that seeds the streams leaves them elsewhere from one of them.
        """
        start = _random_states()
        try:
            for seed in _SEEDS:
                expected = self._random_states_after(self.model(), seed)
                model = self.model()
                _set_random_states(_states_of(seed))
                with self.converted(model) as conversion:
                    _assert_states(_states_of(seed), _random_states(), "the conversion")
                    for path, active in (("low-cost", False), ("recovery", True)):
                        conversion.route([active] * len(conversion.units))
                        got = self._random_states_after(model, seed)
                        for where, states in got.items():
                            _assert_states(expected[where], states, f"{where} on the {path} path")
        finally:
            _set_random_states(start)

    def test_autocast_gives_the_dtypes_that_plain_layers_give(self) -> None:
        """Of outputs and of gradients, in bfloat16 on the CPU."""
        with self.pair() as pair:
            expected = self._dtypes_under_autocast(pair.plain, dict(pair.plain_layers))
            for where, active in pair.routes().items():
                pair.conversion.route(active)
                got = self._dtypes_under_autocast(pair.model, dict(pair.layers))
                differ = [name for name in expected if got.get(name) != expected[name]]
                assert not differ, (
                    f"autocast, {where}: {differ[0]} is {got.get(differ[0])}, and not {expected[differ[0]]}"
                )

    def test_evaluation_runs_the_plain_model(self) -> None:
        """Without gradients nothing is kept for them, so there is nothing to save on.

        Where the low-cost path is also that of evaluation, units on the recovery path run it nevertheless.
        """
        if not self.evaluates_as_plain and not self.high_is_exact:
            skip("the recipe evaluates on both paths, and neither is the plain layer")
        with self.pair() as pair:
            batch = self.batch(pair.plain)
            pair.plain.eval()
            pair.model.eval()
            for where, active in pair.routes().items():
                if not self.evaluates_as_plain and not all(active):
                    continue
                pair.conversion.route(active)
                for context in (torch.no_grad, torch.inference_mode):
                    with context():
                        expected, got = pair.plain(batch), pair.model(batch)
                    assert_same(
                        {"the output": expected.clone()},
                        {"the output": got.clone()},
                        f"eval, {context.__name__}, {where}",
                    )

    def test_a_recipe_that_leaves_forwards_alone_does_so_everywhere(self) -> None:
        """In training and in evaluation, with gradients and without."""
        if self.changes_forward:
            skip("the recipe changes outputs")
        with self.pair() as pair:
            batch = self.batch(pair.plain)
            for where, active in pair.routes().items():
                pair.conversion.route(active)
                for training in (True, False):
                    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
                        with context():
                            expected, got = (m.train(training)(batch) for m in (pair.plain, pair.model))
                        assert_same(
                            {"the output": expected.detach()},
                            {"the output": got.detach()},
                            f"{'training' if training else 'eval'}, {context.__name__}, {where}",
                        )

    def _random_states_after(self, model: nn.Module, seed: int) -> dict[str, dict[str, Any]]:
        """Where the streams are after each part of a run that begins where ``seed`` puts them."""
        _set_random_states(_states_of(seed))
        self.gradients(model, self.batch(model))
        trained = _random_states()
        self.evaluate(model)
        return {"a forward and backward": trained, "an evaluation": _random_states()}

    def _dtypes_under_autocast(self, model: nn.Module, layers: dict[str, nn.Module]) -> dict[str, str]:
        found: dict[str, str] = {}

        def note(name: str) -> Any:
            return lambda module, args, output: found.__setitem__(f"the output of {name}", str(output.dtype))

        hooks = [layer.register_forward_hook(note(name)) for name, layer in layers.items()]
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(self.batch(model))
        found["the output"] = str(output.dtype)
        output.float().square().sum().backward()
        for hook in hooks:
            hook.remove()
        found |= {f"the gradient of {n}": str(p.grad.dtype) for n, p in model.named_parameters() if p.grad is not None}
        return found


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "NumPy": np.random.get_state(),  # noqa: NPY002 - the global stream is what is watched
        "Python": random.getstate(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["torch.cuda"] = torch.cuda.get_rng_state()
    return states


def _states_of(seed: int) -> dict[str, Any]:
    """The states that the streams have right after they are seeded."""
    states = _random_states()
    states["torch"] = torch.Generator().manual_seed(seed).get_state()
    states["NumPy"] = np.random.RandomState(seed).get_state()
    states["Python"] = random.Random(seed).getstate()
    return states


def _set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["NumPy"])  # noqa: NPY002
    random.setstate(states["Python"])
    if "torch.cuda" in states:
        torch.cuda.set_rng_state(states["torch.cuda"])


def _assert_states(expected: dict[str, Any], got: dict[str, Any], what: str) -> None:
    moved = [name for name in expected if not _is_state(expected[name], got[name])]
    assert not moved, (
        f"{what} has drawn from the global random numbers of {', '.join(moved)}, or has set their state. Use a "
        "generator of your own"
    )


def _is_state(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return repr(one) == repr(other)
