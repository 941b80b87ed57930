"""The settings of a run as a table, read from the configuration's models and the docstrings below their fields."""

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, Tag
from pydantic.fields import FieldInfo

from relaxd.config.algorithm import BUILT_IN
from relaxd.config.run import RunConfig

Place = tuple[str, ...]
"""Path of a setting or section, such as ("trainer", "optimizer", "lr")."""
_BOUNDS = (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
_KINDS = {bool: "true or false", int: "integer", float: "number", str: "text", Path: "path"}
NAME_MEANING = "Chooses the algorithm (docs/algorithms.md); package.module:Class is one of your own."


@dataclass(frozen=True)
class Setting:
    """A setting of the configuration: its path, values, default and documentation."""

    place: Place
    """Path of the setting, such as ("trainer", "optimizer", "lr")."""
    kind: str
    """Allowed values of the setting, such as "integer ≥ 1"."""
    required: bool
    """True if the setting must be given, because it has no default."""
    default: Any
    """Default value in TOML's form; None if the setting is unset by default."""
    meaning: str
    """Documentation of the setting, in one line."""
    takes_text: bool
    """True if any text is a valid value, so that a number given on the command line, such as 123, is taken as text."""

    @property
    def name(self) -> str:
        """Dotted name of the setting, such as "trainer.optimizer.lr"."""
        return ".".join(self.place)


@cache
def settings(algorithm: str = "") -> Mapping[Place, Setting]:
    """Return all settings by path, section by section.

    The section "algorithm" has the settings of the algorithm with the tag `algorithm` (see `tag_of`). Without a tag, it
    has the settings of all algorithms; if several declare a setting, the first declaration counts.
    """
    found = {
        place: _setting(place, field, meaning) for place, field, meaning in _walk(algorithm) if not _choices(field)
    }
    # The section of each algorithm allows only its own name.
    names = [*(f'"{name}"' for name in BUILT_IN), '"package.module:Class"']
    default = RunConfig.model_fields["algorithm"].default.name
    name = ("algorithm", "name")
    found[name] = replace(
        found[name], kind=" or ".join(names), required=False, default=default, meaning=NAME_MEANING, takes_text=True
    )
    return found


@cache
def sections(algorithm: str = "") -> Mapping[Place, str]:
    """Return the documentation of every section by its path. `algorithm` is an algorithm's tag, as for `settings`."""
    found = {}
    for place, field, meaning in _walk(algorithm):
        if choices := _choices(field):
            chosen = choices.get(algorithm) or (next(iter(choices.values())) if len(choices) == 1 else None)
            found[place] = _one_line((chosen.__doc__ or "") if chosen else meaning)
    return found


def plain(value: Any) -> Any:
    """Convert a setting's value to TOML's types: text for a path, a list for a tuple, a table for a section."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, BaseModel):
        return {name: plain(item) for name, item in value if name in value.model_fields_set}
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def _walk(algorithm: str) -> Iterator[tuple[Place, FieldInfo, str]]:
    """Yield the path, the field and the docstring of every setting and section, each path once."""
    seen = set()
    for place, field, meaning in _walk_section(RunConfig, (), algorithm):
        if place not in seen:
            seen.add(place)
            yield place, field, meaning


def _walk_section(section: type[BaseModel], place: Place, algorithm: str) -> Iterator[tuple[Place, FieldInfo, str]]:
    for key, field in section.model_fields.items():
        yield (*place, key), field, _docstring(section, key)
        choices = _choices(field)
        for inner in [choices[algorithm]] if algorithm in choices else choices.values():
            yield from _walk_section(inner, (*place, key), algorithm)


def _docstring(section: type[BaseModel], key: str) -> str:
    """Return the docstring below a section's field, which the section or one of its bases declares; "" if it has
    none."""
    found = (_docstrings(one.__module__).get((one.__name__, key)) for one in section.__mro__ if one is not object)
    return next((docstring for docstring in found if docstring), "")


@cache
def _docstrings(module: str) -> Mapping[tuple[str, str], str]:
    """Return the docstrings below the fields of a module's classes, by class name and field name."""
    classes = [one for one in ast.parse(inspect.getsource(sys.modules[module])).body if isinstance(one, ast.ClassDef)]
    found = {}
    for defined in classes:
        for field, below in pairwise(defined.body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[defined.name, key] = text
    return found


def _choices(field: FieldInfo) -> Mapping[str, type[BaseModel]]:
    """Return the models of a section by tag: several if it is a choice, such as the algorithms, else one under ""."""
    kind = field.annotation
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {"": kind}
    tagged = [get_args(one) for one in get_args(kind) if get_origin(one) is Annotated]
    return {one[1].tag: one[0] for one in tagged if isinstance(one[1], Tag)}


def _setting(place: Place, field: FieldInfo, meaning: str) -> Setting:
    kinds = [kind for kind in get_args(field.annotation) or (field.annotation,) if kind is not type(None)]
    is_text = get_origin(field.annotation) not in (Literal, tuple, dict) and (str in kinds or Path in kinds)
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    return Setting(place, _kind(field), field.is_required(), plain(default), _one_line(meaning), is_text)


def _kind(field: FieldInfo) -> str:
    origin, arguments = get_origin(field.annotation), get_args(field.annotation)
    if origin is Literal:
        return " or ".join(f'"{choice}"' for choice in arguments)
    if origin is tuple:
        entry = getattr(arguments[0], "__origin__", arguments[0])  # without the checks of an annotated type
        return {str: "list of texts", int: "list of integers"}.get(entry, "list of tables")
    if origin is dict:
        return "table"
    kind = next(one for one in arguments or (field.annotation,) if one is not type(None))
    bounds = [
        f"{sign} {getattr(limit, name)}" for limit in field.metadata for name, sign in _BOUNDS if hasattr(limit, name)
    ]
    return " ".join([_KINDS[kind], " and ".join(bounds)]).strip()


def _one_line(text: str) -> str:
    return " ".join(text.split())
