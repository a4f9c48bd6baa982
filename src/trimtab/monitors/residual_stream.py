"""A monitor of your own in one class: how large the residual stream is behind each decoder layer.

Read it as a template. A monitor says where it reads (``start``), what it returns (``observe``), what its entries are
called (``places``), and what raises an alarm (``alarm_rules``); ``trimtab.testing.MonitorContract`` checks the rest.
L: decoder layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.errors import ConfigError
from trimtab.monitors.alarms import AlarmRule
from trimtab.monitors.detectors import Above
from trimtab.monitors.protocol import BaseMonitor
from trimtab.monitors.router import layer_places
from trimtab.precision.grouping import block_of
from trimtab.precision.units import find_units, named_modules

__all__ = ["ResidualNorm"]


class ResidualNorm(BaseMonitor):
    """Watches the root mean square of the residual stream behind each decoder layer.

    - ``rms``: the largest over the micro-batches of a step, each over all of its tokens, padding included.
    - ``growth``: that over its own mean over some 20 steps before it. Alarm: above 4.

    Raises: ConfigError: from ``start``, when the model has no numbered blocks.

    Source: Ours.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> monitor = ResidualNorm()
        >>> monitor.start(model)
        >>> output = model(torch.ones(1, 4))
        >>> bool(monitor.observe(1)["rms"][1].isclose(output.detach().square().mean().sqrt()))
        True
    """

    # The metrics are called trimtab/residual_stream/..., and alarms are a sign of this mechanism.
    name = "residual_stream"
    mechanism = "residual stream"
    # By metric. A detector judges each place on its own; those that fire at one step are one alarm with one sentence.
    alarm_rules: Mapping[str, AlarmRule] = {
        "growth": AlarmRule(
            Above(4.0), "The residual stream behind {places} is {value:.1f} times as large as it usually is."
        )
    }

    def __init__(self) -> None:
        self._peaks: list[Tensor] = []
        self._places: list[str] = []
        self._handles: list[Any] = []
        self._usual: Tensor | None = None

    def start(self, model: nn.Module) -> None:
        """Find the decoder layers and hook them. What is wrong here is the user's setting, and may be raised."""
        self.stop()
        modules = {"": model} | named_modules(model)
        blocks = [unit.name for unit in find_units(model, "block") if block_of(unit.name, modules) == unit.name]
        if not blocks:
            raise ConfigError("model", type(model).__name__, "it has no numbered blocks.", "Watch one that does.")
        self._places = layer_places(blocks, modules)
        for name in blocks:
            # Made once and written in place from then on: so the hook can be part of a compiled model.
            device = next(modules[name].parameters()).device
            self._peaks.append(torch.full((), -1.0, device=device))
            self._handles.append(modules[name].register_forward_hook(_NoteSize(self._peaks[-1])))

    @torch.no_grad()
    def observe(self, step: int) -> dict[str, Tensor]:
        """The values of a step, each of shape (L,); called after its last backward. Tensors are not waited for."""
        rms = torch.stack([peak.to(self._peaks[0].device) for peak in self._peaks])
        # NaN where a layer has not run: "no value", which detectors pass over.
        rms = torch.where(rms < 0, torch.nan, rms)
        self.drop(step)
        usual = torch.full_like(rms, torch.nan) if self._usual is None else self._usual.to(rms.device)
        mean = torch.where(usual.isnan(), rms, torch.lerp(usual, rms, 0.05))
        self._usual = torch.where(rms.isfinite(), mean, usual)
        return {"rms": rms, "growth": rms / usual}

    def drop(self, step: int) -> None:
        """Forget what the hooks have noted: the step is over, or its loss scaler skips it."""
        for peak in self._peaks:
            peak.fill_(-1.0)

    def places(self, metric: str) -> Sequence[str]:
        """One name an entry of the value."""
        return self._places

    def tensor_state(self) -> dict[str, Tensor]:
        """What a resumed run needs to go on with the same values. Small plain values go into ``state_dict`` instead."""
        return {} if self._usual is None else {"usual": self._usual}

    def load_tensor_state(self, state: Mapping[str, Tensor]) -> None:
        """Take it back."""
        self._usual = state.get("usual")

    def stop(self) -> None:
        """Give the model back as it was found."""
        for handle in self._handles:
            handle.remove()
        self._peaks, self._places, self._handles, self._usual = [], [], [], None


class _NoteSize:
    """The hook: device work only, and nothing that would change what the model computes.

    A class of its own, so that a copied or pickled model inherits an inert one and does not write to our peak.
    """

    def __init__(self, peak: Tensor | None = None) -> None:
        self.peak = peak

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note the size of what the layer puts out, in training."""
        hidden = output[0] if isinstance(output, tuple) else output
        if self.peak is None or not module.training or not hidden.numel():
            return
        with torch.no_grad():
            # A maximum: a forward that activation checkpointing repeats changes nothing. (For a sum, leave out those
            # that run inside a backward: trimtab.precision.linear_conversion.in_backward.)
            length = torch.linalg.vector_norm(hidden.detach(), dtype=torch.float32)
            rms = (length / math.sqrt(hidden.numel())).to(self.peak.device)
            self.peak.copy_(torch.maximum(self.peak, rms))

    def __deepcopy__(self, memo: dict[int, Any]) -> _NoteSize:
        return _NoteSize()

    def __reduce__(self) -> tuple[type[_NoteSize], tuple[()]]:
        return _NoteSize, ()
