"""Adapters on a small base that is pre-trained on the spot."""

import copy
import importlib.util
import math
import sys

import pytest
import torch

import trimtab
from trimtab.control import Policy
from trimtab.errors import ConfigError, MissingExtraError
from trimtab.experiments.lora import PROJECTIONS, add_lora, pretrain_small_base
from trimtab.experiments.text import TextBatches, load_corpus, read_speeches, validation_batches
from trimtab.precision import find_units
from trimtab.trace import open_run

pytestmark = [
    # transformers, about a name of its own that peft still uses
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    # torch's compiler, which peft imports, about its own modules
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]
needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="needs peft: pip install 'trimtab[lora]'"
)


@pytest.fixture(scope="module")
def corpora():
    """The earlier half of the speeches to pre-train on, and the later half to fine-tune on."""
    speeches = read_speeches()
    return load_corpus(speeches[: len(speeches) // 2]), load_corpus(speeches[len(speeches) // 2 :])


@pytest.fixture(scope="module")
def pretrained(corpora):
    return pretrain_small_base(corpora[0])


@pytest.fixture
def base(pretrained):
    return copy.deepcopy(pretrained)


@torch.no_grad()
def validation_loss(model, corpus) -> float:
    windows = validation_batches(corpus.validation, batch=64, sequence=64, num_sequences=64)
    return sum(float(model(input_ids=w, labels=w).loss) for w in windows)


def adapters(model) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def one_backward(model, corpus) -> None:
    batch = TextBatches(corpus.train, 2, 32, 0)[0]
    model(input_ids=batch, labels=batch).loss.backward()


def test_the_small_base_knows_more_than_how_often_each_byte_comes(pretrained, corpora):
    held_out = corpora[0].validation
    share = torch.bincount(held_out, minlength=256).double() / len(held_out)
    # What the best model without context reaches: the entropy of the bytes.
    without_context = float(torch.special.entr(share).sum())
    assert validation_loss(pretrained, corpora[0]) < without_context


def test_the_small_base_follows_from_its_seed_and_draws_nothing(corpora):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one, same, other = (pretrain_small_base(corpora[0], steps=1, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    weights = [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_pretraining_for_no_step_is_refused(corpora):
    with pytest.raises(ConfigError, match="steps=0: pre-training takes at least 1 step"):
        pretrain_small_base(corpora[0], steps=0)


@needs_peft
def test_new_adapters_leave_what_the_model_computes_as_it_was(base, corpora):
    batch = corpora[1].validation[:64].view(2, 32)
    with torch.no_grad():
        before = base(input_ids=batch).logits
        after = add_lora(base)(input_ids=batch).logits
    assert torch.equal(before, after)


@needs_peft
def test_adapters_follow_from_their_seed_and_draw_nothing(pretrained):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one, same, other = (adapters(add_lora(copy.deepcopy(pretrained), seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert all(torch.equal(one[name], other[name]) == ("lora_B" in name) for name in one)


@needs_peft
def test_each_projection_has_one_adapter_and_is_one_unit_under_its_own_name(base):
    plain = [unit.name for unit in find_units(base)]
    model = add_lora(base, rank=4)
    units = find_units(model)
    assert [unit.name.removeprefix("base_model.model.") for unit in units] == plain
    assert {unit.name.rpartition(".")[2] for unit in units} == set(PROJECTIONS)
    assert len(adapters(model)) == 2 * len(units)
    assert all(4 in p.shape and "lora" in name for name, p in adapters(model).items())


@needs_peft
def test_a_units_norm_is_that_of_its_adapters_gradients_at_first_of_the_second_ones_alone(base, corpora, tmp_path):
    model = add_lora(base)
    name = "base_model.model.model.layers.1.mlp.up_proj"
    layer = model.get_submodule(name)
    expected = []
    optimizer = torch.optim.SGD(adapters(model).values(), lr=1.0)
    with trimtab.attach(model, policy=Policy(), record=tmp_path) as guard:
        index = list(guard.units).index(name)
        for _ in range(2):
            one_backward(model, corpora[1])
            gradients = [p.grad for p in (layer.lora_A["default"].weight, layer.lora_B["default"].weight)]
            expected.append([float(torch.linalg.vector_norm(g)) for g in gradients])
            assert guard.step().num_unobserved == 0
            optimizer.step()
            optimizer.zero_grad()
    assert expected[0][0] == 0.0 < expected[1][0]
    with open_run(tmp_path) as run:
        recorded = run.steps().norms[:, index]
    # The same float32 norms of the two gradients, joined in float64.
    assert recorded.tolist() == pytest.approx([math.hypot(*norms) for norms in expected], rel=1e-15, abs=0)


@needs_peft
def test_fine_tuning_lowers_the_loss_on_later_speeches_and_leaves_the_base_alone(pretrained, base, corpora):
    later = corpora[1]
    model = add_lora(base)
    before = validation_loss(model, later)
    optimizer = torch.optim.AdamW(adapters(model).values(), lr=5e-3)
    batches = TextBatches(later.train, 8, 64, 0)
    with trimtab.attach(model) as guard:
        for step in range(20):
            model(input_ids=batches[step], labels=batches[step]).loss.backward()
            guard.step(max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert validation_loss(model, later) < before
    trained = model.unload().state_dict()
    assert all(torch.equal(trained[name], weight) for name, weight in pretrained.state_dict().items())


@needs_peft
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            {"targets": ["q_proj", "k_porj"]},
            r"targets='k_porj': no module has this name\. The nearest names are k_proj",
        ),
        ({"targets": "q_proj"}, r"targets='q_proj': a list of names is needed\. Write \['q_proj'\]"),
        ({"rank": 0}, r"rank=0: an adapter has a rank of at least 1\. Set it to 1 or more\."),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_setting_that_cannot_be_meant_is_refused_and_the_model_is_untouched(pretrained, base, setting, message):
    with pytest.raises(ConfigError, match=message):
        add_lora(base, **setting)
    assert list(base.state_dict()) == list(pretrained.state_dict())
    assert all(p.requires_grad for p in base.parameters())


def test_without_peft_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match=r"LoRA needs the package 'peft'.*pip install 'trimtab\[lora\]'"):
        add_lora(torch.nn.Linear(2, 2))
