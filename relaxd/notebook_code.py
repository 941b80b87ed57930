"""Functions and classes of a notebook, written to files so that other processes can import them by name."""

import ast
import hashlib
import inspect
import linecache
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FUTURE = "from __future__ import annotations  # annotations may name what only the caller imports\n"
CONTRACT = """\
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Optional, Union

from relaxd.envs.environment import Environment, Observation, Reply, Sample, Step
"""
"""Names that the base, the decorators and the annotations of an environment may use."""
TOOLS = "TOOLS"
"""Name of the list of functions in the file of an environment that is built from functions."""


def write_reward(reward: Callable[..., Any], folder: Path) -> str:
    """Write a function's source into a file below `folder`, and return the name that reward.name needs.

    Raises ValueError: it isn't a function that `def` made, or its source can't be read.
    """
    if not _is_function(reward):
        raise ValueError(
            f"reward is {reward!r}: it must be a function that `def` made, or leave it out and set reward.name"
        )
    return _write(folder / "rewards", reward.__name__, [_source("reward", reward)])


def write_environment(environment: type | Callable[..., Any] | Sequence[Callable[..., Any]], folder: Path) -> str:
    """Write an environment's source into a file below `folder`, and return the name that agent.environment needs.

    Raises ValueError: it is neither a class nor a function that `def` made nor a list of such functions, or a source
    can't be read.
    """
    if inspect.isclass(environment):
        source = _class_source(environment)
        return _write(folder / "environments", environment.__name__, [CONTRACT, source])
    tools: list[Any] = list(environment) if isinstance(environment, list | tuple) else [environment]
    if not tools or not all(map(_is_function, tools)):
        raise ValueError(
            f"environment is {environment!r}: it must be a class, or a list of functions that `def` made and the model "
            "may call; or leave it out and set agent.environment"
        )
    sources = [_source("tool", tool) for tool in tools]
    names = ", ".join(tool.__name__ for tool in tools)
    return _write(folder / "environments", TOOLS, [CONTRACT, *sources, f"{TOOLS} = [{names}]\n"])


def _is_function(value: object) -> bool:
    return inspect.isfunction(value) and value.__name__.isidentifier()


def _write(folder: Path, name: str, parts: Sequence[str]) -> str:
    digest = hashlib.sha256("".join(parts).encode()).hexdigest()[:8]
    file = folder / f"{name}_{digest}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n\n".join((FUTURE, *parts)))
    return f"{file}:{name}"


def _source(what: str, function: Callable[..., Any]) -> str:
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError) as error:
        raise ValueError(f"the source of the {what} {function.__name__} can't be read ({error})") from error


def _class_source(kind: type) -> str:
    """Return the source of a class, found by its methods: `inspect` finds none of a notebook's classes."""
    codes = [method.__code__ for method in vars(kind).values() if inspect.isfunction(method)]
    for code in codes:
        lines = linecache.getlines(code.co_filename)
        for node in ast.walk(ast.parse("".join(lines))):
            if not isinstance(node, ast.ClassDef) or node.name != kind.__name__ or node.end_lineno is None:
                continue
            if node.lineno <= code.co_firstlineno <= node.end_lineno:
                begin = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                return textwrap.dedent("".join(lines[begin - 1 : node.end_lineno]))
    raise ValueError(
        f"the source of the environment {kind.__name__} can't be read: write it to a file and set agent.environment to "
        f'"file.py:{kind.__name__}"'
    )
