"""The command line: parses arguments into settings, calls the job, and turns what the user got wrong into one message.

Torch is loaded only by the job itself, so that help and mistakes are quick.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import tyro

from trimtab._version import __version__
from trimtab.config_files import as_yaml, config_words, is_place, read_config
from trimtab.errors import ConfigError, MissingExtraError, TrimtabError, TrimtabWarning
from trimtab.experiments.bench.settings import BenchSettings
from trimtab.experiments.compare_settings import CompareSettings
from trimtab.experiments.eval_settings import EvalSettings
from trimtab.experiments.paper_settings import (
    ActivationsSettings,
    DeepseekSettings,
    LoraSettings,
    MoeSettings,
    PapersSettings,
)
from trimtab.experiments.plan_settings import PlanSettings
from trimtab.experiments.quiet import quiet_libraries
from trimtab.experiments.settings import (
    DemoSettings,
    ExperimentSettings,
    FaultsSettings,
    HealthySettings,
    TrainSettings,
    replaced_demo,
)
from trimtab.report.settings import CalibrateSettings, ReplaySettings, ReportSettings, RunsSettings, WatchSettings

__all__ = ["main"]


_Settings = (
    ReplaySettings
    | CalibrateSettings
    | DemoSettings
    | TrainSettings
    | RunsSettings
    | ReportSettings
    | WatchSettings
    | ExperimentSettings
    | CompareSettings
    | PlanSettings
    | EvalSettings
    | BenchSettings
)
_Command = (
    Annotated[DemoSettings, tyro.conf.subcommand("demo")]
    | Annotated[TrainSettings, tyro.conf.subcommand("train")]
    | Annotated[RunsSettings, tyro.conf.subcommand("runs")]
    | Annotated[ReportSettings, tyro.conf.subcommand("report")]
    | Annotated[WatchSettings, tyro.conf.subcommand("watch")]
    | Annotated[ReplaySettings, tyro.conf.subcommand("replay")]
    | Annotated[CalibrateSettings, tyro.conf.subcommand("calibrate")]
    | Annotated[ExperimentSettings, tyro.conf.subcommand("experiment")]
    | Annotated[CompareSettings, tyro.conf.subcommand("compare")]
    | Annotated[PlanSettings, tyro.conf.subcommand("plan")]
    | Annotated[EvalSettings, tyro.conf.subcommand("eval")]
    | Annotated[BenchSettings, tyro.conf.subcommand("bench")]
)

_DESCRIPTION = """trimtab keeps low-precision training of large language models stable.

Start with: trimtab demo

Then your own text: trimtab train --model config.json --data my.txt --out runs/mine

And what the record holds: trimtab runs runs/mine

As a page, or live: trimtab report runs/mine -o report.html, trimtab watch runs/mine

What another policy would have decided: trimtab replay runs/mine --alpha 2

Thresholds from a healthy run: trimtab calibrate runs/healthy

Which policy repairs most, trained side by side: trimtab compare --policies static-low-clean,static-low,gnmr,random

What a run would take, before it is started: trimtab plan llama-60m

What a checkpoint is worth: trimtab eval runs/mine --tasks hellaswag

What it costs on this machine: trimtab bench

What the monitors and the recovery are worth, measured again: trimtab experiment faults

Shell completion: trimtab --tyro-print-completion bash (or zsh)"""

_COMMON = """Every command also takes:
  --config FILE.yaml   read settings from a file, keyed as --print-config prints them; options given here go first
  --print-config       print the resolved settings as YAML, and do nothing else"""
_SUBCOMMAND: Any = type(tyro.conf.subcommand("demo"))
_COMPLETION = ("--tyro-print-completion", "--tyro-write-completion")
_COMMON_JSON = "  --json               print the summary as JSON for machines, and all else on stderr"

_OF_A_STREAM = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What a pipe or a file that the output goes to can fail with."""

