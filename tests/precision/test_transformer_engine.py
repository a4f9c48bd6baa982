"""TransformerEngine's layers switched through its debug tool, here a small stand-in that keeps its documented contract.

A layer asks in its forward, about all three products; a pair's second part is the next iteration in which it asks.
"""

import gc
import pickle
import re
import sys
import types
import warnings
import weakref

import pytest
import torch
import yaml
from torch import nn
from torch.utils.checkpoint import checkpoint

import trimtab
from trimtab.errors import ConfigError, MissingExtraError, TrimtabWarning
from trimtab.precision import Conversion, Recipe, find_units
from trimtab.precision import transformer_engine as path
from trimtab.precision.transformer_engine import (
    TransformerEngineFP8,
    TrimtabSwitch,
    is_te_linear,
    register_feature,
    transformer_engine_config,
)

GEMMS = ("fprop", "dgrad", "wgrad")
DEFAULTS = {"fp8_gemm_enabled": (True, None), "inspect_tensor_enabled": (False, None)}


class Tool:
    """What ``nvdlfw_inspect`` holds: features waiting for their namespace, the configuration, the iteration."""

    def __init__(self, config_file, feature_dirs, registry, api):
        assert feature_dirs == ["/te/debug/features"]
        self.config = yaml.safe_load(config_file)
        self.iteration = 0
        # Reading the folder brings the namespace, and the features that waited for it are made.
        waiting, registry.waiting = registry.waiting, []
        registry.data["transformer_engine"] = types.SimpleNamespace(features={c.__name__: c() for c in waiting})
        self.features = registry.data["transformer_engine"].features
        for section in self.config.values():
            assert section["transformer_engine"].keys() <= self.features.keys()
        api.DEBUG_MANAGER = self

    def ask(self, call, layer_name, **kwargs):
        for section in self.config.values():
            if not re.compile(section["layers"]["layer_name_regex_pattern"]).search(layer_name):
                continue
            for name, config in section["transformer_engine"].items():
                method = getattr(self.features[name], call)
                assert method.is_api
                tensor_or_gemm = {k: v for k, v in kwargs.items() if k != "iteration"}
                meant, narrowed = self.features[name].parse_config_and_api(
                    config, gemm_parsing="gemm" in kwargs, tensor_parsing="tensor_name" in kwargs, **tensor_or_gemm
                )
                if meant:
                    answer = method(narrowed or config, layer_name, **kwargs)
                    assert isinstance(answer, tuple)
                    return answer
        return DEFAULTS[call]


