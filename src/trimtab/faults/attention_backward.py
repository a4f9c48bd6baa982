"""Fault: a biased attention backward, and its unbiased control."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from trimtab.errors import ConfigError, nearest_names
from trimtab.faults.window import WindowFault
from trimtab.precision.attention_backward import (
    AttentionBackward,
    AttentionBackwardConversion,
    MantissaRounding,
)
from trimtab.precision.recipe import Conversion
from trimtab.precision.units import find_units

__all__ = ["BiasedAttentionBackward", "biased_attention_backward"]


class BiasedAttentionBackward(WindowFault):
    """For some steps, attention's backward computes ``delta = rowsum(dO ∘ O)`` with an error.

    Beside the recipe ``AttentionBackward`` it falls on the low-cost path of the units: their recovery path stays exact.
    Beside any other, and without one, it falls on the attention modules of the model.

    Args:
        model: The model.
        start_step: First optimizer step that suffers it; at least 1.
        num_steps: How long it lasts; at least 1.
        mantissa_bits: Bits that are left of O; see ``AttentionBackward``.
        rounding: How the others go: "truncate" is biased, "nearest" the control.
        bias: This times ``rowsum |dO ∘ O|`` is added to delta.
        units: Names of the attention modules that it falls on; None is all.

    Raises: ConfigError: when a setting cannot be meant, or the model has no such attention.
    """

    kind = "attention backward"

    def __init__(
        self,
        model: nn.Module,
        *,
        start_step: int = 1,
        num_steps: int = 1,
        mantissa_bits: int | None = 1,
        rounding: MantissaRounding = "truncate",
        bias: float = 0.0,
        units: Sequence[str] | None = None,
    ) -> None:
        super().__init__(start_step=start_step, num_steps=num_steps)
        self.model = model
        self.backward = AttentionBackward(mantissa_bits, rounding=rounding, bias=bias)
        self.units = None if units is None else tuple(units)
        self.place = "attention" if self.units is None else ", ".join(self.units)
        self._conversion: AttentionBackwardConversion | None = None

    def settings(self) -> dict[str, Any]:
        """What is computed, and where."""
        backward = self.backward
        return {
            "mantissa_bits": backward.mantissa_bits,
            "rounding": backward.rounding,
            "bias": backward.bias,
            "units": None if self.units is None else list(self.units),
        }

    def check(self, conversion: Conversion | None) -> None:
        """Raises: ConfigError: when there is no attention that it could fall on."""
        if isinstance(conversion, AttentionBackwardConversion):
            known = [unit.name for unit in conversion.units]
            for name in self.units or ():
                if name not in known:
                    near = ", ".join(nearest_names(name, known) or known[:3])
                    raise ConfigError("units", name, "no converted unit has that name.", f"Nearest: {near}.")
        elif not self._is_on:
            # To place it and take it away again is to know that it can be.
            self.put()
            self.take_away()

    def put(self) -> None:
        """Replace the backward of the model's attention."""
        units = find_units(self.model, None if self.units is None else list(self.units), grouping="half")
        self._conversion = self.backward.convert(self.model, units)

    def take_away(self) -> None:
        """Give it back."""
        if self._conversion is not None:
            self._conversion.undo()
            self._conversion = None

    def begin_step(self, step: int, conversion: Conversion | None) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Have the backward of what suffers in ``step`` computed so; returns the fault when it starts there."""
        if not isinstance(conversion, AttentionBackwardConversion):
            return super().begin_step(step, conversion)
        if self.start_step <= step < self.end_step:
            for index, unit in enumerate(conversion.units):
                if self.units is None or unit.name in self.units:
                    conversion.corrupt(index, self.backward)
        return self.started(step)


@contextmanager
def biased_attention_backward(
    model: nn.Module,
    *,
    mantissa_bits: int | None = 1,
    rounding: MantissaRounding = "truncate",
    bias: float = 0.0,
    units: Sequence[str] | None = None,
) -> Iterator[None]:
    """Have attention's backward biased within the block; see ``BiasedAttentionBackward``.

    Args:
        model: The model.
        mantissa_bits: Bits that are left of O.
        rounding: How the others go: "truncate" is biased, "nearest" the control.
        bias: This times ``rowsum |dO ∘ O|`` is added to delta.
        units: Names of the attention modules that it falls on; None is all.

    Raises: ConfigError: when a setting cannot be meant, or the model has no such attention.
    """
    with BiasedAttentionBackward(model, mantissa_bits=mantissa_bits, rounding=rounding, bias=bias, units=units):
        yield
