"""The faults of a comparison: a function of the units, the length of the run and the seed, the same for every arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from trimtab.control.policy import is_real
from trimtab.errors import ConfigError, nearest_names
from trimtab.experiments.arms import burst_schedule
from trimtab.experiments.compare.comparison import Comparison
from trimtab.faults import Fault, StoredCopyFaults, random_bursts
from trimtab.faults.outliers import OutlierChannels, OutlierFaults, random_outliers

__all__ = ["FaultWindow", "PlannedFaults", "plan_faults"]


_STREAM = 0xF1
"""Names the stream of random numbers that permanent faults are drawn from."""


@dataclass(frozen=True, slots=True)
class FaultWindow:
    """Where and when one fault holds.

    Args:
        unit: Name of the unit.
        start_step: First optimizer step that suffers it.
        end_step: The first one that no longer does.
    """

    unit: str
    start_step: int
    end_step: int


@dataclass(frozen=True, slots=True)
class PlannedFaults:
    """What is injected into a run, and where it falls."""

    faults: tuple[Fault, ...] = ()
    """For ``guard.inject``."""
    windows: tuple[FaultWindow, ...] = ()
    """One a fault, by start."""
    settings: tuple[Mapping[str, Any], ...] = ()
    """What it takes to repeat each; JSON-able."""


def plan_faults(comparison: Comparison, units: Sequence[str], seed: int) -> PlannedFaults:
    """The faults of the runs of one seed.

    Bursts: 30 in 250 steps, starting after a fifth of the run and up to 84% of it, and as dense in a run of another
    length; ``fault_settings`` may say otherwise: num_bursts, first_step, last_step, num_steps and factor (a range
    each), num_channels. Permanent outliers: share of the units (0.1), factor (300) and num_channels.

    Args:
        comparison: Which faults, and how long the run is.
        units: Names of the units that they may fall on.
        seed: Of all choices.

    Raises: ConfigError: when a setting does not exist or cannot be meant.
    """
    kind, settings = comparison.faults, dict(comparison.fault_settings)
    num_steps = comparison.plan.num_steps
    if kind == "none":
        return PlannedFaults()
    if kind == "permanent-outliers":
        chosen = _checked(settings, {"share": 0.1, "factor": 300.0, "num_channels": None})
        return _permanent(chosen, units, num_steps, seed)
    usual: dict[str, Any] = {
        **burst_schedule(num_steps),
        "num_steps": None,
        "factor": None,
        "num_channels": None,
    }
    chosen = {name: value for name, value in _checked(settings, usual).items() if value is not None}
    chosen |= {name: _range(name, chosen[name]) for name in ("num_steps", "factor") if name in chosen}
    if kind == "stored-copy-bursts":
        bursts: Sequence[Any] = random_bursts(units, seed=seed, **chosen)
        return _planned(StoredCopyFaults(bursts), bursts)
    bursts = random_outliers(units, seed=seed, **chosen)
    return _planned(OutlierFaults(bursts), bursts)


def _permanent(settings: Mapping[str, Any], units: Sequence[str], num_steps: int, seed: int) -> PlannedFaults:
    share = settings["share"]
    if not is_real(share) or not 0 < share <= 1:
        raise ConfigError("share", share, "it is a share of the units, above 0 and up to 1.", "Set 0.1 for instance.")
    # A stream of its own, so that no other choice from the seed falls on the same units.
    rng = np.random.default_rng([seed, _STREAM])
    chosen = sorted(rng.choice(len(units), size=max(1, round(share * len(units))), replace=False).tolist())
    channels = {} if settings["num_channels"] is None else {"num_channels": settings["num_channels"]}
    faults = [
        OutlierChannels(
            unit=units[i], start_step=1, num_steps=num_steps, factor=settings["factor"], seed=seed, **channels
        )
        for i in chosen
    ]
    return _planned(OutlierFaults(faults), faults)


def _range(name: str, value: Any) -> tuple[Any, Any]:
    """The lowest and the highest value."""
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(map(is_real, value)):
        allowed = "it is a range, from the lowest to the highest value."
        raise ConfigError(name, value, allowed, "Write two numbers; the same twice for one value.")
    return value[0], value[1]


def _planned(fault: Fault, bursts: Sequence[Any]) -> PlannedFaults:
    in_order = sorted(bursts, key=lambda burst: (burst.start_step, burst.unit))
    windows = tuple(FaultWindow(b.unit, b.start_step, b.start_step + b.num_steps) for b in in_order)
    return PlannedFaults((fault,), windows, tuple(asdict(burst) for burst in in_order))


def _checked(settings: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in settings.items():
        if name not in usual:
            near = nearest_names(str(name), usual)
            remedy = f"Did you mean {near[0]!r}?" if near else f"They are {', '.join(usual)}."
            raise ConfigError(str(name), value, "these faults have no such setting.", remedy)
    return {**usual, **settings}
