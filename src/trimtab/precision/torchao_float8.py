"""torchao's float8 training: its own layer, configuration and kernels, and the plain product on the recovery path.

A plain layer becomes neither a ``Float8Linear`` nor gets other parameters. A layer of torchao's that holds no weights
computes on those that the plain layer has at the time. A ``Float8Linear`` that the user has made stays one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import importlib.metadata
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from trimtab.errors import ConfigError, MissingExtraError, verbatim
from trimtab.formats import get, per_tensor, per_token
from trimtab.precision.conversion_plan import Planned, plan_conversion
from trimtab.precision.convertible import why_not_plain_linear
from trimtab.precision.grouping import Grouping, check_unit
from trimtab.precision.library_linear import Forward, LibraryConversion, Paths
from trimtab.precision.operand_quantizer import OperandQuantizer
from trimtab.precision.recipe import PathCost
from trimtab.precision.units import Unit, linear_class

__all__ = [
    "TORCHAO_VERSION",
    "TorchaoConversion",
    "TorchaoFloat8",
    "can_multiply",
    "on_weights_of",
    "torchao_api",
    "why_not_for_torchao",
]

TORCHAO_VERSION = "0.18"
"""The version whose classes are relied on; those of its prototypes move."""

Float8RecipeName = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
Products = Literal["emulated", "scaled_mm", "mixed"]
_FLOAT8_CAPABILITY = (8, 9)
_ANY_GPU = (0, 0)
# Those of OCP; the ones that older GPUs of AMD have instead are no formats of ours.
_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
_SMALLEST_AMAX = 1e-12  # torchao.float8.float8_utils.EPS


@dataclass(frozen=True, slots=True)
class TorchaoFloat8:
    """Multiply in float8 as torchao does, and in high precision while the unit is on the recovery path.

    Layers that ``convert_to_float8_training`` has converted before are switched too, and keep the configuration they
    have. A layer that is plain is plain in an evaluation without gradients as well, while theirs stays in float8.

    Its quantizers are observed at the input of the forward product, with the dtype, granularity and kind of scale that
    the configuration has it cast with. A scale for the whole tensor needs the largest magnitude of all of it, one
    reduction that is then done a second time; the rest is of some tokens. A layer whose configuration casts no input
    is not observed, and neither is what the weight gradient reads, where it is cast anew along the tokens.

    Args:
        config: A ``Float8LinearConfig``, or the name of one of torchao's; None is torchao's default.
        unit: What is switched as one: a projection, an attention or MLP half, or a block ("layer" is the same).
        emulate: Multiply rounded values in high precision, which runs anywhere and saves no time. None does so where
            the device of the weights has no float8 products: on a CPU, and on GPUs below capability 8.9.

    Raises: ConfigError: when a setting is none of these, or the weights were to be gathered in float8.

    Example:
        >>> TorchaoFloat8("rowwise").to_dict()["config"]
        'rowwise'
    """

    config: Any = None
    unit: Grouping = "projection"
    emulate: bool | None = None

    name = "torchao-float8"

    def __post_init__(self) -> None:
        names = get_args(Float8RecipeName)
        # By its name, since torchao is first imported where it is needed.
        is_config = type(self.config).__name__ == "Float8LinearConfig"
        if self.config is not None and self.config not in names and not is_config:
            allowed = f"it is a Float8LinearConfig or one of {', '.join(map(repr, names))}."
            raise ConfigError("config", self.config, allowed, "Pass one of them, or leave it out.")
        if is_config and self.config.enable_fsdp_float8_all_gather:
            raise ConfigError(
                "enable_fsdp_float8_all_gather",
                True,
                "weights that arrive in float8 leave nothing for a recovery path in high precision.",
                "Set it to False.",
            )
        check_unit(self.unit)
        if self.emulate is not None and type(self.emulate) is not bool:
            raise ConfigError("emulate", self.emulate, "it is True, False or None.", "Leave it out.")

    def to_dict(self) -> dict[str, Any]:
        """The configuration, JSON-able; what came of it is in ``TorchaoConversion.to_dict``."""
        return {"name": self.name, "config": _as_json(self.config), "unit": self.unit, "emulate": self.emulate}

    def convert(self, model: nn.Module, units: Sequence[Unit]) -> TorchaoConversion:
        """Convert the linear layers of ``units`` in place; all start on the low-cost path.

        Raises:
            ConfigError: when none of the units can be converted, or a layer is in float8 already but not as is set
                here; the model is then untouched.
            MissingExtraError: when torchao is not installed, or in a version of another interface.
        """
        with torchao_api(self.name):
            from torchao.float8 import Float8LinearConfig
            from torchao.float8.float8_linear import Float8Linear

            config = self.config or Float8LinearConfig()
            if isinstance(config, str):
                config = Float8LinearConfig.from_recipe_name(config)
            layers = _Float8Layers(Float8Linear, config, self.emulate)
        planned = plan_conversion(model, units, self.name, layers.why_not)
        converted = [layer for _, of_unit in planned for layer in of_unit]
        layers.check_settings(converted, model, self.config)
        with torchao_api(self.name):
            paths = {id(layer): layers.paths(layer) for layer in converted}
        configs = [_as_json(layers.config_of(layer)) for layer in converted]
        settings = self.to_dict() | {"configs": [c for i, c in enumerate(configs) if c not in configs[:i]]}
        return TorchaoConversion(settings, model, planned, paths, layers.is_emulated)


class TorchaoConversion(LibraryConversion):
    """A model whose layers multiply as torchao's do; made by ``TorchaoFloat8.convert`` or ``TorchaoMXFP8.convert``.

    Args:
        settings: Those of the recipe, JSON-able.
        model: The model.
        planned: Each unit with the layers of it that are converted.
        paths: The forwards of each layer, by its identity.
        is_emulated: Whether the products of a layer are emulated where its weights are now.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        model: nn.Module,
        planned: Sequence[Planned],
        paths: Mapping[int, Paths],
        is_emulated: Callable[[nn.Module], bool],
    ) -> None:
        self.settings = dict(settings)
        self._is_emulated = is_emulated
        operators = [layers for _, layers in planned]
        super().__init__(
            model, [unit for unit, _ in planned], [_cost(layers) for layers in operators], operators, paths
        )

    @property
    def products(self) -> Products:
        """How the low-cost path multiplies where the weights are now: by hardware or emulated, or some so, some so."""
        found = {self._is_emulated(layer) for layer in self.layers}
        if len(found) == 2:
            return "mixed"
        return "emulated" if found.pop() else "scaled_mm"

    def to_dict(self) -> dict[str, Any]:
        """The settings as they were resolved, JSON-able, with the version of torchao."""
        return {**self.settings, "products": self.products, "torchao": _version()}


