"""Messages between ranks, as bytes: JSON, with arrays beside it. Only registered functions are ever called.

A message is made of plain values, arrays, paths, and registered dataclasses and functions, which are sent by name.
All ranks run the same program and so register the same names; other names are refused.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_TYPES: dict[str, type] = {}
_COMMANDS: dict[str, Callable[..., Any]] = {}
KIND = "$"
"""JSON key that marks an object as the encoding of a type that JSON lacks, such as a path or an array."""


class MessageError(ValueError):
    """A value can't be sent, or received bytes aren't a message."""


def message(cls: type[T]) -> type[T]:
    """Decorator: register a dataclass, so that ranks can send its instances to each other."""
    if not is_dataclass(cls):
        raise TypeError(f"{cls.__name__} is not a dataclass")
    _TYPES[_name(cls)] = cls
    return cls


def command(function: F) -> F:
    """Decorator: register a function, so that rank 0 can tell other ranks to call it."""
    _COMMANDS[_name(function)] = function
    return function


def _name(registered: Any) -> str:
    return f"{registered.__module__}.{registered.__qualname__}"


def encode(value: Any) -> list[memoryview]:
    """Encode a value as a message: its JSON, then the bytes of each array. Contiguous arrays aren't copied.

    Raises:
        MessageError: a part of the value has a type that can't be sent; the error names the type.
    """
    arrays: list[memoryview] = []
    text = json.dumps(_to_json(value, arrays), separators=(",", ":"))
    return [memoryview(bytearray(text, "utf-8")), *arrays]


def parse(text: memoryview) -> tuple[Any, list[int]]:
    """Parse a message's first part. Return its JSON, and the size in bytes of each array that follows.

    Raises MessageError.
    """
    try:
        node = json.loads(bytes(text))
    except ValueError as error:
        raise MessageError(f"not a message of another rank: {error}") from error
    return node, [int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize for dtype, shape in _headers(node)]


def decode(node: Any, arrays: Iterable[memoryview]) -> Any:
    """Decode a message's value from its parsed JSON and its arrays. Arrays become read-only views.

    Raises MessageError.
    """
    return _from_json(node, iter(arrays))


def _to_json(value: Any, arrays: list[memoryview]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf":
            raise MessageError(f"an array of {value.dtype} can't be sent to another rank")
        arrays.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        return {KIND: "array", "dtype": value.dtype.str, "shape": value.shape}
    if isinstance(value, np.generic):
        return _to_json(value.item(), arrays)
    if isinstance(value, list):
        return [_to_json(one, arrays) for one in value]
    if isinstance(value, tuple | frozenset | set):
        kind = "tuple" if isinstance(value, tuple) else type(value).__name__
        return {KIND: kind, "items": [_to_json(one, arrays) for one in value]}
    if isinstance(value, Mapping):
        return {KIND: "dict", "items": [[_to_json(key, arrays), _to_json(of, arrays)] for key, of in value.items()]}
    if isinstance(value, Path):
        return {KIND: "path", "path": str(value)}
    if isinstance(value, FunctionType) and _COMMANDS.get(_name(value)) is value:
        return {KIND: "command", "name": _name(value)}
    name = _name(type(value))
    if _TYPES.get(name) is type(value) and is_dataclass(value):
        values = {field.name: _to_json(getattr(value, field.name), arrays) for field in fields(value) if field.init}
        return {KIND: "message", "name": name, "values": values}
    raise MessageError(f"a {name} can't be sent to another rank; `message` registers a dataclass, `command` a function")


def _sequence(make: Callable[[Iterator[Any]], Any]) -> Callable[[dict[str, Any], Iterator[memoryview]], Any]:
    return lambda node, arrays: make(_from_json(one, arrays) for one in node["items"])


def _array(node: dict[str, Any], arrays: Iterator[memoryview]) -> Any:
    found = np.frombuffer(next(arrays), dtype=np.dtype(node["dtype"])).reshape(node["shape"])
    found.flags.writeable = False
    return found


def _message(node: dict[str, Any], arrays: Iterator[memoryview]) -> Any:
    if (cls := _TYPES.get(node["name"])) is None:
        raise MessageError(f"no message named {node['name']!r} is known here")
    return cls(**{name: _from_json(of, arrays) for name, of in node["values"].items()})


_KINDS: dict[str, Callable[[dict[str, Any], Iterator[memoryview]], Any]] = {
    "array": _array,
    "tuple": _sequence(tuple),
    "set": _sequence(set),
    "frozenset": _sequence(frozenset),
    "dict": lambda node, arrays: {_from_json(key, arrays): _from_json(of, arrays) for key, of in node["items"]},
    "path": lambda node, arrays: Path(node["path"]),
    "command": lambda node, arrays: _COMMANDS[node["name"]],
    "message": _message,
}
"""Decoders of JSON objects, by the value of `KIND`. Each takes its arrays from an iterator, in the order of sending."""


def _from_json(node: Any, arrays: Iterator[memoryview]) -> Any:
    if isinstance(node, list):
        return [_from_json(one, arrays) for one in node]
    if not isinstance(node, dict):
        return node
    try:
        return _KINDS[node[KIND]](node, arrays)
    except (KeyError, StopIteration, TypeError) as error:
        raise MessageError(f"not a message of another rank: {error!r}") from error


def _headers(node: Any) -> Iterator[tuple[str, list[int]]]:
    if isinstance(node, list):
        for one in node:
            yield from _headers(one)
    elif isinstance(node, dict):
        if node.get(KIND) == "array":
            yield node["dtype"], node["shape"]
        else:
            yield from _headers(list(node.values()))
