"""Runs jobs that need no one another in worker processes, one thread each, as many as the machine has cores for."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

from trimtab.experiments.quiet import hush_libraries
from trimtab.experiments.text import Corpus, load_corpus, read_files, read_speeches

__all__ = ["Job", "num_processes", "run_jobs", "text_of"]

P = TypeVar("P")
R = TypeVar("R")
Job = Callable[[P, Corpus, Path], R]
"""What is done with one part, the text and the folder of the results; a function of a module."""

_corpora: dict[tuple[tuple[Path, ...], int], Corpus] = {}


def text_of(data: Sequence[Path], sequence: int) -> Corpus:
    """The text of ``data``, or the built-in speeches, as bytes; read once a process.

    Raises:
        ConfigError: when the text is missing or too short.
        MissingExtraError: when the built-in text is not installed.
    """
    key = (tuple(data), sequence)
    if key not in _corpora:
        documents = read_files(list(data)) if data else read_speeches()
        _corpora[key] = load_corpus(documents, sequence=sequence)
    return _corpora[key]


def run_jobs(
    job: Job[P, R],
    first: Sequence[P],
    then: Callable[[P], Sequence[P]],
    *,
    folder: Path,
    data: Sequence[Path],
    sequence: int,
    processes: int,
) -> Iterator[tuple[P, R]]:
    """Run ``job`` on each part of ``first``, and on the parts that ``then`` says each has made possible.

    What comes of a part depends on no other process, so the order in which they end is all that is not repeatable.

    Args:
        job: What is done.
        first: Parts that need no other.
        then: By a part that has ended, the parts that it was needed for.
        folder: For the results.
        data: Text files; see ``text_of``.
        sequence: Tokens of a sequence.
        processes: How many; 1 runs all here.

    Yields: Each part and what came of it, as it ends.
    """
    if processes == 1:
        waiting = list(first)
        while waiting:
            part = waiting.pop(0)
            yield part, _run(job, part, data, sequence, folder)
            waiting = [*then(part), *waiting]
        return
    spawn = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(processes, mp_context=spawn, initializer=hush_libraries)
    try:
        running: dict[Future[R], P] = {executor.submit(_run, job, p, data, sequence, folder): p for p in first}
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                part, result = running.pop(future), future.result()
                yield part, result
                running |= {executor.submit(_run, job, p, data, sequence, folder): p for p in then(part)}
    finally:
        # What has not begun is dropped; what has is let end, and is kept as a finished part.
        executor.shutdown(cancel_futures=True)


def num_processes(workers: int | None, num_parts: int) -> int:
    """How many processes to use: ``workers``, or two where this process may use as many cores; no more than parts."""
    affinity = getattr(os, "sched_getaffinity", None)
    num_cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return min(workers or min(2, num_cores), max(1, num_parts))


def _run(job: Job[P, R], part: P, data: Sequence[Path], sequence: int, folder: Path) -> R:
    return job(part, text_of(data, sequence), folder)