@pytest.fixture
def te(monkeypatch):
    """The stand-in, as ``transformer_engine`` and ``nvdlfw_inspect``; ``te.told`` is what each forward was told."""

    def module(name, **content):
        made = types.ModuleType(name)
        made.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    class Registry:
        data = {}  # noqa: RUF012
        waiting = []  # noqa: RUF012

        @classmethod
        def register_feature(cls, namespace):
            assert namespace == "transformer_engine"
            return lambda feature: cls.waiting.append(feature) or feature

    def api_method(function):
        function.is_api = True
        return function

    def step():
        api.DEBUG_MANAGER.iteration += 1

    def end_debug():
        api.DEBUG_MANAGER, state.debug_enabled = None, None
        Registry.data.clear()

    monkeypatch.setattr(path, "_steered", weakref.WeakValueDictionary())
    state = types.SimpleNamespace(debug_enabled=None)
    api = module("nvdlfw_inspect.api", DEBUG_MANAGER=None, step=step, end_debug=end_debug)
    api.initialize = lambda config_file, feature_dirs: Tool(config_file, feature_dirs, Registry, api)
    module("nvdlfw_inspect", __path__=[])
    module("nvdlfw_inspect.registry", Registry=Registry, api_method=api_method)
    module("transformer_engine", __path__=[], __file__="/te/__init__.py")
    module("transformer_engine.pytorch", __path__=[])
    module("transformer_engine.debug", __path__=[])
    module("transformer_engine.debug.pytorch", __path__=[])
    utils = module("transformer_engine.debug.pytorch.utils", next_iter_when_debug_should_be_run=lambda quantizers: None)
    module("transformer_engine.debug.pytorch.debug_state", TEDebugState=state)

    class Asking(nn.Module):
        in_features, primary_weights_in_fp8, is_fp8_on = 4, False, True

        def __init__(self, name="", **attributes):
            super().__init__()
            self.name = name
            self.next_iteration, self.last_iteration = 0, None
            self.__dict__.update(attributes)
            self.weight = nn.Parameter(torch.eye(4))
            state.debug_enabled = api.DEBUG_MANAGER is not None

        def asked_as(self):
            return [self.name]

        def forward(self, x):
            if state.debug_enabled and self.is_due(api.DEBUG_MANAGER.iteration):
                answers = [a for name in self.asked_as() for a in self.ask(name, api.DEBUG_MANAGER.iteration)]
                self.next_iteration = min((n for _, n in answers if n is not None), default=None)
            return x @ self.weight

        def is_due(self, iteration):
            """Whether the layer asks: settled by the iteration's first forward for all of its forwards."""
            if iteration != self.last_iteration:
                self.asks = self.next_iteration is not None and iteration >= self.next_iteration
                self.last_iteration = iteration
            return self.asks

        def ask(self, name, iteration):
            ask = api.DEBUG_MANAGER.ask
            answers = [ask("inspect_tensor_enabled", name, tensor_name="weight", iteration=iteration)]
            if self.is_fp8_on:
                gemms = [ask("fp8_gemm_enabled", name, gemm=gemm, iteration=iteration) for gemm in GEMMS]
                # Both operands of a product, and both uses of an operand, must be of one precision.
                assert len({quantized for quantized, _ in gemms}) == 1
                found.told.append((name, gemms[0][0]))
                answers += gemms
            return answers

    def layer(name, **methods):
        content = {"__module__": f"transformer_engine.pytorch.module.{name.lower()}", **methods}
        return type(name, (Asking,), content)

    found = types.SimpleNamespace(
        api=api,
        registry=Registry,
        utils=utils,
        state=state,
        told=[],
        Linear=layer("Linear"),
        LayerNormMLP=layer("LayerNormMLP", asked_as=lambda self: [f"{self.name}.fc1", f"{self.name}.fc2"]),
        GroupedLinear=layer(
            "GroupedLinear", num_gemms=2, asked_as=lambda self: [f"{self.name}.gemm_{i}" for i in range(2)]
        ),
    )
    return found


@pytest.fixture
def start(te):
    """Initialize the tool, then build a model of three layers."""

    def run(pattern=".*", **attributes):
        te.api.initialize(transformer_engine_config(pattern), register_feature())
        return nn.Sequential(*(te.Linear(f"model.{i}", **attributes) for i in range(3)))

    return run


def forward(te, model):
    """What each layer is told in one forward."""
    te.told.clear()
    model(torch.ones(2, 4, requires_grad=True))
    return [told for _, told in te.told]


def convert(model, **settings):
    return TransformerEngineFP8(**settings).convert(model, find_units(model, is_te_linear))


def test_the_recipe_and_its_conversion_keep_the_protocols(start):
    assert isinstance(TransformerEngineFP8(), Recipe)
    conversion = convert(start())
    assert isinstance(conversion, Conversion)
    assert len(conversion.costs) == len(conversion.units) == 3
    assert conversion.state_dict() == {}
    assert TransformerEngineFP8(unit="block").to_dict() == {"name": "transformer-engine", "unit": "block"}


def test_conversion_changes_nothing_of_the_model(start):
    model = start()
    before = [(n, type(m), set(m.__dict__), m.forward) for n, m in model.named_modules()]
    conversion = convert(model)
    conversion.undo()
    assert [(n, type(m), set(m.__dict__), m.forward) for n, m in model.named_modules()] == before


