"""Every claim of the contract, seen to fail on a recipe that is right but for one thing."""

import contextlib
import dataclasses
import random
from types import SimpleNamespace
from unittest import SkipTest

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from trimtab.errors import ConfigError
from trimtab.guard import attach
from trimtab.precision import SavedActivations, find_units
from trimtab.precision.linear_conversion import in_backward
from trimtab.precision.quantized_gemm import QuantizedGemm
from trimtab.testing import OperandRounding, RecipeContract, tiny_model

# Of the two recipes below: E3M2, of 2 mantissa bits and normal numbers from 2**-2 to 28, and whole numbers to 7.
E3M2 = OperandRounding(rtol=2**-3, floor=2**-2 / 28, over="tensor")
INT4 = OperandRounding(rtol=0.5 / 7, floor=1.0)


@pytest.fixture(autouse=True)
def torch_as_it_was():
    """What a broken recipe has switched or hooked for the whole process."""
    yield
    torch.set_float32_matmul_precision("highest")
    torch.nn.modules.module._global_forward_hooks.clear()


class Broken:
    """A good recipe, and what breaks its conversions."""

    name = "broken"

    def __init__(self, good, breaks):
        self.good, self.breaks = good, breaks

    def convert(self, model, units):
        conversion = self.good.convert(model, units)
        self.breaks(conversion, model)
        return conversion

    def to_dict(self):
        return {"name": self.name}


class Contract(RecipeContract):
    rebuilds_from_dict = False

    def __init__(self, recipe, **hooks):
        self.recipe = recipe
        self.__dict__ |= hooks

    def model(self):
        return tiny_model(num_blocks=1)


def products(breaks, broken=Broken, **hooks):
    """The contract of a recipe that changes outputs and all gradients."""
    hooks = {"low_rounding": {"input": E3M2, "weight": E3M2, "output_gradient": E3M2}} | hooks
    return Contract(lambda: broken(QuantizedGemm("e3m2", "bf16"), breaks), **hooks)


def copies(breaks, broken=Broken, **hooks):
    """The contract of a recipe that changes weight gradients only."""
    hooks = {"documented_changes": frozenset({"weight_gradient"}), "low_rounding": {"input": INT4}} | hooks
    return Contract(lambda: broken(SavedActivations(4, 16), breaks), **hooks)


def nothing(conversion, model):
    pass


def with_run(change):
    """What layers compute is changed: ``change(run, module, x, index)``."""

    def breaks(conversion, model):
        run = conversion.run
        conversion.run = lambda module, x, index: change(run, module, x, index)

    return breaks


def with_output(change):
    """What layers give on either path is changed: ``change(output, x)``."""

    def changed(run, module, x, index):
        output = run(module, x, index)
        return change(F.linear(x, module.weight, module.bias) if output is None else output, x)

    return with_run(changed)


def with_plain(change):
    """What layers on the recovery path give is changed: ``change(module, x)`` in place of the plain layer."""

    def breaks(conversion, model):
        run = conversion.run

        def changed(module, x, index):
            output = run(module, x, index)
            return change(conversion, module, x) if output is None else output

        conversion.run = changed

    return breaks


def plain(module, x):
    return F.linear(x, module.weight, module.bias)


def first_layer(conversion):
    return conversion.operators[0][0]


def low_path_is_the_plain_layer(conversion, model):
    conversion.run = lambda module, x, index: None


def high_path_is_low(conversion, model):
    conversion.is_active = lambda index: False


def high_path_rounds_in_later_steps(conversion, module, x):
    return plain(module, x) * 1.01 if conversion._step > 1 else None


def high_path_rounds_in_later_micro_batches(conversion, module, x):
    return plain(module, x) * 1.01 if conversion._micro_batch > 1 else None


def high_path_rounds_in_eval_mode(conversion, module, x):
    return None if module.training else plain(module, x) * 1.01


def low_path_doubles_weight_gradients(conversion, model):
    products = conversion.gradient_products

    def doubled(*args):
        grad_x, grad_weight = products(*args)
        return grad_x, None if grad_weight is None else 2 * grad_weight

    conversion.gradient_products = doubled


def low_path_is_off_in_later_steps(conversion, model):
    with_output(lambda output, x: output * (1.5 if conversion._step > 1 else 1.0))(conversion, model)


