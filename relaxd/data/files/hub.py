"""Data sets of the Hugging Face hub, read by the package datasets."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relaxd.data.errors import DataError
from relaxd.data.files.rows import file_content

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
    """The rows of a hub data set, which datasets keeps in its cache as a memory-mapped file."""

    def __init__(self, path: Path, field: str) -> None:
        """Load it, from the cache if it is there. Raises DataError, naming the setting `field`: it can't be loaded."""
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
