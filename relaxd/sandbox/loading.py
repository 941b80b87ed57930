"""Loading of a program as a module, with the predefined names of programs for contests."""

import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

CONTEST = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing"),
)
"""Modules whose names programs for contests can use without importing, in verl's order: later ones win."""
PROGRAM = "<answer>"
"""Name of a program in tracebacks."""
RECURSION_LIMIT = 600_000
"""Recursion limit of programs for contests, as in verl."""


def contest_names() -> dict[str, Any]:
    """Return the names that a program for a contest finds imported, with their values."""
    space: dict[str, Any] = {}
    for one in CONTEST:
        found = vars(import_module(one))
        shown = found.get("__all__") or [key for key in found if not key.startswith("_")]
        space |= {key: found[key] for key in shown}
    return space | {one: import_module(one) for one in CONTEST}


def load(job: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Run the first of a job's programs that compiles, as a module. Returns its contents."""
    module = ModuleType(name)
    sys.modules[name] = module
    space = vars(module)
    if job["contest"]:
        sys.setrecursionlimit(RECURSION_LIMIT)
        space |= contest_names()
    refusal: BaseException | None = None
    for text in job["programs"]:
        try:
            code = compile(text, PROGRAM, "exec", dont_inherit=True)
            break
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            refusal = refusal or error
    else:
        assert refusal is not None
        raise refusal
    before = dict(space)
    exec(code, space)
    return {key: value for key, value in space.items() if key not in before or before[key] is not value} | {
        "__name__": name
    }
