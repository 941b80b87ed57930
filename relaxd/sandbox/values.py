"""Plain values, as JSON that keeps Python's types: what can pass between two processes that don't trust each other."""

from collections.abc import Callable
from typing import Any


class NotPlain(TypeError):
    """A value can't pass between the processes."""


def encode(value: Any, name_of: Callable[[Any], str | None] = lambda value: None) -> Any:
    """Return a value as JSON, for `decode`. Raises NotPlain, RecursionError.

    Numbers, text, bytes, None, and lists, tuples, sets and dicts of them. Arrays and numbers of numpy become lists and
    numbers. `name_of` returns the name of a function that the other process knows, or else None.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode(item, name_of) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item, name_of) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, name_of), encode(item, name_of)] for key, item in value.items()]}
    if isinstance(value, set | frozenset):
        kind = "set" if isinstance(value, set) else "frozenset"
        return {kind: [encode(item, name_of) for item in value]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if (name := name_of(value)) is not None:
        return {"name": name}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), name_of)
    raise NotPlain(f"a {type(value).__name__} is no plain value")


def decode(given: Any, named: Callable[[str], Any] | None = None) -> Any:
    """Return the value of what `encode` made. `named` returns what has a name.

    Raises ValueError for anything else, which a process that isn't trusted may send; RecursionError.
    """
    if given is None or isinstance(given, bool | int | float | str):
        return given
    if isinstance(given, list):
        return [decode(item, named) for item in given]
    try:
        ((kind, inside),) = given.items()
        if kind == "name" and named is not None:
            return named(inside)
        return _DECODERS[kind](inside, named)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"no plain value: {type(error).__name__}: {error}") from error


_DECODERS: dict[str, Callable[[Any, Callable[[str], Any] | None], Any]] = {
    "tuple": lambda inside, named: tuple(decode(item, named) for item in inside),
    "dict": lambda inside, named: {decode(key, named): decode(item, named) for key, item in inside},
    "set": lambda inside, named: {decode(item, named) for item in inside},
    "frozenset": lambda inside, named: frozenset(decode(item, named) for item in inside),
    "bytes": lambda inside, named: bytes.fromhex(inside),
    "complex": lambda inside, named: complex(*inside),
}