def adds_to_one_output(output, x):
    return output + 10 * (torch.arange(output.shape[-1]) == 0)


def starts_on_the_recovery_path(conversion, model):
    conversion.route([True] * len(conversion.units))


def loses_a_route_before_the_first_forward(conversion, model):
    run, route, has_run = conversion.run, conversion.route, []

    def noted(module, x, index):
        has_run.append(True)
        return run(module, x, index)

    conversion.run = noted
    conversion.route = lambda active: route(active) if has_run else None


def switches_the_wrong_units(conversion, model):
    route = conversion.route
    conversion.route = lambda active: route(list(active)[::-1])


def layers_take_the_path_of_the_first_that_reads(conversion, model):
    run, seen = conversion.run, []

    def shared(module, x, index):
        first = next((i for source, i in seen if source is x), index)
        seen.append((x, first))
        return run(module, x, first)

    conversion.run = shared


def no_route_is_pulled(conversion, model):
    conversion.is_active = lambda index: conversion._active[index]


def a_route_is_pulled_by_each_layer(conversion, model):
    def is_active(index):
        pull = conversion.pull
        if pull is not None and not in_backward():
            pull()
        return conversion._active[index]

    conversion.is_active = is_active


def a_route_is_pulled_by_the_model_only(conversion, model):
    take, conversion._take_route = conversion._take_route, lambda: None
    model.register_forward_pre_hook(lambda module, args: take() if conversion.pull else None)


def a_route_is_pulled_in_backward_too(conversion, model):
    def is_active(index):
        if conversion.pull is not None:
            conversion._take_route()
        return conversion._active[index]

    conversion.is_active = is_active


def averages_what_is_accumulated(conversion, model):
    weight = first_layer(conversion).weight
    weight.register_hook(lambda grad: grad if weight.grad is None else grad / 2)


def makes_ones_of_a_gradient_of_zeros(conversion, model):
    for layers in conversion.operators:
        for layer in layers:
            layer.weight.register_hook(lambda grad: grad if grad.any() else torch.ones_like(grad))


def leaks_a_hook(conversion, model):
    first_layer(conversion).register_forward_pre_hook(lambda module, args: None)


def scaled(module, args, output):
    return output * 1.01


def hooks_the_layer(conversion, model):
    first_layer(conversion).register_forward_hook(scaled)


def computes_with_the_first_weight(conversion, model):
    weight = first_layer(conversion).weight.detach().clone()
    first_layer(conversion).register_forward_hook(lambda module, args, output: F.linear(args[0], weight, module.bias))


def depends_on_how_long_the_process_runs(conversion, model):
    run, begin_step, steps = conversion.run, conversion.begin_step, []

    def begin(step):
        steps.append(step)
        begin_step(step)

    def drifting(module, x, index):
        output = run(module, x, index)
        return None if output is None else output * (1 + len(steps) / 100)

    conversion.begin_step, conversion.run = begin, drifting


def changes_a_parameter(conversion, model):
    with torch.no_grad():
        first_layer(conversion).weight.mul_(1.01)


def replaces_a_parameter(conversion, model):
    layer = first_layer(conversion)
    layer.weight = torch.nn.Parameter(layer.weight.detach())


def adds_a_buffer(conversion, model):
    first_layer(conversion).register_buffer("scale", torch.ones(()))


def adds_a_buffer_in_evaluation(conversion, model):
    layer = first_layer(conversion)
    evaluates(lambda: layer.register_buffer("scale", torch.ones(())))(conversion, model)


def evaluates(function):
    """What a layer does besides in a forward without gradients."""

    def breaks(conversion, model):
        def hook(module, args):
            if not torch.is_grad_enabled() and not module.training:
                function()

        handle, undo = first_layer(conversion).register_forward_pre_hook(hook), conversion.undo
        conversion.undo = lambda: (handle.remove(), undo())

    return breaks


def leaks_a_hook_on_all_modules(conversion, model):
    torch.nn.modules.module.register_module_forward_hook(lambda *args: None)


def leaves_torch_less_precise(conversion, model):
    torch.set_float32_matmul_precision("medium")


