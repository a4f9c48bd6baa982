"""bitsandbytes under adapters: LLM.int8() or a 4-bit base as the low-cost path.

    forward          Y  = bitsandbytes's own product of X and its quantized weight, + b
    input gradient   dX = dY W', W' the dequantized weight, as in bitsandbytes's own backward
    bias gradient    db = sum over tokens dY, where the bias is trained

Of a plain layer the recovery path is the layer itself. Of a layer that bitsandbytes holds in 8 bits there is no plain
weight left: its recovery path multiplies X, unquantized, by the dequantized weight.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trimtab.errors import ConfigError, MissingExtraError
from trimtab.formats import get, per_token
from trimtab.formats.fake_quantization import stats_of
from trimtab.precision.conversion_plan import Planned, plan_conversion
from trimtab.precision.convertible import is_dtensor
from trimtab.precision.frozen_base import WEIGHTS_ONLY, FrozenBaseConversion, plain_weight, why_not_frozen_base
from trimtab.precision.grouping import Grouping, check_unit
from trimtab.precision.int8_base import dequantized
from trimtab.precision.linear_conversion import as_autocast_would, in_backward
from trimtab.precision.operand_quantizer import OperandQuantizer, nothing_seen, some_tokens
from trimtab.precision.quantizer_stats import ObservesQuantizers, stats_row
from trimtab.precision.units import Unit
from trimtab.precision.weight_copies import WeightCopies

__all__ = ["BitsandbytesConversion", "BitsandbytesLinear"]

QuantType = Literal["nf4", "fp4"]

_FEATURE = "The bitsandbytes path"
_COMPUTE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_INT8_MAX = 127.0
_SETTINGS_OF_BITS = {"threshold": 8, "quant_type": 4, "compress_statistics": 4, "compute_dtype": 4}


@dataclass(frozen=True, slots=True)
class BitsandbytesLinear:
    """Multiply by the frozen base as bitsandbytes does, and unquantized while the unit is on the recovery path.

    Of a plain base layer bitsandbytes's weight is made beside the plain one, which the recovery path multiplies by. It
    takes a byte an element in 8 bits and half a byte in 4, and their scales. It is made anew when the weight is
    replaced, moved or changed, or peft merges adapters into it; another change through ``.data`` is noticed in the
    first forward of the next step. It is no part of the model, and neither are its bias and ``state_dict()`` touched.

    A base that was loaded with ``load_in_8bit`` is taken as it is. Its plain weight is gone, so the error of the weight
    *remains* on the recovery path, which only spares the activations. One that was loaded with ``load_in_4bit`` is
    refused: its own forward multiplies unquantized activations by the dequantized weight already.

    In 8 bits bitsandbytes casts activations to float16 first: what is beyond 65504 becomes NaN, as does a token that
    is not finite. On a CPU its layers do not quantize activations while they train; this path does, on every device.
    Outside training (evaluation without gradients) a layer runs its own forward.

    In 8 bits its quantizers are observed: what the cast to float16 and the int8 of each token make of an activation,
    without the channels that are multiplied in 16 bits. Which these are depends on all tokens, so that each channel's
    largest magnitude is taken over all of them; the rest is of some. In 4 bits only weights are quantized, and there is
    nothing to observe.

    Args:
        bits: 8 for LLM.int8(), with int8 weights and activations; 4 for dequantized 4-bit weights.
        unit: What is switched as one: a projection, an attention or MLP half, or a decoder layer ("block" is the same).
        threshold: 8 bits only: channels in which an activation is as large as this are multiplied in 16 bits; 0 for
            none. A layer that is in 8 bits already keeps its own.
        quant_type: 4 bits only: the grid.
        compress_statistics: 4 bits only: whether scales are quantized in their turn.
        compute_dtype: 4 bits only: what is multiplied in; the activation's own when None.

    Raises: ConfigError: when a setting is none of these, or is not one of these ``bits``.

    Source: bitsandbytes's ``Linear8bitLt`` and ``Linear4bit``; Dettmers et al. 2022, LLM.int8() (arXiv:2208.07339) and
        2023, QLoRA (arXiv:2305.14314).

    Example:
        >>> BitsandbytesLinear(4, unit="layer").name
        'bnb-4bit'
    """

    bits: Literal[4, 8] = 8
    unit: Grouping = field(default="projection", kw_only=True)
    threshold: float = field(default=0.0, kw_only=True)
    quant_type: QuantType = field(default="nf4", kw_only=True)
    compress_statistics: bool = field(default=True, kw_only=True)
    compute_dtype: torch.dtype | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in (4, 8):
            raise ConfigError("bits", self.bits, "bitsandbytes has 4 or 8.", "Choose one of the two.")
        check_unit(self.unit)
        if type(self.threshold) not in (int, float) or not 0 <= self.threshold < float("inf"):
            raise ConfigError("threshold", self.threshold, "a magnitude is 0 or more.", "Set it to 0 for none, or 6.")
        if self.quant_type not in ("nf4", "fp4"):
            raise ConfigError("quant_type", self.quant_type, "it is 'nf4' or 'fp4'.", "Choose one of the two.")
        if type(self.compress_statistics) is not bool:
            raise ConfigError(
                "compress_statistics", self.compress_statistics, "it is True or False.", "Choose one of the two."
            )
        if self.compute_dtype not in (None, *_COMPUTE_DTYPES):
            allowed = "it is torch.float16, torch.bfloat16, torch.float32 or None."
            raise ConfigError("compute_dtype", self.compute_dtype, allowed, "Use one of them.")
        for setting, bits in _SETTINGS_OF_BITS.items():
            value = getattr(self, setting)
            if bits != self.bits and value != self.__dataclass_fields__[setting].default:
                raise ConfigError(
                    setting, value, f"this is a setting of {bits} bits.", f"Leave it out, or set bits={bits}."
                )

    @property
    def name(self) -> str:
        """The recipe's name on the command line and in records."""
        return f"bnb-{self.bits}bit"

    def to_dict(self) -> dict[str, Any]:
        """The resolved configuration, JSON-able."""
        settings = dataclasses.asdict(self)
        settings["compute_dtype"] = (
            None if self.compute_dtype is None else str(self.compute_dtype).removeprefix("torch.")
        )
        return {"name": self.name} | {
            k: v for k, v in settings.items() if _SETTINGS_OF_BITS.get(k, self.bits) == self.bits
        }

    def convert(self, model: nn.Module, units: Sequence[Unit]) -> BitsandbytesConversion:
        """Convert the frozen linear layers of ``units`` in place; all start on the low-cost path.

        Raises:
            ConfigError: when none of the units can be converted; the model is then untouched.
            MissingExtraError: when bitsandbytes is not installed, or has another interface.
        """
        library = _library()
        with _known_interface(library):
            # That a layer can be made is known before the model is touched.
            if self.bits == 4:
                _four_bit_linear(library, self, torch.ones(64, 64)).weight.quant_state  # noqa: B018
            else:
                library.functional.int8_vectorwise_quant(torch.ones(8, 8, dtype=torch.float16))

        def why_not(module: nn.Module, under_fsdp: frozenset[int]) -> str | None:
            return _why_not(library, self.bits, module, under_fsdp)

        return BitsandbytesConversion(self, library, model, plan_conversion(model, units, self.name, why_not))


