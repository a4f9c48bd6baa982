"""Whether the attention backward is biased: softmax does not see a common shift of a row's logits, so dK sums to zero.

Adding the same vector c to every key of a head adds ``q_i · c`` to all logits of row i, which its softmax does not
see. So the loss does not change, and ``sum_j dK_j = 0`` over all keys of the head, whatever the mask. It holds after
position embeddings, for the keys as they enter the product with the queries. A backward that computes
``delta = rowsum(dO ∘ O)`` with an error leaves a rest, ``v = sum_j dK_j``. Rounding leaves one too, but one that points
elsewhere at every step, where that of a biased backward keeps its direction.

A legend of shapes: gradients of keys (batch, heads, tokens, d_head); per layer, vectors (heads, d_head).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.errors import ConfigError, TrimtabWarning
from trimtab.monitors.alarms import AlarmRule
from trimtab.monitors.attention_keys import KeySums, KeyWatch
from trimtab.monitors.detectors import Above
from trimtab.monitors.protocol import BaseMonitor

__all__ = ["ShiftResidual", "shift_residual"]

# Smaller than any length that a gradient in use has, and no denormal: 0 / 0 becomes 0.
_TINY = 1e-30


def shift_residual(grad_k: Tensor) -> Tensor:
    """How far the gradients of a head's keys are from summing to zero: ``|sum_j dK_j| / sum_j |dK_j|``.

    0 for an exact backward of a softmax attention, up to rounding; at most 1. Not valid with attention sinks, for
    sigmoid attention, or behind a soft-cap of the logits. A gradient that is not finite gives NaN; one of zeros, 0.

    Args:
        grad_k: Gradient of the keys as they enter the product with the queries. Shape (..., tokens, d_head).

    Returns: Shape (...): one residual a sequence and head, in float32 or wider.

    Source: ours.

    Example:
        >>> q, k, v = (torch.randn(2, 4, 8, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
        >>> ((q @ k.mT).softmax(-1) @ v).square().sum().backward()
        >>> bool((shift_residual(k.grad) < 1e-12).all()), bool((shift_residual(v.grad) > 1e-3).all())
        (True, True)
    """
    grad = grad_k.detach().to(torch.promote_types(grad_k.dtype, torch.float32))
    lengths = torch.linalg.vector_norm(grad, dim=-1).sum(-1)
    return torch.linalg.vector_norm(grad.sum(-2), dim=-1) / lengths.clamp(min=_TINY)


class ShiftResidual(BaseMonitor):
    """Watches whether the gradients of each head's keys sum to zero, as those of an exact attention backward do.

    Two values a layer and key head, over all keys of an optimizer step together, with ``v = sum dK``:

    - ``residual``: ``|v| / sum |dK|`` of the step: how large the error is, biased or not. Measured: 1e-8 to 1e-6 in
      float32, 2e-4 to 1e-3 in bf16 (single steps up to 1e-2), from 4e-3 on where delta is wrong.
    - ``coherence``: ``|mean v| / mean |v|``, means over recent steps: whether the error keeps its direction, which is
      what does harm. About ``1/sqrt(T)`` for rounding, T the steps that the means reach over; 1 for a bias. Where the
      mean of ``|v|`` is under ``residual_floor`` times that of ``sum |dK|``, that is put in its place: rounding that
      repeats itself, as in training on one batch, is coherent and far too small to matter.

    An alarm is given while the coherence is above 0.5. Keys are seen on their way into the attention function of
    transformers' modules, or by ``watch_keys``. Layers in which the gradients need not sum to zero, those with
    attention sinks or a soft-cap on the logits, are left out, and a warning names the first and says why. An attention
    that is no softmax, such as a sigmoid one, cannot be told from outside: do not watch it.

    What the model computes stays as it is, bit for bit; only under ``torch.compile``, where this is an operator between
    others, may kernels be fused otherwise than without it. On several ranks each sees its own keys.

    Args:
        ema_factor: f of the means, ``mean <- f mean + (1-f) value``; they reach over ``T = (1+f)/(1-f)`` steps. Above
            0, below 1.
        warmup_steps: Steps of a layer before its coherence is told.
        residual_floor: Residual below which an error counts as rounding. >= 0.

    Raises: ConfigError: when a setting is none of these.

    Source: ours.

    Example:
        >>> from trimtab.monitors.attention_keys import watch_keys
        >>> monitor = ShiftResidual()
        >>> monitor.start(nn.Linear(2, 2))
        >>> q, k, v = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))
        >>> ((q @ watch_keys(k).mT).softmax(-1) @ v).square().sum().backward()
        >>> bool((monitor.observe(1)["residual"] < 1e-5).all()), monitor.places("residual")
        (True, ('layer_0/head_0', 'layer_0/head_1'))
        >>> monitor.stop()
    """

    name = "shift_residual"
    mechanism = "attention backward"

    # f: for noise that favours none of d directions, T |mean v|^2 / mean |v|^2 is chi^2_d / d, so P(coherence > 0.5) is
    # P(chi^2_d > T d / 4): 2e-11 for T = 99 and as few as 2. After 30 steps T is 29, and it is 1e-9 for 8 or more.
    # Heads have 64 and up; measured at 16, on text, noise of any size stayed below 0.43 from there on. Our choices.
    # residual_floor: between the noise of bf16 and what a wrong delta leaves.
    def __init__(self, *, ema_factor: float = 0.98, warmup_steps: int = 30, residual_floor: float = 1e-3) -> None:
        if not _is_number(ema_factor) or not 0 < ema_factor < 1:
            raise ConfigError("ema_factor", ema_factor, "it is above 0 and below 1.", "Set 0.98, say.")
        if not isinstance(warmup_steps, int) or isinstance(warmup_steps, bool) or warmup_steps < 0:
            raise ConfigError("warmup_steps", warmup_steps, "it counts steps, 0 or more.", "Set it to 30, say.")
        if not _is_number(residual_floor) or not 0 <= residual_floor < 1:
            raise ConfigError("residual_floor", residual_floor, "a residual is in 0..1.", "Set 1e-3, or 0 for none.")
        self.ema_factor = float(ema_factor)
        self.warmup_steps = warmup_steps
        self.residual_floor = float(residual_floor)
        self.alarm_rules: Mapping[str, AlarmRule] = {
            "coherence": AlarmRule(
                Above(0.5, warmup=0),
                "The key gradients of {places} do not sum to zero, and what is left keeps its direction (coherence "
                "{value:.2f}, above {reference:.2f}): the attention backward is biased.",
            )
        }
        self._watch = KeyWatch(self._say)
        self._means: dict[str, _Means] = {}
        self._loaded_steps: dict[str, int] = {}

    def start(self, model: nn.Module) -> None:
        """Place hooks where the keys enter attention."""
        self._watch.start(model)

    def stop(self) -> None:
        """Take every hook away."""
        self._watch.stop()

    @torch.no_grad()
    def observe(self, step: int) -> Mapping[str, Tensor | float]:
        """Residual and coherence of each layer and head, flat; NaN for those without a finite gradient in this step."""
        sums = self._watch.take()
        if not sums and not self._means:
            return {}
        values: dict[str, tuple[Tensor, Tensor]] = {}
        for layers in _alike(sums):
            values |= self._values(layers, [sums[layer] for layer in layers])
        found = next(iter(values.values()), None)
        device = next(iter(self._means.values())).lengths.device if found is None else found[0].device
        rows = []
        for layer in self._layers():
            none = torch.full((2, self._means[layer].lengths.shape[0]), torch.nan, device=device)
            rows.append(torch.stack(values[layer]).to(device) if layer in values else none)
        residual, coherence = torch.cat(rows, dim=1).unbind()
        return {"residual": residual, "coherence": coherence}

    def places(self, metric: str) -> Sequence[str]:
        """``layer_3/head_1``: the layer's number in the model, and that of the key head in the layer."""
        return tuple(
            f"{layer}/head_{head}" for layer in self._layers() for head in range(self._means[layer].lengths.shape[0])
        )

    def state_dict(self) -> dict[str, Any]:
        """For how many steps the means of each layer have been kept."""
        return {"num_steps": {layer: means.num_steps for layer, means in self._means.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start afresh; the means come with ``load_tensor_state``."""
        self._means.clear()
        self._watch.take()
        self._loaded_steps = dict(state["num_steps"])

    def tensor_state(self) -> dict[str, Tensor]:
        """The means of each layer."""
        return {
            f"{layer}.{name}": getattr(means, name)
            for layer, means in self._means.items()
            for name in ("vectors", "norms", "lengths")
        }

    def load_tensor_state(self, state: Mapping[str, Tensor]) -> None:
        """Take the means back."""
        for layer, num_steps in self._loaded_steps.items():
            vectors, norms, lengths = (state[f"{layer}.{name}"] for name in ("vectors", "norms", "lengths"))
            self._means[layer] = _Means(vectors, norms, lengths, int(num_steps))

    def _values(self, layers: Sequence[str], sums: Sequence[KeySums]) -> dict[str, tuple[Tensor, Tensor]]:
        """Residual and coherence of layers of one shape, each of shape (heads,); takes the sums into their means."""
        for layer, new in zip(layers, sums, strict=True):
            means = self._means.get(layer)
            if means is None or means.vectors.shape != new.vectors.shape:
                zeros = torch.zeros_like(new.lengths)
                self._means[layer] = _Means(torch.zeros_like(new.vectors), zeros, zeros, 0)
        old = [self._means[layer] for layer in layers]
        vectors = torch.stack([new.vectors for new in sums])
        lengths = torch.stack([new.lengths for new in sums])
        norms = torch.linalg.vector_norm(vectors, dim=-1)
        # A step that overflowed, or had no gradient, is not observed: no mean is poisoned by it.
        usable = lengths.isfinite() & norms.isfinite() & (lengths > 0)
        kept = (
            torch.stack([m.vectors.to(vectors) for m in old]),
            torch.stack([m.norms.to(norms) for m in old]),
            torch.stack([m.lengths.to(lengths) for m in old]),
        )
        # Both means start from 0, so what is missing of their weights cancels out in their ratio.
        mean_vectors, mean_norms, mean_lengths = (
            torch.where(
                usable[..., None] if mean.dim() == 3 else usable, torch.lerp(value, mean, self.ema_factor), mean
            )
            for mean, value in zip(kept, (vectors, norms, lengths), strict=True)
        )
        residual = torch.where(usable, norms / lengths, torch.nan)
        size = torch.maximum(mean_norms, self.residual_floor * mean_lengths).clamp(min=_TINY)
        coherence = torch.where(usable, torch.linalg.vector_norm(mean_vectors, dim=-1) / size, torch.nan)
        unknown = torch.full_like(residual[0], torch.nan)
        values = {}
        for i, layer in enumerate(layers):
            num_steps = old[i].num_steps + 1
            self._means[layer] = _Means(mean_vectors[i], mean_norms[i], mean_lengths[i], num_steps)
            values[layer] = residual[i], coherence[i] if num_steps > self.warmup_steps else unknown
        return values

    def _layers(self) -> list[str]:
        """Names of all layers seen so far, by their numbers; a backward meets them from the last to the first."""
        return sorted(self._means, key=_by_numbers)

    def _say(self, text: str) -> None:
        if self.context is None:
            warnings.warn(text, TrimtabWarning, stacklevel=2)
        else:
            self.context.say_once(text)


@dataclass(slots=True)
class _Means:
    """What is kept of a layer: means of v, of |v| and of sum |dK| over recent steps, and how many there were."""

    vectors: Tensor
    norms: Tensor
    lengths: Tensor
    num_steps: int


def _alike(sums: Mapping[str, KeySums]) -> list[list[str]]:
    """The layers whose sums can be stacked, together."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for layer, s in sums.items():
        groups.setdefault((s.vectors.shape, s.vectors.dtype, s.vectors.device), []).append(layer)
    return list(groups.values())


def _by_numbers(layer: str) -> list[tuple[int, str]]:
    """A key that sorts ``layer_2`` before ``layer_10``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", layer)]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
