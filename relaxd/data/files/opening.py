"""Opens paths with prompts: a file, a folder of files, a part of either, or a data set of the Hugging Face package
datasets, from the hub or saved with `save_to_disk`."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relaxd.data.files.json_files import JsonArray, JsonLines, is_array
from relaxd.data.files.rows import JoinedRows, Part, Rows, file_content
from relaxd.data.files.tables import Table
from relaxd.json_text import parse_json
from relaxd.models import DataError

TABLES = (".parquet", ".arrow", ".feather", ".csv")
LINES = (".jsonl", ".ndjson", ".json")
_PART = re.compile(r"(.*)@\[\s*(-?[0-9]*)\s*:\s*(-?[0-9]*)\s*\]")
_LIKE_A_PART = re.compile(r".*@\[[^\]/]*\]?")


def open_rows(path: Path, field: str) -> Rows:
    """Open a file, or all files with a known ending of a folder and its subfolders, sorted by name.

    A folder that the package datasets saved has its files in the order of its state.json. "PATH@[START:END]" selects
    rows, like a slice of a Python list. A file with an unknown ending is read as JSON lines. A path that doesn't exist
    and looks like the name of a data set is loaded from the Hugging Face hub.

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
            if not entry.is_symlink():  # it could form a cycle
                yield from _files_of(entry, field)
        elif entry.suffix in (*TABLES, *LINES) and entry.name not in DESCRIPTIONS and entry.is_file():
            yield entry


SPLITS = "dataset_dict.json"
STATE = "state.json"
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json")
"""Files that describe data sets, beside their rows."""


def saved_files(folder: Path, field: str) -> list[Path] | None:
    """Return the files of a saved data set, in the order of its rows; None if the folder isn't a saved data set.

    Raises DataError, naming the setting `field`: the folder has several splits, or is damaged.
    """
    if (folder / SPLITS).is_file():
        splits = _read(folder / SPLITS, "splits", field)
        example = str(folder / next(iter(splits), "train"))
        raise DataError(
            field,
            f"{folder} is a saved data set with the splits {', '.join(splits) or 'none'}: name one of them, as in "
            f"{example!r}",
        )
    if not all((folder / name).is_file() for name in (STATE, DESCRIPTIONS[0])):
        return None
    if _read(folder / STATE, "_indices_data_files", field):
        raise DataError(
            field,
            f"{folder} has rows in another order than its files, as old versions of datasets saved them: load it with "
            "datasets, and save its flatten_indices()",
        )
    files = [folder / name for name in _read(folder / STATE, "_data_files", field)]
    if missing := next((file for file in files if not file.is_file()), None):
        raise DataError(field, f"{folder} is damaged: {STATE} names {missing.name}, which isn't there")
    return files


def _read(path: Path, key: str, field: str) -> list[str]:
    """Return the list under a key of a JSON file: texts, or the names of files."""
    try:
        found = parse_json(path.read_text(encoding="utf-8")).get(key) or ()
        return [one if isinstance(one, str) else str(one["filename"]) for one in found]
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise DataError(field, f"can't read {path}: it isn't as the package datasets writes it ({error})") from error


_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:/(\w[\w.-]*))?(?::(\w[\w.-]*))?")
_ENDINGS = frozenset((".parquet", ".arrow", ".feather", ".csv", ".jsonl", ".ndjson", ".json"))
PACKAGE = "the package datasets, which could load it from the hub, is not installed: pip install datasets"


def is_hub_name(path: Path) -> bool:
    """Return whether a path may be the name of a hub data set: "owner/name", perhaps with "/config" and ":split".

    The path must not exist on this machine, nor end like a file's.
    """
    fits = _NAME.fullmatch(str(path)) is not None and path.suffix not in _ENDINGS
    return fits and not path.exists()


class HubRows:
    """Rows of a hub data set, which the package datasets keeps in its cache as a memory-mapped file."""

    def __init__(self, path: Path, field: str) -> None:
        """Load the data set, from the cache if possible. Raises DataError, naming the setting `field`, if it can't be
        loaded."""
        match = _NAME.fullmatch(str(path))
        assert match is not None
        name, config, split = match[1], match[2], match[3] or "train"
        try:
            import datasets
        except ImportError as error:
            raise DataError(field, f"{path} is neither a file nor a folder here, and {PACKAGE}") from error
        try:
            self._rows = datasets.load_dataset(name, config, split=split)
        except Exception as error:  # of the hub, of httpx, and whatever its readers raise
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise DataError(
                field,
                f'{path} is neither a file nor a folder here, and loading the split "{split}" of {name} from the hub '
                f'failed: {reason} (another split or configuration is named as "owner/name/config:split")',
            ) from error
        self._path = path

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = self._rows[index]
        return row

    def scan(self) -> Iterator[dict[str, Any] | None]:
        return iter(self._rows)

    def content(self, part: range) -> Iterator[bytes]:
        for one in self._rows.cache_files:
            yield from file_content(Path(one["filename"]))

    def place(self, index: int) -> str:
        return f"{self._path} row {index + 1}"
