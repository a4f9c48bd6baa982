"""TransformerEngine: its layers' products in FP8, and in high precision while the unit is on the recovery path.

Nothing is replaced. TransformerEngine's precision debug tools ask a *feature* for each layer and each of its three
products whether it is to be quantized (``fp8_gemm_enabled``); the feature here looks the layer up in a table on the
host. The tool knows a layer by its ``name`` alone, so that is what the table is keyed by.

Written against the documented contract of TransformerEngine 2.7 to 2.20 with nvdlfw-inspect 0.2.2, and not run on
hardware by this project. What is relied on, and where it is said:

- A feature is a class registered under the namespace ``transformer_engine`` before ``debug_api.initialize``, which
  makes an instance of it; a section of the configuration file picks the layers that it is asked about, and a layer may
  be in one section only ("Config file structure").
- ``fp8_gemm_enabled(config, layer_name, gemm, iteration)`` answers ``(quantized, next iteration to ask in)``; left
  alone it is ``(True, None)``, and None is never asked again ("Calls to Nvidia-DL-Framework-Inspect"). Before 2.7 the
  answer was a bare bool, and a pair fails an assertion there.
- All three products are asked about in the layer's *forward*; its backward uses what was answered then. A forward that
  activation checkpointing recomputes asks anew (``DebugQuantizer``, made in each forward).
- A layer whose forward runs outside FP8 asks ``inspect_tensor_enabled`` only, and is never asked again if that answers
  None as well (``next_iter_when_debug_should_be_run``). So the feature answers that one too: no, and ask again.
- ``LayerNormMLP`` asks as ``<name>.fc1`` and ``<name>.fc2``; ``GroupedLinear`` as ``<name>.gemm_<i>``, from 2.11 on.
- The tool must be initialized before the first layer is built (``TEDebugState``).
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn

from trimtab.errors import ConfigError, MissingExtraError, TrimtabWarning, verbatim
from trimtab.precision.linear_conversion import in_backward
from trimtab.precision.recipe import PathCost
from trimtab.precision.units import Unit

__all__ = [
    "TransformerEngineConversion",
    "TransformerEngineFP8",
    "TrimtabSwitch",
    "is_te_linear",
    "register_feature",
    "transformer_engine_config",
]

_NAMESPACE = "transformer_engine"
_LAYERS = frozenset({"Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear"})
# Its other home of linear layers, ``te.ops``, asks no feature.
_HOME = "transformer_engine.pytorch.module."
_INSTALL = "pip install --no-build-isolation 'transformer_engine[pytorch]>=2.7' 'nvdlfw-inspect>=0.2.2'"
_PATH = "The TransformerEngine path"


@dataclass(frozen=True, slots=True)
class TransformerEngineFP8:
    """Run TransformerEngine's layers in FP8, and in high precision while the unit is on the recovery path.

    The low-cost path is whatever format the run's own ``te.autocast`` (before 2.9: ``te.fp8_autocast``) chooses;
    outside it both paths are the same. Use:

        Path("te.yaml").write_text(transformer_engine_config())
        debug_api.initialize("te.yaml", feature_dirs=register_feature())  # import nvdlfw_inspect.api as debug_api
        model = build_model()  # after the line above; then debug_api.infer_and_assign_layer_names(model)
        guard = trimtab.attach(model, TransformerEngineFP8(), units=is_te_linear)
        with te.autocast(enabled=True): loss = model(batch)
        loss.backward(); guard.step(); optimizer.step(); debug_api.step()

    Written against the documented contract of TransformerEngine 2.7 to 2.20 and nvdlfw-inspect 0.2.2; not run on
    hardware by this project. What the debug tool costs and forbids holds here too: a layer is asked in each forward, it
    runs without TransformerEngine's fusions while it is on the recovery path, and neither CUDA graphs nor delayed
    weight gradients are allowed. A copy of the model has layers of the same names, which are switched along with it.

    Args:
        unit: "projection": a unit's modules are TransformerEngine's linear layers. "block": a unit is any module, and
            all such layers in it are switched together.

    Raises: ConfigError: when ``unit`` is neither.

    Source: TransformerEngine's documentation, "Precision debug tools".

    Example:
        >>> TransformerEngineFP8().name
        'transformer-engine'
    """

    unit: Literal["projection", "block"] = field(default="projection", kw_only=True)

    name = "transformer-engine"

    def __post_init__(self) -> None:
        if self.unit not in ("projection", "block"):
            raise ConfigError("unit", self.unit, "it is 'projection' or 'block'.", "Choose one of the two.")

    def to_dict(self) -> dict[str, Any]:
        """The resolved configuration, JSON-able."""
        return {"name": self.name, **dataclasses.asdict(self)}

    def convert(self, model: nn.Module, units: Sequence[Unit]) -> TransformerEngineConversion:
        """Take over the switch of TransformerEngine's layers among ``units``; all start on the low-cost path.

        Raises:
            ConfigError: when none of the units can be switched, two layers have one name, or the debug tool was not
                initialized, with our feature, before the model was built.
            MissingExtraError: when TransformerEngine or its debug tool is not installed, or of another contract.
        """
        tool = _Tool()
        layers = {unit.name: _layers_of(unit, self.unit) for unit in units}
        reasons = {unit.name: _why_not(unit, layers[unit.name]) for unit in units}
        switchable = [unit for unit in units if reasons[unit.name] is None]
        if not switchable:
            name, reason = next(iter(reasons.items()), ("the list", "it is empty"))
            raise ConfigError(
                "units",
                [u.name for u in units][:3],
                f"only linear layers of TransformerEngine can be switched, and {name} cannot: {reason}.",
                "Pass units=trimtab.precision.transformer_engine.is_te_linear.",
            )
        tool.check_in_use(model)
        return TransformerEngineConversion(self, switchable, [layers[unit.name] for unit in switchable])


class TransformerEngineConversion:
    """A model whose TransformerEngine layers ask it for their precision; made by ``TransformerEngineFP8.convert``.

    Args:
        recipe: The recipe.
        units: The units.
        layers: The linear layers of each.

    Raises: ConfigError: when two units, or another conversion that is still alive, have a layer of the same name.
    """

    def __init__(
        self, recipe: TransformerEngineFP8, units: Sequence[Unit], layers: Sequence[Sequence[nn.Module]]
    ) -> None:
        self.recipe = recipe
        self.units = tuple(units)
        self.costs = tuple(_cost(of_unit) for of_unit in layers)
        self.pull: Callable[[], None] | None = None
        self._pulling = threading.RLock()
        self._is_pulling = False
        self._active = [False] * len(self.units)
        self._answered = [False] * len(self.units)
        self._has_asked = [False] * len(self.units)
        self._step: int | None = None
        self._index: dict[str, int] = {}
        for index, of_unit in enumerate(layers):
            for name in (name for layer in of_unit for name in _names_asked(layer)):
                if self._index.setdefault(name, index) != index or name in _steered:
                    raise ConfigError(
                        "units",
                        self.units[index].name,
                        f"TransformerEngine knows a layer by its name alone, and two are called {name!r}.",
                        "Call debug_api.infer_and_assign_layer_names(model), and detach other models first.",
                    )
        _steered.update(dict.fromkeys(self._index, self))

    def route(self, active: Sequence[bool]) -> None:
        """Put the units flagged in ``active`` on the recovery path, the rest on the low-cost path."""
        self._active = [bool(flag) for flag in active]

    def begin_step(self, step: int) -> None:
        """Optimizer step ``step`` begins; after the first whole one, say once which units were never asked about."""
        is_next, self._step = self._step is not None and step == self._step + 1, step
        silent = [unit.name for unit, asked in zip(self.units, self._has_asked, strict=True) if not asked]
        if is_next and silent:
            self._has_asked = [True] * len(self.units)
            warnings.warn(
                f"TransformerEngine has not asked about {len(silent)} of {len(self.units)} units in a step "
                f"({', '.join(silent[:3])}), so they are not switched. Give debug_api.initialize the text of "
                "transformer_engine_config(), with a pattern that matches their names as they were when trimtab was "
                "attached; GroupedLinear asks from TransformerEngine 2.11 on.",
                TrimtabWarning,
                stacklevel=3,
            )

    def undo(self) -> None:
        """Give the switch back: from the next forward on, the layers get TransformerEngine's default answer."""
        for name in self._index:
            if _steered.get(name) is self:
                del _steered[name]

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the route is the controller's."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to take back; the step that begins next need not follow a whole one."""
        self._step = None

    def note_call(self, layer_name: str) -> None:
        """TransformerEngine has run the layer, in FP8 or not."""
        self._has_asked[self._index[layer_name]] = True

    def is_quantized(self, layer_name: str) -> bool:
        """Whether the layer's products are to be quantized now; asks for the route first, where one is due.

        In a backward it is what the layer's last forward was told, whatever the route is by then: a forward that
        checkpointing recomputes there must run as the first one did.
        """
        index = self._index[layer_name]
        if not in_backward():
            self._take_route()
            self._answered[index] = self._active[index]
        return not self._answered[index]

    def _take_route(self) -> None:
        """Ask for the route that is due; other threads wait until it is here."""
        if self.pull is None:
            return
        with self._pulling:
            pull = self.pull
            if pull is None or self._is_pulling:
                return
            self._is_pulling = True
            try:
                pull()
            finally:
                self._is_pulling = False
                if self.pull is pull:
                    self.pull = None