def leaks_a_hook_on_a_parameter(conversion, model):
    first_layer(conversion).weight.register_hook(lambda grad: None)


def leaks_a_hook_on_what_is_accumulated(conversion, model):
    first_layer(conversion).weight.register_post_accumulate_grad_hook(lambda parameter: None)


def freezes_a_parameter(conversion, model):
    undo = conversion.undo
    conversion.undo = lambda: (undo(), model.lm_head.weight.requires_grad_(False))


def stops_when_it_is_copied(conversion, model):
    class Trap:
        def __deepcopy__(self, memo):
            conversion.run = lambda module, x, index: None

        def __reduce__(self):
            return type(None), ()

    model.__dict__["trap"] = Trap()


def undo_removes_every_hook(conversion, model):
    undo = conversion.undo

    def clearing():
        undo()
        model._forward_hooks.clear()

    conversion.undo = clearing


def is_never_undone(conversion, model):
    conversion.undo = lambda: None


def is_pulled_at_once(conversion, model):
    conversion.pull = lambda: None


def reverses_its_units(conversion, model):
    conversion.units = conversion.units[::-1]


def leaves_a_cost_out(conversion, model):
    conversion.costs = conversion.costs[1:]


def lies_about_costs(conversion, model):
    conversion.costs = [dataclasses.replace(cost, low_saved_bytes=1.0) for cost in conversion.costs]


def with_costs(**changes):
    def breaks(conversion, model):
        conversion.costs = [dataclasses.replace(cost, **changes) for cost in conversion.costs]

    return breaks


def has_no_costs(conversion, model):
    conversion.costs = [None] * len(conversion.units)


def keeps_a_tuple_in_its_state(conversion, model):
    conversion.state_dict = lambda: {"rows": (1, 2)}


def recompiles(conversion, model):
    trace = conversion.trace

    def reading_the_route(*args):
        output = trace(*args)
        return output * 2 if conversion._active[0] else output

    conversion.trace = reading_the_route


class TakesAModelTwice(Broken):
    before = None

    def convert(self, model, units):
        try:
            TakesAModelTwice.before = super().convert(model, units)
        except ConfigError:
            assert TakesAModelTwice.before is not None
        return TakesAModelTwice.before


class TouchesWhatItRefuses(Broken):
    def convert(self, model, units):
        for unit in units:
            unit.modules[0].touched = object()
        return super().convert(model, units)


class TakesAnything(Broken):
    def convert(self, model, units):
        return super().convert(model, units or find_units(model))


class MarksTheModelFirst(Broken):
    def convert(self, model, units):
        model.is_converted = True
        return super().convert(model, units)


class GivesNoReason(Broken):
    def convert(self, model, units):
        try:
            return super().convert(model, units)
        except ConfigError as error:
            raise ConfigError("units", [], "they cannot be converted.", "Choose others.") from error


class HasNoJson(Broken):
    def to_dict(self):
        return {"name": self.name, "formats": (1, 2)}


class HasNoName(Broken):
    def to_dict(self):
        return {}


def with_stats(change):
    """What is told of the quantizers is changed."""

    def breaks(conversion, model):
        take = conversion.take_quantizer_stats

        def changed():
            stats = take()
            return None if stats is None else change(stats)

        conversion.take_quantizer_stats = changed

    return breaks


def with_observe(change):
    """How quantizers are observed is changed: ``change(conversion, observe, shadow)``."""

    def breaks(conversion, model):
        observe = conversion.observe_quantizers
        conversion.observe_quantizers = lambda shadow: change(conversion, observe, shadow)

    return breaks


def keeps_the_last(conversion, observe, shadow):
    observe(shadow)
    conversion._stats.note = conversion._stats._rows.__setitem__


def takes_nothing_away(conversion, observe, shadow):
    observe(shadow)
    take, kept = conversion._stats.take, []

    def again():
        kept.append(take())
        return next((stats for stats in kept if stats is not None), None)

    conversion._stats.take = again


def computes_otherwise(conversion, observe, shadow):
    observe(shadow)
    with_output(lambda output, x: output * 1.01)(conversion, None)


def looks_at_every_forward(conversion, model):
    model.register_forward_hook(lambda *args: conversion._stats.note(0, torch.ones(4)))


