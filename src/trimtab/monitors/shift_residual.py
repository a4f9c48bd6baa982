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
    - ``coherence``: ``|mean (v / max(|v|, residual_floor * sum |dK|))|``, the length of the mean direction over recent
      steps: whether the error keeps its direction, which is what does harm. About ``1/sqrt(T)`` for rounding, T the
      steps that the mean reaches over; it goes to 1 for a bias. The weight of a step is the same whether or not there
      were steps before it, so that an error that has just begun is not coherent with itself. A residual under
      ``residual_floor`` counts by what it reaches of that: rounding that repeats itself, as in training on one batch,
      is coherent and far too small to matter.

    An alarm is given while the coherence is above 0.5: 14 steps after a bias begins. A residual above 4e-3 for some
    steps is a notice, for the diagnosis, and no alarm: unbiased rounding does that too, and no harm. Keys are seen on
    their way into the attention function of transformers' modules, or by ``watch_keys``. Layers in which the gradients
    need not sum to zero, those with attention sinks or a soft-cap on the logits, are left out, and a warning names the
    first and says why. An attention that is no softmax, such as a sigmoid one, cannot be told from outside: do not
    watch it.

    What the model computes stays as it is, bit for bit; only under ``torch.compile``, where this is an operator between
    others, may kernels be fused otherwise than without it. On several ranks each sees its own keys.

    Args:
        ema_factor: f of the mean, ``mean <- f mean + (1-f) value`` from 0 on; it reaches over ``T = (1+f)/(1-f)``
            steps. Above 0, below 1.
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

    # f: for directions that favour none of d dimensions, T |mean|^2 is close to chi^2_d / d, so P(coherence > 0.5) is
    # P(chi^2_d > T d / 4): 1e-13 for T = 39 and as few as 8. A ratio of the means of v and of |v|, which would be its
    # natural form, is that of the few largest steps: at the onset of any error it is near 1.
    # residual_floor: between the noise of bf16 and what a wrong delta leaves. Our choices.
    def __init__(self, *, ema_factor: float = 0.95, residual_floor: float = 1e-3) -> None:
        if not _is_number(ema_factor) or not 0 < ema_factor < 1:
            raise ConfigError("ema_factor", ema_factor, "it is above 0 and below 1.", "Set 0.98, say.")
        if not _is_number(residual_floor) or not 0 <= residual_floor < 1:
            raise ConfigError("residual_floor", residual_floor, "a residual is in 0..1.", "Set 1e-3, or 0 for none.")
        self.ema_factor = float(ema_factor)
        self.residual_floor = float(residual_floor)
        self.alarm_rules: Mapping[str, AlarmRule] = {
            "coherence": AlarmRule(
                Above(0.5, warmup=0),
                "The key gradients of {places} do not sum to zero, and what is left keeps its direction (coherence "
                "{value:.2f}, above {reference:.2f}): the attention backward is biased.",
            ),
            "residual": AlarmRule(
                Above(4e-3, warmup=0, ewma=0.1),
                "The key gradients of {places} do not sum to zero (residual {value:.1e}, above {reference:.1e}): the "
                "attention backward is inexact.",
                mechanism="inexact attention backward",
                level="notice",
            ),
        }
        self._watch = KeyWatch(self._say)
        # By layer, the mean direction of each head. Shape (heads, d_head).
        self._directions: dict[str, Tensor] = {}

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
        if not sums and not self._directions:
            return {}
        values: dict[str, tuple[Tensor, Tensor]] = {}
        for layers in _alike(sums):
            values |= self._values(layers, [sums[layer] for layer in layers])
        found = next(iter(values.values()), None)
        device = next(iter(self._directions.values())).device if found is None else found[0].device
        rows = []
        for layer in self._layers():
            none = torch.full((2, len(self._directions[layer])), torch.nan, device=device)
            rows.append(torch.stack(values[layer]).to(device) if layer in values else none)
        residual, coherence = torch.cat(rows, dim=1).unbind()
        return {"residual": residual, "coherence": coherence}

    def drop(self, step: int) -> None:
        """Forget the gradients of a step that is skipped."""
        self._watch.take()

    def places(self, metric: str) -> Sequence[str]:
        """``layer_3/head_1``: the layer's number in the model, and that of the key head in the layer."""
        return tuple(f"{layer}/head_{head}" for layer in self._layers() for head in range(len(self._directions[layer])))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start afresh; the means come with ``load_tensor_state``."""
        self._directions.clear()
        self._watch.take()

    def tensor_state(self) -> dict[str, Tensor]:
        """The mean directions, by layer."""
        return dict(self._directions)

    def load_tensor_state(self, state: Mapping[str, Tensor]) -> None:
        """Take the mean directions back."""
        self._directions = dict(state)

    def _values(self, layers: Sequence[str], sums: Sequence[KeySums]) -> dict[str, tuple[Tensor, Tensor]]:
        """Residual and coherence of layers of one shape, each of shape (heads,); takes the sums into their means."""
        vectors = torch.stack([new.vectors for new in sums])
        lengths = torch.stack([new.lengths for new in sums])
        norms = torch.linalg.vector_norm(vectors, dim=-1)
        # A step that overflowed, or had no gradient, is not observed: no mean is poisoned by it.
        usable = lengths.isfinite() & norms.isfinite() & (lengths > 0)
        sizes = torch.maximum(norms, self.residual_floor * lengths).clamp(min=_TINY)
        means = torch.stack([self._mean_before(layer, new.vectors) for layer, new in zip(layers, sums, strict=True)])
        means = torch.where(usable[..., None], torch.lerp(vectors / sizes[..., None], means, self.ema_factor), means)
        residual = torch.where(usable, norms / lengths, torch.nan)
        coherence = torch.where(usable, torch.linalg.vector_norm(means, dim=-1), torch.nan)
        self._directions.update(zip(layers, means, strict=True))
        return dict(zip(layers, zip(residual, coherence, strict=True), strict=True))

    def _mean_before(self, layer: str, like: Tensor) -> Tensor:
        """The mean direction that a layer has had so far; of none, or of other heads, zero."""
        mean = self._directions.get(layer)
        return torch.zeros_like(like) if mean is None or mean.shape != like.shape else mean.to(like)

    def _layers(self) -> list[str]:
        """Names of all layers seen so far, by their numbers; a backward meets them from the last to the first."""
        return sorted(self._directions, key=_by_numbers)

    def _say(self, text: str) -> None:
        if self.context is None:
            warnings.warn(text, TrimtabWarning, stacklevel=2)
        else:
            self.context.say_once(text)


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
