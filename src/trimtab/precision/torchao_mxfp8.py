"""torchao's MXFP8 training: its own layer and kernels, and the plain product on the recovery path.

torchao has it among its prototypes, which move from version to version. Operands are cut into blocks of 32 values
along the dimension that is summed over, each with a scale that is a power of two. Where the GPU has no such products
(before Blackwell, and on a CPU) torchao can emulate them: it rounds in the same way, forward and backward, and
multiplies the rounded values in the dtype that they had.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from trimtab.errors import ConfigError
from trimtab.formats import get, per_group
from trimtab.precision.conversion_plan import plan_conversion
from trimtab.precision.grouping import Grouping, check_unit
from trimtab.precision.library_linear import Paths
from trimtab.precision.linear_conversion import as_autocast_would
from trimtab.precision.operand_quantizer import OperandQuantizer
from trimtab.precision.torchao_float8 import (
    TorchaoConversion,
    can_multiply,
    on_weights_of,
    torchao_api,
    why_not_for_torchao,
)
from trimtab.precision.units import Unit

__all__ = ["TorchaoMXFP8"]

KernelName = Literal["auto", "emulated"]
ScaleMode = Literal["rceil", "floor"]
_BLOCK_SIZE = 32
_MXFP8_CAPABILITY = (10, 0)
_FORMAT = get("e4m3")


@dataclass(frozen=True, slots=True)
class TorchaoMXFP8:
    """Multiply in MXFP8 as torchao does, and in high precision while the unit is on the recovery path.

    Outside training (evaluation without gradients) the layers are the plain ones.

    Its quantizers are observed at the input of the forward product, which is cut along the channels. For the weight
    gradient torchao cuts it anew along the tokens; that is not looked at.

    Args:
        unit: What is switched as one: a projection, an attention or MLP half, or a block ("layer" is the same).
        kernel_preference: "auto" is the GPU's own products, "emulated" those of rounded values, which run anywhere and
            save no time; None is "auto" where the device of the weights has them (capability 10.0 and up).
        scale_calculation_mode: Round the scales up ("rceil") or down ("floor", which clips the largest values).
        wgrad_with_hp: Multiply for the weight gradient in high precision. The number of tokens is then free.

    Raises: ConfigError: when a setting is none of these.

    Example:
        >>> TorchaoMXFP8(wgrad_with_hp=True).to_dict()["scale_calculation_mode"]
        'rceil'
    """

    unit: Grouping = "projection"
    kernel_preference: KernelName | None = None
    scale_calculation_mode: ScaleMode = "rceil"
    wgrad_with_hp: bool = False

    name = "torchao-mxfp8"

    def __post_init__(self) -> None:
        check_unit(self.unit)
        for setting, allowed in (
            ("kernel_preference", (*get_args(KernelName), None)),
            ("scale_calculation_mode", get_args(ScaleMode)),
        ):
            value = getattr(self, setting)
            if value not in allowed:
                raise ConfigError(setting, value, f"it is one of {', '.join(map(repr, allowed))}.", "Use one of them.")
        if type(self.wgrad_with_hp) is not bool:
            raise ConfigError("wgrad_with_hp", self.wgrad_with_hp, "it is True or False.", "Use one of the two.")

    def to_dict(self) -> dict[str, Any]:
        """The configuration, JSON-able; what came of it is in ``TorchaoConversion.to_dict``."""
        return {"name": self.name, **dataclasses.asdict(self)}

    def convert(self, model: nn.Module, units: Sequence[Unit]) -> TorchaoConversion:
        """Convert the linear layers of ``units`` in place; all start on the low-cost path.

        Raises:
            ConfigError: when none of the units can be converted; the model is then untouched.
            MissingExtraError: when torchao is not installed, or in a version of another interface.
        """
        with torchao_api(self.name):
            from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
            from torchao.prototype.mx_formats.config import ScaleCalculationMode
            from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

            layers = _MXFP8Layers(self, MXFP8Linear, KernelPreference, ScaleCalculationMode)
        planned = plan_conversion(model, units, self.name, layers.why_not)
        with torchao_api(self.name):
            paths = {id(layer): layers.paths(layer) for _, of_unit in planned for layer in of_unit}
        return TorchaoConversion(self.to_dict(), model, planned, paths, layers.is_emulated)


class _MXFP8Layers:
    """What is known of layers that run in MXFP8: torchao's classes, and the settings."""

    def __init__(self, recipe: TorchaoMXFP8, mxfp8_linear: Any, kernels: Any, modes: Any) -> None:
        self._recipe = recipe
        self._make = functools.partial(
            mxfp8_linear,
            bias=False,
            device="meta",
            scale_calculation_mode=modes(recipe.scale_calculation_mode),
            wgrad_with_hp=recipe.wgrad_with_hp,
        )
        factor_of = _factor_rounded_up if recipe.scale_calculation_mode == "rceil" else _factor_rounded_down
        self._quantizer = OperandQuantizer(fmt=_FORMAT, granularity=per_group(_BLOCK_SIZE), factor_of=factor_of)
        self._kernels = {False: kernels.AUTO, True: kernels.EMULATED}

    def is_emulated(self, layer: Any) -> bool:
        """Whether its products are emulated, where its weights are now."""
        if self._recipe.kernel_preference is None:
            return not can_multiply(layer.weight.device, _MXFP8_CAPABILITY)
        return self._recipe.kernel_preference == "emulated"

    def why_not(self, module: nn.Module, under_fsdp: frozenset[int]) -> str | None:
        """Why ``module`` cannot be converted, or None when it can; a ``conversion_plan.WhyNot``."""
        reason = why_not_for_torchao(module, under_fsdp)
        if reason is not None:
            return reason
        layer: Any = module
        if layer.weight.dtype not in (torch.bfloat16, torch.float32):
            return f"its weight is of {layer.weight.dtype}, and MXFP8 is made of bfloat16 or float32"
        if layer.in_features % _BLOCK_SIZE or layer.out_features % _BLOCK_SIZE:
            return (
                f"it has {layer.in_features} inputs and {layer.out_features} outputs, and MXFP8 needs multiples of "
                f"{_BLOCK_SIZE}, the values that share a scale"
            )
        if not self.is_emulated(layer) and not can_multiply(layer.weight.device, _MXFP8_CAPABILITY):
            return "its device has no MXFP8 products, and kernel_preference='auto'"
        return None

    def paths(self, layer: Any) -> Paths:
        """The forwards of a layer, and what its low-cost path refuses."""
        by_emulation = {
            flag: on_weights_of(
                layer, self._make(layer.in_features, layer.out_features, kernel_preference=kernel), _weight_to_cut
            )
            for flag, kernel in self._kernels.items()
        }

        def low(x: Tensor) -> Tensor:
            dtype = _weight_to_cut(layer).dtype
            # Of no tokens there is nothing to round; of two dtypes the plain product says what is wrong.
            if not x.numel() or x.dtype != dtype:
                return F.linear(x, layer.weight, layer.bias)
            is_emulated = self.is_emulated(layer)
            _check_dtype(dtype, is_emulated)
            return by_emulation[is_emulated](x.contiguous())

        return Paths(low=low, refuses=self._refuse, quantizer=self._quantizer)

    def _refuse(self, shape: torch.Size) -> None:
        """Refuse a number of tokens that cannot be cut into blocks for the weight gradient, which sums over them."""
        tokens = math.prod(shape[:-1])
        if tokens % _BLOCK_SIZE and not self._recipe.wgrad_with_hp:
            raise ConfigError(
                "tokens",
                tokens,
                f"MXFP8 needs a multiple of {_BLOCK_SIZE} tokens in each forward.",
                "Pad the batch, or pass wgrad_with_hp=True.",
            )