def looks_at_twice_the_input(run, module, x, index):
    return run(module, 2 * x, index)


def in_recomputation(run, module, x, index):
    return None if in_backward() else run(module, x, index)


def without_gradients(run, module, x, index):
    if torch.is_grad_enabled():
        return run(module, x, index)
    return F.linear(x, module.weight, module.bias) * 1.01


def draws(function):
    def drawing(run, module, x, index):
        function()
        return run(module, x, index)

    return with_run(drawing)


def seeds():
    torch.manual_seed(1)


def draws_in_converting(conversion, model):
    torch.rand(())


def seeds_in_backward(conversion, model):
    first_layer(conversion).weight.register_hook(lambda grad: seeds())


def under_autocast(change):
    return lambda output, x: change(output) if torch.is_autocast_enabled("cpu") else output


def high_path_is_off_under_autocast(conversion, module, x):
    return plain(module, x) * 1.05 if torch.is_autocast_enabled("cpu") else None


def high_path_ignores_autocast(conversion, module, x):
    if not torch.is_autocast_enabled("cpu"):
        return None
    with torch.autocast("cpu", enabled=False):
        return plain(module, x.float()).bfloat16()


def needs(condition):
    def given(run, module, x, index):
        if not condition(x):
            raise RuntimeError("view size is not compatible with input tensor's size and stride")
        return run(module, x, index)

    return with_run(given)


def needs_contiguous_gradients(output, x):
    def check(grad):
        if not grad.is_contiguous():
            raise RuntimeError("view size is not compatible with input tensor's size and stride")

    output.register_hook(check)
    return output


class RefusesBfloat16Late(Broken):
    def convert(self, model, units):
        conversion = super().convert(model, units)
        if next(model.parameters()).dtype == torch.bfloat16:
            needs(lambda x: False)(conversion, model)
        return conversion


def where_odd(axis):
    return with_output(lambda output, x: output * 0 if x.dim() > 1 and x.shape[axis] % 2 else output)


