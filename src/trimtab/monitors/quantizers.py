"""What the quantizers of the low-cost paths did in a step: taken from the conversion, the maximum over all ranks.

All ranks call in the same order with the same units, as they do for the gradient norms. R: recoverable units in the
conversion's order, U: all units in the guard's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.errors import ConfigError
from trimtab.precision.convertible import is_dtensor
from trimtab.precision.recipe import QUANTIZER_STATS, Conversion, QuantizerObserver, Recipe, why_unobserved
from trimtab.precision.units import Unit

__all__ = ["QuantizerStats", "QuantizerValues", "quantizer_metrics", "wants_quantizer_stats"]

QuantizerValues = dict[str, np.ndarray]
"""By name as in ``QUANTIZER_STATS``: float64, shape (units,) in the guard's order, NaN = not known."""

# Those of trimtab that tell something; a test holds it against them all.
_TELLING = "SavedActivations, QuantizedGemm, Int8Base, TorchaoFloat8, TorchaoMXFP8 or BitsandbytesLinear(8)"

LONG_STEPS = 50
"""Flagged for as many steps on end is no burst: five locks of the ``robust`` policy. Our choice."""


def wants_quantizer_stats(
    setting: bool | None, error_limit: float | None, recipe: Recipe | None, amax_limit: float | None = None
) -> bool:
    """Whether a guard with these settings is to observe the quantizers.

    Args:
        setting: ``quantizer_stats`` of ``attach``; None = if the policy judges by them.
        error_limit: The policy's.
        recipe: The recipe, if any.
        amax_limit: The policy's.

    Raises: ConfigError: when the settings contradict one another.
    """
    if setting is not None and not isinstance(setting, bool):
        raise ConfigError("quantizer_stats", setting, "it is True, False or None.", "Set one of them.")
    limits = _given(error_limit, amax_limit)
    if setting is False and limits:
        name = next(iter(limits))
        raise ConfigError(
            "quantizer_stats",
            setting,
            f"{_who_asks(limits)} judges units by what their quantizers do.",
            f"Leave quantizer_stats out, or set {name} to None.",
        )
    wanted = bool(setting) or bool(limits)
    if wanted and recipe is None:
        raise ConfigError(
            "recipe",
            recipe,
            f"{_who_asks(limits)} needs quantizers to observe, and without a recipe there are none.",
            "Attach with a recipe, or leave it out.",
        )
    return wanted


class QuantizerStats:
    """Reads the statistics of a conversion's quantizers, once a step.

    Ranks agree by one all-reduce of the maximum. It runs over the meshes of sharded units, and without sharding over
    the default group, all of whose ranks must then hold the same units.

    Args:
        recipe: The recipe, for the message.
        conversion: Its conversion; starts observing here.
        places: Position of each of the conversion's units among the guard's. Shape (R,).
        num_units: U.
        error_limit: The policy's. With one, units on the recovery path are observed as well.
        error_history: The policy's.
        amax_limit: The policy's; as ``error_limit``.

    Raises: ConfigError: when the conversion is no ``QuantizerObserver``, or as it is configured has nothing to observe.
    """

    def __init__(
        self,
        recipe: Recipe,
        conversion: Conversion,
        places: Sequence[int],
        num_units: int,
        error_limit: float | None,
        error_history: str = "absolute",
        amax_limit: float | None = None,
    ) -> None:
        self._limits = _given(error_limit, amax_limit)
        reason = why_unobserved(conversion)
        if reason is not None:
            raise ConfigError(
                "recipe",
                recipe.name,
                f"{_who_asks(self._limits)} needs a recipe that tells what its quantizers do to activations, and "
                f"{reason}.",
                f"Choose {_TELLING}, or another whose conversion is a trimtab.precision.QuantizerObserver, or leave it "
                "out.",
            )
        assert isinstance(conversion, QuantizerObserver)
        self._observer: QuantizerObserver = conversion
        self._units: tuple[Unit, ...] = tuple(conversion.units)
        self._places = list(places)
        self._num_units = num_units
        self._limit_of_errors = error_limit if error_history == "absolute" else None
        # Of what is no error but a ratio, only the decision knows whether it is above its limit.
        self._told_by_reason = [name.removesuffix("_limit") for name in self._limits]
        self._num_long = 0
        conversion.observe_quantizers(shadow=bool(self._limits))

    @property
    def size(self) -> int:
        """Number of values of ``read``."""
        return len(self._units) * len(QUANTIZER_STATS)

    @torch.no_grad()
    def read(self) -> Tensor:
        """This step's statistics, flat, the maximum over the ranks, NaN where none knows any; device work only.

        They are float32, as which the record keeps an amax.
        """
        stats = self._observer.take_quantizer_stats()
        if stats is None:
            # A rank that has seen nothing still takes part in what all ranks do.
            device = self._units[0].parameters()[0].device
            stats = torch.full((len(self._units), len(QUANTIZER_STATS)), torch.nan, device=device)
        groups = _groups_of(self._units)
        if groups:
            # Norms of shards are summed and these are not, so a sharded model has a second small all-reduce a step;
            # without sharding this is the only one. All values are >= 0: -1 gives way to whatever another rank knows.
            stats = stats.detach().masked_fill(stats.isnan(), -1.0)
            for group in groups:
                torch.distributed.all_reduce(stats, op=torch.distributed.ReduceOp.MAX, group=group)
            stats = stats.masked_fill(stats < 0, torch.nan)
        return stats.detach().flatten().to(torch.float32)

    def drop(self) -> None:
        """Forget what was seen since the last reading: its step is not observed."""
        self._observer.take_quantizer_stats()

    def restart(self) -> None:
        """Training goes on from another state."""
        self.drop()
        self._num_long = 0

    def by_unit(self, values: np.ndarray) -> QuantizerValues | None:
        """A reading that has come to the host, in the guard's order of units; None when nothing is known."""
        table = np.full((self._num_units, len(QUANTIZER_STATS)), np.nan)
        table[self._places] = values.reshape(len(self._units), len(QUANTIZER_STATS))
        if np.isnan(table).all():
            return None
        return {name: table[:, column].copy() for column, name in enumerate(QUANTIZER_STATS)}

    def too_many_for_long(self, values: QuantizerValues | None, budget: int, reasons: Sequence[str] = ()) -> str | None:
        """A sentence when more units than the budget have been above a limit for ``LONG_STEPS`` steps on end.

        Rotating a recovery path that is too small among them does no good: as measured, no more than any schedule.

        Args:
            values: The step's.
            budget: The most units that are ever active at once.
            reasons: The decision's, for the limits of ratios: what made each unit's risk. Empty: it is not known.
        """
        if not self._limits:
            return None
        num_above = 0
        if values is not None:
            above = np.zeros(len(values["error"]), np.bool_)
            if self._limit_of_errors is not None:
                above |= values["error"] > self._limit_of_errors
            if reasons:
                above |= np.isin(reasons, self._told_by_reason)
            num_above = int(above.sum())
        self._num_long = self._num_long + 1 if num_above > budget else 0
        if self._num_long < LONG_STEPS:
            return None
        limits = " or ".join(f"{name}={limit:g}" for name, limit in self._limits.items())
        return (
            f"The quantizers of {num_above} units are above {limits}, and for {self._num_long} steps these have been "
            f"more units than the {budget} that max_active allows on the recovery path. Passing it on from one to the "
            "next does not help them: give the low-cost path a finer scale or a wider format."
        )


