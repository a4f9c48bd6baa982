"""Watching alone changes nothing, and leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks

import trimtab
from trimtab.errors import ConfigError
from trimtab.precision import SavedActivations


class Output(NamedTuple):
    logits: Tensor
    loss: Tensor


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, width)
        self.down_proj = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down_proj(F.gelu(self.q_proj(self.norm(x)))))


class Tiny(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.head = nn.Linear(width, 20)

    def forward(self, ids: Tensor) -> Output:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        return Output(logits=logits, loss=loss)


def build() -> Tiny:
    torch.manual_seed(0)
    return Tiny()


def batches(num: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(20, (2, 8), generator=generator) for _ in range(num)]


OPTIMIZERS = {
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
}


def train(watch: bool, optimizer_name: str, accumulate: int, record=None, num_steps: int = 20) -> dict[str, object]:
    model = build()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    guard = trimtab.attach(model, record=record) if watch else None
    torch.manual_seed(2)
    data = iter(batches(num_steps * accumulate))
    logits, totals = [], []
    for _ in range(num_steps):
        for _ in range(accumulate):
            out = model(next(data))
            (out.loss / accumulate).backward()
            logits.append(out.logits.detach().clone())
        if guard is not None:
            totals.append(guard.step(max_norm=0.5).grad_norm)
        else:
            totals.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    state = {
        "weights": model.state_dict(),
        "optimizer": optimizer.state_dict()["state"],
        "rng": torch.get_rng_state(),
        "logits": logits,
        "totals": totals,
    }
    if guard is not None:
        guard.detach()
    return state


def assert_same(a: object, b: object) -> None:
    if isinstance(a, Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list):
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_20_watched_steps_are_the_unwatched_ones_bit_for_bit(optimizer, accumulate, tmp_path):
    assert_same(train(True, optimizer, accumulate, record=tmp_path), train(False, optimizer, accumulate))


def test_watching_replaces_no_forward_no_class_and_no_key():
    model = build()
    before = [(m, type(m), dict(m.__dict__).keys()) for m in model.modules()]
    keys, names = list(model.state_dict()), [n for n, _ in model.named_parameters()]
    with trimtab.attach(model):
        for module, kind, attributes in before:
            assert type(module) is kind
            assert "forward" not in module.__dict__
            assert module.__dict__.keys() == attributes
            assert module is model or not (module._forward_hooks or module._forward_pre_hooks)
        assert list(model.state_dict()) == keys
        assert [n for n, _ in model.named_parameters()] == names


@pytest.mark.parametrize("recipe", [None, SavedActivations()])
def test_detach_leaves_nothing_behind_and_may_be_called_twice(recipe):
    model = build()
    before = [(m, type(m), dict(m.__dict__)) for m in model.modules()]
    hooks_before = dict(_global_optimizer_post_hooks)
    guard = trimtab.attach(model, recipe)
    model(batches(1)[0]).loss.backward()
    guard.step()
    guard.detach()
    guard.detach()
    for module, kind, attributes in before:
        assert type(module) is kind
        assert module.__dict__.keys() == attributes.keys()
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
            assert not hooks
    assert _global_optimizer_post_hooks == hooks_before
    trimtab.attach(model).detach()


def test_a_detached_guard_refuses_to_step():
    model = build()
    guard = trimtab.attach(model)
    guard.detach()
    with pytest.raises(ConfigError, match="detached"):
        guard.step()


@pytest.mark.parametrize("recipe", [None, SavedActivations()])
@pytest.mark.parametrize("copied", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_of_a_watched_model_is_a_plain_model(recipe, copied):
    model = build()
    with trimtab.attach(model, recipe) as guard:
        ids = batches(1)[0]
        model(ids).loss.backward()
        guard.step()
        if copied == "deepcopy":
            twin = copy.deepcopy(model)
        elif copied == "pickle":
            twin = pickle.loads(pickle.dumps(model))
        else:
            buffer = io.BytesIO()
            torch.save(model, buffer)
            buffer.seek(0)
            twin = torch.load(buffer, weights_only=False)
        assert_same(dict(twin.state_dict()), dict(model.state_dict()))
        assert [type(m) for m in twin.modules()] == [type(m) for m in build().modules()]
        twin.train()
        for _ in range(3):
            twin(ids).loss.backward()
        assert guard._losses == []
        assert not [x for hook in twin._forward_hooks.values() for x in (getattr(hook, "losses", None) or [])]
        # The copy can be watched on its own.
        trimtab.attach(twin).detach()


def test_a_model_that_nobody_uses_any_more_is_freed_although_it_was_never_detached():
    gc.collect()  # what earlier tests left behind must not go meanwhile
    model = build()
    guard = trimtab.attach(model, SavedActivations())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batches(1)[0]).loss.backward()
    guard.step()
    optimizer.step()
    gone = weakref.ref(model)
    hooks_before = len(_global_optimizer_post_hooks)
    del model, guard, optimizer
    gc.collect()
    assert gone() is None
    assert len(_global_optimizer_post_hooks) == hooks_before - 1


def test_a_guard_whose_name_is_dropped_watches_on_for_as_long_as_the_model_lives():
    model = build()
    trimtab.attach(model)
    gc.collect()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(batches(1)[0]).loss.backward()
    for _ in range(19):
        optimizer.step()
    with pytest.warns(trimtab.TrimtabWarning, match="never called"):
        optimizer.step()


class TestAttachedAlready:
    def test_the_same_model(self):
        model = build()
        with trimtab.attach(model), pytest.raises(ConfigError, match=r"attached to it already.*Call detach\(\)"):
            trimtab.attach(model)
        trimtab.attach(model).detach()

    def test_a_part_of_it(self):
        model = build()
        with trimtab.attach(model), pytest.raises(ConfigError, match="attached to it already"):
            trimtab.attach(model.layers)

    def test_a_wrapper_of_it(self):
        model = build()
        with trimtab.attach(model), pytest.raises(ConfigError, match="attached to it already"):
            trimtab.attach(nn.Sequential(model))

    def test_what_a_watched_wrapper_wraps(self):
        model = build()
        with trimtab.attach(nn.Sequential(model)), pytest.raises(ConfigError, match="attached to it already"):
            trimtab.attach(model)

    def test_another_model_is_free(self):
        with trimtab.attach(build()), trimtab.attach(build()):
            pass


class TestBadSettings:
    """Each is refused with its name, and the model is left as it was."""

    @pytest.mark.parametrize(
        "settings",
        [
            {"policy": "robust"},
            {"policy": trimtab.control.robust},
            {"policy": trimtab.control.Policy},
            {"recipe": "saved-activations"},
            {"recipe": SavedActivations},
            {"monitors": [object()]},
            {"units": ["layers.0.q_porj"]},
            {"units": lambda m, n: False},
            {"recipe": SavedActivations(), "units": ["layers.0.norm"]},
        ],
        # No repr, which may hold an address: test processes must agree on the names.
        ids=lambda s: f"{next(iter(s))}-{type(next(iter(s.values()))).__name__}",
    )
    def test_in_four_parts(self, settings, tmp_path):
        model = build()
        before = [(type(m), m.__dict__.keys()) for m in model.modules()]
        hooks = len(_global_optimizer_post_hooks)
        with pytest.raises(ConfigError) as caught:
            trimtab.attach(model, record=tmp_path / "run", **settings)
        assert caught.value.setting in {*settings, "units"}
        assert str(caught.value).startswith(f"{caught.value.setting}=")
        assert caught.value.remedy.endswith(".")
        assert [(type(m), m.__dict__.keys()) for m in model.modules()] == before
        assert not model._forward_hooks
        assert len(_global_optimizer_post_hooks) == hooks
        assert not (tmp_path / "run").exists()
        trimtab.attach(model).detach()

    def test_a_record_that_cannot_be_written_leaves_the_model_as_it_was(self, tmp_path):
        model = build()
        (tmp_path / "file").write_text("no folder")
        before = [(type(m), m.__dict__.keys()) for m in model.modules()]
        with pytest.raises(ConfigError):
            trimtab.attach(model, SavedActivations(), record=tmp_path / "file" / "run")
        assert [(type(m), m.__dict__.keys()) for m in model.modules()] == before
        assert not model._forward_hooks
        assert not model._forward_pre_hooks
        trimtab.attach(model, SavedActivations()).detach()

    @pytest.mark.parametrize("max_norm", [-1.0, float("nan"), float("-inf")])
    def test_max_norm(self, max_norm):
        model = build()
        with trimtab.attach(model) as guard, pytest.raises(ConfigError, match="max_norm"):
            guard.step(max_norm=max_norm)


def test_the_default_policy_is_robust():
    with trimtab.attach(build()) as guard:
        assert guard.policy == trimtab.control.robust()


@pytest.mark.parametrize("attach_first", [True, False])
def test_a_compiled_model_stays_one_graph_and_trains_as_unwatched(attach_first):
    from torch._dynamo.testing import CompileCounter

    def run(watch: bool) -> tuple[list[Tensor], int]:
        torch._dynamo.reset()
        counter = CompileCounter()
        model = build()
        guard = trimtab.attach(model) if watch and attach_first else None
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        if watch and not attach_first:
            guard = trimtab.attach(compiled)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(2)
        for ids in batches(4):
            compiled(ids).loss.backward()
            guard.step(max_norm=0.5) if guard else torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        if guard:
            assert guard.units == tuple(f"layers.{i}.{n}" for i in range(2) for n in ("q_proj", "down_proj"))
            guard.detach()
        return [p.detach().clone() for p in model.parameters()], counter.frame_count

    watched, num_graphs = run(watch=True)
    plain, num_plain_graphs = run(watch=False)
    assert_same(watched, plain)
    assert num_graphs == num_plain_graphs == 1
