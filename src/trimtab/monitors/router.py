"""Routers of mixtures of experts: whether they still tell tokens apart, and whether their experts are used.

A hook on each router adds up, on the device, what a step's micro-batches show; nothing is kept of single tokens.
L: routers, E: experts, T: tokens.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trimtab.errors import ConfigError, TrimtabWarning
from trimtab.monitors.alarms import AlarmRule
from trimtab.monitors.detectors import AnyOf, Floor, PeakDrop
from trimtab.monitors.protocol import BaseMonitor
from trimtab.monitors.routing import (
    Scores,
    busiest_share,
    load_entropy,
    load_of,
    low_percentile,
    max_logit,
    router_conditioning,
    router_similarity,
    routing_entropy,
    unused_experts,
)
from trimtab.precision.convertible import is_dtensor
from trimtab.precision.grouping import block_of
from trimtab.precision.linear_conversion import in_backward
from trimtab.precision.units import describe_filter, is_linear, named_modules, num_experts

__all__ = ["Router", "layer_places"]

_ROUTER = re.compile(r"router|gate$", re.IGNORECASE)
# What implementations call the number of experts that a token is sent to.
_TOP_K = ("top_k", "num_experts_per_tok", "num_experts_per_token", "moe_top_k")
# Weights are stacked up to so many elements at a time, so that a model of many large routers needs no copy of them all.
_MOST_STACKED = 2**24
_OF_LOGITS = ("entropy_mean", "entropy_p5", "max_logit")
_OF_LOAD = ("load_entropy", "busiest_share", "unused_experts")
_OF_WEIGHT = ("similarity", "conditioning")


class Router(BaseMonitor):
    """Watches every router of a mixture of experts.

    Reported for each router, over the tokens of all micro-batches of a step on this rank:

    - ``entropy_mean``, ``entropy_p5``: the mean of the tokens' routing entropies and their 5th percentile, in units of
      log E (see ``routing_entropy``). Over several micro-batches the percentile is the mean of theirs; of more than
      4,096 tokens some are looked at, spread over all.
    - ``similarity``, ``conditioning`` of the weight, as the step's forward used it.
    - ``load_entropy``, ``busiest_share``, ``unused_experts``, ``max_logit``: what follows from the choices, for
      comparison. Chosen are the experts that the router says, after any bias, noise or limit of groups.

    A router that has not run in a step has NaN; one that does not tell what it chose, nor how many it chooses, has NaN
    in what follows from its choices. Alarms: ``entropy_mean`` under 0.6 of its running peak, or under 0.5.

    Found without a filter: modules called a gate or a router that stand beside a module of experts and have a weight of
    as many rows, of their own or in a linear layer inside them. That is how Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE,
    DeepSeek-V3 and gpt-oss have them in transformers, and most others.

    A token counts unless the 2-D ``attention_mask`` that the model was called with says that it is padding; where the
    router sees other than the mask's number of tokens, all count. Only forwards in training mode count, and each once:
    not again where activation checkpointing repeats it.

    Compiled models: attach before the first forward. The hooks are compiled with the model, into the same graph. A part
    that is compiled on its own inside activation checkpointing is counted twice, which changes no share and no mean.

    Args:
        select: A filter ``f(module, fqn)`` that picks the routers, whatever they are called. Such a module returns
            logits of shape (..., E), or a tuple that holds them and, after them, the indices of the chosen experts;
            E is the number of rows of its weight. None finds them.
        every_steps: Optimizer steps from one reading to the next. Between readings the hooks do nothing, except in
            compiled code.
        scores: What the routers make of their logits, for the entropy. None: "sigmoid" where the code of a router's
            forward names the sigmoid and not the softmax, as that of DeepSeek-V3 does.

    Raises: ConfigError: when a setting cannot be meant; from ``start``, when a filter picks no module or one without a
        weight.

    Source: Huang et al. 2026; the constants of the alarms are ours.

    Example:
        >>> experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        >>> block = nn.ModuleDict({"gate": nn.Linear(4, 3), "experts": experts})
        >>> monitor = Router()
        >>> monitor.start(nn.ModuleDict({"layers": nn.ModuleList([block])}))
        >>> monitor.places("similarity")
        ['layer_0']
    """

    name = "router"
    mechanism = "router"
    alarm_rules: Mapping[str, AlarmRule] = {
        "entropy_mean": AlarmRule(
            # A router that learns to specialise lowers it by up to 31% in healthy runs (docs/experiments/healthy.md).
            AnyOf(PeakDrop(0.40), Floor(0.5)),
            "The routing entropy of {places} is down to {value:.2f} (reference {reference:.2f}): the router tells ever "
            "fewer experts apart from the rest.",
        )
    }

    def __init__(
        self,
        select: Callable[[nn.Module, str], bool] | None = None,
        every_steps: int = 1,
        *,
        scores: Scores | None = None,
    ) -> None:
        if select is not None and not callable(select):
            raise ConfigError("select", select, "it is a filter f(module, fqn).", "Leave it out to find the routers.")
        if not _is_count(every_steps):
            raise ConfigError("every_steps", every_steps, "it counts steps, 1 or more.", "Set an int of 1 or more.")
        if scores not in (None, "softmax", "sigmoid"):
            raise ConfigError("scores", scores, "it is 'softmax', 'sigmoid' or None.", "Leave it out to find it.")
        self._select = select
        self._every_steps = int(every_steps)
        self._scores = scores
        self._forward = _Forward()
        self._tallies: list[_Tally] = []
        self._places: list[str] = []
        self._handles: list[RemovableHandle] = []

    def start(self, model: nn.Module) -> None:
        """Find the routers and hook them; a model without any is said so once, and has no values."""
        self.stop()
        modules = {"": model} | named_modules(model)
        found = _find(modules, self._select)
        if not found:
            self._say_once(
                f"Router found no router in this {type(model).__name__}, and reports nothing. Where the model has "
                "routers under other names, pass a filter: Router(lambda module, fqn: ...)."
            )
        self._places = layer_places(list(found), modules)
        for name, module in found.items():
            holder = _weight_holder(module)
            assert holder is not None
            parent = modules.get(name.rpartition(".")[0])
            tally = _Tally(module, holder, parent, self._scores, self._forward)
            self._tallies.append(tally)
            if holder is module:
                self._handles.append(module.register_forward_hook(_RouterHook(tally)))
            else:
                self._handles.append(holder.register_forward_hook(_RouterHook(tally, choice=False)))
                self._handles.append(module.register_forward_hook(_RouterHook(tally, logits=False)))
        if found:
            hook = _MaskHook(self._forward, _position_of_mask(model))
            self._handles.append(model.register_forward_pre_hook(hook, with_kwargs=True))

    @torch.no_grad()
    def observe(self, step: int) -> dict[str, Tensor]:
        """The values of a step, each of shape (L,); empty between readings and where there is no router."""
        self._forward.mask = None
        self._forward.is_due = (step + 1) % self._every_steps == 0
        values: dict[str, Tensor] = {}
        if step % self._every_steps == 0 and self._tallies:
            values = _read(self._tallies)
        for tally in self._tallies:
            tally.clear()
        return values

    def drop(self, step: int) -> None:
        """Forget what the routers showed in a step that is skipped."""
        self._forward.mask = None
        for tally in self._tallies:
            tally.clear()

    def places(self, metric: str) -> Sequence[str]:
        """``layer_<i>`` for each router."""
        return list(self._places)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing is carried over; whether the next step is due is not known until it is observed."""
        self._forward.is_due = True
        for tally in self._tallies:
            tally.clear()

    def stop(self) -> None:
        """Take every hook away."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._tallies, self._places = [], [], []
        self._forward.mask = None

    def _say_once(self, text: str) -> None:
        if self.context is None:
            warnings.warn(text, TrimtabWarning, stacklevel=3)
        else:
            self.context.say_once(text)


def layer_places(names: Sequence[str], modules: Mapping[str, nn.Module]) -> list[str]:
    """``layer_<i>`` by the number of the block that holds each module, or their names where these would not differ.

    Args:
        names: Names of modules, without those of wrappers.
        modules: Every module of the model under such a name; the model itself under "".

    Example:
        >>> layer_places(["h.0.mlp.gate", "h.1.mlp.gate"], {})
        ['layer_0', 'layer_1']
    """
    blocks = [block_of(name, modules) for name in names]
    numbers = [block.rpartition(".")[2] for block in blocks if block is not None]
    return [f"layer_{number}" for number in numbers] if len(set(numbers)) == len(names) else list(names)


class _Forward:
    """What the hooks of one monitor know of the forward that is under way.

    Attributes:
        mask: Which tokens are no padding, shape (sequences, tokens); None = not known.
        is_due: Whether the step's values will be asked for.
    """

    def __init__(self) -> None:
        self.mask: Tensor | None = None
        self.is_due = True


class _Tally:
    """What one router has shown since it was last cleared, added up in tensors that stay the same ones.

    The same ones, as compiled code writes to them.

    Args:
        router: Tells what was chosen.
        holder: Owns the weight; its output begins with the logits.
        parent: What the router is part of, which may know how many experts are chosen.
        scores: See ``Router``.
        forward: The forward that is under way.
    """

    def __init__(
        self, router: nn.Module, holder: nn.Module, parent: nn.Module | None, scores: Scores | None, forward: _Forward
    ) -> None:
        self.holder = holder
        self.forward = forward
        weight: Any = holder.weight
        self.num_experts = int(weight.shape[0])
        self.scores: Scores = scores or _scores_of(router)
        self.top_k = next((k for owner in (router, parent) if (k := _top_k(owner)) is not None), None)
        self._begin_on(weight.device)

    @torch.no_grad()
    def add_logits(self, output: Any) -> None:
        """Take the logits of a forward into account."""
        logits = _logits_in(output, self.num_experts)
        if logits is None or not logits.numel():
            return
        logits = logits.detach().reshape(-1, self.num_experts)
        self._follow(logits.device)
        valid = self._valid(logits)
        entropy = routing_entropy(logits, self.scores).to(torch.float32)
        percentile = low_percentile(entropy, valid)
        if valid is None:
            count = torch.full_like(percentile, len(logits))
            sums = torch.stack([entropy.sum(), count, percentile, torch.ones_like(percentile)])
        else:
            count = valid.sum().to(torch.float32)
            # A micro-batch of padding alone has no percentile.
            any_valid = count > 0
            total = torch.where(valid, entropy, 0.0).sum()
            sums = torch.stack([total, count, torch.where(any_valid, percentile, 0.0), any_valid.to(torch.float32)])
        self.sums.add_(sums.to(self.sums.device))
        peak = max_logit(logits, valid).to(self.peak.device, torch.float32)
        self.peak.copy_(torch.maximum(self.peak, peak))

    @torch.no_grad()
    def add_choice(self, output: Any) -> None:
        """Take the choices of a forward into account."""
        chosen = _chosen_in(output, self.num_experts, self.top_k)
        if chosen is not None and chosen.numel():
            chosen = chosen.detach().reshape(-1, chosen.shape[-1])
            self._follow(chosen.device)
            self.load.add_(load_of(chosen, self.num_experts, self._valid(chosen)).to(self.load.device))

    def clear(self) -> None:
        """Begin anew."""
        self.sums.zero_()
        self.peak.fill_(-torch.inf)
        self.load.zero_()

    def _begin_on(self, device: torch.device) -> None:
        # Sum of entropies, tokens, sum of percentiles, micro-batches.
        self.sums = torch.zeros(4, device=device)
        self.peak = torch.full((), -torch.inf, device=device)
        self.load = torch.zeros(self.num_experts, dtype=torch.int64, device=device)

    def _follow(self, device: torch.device) -> None:
        """Move to where the model has gone since: adding up on the host would wait for each forward."""
        if self.sums.device.type in ("cpu", "meta") and device.type != self.sums.device.type:
            self._begin_on(device)

    def _valid(self, rows: Tensor) -> Tensor | None:
        """Which of a router's tokens are no padding. Shape (T,)."""
        mask = self.forward.mask
        if mask is None or mask.numel() != rows.shape[0]:
            return None
        return mask.reshape(-1).to(rows.device) != 0


