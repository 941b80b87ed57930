"""Opening of a path with prompts: a file, a folder of files, or a part of either."""

import re
from collections.abc import Iterator
from pathlib import Path

from relaxd.data.files.hugging_face import DESCRIPTIONS, HubRows, is_hub_name, saved_files
from relaxd.data.files.json_files import JsonArray, JsonLines, is_array
from relaxd.data.files.rows import JoinedRows, Part, Rows
from relaxd.data.files.tables import Table
from relaxd.models import DataError

TABLES = (".parquet", ".arrow", ".feather", ".csv")
LINES = (".jsonl", ".ndjson", ".json")
_PART = re.compile(r"(.*)@\[\s*(-?[0-9]*)\s*:\s*(-?[0-9]*)\s*\]")
_LIKE_A_PART = re.compile(r".*@\[[^\]/]*\]?")


def open_rows(path: Path, field: str) -> Rows:
    """Open a file, or all files of a folder with a known ending, those of its folders, too, sorted by name.

    A folder that the package datasets saved has its files in the order of its state.json. "PATH@[START:END]" is a part
    of it, as of a Python list. A file with an unknown ending is read as JSON lines. What isn't there and looks like the
    name of a data set on the hub is loaded from there.

    Raises DataError, naming the setting `field`: it can't be read, or has no rows.
    """
    part = _PART.fullmatch(str(path))
    if part is None and _LIKE_A_PART.fullmatch(str(path)) and not path.exists():
        raise DataError(
            field, f'{path} ends in no part of a file: write it as "PATH@[START:END]", such as "a.jsonl@[0:100]"'
        )
    rows = _open(without_part(path), field)
    if part:
        rows = Part(rows, slice(*(int(bound) if bound else None for bound in (part[2], part[3]))))
    if not len(rows):
        raise DataError(field, f'{path} is empty: it needs at least one row such as {{"prompt": "..."}}')
    return rows


def without_part(path: Path) -> Path:
    """Return a path without "@[START:END]"."""
    part = _PART.fullmatch(str(path))
    return Path(part[1]) if part else path


def is_hub_path(path: Path) -> bool:
    """Return whether a path names a data set of the hub, or a part of one."""
    return is_hub_name(without_part(path))


def _open(path: Path, field: str) -> Rows:
    if is_hub_name(path):
        return HubRows(path, field)
    try:
        if path.is_dir():
            files = list(_files_of(path, field))
            if not files:
                raise DataError(field, f"the folder {path} has no file that ends in {', '.join((*LINES, *TABLES))}")
            return JoinedRows([_open(file, field) for file in files])
        if not path.is_file():
            path.stat()
            raise DataError(field, f"can't read {path}: it is neither a file nor a folder")
        if path.suffix in TABLES:
            return Table(path, field)
        return JsonArray(path, field) if path.suffix == ".json" and is_array(path) else JsonLines(path)
    except OSError as error:
        hint = "; it is one path: several files are a folder, or [[data.sources]] with a path each"
        is_list = str(path).startswith("[")
        raise DataError(field, f"can't read {path}: {error.strerror or error}{hint if is_list else ''}") from error


def _files_of(folder: Path, field: str) -> Iterator[Path]:
    saved = saved_files(folder, field)
    if saved is not None:
        yield from saved
        return
    for entry in sorted(folder.iterdir()):
        if entry.is_dir():
            if not entry.is_symlink():  # which could lead round in circles
                yield from _files_of(entry, field)
        elif entry.suffix in (*TABLES, *LINES) and entry.name not in DESCRIPTIONS and entry.is_file():
            yield entry
