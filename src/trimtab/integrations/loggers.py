"""A guard's metrics in a loop of your own: to TensorBoard, W&B, trackio or a CSV file, and to anything else likewise.

``guard.metrics()`` is a flat dictionary, so a writer of your own needs none of this. Inside ``transformers.Trainer``
and lightning's ``Trainer`` pass ``log_metrics=True`` to the callback instead: the metrics then go where the rest of the
run goes. No package is imported here: each function takes what the user has made.
"""

from __future__ import annotations

import csv
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trimtab.errors import ConfigError, TrimtabWarning, verbatim

__all__ = ["MetricsLogger", "log_to_csv", "log_to_run", "log_to_tensorboard"]


class MetricsLogger:
    """Sends metrics somewhere, ``logger(guard.metrics(), step)``; one that fails says so once, and is off.

    Reading ``guard.metrics()`` waits for the step's decision: call it as often as you log, not at every step.

    Args:
        write: Called as ``write(metrics, step)``.
        name: What a warning calls it.

    Example:
        >>> seen = []
        >>> logger = MetricsLogger(lambda metrics, step: seen.append((step, metrics)), "a list")
        >>> logger({"trimtab/risk/max": 0.5}, 1)
        >>> seen
        [(1, {'trimtab/risk/max': 0.5})]
    """

    def __init__(self, write: Callable[[Mapping[str, float], int], None], name: str) -> None:
        self._write: Callable[[Mapping[str, float], int], None] | None = write
        self._name = name

    def __call__(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the metrics of ``step``."""
        if self._write is None:
            return
        try:
            self._write(metrics, step)
        except Exception as error:
            self._write = None
            warnings.warn(f"Logging to {self._name} failed and is off: {error!r}.", TrimtabWarning, stacklevel=2)


def log_to_tensorboard(writer: Any) -> MetricsLogger:
    """To TensorBoard: one scalar a metric.

    Args:
        writer: A ``SummaryWriter``, or what has its ``add_scalar``.

    Raises: ConfigError: when it has none.
    """
    add_scalar = _method(writer, "writer", "add_scalar", "Pass torch.utils.tensorboard.SummaryWriter(folder).")

    def write(metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            add_scalar(name, value, step)

    return MetricsLogger(write, "TensorBoard")


def log_to_run(run: Any) -> MetricsLogger:
    """To W&B or trackio, or whatever else has ``log(metrics, step=...)``.

    Args:
        run: What ``wandb.init`` or ``trackio.init`` gave.

    Raises: ConfigError: when it has no ``log``.
    """
    log = _method(run, "run", "log", "Pass what wandb.init() or trackio.init() gave.")
    return MetricsLogger(lambda metrics, step: log(dict(metrics), step=step), type(run).__name__)


def log_to_csv(path: str | Path) -> MetricsLogger:
    """To a CSV file: one row a call, one column a metric, and the first column is the step.

    A file that is there is gone on with; its rows from the first step that is logged now on, which a resumed run does
    again, are dropped. Metrics that are new make new columns.

    Args:
        path: The file; its folder is made.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "metrics.csv"
        >>> log_to_csv(path)({"trimtab/risk/max": 0.5}, 1)
        >>> path.read_text().split()
        ['step,trimtab/risk/max', '1,0.5']
    """
    return MetricsLogger(_CsvFile(Path(path)).write, str(path))


class _CsvFile:
    """The rows of a CSV file, of which the columns may grow."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: list[str] | None = None

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Add the row of ``step``."""
        if self.columns is None:
            self.columns = ["step"]
            self._write_anew(self._earlier_rows(step), metrics)
        elif not metrics.keys() <= set(self.columns):
            self._write_anew(self._earlier_rows(step), metrics)
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self.columns).writerow({"step": step, **metrics})

    def _earlier_rows(self, step: int) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        with self.path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        return [row for row in rows if int(row["step"]) < step]

    def _write_anew(self, rows: list[dict[str, str]], metrics: Mapping[str, float]) -> None:
        assert self.columns is not None
        names = dict.fromkeys(name for row in rows for name in row)
        self.columns = list(dict.fromkeys([*self.columns, *names, *metrics]))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Beside it first, so that a full disk costs no row that was there.
        new = self.path.with_name(self.path.name + ".new")
        with new.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(new, self.path)


def _method(owner: Any, setting: str, name: str, remedy: str) -> Callable[..., Any]:
    method = getattr(owner, name, None)
    if not callable(method):
        raise ConfigError(setting, verbatim(type(owner).__name__), f"it has no method {name}.", remedy)
    return method