@contextlib.contextmanager
def torchao_api(feature: str) -> Iterator[None]:
    """Say which version of torchao is there and which is needed, should what runs inside not find what it relies on."""
    try:
        yield
    except (ImportError, AttributeError, TypeError, ValueError, AssertionError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torchao":
            raise MissingExtraError(feature, "torchao", "torchao") from error
        raise MissingExtraError(
            feature, "torchao", "torchao", found=_version(), needed=TORCHAO_VERSION, reason=str(error)
        ) from error


def _version() -> str:
    try:
        return importlib.metadata.version("torchao")
    except importlib.metadata.PackageNotFoundError:
        return "one of unknown version"


def can_multiply(device: torch.device, capability: tuple[int, int]) -> bool:
    """Whether the device has products of a kind that GPUs have from ``capability`` on.

    Weights on the meta device are taken to be made on a GPU, where there is one.
    """
    if device.type == "meta" and torch.cuda.is_available():
        device = torch.device("cuda")
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= capability


def why_not_for_torchao(module: nn.Module, under_fsdp: frozenset[int]) -> str | None:
    """Why torchao's layers cannot compute for ``module`` whatever its sizes, or None when they can."""
    reason = why_not_plain_linear(module, under_fsdp)
    if reason is not None:
        return reason
    if linear_class(module) is not nn.Linear:
        return f"torchao has no layer with the transposed weight of a {type(module).__name__}"
    return None


def on_weights_of(layer: nn.Module, of_torchao: nn.Module, weight_of: Callable[[nn.Module], Tensor]) -> Forward:
    """The forward of a layer of torchao's, on the weights that ``layer`` has at the time.

    It may keep none itself: wrappers such as FSDP put other tensors in their place, and wait for the first to go.

    Args:
        layer: The layer that it computes for.
        of_torchao: The layer of torchao's; its own weights are dropped.
        weight_of: Reads the weight.
    """
    of_torchao._parameters.clear()
    of_torchao.__dict__["_layer"] = layer
    of_torchao.__class__ = _borrowing_class(type(of_torchao), weight_of)  # type: ignore[arg-type]
    return of_torchao.forward


@functools.cache
def _borrowing_class(base: type[nn.Module], weight_of: Callable[[nn.Module], Tensor]) -> type[nn.Module]:
    """The subclass of ``base`` that reads another layer's weight and bias."""
    weight = property(lambda self: weight_of(self._layer))
    bias = property(lambda self: self._layer.bias)
    return type(base.__name__, (base,), {"weight": weight, "bias": bias})


class _Float8Layers:
    """What is known of layers that run in float8: torchao's class, and the settings for those that are plain."""

    def __init__(self, float8_linear: type[nn.Module], config: Any, emulate: bool | None) -> None:
        self._float8_linear = float8_linear
        # False is what a configuration says that nobody has asked; True was meant.
        self._emulate = True if emulate is None and config.emulate else emulate
        self._configs = {flag: dataclasses.replace(config, emulate=flag) for flag in (False, True)}

    def is_float8(self, layer: nn.Module) -> bool:
        """Whether the user has made it a ``Float8Linear``."""
        return isinstance(layer, self._float8_linear)

    def config_of(self, layer: Any) -> Any:
        """Its ``Float8LinearConfig``, where its weights are now."""
        return layer.config if self.is_float8(layer) else self._configs[self.is_emulated(layer)]

    def is_emulated(self, layer: Any) -> bool:
        """Whether its products are emulated, where its weights are now."""
        if self.is_float8(layer):
            return bool(layer.config.emulate)
        if self._emulate is None:
            return not can_multiply(layer.weight.device, _FLOAT8_CAPABILITY)
        return self._emulate

    def why_not(self, module: nn.Module, under_fsdp: frozenset[int]) -> str | None:
        """Why ``module`` cannot be converted, or None when it can; a ``conversion_plan.WhyNot``."""
        judged = module
        if self.is_float8(module):
            layer: Any = module
            if layer.config.enable_fsdp_float8_all_gather:
                return (
                    "enable_fsdp_float8_all_gather has its weight arrive in float8, which leaves nothing for a "
                    "recovery path in high precision"
                )
            if type(module).forward is self._float8_linear.forward:
                # All else is asked of it as of the plain layer that it was.
                judged = nn.Linear.__new__(nn.Linear)
                judged.__dict__ = module.__dict__
                under_fsdp |= {id(judged)} if id(module) in under_fsdp else frozenset()
        return why_not_for_torchao(judged, under_fsdp) or self._why_not_here(module)

    def check_settings(self, layers: Sequence[nn.Module], model: nn.Module, given: Any) -> None:
        """Refuse a setting that one of ``layers`` which is in float8 already does not have."""
        names = {id(module): name for name, module in model.named_modules()}
        remedy = "Leave it out, or attach before convert_to_float8_training."
        for layer in filter(self.is_float8, layers):
            name, has = names.get(id(layer), "a layer"), self.config_of(layer)
            if self._emulate is not None and has.emulate != self._emulate:
                raise ConfigError("emulate", self._emulate, f"{name} is a Float8Linear that has it otherwise.", remedy)
            if given is not None and has != self._configs[has.emulate]:
                shown = given if isinstance(given, str) else verbatim(type(given).__name__)
                raise ConfigError("config", shown, f"{name} is a Float8Linear of another configuration.", remedy)

    def paths(self, layer: nn.Module) -> Paths:
        """The forwards of a layer, and what its low-cost path refuses."""
        high: Forward | None = None
        if self.is_float8(layer):
            forward: Forward = functools.partial(type(layer).forward, layer)  # type: ignore[arg-type]
            high = functools.partial(_plain_product, layer)
        else:
            by_emulation = {
                flag: on_weights_of(layer, self._float8_linear.from_float(_on_meta(layer), config), _weight_as_it_is)  # type: ignore[attr-defined]
                for flag, config in self._configs.items()
            }

            def forward(x: Tensor) -> Tensor:
                if not torch.is_autocast_enabled(x.device.type) and x.dtype != layer.weight.dtype:
                    return F.linear(x, layer.weight, layer.bias)  # type: ignore[arg-type]  # says what is wrong
                return by_emulation[self.is_emulated(layer)](x)

        def low(x: Tensor) -> Tensor:
            # torchao takes the maximum of the input, and an expert may get no token.
            return forward(x) if x.numel() else _plain_product(layer, x)

        quantizer = _quantizer_of_input(self.config_of(layer))
        return Paths(low=low, high=high, refuses=functools.partial(self._refuse, layer), quantizer=quantizer)

    def _why_not_here(self, layer: Any) -> str | None:
        """Why the device of its weights cannot run it, or None when it can."""
        if self.is_emulated(layer):
            return None
        on_gpu = can_multiply(layer.weight.device, _ANY_GPU)
        if on_gpu and not can_multiply(layer.weight.device, _FLOAT8_CAPABILITY):
            return "its GPU has no float8 products, and emulate=False"
        inputs, outputs, _ = _must_be_multiples_of_16(self.config_of(layer))
        sizes = (layer.in_features, inputs), (layer.out_features, outputs)
        if on_gpu and any(size % 16 for size, is_limited in sizes if is_limited):
            return (
                f"it has {layer.in_features} inputs and {layer.out_features} outputs, and a GPU's float8 products need "
                "multiples of 16"
            )
        return None

    def _refuse(self, layer: Any, shape: torch.Size) -> None:
        """Refuse a number of tokens that the products of the backward cannot have."""
        if self.is_emulated(layer) or not can_multiply(layer.weight.device, _ANY_GPU):
            return
        tokens = math.prod(shape[:-1])
        if tokens % 16 and _must_be_multiples_of_16(self.config_of(layer))[2]:
            raise ConfigError(
                "tokens",
                tokens,
                "a GPU's float8 products need a multiple of 16 tokens in each forward.",
                "Pad the batch, or pass a Float8LinearConfig with pad_inner_dim=True.",
            )


def _quantizer_of_input(config: Any) -> OperandQuantizer | None:
    """What a configuration has the forward product do to its input; None where it does nothing that is known."""
    cast = config.cast_config_input
    if cast.scaling_type.value == "disabled" or cast.target_dtype not in _FORMATS:
        return None
    fmt, by_powers_of_2 = get(_FORMATS[cast.target_dtype]), config.round_scales_to_power_of_2

    def factor_of(amax: Tensor) -> Tensor:
        # In float64 and then float32, as torchao.float8.float8_utils.amax_to_scale.
        factor = (fmt.max_value / amax.double().clamp(min=_SMALLEST_AMAX)).float()
        return torch.exp2(torch.floor(torch.log2(factor))) if by_powers_of_2 else factor

    granularity = per_tensor() if cast.scaling_granularity.value == "tensorwise" else per_token()
    return OperandQuantizer(fmt=fmt, granularity=granularity, factor_of=factor_of)


def _must_be_multiples_of_16(config: Any) -> tuple[bool, bool, bool]:
    """Whether inputs, outputs and tokens of a layer must be, for ``torch._scaled_mm`` on a GPU.

    Of (M, K) times (K, N) it wants that of K and N; ``pad_inner_dim`` pads K.
    """
    output, grad_input, grad_weight = (
        cast.scaling_type.value != "disabled"
        for cast in (
            config.cast_config_input,
            config.cast_config_grad_output,
            config.cast_config_grad_output_for_grad_weight,
        )
    )
    is_bare = not config.pad_inner_dim
    return (
        grad_input or grad_weight or (output and is_bare),
        output or (grad_input and is_bare),
        grad_weight and is_bare,
    )


def _plain_product(layer: Any, x: Tensor) -> Tensor:
    """The product in high precision, in the dtype of the input: torchao's layer takes any, so its recovery path does.

    Autocast has cast the input by now, and would cast the weights alike.
    """
    return F.linear(x, layer.weight.to(x.dtype), None if layer.bias is None else layer.bias.to(x.dtype))


def _weight_as_it_is(layer: Any) -> Tensor:
    weight: Tensor = layer.weight
    return weight


def _on_meta(layer: Any) -> nn.Linear:
    """A layer of the same sizes, without memory."""
    return nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")


def _as_json(value: Any) -> Any:
    """A configuration of torchao's, JSON-able."""
    if dataclasses.is_dataclass(value):
        return {field.name: _as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def _cost(layers: Sequence[nn.Module]) -> PathCost:
    """What layers keep for backward: theirs the input in high precision, even if the weight is frozen."""
    low = high = flops = 0.0
    for layer in layers:
        weight: Any = layer.weight
        kept = weight.shape[1] * weight.element_size()
        low += kept
        high += kept if weight.requires_grad else 0
        flops += 6.0 * weight.numel()
    return PathCost(low_saved_bytes=low, high_saved_bytes=high, flops=flops)
