"""Users' own functions and classes: import them by the names in a configuration, and write a notebook's to files so
that other processes can import them."""

import ast
import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import linecache
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

OWN_NAME = re.compile(r"(?:[^:]*\.py|[^\W\d]\w*(?:\.[^\W\d]\w*)*):[^\W\d]\w*")
"""Pattern of the names of users' classes and functions, such as "package.module:Class" or "file.py:function"."""
_OURS = tuple(f"{Path(__file__).parents[1] / folder}{os.sep}" for folder in ("relaxd", "services"))
"""Folders of relaxd's code: an error's stack frames in these files aren't user code."""

_changed_at: dict[str, float] = {}
"""Modification times of users' modules when they were imported, by module name."""


class ImportProblem(ValueError):
    """A user's class or function can't be imported. The message doesn't say which setting names it."""


def check_own(setting: str, name: str, kind: str) -> str:
    """Return `name` if it has the form of a name of a user's class or function, or is empty. Otherwise raises
    ValueError, which names the setting.

    Args:
        setting: the setting that has the name.
        name: the name; may be empty.
        kind: what the name's last part should be, such as "function".
    """
    if name and not OWN_NAME.fullmatch(name):
        raise ValueError(f'{setting} = "{name}": name it as "package.module:{kind}" or "file.py:{kind}"')
    return name


def check_known_or_own(setting: str, name: str, known: Sequence[str], there_are: str, own: str) -> str:
    """Return `name` if it is in `known` or has the form of a name of a user's class. Raises ValueError otherwise.

    Args:
        setting: the setting that has the name.
        name: the name.
        known: the names that relaxd has.
        there_are: words before the list of known names, such as "there are".
        own: words for one of the user's own, such as "A source of your own".
    """
    if name in known or OWN_NAME.fullmatch(name):
        return name
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"{there_are} {', '.join(known)}."
    raise ValueError(f'{setting} = "{name}": {hint} {own} is named as "package.module:Class" or "file.py:Class"')


def import_own(name: str) -> Any:
    """Import "package.module:Class" or "file.py:function".

    A file is read again each time, because services outlive runs. Modules are found in the folder in which the service
    was started, and on PYTHONPATH.

    Raises:
        ImportProblem: the module or file is missing, can't be imported, or lacks the function or class.
    """
    module_name, _, attribute = name.rpartition(":")
    what = "file" if module_name.endswith(".py") else "module"
    try:
        module = import_file(module_name) if what == "file" else _import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        reason = describe_error(error) + describe_missing(module_name, error)
        raise ImportProblem(f"{what} {module_name} can't be imported: {reason}") from error
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, vars(module), n=1)
        raise ImportProblem(f"{what} {module_name} has no {attribute}{f'; did you mean {near[0]}?' if near else ''}")
    return getattr(module, attribute)


def describe_missing(module_name: str, error: Exception) -> str:
    """Return a hint for a missing module: a similarly named file, and where modules are looked for. Return "" if the
    error has another cause."""
    if not isinstance(error, ModuleNotFoundError) or error.name != module_name.partition(".")[0]:
        return ""
    near = difflib.get_close_matches(error.name, [path.stem for path in Path.cwd().glob("*.py")], n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"; {hint}modules are looked for in {Path.cwd()} and on PYTHONPATH"


def describe_error(error: BaseException) -> str:
    """Return one line that describes an exception, with its place in the user's file."""
    text = f"{type(error).__name__}: {error}".strip(": ")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_OURS) and "importlib" not in frame.filename
    ]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f"{text} ({os.path.basename(own[-1].filename)}:{own[-1].lineno}, in {own[-1].name})" if own else text


def _import_module(name: str) -> ModuleType:
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)
    module = importlib.import_module(name)
    changed = os.path.getmtime(module.__file__) if module.__file__ else 0.0
    if _changed_at.setdefault(name, changed) != changed:
        if module.__file__:
            with contextlib.suppress(OSError):  # byte code of the same second may be outdated
                os.unlink(importlib.util.cache_from_source(module.__file__))
        importlib.invalidate_caches()
        module = importlib.reload(module)
        _changed_at[name] = changed
    return module


class _FromSource(SourceFileLoader):
    """Loads a module from source only. Cached byte code could be outdated if a file is written twice within a
    second."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def import_file(path: str, kind: str = "own") -> ModuleType:
    """Import a file as a module, relaxd_KIND_NAME. Like a script, the file may import others in its folder.

    Raises FileNotFoundError, and whatever the file raises.
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    name = f"relaxd_{kind}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file, loader=_FromSource(name, str(file)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    sys.modules[spec.name] = module  # dataclasses and pickle look modules up there
    spec.loader.exec_module(module)
    return module


FUTURE = "from __future__ import annotations  # annotations may name what only the caller imports\n"
CONTRACT = """\
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Optional, Union

from relaxd.envs.environment import Environment, Observation, Reply, Sample, Step
"""
"""First lines of a written environment's file: imports of names that its base class, decorators and annotations use."""
TOOLS = "TOOLS"
"""Variable in an environment's file that lists the functions from which the environment is built."""


def write_reward(reward: Callable[..., Any], folder: Path) -> str:
    """Write a reward function's source into a file below `folder`, and return the name that reward.name needs.

    Raises ValueError if `reward` isn't a function made with `def`, or its source can't be read.
    """
    if not _is_function(reward):
        raise ValueError(
            f"reward is {reward!r}: it must be a function that `def` made, or leave it out and set reward.name"
        )
    return _write(folder / "rewards", reward.__name__, [_source("reward", reward)])


def write_environment(environment: type | Callable[..., Any] | Sequence[Callable[..., Any]], folder: Path) -> str:
    """Write an environment's source into a file below `folder`, and return the name that agent.environment needs.

    Raises ValueError if it is neither a class nor one or several functions made with `def`, or a source can't be read.
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
    """Return the source of a class, found through its methods, because `inspect` can't find a notebook's classes."""
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