# The tool makes the feature's instance and calls it with no more than a name: this is how it finds who steers a layer.
# Weak, so that a conversion that nobody holds any more steers nothing.
_steered: weakref.WeakValueDictionary[str, TransformerEngineConversion] = weakref.WeakValueDictionary()


class TrimtabSwitch:
    """The feature that TransformerEngine asks; named in the configuration file, registered by ``register_feature``.

    Layers that no conversion steers get TransformerEngine's default, and are asked again: one may come.
    """

    def fp8_gemm_enabled(
        self, config: Mapping[str, Any], layer_name: str, gemm: str, iteration: int
    ) -> tuple[bool, int]:
        """Whether the product ``gemm`` of the layer is to be quantized, and the next iteration to ask in."""
        conversion = _steered.get(layer_name)
        # The next one always: a later one would keep a switch waiting until then.
        return conversion is None or conversion.is_quantized(layer_name), iteration + 1

    def inspect_tensor_enabled(
        self, config: Mapping[str, Any], layer_name: str, tensor_name: str, iteration: int
    ) -> tuple[bool, int]:
        """No tensor is to be shown; the question is to come again, or a forward outside FP8 would be the last asked."""
        conversion = _steered.get(layer_name)
        if conversion is not None:
            conversion.note_call(layer_name)
        return False, iteration + 1

    def parse_config_and_api(self, config: Mapping[str, Any], **_: Any) -> tuple[bool, None]:
        """All products and tensors of a layer are meant: whether the feature is on, and no narrower configuration."""
        return bool(config["enabled"]), None


