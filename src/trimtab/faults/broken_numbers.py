"""Faults: bits that flip in a weight or a gradient, and gradients that are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from trimtab.errors import ConfigError
from trimtab.faults.window import WindowFault, check_whole, module_called, plain_parameter
from trimtab.precision.recipe import Conversion

__all__ = ["BitFlips", "NonFiniteGradient"]

FlipsIn = Literal["weight", "gradient"]
"""What a bit flips in."""

_CODES = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}


class BitFlips(WindowFault):
    """For some steps, bits flip in a few elements of a parameter, or of its gradient.

    A flip in a weight is done as its step begins, and stays: it is part of what is trained on, and of every checkpoint.
    A flip in a gradient falls on each backward of its step. The elements are drawn anew for each step.

    Args:
        model: The model.
        parameter: Name of the parameter.
        bit: Which bit flips, from the sign: 0 is the sign, 1 the exponent's highest, and so on.
        flips_in: The weight, or its gradient.
        num_flips: In how many elements.
        start_step: First optimizer step that suffers it; at least 1.
        num_steps: How long it lasts; at least 1.
        seed: Which elements.

    Raises: ConfigError: when a setting cannot be meant, or there is no such parameter.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> before = model.weight.detach().clone()
        >>> with BitFlips(model, "weight", bit=0):
        ...     (model.weight == -before).sum().item()
        1
    """

    kind = "bit flips"

    def __init__(
        self,
        model: nn.Module,
        parameter: str,
        *,
        bit: int,
        flips_in: FlipsIn = "weight",
        num_flips: int = 1,
        start_step: int = 1,
        num_steps: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__(start_step=start_step, num_steps=num_steps, seed=seed)
        self.place = parameter
        self.model = model
        dtype = plain_parameter(model, parameter).dtype
        if dtype not in _CODES:
            raise ConfigError("parameter", parameter, f"its dtype {dtype} is no plain float.", "Choose another.")
        width = torch.iinfo(_CODES[dtype]).bits
        check_whole("bit", bit, 0)
        if bit >= width:
            raise ConfigError("bit", bit, f"a {dtype} has {width} bits.", f"Set it to {width - 1} or less.")
        if flips_in not in get_args(FlipsIn):
            raise ConfigError("flips_in", flips_in, "it is 'weight' or 'gradient'.", "Choose one of the two.")
        check_whole("num_flips", num_flips, 1)
        self.bit, self.flips_in, self.num_flips = bit, flips_in, num_flips
        self._step = start_step
        self._last_flipped = 0
        self._hook: Any = None

    def settings(self) -> dict[str, Any]:
        """Which bits of what."""
        return {"bit": self.bit, "flips_in": self.flips_in, "num_flips": self.num_flips}

    def begin_step(self, step: int, conversion: Conversion | None) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Flip bits of the weight for ``step``, or have those of its gradient flip in it."""
        self._step = step
        holds = self.start_step <= step < self.end_step
        if self._is_on and holds and self.flips_in == "weight":
            self._flip_weight()
        self._switch(holds)
        return self.started(step)

    def resume(self, step: int) -> None:
        """The bits of a weight that flip for ``step`` have flipped in the checkpoint."""
        self._last_flipped = step

    def put(self) -> None:
        """Flip bits of the weight, or have those of its gradient flip."""
        if self.flips_in == "weight":
            self._flip_weight()
        else:
            self._hook = plain_parameter(self.model, self.place).register_hook(self._flipped)

    def take_away(self) -> None:
        """Flip no more; what has flipped in a weight stays."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self._last_flipped = 0

    @torch.no_grad()
    def _flip_weight(self) -> None:
        # A step that the loss scaler skips begins twice, and must not flip the same bits back.
        if self._last_flipped != self._step:
            self._last_flipped = self._step
            parameter = plain_parameter(self.model, self.place)
            parameter.copy_(self._flipped(parameter))

    def _flipped(self, tensor: Tensor) -> Tensor:
        """A copy of ``tensor`` in which the step's bits are flipped."""
        flat = tensor.detach().clone(memory_format=torch.contiguous_format).flatten()
        elements = drawn([self.seed, self._step], flat.numel(), self.num_flips).to(flat.device)
        codes = flat.view(_CODES[flat.dtype])
        width = torch.iinfo(codes.dtype).bits
        mask = torch.iinfo(codes.dtype).min if self.bit == 0 else 1 << (width - 1 - self.bit)
        codes[elements] = codes[elements] ^ mask
        return flat.view(tensor.shape)


class NonFiniteGradient(WindowFault):
    """For some steps, an element of a unit's gradient is NaN or infinite.

    It falls on each backward of its steps, on a weight of the unit that has a gradient.

    Args:
        model: The model.
        unit: Name of the unit: a module that owns or holds parameters.
        value: What the element becomes: NaN, or an infinity.
        start_step: First optimizer step that suffers it; at least 1.
        num_steps: How long it lasts; at least 1.
        seed: Which parameter of the unit, and which element.

    Raises: ConfigError: when a setting cannot be meant, or the model has no such unit, or nothing in it is trained.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2))
        >>> with NonFiniteGradient(model, "0", value=float("inf")):
        ...     model(torch.ones(1, 2)).sum().backward()
        >>> sum(int(p.grad.isinf().sum()) for p in model.parameters())
        1
    """

    kind = "non-finite gradient"

    def __init__(
        self,
        model: nn.Module,
        unit: str,
        *,
        value: float = math.nan,
        start_step: int = 1,
        num_steps: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__(start_step=start_step, num_steps=num_steps, seed=seed)
        if not isinstance(value, float) or math.isfinite(value):
            raise ConfigError("value", value, "it is NaN or an infinity.", "Set it to float('nan') or float('inf').")
        self.model, self.place, self.value = model, unit, value
        self._parameter()
        self._hook: Any = None

    def settings(self) -> dict[str, Any]:
        """What the element becomes; as text, which JSON holds."""
        return {"value": str(self.value)}

    def put(self) -> None:
        """Have the gradient broken."""
        parameter = self._parameter()
        element = int(drawn([self.seed, 1], parameter.numel(), 1))

        def broken(grad: Tensor) -> Tensor:
            flat = grad.detach().clone(memory_format=torch.contiguous_format).flatten()
            flat[element] = self.value
            return flat.view(grad.shape)

        self._hook = parameter.register_hook(broken)

    def take_away(self) -> None:
        """Have it as it is."""
        self._hook.remove()
        self._hook = None

    def _parameter(self) -> nn.Parameter:
        """The parameter that it falls on."""
        trained = [p for p in module_called(self.model, self.place).parameters() if p.requires_grad]
        plain = [p for p in trained if not hasattr(p, "device_mesh")]
        if not plain:
            why = "its parameters are sharded" if trained else "nothing in it is trained"
            raise ConfigError("unit", self.place, f"{why}, so no gradient of it can be broken.", "Choose another.")
        return plain[int(drawn([self.seed, 0], len(plain), 1))]


def drawn(seed: list[int], size: int, count: int) -> Tensor:
    """``count`` different places out of ``size``, or all of them; the same for the same seed."""
    chosen = np.random.default_rng(seed).choice(size, size=min(count, size), replace=False)
    return torch.from_numpy(np.sort(chosen))
