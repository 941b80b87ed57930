"""The jsonl source: a file with one JSON object per line."""

import json
from pathlib import Path
from typing import Any

from relaxd.data.errors import DataError
from relaxd.data.examples import Example, Message

MAX_PROBLEMS_SHOWN = 5


def read_jsonl(path: Path, field: str) -> list[Example]:
    """Read and check a file.

    `field` is the setting with its path, for error messages.

    Raises DataError if the file is unreadable, has no prompt, or has invalid lines (named by number).
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(field, f"can't read {path}: {error.strerror or error}") from error
    examples, problems = [], []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            examples.append(_parse(line, place=f"{path} line {number}"))
        except ValueError as error:
            problems.append(f"line {number}: {error}")
    if problems:
        shown = "; ".join(problems[:MAX_PROBLEMS_SHOWN])
        more = f"; and {len(problems) - MAX_PROBLEMS_SHOWN} more" if len(problems) > MAX_PROBLEMS_SHOWN else ""
        raise DataError(field, f"{path} has {len(problems)} invalid lines: {shown}{more}")
    if not examples:
        raise DataError(field, f'{path} is empty: it needs at least one line such as {{"prompt": "..."}}')
    return examples


def _parse(line: bytes, place: str) -> Example:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(record, dict):
        raise ValueError(f'a JSON object such as {{"prompt": "..."}} is needed, not {_kind(record)}')
    if "prompt" not in record:
        raise ValueError(f'"prompt" is missing (found: {", ".join(record) or "nothing"})')
    prompt = _prompt(record.pop("prompt"))
    answer = record.pop("answer", "")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f'"answer" must be text or a number, not {_kind(answer)}')
    return Example(prompt=prompt, answer=str(answer), metadata=record, place=place)


def _prompt(value: Any) -> str | list[Message]:
    if isinstance(value, str):
        if not value.strip():
            raise ValueError('"prompt" is empty')
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(f'"prompt" must be text or a list of chat messages, not {_kind(value)}')
    for index, message in enumerate(value):
        fits = isinstance(message, dict) and isinstance(message.get("role"), str)
        if not fits or not isinstance(message.get("content"), str):
            raise ValueError(f'"prompt"[{index}] must look like {{"role": "user", "content": "..."}}')
    return value


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}.get(
        type(value), "a number"
    ) + (" without entries" if value == [] else "")