def test_all_units_start_on_the_low_cost_path(te, start):
    model = start()
    conversion = convert(model)
    assert forward(te, model) == [True, True, True]
    conversion.undo()


def test_a_switch_takes_effect_in_the_next_iteration_and_so_does_the_one_back(te, start):
    model = start()
    conversion = convert(model)
    forward(te, model)
    for active in ([False, True, False], [True, True, False], [False, False, False]):
        te.api.step()
        conversion.route(active)
        assert forward(te, model) == [not flag for flag in active]
        assert forward(te, model) == [not flag for flag in active]  # the step's next micro-batch


def test_a_switch_takes_effect_where_the_tool_is_never_stepped(te, start):
    model = start()
    conversion = convert(model)
    forward(te, model)
    conversion.route([True, False, False])
    assert forward(te, model) == [False, True, True]


def test_the_answer_asks_to_be_asked_in_the_next_iteration():
    feature = TrimtabSwitch()
    assert feature.fp8_gemm_enabled({}, "nobody", gemm="fprop", iteration=7) == (True, 8)
    assert feature.inspect_tensor_enabled({}, "nobody", tensor_name="weight", iteration=7) == (False, 8)


def test_a_forward_outside_fp8_is_not_the_last_one_asked(te, start):
    model = start(is_fp8_on=False)
    conversion = convert(model)
    assert forward(te, model) == []
    te.api.step()
    conversion.route([True] * 3)
    for layer in model:
        layer.is_fp8_on = True
    assert forward(te, model) == [False] * 3


def test_layers_that_nobody_steers_get_the_default_and_are_steered_once_somebody_does(te, start):
    model = start()
    assert forward(te, model) == [True] * 3
    te.api.step()
    recipe = TransformerEngineFP8()
    conversion = recipe.convert(model, find_units(model, ["1"]))
    conversion.route([True])
    assert forward(te, model) == [True, False, True]


def test_undo_gives_every_layer_the_default_answer(te, start):
    model = start()
    conversion = convert(model)
    conversion.route([True] * 3)
    assert forward(te, model) == [False] * 3
    conversion.undo()
    te.api.step()
    assert forward(te, model) == [True] * 3
    conversion.undo()


def test_undo_leaves_the_layers_of_a_later_conversion_alone(te, start):
    model = start()
    first = convert(model)
    first.undo()
    second = convert(model)
    second.route([True] * 3)
    first.undo()
    assert forward(te, model) == [False] * 3


def test_a_conversion_that_nobody_holds_steers_nothing(te, start):
    model = start()
    convert(model).route([True] * 3)
    gc.collect()
    assert forward(te, model) == [True] * 3


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_forward_recomputed_in_backward_is_told_what_the_first_one_was(te, start, use_reentrant):
    model = start()
    conversion = convert(model)
    conversion.route([True, False, True])
    y = checkpoint(model, torch.ones(2, 4, requires_grad=True), use_reentrant=use_reentrant)
    first = list(te.told)
    conversion.pull = lambda: pytest.fail("the route was taken in a backward")
    conversion.route([False, True, False])
    te.told.clear()
    y.sum().backward()
    assert te.told == first == [("model.0", False), ("model.1", True), ("model.2", False)]


def test_a_due_route_is_taken_before_the_first_answer_and_once(te, start):
    model = start()
    conversion = convert(model)
    pulls = []

    def pull():
        pulls.append(1)
        conversion.route([True, True, False])

    conversion.pull = pull
    assert forward(te, model) == [False, False, True]
    assert pulls == [1]
    assert conversion.pull is None


def test_a_guard_steers_the_layers(te, start):
    model = start()
    with trimtab.attach(model, TransformerEngineFP8(), units=is_te_linear) as guard:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for active in ([], ["1"], ["0", "2"], []):
            guard.route(active)
            assert forward(te, model) == [str(i) not in active for i in range(3)]
            model(torch.ones(2, 4)).sum().backward()
            guard.step()
            optimizer.step()
            optimizer.zero_grad()
            te.api.step()
    assert forward(te, model) == [True] * 3


