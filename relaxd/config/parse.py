"""Parsing of TOML within limits, so that any file gets an answer soon, which says what is wrong.

tomllib and pydantic take minutes for a million keys, and Python refuses deep nesting and long numbers with errors of
its own.
"""

import re
import tomllib
from typing import Any

MAX_CHARACTERS = 1 << 18
"""Maximum characters of a configuration. Prompts, rewards and long templates belong in separate files."""
MAX_SETTINGS = 10_000
MAX_NAME = 200
"""Characters of a key."""
MAX_DEPTH = 32
"""Maximum nesting of tables and lists; relaxd's own settings have five levels."""
_DEEP_KEY = re.compile(r"""(?<![\w"'-])(?:(?:[\w-]+|"[^"\n]{0,99}"|'[^'\n]{0,99}')[ \t]*\.[ \t]*){33}""")
_LONG_NUMBER = re.compile(r"(?<!\w)(0x)?[0-9a-fA-F_]{3500,}")


class LimitError(ValueError):
    """TOML beyond the limits of a configuration, even if it is valid. Has the line, or 0."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML. Raises LimitError, TOMLDecodeError."""
    if len(text) > MAX_CHARACTERS:
        raise LimitError(f"has more than {MAX_CHARACTERS:,} characters: prompts and long texts belong into files")
    if text.count("=") > MAX_SETTINGS:
        raise LimitError(f"has {text.count('='):,} settings, and may have {MAX_SETTINGS:,}")
    if deep := _DEEP_KEY.search(text):
        raise LimitError(f"has a key of more than {MAX_DEPTH} names with dots between", _line(text, deep))
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise LimitError(f"has tables or lists that are more than {MAX_DEPTH} deep") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # Python's limit for integers in decimal
        number = _LONG_NUMBER.search(text)
        raise LimitError(
            "has a number of more than 4,300 digits: whole numbers have 64 bits", _line(text, number) if number else 0
        ) from None
    _check(data)
    return data


def _line(text: str, match: re.Match[str]) -> int:
    return text.count("\n", 0, match.start()) + 1


def _check(data: dict[str, Any]) -> None:
    pending: list[tuple[str, int, Any]] = [("", 1, data)]
    while pending:
        place, depth, value = pending.pop()
        if depth > MAX_DEPTH:
            raise LimitError(f"has tables or lists that are more than {MAX_DEPTH} deep, at {place[:MAX_NAME]}")
        if isinstance(value, dict):
            if longest := next((key for key in value if len(key) > MAX_NAME), None):
                raise LimitError(f"has a key of {len(longest):,} characters, {longest[:40]!r}...")
            pending += [(f"{place}.{key}" if place else key, depth + 1, inner) for key, inner in value.items()]
        elif isinstance(value, list):
            pending += [(place, depth + 1, inner) for inner in value]
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise LimitError(f"has a number of {value.bit_length():,} bits, {place}: whole numbers have 64 bits")