class BitsandbytesConversion(ObservesQuantizers, FrozenBaseConversion):
    """A model whose frozen layers multiply as bitsandbytes does; made by ``BitsandbytesLinear.convert``.

    Args:
        recipe: The settings.
        library: The package bitsandbytes.
        model: The model.
        planned: Each unit with the layers of it that are converted.
    """

    def __init__(self, recipe: BitsandbytesLinear, library: Any, model: nn.Module, planned: Sequence[Planned]) -> None:
        self.recipe = recipe
        self._library = library
        self._int8 = WeightCopies(model, self._made_int8)
        self._four_bit = WeightCopies(model, self._made_four_bit)
        super().__init__(model, planned)

    @property
    def why_unobserved(self) -> str | None:
        """Why nothing can be told of its quantizers, or None when something can; see ``recipe.QuantizerObserver``."""
        return WEIGHTS_ONLY if self.recipe.bits == 4 else None

    @torch.no_grad()
    def note(self, number: int, x: Tensor, index: int) -> None:
        """Keep what the low-cost path would have done to ``x``."""
        if self._shadow:
            x, _, _ = as_autocast_would(self.layers[number], x, keep_weight=True)
            self._observe(number, x.detach(), index)

    def low_product(self, number: int, x: Tensor, bias: Tensor | None, index: int) -> Tensor:
        """What bitsandbytes computes of ``x``, and the bias."""
        self._observe(number, x, index)
        flat = x.reshape(-1, x.shape[-1])
        if self.recipe.bits == 4:
            output = self._four_bit.get(self.layers[number])(flat)
        else:
            output = _int8_product(self._library, *self._int8_weight(number), self._threshold(number), flat)
        # bitsandbytes would cast the layer's bias in place.
        output = output if bias is None else output + bias
        return output.reshape(*x.shape[:-1], output.shape[-1])

    def low_weight(self, number: int, dtype: torch.dtype) -> Tensor:
        """The dequantized weight."""
        if self.recipe.bits == 4:
            weight = self._four_bit.get(self.layers[number]).weight
            return self._library.functional.dequantize_4bit(weight.data, weight.quant_state).to(dtype)  # type: ignore[no-any-return]
        codes, amax = self._int8_weight(number)
        return dequantized(codes, amax.unsqueeze(1).mul(1.0 / 127.0), dtype)

    def high_weight(self, number: int, dtype: torch.dtype) -> Tensor:
        """The plain weight, or the dequantized one of a layer that has no other."""
        if self.recovers_by_itself(number):
            return super().high_weight(number, dtype)
        return self.low_weight(number, dtype)

    def recovers_by_itself(self, number: int) -> bool:
        """Whether the layer is a plain one."""
        return not isinstance(self.layers[number], self._library.nn.Linear8bitLt)

    def input_gradient(self, number: int, grad: Tensor, given: Tensor | None, active: bool) -> Tensor:
        """The gradient of a layer's input, computed in the dtype in which its output was."""
        if active or self.recipe.compute_dtype is None:
            return super().input_gradient(number, grad, given, active)
        return super().input_gradient(number, grad.to(self.recipe.compute_dtype), given, active).to(grad.dtype)

    def begin_step(self, step: int) -> None:
        """Optimizer step ``step`` begins: micro-batches are counted anew, and weights looked at for changes."""
        super().begin_step(step)
        self._int8.begin_step()
        self._four_bit.begin_step()

    def undo(self) -> None:
        """Give the model back, and let go of the quantized weights."""
        super().undo()
        self._int8.clear()
        self._four_bit.clear()

    def _observe(self, number: int, x: Tensor, index: int) -> None:
        # A forward that is recomputed in backward has been seen before.
        if self._stats is not None and self.why_unobserved is None and not in_backward():
            self._stats.note(index, _row_in_int8(x, self._threshold(number)))

    def _threshold(self, number: int) -> float:
        layer: Any = self.layers[number]
        return self.recipe.threshold if self.recovers_by_itself(number) else layer.state.threshold  # type: ignore[no-any-return]

    def _int8_weight(self, number: int) -> tuple[Tensor, Tensor]:
        """The codes (out, in) of a weight, and the largest magnitude of each of its rows, float32 (out,)."""
        layer: Any = self.layers[number]
        if self.recovers_by_itself(number):
            return self._int8.get(layer)
        # Before the layer's own first forward they are with its weight, afterwards with its state.
        holder = layer.weight if layer.weight.CB is not None else layer.state
        return holder.CB, holder.SCB

    def _made_int8(self, layer: nn.Module) -> tuple[Tensor, Tensor]:
        codes, amax, _ = self._library.functional.int8_vectorwise_quant(plain_weight(layer).to(torch.float16))
        return codes, amax

    def _made_four_bit(self, layer: nn.Module) -> Any:
        return _four_bit_linear(self._library, self.recipe, plain_weight(layer))


