"""``trimtab plan``: what a run would take, from the shapes of its model alone."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn

from trimtab.control import preset, theory
from trimtab.errors import MissingExtraError
from trimtab.experiments.plan_settings import PlanSettings
from trimtab.experiments.recipes import RECIPES, make_recipe
from trimtab.experiments.record_size import record_bytes
from trimtab.experiments.shape_run import (
    ShapeRunError,
    experts_per_token,
    make_shapes,
    saved_bytes_of_shapes,
    without_experts,
)
from trimtab.precision import Conversion, Grouping, SavedActivations, Unit, find_units, operators_of
from trimtab.precision.linear_conversion import input_size
from trimtab.precision.quantized_experts import expert_weights
from trimtab.precision.units import is_linear, num_experts

__all__ = ["Plan", "make_plan", "run_plan"]

_STEPS = 1000  # those of trimtab train, where no preset says how many


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a run would take on one device, where nothing is sharded."""

    model: str
    """As it was named."""
    about: str
    """What the preset is; empty where none is."""
    recipe: str
    """The recipe."""
    policy: str
    """The policy preset."""
    unit: str
    """How much is one unit."""
    num_units: int
    """Watched units."""
    num_recoverable: int
    """Units that the recipe can switch."""
    max_active: int
    """The budget, in units."""
    num_parameters: int
    """Elements of all parameters, each once."""
    num_trainable: int
    """Those that are trained."""
    dtype: str
    """What the model is trained in; adapters are in float32, as peft makes them."""
    tokens_at_once: int
    """Tokens of a micro-batch, for which bytes are kept."""
    tokens_per_step: int
    """Tokens of an optimizer step, all micro-batches together."""
    plain_saved_bytes: int | None
    """What the units keep for backward without the recipe. None: it cannot be told from shapes."""
    low_saved_bytes: int
    """The same with all units on the low-cost path."""
    high_saved_bytes: int
    """The same with all units on the recovery path."""
    saved_counted: str
    """How these three were counted."""
    memory_bound_bytes: float
    """What recovery adds at most where each unit has a copy of its own (Kong et al. 2026, appendix D)."""
    shared_bound_bytes: float
    """The same where units share copies: one that recovers alone adds a whole second copy. Ours."""
    unit_flops: float
    """FLOPs of the units' products in a step."""
    recovery_flops: float
    """FLOPs of a step that run on the recovery path, at most."""
    flops_counted: str
    """What these two count."""
    record_bytes_per_1000_steps: int
    """By how much the run record grows, without events and monitors' readings."""
    steps: int | None
    """Optimizer steps of the preset."""
    high_fidelity_steps: int
    """Steps at the start in which every unit is on the recovery path, whatever the budget."""


def run_plan(settings: PlanSettings) -> Plan:
    """Make the plan and print it, as a table or as JSON."""
    plan = make_plan(settings)
    if settings.json:
        print(json.dumps(dataclasses.asdict(plan), indent=1))
        return plan
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in _facts(plan):
        table.add_row(name, escape(value))
    Console().print(table)
    return plan


