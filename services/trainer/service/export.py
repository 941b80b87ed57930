"""Validation of an export's target folder."""

import os
from pathlib import Path

MAX_NAME_BYTES = 200
"""Longest folder name. File systems allow 255 bytes, and an unfinished export has a suffix."""
RESERVED = ("checkpoints", "reference", "steps")
"""Subfolders of the run's folder that exports can't use."""


def export_folder(run_folder: Path, folder: str) -> Path:
    """Return the absolute path of an export.

    Raises:
        ValueError: the path isn't below the run's folder, or something other than a model exists there.
    """
    target = Path(folder)
    if not folder.isprintable() or target.is_absolute() or ".." in target.parts or target == Path("."):
        raise ValueError(f'folder is {folder!r}: it must be a relative path below the run\'s folder, such as "model"')
    if target.parts[0] in RESERVED:
        raise ValueError(f"folder is {folder!r}: {target.parts[0]} holds the run's own files")
    if any(len(os.fsencode(part)) > MAX_NAME_BYTES for part in target.parts):
        raise ValueError(f"folder is {folder!r}: no name in it may be longer than {MAX_NAME_BYTES} bytes")
    try:
        return _checked(run_folder, folder)
    except OSError as error:
        raise ValueError(f"folder is {folder!r}: {error.strerror or error}") from error


def _checked(run_folder: Path, folder: str) -> Path:
    resolved = (run_folder / folder).resolve()
    if run_folder.resolve() not in resolved.parents:
        raise ValueError(f"folder is {folder!r}: a link in it leads out of the run's folder")
    if resolved.exists() and not (resolved / "config.json").is_file():
        raise ValueError(f"folder is {folder!r}: {resolved} exists and isn't a model; it will not be replaced")
    return resolved
