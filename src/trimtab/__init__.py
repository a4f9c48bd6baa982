"""trimtab keeps low-precision training of large language models stable.

It watches every operator of a model in training, runs the few that become risky on a higher-precision path for a few
steps under a hard budget, and records what it saw and did.

Everything here loads on first use, so that ``import trimtab`` and ``import trimtab.control`` load no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from trimtab._version import __version__

if TYPE_CHECKING:
    from trimtab import control, faults, formats, integrations, monitors, precision, testing, trace
    from trimtab.control import Controller, Decision, Policy
    from trimtab.errors import ConfigError, MissingExtraError, RecordError, TrimtabError, TrimtabWarning
    from trimtab.guard import Guard, attach, detach

_HOME = {
    "attach": "trimtab.guard",
    "detach": "trimtab.guard",
    "Guard": "trimtab.guard",
    "Controller": "trimtab.control",
    "Decision": "trimtab.control",
    "Policy": "trimtab.control",
    "ConfigError": "trimtab.errors",
    "MissingExtraError": "trimtab.errors",
    "RecordError": "trimtab.errors",
    "TrimtabError": "trimtab.errors",
    "TrimtabWarning": "trimtab.errors",
}
_ROOMS = ("control", "faults", "formats", "integrations", "monitors", "precision", "testing", "trace")

__all__ = [
    "ConfigError",
    "Controller",
    "Decision",
    "Guard",
    "MissingExtraError",
    "Policy",
    "RecordError",
    "TrimtabError",
    "TrimtabWarning",
    "__version__",
    "attach",
    "control",
    "detach",
    "faults",
    "formats",
    "integrations",
    "monitors",
    "precision",
    "testing",
    "trace",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"trimtab.{name}")
    raise AttributeError(f"module 'trimtab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