def register_feature() -> list[str]:
    """Register ``TrimtabSwitch`` with the debug tool; once before each ``debug_api.initialize``.

    Returns: The ``feature_dirs`` to give to it: the folder of TransformerEngine's own features, where the namespace is
        that ours belongs to. Ours needs no folder: the tool would run every file in it a second time.

    Raises:
        ConfigError: when the tool is initialized already.
        MissingExtraError: when TransformerEngine or its debug tool is not installed, or of another contract.
    """
    tool = _Tool()
    if tool.api.DEBUG_MANAGER is not None:
        raise ConfigError(
            "debug_api",
            verbatim("initialized"),
            "a feature is registered before the debug tool is initialized.",
            "Call register_feature() first, or debug_api.end_debug() and build the model anew.",
        )
    for method in (TrimtabSwitch.fp8_gemm_enabled, TrimtabSwitch.inspect_tensor_enabled):
        tool.registry.api_method(method)
    tool.registry.Registry.register_feature(namespace=_NAMESPACE)(TrimtabSwitch)
    return [str(Path(tool.engine.__file__).parent / "debug" / "features")]


def transformer_engine_config(layer_name_pattern: str = ".*") -> str:
    r"""The configuration file of the debug tool, as text, that has TransformerEngine ask our feature.

    It is written before there is a model to name layers of, since the tool is initialized before the model is built.
    Other features for the same layers go into this section, beside ours: a layer may be in one section only. One that
    switches FP8 off, as ``DisableFP8GEMM`` does, has no effect beside ours, which answers for all products; leave the
    layers that are to stay in high precision out of ``layer_name_pattern`` instead. With the
    weight cache of ``is_first_microbatch`` leave them out, for TransformerEngine would update a weight of the step
    before in the precision of the step before.

    Args:
        layer_name_pattern: Regular expression, searched for in a layer's name; all layers when left out. Each layer
            that it matches is asked about in each forward.

    Raises: ConfigError: when it is no regular expression.

    Example:
        >>> print(transformer_engine_config(r"layers\.\d+\."), end="")
        trimtab:
          enabled: True
          layers:
            layer_name_regex_pattern: 'layers\.\d+\.'
          transformer_engine:
            TrimtabSwitch:
              enabled: True
    """
    try:
        re.compile(layer_name_pattern)
    except (re.error, TypeError) as error:
        raise ConfigError(
            "layer_name_pattern", layer_name_pattern, f"a regular expression is needed ({error}).", "Try '.*'."
        ) from None
    quoted = layer_name_pattern.replace("'", "''")
    return (
        "trimtab:\n"
        "  enabled: True\n"
        "  layers:\n"
        f"    layer_name_regex_pattern: '{quoted}'\n"
        f"  {_NAMESPACE}:\n"
        f"    {TrimtabSwitch.__name__}:\n"
        "      enabled: True\n"
    )