# Jobs that leave a summary, and where.
_SUMMARIES: Mapping[type, Callable[[Any], Path]] = {
    DemoSettings: lambda settings: settings.folder,
    TrainSettings: lambda settings: settings.out,
    FaultsSettings: lambda settings: settings.out,
    HealthySettings: lambda settings: settings.out,
    CompareSettings: lambda settings: settings.folder,
    ActivationsSettings: lambda settings: settings.summary_folder,
    DeepseekSettings: lambda settings: settings.summary_folder,
    LoraSettings: lambda settings: settings.summary_folder,
    MoeSettings: lambda settings: settings.summary_folder,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: The words after ``trimtab``; those of the process when left out.

    Returns: The exit status: 0, or 2 for what the user got wrong, with the reason on stderr; 1 from ``replay`` when the
        recorded policy does not give the recorded decisions, or when the output cannot be written; 141 when its reader
        has gone, as a shell says of a program that a closed pipe ended.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        try:
            return _main(words)
        finally:
            # Here, where it can still be said what is wrong, and not while the interpreter ends.
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        if error.errno not in _OF_A_STREAM or error.filename is not None or not _is_lost(sys.stdout):
            raise
        if error.errno == errno.EPIPE:
            return 141
        with contextlib.suppress(OSError):
            print(f"trimtab: error: the output cannot be written ({error.strerror}).", file=sys.stderr)
        return 1


def _is_lost(stream: Any) -> bool:
    """Whether nothing more can be written to ``stream``; what is left in it is dropped, so that no one tries again."""
    try:
        file = stream.fileno()
    except (AttributeError, OSError, ValueError):  # it is no file
        return False
    try:
        stream.flush()
        # What failed may have been dropped, and then a flush says nothing: only a write tells.
        os.write(file, b"\n")
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, file)
        os.close(nowhere)
        return True
    return False


