"""Folders that the package datasets wrote with `save_to_disk`. They are read without it."""

from pathlib import Path

from relaxd.data.errors import DataError
from relaxd.json_text import parse_json

SPLITS = "dataset_dict.json"
STATE = "state.json"
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json")
"""Files beside the rows of data sets that describe them."""


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