def is_te_linear(module: nn.Module, fqn: str = "") -> bool:
    """Whether ``module`` is a linear layer of TransformerEngine, or inherits from one; a filter for ``units``.

    Told by the class alone, so it asks no import of a run that has no TransformerEngine.
    """
    return _te_class(module) is not None


def _te_class(module: nn.Module) -> str | None:
    """Name of the TransformerEngine layer that ``module`` is of or inherits."""
    for c in type(module).__mro__:
        if c.__name__ in _LAYERS and c.__module__.startswith(_HOME):
            return c.__name__
    return None


def _layers_of(unit: Unit, kind: str) -> list[nn.Module]:
    """The linear layers that are switched with ``unit``, each once."""
    inside = unit.modules if kind == "projection" else [m for module in unit.modules for m in module.modules()]
    return list({id(m): m for m in inside if is_te_linear(m)}.values())


def _why_not(unit: Unit, layers: Sequence[nn.Module]) -> str | None:
    """Why ``unit`` cannot be switched, or None when it can."""
    others = [m for m in unit.modules if not is_te_linear(m)]
    if not layers and others:
        kind = type(others[0])
        if kind.__module__.startswith("transformer_engine.pytorch.ops."):
            return f"it is a te.ops {kind.__name__}, which asks no feature"
        if any(is_te_linear(m) for m in others[0].modules()):
            return f"it is a {kind.__name__} around such layers, which is a unit with unit='block'"
        return f"it is a {kind.__name__}"
    for layer in layers:
        attributes: Any = layer
        if not getattr(attributes, "name", None):
            return "it has no name yet; debug_api.infer_and_assign_layer_names(model) gives it one"
        if getattr(attributes, "primary_weights_in_fp8", False):
            return "its weight exists in FP8 only, so there is none in high precision to recover with"
    return None


def _names_asked(layer: nn.Module) -> list[str]:
    """The names under which TransformerEngine asks about ``layer``."""
    attributes: Any = layer
    name = str(attributes.name)
    kind = _te_class(layer)
    if kind == "LayerNormMLP":
        return [f"{name}.fc1", f"{name}.fc2"]
    if kind == "GroupedLinear":
        return [f"{name}.gemm_{i}" for i in range(attributes.num_gemms)]
    return [name]