def _main(words: list[str]) -> int:
    if words == ["--version"]:
        print(f"trimtab {__version__}")
        return 0
    try:
        with _our_own_voice():
            words, asked = _split(words)
            settings = _parse(words)
            if "--print-config" in asked:
                print(as_yaml(_leaf(settings)), end="")
                return 0
            return _run_for_machines(settings) if "--json" in asked else _run(settings)
    except TrimtabError as error:
        kind = "missing package" if isinstance(error, MissingExtraError) else "error"
        print(f"trimtab: {kind}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("trimtab: stopped", file=sys.stderr)
        return 130


@contextlib.contextmanager
def _our_own_voice() -> Iterator[None]:
    """Our warnings as one line each, and libraries that chatter quiet; on leaving, everything as it was found."""
    show = warnings.showwarning
    warnings.showwarning = lambda message, category, *where: (
        print(f"trimtab: warning: {message}", file=sys.stderr)
        if issubclass(category, TrimtabWarning)
        else show(message, category, *where)
    )
    try:
        with quiet_libraries():
            yield
    finally:
        warnings.showwarning = show


def _parse(words: list[str]) -> _Settings:
    """The settings that the words stand for.

    tyro catches any ValueError of a settings class and prints it in a box of its own, cut to the part it knows. Ours is
    found behind its exit, and raised.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            command: Any = _with_common_options(_Command) if words and words[0] in _COMPLETION else _Command
            return tyro.cli(command, prog="trimtab", description=_DESCRIPTION, args=words)
    except SystemExit as exit_:
        cause = _cause_of(exit_) or _no_number(exit_)
        if cause is not None:
            raise cause from None
        if exit_.code == 0 and {"-h", "--help"} & set(words):
            print(_COMMON)
            if _command_of(words)[1] in _SUMMARIES:
                print(_COMMON_JSON)
        sys.stderr.write(said.getvalue())
        raise


def _cause_of(exit_: SystemExit) -> TrimtabError | None:
    """What a settings class raised; None when the words themselves were wrong."""
    cause: BaseException | None = exit_
    while cause is not None and not isinstance(cause, TrimtabError):
        cause = cause.__cause__ or cause.__context__
    return cause


def _no_number(exit_: SystemExit) -> ConfigError | None:
    """A word that is no number where one is needed, said in our own way; None when something else was wrong."""
    error: Any = exit_
    while error is not None and not hasattr(error, "arg"):
        error = error.__cause__ or error.__context__
    metavar = str(getattr(getattr(getattr(error, "arg", None), "lowered", None), "metavar", ""))
    kinds = set(metavar.split("|")) - {"{None}"}
    given = re.search(r"(?:from \[|: )'(.*?)'", str(getattr(error, "message", "")))
    if given is None or not kinds or not kinds <= {"INT", "FLOAT"}:
        return None
    kind, example = ("a number", 0.5) if "FLOAT" in kinds else ("a whole number", 5)
    name = error.arg.field.intern_name
    return ConfigError(name, given[1], f"it is {kind}.", f"Write --{name.replace('_', '-')} {example}, say.")


def _with_common_options(hint: Any) -> Any:
    """The commands with the options that every one of them takes, which tyro does not know: for shell completion."""
    union: Any = None
    for name, settings in _choices(hint).items():
        more: list[Any] = [
            (item, Annotated[_with_common_options(type_), tyro.conf.arg(name="")])
            for item, type_ in get_type_hints(settings, include_extras=True).items()
            if _choices(type_)
        ]
        if not more:
            taken = {item.name for item in fields(settings)}
            more = [("config", Path | None, None), ("print_config", bool, False)]
            more += [("json", bool, False)] if settings in _SUMMARIES and "json" not in taken else []
        # Not asked for its rules: no settings are made, only the words that they have.
        extended: Any = make_dataclass(settings.__name__, more, bases=(settings,), frozen=True, kw_only=True)
        extended.__doc__ = settings.__doc__
        choice = Annotated[extended, tyro.conf.subcommand(name)]
        union = choice if union is None else union | choice
    return union


def _run(settings: _Settings) -> int:
    if isinstance(settings, DemoSettings):
        from trimtab.experiments.demo import run_demo

        replaced = replaced_demo(settings)
        if replaced is not None:
            print(f"trimtab: {replaced}", file=sys.stderr)
        run_demo(settings)
    elif isinstance(settings, TrainSettings):
        from trimtab.experiments.train import run_train

        run_train(settings)
    elif isinstance(settings, ExperimentSettings):
        _run_experiment(settings.which)
    elif isinstance(settings, CompareSettings):
        from trimtab.experiments.compare.experiment import run_compare

        run_compare(settings)
    elif isinstance(settings, PlanSettings):
        from trimtab.experiments.plan import run_plan

        run_plan(settings)
    elif isinstance(settings, EvalSettings):
        settings.check_path()
        from trimtab.experiments.evaluation import run_eval

        run_eval(settings)
    elif isinstance(settings, BenchSettings):
        from trimtab.experiments.bench.run import run_bench

        run_bench(settings)
    elif isinstance(settings, ReplaySettings):
        from trimtab.report.replay_view import show_replay

        return show_replay(settings)
    elif isinstance(settings, CalibrateSettings):
        from trimtab.report.calibrate_view import show_calibration

        show_calibration(settings)
    elif isinstance(settings, ReportSettings):
        _write_report(settings)
    elif isinstance(settings, WatchSettings):
        from trimtab.report.watch import watch

        watch(settings)
    else:
        _show_runs(settings)
    return 0


def _run_experiment(settings: FaultsSettings | HealthySettings | PapersSettings) -> None:
    if isinstance(settings, PapersSettings):
        from trimtab.experiments.papers.experiment import run_paper_experiment

        run_paper_experiment(settings)
    elif isinstance(settings, FaultsSettings):
        from trimtab.experiments.faults.experiment import run_faults

        run_faults(settings)
    else:
        from trimtab.experiments.healthy.experiment import run_healthy

        run_healthy(settings)


def _write_report(settings: ReportSettings) -> None:
    from trimtab.report.for_machines import page_summary
    from trimtab.report.page import records_of, write_report

    page = write_report(settings)
    print(json.dumps(page_summary(page, records_of(settings.runs)), indent=1) if settings.json else f"Report: {page}")


def _show_runs(settings: RunsSettings) -> None:
    from rich.console import Console

    from trimtab.report.for_machines import plain_summary
    from trimtab.report.runs_table import runs_table, summaries

    found, refused = summaries(settings.path)
    if settings.json:
        print(json.dumps([plain_summary(one) for one in found], indent=1, allow_nan=False))
    else:
        Console().print(runs_table(found, settings.path))
    for reason in refused.values():
        print(f"trimtab: left out: {reason}", file=sys.stderr)


def _run_for_machines(settings: _Settings) -> int:
    """Run a job that leaves a summary, and print that alone on stdout."""
    with contextlib.redirect_stdout(sys.stderr):
        status = _run(settings)
    leaf = _leaf(settings)
    if os.environ.get("RANK", "0") == "0":
        print((_SUMMARIES[type(leaf)](leaf) / "summary.json").read_text(encoding="utf-8"), end="")
    return status


def _split(words: list[str]) -> tuple[list[str], set[str]]:
    """The words for the command alone, those of its config file among them, and which common options were given.

    Raises: ConfigError: when the config file does not hold settings of the command.
    """
    own, config, rest = [], None, iter(words)
    for word in rest:
        if word != "--config" and not word.startswith("--config="):
            own.append(word)
            continue
        config = next(rest, None) if word == "--config" else word.partition("=")[2]
        if not config or config.startswith("-"):
            raise ConfigError("config", config, "it is a file in YAML.", "Write --config run.yaml, say.")
    names, settings = _command_of(own)
    common = {"--print-config"} | ({"--json"} if settings in _SUMMARIES else set())
    asked = common & set(own)
    own = [word for word in own if word not in common]
    if config is None:
        return own, asked
    if settings is None:
        allowed, remedy = "it holds the settings of one command.", "Write trimtab train --config run.yaml, say."
        raise ConfigError("config", config, allowed, remedy)
    given = own[len(names) :]
    places, options = config_words(read_config(Path(config)), names, settings, given)
    with_places, without = [*names, *places, *given, *options], [*names, *given, *options]
    # What goes by place has no name by which to see that it is given too. Then it is a word too many, or a longer list.
    can_parse, parsed = _tried(with_places)
    if can_parse and parsed is not None and _num_by_place(parsed) > len(places):
        return without, asked
    return without if not can_parse and _tried(without)[0] else with_places, asked


def _command_of(words: Sequence[str]) -> tuple[list[str], type | None]:
    """The words that name the command, and the class of its settings; None while it is not named in full."""
    names: list[str] = []
    choices, settings = _choices(_Command), None
    for word in words:
        if word not in choices:
            break
        names.append(word)
        settings = choices[word]
        nested = (_choices(hint) for hint in get_type_hints(settings, include_extras=True).values())
        choices = next(filter(None, nested), {})
    return names, None if choices else settings


def _choices(hint: Any) -> dict[str, type]:
    """The settings classes of a union of subcommands, by name; empty for any other type."""
    while get_args(hint) and hasattr(hint, "__metadata__"):
        hint = get_args(hint)[0]
    found = {}
    for choice in get_args(hint):
        for mark in getattr(choice, "__metadata__", ()):
            if isinstance(mark, _SUBCOMMAND) and mark.name:
                found[mark.name] = get_args(choice)[0]
    return found


def _leaf(settings: Any) -> Any:
    """The settings of the command itself, inside those of the commands that it is below."""
    for item in fields(settings):
        if _choices(get_type_hints(type(settings), include_extras=True)[item.name]):
            return _leaf(getattr(settings, item.name))
    return settings


def _tried(words: list[str]) -> tuple[bool, Any]:
    """Whether the words stand for settings, be they valid or not; and those of the command itself where they are."""
    silent = io.StringIO()
    try:
        with contextlib.redirect_stderr(silent), contextlib.redirect_stdout(silent):
            return True, _leaf(tyro.cli(_Command, prog="trimtab", args=words))
    except SystemExit as exit_:
        return _cause_of(exit_) is not None, None


def _num_by_place(settings: Any) -> int:
    """How many words these settings take by place."""
    hints = get_type_hints(type(settings), include_extras=True)
    values = [getattr(settings, name) for name, hint in hints.items() if is_place(hint)]
    return sum(len(value) if isinstance(value, tuple) else 1 for value in values)
