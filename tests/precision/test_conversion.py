"""Converting a model in place, undoing it, copying it, and what is refused."""

import copy
import io
import itertools
import pickle
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import trimtab
from trimtab.errors import ConfigError, TrimtabWarning
from trimtab.precision import Conversion, Int8Base, QuantizedGemm, Recipe, SavedActivations, find_units


def snapshot(model):
    """All that a module carries, down to its hooks, by identity where there is one."""
    taken = {}
    for name, module in model.named_modules():
        parts = {
            k: (type(v), tuple((key, id(x)) for key, x in v.items())) if isinstance(v, dict) else v
            for k, v in module.__dict__.items()
        }
        taken[name] = (type(module), parts)
    return taken


def test_keys_parameters_and_their_order_stay(convert, tiny_llama):
    model = tiny_llama(num_layers=2)
    keys = list(model.state_dict())
    parameters = [(n, id(p)) for n, p in model.named_parameters()]
    modules = [(n, id(m)) for n, m in model.named_modules()]
    convert(model)
    assert list(model.state_dict()) == keys
    assert [(n, id(p)) for n, p in model.named_parameters()] == parameters
    assert [(n, id(m)) for n, m in model.named_modules()] == modules
    assert all(isinstance(m, nn.Linear) for n, m in model.named_modules() if n.endswith("_proj"))
    assert repr(model) == repr(tiny_llama(num_layers=2))


@pytest.mark.parametrize("make", ["tiny_llama", "tiny_gpt2", "blocks"])
def test_undo_gives_every_module_back_as_it_was(request, convert, make):
    model = request.getfixturevalue(make)(2)
    before = snapshot(model)
    conversion = convert(model, rounding="stochastic")
    assert snapshot(model) != before
    x = torch.randn(3, 8) if make == "blocks" else torch.randint(0, 50, (2, 5))
    y = model(x)
    (y if make == "blocks" else y.logits).sum().backward()
    conversion.undo()
    assert snapshot(model) == before


def test_detach_gives_every_module_back_as_it_was(blocks, tmp_path):
    model = blocks()
    before = snapshot(model)
    guard = trimtab.attach(model, SavedActivations(), record=tmp_path)
    model(torch.randn(3, 8)).sum().backward()
    guard.step(max_norm=1.0)
    guard.detach()
    model.zero_grad()
    assert snapshot(model) == before


def test_undo_leaves_the_hooks_of_others(convert):
    model = nn.Sequential(nn.Linear(4, 4))
    calls = []
    model[0].register_forward_hook(lambda *a: calls.append("layer"))
    model.register_forward_hook(lambda *a: calls.append("model"))
    conversion = convert(model)
    model(torch.randn(2, 4))
    conversion.undo()
    model(torch.randn(2, 4))
    assert calls == ["layer", "model"] * 2


def test_a_backward_after_undo_still_reads_the_stored_copy(convert):
    model = nn.Sequential(nn.Linear(4, 4))
    conversion = convert(model, 2, 2)
    x = torch.randn(3, 4)
    conversion.begin_step(1)
    model(x).sum().backward()
    expected = model[0].weight.grad.clone()
    model.zero_grad()
    y = model(x)
    conversion.undo()
    y.sum().backward()
    assert torch.equal(model[0].weight.grad, expected)


def copies_of(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "torch.save": torch.load(buffer, weights_only=False),
    }


