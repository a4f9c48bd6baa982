"""How evenly updates spread over the directions of each attention head: the spectrum of what they do to its logits.

L: layers, H: query heads.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from numbers import Integral
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trimtab.errors import ConfigError, TrimtabWarning, nearest_names
from trimtab.monitors.alarms import AlarmRule
from trimtab.monitors.detectors import PeakDrop
from trimtab.monitors.layouts import HeadLayout, find_head_layouts, layer_names, plain
from trimtab.monitors.protocol import BaseMonitor
from trimtab.monitors.spectrum import effective_rank, frobenius_norm, qk_increment, spectral_entropy, stable_rank
from trimtab.precision.units import clean_fqn

__all__ = ["AttentionSpectrum", "SpectrumMetric"]

SpectrumMetric = Literal["entropy", "norm", "stable_rank", "effective_rank"]
"""What is said of a spectrum; see the functions of ``trimtab.monitors.spectrum``."""

_METRICS: dict[SpectrumMetric, Callable[[Tensor], Tensor]] = {
    "entropy": spectral_entropy,
    "norm": frobenius_norm,
    "stable_rank": stable_rank,
    "effective_rank": effective_rank,
}
_SIDES = ("query", "key")
_OF_LAYERS = ("dwq", "dwk")
_Weights = tuple[Tensor, Tensor]
# Weights are decomposed so many elements at a time, or one layer at a time where it has more: the working copies of few
# layers, however many the model has.
_MOST_AT_ONCE = 2**24


class AttentionSpectrum(BaseMonitor):
    """Watches what a window of updates does to the query-key product of each head.

    ``observe(s)`` sees the weights before update s. The first one keeps a copy of them, and ``every_steps`` steps later
    the next one compares: its values are of exactly the updates s - every_steps, ..., s - 1. Then its copy is the older
    one. All other steps have no values.

    Reported for each head of D1, D2, D3, dWq and dWk (see ``trimtab.monitors.spectrum``), as ``d2_entropy`` and so on,
    of shape (L, H), or flat where layers have different numbers of heads: the spectral entropy, the Frobenius norm, the
    stable rank and the effective rank. Query heads that share a key head have the same dWk. Of each layer
    ``dwq_layer_entropy`` and ``dwk_layer_entropy``, the mean over its heads. An update that is zero has the norm 0 and
    NaN for the rest, weights that are not finite have NaN for all.

    Alarms: ``d2_entropy`` of a head under 0.7 of its running peak, a layer's ``dwq_layer_entropy`` or
    ``dwk_layer_entropy`` under 0.8 of it.

    Which models are known is what ``find_head_layouts`` says; attention that is not known is named once and left out.
    So are layers with nothing to train, unless all are such or ``layers`` names them.

    Weights of 16 bits move in steps that are larger than most updates, and their spectra are wrong (an entropy by up to
    0.6, as measured): the float32 master weights are read instead, where the optimizer has them (Transformer Engine's
    and Apex's FusedAdam, Megatron-LM) or ``master_weights`` gives them. If there are none, that is said once.

    Costs: between readings 4 bytes x (query heads + key heads) x d_head x d_model a layer, as much as the float32
    weights of its two projections. Of latent attention it is the product of the low-rank factors, a multiple of them.
    Sharded weights are gathered for each reading, one layer after the other, and every rank computes all spectra, so
    every rank has to observe the same steps. A reading waits for the device, as torch's decompositions do.

    It draws no random numbers and leaves the model, its gradients and its graph alone.

    Args:
        every_steps: Optimizer steps between readings, and so the window. >= 1.
        layers: How many layers to look at, evenly spaced, or the names of their attention modules or of modules that
            hold these; None = all.
        snapshots_on: Where the copies wait: "cpu" frees the device's memory, and pays for the way there and back.
        metrics: Which of the metrics are reported; alarms need "entropy".
        master_weights: Gives the float32 weight behind a parameter of 16 bits, or None; of the parameter's shape, or
            sharded as it is. With DeepSpeed: ``deepspeed.utils.safe_get_full_fp32_param``.
        layouts: Gives the layout of an attention of your own, ``layouts(module, fqn)``; see ``find_head_layouts``.

    Raises: ConfigError: when a setting cannot be meant; from ``start``, when ``layers`` names a module that does not
        exist or holds no attention that is known.

    Source: Huang et al. 2026, Mechanism-Driven Monitors; the constants of the alarms are ours.

    Example:
        >>> attention = nn.MultiheadAttention(16, 4)
        >>> monitor = AttentionSpectrum(every_steps=1)
        >>> monitor.start(attention)
        >>> monitor.observe(1)
        {}
        >>> _ = attention.in_proj_weight.data.add_(0.01)  # the same for all: an update of rank 1
        >>> round(float(monitor.observe(2)["dwq_entropy"].max()), 3)
        0.0
    """

    name = "attention_spectrum"
    mechanism = "attention"

    def __init__(
        self,
        every_steps: int = 50,
        layers: int | Sequence[str] | None = None,
        snapshots_on: Literal["device", "cpu"] = "device",
        *,
        metrics: Sequence[SpectrumMetric] = get_args(SpectrumMetric),
        master_weights: Callable[[nn.Parameter], Tensor | None] | None = None,
        layouts: Callable[[nn.Module, str], HeadLayout | None] | None = None,
    ) -> None:
        if not _is_count(every_steps):
            raise ConfigError("every_steps", every_steps, "it counts steps, 1 or more.", "Set an int of 1 or more.")
        if snapshots_on not in ("device", "cpu"):
            raise ConfigError("snapshots_on", snapshots_on, "it is 'device' or 'cpu'.", "Set one of them.")
        if isinstance(metrics, str) or not metrics or not set(metrics) <= _METRICS.keys():
            raise ConfigError("metrics", metrics, f"it lists some of {', '.join(_METRICS)}.", "Leave it out for all.")
        for setting, given in (("master_weights", master_weights), ("layouts", layouts)):
            if given is not None and not callable(given):
                raise ConfigError(setting, given, "it is a function.", "Leave it out, or pass a function.")
        self._every_steps = int(every_steps)
        self._layers = _checked_layers(layers)
        self._snapshots_on = snapshots_on
        self._metrics = tuple(name for name in _METRICS if name in metrics)
        self._master_weights = master_weights
        self._own_layouts = layouts
        self._layouts: list[HeadLayout] = []
        self._layer_names: list[str] = []
        # By name of the attention module. The step is that of the observation which took them; None: there are none.
        self._snapshots: dict[str, tuple[Tensor, Tensor]] = {}
        self._step: int | None = None
        self._loaded_step: int | None = None
        self._are_rounded: dict[str, bool] = {}
        self.alarm_rules = _alarm_rules() if "entropy" in self._metrics else {}

    def start(self, model: nn.Module) -> None:
        """Find the heads; a model in which none is known is said so once, and has no values."""
        self.stop()
        found = find_head_layouts(model, self._own_layouts)
        if found.skipped:
            self._say_once(_about_skipped(found.skipped, len(found.known)))
        elif not found.known:
            self._say_once(f"AttentionSpectrum found no attention in this {type(model).__name__}, and reports nothing.")
        names = dict(zip((layout.name for layout in found.known), layer_names(found.known, model), strict=True))
        self._layouts = _chosen(found.known, found.skipped, self._layers)
        self._layer_names = [names[layout.name] for layout in self._layouts]

    @torch.no_grad()
    def observe(self, step: int) -> dict[str, Tensor]:
        """The values of the window that ends before update ``step``; empty where none ends."""
        if not self._layouts or (self._step is not None and self._step <= step < self._step + self._every_steps):
            return {}
        # A window of another length, as after a jump to another step, says something else.
        ends = self._step is not None and step == self._step + self._every_steps
        with ExitStack() as stack:
            for kind in {p.device.type for layout in self._layouts for p in layout.parameters()}:
                # guard.step may be called where autocast would multiply in 16 bits.
                stack.enter_context(torch.autocast(kind, enabled=False))
            spectra = self._read(ends)
        self._step = step
        return self._values(spectra) if ends else {}

    def _read(self, ends: bool) -> list[dict[str, Tensor]]:
        """Take new snapshots, layer by layer; if a window ends, the singular values over it. Each of shape (H, N)."""
        reader = _Reader(self._optimizers, self._master_weights)
        spectra: list[dict[str, Tensor]] = [{} for _ in self._layouts]
        waiting: dict[Any, list[tuple[int, _Weights, _Weights]]] = {}
        for i, layout in enumerate(self._layouts):
            reader.has_rounded = False
            # Copies: what is read of a float32 parameter is the parameter.
            wq, wk = (w.clone(memory_format=torch.contiguous_format) for w in layout.query_key(reader))
            if ends:
                old = self._snapshots[layout.name]
                if self._are_rounded[layout.name] != reader.has_rounded or old[0].shape != wq.shape:
                    # Nothing to compare with: master weights came or went, or a checkpoint was of another model.
                    old = (torch.full_like(wq, torch.nan), torch.full_like(wk, torch.nan))
                old = (old[0].to(wq), old[1].to(wk))
                key = (wq.shape, wk.shape, wq.dtype, wq.device)
                same = waiting.setdefault(key, [])
                same.append((i, old, (wq, wk)))
                if (len(same) + 1) * 2 * (wq.numel() + wk.numel()) > _MOST_AT_ONCE:
                    _decompose(waiting.pop(key), spectra)
            self._snapshots[layout.name] = (wq.cpu(), wk.cpu()) if self._snapshots_on == "cpu" else (wq, wk)
            self._are_rounded[layout.name] = reader.has_rounded
        for same in waiting.values():
            _decompose(same, spectra)
        if ends and any(self._are_rounded.values()):
            self._say_once(_ABOUT_ROUNDED)
        return spectra

    def _values(self, spectra: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The metrics of the spectra of all layers."""
        values: dict[str, Tensor] = {}
        for metric in self._metrics:
            for name in spectra[0]:
                # Layers may be spread over devices.
                device = spectra[0][name].device
                of_layers = [_METRICS[metric](layer[name]).to(device, torch.float32) for layer in spectra]
                is_even = len({len(of_heads) for of_heads in of_layers}) == 1
                values[f"{name}_{metric}"] = torch.stack(of_layers) if is_even else torch.cat(of_layers)
                if metric == "entropy" and name in _OF_LAYERS:
                    values[f"{name}_layer_entropy"] = torch.stack([of_heads.nanmean() for of_heads in of_layers])
        return values

    def places(self, metric: str) -> Sequence[str]:
        """``layer_<i>/head_<h>``, or ``layer_<i>`` of what a layer has one of; a module's name where numbers repeat."""
        if metric in {f"{name}_layer_entropy" for name in _OF_LAYERS}:
            return list(self._layer_names)
        layers = zip(self._layer_names, self._layouts, strict=True)
        return [f"{name}/head_{h}" for name, layout in layers for h in range(layout.num_heads)]

    def state_dict(self) -> dict[str, Any]:
        """At which step the snapshots were taken, and whether of rounded weights."""
        return {"step": self._step, "rounded": sorted(name for name, rounded in self._are_rounded.items() if rounded)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin a window afresh, unless ``load_tensor_state`` brings the snapshots of the one that was saved."""
        self._loaded_step = state["step"]
        rounded = set(state["rounded"])
        self._are_rounded = {layout.name: layout.name in rounded for layout in self._layouts}
        self._step, self._snapshots = None, {}

    def tensor_state(self) -> dict[str, Tensor]:
        """The snapshots, ``<attention module>.query`` and ``<attention module>.key``."""
        pairs = self._snapshots.items()
        return {f"{name}.{side}": w for name, pair in pairs for side, w in zip(_SIDES, pair, strict=True)}

    def load_tensor_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on with the window that was saved; with other layers than then, begin afresh."""
        wanted = [layout.name for layout in self._layouts]
        if self._loaded_step is None or any(f"{name}.{side}" not in state for name in wanted for side in _SIDES):
            return
        self._snapshots = {name: (state[f"{name}.query"], state[f"{name}.key"]) for name in wanted}
        self._step, self._loaded_step = self._loaded_step, None

    def stop(self) -> None:
        """Let go of the model and of the snapshots."""
        self._layouts, self._layer_names = [], []
        self._snapshots, self._are_rounded = {}, {}
        self._step = self._loaded_step = None

    def _optimizers(self) -> list[Optimizer]:
        """The model's optimizers, if they can be told."""
        try:
            return [] if self.context is None else self.context.optimizers()
        except ConfigError:
            return []

    def _say_once(self, text: str) -> None:
        if self.context is None:
            warnings.warn(text, TrimtabWarning, stacklevel=3)
        else:
            self.context.say_once(text)


_ABOUT_ROUNDED = (
    "AttentionSpectrum reads query and key weights of 16 bits, and finds no float32 master weights behind them: most "
    "updates are smaller than a step of such weights, so their spectra are wrong (an entropy by up to 0.6). Pass "
    "AttentionSpectrum(master_weights=...), a function from a parameter to its float32 weight, or train float32 "
    "weights under autocast."
)


def _alarm_rules() -> dict[str, AlarmRule]:
    rules = {
        "d2_entropy": AlarmRule(
            # In the first 400 steps of a healthy run, 8 readings, a head's entropy falls by up to 80% and comes back
            # (docs/experiments/healthy.md).
            PeakDrop(0.50, warmup=8),
            "The updates of the query-key product of {places} gather in few directions: their spectral entropy is down "
            "to {value:.2f} from {reference:.2f}.",
            mechanism="attention",
        )
    }
    for name, side in zip(_OF_LAYERS, _SIDES, strict=True):
        rules[f"{name}_layer_entropy"] = AlarmRule(
            PeakDrop(0.20),
            f"The updates of the {side} weights of {{places}} gather in few directions: their spectral entropy is down "
            "to {value:.2f} from {reference:.2f}.",
            mechanism="attention",
        )
    return rules


def _decompose(layers: Sequence[tuple[int, _Weights, _Weights]], spectra: list[dict[str, Tensor]]) -> None:
    """Put the singular values of layers of one shape into their places of ``spectra``."""
    groups = layers[0][1][1].shape[0]
    stacked: list[Tensor] = []
    for which in (1, 2):
        pairs: list[_Weights] = [layer[which] for layer in layers]  # type: ignore[misc]
        # The query heads that share a key head stand in a row beside it.
        stacked.append(torch.stack([wq for wq, _ in pairs]).unflatten(1, (groups, -1)))
        stacked.append(torch.stack([wk for _, wk in pairs]).unsqueeze(2))
    for name, values in qk_increment(*stacked).items():
        for (i, _, _), of_heads in zip(layers, values.flatten(1, 2), strict=True):
            spectra[i][name] = of_heads


class _Reader:
    """Reads parameters whole, in float32 or wider, from their master weights where they are narrower.

    Args:
        optimizers: Gives the model's optimizers; asked when a narrow parameter is met.
        given: The user's source of master weights.

    Attributes:
        has_rounded: Set when a narrow parameter that is trained had no master weight.
    """

    def __init__(
        self, optimizers: Callable[[], list[Optimizer]], given: Callable[[nn.Parameter], Tensor | None] | None
    ) -> None:
        self._ask, self._given = optimizers, given
        self._optimizers: list[Optimizer] | None = None
        self.has_rounded = False

    def __call__(self, parameter: Any) -> Tensor:
        """The values of a parameter."""
        # What is frozen does not move, and its rounding does not either.
        if parameter.element_size() >= 4 or not parameter.requires_grad:
            return plain(parameter)
        master = self._master_of(parameter)
        if master is None:
            self.has_rounded = True
            return plain(parameter)
        return plain(master).to(parameter.device)

    def _master_of(self, parameter: nn.Parameter) -> Tensor | None:
        master = None if self._given is None else self._given(parameter)
        if master is not None:
            if not isinstance(master, Tensor) or master.shape != parameter.shape or master.element_size() < 4:
                shown = f"{tuple(master.shape)}, {master.dtype}" if isinstance(master, Tensor) else master
                raise ConfigError(
                    "master_weights",
                    shown,
                    f"it gives a float32 weight of the shape of the parameter, {tuple(parameter.shape)}, or None.",
                    "Return None where there is none.",
                )
            return master
        if self._optimizers is None:
            self._optimizers = self._ask()
        candidates = [getattr(parameter, "main_param", None)]  # Megatron-LM
        for optimizer in self._optimizers:
            # A plain look-up in the state would insert an entry.
            candidates.append(optimizer.state.get(parameter, {}).get("master_param"))  # Transformer Engine
            masters = getattr(optimizer, "param_groups_master", None)  # Apex
            for group, its_masters in zip(optimizer.param_groups, masters or [], strict=False):
                pairs = zip(group["params"], its_masters["params"], strict=False)
                candidates += [theirs for ours, theirs in pairs if ours is parameter]
        # A flat shard, or what completes 16 bits to 32, is no weight.
        shape = parameter.shape
        fitting = (c for c in candidates if isinstance(c, Tensor) and c.dtype == torch.float32 and c.shape == shape)
        return next(fitting, None)


def _is_count(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def _checked_layers(layers: Any) -> int | Sequence[str] | None:
    """The setting ``layers``, if it can be meant."""
    if layers is None or _is_count(layers):
        return None if layers is None else int(layers)
    is_list = isinstance(layers, Sequence) and not isinstance(layers, str)
    if is_list and layers and all(isinstance(name, str) for name in layers):
        return list(layers)
    raise ConfigError("layers", layers, "it is a count, 1 or more, or a list of names.", "Leave it out for all.")


def _chosen(
    known: Sequence[HeadLayout], skipped: Mapping[str, str], layers: int | Sequence[str] | None
) -> list[HeadLayout]:
    """The layouts that are looked at, in the model's order.

    Raises: ConfigError: when a name is none of a module that holds a known one.
    """
    if layers is None or isinstance(layers, int):
        trained = [layout for layout in known if any(p.requires_grad for p in layout.parameters())] or list(known)
        count = len(trained) if layers is None else min(layers, len(trained))
        return [trained[round(i * (len(trained) - 1) / max(count - 1, 1))] for i in range(count)]
    names = [clean_fqn(name) for name in layers]
    for name in names:
        if not any(_is_at_or_below(layout.name, name) for layout in known):
            raise ConfigError("layers", name, *_why_not(name, known, skipped))
    return [layout for layout in known if any(_is_at_or_below(layout.name, name) for name in names)]


def _why_not(name: str, known: Sequence[HeadLayout], skipped: Mapping[str, str]) -> tuple[str, str]:
    """Why a name picks no layer, and what to do."""
    reasons = [reason for skipped_name, reason in skipped.items() if _is_at_or_below(skipped_name, name)]
    if reasons:
        return f"the heads of this layer are not known: {reasons[0]}.", "Leave it out, or pass layouts."
    every = [layout.name for layout in known]
    near = nearest_names(name, every) or every[:3]
    remedy = f"The nearest names are {', '.join(near)}." if near else "The model has none that are known."
    return "the model has no such attention module, and no module that holds one.", remedy


def _is_at_or_below(name: str, other: str) -> bool:
    return name == other or name.startswith(f"{other}.")


def _about_skipped(skipped: Mapping[str, str], num_known: int) -> str:
    """One message for all that is left out, by reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in skipped.items():
        by_reason.setdefault(reason, []).append(name or "the model")
    listed = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in by_reason.items())
    return (
        f"AttentionSpectrum leaves out {len(skipped)} of {len(skipped) + num_known} attention layers, as it does not "
        f"know where the queries and keys of their heads are: {listed}. To include them, pass layouts, a function that "
        "gives the trimtab.monitors.layouts.HeadLayout of a module."
    )
