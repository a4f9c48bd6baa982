"""torchao's int8 weight-only layer under adapters, as the low-cost path.

    forward          Y  = torchao's own product of X and its int8 weight, + b
    input gradient   dX = dY W', W' the dequantized weight
    bias gradient    db = sum over tokens dY, where the bias is trained

torchao's own backward would have each layer keep its dequantized weight from the forward on; here it is made anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.precision.conversion_plan import Planned, plan_conversion
from trimtab.precision.convertible import is_dtensor
from trimtab.precision.frozen_base import WEIGHTS_ONLY, FrozenBaseConversion, plain_weight, why_not_frozen_base
from trimtab.precision.grouping import Grouping, check_unit
from trimtab.precision.torchao_float8 import torchao_api
from trimtab.precision.units import Unit
from trimtab.precision.weight_copies import WeightCopies

__all__ = ["TorchaoInt8Base", "TorchaoInt8Conversion"]


@dataclass(frozen=True, slots=True)
class TorchaoInt8Base:
    """Multiply by the frozen base's weight in int8, as torchao does, and as it is on the recovery path.

    Only the weight is quantized, to one scale an output channel (``Int8WeightOnlyConfig``). torchao's weight is made
    beside the plain one, which the recovery path multiplies by: a byte an element more. It is no part of the model. It
    is made anew when the weight is replaced, moved or changed, or peft merges adapters into it; another change through
    ``.data`` is noticed in the first forward of the next step. torchao leaves the compiler's settings alone here.

    A base that torchao has quantized already is refused: its own forward multiplies unquantized activations by the
    dequantized weight, and there is no other to recover with. Outside training (evaluation without gradients) the
    layers are the plain ones.

    Args:
        unit: What is switched as one: a projection, an attention or MLP half, or a decoder layer ("block" is the same).

    Raises: ConfigError: when ``unit`` is none of these.

    Source: torchao's ``quantize_`` and ``Int8WeightOnlyConfig``.

    Example:
        >>> TorchaoInt8Base(unit="layer").to_dict()
        {'name': 'torchao-int8', 'unit': 'layer'}
    """

    unit: Grouping = field(default="projection", kw_only=True)

    name = "torchao-int8"

    def __post_init__(self) -> None:
        check_unit(self.unit)

    def to_dict(self) -> dict[str, Any]:
        """The resolved configuration, JSON-able."""
        return {"name": self.name, **dataclasses.asdict(self)}

    def convert(self, model: nn.Module, units: Sequence[Unit]) -> TorchaoInt8Conversion:
        """Convert the frozen linear layers of ``units`` in place; all start on the low-cost path.

        Raises:
            ConfigError: when none of the units can be converted; the model is then untouched.
            MissingExtraError: when torchao is not installed, or in a version of another interface.
        """
        with torchao_api(self.name):
            from torchao.quantization import Int8WeightOnlyConfig, quantize_

            # By default it would change the compiler's settings for the whole process.
            config = Int8WeightOnlyConfig(set_inductor_config=False)
            # That a layer can be quantized and multiplied is known before the model is touched.
            probe = nn.Linear(8, 8, bias=False, device="meta")
            probe.weight = nn.Parameter(torch.ones(8, 8), requires_grad=False)
            quantize_(probe, config)
            _ = probe.weight.dequantize()

        def quantize(layer: nn.Module) -> nn.Linear:
            return _quantized_linear(layer, quantize_, config)

        return TorchaoInt8Conversion(self, model, plan_conversion(model, units, self.name, _why_not), quantize)


class TorchaoInt8Conversion(FrozenBaseConversion):
    """A model whose frozen layers multiply by torchao's int8 weights; made by ``TorchaoInt8Base.convert``.

    Args:
        recipe: The settings.
        model: The model.
        planned: Each unit with the layers of it that are converted.
        quantize: Makes torchao's layer, without bias, of a plain one.
    """

    why_unobserved = WEIGHTS_ONLY

    def __init__(
        self,
        recipe: TorchaoInt8Base,
        model: nn.Module,
        planned: Sequence[Planned],
        quantize: Callable[[nn.Module], nn.Linear],
    ) -> None:
        self.recipe = recipe
        self._quantized = WeightCopies(model, quantize)
        super().__init__(model, planned)

    def low_product(self, number: int, x: Tensor, bias: Tensor | None, index: int) -> Tensor:
        """What torchao's layer computes."""
        output: Tensor = self._quantized.get(self.layers[number])(x)
        return output if bias is None else output + bias

    def low_weight(self, number: int, dtype: torch.dtype) -> Tensor:
        """The dequantized weight."""
        weight: Any = self._quantized.get(self.layers[number]).weight
        return weight.dequantize().to(dtype)  # type: ignore[no-any-return]

    def begin_step(self, step: int) -> None:
        """Optimizer step ``step`` begins: micro-batches are counted anew, and weights looked at for changes."""
        super().begin_step(step)
        self._quantized.begin_step()

    def undo(self) -> None:
        """Give the model back, and let go of the quantized weights."""
        super().undo()
        self._quantized.clear()


def _quantized_linear(layer: nn.Module, quantize_: Callable[..., None], config: Any) -> nn.Linear:
    """The layer of torchao in place of a plain one, without its bias."""
    weight = plain_weight(layer)
    # On no device nothing is drawn for a weight that is replaced at once.
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    quantize_(made, config)
    return made


def _why_not(module: nn.Module, under_fsdp: frozenset[int]) -> str | None:
    """Why ``module`` cannot be converted, or None when it can."""
    weight: Any = getattr(module, "weight", None)
    # What a parameter holds of another class is of that class itself.
    if type(weight).__module__.partition(".")[0] == "torchao":
        return (
            "torchao has quantized its weight already, and there is none other to recover with: its forward multiplies"
            " by the dequantized one. Load the model in bf16, and let this recipe quantize it"
        )
    reason = why_not_frozen_base(module, under_fsdp)
    if reason is None and is_dtensor(weight):
        return "FSDP2 shards its weight already, and torchao quantizes whole ones: attach before fully_shard"
    if reason is None and weight.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"its weight is of {weight.dtype}, which torchao does not quantize"
    return reason
