"""The settings of a run as a table, read from the configuration's models and the docstrings below their fields."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from relaxd.config.run import RunConfig

Place = tuple[str, ...]
"""Path of a setting or section, such as ("trainer", "optimizer", "lr")."""
_BOUNDS = (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
_KINDS = {bool: "true or false", int: "integer", float: "number", str: "text", Path: "path"}


@dataclass(frozen=True)
class Setting:
    """One setting."""

    place: Place
    """Its path."""
    kind: str
    """Its allowed values, such as "integer ≥ 1"."""
    required: bool
    """It has no default."""
    default: Any
    """The default, as TOML has it; None if it is not set by default."""
    meaning: str
    """Its documentation, in one line."""
    takes_text: bool
    """It takes any text, so that 123 on the command line is a text."""

    @property
    def name(self) -> str:
        """Dotted name, such as "trainer.optimizer.lr"."""
        return ".".join(self.place)


@cache
def settings() -> Mapping[Place, Setting]:
    """Return every setting by its place, section by section."""
    return {place: _setting(place, field) for place, field in _walk() if _section_of(field) is None}


@cache
def sections() -> Mapping[Place, str]:
    """Return the documentation of every section by its place."""
    return {
        place: _one_line(section.__doc__ or "")
        for place, field in _walk()
        if (section := _section_of(field)) is not None
    }


def plain(value: Any) -> Any:
    """Convert a setting's value to what TOML has: text for a path, a list for a tuple."""
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _walk(section: type[BaseModel] = RunConfig, place: Place = ()) -> Iterator[tuple[Place, FieldInfo]]:
    for key, field in section.model_fields.items():
        yield (*place, key), field
        if inner := _section_of(field):
            yield from _walk(inner, (*place, key))


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _setting(place: Place, field: FieldInfo) -> Setting:
    kinds = [kind for kind in get_args(field.annotation) or (field.annotation,) if kind is not type(None)]
    is_text = get_origin(field.annotation) not in (Literal, tuple, dict) and (str in kinds or Path in kinds)
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    return Setting(
        place, _kind(field), field.is_required(), plain(default), _one_line(field.description or ""), is_text
    )


def _kind(field: FieldInfo) -> str:
    origin, arguments = get_origin(field.annotation), get_args(field.annotation)
    if origin is Literal:
        return " or ".join(f'"{choice}"' for choice in arguments)
    if origin is tuple:
        return "list of texts"
    if origin is dict:
        return "table"
    kind = next(one for one in arguments or (field.annotation,) if one is not type(None))
    bounds = [
        f"{sign} {getattr(limit, name)}" for limit in field.metadata for name, sign in _BOUNDS if hasattr(limit, name)
    ]
    return " ".join([_KINDS[kind], " and ".join(bounds)]).strip()


def _one_line(text: str) -> str:
    return " ".join(text.split())
