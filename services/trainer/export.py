"""Where an exported model may be written."""

from pathlib import Path


def export_folder(run_folder: Path, folder: str) -> Path:
    """Where an export goes.

    Raises:
        ValueError: it would not be below the run's folder, or would replace something that isn't a model.
    """
    target = Path(folder)
    if not folder or target.is_absolute() or ".." in target.parts or target == Path("."):
        raise ValueError(f'folder is {folder!r}: it must be a relative path below the run\'s folder, such as "model"')
    resolved = (run_folder / target).resolve()
    if not resolved.is_relative_to(run_folder.resolve()):
        raise ValueError(f"folder is {folder!r}: it leads out of the run's folder by a link")
    if resolved.exists() and not (resolved / "config.json").is_file():
        raise ValueError(f"folder is {folder!r}: {resolved} exists and isn't a model; it will not be replaced")
    return resolved
