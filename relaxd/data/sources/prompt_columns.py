"""Conversion of rows to prompts: which columns hold prompt, answer and metadata, and the forms that a prompt may have.

A prompt is text, a list of chat messages, or the JSON text of such a list.
"""

import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from relaxd.data.examples import Example, Message
from relaxd.data.rows import OnDemand, Rows, kind_of, plain, stranger
from relaxd.importing import describe_error
from relaxd.media.placeholders import IMAGE, MediaColumn, MediaReader
from relaxd.media.sources import without_bytes
from relaxd.text import parse_json

ALL = "*"
"""Value of `Columns.metadata` that means all columns except prompt and answer."""
ANSWER = "answer"
"""Default name of the column with the reference answer. Rows may lack this column."""
ORIGINAL = "original"
"""Key of the prompt's whole picture in its metadata."""
MAX_ORIGINAL = 16 << 20
"""Maximum length of a prompt's whole picture as base64, in bytes. Every message that carries the prompt has the
picture."""
MESSAGE_FORM = '{"role": "user", "content": "..."}'


@dataclass(frozen=True)
class Columns:
    """Names of the columns of a source, and how its rows become prompts. A dot in a name leads into an object, as in
    "reward_model.ground_truth"."""

    prompt: str = "prompt"
    answer: str = ANSWER
    metadata: str = ""
    """Column with an object that becomes the metadata; ALL or empty means all columns except prompt and answer."""
    system_prompt: str = ""
    """Text of a system message for prompts without one."""
    source: str = ""
    """Name of the source. Prompts without metadata.data_source get this name there."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters of the source that differ from the run's, by name."""
    tools: str = ""
    """Column with tools for the chat template, which rows may lack; empty means none."""
    other_tools: Sequence[dict[str, Any]] = ()
    """Tools of rows that have no tools in the column."""
    media: Mapping[str, str] = field(default_factory=dict)
    """Columns with media items, by kind of media. Rows may lack these columns."""
    original: str = ""
    """Column with the whole picture for metadata.original, which rows without media may lack; empty means none."""
    make_prompt: Callable[[dict[str, Any]], Any] | None = None
    """A user's own function that builds the prompt from a row, instead of the column `prompt`."""
    made_by: str = "data.prompt_function"
    """Name of the setting that names the user's function."""

    def example(self, record: Mapping[str, Any], place: str) -> Example:
        """Return a row as an example. Raises ValueError, which names the column and says what is wrong with it."""
        media = MediaReader(self._media(record) if self.media else None)
        if self.make_prompt is None:
            prompt = read_prompt(self.prompt, plain(_find(record, self.prompt, "data.prompt_key")), media)
        else:
            prompt = read_prompt(self.made_by, plain(self._made(plain(record))), media)
        if self.media:
            media.end()
        answer: Any = ""
        if self.answer != ANSWER or ANSWER in record:
            answer = _answer(self.answer, plain(_find(record, self.answer, "data.answer_key")))
        metadata = self._metadata(record)
        if self.source:
            metadata.setdefault("data_source", self.source)
        if self.original:
            metadata |= self._original(record, is_needed=bool(media.found))
        tools = _tools(self.tools, plain(_find_optional(record, self.tools))) if self.tools else []
        tools = tools or list(self.other_tools)
        example = Example(prompt, answer, metadata, dict(self.sampling), tools, place, tuple(media.found))
        return example.with_system_prompt(self.system_prompt)

    def _made(self, record: dict[str, Any]) -> Any:
        assert self.make_prompt is not None
        try:
            return self.make_prompt(record)
        except Exception as error:  # a user's function may raise anything
            raise ValueError(f"{self.made_by} failed: {describe_error(error)}") from error

    def _media(self, record: Mapping[str, Any]) -> dict[str, MediaColumn]:
        found = ((kind, column, plain(_find_optional(record, column))) for kind, column in self.media.items())
        return {kind: MediaColumn.of(kind, column, value) for kind, column, value in found}

    def _original(self, record: Mapping[str, Any], *, is_needed: bool) -> dict[str, Any]:
        """Return the prompt's whole picture as metadata: unchanged, but bytes become text, because JSON has no
        bytes."""
        if is_needed:
            _find(record, self.original, "data.original_key")
        column = MediaColumn.of(IMAGE, self.original, plain(_find_optional(record, self.original)))
        if not column.items:
            return {}
        source = without_bytes(column.take("data.original_key").source)
        if isinstance(source, str) and len(source) > MAX_ORIGINAL:
            raise ValueError(
                f'"{self.original}" has a picture of {len(source)} bytes as base64: at most {MAX_ORIGINAL} go with a '
                "prompt, for data.original_key; write it to a file and give its path"
            )
        return _for_json({ORIGINAL: source})

    def _metadata(self, record: Mapping[str, Any]) -> dict[str, Any]:
        if self.metadata in ("", ALL):
            others = (self.prompt, self.answer, *self.media.values(), self.original)
            chosen = {name: plain(value) for name, value in record.items() if name not in others}
            return _for_json(chosen)
        found = plain(_find(record, self.metadata, "data.metadata_key"))
        if isinstance(found, str):
            try:
                found = parse_json(found)
            except ValueError as error:
                raise ValueError(f'"{self.metadata}" is text that is not JSON') from error
        if found is not None and not isinstance(found, dict):
            raise ValueError(f'"{self.metadata}" must be an object, for data.metadata_key, not {kind_of(found)}')
        return _for_json(found or {}, f"{self.metadata}.")


