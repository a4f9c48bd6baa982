"""Keys are seen on their way into attention, and nothing that is computed shows it."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn

from trimtab.errors import TrimtabWarning
from trimtab.monitors.attention_keys import watch_keys
from trimtab.monitors.shift_residual import ShiftResidual
from trimtab.precision.attention_calls import attention_modules, place_around

IDS = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(0))


def llama(attention="sdpa", key_heads=2, **settings):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=50, num_key_value_heads=key_heads, attn_implementation=attention, **(sizes | settings))
    )


def gradients(model, **batch):
    model.zero_grad()
    loss = model(**({"input_ids": IDS, "labels": IDS} | batch)).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture
def watched():
    started = []

    def start(model, **settings):
        monitor = ShiftResidual(**({"residual_floor": 0.0} | settings))
        monitor.start(model)
        started.append(monitor)
        return monitor

    yield start
    for monitor in started:
        monitor.stop()


def table():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_watching_changes_no_bit_of_loss_gradients_and_random_streams(watched, attention):
    model = llama(attention, attention_dropout=0.2).train()
    torch.manual_seed(1)
    plain = gradients(model)
    stream = torch.rand(3)
    monitor = watched(model)
    torch.manual_seed(1)
    assert same(plain, gradients(model))
    assert torch.equal(stream, torch.rand(3))
    assert model.config._attn_implementation == attention
    assert len(monitor.observe(1)["residual"]) == 4


def test_what_is_stopped_leaves_nothing_behind():
    model = llama()
    before = dict(table().__dict__), [set(m.__dict__) for m in model.modules()]
    monitor = ShiftResidual()
    monitor.start(model)
    assert "get_interface" in table().__dict__
    monitor.stop()
    monitor.stop()
    assert (dict(table().__dict__), [set(m.__dict__) for m in model.modules()]) == before
    assert not any(m._forward_pre_hooks for m in model.modules())
    gradients(model)
    assert not monitor.observe(1)


def test_each_of_two_models_is_seen_by_its_own_monitor_alone(watched):
    first, second, third = llama(), llama(num_hidden_layers=1), llama()
    one, other = watched(first), watched(second)
    gradients(first)
    gradients(third)
    assert len(one.observe(1)["residual"]) == 4
    assert not other.observe(1)
    one.stop()
    gradients(second)
    assert len(other.observe(2)["residual"]) == 2


def test_a_copy_of_a_watched_model_is_a_plain_model(watched):
    model = llama()
    monitor = watched(model)
    expected = gradients(copy.deepcopy(model))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        got = gradients(copied)
        assert not monitor.observe(1)
        assert same(got, expected)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_seen_once(watched, reentrant):
    model = llama().train()
    monitor = watched(model)
    plain = gradients(model)
    # The sums and no ratio of them, which would be the same for keys seen twice.
    expected = monitor._watch.take()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert same(plain, gradients(model))
    sums = monitor._watch.take()
    assert list(sums) == list(expected)
    for layer, of_layer in sums.items():
        assert torch.equal(of_layer.vectors, expected[layer].vectors)
        assert torch.equal(of_layer.lengths, expected[layer].lengths)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_compiled_model_is_watched_in_one_graph_that_outlives_the_monitor(watched):
    torch._dynamo.reset()
    model = llama()
    monitor = watched(model)
    plain = gradients(model)
    expected = monitor.observe(1)["residual"]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for step in (2, 3):
        got = gradients(compiled)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(plain, got, strict=True))
        seen = monitor.observe(step)["residual"]
        assert seen.shape == expected.shape
        assert (seen < 1e-6).all()
    monitor.stop()
    gradients(compiled)
    assert not monitor._watch.take()


def test_forwards_without_gradients_are_not_seen(watched):
    model = llama()
    monitor = watched(model)
    with torch.no_grad():
        model(IDS)
    with torch.inference_mode():
        model(IDS)
    model.requires_grad_(False)
    model(IDS)
    assert not monitor.observe(1)


def test_only_the_layers_that_have_a_gradient_have_places(watched):
    model = llama(num_hidden_layers=3)
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    monitor = watched(model)
    model(IDS, labels=IDS).loss.backward()
    assert len(monitor.observe(1)["residual"]) == 4
    assert monitor.places("residual")[0] == "layer_1/head_0"
    model.model.layers[0].requires_grad_(True)
    model(IDS, labels=IDS).loss.backward()
    assert len(monitor.observe(2)["residual"]) == 6
    assert monitor.places("coherence")[0] == "layer_0/head_0"


def test_attention_with_sinks_is_left_out_and_the_warning_says_why(watched):
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    model = GptOssForCausalLM(
        GptOssConfig(
            vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1, attn_implementation="eager",
        )
    )  # fmt: skip
    with pytest.warns(TrimtabWarning, match=r"layers\.0\.self_attn are not watched.*sinks") as caught:
        monitor = watched(model)
    assert len(caught) == 1
    gradients(model)
    assert not monitor.observe(1)


@pytest.mark.parametrize("softcap", [1.0, None])
def test_attention_is_left_out_where_it_has_a_soft_cap(watched, softcap):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    model = Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, attn_logit_softcapping=softcap, attn_implementation="eager",
        )
    )  # fmt: skip
    if softcap is None:
        monitor = watched(model)
        gradients(model)
        assert (monitor.observe(1)["residual"] < 1e-6).all()
    else:
        with pytest.warns(TrimtabWarning, match="soft-cap"):
            monitor = watched(model)
        gradients(model)
        assert not monitor.observe(1)


def test_a_setting_that_is_only_given_in_the_call_leaves_a_layer_out_too(watched):
    model = llama("eager")
    monitor = watched(model)
    with pytest.warns(TrimtabWarning, match="sinks"):
        model(IDS, s_aux=torch.zeros(4)).logits.sum().backward()
    assert not monitor.observe(1)


class HandWritten(nn.Module):
    def __init__(self, num_layers=2, named=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 48) for _ in range(num_layers))
        self.named = named
        self.wrap = lambda layer, x, i: self.attend(layer, x, i)

    def attend(self, layer, x, i):
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in layer(x).chunk(3, -1))
        k = watch_keys(k, i if self.named else None)
        return x + ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = self.wrap(layer, x, i)
        return x


def test_hand_written_attention_is_counted_by_calls_or_named(watched):
    x = torch.randn(2, 5, 16)
    for named in (False, True):
        model = HandWritten(named=named)
        monitor = watched(model)
        for step in (1, 2):
            for _ in range(2):  # micro-batches
                model(x).square().sum().backward()
            assert (monitor.observe(step)["residual"] < 1e-5).all()
        assert monitor.places("residual")[::4] == ("layer_0/head_0", "layer_1/head_0")
        monitor.stop()


@pytest.mark.parametrize(("named", "reentrant"), [(False, False), (True, False), (True, True)])
def test_hand_written_attention_is_seen_once_under_checkpointing(watched, named, reentrant):
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(2, 5, 16, requires_grad=True)
    model = HandWritten(named=named)
    monitor = watched(model)
    model(x).square().sum().backward()
    monitor.observe(1)
    plain = monitor.tensor_state()
    monitor.load_state_dict({"num_steps": {}})
    model.wrap = lambda *args: checkpoint(model.attend, *args, use_reentrant=reentrant)
    model(x).square().sum().backward()
    monitor.observe(1)
    again = monitor.tensor_state()
    assert plain.keys() == again.keys()
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_keys_are_handed_back_as_they_are():
    k = torch.ones(1, 1, 2, 2, requires_grad=True)
    assert watch_keys(k) is k
    assert watch_keys(k, "mine") is k
    assert not k._backward_hooks


def test_placements_end_in_any_order_and_one_that_computes_is_innermost():
    model = llama(num_hidden_layers=1)
    [attention] = attention_modules(model).values()
    calls = []

    def wrapper(name):
        def call(attention, *args, **kwargs):
            calls.append(name)
            return attention(*args, **kwargs)

        return call

    ends = [
        place_around(attention, wrapper("first")),
        place_around(attention, wrapper("computes"), innermost=True),
        place_around(attention, wrapper("last")),
    ]
    model(IDS)
    assert calls == ["last", "first", "computes"]
    ends[2]()
    ends[1]()
    ends[1]()
    calls.clear()
    model(IDS)
    assert calls == ["first"]
    ends[0]()
    gc.collect()  # what other tests have let go of
    assert "get_interface" not in table().__dict__


def test_a_model_that_is_let_go_of_takes_its_placements_with_it():
    model = llama(num_hidden_layers=1)
    [attention] = attention_modules(model).values()
    place_around(attention, lambda attention, *args, **kwargs: attention(*args, **kwargs))
    assert "get_interface" in table().__dict__
    del model, attention
    gc.collect()
    assert "get_interface" not in table().__dict__
