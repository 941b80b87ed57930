"""Values of rows as JSON has them, whatever a table, a package or a user's own class gives."""

import math
from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np

_PLAIN = frozenset((str, int, bool, type(None)))


def plain(value: Any) -> Any:
    """Convert a value to what JSON has: arrays to lists, numpy's numbers to Python's, times and decimals to text.

    NaN, with which tables of numbers say that one is missing, becomes None. What has no such form stays as it is.
    """
    kind = type(value)  # exact types first: every row of a file passes here
    if kind in _PLAIN:
        return value
    if kind is dict:
        return {
            name if type(name) is str else str(name): one if type(one) in _PLAIN else plain(one)
            for name, one in value.items()
        }
    if kind is list:
        return [one if type(one) in _PLAIN else plain(one) for one in value]
    return _converted(value)


def _converted(value: Any) -> Any:
    if isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return None if math.isnan(value) else float(value)
    if isinstance(value, Mapping):
        return plain(dict(value))
    if isinstance(value, list | tuple):
        return plain(list(value))
    if isinstance(value, date | time | timedelta | Decimal | np.datetime64 | np.timedelta64):
        return str(value)
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    return value


def kind_of(value: Any) -> str:
    """Return the kind of a value, in words."""
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null", bytes: "bytes"}
    other = "a number" if isinstance(value, int | float) else f"a value of type {type(value).__name__}"
    return kinds.get(type(value), other) + (" without entries" if type(value) is list and not value else "")


def stranger(name: str, value: Any) -> tuple[str, Any] | None:
    """Return the first value in a plain one that JSON lacks, with its dotted name; None without any."""
    if type(value) in _PLAIN or isinstance(value, str | int | float):
        return None
    if type(value) is dict:
        inside = ((f"{name}.{key}", one) for key, one in value.items() if type(one) not in _PLAIN)
    elif type(value) is list:
        inside = ((name, one) for one in value if type(one) not in _PLAIN)
    else:
        return name, value
    for key, one in inside:
        if found := stranger(key, one):
            return found
    return None
