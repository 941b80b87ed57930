"""A class name exists once: who reads it, or searches for it, finds what it means."""

import ast
from collections import defaultdict
from collections.abc import Mapping

from tests.unit.source_code.calls import ROOT, files

TWICE: dict[str, str] = {}
"""Names that are defined more than once, and why."""


def defined_twice(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the public class names that several files, or one file several times, define, and where."""
    found = defaultdict(list)
    for file, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(f"{file}:{node.lineno}")
    return {name: places for name, places in found.items() if len(places) > 1}


def test_a_class_name_exists_once() -> None:
    found = defined_twice({path.relative_to(ROOT).as_posix(): path.read_text() for path in files()})
    twice = {name: places for name, places in found.items() if name not in TWICE}
    assert not twice, f"rename all but one of each to what they are: {twice}"
    assert sorted(set(TWICE) - set(found)) == [], "a name in TWICE is defined once now: take it out"


def test_private_names_may_be_defined_twice_and_nested_classes_count() -> None:
    sources = {
        "a.py": "class Place: ...\nclass _Own: ...\nclass Once: ...",
        "b.py": "class _Own: ...\nclass Outer:\n    class Place: ...",
    }
    assert defined_twice(sources) == {"Place": ["a.py:1", "b.py:3"]}
