"""Where an exported model may be written."""

import os
from pathlib import Path

MAX_NAME = 200
"""Bytes of a folder's name: file systems take 255, and an export is written under a longer name until it is whole."""
RESERVED = ("checkpoints", "steps")
"""Folders of the run's folder that are not for exports."""


def export_folder(run_folder: Path, folder: str) -> Path:
    """Where an export goes.

    Raises:
        ValueError: it would not be below the run's folder, or would replace something that isn't a model.
    """
    target = Path(folder)
    if not folder.isprintable() or target.is_absolute() or ".." in target.parts or target == Path("."):
        raise ValueError(f'folder is {folder!r}: it must be a relative path below the run\'s folder, such as "model"')
    if target.parts[0] in RESERVED:
        raise ValueError(f"folder is {folder!r}: {target.parts[0]} holds the run's own files")
    if any(len(os.fsencode(part)) > MAX_NAME for part in target.parts):
        raise ValueError(f"folder is {folder!r}: no name in it may be longer than {MAX_NAME} bytes")
    try:
        return _checked(run_folder, folder)
    except OSError as error:
        raise ValueError(f"folder is {folder!r}: {error.strerror or error}") from error


def _checked(run_folder: Path, folder: str) -> Path:
    resolved = (run_folder / folder).resolve()
    if run_folder.resolve() not in resolved.parents:
        raise ValueError(f"folder is {folder!r}: it leads out of the run's folder by a link")
    if resolved.exists() and not (resolved / "config.json").is_file():
        raise ValueError(f"folder is {folder!r}: {resolved} exists and isn't a model; it will not be replaced")
    return resolved
