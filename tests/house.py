"""`make house`: the size of relaxd and its services, and signs of code that is hard to live in.

- files: Python files of relaxd/ and services/, without generated code.
- code lines: lines that hold a token of code, so no blank lines, comments or docstrings.
- forwarders: functions whose body is one call that passes on nothing but their own parameters. Not: one that calls what
  another call or an expression gave; a method that a base class asks for, or may ask for because it is a package's, and
  special methods such as `__exit__`.
- small files: files under 40 lines, without `__init__.py` and `__main__.py`.
- riddles: docstrings that begin with a relative clause, only name another docstring, or use a phrase of RIDDLES.

A sign is a place to read again, not a verdict. `python -m tests.house --list forwarders` shows the places.
"""

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
RIDDLES = re.compile(
    r"^(What|Whether|Who|Whoever|How|Having|Of what|Of which|That which|Those (that|who)|Where)\b"
    r"|^(Most|Least|Fewest) \w+|^See [`\w.]+\.?$"
    r"|\bReturns? (what|whoever|how|who|that which)\b|\bbut for\b|\bso (many|much)\b|\bof (its|their|one's) own\b"
    r"|\b(the one|is one|are ones|for one in|such a one)\b|\b(is|are|was|were|has|have) (told|asked|heard)\b"
    r"|\bthat (is|are) there\b"
)
SMALL = 40
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Methods = dict[str, tuple[list[str], set[str]]]
"""The names of a class's bases and of its methods, by its name."""
NO_BASES = {"Protocol", "Generic", "ABC", "object"}


def source_files() -> list[Path]:
    """Return the Python files of relaxd and services, without generated ones."""
    files = [file for folder in ("relaxd", "services") for file in (ROOT / folder).rglob("*.py")]
    return sorted(file for file in files if not file.is_relative_to(ROOT / "relaxd" / "v1"))


def docstrings(tree: ast.Module) -> Iterator[ast.Expr]:
    """Yield the docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement


def code_lines(source: str, tree: ast.Module) -> int:
    """Return the number of lines with code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for text in docstrings(tree):
        lines.difference_update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return len(lines)


def forwards(function: Function) -> bool:
    """Return True if the body is one call that passes on nothing but the function's parameters."""
    body = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr):
        return False
    call = body[0].value
    while isinstance(call, ast.Await | ast.YieldFrom):
        call = call.value
    if not isinstance(call, ast.Call):
        return False
    parameters = function.args
    names = {a.arg for a in (*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs)}
    names |= {a.arg for a in (parameters.vararg, parameters.kwarg) if a is not None}
    passed = [a.value if isinstance(a, ast.Starred) else a for a in call.args] + [k.value for k in call.keywords]
    return all(isinstance(a, ast.Name) and a.id in names for a in passed) and _is_name(call.func)


def _is_name(node: ast.expr) -> bool:
    """Return True for a name, with attributes or without."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def methods_of(trees: Iterable[ast.Module]) -> Methods:
    """Return the bases and methods of all classes."""
    found: Methods = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
                names = [base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in bases]
                found[node.name] = (
                    [name for name in names if name not in NO_BASES],
                    {method.name for method in node.body if isinstance(method, Function)},
                )
    return found


def is_asked_for(method: str, owner: str, classes: Methods) -> bool:
    """Return True for a special method, and for one that a base of its class has or may have."""
    if method.startswith("__"):
        return True
    for base in classes[owner][0]:
        if base not in classes or method in classes[base][1] or is_asked_for(method, base, classes):
            return True
    return False


def forwarders(tree: ast.Module, classes: Methods) -> Iterator[Function]:
    """Yield the functions that only forward a call, without methods that others ask for."""
    for owner in ast.walk(tree):
        for node in ast.iter_child_nodes(owner):
            if not isinstance(node, Function) or not forwards(node):
                continue
            if not isinstance(owner, ast.ClassDef) or not is_asked_for(node.name, owner.name, classes):
                yield node


def survey() -> tuple[int, dict[str, list[str]]]:
    """Return the number of code lines, and places by sign."""
    lines = 0
    places: dict[str, list[str]] = {"files": [], "forwarders": [], "small files": [], "riddles": []}
    sources = {file: file.read_text() for file in source_files()}
    trees = {file: ast.parse(source) for file, source in sources.items()}
    classes = methods_of(trees.values())
    for file, source in sources.items():
        tree, name = trees[file], str(file.relative_to(ROOT))
        lines += code_lines(source, tree)
        places["files"].append(name)
        if source.count("\n") < SMALL and not file.name.startswith("__"):
            places["small files"].append(name)
        places["forwarders"] += [f"{name}:{node.lineno}: {node.name}" for node in forwarders(tree, classes)]
        for text in docstrings(tree):
            words = " ".join(str(ast.literal_eval(text.value)).split())
            if RIDDLES.search(words):
                places["riddles"].append(f"{name}:{text.lineno}: {words[:100]}")
    return lines, places


def main() -> None:
    """Print the counts, or the places of one sign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", metavar="SIGN", help="print the places of a sign, such as forwarders")
    sign = parser.parse_args().list
    lines, places = survey()
    if sign:
        print("\n".join(places[sign]))
        return
    for name, count in {"code lines": lines, **{name: len(found) for name, found in places.items()}}.items():
        print(f"{name:<12} {count:>7,}")


if __name__ == "__main__":
    main()
