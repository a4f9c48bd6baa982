from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trimtab.errors import TrimtabWarning
from trimtab.trace import RunWriter, StepRow, UnitRow

UNITS = ("q", "k", "v")


@pytest.fixture
def open_writer(tmp_path: Path) -> Iterator[Callable[..., RunWriter]]:
    """Open writers on ``tmp_path / "run"``; what a test leaves open is closed."""
    opened: list[RunWriter] = []

    def make(path: Path | None = None, units: tuple[str, ...] = UNITS, **settings: Any) -> RunWriter:
        settings.setdefault("config", {"policy": {"alpha": 1.5}})
        writer = RunWriter(path or tmp_path / "run", units=[UnitRow(name=name) for name in units], **settings)
        opened.append(writer)
        return writer

    yield make
    for writer in opened:
        writer.close(finished=False)


@pytest.fixture
def row() -> Callable[..., StepRow]:
    """A row whose values say which step it is."""

    def make(step: int, num_units: int = len(UNITS), **changes: Any) -> StepRow:
        values: dict[str, Any] = {
            "norms": np.arange(num_units) + step / 8,
            "gnmr": np.full(num_units, 1.0),
            "delta": np.full(num_units, 1.0),
            "risk": np.full(num_units, 0.5),
            "active": np.arange(num_units) == step % num_units,
            "lock": np.arange(num_units) + step,
            "loss": float(step),
            "alpha": 1.5,
            "beta": 1.3,
        }
        return StepRow(step=step, **(values | changes))

    return make


@pytest.fixture
def one_warning() -> Callable[[str], AbstractContextManager[None]]:
    """The block gives exactly one warning, a ``TrimtabWarning`` that matches."""

    @contextmanager
    def check(match: str) -> Iterator[None]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        assert [warning.category for warning in caught] == [TrimtabWarning]
        assert re.search(match, str(caught[0].message))

    return check
