"""The modules for users' code: docs/python.md lists them, and what examples import is in their `__all__`."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.processes import ROOT

PUBLIC = re.findall(r"^\| `(relaxd[a-z.]*)` \|", (ROOT / "docs" / "python.md").read_text(), re.MULTILINE)
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ONE_PAGE = ROOT / "examples" / "one_page.py"
INSIDE = {"relaxd.local.embedded_redis", "services.rollout.offline", "services.trainer.learner.learner"}
"""Modules that only one_page.py imports, to do without services."""


def imports(file: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the modules of relaxd that a file imports, with the names from each."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("relaxd", "services"):
            yield node.module, [name.name for name in node.names]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_modules_list_their_names(name: str) -> None:
    module = importlib.import_module(name)
    assert [one for one in module.__all__ if not hasattr(module, one)] == []


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_examples_import_only_public_names(file: Path) -> None:
    for module, names in imports(file):
        if file == ONE_PAGE and module in INSIDE:
            continue
        assert module in PUBLIC, f"{module} is not among the modules of docs/python.md"
        assert set(names) <= set(importlib.import_module(module).__all__)


def test_one_page_needs_six_imports_and_explains_its_words() -> None:
    assert len(list(imports(ONE_PAGE))) <= 6
    for word in ("term", "delivery", "columns"):
        assert f"# `{word}`: " in ONE_PAGE.read_text()