def quantizer_metrics(values: QuantizerValues | None, detail_of: Sequence[str] = ()) -> dict[str, float]:
    """A step's values for a logger, flat; only those that are known of some unit.

    Args:
        values: Of one step.
        detail_of: Names of the units whose own values are to be named too, ``trimtab/quantizer/<unit>/error``: all of
            them, or none.

    Example:
        >>> values = {name: np.array([0.5, np.nan]) for name in QUANTIZER_STATS}
        >>> [name for name in quantizer_metrics(values, ["q", "k"]) if "error" in name]
        ['trimtab/quantizer/error_max', 'trimtab/quantizer/error_mean', 'trimtab/quantizer/q/error']
    """
    if values is None:
        return {}
    known = {name: column[~np.isnan(column)] for name, column in values.items()}
    metrics = {f"trimtab/quantizer/{name}_max": float(column.max()) for name, column in known.items() if column.size}
    finite = known["error"][np.isfinite(known["error"])]
    if finite.size:
        metrics["trimtab/quantizer/error_mean"] = float(finite.mean())
    if detail_of:
        metrics |= {
            f"trimtab/quantizer/{unit}/{name}": float(value)
            for name, column in values.items()
            for unit, value in zip(detail_of, column, strict=True)
            if not np.isnan(value)
        }
    return metrics


def _given(error_limit: float | None, amax_limit: float | None) -> dict[str, float]:
    """The limits that a policy has, by the names of its settings."""
    limits = {"error_limit": error_limit, "amax_limit": amax_limit}
    return {name: limit for name, limit in limits.items() if limit is not None}


def _who_asks(limits: dict[str, float]) -> str:
    return next((f"the policy's {name}={limit!r}" for name, limit in limits.items()), "quantizer_stats=True")


def _groups_of(units: Iterable[Unit]) -> list[Any]:
    """The process groups over which the units' statistics are to be compared; None is the default one."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return []
    # Each fully_shard makes a mesh object of its own; equal ones are one mesh.
    meshes = dict.fromkeys(p.device_mesh for unit in units for p in _dtensors(unit))
    if meshes:
        # In turn over each dimension that has more than one rank: a maximum of maxima. A slice of a mesh shares groups.
        return list(dict.fromkeys(mesh.get_group(d) for mesh in meshes for d in range(mesh.ndim) if mesh.size(d) > 1))
    return [None] if torch.distributed.get_world_size() > 1 else []


def _dtensors(unit: Unit) -> list[Any]:
    return [p for p in unit.parameters() if is_dtensor(p)]
