"""The command line: parses arguments into settings, calls the job, and turns what the user got wrong into one message.

Torch is loaded only by the job itself, so that help and mistakes are quick.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from trimtab._version import __version__
from trimtab.errors import MissingExtraError, TrimtabError, TrimtabWarning
from trimtab.experiments.settings import DemoSettings, TrainSettings

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunsSettings:
    """Say what the run records in a folder hold: model, units, recovered share, switches, faults, alarms.

    Example: trimtab runs runs/demo
    """

    path: Annotated[Path, tyro.conf.Positional]
    """A record, or a folder that is searched for records."""
    json: bool = False
    """Print JSON for machines."""


_Command = (
    Annotated[DemoSettings, tyro.conf.subcommand("demo")]
    | Annotated[TrainSettings, tyro.conf.subcommand("train")]
    | Annotated[RunsSettings, tyro.conf.subcommand("runs")]
)

_DESCRIPTION = """trimtab keeps low-precision training of large language models stable.

Start with: trimtab demo

Then your own text: trimtab train --model config.json --data my.txt --out runs/mine

And what the record holds: trimtab runs runs/mine"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: The words after ``trimtab``; those of the process when left out.

    Returns: The exit status: 0, or 2 for what the user got wrong, with the reason on stderr.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words == ["--version"]:
        print(f"trimtab {__version__}")
        return 0
    show = warnings.showwarning
    warnings.showwarning = lambda message, category, *where: (
        print(f"trimtab: warning: {message}", file=sys.stderr)
        if issubclass(category, TrimtabWarning)
        else show(message, category, *where)
    )
    try:
        _run(_parse(words))
    except TrimtabError as error:
        kind = "missing package" if isinstance(error, MissingExtraError) else "error"
        print(f"trimtab: {kind}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("trimtab: stopped", file=sys.stderr)
        return 130
    finally:
        warnings.showwarning = show
    return 0


def _parse(words: list[str]) -> DemoSettings | TrainSettings | RunsSettings:
    """The settings that the words stand for.

    tyro catches any ValueError of a settings class and prints it in a box of its own, cut to the part it knows. Ours is
    found behind its exit, and raised.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(_Command, prog="trimtab", description=_DESCRIPTION, args=words)
    except SystemExit as exit_:
        cause: BaseException | None = exit_
        while cause is not None and not isinstance(cause, TrimtabError):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:
            raise cause from None
        sys.stderr.write(said.getvalue())
        raise


def _run(settings: DemoSettings | TrainSettings | RunsSettings) -> None:
    if isinstance(settings, DemoSettings):
        from trimtab.experiments.demo import run_demo

        run_demo(settings)
    elif isinstance(settings, TrainSettings):
        from trimtab.experiments.train import run_train

        run_train(settings)
    else:
        _show_runs(settings)


def _show_runs(settings: RunsSettings) -> None:
    from rich.console import Console

    from trimtab.report.runs_table import runs_table, summaries

    found = summaries(settings.path)
    if settings.json:
        print(json.dumps([asdict(s) | {"path": str(s.path)} for s in found], indent=1))
    else:
        Console().print(runs_table(found, settings.path))