@pytest.mark.parametrize("make", ["tiny_llama", "tiny_gpt2"])
def test_a_copy_of_a_converted_model_is_a_plain_model_with_its_own_weights(request, convert, gradients, kept, make):
    model = request.getfixturevalue(make)(2)
    plain = copy.deepcopy(model)
    conversion = convert(model, rounding="stochastic")
    batch = {"input_ids": torch.randint(0, 50, (2, 5))}
    batch["labels"] = batch["input_ids"]
    model(**batch).loss.backward()
    model.zero_grad()
    expected = gradients(plain, batch)
    for how, other in copies_of(model).items():
        assert [type(m) for m in other.modules()] == [type(m) for m in plain.modules()], how
        assert not {id(p) for p in other.parameters()} & {id(p) for p in model.parameters()}
        got = gradients(other, batch)
        assert all(torch.equal(expected[n], got[n]) for n in expected), how
        assert kept(lambda other=other: other(**batch).loss) == []
        with torch.no_grad():
            next(other.parameters()).add_(1)
        assert torch.equal(next(model.parameters()), next(plain.parameters()))
    assert kept(lambda: model(**batch).loss) != []
    # A copy can be converted in its turn, and neither knows of the other.
    again = convert(copy.deepcopy(model))
    again.route([True] * len(again.units))
    assert conversion.bits_in_force(0) == 4


def test_a_copy_of_an_attached_model_is_plain_and_can_be_attached(blocks, kept):
    model = blocks()
    with trimtab.attach(model, SavedActivations()) as guard:
        other = copy.deepcopy(model)
        x = torch.randn(3, 8)
        assert kept(lambda: other(x)) == []
        trimtab.attach(other, SavedActivations()).detach()
        assert kept(lambda: model(x)) != []
        assert guard.conversion.bits_in_force(0) == 4


def test_a_layer_pickled_alone_is_readable_as_the_plain_class(convert):
    model = nn.Sequential(nn.Linear(4, 4))
    convert(model)
    data = pickle.dumps(model[0])
    assert b"trimtab" not in data
    assert type(pickle.loads(data)) is nn.Linear


def test_weights_load_into_a_converted_model(convert, blocks, gradients):
    torch.manual_seed(5)
    other = blocks()
    for p in other.parameters():
        nn.init.normal_(p)
    model = blocks()
    convert(model)
    assert str(model.load_state_dict(other.state_dict())) == "<All keys matched successfully>"
    assert torch.equal(model(torch.ones(2, 8)), other(torch.ones(2, 8)))


def test_an_attached_model_is_not_attached_twice(blocks):
    model = blocks()
    with trimtab.attach(model, SavedActivations()), pytest.raises(ConfigError, match="attached to it already"):
        trimtab.attach(model, SavedActivations())
    trimtab.attach(model, SavedActivations()).detach()


def test_a_converted_model_is_not_converted_twice_behind_the_guards_back(convert, blocks):
    model = blocks()
    conversion = convert(model)
    before = snapshot(model)
    with pytest.raises(ConfigError, match="another recipe has converted it already"):
        convert(model)
    assert snapshot(model) == before
    conversion.undo()


class Doubled(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


class Named(nn.Linear):
    """A subclass that leaves the forward as it is."""


def replaced():
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: x
    return layer


def frozen():
    layer = nn.Linear(4, 4)
    layer.weight.requires_grad_(False)
    return layer


def doubled_conv1d():
    from transformers.pytorch_utils import Conv1D

    class DoubledConv1D(Conv1D):
        def forward(self, x):
            return super().forward(x) * 2

    return DoubledConv1D(4, 4)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Doubled(4, 4), "its class Doubled computes its forward in its own way"),
        (doubled_conv1d, "its class DoubledConv1D computes its forward in its own way"),
        (replaced, "something else has already replaced its forward"),
        (lambda: nn.LayerNorm(4), "it is a LayerNorm"),
        (lambda: nn.MultiheadAttention(4, 1).out_proj, "nn.MultiheadAttention reads its weight without calling it"),
        (lambda: spectral_norm(nn.Linear(4, 4)), "its weight is parametrized"),
        (lambda: weight_norm(nn.Linear(4, 4)), "its weight is parametrized"),
        (frozen, "its weight is frozen, so it keeps no input for a gradient"),
    ],
    ids=[
        "subclass",
        "subclass of Conv1D",
        "replaced forward",
        "no linear layer",
        "MultiheadAttention",
        "spectral norm",
        "weight norm",
        "frozen",
    ],
)
def test_what_cannot_be_converted_is_refused_with_its_reason(convert, make, reason):
    model = nn.Sequential(make())
    before = snapshot(model)
    with pytest.raises(ConfigError, match=f"0: {reason}") as caught:
        convert(model)
    assert caught.value.setting == "units"
    assert snapshot(model) == before