def test_both_products_of_an_mlp_and_all_of_a_group_are_switched(te):
    te.api.initialize(transformer_engine_config(), register_feature())
    model = nn.Sequential(te.LayerNormMLP("mlp"), te.GroupedLinear("experts"), te.Linear("out"))
    conversion = convert(model)
    conversion.route([True, True, False])
    forward(te, model)
    assert dict(te.told) == {
        "mlp.fc1": False,
        "mlp.fc2": False,
        "experts.gemm_0": False,
        "experts.gemm_1": False,
        "out": True,
    }


def test_a_block_switches_all_its_layers_together(te):
    te.api.initialize(transformer_engine_config(), register_feature())
    model = nn.Sequential(*(nn.Sequential(te.Linear(f"{i}.a"), nn.Tanh(), te.Linear(f"{i}.b")) for i in range(2)))
    conversion = TransformerEngineFP8(unit="block").convert(model, find_units(model, ["0", "1"]))
    conversion.route([False, True])
    assert forward(te, model) == [True, True, False, False]


def test_a_unit_costs_a_byte_an_element_or_the_weights_own_precision(te):
    te.api.initialize(transformer_engine_config(), register_feature())
    model = nn.Sequential(te.Linear("one"), te.GroupedLinear("group")).bfloat16()
    linear, grouped = convert(model).costs
    assert (linear.low_saved_bytes, linear.high_saved_bytes, linear.flops) == (4, 8, 6 * 16)
    assert grouped.flops == linear.flops / 2  # its one weight here stands for those of two products


