"""Values of rows as JSON has them, whatever a table, a package or a user's own class gives."""

import math
from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """Convert a value to what JSON has: arrays to lists, numpy's numbers to Python's, times and decimals to text.

    NaN, with which tables of numbers say that one is missing, becomes None. What has no such form stays as it is.
    """
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return None if math.isnan(value) else float(value)
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, date | time | timedelta | Decimal | np.datetime64 | np.timedelta64):
        return str(value)
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    return value


def kind_of(value: Any) -> str:
    """Return what kind of value it is, in words."""
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null", bytes: "bytes"}
    other = "a number" if isinstance(value, int | float) else f"a value of type {type(value).__name__}"
    return kinds.get(type(value), other) + (" without entries" if type(value) is list and not value else "")


def stranger(name: str, value: Any) -> tuple[str, Any] | None:
    """Return the first value in a plain one that JSON lacks, with its dotted name; None without any."""
    if value is None or isinstance(value, str | int | float):
        return None
    if isinstance(value, dict):
        inside = ((f"{name}.{key}", one) for key, one in value.items())
    elif isinstance(value, list):
        inside = ((name, one) for one in value)
    else:
        return name, value
    return next((found for key, one in inside if (found := stranger(key, one))), None)