def test_a_lazy_layer_is_refused_before_its_shape_is_known():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(ConfigError, match="no shape"):
        SavedActivations().convert(model, find_units(model))


@pytest.mark.filterwarnings("ignore:.* as it is:trimtab.TrimtabWarning")
def test_those_units_that_can_be_converted_are(convert):
    model = nn.Sequential(nn.Linear(4, 4), Doubled(4, 4), Named(4, 4), nn.LayerNorm(4))
    conversion = convert(model, units=["0", "1", "2", "3"])
    assert [u.name for u in conversion.units] == ["0", "2"]
    model(torch.randn(2, 4)).sum().backward()
    conversion.undo()
    assert [type(m) for m in model] == [nn.Linear, Doubled, Named, nn.LayerNorm]


@pytest.mark.filterwarnings("ignore:.* as it is:trimtab.TrimtabWarning")
def test_multihead_attention_gives_the_plain_gradients_in_a_converted_model(pair, gradients):
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.linear = nn.MultiheadAttention(8, 2), nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(self.attention(x, x, x, need_weights=False)[0])

    plain, converted, conversion = pair(Attending())
    assert [u.name for u in conversion.units] == ["linear"]
    expected, got = (gradients(m, torch.ones(3, 2, 8)) for m in (plain, converted))
    assert {n for n in expected if not torch.equal(expected[n], got[n])} <= {"linear.weight"}


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_filter_that_catches_the_output_head_is_warned_about_once(tiny_llama, wrapped):
    model = tiny_llama(num_layers=1)
    if wrapped:
        model = nn.Sequential(model)
    with pytest.warns(TrimtabWarning, match="output head") as caught:
        guard = trimtab.attach(model, SavedActivations(), units=lambda module, fqn: isinstance(module, nn.Linear))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    guard.detach()


class Plain(nn.Module):
    """A language model that says neither which its head is nor which its embeddings are."""

    def __init__(self, tied=False):
        super().__init__()
        self.tok_embeddings, self.pos_embeddings = nn.Embedding(24, 8), nn.Embedding(16, 8)
        self.layers = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(8, 24), "down": nn.Linear(24, 8)})])
        self.adapter, self.output = nn.Linear(8, 8), nn.Linear(8, 24, bias=False)
        if tied:
            self.output.weight = self.tok_embeddings.weight


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("selection", [lambda m, n: isinstance(m, nn.Linear), ["output", "layers.0.up"]])
def test_a_head_is_warned_about_in_a_model_that_does_not_say_which_it_is(selection, tied):
    with pytest.warns(TrimtabWarning, match=r"picks the output head \(output\)") as caught:
        guard = trimtab.attach(Plain(tied), SavedActivations(), units=selection)
    assert len(caught) == 1
    guard.detach()


def test_embeddings_are_warned_about_in_a_model_that_does_not_say_which_they_are():
    names = ["tok_embeddings", "pos_embeddings", "layers.0.up"]
    with pytest.warns(TrimtabWarning, match=r"embeddings \(tok_embeddings\).*embeddings \(pos_embeddings\)") as caught:
        guard = trimtab.attach(Plain(), SavedActivations(), units=names)
    assert len(caught) == 1
    guard.detach()


def test_a_container_of_the_embeddings_is_warned_about(tiny_llama):
    with pytest.warns(TrimtabWarning, match=r"picks the input embeddings \(model\)"):
        guard = trimtab.attach(tiny_llama(num_layers=1), SavedActivations(), units=["model"])
    guard.detach()


def test_a_filter_that_catches_parts_of_an_adapted_head_or_of_adapted_embeddings_is_warned_about():
    class Adapter(nn.Module):
        """As peft has it: the layer that is adapted is its ``base_layer``."""

        def __init__(self, base):
            super().__init__()
            self.base_layer, self.lora_A = base, nn.Linear(8, 2, bias=False)

    model = Plain()
    model.output = Adapter(model.output)
    model.get_output_embeddings = lambda: model.output
    with pytest.warns(TrimtabWarning, match=r"picks the output head \(output\.base_layer\)"):
        guard = trimtab.attach(model, SavedActivations(), units=lambda m, n: n == "output.base_layer")
    guard.detach()