# What each claim is held against: the contract of a recipe that breaks it.
BROKEN = {
    "the_low_cost_path_changes_what_is_documented_and_nothing_else": [
        (products, low_path_is_the_plain_layer),
        (copies, with_output(lambda output, x: output * 1.01)),
        (products, with_output(lambda output, x: output / 0)),
        (products, with_output(lambda output, x: output * 1.5)),
        (products, with_output(adds_to_one_output)),
        (products, low_path_doubles_weight_gradients),
        (products, low_path_is_off_in_later_steps),
    ],
    "the_recovery_path_computes_what_the_plain_layers_do": [
        (products, high_path_is_low),
        (copies, high_path_is_low),
        (products, with_plain(high_path_rounds_in_later_steps)),
        (products, with_plain(high_path_rounds_in_later_micro_batches)),
        (products, with_plain(high_path_rounds_in_eval_mode)),
    ],
    "the_recovery_path_of_all_units_trains_as_the_plain_model": [(products, high_path_is_low)],
    "all_units_start_on_the_low_cost_path": [(products, starts_on_the_recovery_path)],
    "a_route_may_come_before_any_forward": [(products, loses_a_route_before_the_first_forward)],
    "a_subset_of_the_units_switches_those_units_alone": [(products, switches_the_wrong_units)],
    "layers_that_follow_one_another_compute_what_each_does_by_itself": [
        (copies, layers_take_the_path_of_the_first_that_reads)
    ],
    "any_number_of_tokens_is_taken": [(products, where_odd(-2))],
    "odd_feature_sizes_are_taken": [(products, where_odd(-1))],
    "operands_of_any_shape_and_layout_are_taken": [
        (products, needs(lambda x: x.is_contiguous())),
        (products, needs(lambda x: x.dim() in (2, 3))),
        (products, needs(lambda x: x.dim() != 1)),
        (products, with_output(needs_contiguous_gradients)),
        (products, with_output(lambda output, x: output if x.is_contiguous() else output.roll(1, 0))),
    ],
    "what_holds_of_both_paths_holds_under_autocast": [
        (products, with_output(under_autocast(lambda output: output * torch.nan))),
        (products, with_output(under_autocast(lambda output: output * 1.5))),
        (products, with_plain(high_path_is_off_under_autocast)),
        (products, with_plain(high_path_ignores_autocast)),
    ],
    "a_model_in_bfloat16_trains_on_both_paths_or_is_refused": [
        (lambda breaks: products(breaks, RefusesBfloat16Late), nothing),
        (products, with_output(lambda output, x: output.float())),
    ],
    "a_due_route_is_pulled_once_before_the_next_forward_computes": [
        (products, no_route_is_pulled),
        (products, a_route_is_pulled_by_each_layer),
        (copies, high_path_is_low),
    ],
    "a_due_route_is_pulled_where_a_layer_is_called_alone": [(products, a_route_is_pulled_by_the_model_only)],
    "checkpointing_changes_no_gradient": [(products, with_run(in_recomputation))],
    "a_forward_recomputed_in_backward_takes_the_route_of_the_first_one": [
        (products, a_route_is_pulled_in_backward_too),
        (copies, a_route_is_pulled_in_backward_too),
    ],
    "two_micro_batches_add_up": [(products, averages_what_is_accumulated)],
    "random_streams_are_left_where_the_plain_model_leaves_them": [
        (products, draws(lambda: torch.rand(()))),
        (products, draws(lambda: np.random.rand())),  # noqa: NPY002 - the global stream is the point
        (products, draws(random.random)),
        (products, draws(seeds)),
        (products, seeds_in_backward),
        (products, draws_in_converting),
        (products, evaluates(lambda: torch.rand(()))),
    ],
    "autocast_gives_the_dtypes_that_plain_layers_give": [(products, with_output(lambda output, x: output.float()))],
    "evaluation_runs_the_plain_model": [
        (products, hooks_the_layer),
        (lambda breaks: products(breaks, evaluates_as_plain=False), hooks_the_layer),
    ],
    "a_recipe_that_leaves_forwards_alone_does_so_everywhere": [(copies, with_run(without_gradients))],
    "zeros_stay_zeros": [
        (products, with_output(lambda output, x: output + 1e-6)),
        (products, makes_ones_of_a_gradient_of_zeros),
    ],
    "what_is_not_finite_in_the_plain_layer_is_not_finite": [
        (products, with_output(lambda output, x: output.nan_to_num())),
        (copies, with_output(lambda output, x: output.nan_to_num())),
    ],
    "huge_numbers_raise_nothing_and_hide_nothing": [
        (products, with_output(lambda output, x: output.clamp(-65504, 65504))),
    ],
    "no_tokens_give_no_outputs_and_no_gradients": [(products, makes_ones_of_a_gradient_of_zeros)],
    "a_batch_without_tokens_passes_through_the_model": [(products, makes_ones_of_a_gradient_of_zeros)],
    "weights_saved_in_the_middle_of_a_run_load_into_a_plain_model_and_back": [
        (products, computes_with_the_first_weight)
    ],
    "a_weight_that_is_trained_is_the_weight_that_computes": [(products, computes_with_the_first_weight)],
    "a_resumed_run_decides_and_computes_as_the_uninterrupted_one": [(products, depends_on_how_long_the_process_runs)],
    "statistics_have_a_row_a_unit_and_are_nan_where_nothing_ran": [
        (copies, with_stats(lambda stats: stats[:, :3])),
        (copies, with_stats(lambda stats: stats.double())),
        (copies, with_stats(lambda stats: -stats)),
        (copies, with_stats(torch.nan_to_num)),
        (copies, with_observe(takes_nothing_away)),
        (copies, with_observe(lambda conversion, observe, shadow: None)),
    ],
    "an_operand_that_is_not_finite_has_an_infinite_error": [
        (copies, with_stats(lambda stats: torch.where(stats.isinf(), 1.0, stats))),
        (products, with_stats(lambda stats: torch.where(stats.isinf(), torch.nan, stats))),
    ],
    "an_operand_of_zeros_has_no_error": [(products, with_stats(lambda stats: stats + 1))],
    "statistics_are_the_maximum_over_micro_batches": [(products, with_observe(keeps_the_last))],
    "observing_changes_no_result": [(products, with_observe(computes_otherwise))],
    "units_on_the_recovery_path_are_judged_by_their_low_cost_path_where_that_is_asked_for": [
        (copies, with_observe(lambda conversion, observe, shadow: observe(False))),
        (products, with_observe(lambda conversion, observe, shadow: observe(True))),
    ],
    "an_evaluation_is_not_looked_at": [(products, looks_at_every_forward)],
    "statistics_are_the_same_with_checkpointing": [
        (copies, with_run(lambda run, module, x, index: run(module, x, index) if torch.is_grad_enabled() else None))
    ],
    "statistics_are_the_same_under_a_compiler": [(products, with_run(looks_at_twice_the_input))],
    "the_recipe_and_its_conversion_keep_the_protocols": [
        (products, is_pulled_at_once),
        (lambda breaks: products(breaks, lambda *_: SimpleNamespace(name="broken", convert=None)), nothing),
    ],
    "its_units_are_some_of_those_offered_in_their_order": [
        (products, reverses_its_units),
        (products, leaves_a_cost_out),
    ],
    "keys_values_and_identity_of_all_parameters_stay": [
        (products, changes_a_parameter),
        (products, replaces_a_parameter),
        (products, adds_a_buffer),
        (products, adds_a_buffer_in_evaluation),
    ],
    "undo_gives_every_module_back_as_it_was": [
        (products, leaks_a_hook),
        (products, is_never_undone),
        (products, undo_removes_every_hook),
        (products, adds_a_buffer_in_evaluation),
        (products, leaks_a_hook_on_all_modules),
        (products, leaves_torch_less_precise),
        (products, leaks_a_hook_on_a_parameter),
        (products, leaks_a_hook_on_what_is_accumulated),
        (products, freezes_a_parameter),
    ],
    "an_undone_model_trains_as_the_plain_one": [(products, is_never_undone)],
    "detach_gives_every_module_back_as_it_was": [(products, leaks_a_hook), (products, is_never_undone)],
    "a_converted_model_is_not_converted_again": [
        (lambda breaks: products(breaks, TakesAModelTwice), nothing),
        (lambda breaks: products(breaks, TouchesWhatItRefuses), nothing),
    ],
    "a_model_with_nothing_to_convert_is_refused_with_the_reason": [
        (lambda breaks: products(breaks, TouchesWhatItRefuses), nothing),
        (lambda breaks: products(breaks, GivesNoReason), nothing),
        (lambda breaks: products(breaks, unconvertible_model=tiny_model), nothing),
    ],
    "an_offer_of_no_units_is_refused": [
        (lambda breaks: products(breaks, TakesAnything), nothing),
        (lambda breaks: products(breaks, MarksTheModelFirst), nothing),
    ],
    "a_copy_of_a_converted_model_is_a_plain_model_that_trains": [
        (products, hooks_the_layer),
        (products, stops_when_it_is_copied),
    ],
    "its_settings_are_json_and_build_the_recipe_again": [
        (lambda breaks: products(breaks, HasNoJson), nothing),
        (lambda breaks: products(breaks, HasNoName), nothing),
    ],
    "its_state_is_json": [(products, keeps_a_tuple_in_its_state)],
    "costs_are_finite_and_none_is_negative": [
        (products, with_costs(flops=float("nan"))),
        (products, with_costs(high_saved_bytes=float("inf"))),
        (products, with_costs(low_saved_bytes=-1.0)),
        (products, has_no_costs),
    ],
    "costs_are_the_bytes_that_are_kept": [
        (copies, lies_about_costs),
        (products, lies_about_costs),
        (products, has_no_costs),
    ],
    "costs_are_the_flops_of_the_products": [(products, with_costs(flops=1.0)), (products, has_no_costs)],
    "switching_units_never_recompiles_and_gives_the_gradients_of_eager_mode": [(products, recompiles)],
}
CASES = [(claim, i) for claim, ways in BROKEN.items() for i in range(len(ways))]


