"""No folder holds more than one can take in at a glance: what grows gets rooms, named after who lives there."""

from collections import defaultdict
from pathlib import Path

from tests.unit.source_code.calls import ROOT

LIMIT = 18
"""Files and folders in a folder."""
LARGER = {
    "relaxd": "the packages whose floors pyproject.toml lists",
    "relaxd/v1": "generated",
}


def sizes(root: Path) -> dict[str, int]:
    """Count the files and folders in each folder. One without files, such as a branch leaves behind, is none."""
    entries: dict[str, set[str]] = defaultdict(set)
    for top in ("relaxd", "services", "tests"):
        for path in (root / top).rglob("*"):
            place = path.relative_to(root)
            if path.is_file() and not any(part == "__pycache__" or part.startswith(".") for part in place.parts):
                for parent, name in zip(place.parents, [place, *place.parents], strict=False):
                    entries[parent.as_posix()].add(name.name)
    del entries["."]
    return {folder: len(names) for folder, names in entries.items()}


def test_no_folder_is_crowded():
    found = {folder: size for folder, size in sizes(ROOT).items() if size > LIMIT}
    crowded = {folder: size for folder, size in found.items() if folder not in LARGER}
    assert not crowded, f"more than {LIMIT} files and folders: move some into a room (CONTRIBUTING.md): {crowded}"
    assert sorted(found) == sorted(LARGER), "a folder in LARGER isn't larger any more: take it out"


def test_files_and_folders_count_but_not_what_python_leaves(tmp_path):
    for name in ("relaxd/a.py", "relaxd/room/b.py", "relaxd/room/c.py", "relaxd/gone/__pycache__/d.pyc", "tests/.e"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert sizes(tmp_path) == {"relaxd": 2, "relaxd/room": 2}