class Flat(nn.Module):
    """A model without blocks: an embedding, and linear layers of these sizes."""

    def __init__(self, rows, *sizes):
        super().__init__()
        self.emb = nn.Embedding(rows, sizes[0])
        for i, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
            setattr(self, f"l{i}", nn.Linear(inputs, outputs))


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (Flat(64, 32, 64, 64, 3), ["l0", "l1", "l2"]),  # a hidden layer as wide as the embedding is long is no head
        (Flat(50, 8, 16, 50), ["l0"]),
        (Flat(50, 8, 50), ["l0"]),  # all there is
    ],
    ids=["classifier", "language-model", "head-alone"],
)
def test_what_looks_like_a_head_is_left_out_by_default_only_where_it_comes_last(model, names):
    assert [unit.name for unit in find_units(model)] == names


def test_a_weight_that_is_flattened_or_cut_is_refused_with_the_remedy():
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].weight = nn.Parameter(torch.ones(64))
    with pytest.raises(ConfigError, match=r"sharded or flattened, of shape \(64,\): attach before"):
        trimtab.attach(model, QuantizedGemm(), units=["0"])


def test_layers_in_blocks_and_beside_them_are_no_head():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trimtab.attach(Plain(), SavedActivations(), units=["layers.0.up", "layers.0.down", "adapter"]).detach()


