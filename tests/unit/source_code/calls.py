"""The project's source as syntax trees, for tests of what must not be in it."""

import ast
import gc
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]


class Place(NamedTuple):
    """A call in the source."""

    file: str
    """Relative to the repository's root."""
    function: str
    """The function that it is in, such as "Child.request"; empty at the top of a module."""
    call: ast.Call
    limited: bool
    """Inside `async with asyncio.timeout(...)`."""
    looped: bool
    """Inside a loop of its function."""
    named: bool
    """Inside `with waiting(...)`."""

    @property
    def text(self) -> str:
        """The call as source."""
        return ast.unparse(self.call)

    @property
    def called(self) -> str:
        """Source of the callee, up to its first bracket."""
        return ast.unparse(self.call.func).split("(")[0]

    @property
    def name(self) -> str:
        """What is called, without what it is a part of."""
        function = self.call.func
        return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")

    @property
    def keywords(self) -> set[str | None]:
        """Names of the keyword arguments."""
        return {keyword.arg for keyword in self.call.keywords}


def files() -> list[Path]:
    """Every module of relaxd and the services, without what is generated."""
    found = [*ROOT.glob("relaxd/**/*.py"), *ROOT.glob("services/**/*.py")]
    return sorted(path for path in found if path.parent != ROOT / "relaxd" / "v1")


@cache
def trees() -> dict[str, ast.Module]:
    """The tree of each module, by its path relative to the repository's root."""
    gc.disable()  # searching a million nodes for garbage takes longer than parsing
    found = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in files()}
    gc.freeze()
    gc.enable()
    return found


@cache
def calls() -> list[Place]:
    """Every call in the source."""
    found: list[Place] = []
    for file, tree in trees().items():
        _add_calls(found, tree, file, "")
    return found


def _add_calls(
    found: list[Place],
    node: ast.AST,
    file: str,
    function: str,
    *,
    limited: bool = False,
    looped: bool = False,
    named: bool = False,
) -> None:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        function = f"{function}.{node.name}".lstrip(".")
        limited = looped = named = False
    if isinstance(node, ast.AsyncWith):
        limited = limited or any("timeout(" in ast.unparse(item.context_expr) for item in node.items)
    if isinstance(node, ast.With):
        named = named or any(ast.unparse(item.context_expr).startswith("waiting(") for item in node.items)
    if isinstance(node, ast.While | ast.For | ast.AsyncFor):
        looped = True
    if isinstance(node, ast.Call):
        found.append(Place(file, function, node, limited, looped, named))
    for child in ast.iter_child_nodes(node):
        _add_calls(found, child, file, function, limited=limited, looped=looped, named=named)