def _four_bit_linear(library: Any, recipe: BitsandbytesLinear, weight: Tensor) -> Any:
    """A layer of bitsandbytes, without bias, of a weight (out, in)."""
    settings = {"quant_type": recipe.quant_type, "compress_statistics": recipe.compress_statistics}
    # On no device nothing is drawn for a weight that is replaced at once.
    module = library.nn.Linear4bit(
        weight.shape[1], weight.shape[0], bias=False, compute_dtype=recipe.compute_dtype, device="meta", **settings
    )
    weight = library.nn.Params4bit(weight, requires_grad=False, module=module, **settings)
    # It is quantized by being moved.
    module.weight = weight.to(weight.device)
    # Otherwise the first input's dtype would be that of all products. It stays in training mode, for in evaluation
    # a CPU's weight is packed for inference, where it has no backward.
    module.compute_type_is_set = True
    return module


def _int8_product(library: Any, codes: Tensor, amax: Tensor, threshold: float, x: Tensor) -> Tensor:
    """The forward of a ``Linear8bitLt`` without bias, of x (tokens, in)."""
    state = library.MatmulLtState()
    state.CB, state.SCB, state.threshold = codes, amax, threshold
    # In training, on a CPU, it would not quantize activations.
    state.has_fp16_weights = state.is_training = False
    with _unsaid("bitsandbytes.autograd._functions", "inputs will be cast"):
        output: Tensor = library.matmul(x, codes, state=state)
    # A kernel's maximum may pass over a NaN. A token's sum does not, and less itself it is 0 or NaN.
    total = x.to(torch.float16).sum(-1, keepdim=True, dtype=torch.float32)
    return output + (total - total).to(output.dtype)