def _cost(layers: Sequence[nn.Module]) -> PathCost:
    """What a unit of ``layers`` keeps of its products' inputs: a byte an element, or the weight's own precision.

    Scales, and what its norms and activation functions keep, are left out: they are the same on both paths.
    """
    low = high = flops = 0.0
    for layer in layers:
        attributes: Any = layer
        weights = [p for p in layer.parameters() if p.dim() >= 2]
        # An MLP has two products in a row; the weights of all others share one input.
        is_mlp = _te_class(layer) == "LayerNormMLP"
        inputs = sum(int(w.shape[-1]) for w in weights) if is_mlp else int(attributes.in_features)
        low += inputs
        high += inputs * max((w.element_size() for w in weights), default=2)
        # A token goes through one of a group's products.
        flops += 6.0 * sum(w.numel() for w in weights) / getattr(attributes, "num_gemms", 1)
    return PathCost(low_saved_bytes=low, high_saved_bytes=high, flops=flops)


class _Tool:
    """TransformerEngine and its debug tool, imported and found to be of the contract that is relied on.

    It must not import ``transformer_engine.debug.features.api``: that registers a namespace, which the debug tool can
    do only once it is initialized.

    Raises: MissingExtraError: when they are not.
    """

    def __init__(self) -> None:
        self.engine = _import("transformer_engine")
        _import("nvdlfw_inspect")
        try:
            self.api = importlib.import_module("nvdlfw_inspect.api")
            self.registry = importlib.import_module("nvdlfw_inspect.registry")
            importlib.import_module("transformer_engine.pytorch")
            caching = importlib.import_module("transformer_engine.debug.pytorch.utils")
            self.state: Any = importlib.import_module("transformer_engine.debug.pytorch.debug_state").TEDebugState
            _ = self.registry.Registry.register_feature, self.registry.Registry.data, self.registry.api_method
            _ = self.api.DEBUG_MANAGER, caching.next_iter_when_debug_should_be_run
        except (ImportError, AttributeError, OSError) as error:
            versions = [f"{n} {_version(n)}" for n in ("transformer_engine", "nvdlfw-inspect")]
            raise _UnusableError(
                "transformer_engine",
                f"{_PATH} is written against the debug tools of TransformerEngine 2.7 to 2.20 and nvdlfw-inspect 0.2.2,"
                f" and those of the installed {' and '.join(versions)} differ ({error}).",
            ) from error

    def check_in_use(self, model: nn.Module) -> None:
        """Refuse a model whose layers will never ask our feature."""
        remedy = "Call register_feature() and debug_api.initialize(...) first, and build the model then."
        shown = verbatim(type(model).__name__)
        if self.api.DEBUG_MANAGER is None or not self.state.debug_enabled:
            raise ConfigError(
                "model", shown, "its layers ask a feature only if the debug tool was initialized before.", remedy
            )
        namespace = self.registry.Registry.data.get(_NAMESPACE)
        if TrimtabSwitch.__name__ not in getattr(namespace, "features", ()):
            raise ConfigError("model", shown, "the debug tool was initialized without our feature.", remedy)


def _import(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except (ImportError, OSError) as error:
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == package
        problem = "which is not installed" if is_absent else f"which cannot be imported ({error})"
        raise _UnusableError(package, f"{_PATH} needs the package {package!r}, {problem}.") from error


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "(of unknown version)"


class _UnusableError(MissingExtraError):
    """What trimtab has no extra for, since its wheel has to match the CUDA of the machine."""

    def __init__(self, package: str, problem: str) -> None:
        ImportError.__init__(self, f"{problem} Install it with: {_INSTALL}")
        self.feature, self.package, self.extra = _PATH, package, ""
        self.problem = problem

    def __reduce__(self) -> Any:
        return type(self), (self.package, self.problem)