class _RouterHook:
    """Shows a tally what a router puts out; a copy of the model inherits an inert one."""

    def __init__(self, tally: _Tally | None, *, logits: bool = True, choice: bool = True) -> None:
        self.tally = tally
        self.logits = logits
        self.choice = choice

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note the forward, if it is one of training and no recomputation."""
        tally = self.tally
        if tally is None or not module.training:
            return
        # Compiled code cannot ask either, and would be compiled anew whenever the answer changed.
        if not torch.compiler.is_compiling() and (in_backward() or not tally.forward.is_due):
            return
        if self.logits:
            tally.add_logits(output)
        if self.choice:
            tally.add_choice(output)

    def __deepcopy__(self, memo: dict[int, Any]) -> _RouterHook:
        return _RouterHook(None)

    def __reduce__(self) -> tuple[type[_RouterHook], tuple[None]]:
        return _RouterHook, (None,)


class _MaskHook:
    """Notes the attention mask that the model is called with; a copy of the model inherits an inert one.

    Args:
        forward: Where it goes; None notes nothing.
        position: Its place among the positional arguments, if it has one.
    """

    def __init__(self, forward: _Forward | None, position: int | None = None) -> None:
        self.forward = forward
        self.position = position

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the mask of a forward; a recomputed one has the same."""
        if self.forward is None:
            return
        mask = kwargs.get("attention_mask")
        # No operator here: a compiled model would compile this hook into a graph of its own.
        if mask is None and self.position is not None and self.position < len(args):
            mask = args[self.position]
        self.forward.mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None

    def __deepcopy__(self, memo: dict[int, Any]) -> _MaskHook:
        return _MaskHook(None)

    def __reduce__(self) -> tuple[type[_MaskHook], tuple[None]]:
        return _MaskHook, (None,)