def _to_int8(amax: Tensor) -> Tensor:
    """What the entries of a token of this largest magnitude are multiplied by; of zeros anything will do."""
    return torch.where(amax == 0, 1.0, _INT8_MAX / amax)


_INT8 = OperandQuantizer(fmt=get("int8"), granularity=per_token(), factor_of=_to_int8)


def _row_in_int8(x: Tensor, threshold: float) -> Tensor:
    """What ``int8_vectorwise_quant`` does to x (..., in), as a row of statistics."""
    if not x.numel():
        return nothing_seen(x)
    lowest, highest = torch.aminmax(x.reshape(-1, x.shape[-1]), dim=0)
    by_channel = torch.maximum(highest, -lowest).to(torch.float16)
    some = some_tokens(x)
    given = some.to(torch.float16)
    if threshold > 0:
        # An outlier counts for no token's scale; the rest of its channel does, though that is left out as well.
        given = given.masked_fill(given.abs() >= threshold, 0)
    values, num_clipped = _INT8.values(given)
    if threshold > 0:
        is_outlier = by_channel >= threshold
        some, values = some.masked_fill(is_outlier, 0), values.masked_fill(is_outlier, 0)
    return stats_row(stats_of(some, values, by_channel.amax().float(), num_clipped), x)


def _why_not(library: Any, bits: int, module: nn.Module, under_fsdp: frozenset[int]) -> str | None:
    """Why ``module`` cannot be converted, or None when it can."""
    layer: Any = module
    if isinstance(module, library.nn.Linear4bit):
        return (
            "it is in 4 bits already, and multiplies unquantized activations by its dequantized weight: a recovery path"
            " would be the same product. Load the model in bf16, and let this recipe quantize it"
        )
    if isinstance(module, library.nn.Linear8bitLt):
        return _why_not_int8(library, bits, module)
    reason = why_not_frozen_base(module, under_fsdp)
    if reason is None and is_dtensor(layer.weight):
        return "FSDP2 shards its weight already, and bitsandbytes quantizes whole ones: attach before fully_shard"
    if reason is None and layer.weight.dtype not in _COMPUTE_DTYPES:
        return f"its weight is of {layer.weight.dtype}, which bitsandbytes does not quantize"
    return reason


def _why_not_int8(library: Any, bits: int, layer: Any) -> str | None:
    """The same of a layer that is bitsandbytes's 8-bit one."""
    if "_trimtab_switch" in layer.__dict__:
        return "another recipe has converted it already"
    if bits == 4:
        return "it is in 8 bits already, which bits=8 can switch"
    if type(layer).forward is not library.nn.Linear8bitLt.forward or "forward" in layer.__dict__:
        return "something else has already replaced its forward"
    if layer.state.has_fp16_weights:
        return "its weight is kept in 16 bits and quantized in each forward (has_fp16_weights=True)"
    if layer.weight.dtype != torch.int8:
        return "its weight is not quantized yet, which moving the model to its device does"
    return None


def _library() -> Any:
    """The package bitsandbytes.

    Raises: MissingExtraError: when it is not installed, or without what is relied on.
    """
    try:
        # On a CPU it says once more which optional kernels are not there.
        with _unsaid("bitsandbytes.backends.cpu.ops", "Failed to load CPU gemm_4bit_forward"):
            library: Any = importlib.import_module("bitsandbytes")
    except ModuleNotFoundError as error:
        if error.name != "bitsandbytes":
            raise
        raise MissingExtraError(_FEATURE, "bitsandbytes", "bnb") from None
    with _known_interface(library):
        _ = library.matmul, library.MatmulLtState().threshold, library.nn.Linear8bitLt, library.nn.Linear4bit
        _ = library.nn.Params4bit, library.functional.int8_vectorwise_quant, library.functional.dequantize_4bit
    return library


@contextlib.contextmanager
def _known_interface(library: Any) -> Iterator[None]:
    """Say which version of bitsandbytes is there and which is needed, should it not have what is relied on."""
    try:
        yield
    except (AttributeError, TypeError, ValueError) as error:
        found = getattr(library, "__version__", "another one")
        raise MissingExtraError(
            _FEATURE, "bitsandbytes", "bnb", found=found, needed="0.50", reason=str(error)
        ) from error


@contextlib.contextmanager
def _unsaid(logger: str, text: str) -> Iterator[None]:
    """Keep a logger from saying something that it would repeat at each product."""
    found, others = logging.getLogger(logger), _Without(text)
    found.addFilter(others)
    try:
        yield
    finally:
        found.removeFilter(others)


class _Without(logging.Filter):
    """Passes every record but those that hold a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def filter(self, record: logging.LogRecord) -> bool:
        return self.text not in str(record.msg)