def make_plan(settings: PlanSettings) -> Plan:
    """What a run would take.

    Args:
        settings: The run.

    Raises:
        ConfigError: when the config is none of a causal LM, the recipe can convert no unit of it, or the budget cannot
            be meant.
        MissingExtraError: when transformers, peft or the recipe's package is not installed.
    """
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise MissingExtraError("trimtab plan", "transformers", "hf") from None
    named = settings.preset
    policy = preset(settings.policy_name, total_steps=_STEPS if named is None else named.steps)
    if settings.max_active is not None:
        policy = dataclasses.replace(policy, max_active=settings.max_active)
    recipe = make_recipe(settings.recipe_name, **settings.recipe_settings)
    model: Any = make_shapes(
        Path(settings.model) if named is None else named.config,
        getattr(torch, settings.dtype),
        lora_rank=settings.adapter_rank,
        lora_alpha=settings.adapter_alpha,
    )
    unit: Grouping = getattr(recipe, "unit", "projection")
    units = find_units(model, grouping=unit)
    conversion = None if recipe is None else recipe.convert(model, units)
    switched = units if conversion is None else conversion.units
    tokens = (settings.num_sequences, settings.num_tokens)
    at_once = tokens[0] * tokens[1]
    per_step = at_once * settings.num_micro_batches
    budget = 0 if conversion is None else policy.budget(len(switched))
    share = _shares_of_tokens(switched, experts_per_token(model))
    bounds = _bounds(model, conversion, recipe, share, at_once, budget)
    flops = [] if conversion is None else [c.flops * s * per_step for c, s in zip(conversion.costs, share, strict=True)]
    differs = RECIPES[settings.recipe_name].changes_output
    # Counted now, for the runs below leave the model without its experts, and without the recipe.
    parameters = list({id(p): p for p in model.parameters()}.values())
    plain, low, high, counted = _saved(model, conversion, switched, share, tokens)
    return Plan(
        model=settings.model,
        about="" if named is None else named.about,
        recipe=settings.recipe_name,
        policy=settings.policy_name,
        unit=unit,
        num_units=len(units),
        num_recoverable=0 if conversion is None else len(switched),
        max_active=budget,
        num_parameters=sum(p.numel() for p in parameters),
        num_trainable=sum(p.numel() for p in parameters if p.requires_grad),
        dtype=settings.dtype,
        tokens_at_once=at_once,
        tokens_per_step=per_step,
        plain_saved_bytes=plain,
        low_saved_bytes=low,
        high_saved_bytes=high,
        saved_counted=counted,
        memory_bound_bytes=bounds[0],
        shared_bound_bytes=bounds[1],
        unit_flops=sum(flops),
        recovery_flops=sum(_largest(flops, budget)) if differs else 0.0,
        flops_counted=_flops_counted(settings.recipe_name),
        record_bytes_per_1000_steps=round(record_bytes(len(units), 1000)),
        steps=None if named is None else named.steps,
        high_fidelity_steps=0 if named is None else named.high_fidelity_steps,
    )


def _saved(
    model: nn.Module,
    conversion: Conversion | None,
    units: Sequence[Unit],
    share: Sequence[float],
    tokens: tuple[int, int],
) -> tuple[int | None, int, int, str]:
    """Bytes kept without the recipe, on the low-cost and on the recovery path, and how they were counted."""
    costs = [] if conversion is None else conversion.costs
    at_once = tokens[0] * tokens[1]
    low, high = (
        [c * s * at_once for c, s in zip(of_path, share, strict=False)]
        for of_path in ([c.low_saved_bytes for c in costs], [c.high_saved_bytes for c in costs])
    )
    is_expert = [unit.expert is not None for unit in units]
    experts = [sum(b for b, e in zip(path, is_expert, strict=False) if e) for path in (low, high)]
    without_experts(model)
    try:
        runs = []
        # A frozen layer keeps nothing on either path, and so runs as it is.
        if conversion is not None and any(low + high):
            for flag in (False, True):
                runs.append(saved_bytes_of_shapes(model, units, tokens, conversion, [flag] * len(units)))
        if conversion is not None:
            conversion.undo()
        plain = saved_bytes_of_shapes(model, units, tokens)
    except ShapeRunError as error:
        counted = f"each unit by itself, for this model does not run on shapes alone ({error})"
        return None, round(sum(low)), round(sum(high)), counted
    counted = "in a run on shapes alone, a copy that several units share once"
    if not any(is_expert):
        return plain, *(round(b) for b in runs or (plain, plain)), counted  # type: ignore[return-value]
    on_low, on_high = (round(b + e) for b, e in zip(runs or (plain, plain), experts, strict=True))
    return None, on_low, on_high, f"{counted}; experts as if tokens went to all of them alike"


