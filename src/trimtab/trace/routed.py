"""Which units a step really ran on the recovery path: the set forced by hand, or else the decision before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from trimtab.trace.table import RawRow

__all__ = ["RoutedSets", "forced_units"]


def forced_units(extra: Mapping[str, Any] | None) -> frozenset[str] | None:
    """The units of ``extra["routed_by_hand"]`` of a row; None where its step was not routed by hand.

    Example:
        >>> forced_units({"routed_by_hand": ["q"]}), forced_units({"routed_by_hand": []}), forced_units(None)
        (frozenset({'q'}), frozenset(), None)
    """
    named = None if extra is None else extra.get("routed_by_hand")
    return frozenset(map(str, named)) if isinstance(named, list | tuple) else None


class RoutedSets:
    """Follows the rows of a live line, oldest first, and gives for each the set that its step ran under.

    The decision of a row routes the step after it, also over a skipped row, which takes none, and over a resume, which
    goes on with the decision in force. A set forced by hand holds for its own step alone. Before the first row every
    unit is on the low-cost path; where rows are missing, the last decision that is there is taken to have stood.
    """

    def __init__(self) -> None:
        self._units: tuple[str, ...] = ()
        self._decided: NDArray[np.bool_] = np.zeros(0, np.bool_)

    def take(self, row: RawRow, units: tuple[str, ...]) -> NDArray[np.bool_]:
        """Take the next row.

        Args:
            row: The row.
            units: Names of the units of its segment.

        Returns: Whether each of them was on the recovery path while the step ran. Shape (units,).
        """
        if units is not self._units and units != self._units:
            before = {name for name, on in zip(self._units, self._decided, strict=True) if on}
            self._decided = np.array([name in before for name in units], np.bool_)
        self._units = units
        forced = forced_units(row.extra)
        routed = self._decided if forced is None else np.array([name in forced for name in units], np.bool_)
        if not row.skipped:
            self._decided = np.zeros(len(units), np.bool_) if row.active is None else row.active
        return routed
