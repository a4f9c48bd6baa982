"""Which rows of a record count, when its run was resumed."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["last_live_steps"]


def last_live_steps(starts: Sequence[int | None]) -> list[int | None]:
    """The last step of each segment that no later segment has superseded.

    A resume from step s takes the run back to s: what was recorded after s, in any earlier segment, was lost with the
    process or thrown away. A segment without a row supersedes nothing: the run never got beyond its start.

    Args:
        starts: For each segment, in the order written, the last step done before its first row; None when it has none.

    Returns:
        For each segment the last step that counts; None when all of it counts.

    Example:
        >>> last_live_steps([0, 100, 50])  # run, resume from 100, resume again from 50
        [50, 50, None]
    """
    lasts: list[int | None] = []
    lowest: int | None = None
    for start in reversed(starts):
        lasts.append(lowest)
        if start is not None:
            lowest = start if lowest is None else min(lowest, start)
    return lasts[::-1]