def _bounds(
    model: nn.Module, conversion: Conversion | None, recipe: Any, share: Sequence[float], at_once: int, budget: int
) -> tuple[float, float]:
    """What recovery adds at most: where each unit has a copy of its own, and where they share them."""
    if conversion is None:
        return 0.0, 0.0
    added = [
        max(0.0, c.high_saved_bytes - c.low_saved_bytes) * s * at_once
        for c, s in zip(conversion.costs, share, strict=True)
    ]
    if not isinstance(recipe, SavedActivations):
        return theory.memory_bound(added, 0, 8, budget), sum(_largest(added, budget))
    own_bits = 8 * next(model.parameters()).element_size()
    low_bits, high_bits = (own_bits if bits == 16 else bits for bits in (recipe.low_bits, recipe.high_bits))
    elements = [_elements(model, unit) * at_once for unit in conversion.units]
    # In larger units, all that read a tensor switch together.
    if recipe.unit in ("projection", "expert") and recipe.high_bits > recipe.low_bits:
        added = [c.high_saved_bytes * at_once for c in conversion.costs]
    return theory.memory_bound(elements, low_bits, high_bits, budget), sum(_largest(added, budget))


def _elements(model: nn.Module, unit: Unit) -> int:
    """Activation elements that a unit keeps, a token."""
    total = 0
    for layer in operators_of(model, unit):
        if is_linear(layer):
            total += input_size(layer)
        elif num_experts(layer) is not None:
            total += sum(weight.shape[-1] for weight in expert_weights(layer))
    return total


def _shares_of_tokens(units: Sequence[Unit], per_token: int) -> list[float]:
    """The share of all tokens that go through each unit, if they went to all experts alike."""
    counts = [None if unit.expert is None else num_experts(unit.modules[0]) for unit in units]
    return [1.0 if count is None else per_token / count for count in counts]


def _largest(values: Sequence[float], count: int) -> list[float]:
    return sorted(values, reverse=True)[:count]


def _flops_counted(recipe: str) -> str:
    if recipe == "none":
        return "nothing: without a recipe there are no paths"
    what = "forward and input gradient" if RECIPES[recipe].needs_adapters else "forward and both gradients"
    if not RECIPES[recipe].changes_output:
        return f"products ({what}), which are the same on both paths; packing copies is not counted"
    return f"products ({what}) of the largest units that the budget allows; quantizing is not counted"


def _facts(plan: Plan) -> list[tuple[str, str]]:
    recovered = f"{plan.num_recoverable} recoverable, at most {plan.max_active} at once"
    facts = [
        ("model", plan.model + (f": {plan.about}" if plan.about else "")),
        ("recipe", f"{plan.recipe}, policy {plan.policy}"),
        ("units", f"{plan.num_units} of the kind {plan.unit}, {recovered}"),
        ("parameters", f"{plan.num_parameters:,}, {plan.num_trainable:,} of them trained"),
        ("tokens", f"{plan.tokens_at_once:,} at once in {plan.dtype}, {plan.tokens_per_step:,} a step"),
    ]
    if plan.plain_saved_bytes is not None:
        facts.append(("saved, plain", _bytes(plan.plain_saved_bytes)))
    if plan.num_recoverable:
        share = f", {plan.low_saved_bytes / plan.plain_saved_bytes:.0%} of plain" if plan.plain_saved_bytes else ""
        facts += [
            ("saved, low-cost", f"{_bytes(plan.low_saved_bytes)}{share}"),
            ("saved, recovery", _bytes(plan.high_saved_bytes)),
            ("counted", plan.saved_counted),
            ("recovery adds", f"at most {_bytes(plan.memory_bound_bytes)} where each unit has a copy of its own"),
        ]
        if plan.shared_bound_bytes > plan.memory_bound_bytes:
            facts.append(("", f"at most {_bytes(plan.shared_bound_bytes)} where units share copies, as here"))
        facts += [
            ("FLOPs a step", f"{plan.unit_flops:.3g} of the units, {plan.recovery_flops:.3g} of them recovered"),
            ("counted", plan.flops_counted),
        ]
    facts.append(("record", f"{_bytes(plan.record_bytes_per_1000_steps)} per 1,000 steps"))
    if plan.steps is not None:
        warm_up = f", the first {plan.high_fidelity_steps:,} on the recovery path" if plan.high_fidelity_steps else ""
        facts.append(("length", f"{plan.steps:,} steps{warm_up}"))
    return facts


def _bytes(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} bytes"