class Examples(OnDemand[Example]):
    """Sequence of the prompts of rows, which are created when they are accessed."""

    def __init__(self, rows: Rows, columns: Columns) -> None:
        self._rows = rows
        self._columns = columns

    def __len__(self) -> int:
        return len(self._rows)

    def _item(self, index: int) -> Example:
        """Return the example at an index. Raises ValueError, which names the row and the column."""
        place = self._rows.place(index)
        try:
            return self._columns.example(self._rows[index], place)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error

    def nearest(self, key: str) -> str | None:
        """Return the column of the first row whose name is most similar to `key`; None if no name is similar."""
        try:
            return _nearest(self._rows[0], key)
        except (IndexError, ValueError):
            return None

    def content(self) -> Iterator[bytes]:
        """Yield the stored bytes of the rows, for a digest that shows changed data.

        A user's own source yields its rows as JSON, and at most `run_sources.DIGESTED` of them.
        """
        return self._rows.content(range(len(self._rows)))

    def scan(self) -> Iterator[Example | None]:
        """Yield all examples in order, without their locations, and None for a wrong row. Faster than reading each by
        its index."""
        for row in self._rows.scan():
            try:
                yield None if row is None else self._columns.example(row, "")
            except ValueError:
                yield None


def _for_json(metadata: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return metadata unchanged if JSON can represent it. Raises ValueError, which names the column of a value that
    JSON can't represent."""
    for name, value in metadata.items():
        if found := stranger(prefix + name, value):
            column, what = found
            raise ValueError(
                f'column "{column}" has {kind_of(what)}, which metadata can\'t have: choose others with '
                "data.metadata_key, or name a picture for tools with data.original_key"
            )
    return metadata


def _find_optional(record: Mapping[str, Any], key: str) -> Any:
    """Return a row's value in a column; None if the row lacks the column."""
    value: Any = record
    for part in [key] if key in record else key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _find(record: Mapping[str, Any], key: str, setting: str) -> Any:
    """Return a row's value in a column. Raises ValueError, which suggests the most similar name, if the row lacks the
    column."""
    if key in record:
        return record[key]
    value: Any = record
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            near = _nearest(record, key)
            hint = f"; did you mean {setting} = {json.dumps(near)}?" if near else ""
            found = ", ".join(record) or "nothing"
            raise ValueError(f'"{key}" is missing (found: {found}){hint or f"; {setting} names another column"}')
        value = value[part]
    return value


def _nearest(record: Mapping[str, Any], key: str) -> str | None:
    """Return the column whose name is most similar to `key`, else a column whose last part equals it; None if there is
    none."""
    names = list(_names(record))
    near = difflib.get_close_matches(key, names, n=1) or [one for one in names if one.endswith(f".{key}")]
    return near[0] if near else None


def _names(record: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in record.items():
        yield prefix + name
        if isinstance(value, Mapping):
            yield from _names(value, f"{prefix}{name}.")


def _answer(key: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Mapping):
        inside = ", ".join(value) or "nothing"
        example = f"{key}.{next(iter(value), 'text')}"
        raise ValueError(f'"{key}" is an object with {inside}: name what is in it, as data.answer_key = "{example}"')
    if isinstance(value, list) and value and all(_is_plain(one) for one in value):
        texts = [_as_text(one) for one in value]
        return texts[0] if len(texts) == 1 else json.dumps(texts, ensure_ascii=False)
    if not _is_plain(value):
        what = "a list with something else" if isinstance(value, list) and value else kind_of(value)
        raise ValueError(f'"{key}" must be text, a number or a list of them, not {what}')
    return _as_text(value)


def _as_text(value: str | int | float) -> str:
    """Return a reference answer as text. Whole numbers get no decimal point, because tables with missing values store
    them as floats."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _tools(key: str, value: Any) -> list[dict[str, Any]]:
    """Return the tools of a row from a column's value: a list of objects, or its JSON text."""
    if value in (None, "", []):
        return []
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise ValueError(f'"{key}" is text that is not JSON: tools are a list of objects') from error
    else:
        value = without_nulls(value)
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise ValueError(
            f'"{key}" must be a list of tools such as {{"type": "function", "function": {{"name": "...", ...}}}}, not '
            f"{kind_of(value) if not isinstance(value, list) else 'a list of something else'}"
        )
    return value


def read_prompt(key: str, value: Any, media: MediaReader | None = None) -> str | list[Message]:
    """Return a prompt from the value of a column or of a user's own function.

    Messages keep all fields except nulls, because tables give all objects the same keys. Text parts of a message are
    joined, unless there are images among them. Content may be null if there are tool calls.

    Args:
        key: the column or the setting that gave the value, for errors.
        value: the value, of JSON's types.
        media: collects the prompt's media items, and supplies the items of the row's columns.

    Raises:
        ValueError: the value is no prompt; the message names the key and what would be right.
    """
    media = media or MediaReader()
    if isinstance(value, str):
        if not value.strip():
            raise ValueError(f'"{key}" is empty')
        value = _chat_from_text(value)
        if isinstance(value, str):
            content = media.content(f'"{key}"', "user", value)
            return content if isinstance(content, str) else [{"role": "user", "content": content}]
    if not isinstance(value, list) or not value:
        raise ValueError(f'"{key}" must be text or a list of chat messages, not {kind_of(value)}')
    return [_message(f'"{key}"[{index}]', message, media) for index, message in enumerate(value)]


def without_nulls(value: Any) -> Any:
    """Return a JSON value without the null entries of its objects. Tables give all objects the same keys, and fill them
    with null."""
    if isinstance(value, dict):
        return {name: without_nulls(one) for name, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def _chat_from_text(text: str) -> str | list[Any]:
    """Return the messages of a chat that is stored as JSON text; any other text unchanged."""
    if not text.lstrip().startswith("["):
        return text
    try:
        found = parse_json(text)
    except ValueError:
        return text
    is_chat = isinstance(found, list) and found and all(isinstance(one, dict) and "role" in one for one in found)
    return found if is_chat else text


def _message(place: str, value: Any, media: MediaReader) -> Message:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise ValueError(f"{place} must look like {MESSAGE_FORM}")
    has_parts = isinstance(value.get("content"), list)  # which the reader checks: items may be bytes
    if found := stranger("message", {**value, "content": None} if has_parts else value):
        raise ValueError(
            f"{place} has {kind_of(found[1])}, which a chat message can't have: it must look like {MESSAGE_FORM}"
        )
    message: Message = without_nulls(value)
    content = message.get("content")
    if isinstance(content, list | str):
        return {**message, "content": media.content(f"{place}.content", message["role"], content)}
    if content is None and not message.get("tool_calls"):
        raise ValueError(
            f"{place}.content is null or missing, and there are no tool_calls: it must look like {MESSAGE_FORM}"
        )
    if content is not None:
        raise ValueError(f"{place}.content must be text or a list of parts, not {kind_of(content)}")
    return {**message, "content": content}