@pytest.mark.parametrize(("claim", "way"), CASES, ids=lambda part: str(part))
def test_a_claim_fails_on_a_recipe_that_breaks_it(claim, way):
    contract, breaks = BROKEN[claim][way]
    with pytest.raises(AssertionError) as caught:
        getattr(contract(breaks), f"test_{claim}")()
    assert str(caught.value), "the failure says nothing"


def test_every_claim_has_been_seen_to_fail():
    claims = {n.removeprefix("test_") for n in dir(RecipeContract) if n.startswith("test_")}
    assert claims == BROKEN.keys()


@pytest.mark.parametrize("claim", [c for c in BROKEN if "compile" not in c])
@pytest.mark.parametrize("contract", [products, copies])
def test_every_claim_holds_for_a_recipe_that_is_right(contract, claim):
    with contextlib.suppress(SkipTest):
        getattr(contract(nothing), f"test_{claim}")()


def test_what_does_not_apply_is_skipped_with_its_reason():
    contract = products(nothing, compiles_in_one_graph=False, why_not_one_graph="it calls a library")
    with pytest.raises(SkipTest, match="it calls a library"):
        contract.test_switching_units_never_recompiles_and_gives_the_gradients_of_eager_mode()
    with pytest.raises(AssertionError, match="needs a reason"):
        products(
            nothing, compiles_in_one_graph=False
        ).test_switching_units_never_recompiles_and_gives_the_gradients_of_eager_mode()