class Quantized(nn.Parameter):
    """Stands for the weights of quantization libraries."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Noted(nn.Parameter):
    """A parameter with a note on it, as some frameworks have theirs."""


def weights(kind):
    plain = torch.ones(32, 32)
    return {
        "own product": lambda: Quantized(plain, requires_grad=False),
        "complex": lambda: nn.Parameter(plain.to(torch.complex64)),
        "float8": lambda: nn.Parameter(plain.to(torch.float8_e4m3fn), requires_grad=False),
        "empty": lambda: nn.Parameter(torch.ones(0, 32)),
    }[kind]()


@pytest.mark.parametrize("recipe", [SavedActivations(), QuantizedGemm(), Int8Base()], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("own product", "its weight is a Quantized, which multiplies in its own way .*: load the model unquantized"),
        ("complex", "its weight is of torch.complex64"),
        ("float8", "its weight is of torch.float8_e4m3fn"),
        ("empty", r"its weight is empty, of shape \(0, 32\)"),
    ],
)
def test_a_weight_that_no_path_can_round_is_refused_with_the_reason(recipe, kind, said):
    model = nn.Sequential(nn.Linear(32, 32))
    model[0].weight = weights(kind)
    with pytest.raises(ConfigError, match=rf"can convert none of them \(0: {said}"):
        trimtab.attach(model, recipe, units=["0"])
    assert type(model[0]) is nn.Linear


def test_a_parameter_of_a_class_that_multiplies_as_any_other_is_taken():
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].weight = Noted(torch.ones(8, 8))
    with trimtab.attach(model, SavedActivations()) as guard:
        assert len(guard.conversion.units) == 1


@pytest.mark.parametrize("selection", [3, [nn.Linear(2, 2)], [1, 2]])
def test_what_names_no_modules_is_refused(selection):
    with pytest.raises(ConfigError, match=r"units=.*a list of names or a filter is needed"):
        trimtab.attach(nn.Sequential(nn.Linear(2, 2)), units=selection)


def test_tied_weights_are_one_unit_and_switch_together(convert, kept, gradients):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
            self.c.weight = self.a.weight

        def forward(self, x):
            return self.c(self.b(self.a(x).tanh()).tanh())

    model = Tied()
    conversion = convert(model)
    assert [(u.name, u.module_names) for u in conversion.units] == [("a", ("a", "c")), ("b", ("b",))]
    x = torch.randn(3, 8)
    assert sorted(c.shape[-1] for c in kept(lambda: model(x))) == [4, 4, 4]
    conversion.route([True, False])
    assert sorted(c.shape[-1] for c in kept(lambda: model(x))) == [4, 8, 8]
    assert conversion.costs[0].flops == 2 * conversion.costs[1].flops
    conversion.undo()
    assert type(model.c) is nn.Linear


def test_a_layer_called_several_times_adds_up_its_gradients(pair):
    plain, converted, _ = pair(nn.Sequential(nn.Linear(8, 8)), 8, 8)
    x = torch.randn(3, 8)
    for model in (plain, converted):
        model[0](model[0](model[0](x))).sum().backward()
    assert torch.equal(plain[0].bias.grad, converted[0].bias.grad)
    assert not torch.equal(plain[0].weight.grad, converted[0].weight.grad)


def test_a_route_is_pulled_once_and_before_the_first_copy(convert, kept):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    conversion = convert(model)
    pulled = []

    def pull():
        pulled.append(True)
        conversion.route([True, True])

    conversion.pull = pull
    x = torch.randn(3, 8)
    assert [c.shape[-1] for c in kept(lambda: model[0](x))] == [8]  # also where only a submodule is called
    model(x)
    assert pulled == [True]


def test_a_thread_that_comes_while_the_route_is_awaited_waits_for_it_too(convert):
    conversion = convert(nn.Sequential(nn.Linear(8, 8)))
    inside, answered = threading.Event(), threading.Event()
    answers = []

    def pull():
        inside.set()
        # An answer in this time would be one from the old route; none comes, so that this is how long the test takes.
        answered.wait(timeout=0.2)
        conversion.route([True])

    def second():
        inside.wait(timeout=60)
        answers.append(conversion.bits_in_force(0))
        answered.set()

    conversion.pull = pull
    thread = threading.Thread(target=second)
    thread.start()
    answers.append(conversion.bits_in_force(0))
    thread.join(timeout=60)
    assert answers == [8, 8]
    assert conversion.pull is None


def test_a_pull_that_runs_a_forward_or_fails_is_still_asked_once(convert):
    model = nn.Sequential(nn.Linear(8, 8))
    conversion = convert(model)
    pulled = []

    def pull():
        pulled.append(True)
        model(torch.randn(3, 8))
        raise ArithmeticError

    conversion.pull = pull
    with pytest.raises(ArithmeticError):
        model(torch.randn(3, 8))
    model(torch.randn(3, 8))
    assert pulled == [True]


def test_a_parametrization_that_comes_after_conversion_runs_as_often_as_in_a_plain_model(pair):
    plain, converted, _ = pair(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    for model in (plain, converted):
        torch.manual_seed(0)
        spectral_norm(model[0])
    x = torch.randn(3, 8)
    for _ in range(3):
        outputs = [model(x) for model in (plain, converted)]
        assert torch.equal(*outputs)
    state = converted.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in plain.state_dict().items())


def test_the_conversion_and_the_recipe_are_what_their_protocols_ask_for(convert, blocks):
    assert isinstance(SavedActivations(), Recipe)
    assert isinstance(convert(blocks()), Conversion)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*instantiated")  # by the compiler itself
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_compiled_model_gives_the_gradients_of_the_eager_one_and_never_recompiles(convert, blocks, rounding):
    torch._dynamo.reset()
    model = blocks()
    conversion = convert(model, rounding=rounding)
    num_graphs = 0

    def backend(graph, inputs):
        nonlocal num_graphs
        num_graphs += 1
        return graph

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x = torch.randn(5, 8)
    for step in range(1, 13):
        grads = []
        for f in (compiled, model):
            conversion.begin_step(step)
            conversion.route([(step + i) % 3 == 0 for i in range(len(conversion.units))])
            model.zero_grad()
            for _ in range(2):
                f(x).square().sum().backward()
            grads.append([p.grad.clone() for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert num_graphs == 1
    torch._dynamo.reset()