def test_only_layers_that_the_pattern_matches_are_asked_and_the_others_are_told_of(te, start):
    model = start(pattern=r"model\.[01]$")
    conversion = convert(model)
    conversion.begin_step(1)
    conversion.route([True] * 3)
    assert forward(te, model) == [False, False, True]
    conversion.begin_step(1)  # a step that the loss scaler has skipped
    with pytest.warns(TrimtabWarning, match=r"not asked about 1 of 3 units in a step \(2\)"):
        conversion.begin_step(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        conversion.begin_step(3)


def test_layers_that_are_asked_outside_fp8_only_and_a_resumed_run_raise_no_warning(te, start):
    model = start(is_fp8_on=False)
    conversion = convert(model)
    conversion.begin_step(1)
    conversion.load_state_dict({})
    conversion.begin_step(2)
    forward(te, model)
    conversion.begin_step(3)


def test_the_configuration_is_of_the_documented_form():
    pattern = r"it's \d"
    assert yaml.safe_load(transformer_engine_config(pattern)) == {
        "trimtab": {
            "enabled": True,
            "layers": {"layer_name_regex_pattern": pattern},
            "transformer_engine": {"TrimtabSwitch": {"enabled": True}},
        }
    }
    with pytest.raises(ConfigError, match=r"layer_name_pattern='\(': a regular expression is needed"):
        transformer_engine_config("(")


def test_a_feature_that_the_file_turns_off_is_not_asked():
    assert TrimtabSwitch().parse_config_and_api({"enabled": False}, gemm="fprop") == (False, None)


def test_units_that_are_not_of_transformer_engine_are_refused_with_the_reason(te):
    te.api.initialize(transformer_engine_config(), register_feature())
    fuser = type("Linear", (nn.Linear,), {"__module__": "transformer_engine.pytorch.ops.linear"})
    cases = {
        "it is a Linear": nn.Linear(4, 4),
        "it is a te.ops Linear, which asks no feature": fuser(4, 4),
        "it is a Sequential around such layers, which is a unit with unit='block'": nn.Sequential(te.Linear("a")),
        "it has no name yet": te.Linear(""),
        "its weight exists in FP8 only": te.Linear("b", primary_weights_in_fp8=True),
    }
    for reason, layer in cases.items():
        model = nn.Sequential(layer)
        with pytest.raises(ConfigError, match=re.escape(f"0 cannot: {reason}")):
            TransformerEngineFP8().convert(model, find_units(model, ["0"]))


def test_units_of_other_kinds_are_left_out_beside_some_that_can_be_switched(te):
    te.api.initialize(transformer_engine_config(), register_feature())
    model = nn.Sequential(nn.Linear(4, 4), te.Linear("a"))
    conversion = TransformerEngineFP8().convert(model, find_units(model, ["0", "1"]))
    assert [u.name for u in conversion.units] == ["1"]


def test_a_layer_that_inherits_from_transformer_engines_is_one(te):
    theirs = type("TEColumnParallelLinear", (te.Linear,), {"__module__": "megatron.core.extensions"})
    assert is_te_linear(theirs("a"))
    assert not is_te_linear(nn.Linear(4, 4))


def test_two_layers_of_one_name_are_refused(te, start):
    model = start()
    model[2].name = "model.0"
    with pytest.raises(ConfigError, match=r"units='2': .* two are called 'model.0'\. Call .*infer_and_assign"):
        convert(model)
    model[2].name = "model.2"
    conversion = convert(model)
    with pytest.raises(ConfigError, match=r"two are called 'model\.0'"):
        convert(nn.Sequential(te.Linear("model.0")))
    conversion.route([True] * 3)
    assert forward(te, model) == [False] * 3  # the refused ones have changed nothing


def test_a_model_built_before_the_tool_was_initialized_is_refused(te):
    model = nn.Sequential(te.Linear("a"))
    with pytest.raises(ConfigError, match=r"only if the debug tool was initialized before\. Call register_feature\(\)"):
        convert(model)
    te.api.initialize(transformer_engine_config(), register_feature())
    with pytest.raises(ConfigError, match="only if the debug tool was initialized before"):
        convert(model)


def test_a_tool_initialized_without_the_feature_is_refused(te):
    te.api.initialize("{}", ["/te/debug/features"])
    with pytest.raises(ConfigError, match="initialized without our feature"):
        convert(nn.Sequential(te.Linear("a")))
    with pytest.raises(ConfigError, match="debug_api=initialized: a feature is registered before"):
        register_feature()


def test_the_feature_can_be_registered_for_a_second_run_of_the_tool(te, start):
    start()
    te.api.end_debug()
    model = start()
    conversion = convert(model)
    conversion.route([True] * 3)
    assert forward(te, model) == [False] * 3


@pytest.mark.parametrize("missing", ["transformer_engine", "nvdlfw_inspect"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(te, start, monkeypatch, missing):
    model = start()
    for name in [n for n in sys.modules if n.partition(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    said = rf"needs the package '{missing}', which is not installed\. Install it with: pip install .*nvdlfw-inspect"
    for call in (lambda: convert(model), register_feature):
        with pytest.raises(MissingExtraError, match=said) as caught:
            call()
        assert caught.value.package == missing
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("part", ["caching", "register_feature", "debug"])
def test_another_contract_is_refused_naming_the_versions(te, start, monkeypatch, part):
    model = start()
    if part == "caching":
        del te.utils.next_iter_when_debug_should_be_run
    elif part == "register_feature":
        monkeypatch.delattr(te.registry, "register_feature")
    else:
        monkeypatch.setitem(sys.modules, "transformer_engine.debug.pytorch.debug_state", None)
    monkeypatch.setattr(path, "_version", {"transformer_engine": "2.4.0", "nvdlfw-inspect": "0.1"}.get)
    said = r"TransformerEngine 2\.7 to 2\.20 .* transformer_engine 2\.4\.0 and nvdlfw-inspect 0\.1 differ .*pip install"
    with pytest.raises(MissingExtraError, match=said):
        convert(model)


def test_importing_the_path_imports_neither_package():
    assert not {"transformer_engine", "nvdlfw_inspect"} & path.__dict__.keys()


def test_a_unit_is_a_projection_or_a_block():
    with pytest.raises(ConfigError, match="unit='layer': it is 'projection' or 'block'"):
        TransformerEngineFP8(unit="layer")