def test_what_is_not_measured_has_a_reason():
    for of, claim in (("saved_bytes", "the_bytes_that_are_kept"), ("flops", "the_flops_of_the_products")):
        with pytest.raises(AssertionError, match="needs a reason"):
            getattr(products(nothing, **{f"has_costs_of_{of}": False}), f"test_costs_are_{claim}")()
        told = products(nothing, **{f"has_costs_of_{of}": False, f"why_no_costs_of_{of}": "a library allocates"})
        with pytest.raises(SkipTest, match="a library allocates"):
            getattr(told, f"test_costs_are_{claim}")()


def test_a_recipe_that_seeds_the_streams_is_seen_whatever_ran_before():
    contract = products(seeds_in_backward)
    contract.test_two_micro_batches_add_up()
    with pytest.raises(AssertionError, match=r"a forward and backward on the low-cost path .* set their state"):
        contract.test_random_streams_are_left_where_the_plain_model_leaves_them()


@pytest.mark.parametrize("breaks", [leaves_torch_less_precise, leaks_a_hook_on_all_modules])
def test_what_is_switched_for_the_whole_process_is_seen_in_each_claim(breaks):
    with pytest.raises(AssertionError, match=r"undo left another .* than it found"):
        products(breaks).test_two_micro_batches_add_up()


def test_a_recipe_may_refuse_a_model_in_bfloat16_at_conversion():
    class Refuses(Broken):
        def convert(self, model, units):
            if next(model.parameters()).dtype == torch.bfloat16:
                raise ConfigError("dtype", torch.bfloat16, "weights are in float32.", "Convert the model.")
            return super().convert(model, units)

    with pytest.raises(SkipTest, match="refuses a model in bfloat16"):
        products(nothing, Refuses).test_a_model_in_bfloat16_trains_on_both_paths_or_is_refused()


def test_without_its_rounding_a_low_cost_path_is_held_to_be_finite_and_another():
    products(
        low_path_doubles_weight_gradients, low_rounding=None
    ).test_the_low_cost_path_changes_what_is_documented_and_nothing_else()


def test_a_recipe_without_costs_is_refused_by_a_guard():
    model = tiny_model(num_blocks=1)
    with pytest.raises(ConfigError, match=r"costs=None: a conversion has a .*PathCost for each unit"):
        attach(model, Broken(QuantizedGemm("e3m2", "bf16"), has_no_costs))
    QuantizedGemm().convert(model, find_units(model)).undo()  # which it could not be if it were converted still


def test_a_contract_without_a_recipe_says_so():
    with pytest.raises(NotImplementedError, match="def recipe"):
        RecipeContract().test_two_micro_batches_add_up()


def test_a_recovery_path_that_rounds_is_held_to_its_bound():
    def rounding(bound):
        return Contract(lambda: QuantizedGemm("e3m2", "fp8"), high_is_exact=False, high_rtol=bound)

    rounding(0.2).test_the_recovery_path_computes_what_the_plain_layers_do()
    with pytest.raises(AssertionError, match=r"further from that of the plain layer than high_rtol=0\.01 "):
        rounding(0.01).test_the_recovery_path_computes_what_the_plain_layers_do()
