"""Users' own sources of prompts, and functions that build prompts."""

import json
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from relaxd.config import DataConfig
from relaxd.data.files.rows import Rows, plain
from relaxd.importing import ImportProblem, describe_error, import_own
from relaxd.models import DataError

DIGESTED = 20_000
"""Maximum number of rows, evenly spread, to read for the digest that shows changed data."""


class OwnSource(Protocol):
    """Interface of a user's own source, which is made with data.settings. An optional `held_out()` returns another
    source with the held-out prompts.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a row: an object such as {"prompt": ..., "answer": ...}; always the same one for an index."""


class OwnRows:
    """Rows of a user's own source."""

    def __init__(self, source: OwnSource, name: str) -> None:
        """Raises DataError if the source has no length."""
        try:
            self._length = len(source)
        except Exception as error:  # a user's class may raise anything
            raise DataError("data.source", f'= "{name}" has no length: {describe_error(error)}') from error
        self._source = source
        self._name = name

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            row = self._source[index]
        except Exception as error:  # a user's class may raise anything
            raise ValueError(f"it failed: {describe_error(error)}") from error
        if not isinstance(row, dict):
            raise ValueError(f'a row must be a dict such as {{"prompt": "..."}}, not a {type(row).__name__}')
        return row

    def scan(self) -> Iterator[dict[str, Any] | None]:
        for index in range(self._length):
            try:
                yield self[index]
            except ValueError:
                yield None

    def content(self, part: range) -> Iterator[bytes]:
        for index in part[:: max(1, -(-len(part) // DIGESTED))]:
            try:
                yield json.dumps(plain(self[index]), default=_text).encode()
            except ValueError:
                yield b"wrong"

    def place(self, index: int) -> str:
        return f"{self._name} row {index}"


def _text(value: Any) -> str:
    """Return a text for a value that JSON can't represent: bytes as hex, other objects by their type's name.

    The digest needs the same text in each process; an object's repr may contain its address.
    """
    return value.hex() if isinstance(value, bytes) else type(value).__name__


def open_own(data: DataConfig) -> tuple[Rows, Rows | None]:
    """Make a user's own source. Returns its rows, and the held-out ones if it has some.

    Raises DataError: the class can't be imported or made, or has no rows.
    """
    kind = _import(data.source, "data.source")
    try:
        source = kind(**data.settings)
    except Exception as error:  # a user's class may raise anything
        raise DataError("data.source", f'= "{data.source}" can\'t be made: {describe_error(error)}') from error
    rows = OwnRows(source, data.source)
    if not len(rows):
        raise DataError("data.source", f'= "{data.source}" has no rows')
    if not hasattr(source, "held_out"):
        return rows, None
    try:
        held_out = source.held_out()
    except Exception as error:  # a user's class may raise anything
        raise DataError("data.source", f'= "{data.source}": held_out() failed: {describe_error(error)}') from error
    return rows, OwnRows(held_out, f"{data.source}, held out,")


def prompt_function(name: str, setting: str) -> Callable[[dict[str, Any]], Any] | None:
    """Return the user's own function that builds prompts from rows; None without a name. Raises DataError."""
    if not name:
        return None
    function: Callable[[dict[str, Any]], Any] = _import(name, setting)
    return function


def _import(name: str, setting: str) -> Callable[..., Any]:
    try:
        found = import_own(name)
    except ImportProblem as error:
        raise DataError(setting, f'= "{name}": {error}') from error
    if not callable(found):
        raise DataError(setting, f'= "{name}" is a {type(found).__name__}, which can\'t be called')
    called: Callable[..., Any] = found
    return called
