"""Data sets of the Hugging Face package datasets: from the hub, or saved with `save_to_disk`."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relaxd.data.files.rows import file_content
from relaxd.json_text import parse_json
from relaxd.models import DataError

SPLITS = "dataset_dict.json"
STATE = "state.json"
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json")
"""Files that describe data sets, beside their rows."""


def saved_files(folder: Path, field: str) -> list[Path] | None:
    """Return the files of a saved data set, in the order of its rows; None if the folder is none.

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
    """Return a list of texts, or of the names of files."""
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

    Nothing on this machine has that path, nor a file's ending.
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