def _is_count(given: object) -> bool:
    return isinstance(given, Integral) and not isinstance(given, bool) and int(given) >= 1


def _find(modules: Mapping[str, nn.Module], select: Callable[[nn.Module, str], bool] | None) -> dict[str, nn.Module]:
    """The routers among ``modules``, by name.

    Raises: ConfigError: when a filter picks none, or one without a weight.
    """
    if select is None:
        return {name: module for name, module in modules.items() if name and _is_router(name, module, modules)}
    found = {name: module for name, module in modules.items() if select(module, name)}
    if not found:
        linear = [name for name, module in modules.items() if is_linear(module)]
        raise ConfigError(
            "select",
            describe_filter(select),
            "the filter matches no module.",
            f"The model's linear layers have names such as {', '.join(linear[:3]) or 'none'}.",
        )
    if without := [name for name, module in found.items() if _weight_holder(module) is None]:
        raise ConfigError(
            "select",
            without[0],
            "a router has a weight with a row an expert, of its own or in the one linear layer inside it.",
            "Pick the module that does.",
        )
    return found


def _is_router(name: str, module: nn.Module, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a module is called a router, and has a row for each of the experts beside it."""
    prefix, _, last = name.rpartition(".")
    if not _ROUTER.search(last) and not _ROUTER.search(type(module).__name__):
        return False
    holder, parent = _weight_holder(module), modules.get(prefix)
    if holder is None or parent is None:
        return False
    weight: Any = holder.weight
    beside = [child for child in parent.children() if child is not module]
    # More rows than experts: some models have experts that compute nothing, and so have no weights.
    return any(2 <= count <= len(weight) for child in beside if (count := _count_experts(child)) is not None)


def _count_experts(module: nn.Module) -> int | None:
    """How many experts a module holds: in stacked weights, or as a list of modules."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return len(module)
    return num_experts(module)


def _weight_holder(module: nn.Module) -> nn.Module | None:
    """The module that owns the router's weight: itself, or the one linear layer inside it."""
    if isinstance(own := getattr(module, "weight", None), nn.Parameter):
        return module if own.dim() == 2 else None
    linear = [m for m in module.modules() if is_linear(m)]
    return linear[0] if len(linear) == 1 else None


def _scores_of(router: nn.Module) -> Scores:
    # No attribute tells it in all implementations, and the values would have to be waited for.
    code = getattr(inspect.unwrap(type(router).forward), "__code__", None)
    names = getattr(code, "co_names", ())
    return "sigmoid" if "sigmoid" in names and "softmax" not in names else "softmax"


def _top_k(module: nn.Module | None) -> int | None:
    values = (getattr(module, name, None) for name in _TOP_K)
    return next((int(v) for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)


def _position_of_mask(model: nn.Module) -> int | None:
    try:
        parameters = list(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        return None
    return parameters.index("attention_mask") if "attention_mask" in parameters else None


def _tensors_in(output: Any) -> list[Tensor]:
    outputs = output if isinstance(output, (tuple, list)) else [output]
    return [o for o in outputs if isinstance(o, Tensor) and o.dim() >= 1]


def _logits_in(output: Any, num_experts: int) -> Tensor | None:
    """The logits among a router's outputs.

    Of several tensors with an entry an expert, they are the first where indices are told as well (logits, weights,
    indices), and else the last: without indices, what comes before them are the scores of all experts, 0 where not
    chosen.
    """
    tensors = _tensors_in(output)
    fitting = [t for t in tensors if t.is_floating_point() and t.shape[-1] == num_experts]
    if not fitting:
        return None
    return fitting[0] if any(_is_integer(t) for t in tensors) else fitting[-1]


def _chosen_in(output: Any, num_experts: int, top_k: int | None) -> Tensor | None:
    """The indices of the chosen experts among a router's outputs, or else of its ``top_k`` greatest logits."""
    integers = [t for t in _tensors_in(output) if _is_integer(t)]
    for t in integers:
        # An entry an expert is a mask, unless all are chosen.
        if t.dim() >= 2 and (t.shape[-1] < num_experts or t.shape[-1] == top_k):
            return t
    logits = _logits_in(output, num_experts)
    if integers or logits is None or top_k is None or top_k > num_experts:
        return None
    return logits.detach().topk(top_k, dim=-1).indices


def _is_integer(t: Tensor) -> bool:
    return not t.is_floating_point() and not t.is_complex() and t.dtype != torch.bool


def _read(tallies: Sequence[_Tally]) -> dict[str, Tensor]:
    """What all tallies and weights say. Each of shape (L,), on the first one's device."""
    device = tallies[0].sums.device
    sums = torch.stack([t.sums.to(device) for t in tallies])
    peaks = torch.stack([t.peak.to(device) for t in tallies])
    # Without tokens, 0 / 0 says that there is nothing to say.
    has_run = sums[:, 1] > 0
    of_logits = (sums[:, 0] / sums[:, 1], sums[:, 2] / sums[:, 3], torch.where(has_run, peaks, torch.nan))
    loads = [t.load.to(device) for t in tallies]
    of_load = _batched(loads, (load_entropy, busiest_share, unused_experts), len(loads))
    weights = [_weight_of(t.holder, t.num_experts, device) for t in tallies]
    size = max(w.numel() for w in weights)
    of_weight = _batched(weights, (router_similarity, router_conditioning), max(1, _MOST_STACKED // size))
    columns = (*of_logits, *of_load, *of_weight)
    return dict(zip((*_OF_LOGITS, *_OF_LOAD, *_OF_WEIGHT), columns, strict=True))


def _batched(tensors: Sequence[Tensor], functions: Sequence[Callable[[Tensor], Tensor]], most: int) -> list[Tensor]:
    """Each function of each tensor, computed over stacks of up to ``most`` tensors of one shape and dtype."""
    of_kind: dict[Any, list[int]] = {}
    for i, t in enumerate(tensors):
        of_kind.setdefault((t.shape, t.dtype), []).append(i)
    stacks = [kind[i : i + most] for kind in of_kind.values() for i in range(0, len(kind), most)]
    found = []
    for stack in stacks:
        stacked = torch.stack([tensors[i] for i in stack])
        found.append(torch.stack([f(stacked).to(torch.float32) for f in functions]))
    order = [i for stack in stacks for i in stack]
    joined = torch.cat(found, 1)
    if order != sorted(order):
        back = torch.tensor(sorted(range(len(order)), key=order.__getitem__)).to(joined.device, non_blocking=True)
        joined = joined.index_select(1, back)
    return list(joined)


def _weight_of(holder: nn.Module, rows: int, device: torch.device) -> Tensor:
    """A router's whole weight; NaN where a wrapper has it elsewhere outside of forwards."""
    weight: Any = holder.weight
    weight = weight.detach()
    if is_dtensor(weight):
        weight = weight.full_tensor()
    if weight.dim() != 2 or weight.shape[0] != rows:
        return torch.full((rows, 1), torch.nan, device=device)
    return weight.to(device)