def _factor_rounded_up(amax: Tensor) -> Tensor:
    """The inverse of the smallest power of two by which a block of this largest magnitude does not saturate.

    Source: torchao's ``_to_mx_rceil``, which leaves a block whose scale would be the smallest one as it is; all of it
        then becomes zero.
    """
    exponent = torch.ceil(torch.log2(amax / _FORMAT.max_value)).clamp(-127.0, 127.0)
    return torch.where(exponent == -127.0, 1.0, torch.exp2(-exponent))


def _factor_rounded_down(amax: Tensor) -> Tensor:
    """The inverse of the power of two that lays a block's largest binade onto that of the format.

    Source: torchao's ``to_mx``, whose smallest scale is a normal number.
    """
    exponent = torch.frexp(amax).exponent - 1 - _FORMAT.max_exponent
    return torch.exp2(-exponent.clamp(min=-126).float())


def _weight_to_cut(layer: Any) -> Tensor:
    """The weight in the dtype that the plain layer multiplies it in, row by row.

    torchao's layer knows nothing of autocast, and has no product of two dtypes.
    """
    return as_autocast_would(layer, layer.weight)[1].contiguous()


def _check_dtype(dtype: torch.dtype, is_emulated: bool) -> None:
    allowed = (torch.bfloat16, torch.float32) if is_emulated else (torch.bfloat16,)
    if dtype not in allowed:
        raise ConfigError(
            "dtype",
            dtype,
            f"MXFP8 is made of {' or '.join(str(d).removeprefix('torch.') for d in allowed)}.",
            "Use bfloat16 weights, or autocast to bfloat16.",
        )
