"""Finding the records below a folder."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from trimtab.errors import RecordError
from trimtab.trace.schema import APPLICATION_ID, RECORD_NAME, connect_read_only

__all__ = ["find_runs"]


def find_runs(folder: str | os.PathLike[str]) -> list[Path]:
    """Every run record in ``folder`` and below, sorted by path. Databases of other programs are left out.

    A damaged file of the name ``run.sqlite`` is in the list: opening it says what is wrong with it.

    Raises:
        RecordError: There is no such folder.

    Example:
        >>> import tempfile
        >>> find_runs(tempfile.mkdtemp())
        []
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RecordError(f"There is no folder {folder.as_posix()} to look for runs in. Check the path.")
    return sorted(
        path
        for place, _, names in os.walk(folder)
        for path in (Path(place, name) for name in names if name.lower().endswith((".sqlite", ".db")))
        if _may_be_record(path)
    )


def _may_be_record(path: Path) -> bool:
    try:
        with closing(connect_read_only(path, look=True)) as connection:
            (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    except sqlite3.Error as error:
        return path.name == RECORD_NAME and "not a database" not in str(error)
    return bool(application_id == APPLICATION_ID)
