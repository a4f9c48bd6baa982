"""What every monitor has to keep."""

from __future__ import annotations

import copy
import io
import json
import pickle
import random
import unittest
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from trimtab.monitors.protocol import Monitor, MonitorContext
from trimtab.testing.models import VOCABULARY, tiny_model
from trimtab.testing.snapshots import changes_since, snapshot_of

__all__ = ["MonitorContract"]

Values = dict[str, Tensor]
"""What a monitor returned at a step, each value flat."""

_WAITING = frozenset({"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "item", "tolist", "cpu", "numpy"})
"""Operators and methods whose result is on the host, or whose shape is: an accelerator would be waited for."""


class MonitorContract:
    """The claims that a monitor must meet, as tests that a subclass inherits.

    Subclass it in a test file under a name that the test runner collects, and give ``monitor``; the other hooks have
    defaults. Everything runs on the CPU, and needs no test runner: a claim is a method, and a claim that does not apply
    raises ``unittest.SkipTest``.

    Attributes:
        num_steps: Steps of a run; enough for the monitor to return each of its metrics.
        needs_longer: Metrics that have no number within as many: those with a long warm-up.
        observe_waits: Whether ``observe`` may wait for the device.
        rtol: How far values may be off where they come from the same numbers added in another order, relative to the
            largest one of their metric.

    Example:
        >>> from trimtab.monitors.residual_stream import ResidualNorm
        >>> class TestMyMonitor(MonitorContract):
        ...     def monitor(self):
        ...         return ResidualNorm()
        >>> TestMyMonitor().test_places_name_the_entries_of_each_value()
    """

    num_steps: int = 4
    needs_longer: frozenset[str] = frozenset()
    observe_waits: bool = False
    rtol: float = 1e-4

    def monitor(self) -> Monitor:
        """The monitor; called often, so that each test has its own."""
        raise NotImplementedError("A contract needs to know its monitor: def monitor(self): return MyMonitor()")

    def model(self) -> nn.Module:
        """A model that it can watch, in training mode; the same weights at each call."""
        return tiny_model()

    def batch(self, model: nn.Module, seed: int = 0) -> Tensor:
        """An input of ``model``; the first dimension counts sequences."""
        return torch.randint(0, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(seed))

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """The loss of a forward, of any number of sequences."""
        output: Tensor = model(batch)
        return output.float().square().sum()

    def checkpoint_blocks(self, model: nn.Module, use_reentrant: bool) -> None:
        """Have ``model`` forget its activations and compute them again in backward."""
        model.run_block = lambda block, x: checkpoint(block, x, use_reentrant=use_reentrant)  # type: ignore[assignment]

    # What a run is

    def started(self, model: nn.Module) -> Monitor:
        """A monitor that watches ``model``, as a guard starts one."""
        monitor = self.monitor()
        if bind := getattr(monitor, "bind", None):
            bind(MonitorContext(optimizers=list, say_once=lambda text: None))
        monitor.start(model)
        return monitor

    def step(self, model: nn.Module, monitor: Monitor | None, step: int, seeds: Iterable[int]) -> Values:
        """An optimizer step over a micro-batch a seed; what the monitor returned."""
        model.zero_grad()
        for seed in seeds:
            self.loss(model, self.batch(model, seed)).backward()
        values = {} if monitor is None else _flat(monitor.observe(step))
        parameters = [p for p in model.parameters() if p.grad is not None]
        if parameters:
            # Of a length that is small beside the weights, whatever the loss.
            torch.nn.utils.clip_grad_norm_(parameters, 1e-2)
            SGD(parameters, lr=1.0).step()
        return values

    def run(
        self, model: nn.Module, monitor: Monitor | None, steps: Sequence[int], num_micro_batches: int = 1
    ) -> list[Values]:
        """What a monitor returned at each of some steps, each over micro-batches of its own."""
        return [self.step(model, monitor, s, range(10 * s, 10 * s + num_micro_batches)) for s in steps]

    @property
    def steps(self) -> range:
        """The steps of a run."""
        return range(1, self.num_steps + 1)

    # Claims

    def test_it_is_a_monitor_with_a_name_for_metrics(self) -> None:
        """It has the methods of the protocol, and a name that can stand between two slashes."""
        monitor = self.monitor()
        assert isinstance(monitor, Monitor), "it lacks a method of trimtab.monitors.Monitor"
        name = monitor.name
        assert isinstance(name, str), f"its name is {name!r}"
        assert name.strip(), "its name is empty"
        assert "/" not in name, f"its name is {name!r}, and metric names are parted at slashes"

    def test_watching_changes_no_bit_of_a_run(self) -> None:
        """Losses, gradients, weights and random streams are those of an unwatched run."""
        plain, watched = self.model(), self.model()
        start = _random_states()
        seen: list[dict[str, Any]] = []
        for model in (plain, watched):
            _set_random_states(start)
            monitor = self.started(model) if model is watched else None
            found: dict[str, Any] = {}
            for s in self.steps:
                self.run(model, monitor, [s], num_micro_batches=2)
                found[f"loss after step {s}"] = self.loss(model, self.batch(model)).detach()
                found |= {f"gradient of {n}, step {s}": p.grad for n, p in model.named_parameters()}
            if monitor is not None:
                monitor.state_dict()
                monitor.stop()
            found |= {f"{name} after training": value for name, value in model.state_dict().items()}
            seen.append(found | {f"random numbers of {name}": state for name, state in _random_states().items()})
        _set_random_states(start)
        expected, got = seen
        assert expected.keys() == got.keys(), f"in one run only: {sorted(expected.keys() ^ got.keys())}"
        differ = [name for name in expected if not _same(expected[name], got[name])]
        assert not differ, f"watching changes {len(differ)} of {len(expected)} results, first: {differ[0]}"

    def test_the_model_is_given_back_as_it_was_found(self) -> None:
        """No hook, attribute, class or parameter is left; also where it is stopped twice, or was never started."""
        model = self.model()
        before = snapshot_of(model)
        monitor = self.started(model)
        self.loss(model, self.batch(model)).backward()
        model.zero_grad()
        monitor.observe(1)
        monitor.stop()
        changes = changes_since(before, model)
        assert not changes, f"after stop: {changes[:3]}"
        monitor.stop()
        self.monitor().stop()

    def test_a_copy_of_a_watched_model_is_a_plain_model(self) -> None:
        """Deep copies and unpickled ones run, and what they do is not seen."""
        copies: dict[str, Callable[[nn.Module], nn.Module]] = {
            "deep copy": copy.deepcopy,
            "pickled copy": lambda model: pickle.loads(pickle.dumps(model)),
        }
        alone = self.model()
        expected = self.run(alone, self.started(alone), self.steps)
        for kind, copied in copies.items():
            model = self.model()
            monitor = self.started(model)
            got = []
            for s in self.steps:
                twin = copied(model)
                model.zero_grad()
                self.loss(model, self.batch(model, 10 * s)).backward()
                self.loss(twin, self.batch(twin, 10 * s + 5)).backward()
                values = _flat(monitor.observe(s))
                got.append(values)
                parameters = [p for p in model.parameters() if p.grad is not None]
                torch.nn.utils.clip_grad_norm_(parameters, 1e-2)
                SGD(parameters, lr=1.0).step()
            _assert_same_values(expected, got, f"with a {kind} that trains beside the model")

    def test_places_name_the_entries_of_each_value(self) -> None:
        """One name an entry, no two the same; none at all where there is one entry, the model."""
        model = self.model()
        monitor = self.started(model)
        for values in self.run(model, monitor, self.steps):
            for metric, value in values.items():
                places = list(getattr(monitor, "places", lambda metric: ())(metric))
                if not places and value.numel() == 1:
                    continue
                assert len(places) == value.numel(), f"{metric}: {value.numel()} values and {len(places)} places"
                assert len(set(places)) == len(places), f"{metric}: two places have the same name"

    def test_each_alarm_rule_has_its_metric(self) -> None:
        """A rule on a metric that is never returned would watch nothing."""
        model = self.model()
        monitor = self.started(model)
        returned = {metric for values in self.run(model, monitor, self.steps) for metric in values}
        rules = dict(getattr(monitor, "alarm_rules", {}))
        assert rules.keys() <= returned, f"rules on what is not returned: {sorted(rules.keys() - returned)}"

    def test_a_healthy_run_has_values_and_none_is_infinite(self) -> None:
        """Each metric is finite somewhere."""
        model = self.model()
        runs = self.run(model, self.started(model), self.steps)
        finite: set[str] = set()
        for values in runs:
            for metric, value in values.items():
                assert not value.isinf().any(), f"{metric} is infinite"
                if value.isfinite().any():
                    finite.add(metric)
        missing = {metric for values in runs for metric in values} - finite - self.needs_longer
        assert finite, "no metric has a value"
        assert not missing, f"never a number: {sorted(missing)}"

    def test_a_broken_model_is_no_exception(self) -> None:
        """Weights that are NaN or zero, layers that are frozen, a step without a forward, and one without a token."""

        def fill(model: nn.Module, value: float) -> None:
            for parameter in model.parameters():
                parameter.data.fill_(value)

        def freeze(model: nn.Module) -> None:
            for parameter in list(model.parameters())[:-1]:
                parameter.requires_grad_(False)

        cases: dict[str, Callable[[nn.Module], None]] = {
            "weights of NaN": lambda model: fill(model, torch.nan),
            "weights of zero": lambda model: fill(model, 0.0),
            "frozen layers": freeze,
        }
        for what, breaks in cases.items():
            model = self.model()
            monitor = self.started(model)
            self.run(model, monitor, self.steps[:1])
            breaks(model)
            try:
                self.run(model, monitor, self.steps[1:])
            except Exception as error:
                raise AssertionError(f"{what}: {error!r}") from error
        model = self.model()
        monitor = self.started(model)
        for s in self.steps:
            try:
                self.step(model, monitor, s, [])
            except Exception as error:
                raise AssertionError(f"a step without a forward: {error!r}") from error

    def test_a_batch_without_a_token_is_no_exception(self) -> None:
        """And beside another batch it changes nothing."""
        plain, model = self.model(), self.model()
        try:
            self.loss(plain, self.batch(plain)[:0]).backward()
        except Exception as error:
            raise unittest.SkipTest(f"the model itself takes no such batch: {error!r}") from None
        plain.zero_grad()
        expected = self.run(plain, self.started(plain), self.steps)
        monitor = self.started(model)
        got = []
        for s in self.steps:
            self.loss(model, self.batch(model)[:0]).backward()
            got += self.run(model, monitor, [s])
        _assert_same_values(expected, got, "with a batch without a token before each step")

    def test_a_resumed_run_has_the_values_of_an_uninterrupted_one(self) -> None:
        """Through JSON and a file of tensors, at every step of a run."""
        whole = self.model()
        expected = self.run(whole, self.started(whole), self.steps)
        for cut in range(1, self.num_steps):
            model = self.model()
            monitor = self.started(model)
            got = self.run(model, monitor, self.steps[:cut])
            resumed = copy.deepcopy(model)
            again = self.started(resumed)
            _hand_over(monitor, again)
            got += self.run(resumed, again, self.steps[cut:])
            _assert_same_values(expected, got, f"resumed after step {cut}")

    def test_a_checkpoint_without_its_tensors_is_resumed_all_the_same(self) -> None:
        """The metrics are the same then; their values may need time."""
        model = self.model()
        monitor = self.started(model)
        self.run(model, monitor, self.steps[:1])
        resumed = copy.deepcopy(model)
        again = self.started(resumed)
        again.load_state_dict(_through_json(monitor.state_dict()))
        self.run(resumed, again, self.steps[1:])

    def test_hooks_do_not_wait_for_the_device(self) -> None:
        """Forward and backward read no tensor on the host, beyond what the model itself does."""
        counts = []
        for is_watched in (False, True):
            model = self.model()
            monitor = self.started(model) if is_watched else None
            count: Counter[str] = Counter()
            for s in self.steps:
                with _CountFunctions(count), _CountOperators(count):
                    self.loss(model, self.batch(model, s)).backward()
                if monitor is not None:
                    monitor.observe(s)
                model.zero_grad()
            counts.append(count)
        more = counts[1] - counts[0]
        assert not more, f"hooks wait for the device: {dict(more)}"

    def test_observing_does_not_wait_for_the_device(self) -> None:
        """``observe`` returns tensors, and reads none."""
        if self.observe_waits:
            raise unittest.SkipTest("the monitor says that it waits")
        model = self.model()
        monitor = self.started(model)
        count: Counter[str] = Counter()
        for s in self.steps:
            self.loss(model, self.batch(model, s)).backward()
            with _CountFunctions(count), _CountOperators(count):
                monitor.observe(s)
        assert not count, f"observe waits for the device: {dict(count)}"

    def test_the_order_of_micro_batches_does_not_matter(self) -> None:
        """So none of them is forgotten over another."""
        runs = []
        for seeds in ((1, 2), (2, 1)):
            model = self.model()
            monitor = self.started(model)
            runs.append([self.step(model, monitor, s, seeds) for s in self.steps[:2]])
        _assert_same_values(runs[0], runs[1], "with micro-batches in another order", rtol=self.rtol)

    def test_evaluation_between_micro_batches_is_not_seen(self) -> None:
        """Neither with gradients nor without."""
        plain, model = self.model(), self.model()
        expected = self.run(plain, self.started(plain), self.steps)
        monitor = self.started(model)
        got = []
        for s in self.steps:
            for context in (torch.no_grad, torch.enable_grad):
                with context():
                    model.eval()
                    self.loss(model, self.batch(model, 1000 + s))
                    model.train()
            got += self.run(model, monitor, [s])
        _assert_same_values(expected, got, "with an evaluation before each step")

    def test_a_recomputed_forward_is_not_counted_again(self) -> None:
        """Under activation checkpointing of both kinds the values are those without."""
        plain = self.model()
        expected = self.run(plain, self.started(plain), self.steps, num_micro_batches=2)
        for use_reentrant in (True, False):
            model = self.model()
            monitor = self.started(model)
            self.checkpoint_blocks(model, use_reentrant)
            got = self.run(model, monitor, self.steps, num_micro_batches=2)
            _assert_same_values(expected, got, f"checkpointing, use_reentrant={use_reentrant}", rtol=self.rtol)


class _CountOperators(TorchDispatchMode):
    """Counts operators that wait."""

    def __init__(self, count: Counter[str]) -> None:
        super().__init__()
        self.count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.rpartition("::")[2]
        if name in _WAITING:
            self.count[name] += 1
        return func(*args, **(kwargs or {}))


class _CountFunctions(TorchFunctionMode):
    """Counts methods that wait, and on the CPU come down to no operator."""

    def __init__(self, count: Counter[str]) -> None:
        super().__init__()
        self.count = count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("tolist", "cpu", "numpy"):
            self.count[name] += 1
        return func(*args, **(kwargs or {}))


def _flat(values: Mapping[str, Tensor | float]) -> Values:
    return {metric: torch.as_tensor(v).detach().to(torch.float64).flatten().clone() for metric, v in values.items()}


def _assert_same_values(expected: list[Values], got: list[Values], where: str, rtol: float = 0.0) -> None:
    """Assert that the values of all steps are equal, NaN where NaN is."""
    for step, (want, have) in enumerate(zip(expected, got, strict=True), start=1):
        assert want.keys() == have.keys(), f"{where}, step {step}: {sorted(want.keys() ^ have.keys())} is in one only"
        for metric, value in want.items():
            finite = value[value.isfinite()].abs()
            atol = rtol * float(finite.max()) if finite.numel() else 0.0
            same = value.shape == have[metric].shape and torch.allclose(
                value, have[metric], rtol=0, atol=atol, equal_nan=True
            )
            assert same, f"{where}, step {step}: {metric} is {have[metric].tolist()} and not {value.tolist()}"


def _through_json(state: Mapping[str, Any]) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(json.dumps(state, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"state_dict is not what JSON holds: {error}") from error
    return found


def _hand_over(monitor: Monitor, again: Monitor) -> None:
    """What a checkpoint does: the plain state, then the tensors."""
    again.load_state_dict(_through_json(monitor.state_dict()))
    tensors: dict[str, Tensor] = getattr(monitor, "tensor_state", dict)()
    if tensors:
        file = io.BytesIO()
        torch.save(tensors, file)
        file.seek(0)
        again.load_tensor_state(torch.load(file, weights_only=True))  # type: ignore[attr-defined]


def _random_states() -> dict[str, Any]:
    numpy_state = np.random.get_state()  # noqa: NPY002 - the global stream is what is watched
    return {"torch": torch.get_rng_state(), "NumPy": numpy_state, "Python": random.getstate()}


def _set_random_states(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["NumPy"])  # noqa: NPY002
    random.setstate(states["Python"])


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    return repr(one) == repr(other)
