"""Opening of paths with prompts: a file, a folder of files, selected rows of either, or a data set of the Hugging Face
package datasets, from the hub or saved with `save_to_disk`.

JSON is read an object at a time; Parquet, Arrow and CSV are read with the package pyarrow (extra "data"). Only the rows
in use are in memory.
"""

import csv
import json
import os
import re
import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np

from relaxd.data.rows import JoinedRows, Part, Rows, file_content, kind_of
from relaxd.models import DataError
from relaxd.text import parse_json

_CHUNK = 16 << 20
_SHORT = 32


class JsonObjects:
    """Base class for the JSON objects in a file. Subclasses find the objects; only their offsets are in memory."""

    def __init__(self, path: Path) -> None:
        """Open the file, without reading it. Raises OSError if it can't be opened."""
        self._path = path
        self._file = os.open(path, os.O_RDONLY)
        finalize(self, os.close, self._file)
        self._starts = self._ends = np.zeros(0, np.int64)
        """Offset of each object's first byte, and offset after its last byte, int64 [objects] each."""

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return parse(self._read(self._starts[index], self._ends[index]))

    def scan(self) -> Iterator[dict[str, Any] | None]:
        for start, end in zip(self._starts, self._ends, strict=True):
            try:
                yield parse(self._read(start, end))
            except ValueError:
                yield None

    def content(self, part: range) -> Iterator[bytes]:
        start, end = int(self._starts[part.start]), int(self._ends[part.stop - 1])
        for offset in range(start, end, _CHUNK):
            yield os.pread(self._file, min(_CHUNK, end - offset), offset)

    def _read(self, start: np.int64, end: np.int64) -> bytes:
        return os.pread(self._file, int(end - start), int(start))


class JsonLines(JsonObjects):
    """JSON objects of a file with an object per line. Each non-blank line takes 24 bytes of memory."""

    def __init__(self, path: Path) -> None:
        """Find the file's lines. Raises OSError if the file can't be read."""
        super().__init__(path)
        starts = _line_starts(self._file)
        ends = np.append(starts[1:], os.fstat(self._file).st_size)
        # Blank lines are short, so only short lines are read to find them.
        short = np.flatnonzero(ends - starts <= _SHORT)
        blank = [line for line in short.tolist() if not self._read(starts[line], ends[line]).strip()]
        lines = np.delete(np.arange(len(starts), dtype=np.int64), blank)
        self._starts, self._ends, self._lines = starts[lines], ends[lines], lines

    def place(self, index: int) -> str:
        return f"{self._path} line {self._lines[index] + 1}"


def parse(line: bytes) -> dict[str, Any]:
    """Parse the JSON object of a line, with or without a byte order mark. Raises ValueError if it isn't a JSON
    object."""
    try:
        record = parse_json(line.rstrip(b"\r\n").decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(record, dict):
        raise ValueError(f'a JSON object such as {{"prompt": "..."}} is needed, not {kind_of(record)}')
    return record


def _line_starts(file: int) -> np.ndarray:
    """Return the offset of each line's first byte in a file, int64 [lines]."""
    found, offset = [np.zeros(1, np.int64)], 0
    while chunk := os.pread(file, _CHUNK, offset):
        found.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + (offset + 1))
        offset += len(chunk)
    starts = np.concatenate(found)
    return starts[starts < offset]


_MOST = 256 << 20
"""Maximum size of a JSON object in an array, in bytes. A longer object counts as broken."""
_LONGEST_MARK = 16
"""Upper bound, in bytes, of a JSON token that may be cut in two where the read text ends, such as "false" or an escaped
letter."""
_SPACE = b" \t\r\n"


def is_array(path: Path) -> bool:
    """Return True if a file begins like a JSON array. Raises OSError if the file can't be read."""
    with path.open("rb") as file:
        return file.read(1 << 16).removeprefix(b"\xef\xbb\xbf").lstrip(_SPACE)[:1] == b"["


class JsonArray(JsonObjects):
    """JSON objects of a file with a single JSON array. Each object takes 16 bytes of memory, and is parsed once to find
    its end."""

    def __init__(self, path: Path, field: str) -> None:
        """Find the objects of the array.

        Raises OSError if the file can't be read. Raises DataError, which names the setting `field`, if the file isn't
        an array of objects.
        """
        super().__init__(path)
        self._field = field
        starts, ends = array("q"), array("q")
        reader = _Reader(self._file)
        for mark in (b"\xef", b"\xbb", b"\xbf"):  # a byte-order mark
            if reader.peek() == mark:
                reader.skip(1)
        self._expect(reader, b"[", "an array")
        if reader.peek() != b"]":
            while True:
                start, end = self._object(reader, len(starts) + 1)
                starts.append(start)
                ends.append(end)
                if reader.peek() == b"]":
                    break
                self._expect(reader, b",", f'"," or "]" after entry {len(starts)}')
        reader.skip(1)
        if reader.peek():
            raise self._wrong(reader, "the end of the file after the array")
        self._starts, self._ends = np.array(starts, np.int64), np.array(ends, np.int64)

    def place(self, index: int) -> str:
        return f"{self._path} entry {index + 1}"

    def _object(self, reader: "_Reader", entry: int) -> tuple[int, int]:
        if reader.peek() != b"{":
            raise self._wrong(reader, f'an object such as {{"prompt": "..."}} as entry {entry}')
        start = reader.place
        try:
            reader.skip_object()
        except ValueError as error:
            raise DataError(
                self._field, f"can't read {self._path}: entry {entry}, at byte {start}, is not JSON ({error})"
            ) from error
        return start, reader.place

    def _expect(self, reader: "_Reader", mark: bytes, needed: str) -> None:
        if reader.peek() != mark:
            raise self._wrong(reader, needed)
        reader.skip(1)

    def _wrong(self, reader: "_Reader", needed: str) -> DataError:
        found = repr(reader.peek().decode("latin-1")) if reader.peek() else "the end of the file"
        return DataError(
            self._field, f"can't read {self._path}: at byte {reader.place} is {found}, but {needed} is needed"
        )


class _Reader:
    """A position in a JSON file, with a buffer of the text that follows.

    The text is decoded as Latin-1, with one byte per letter: only the places of brackets matter here, and UTF-8 has no
    bytes of ASCII within other letters.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._base = 0
        """Offset in the file at which the buffered text begins, in bytes."""
        self._text = ""
        self._at = 0
        self._decoder = json.JSONDecoder()

    @property
    def place(self) -> int:
        """Offset of the position in the file, in bytes."""
        return self._base + self._at

    def skip(self, count: int) -> None:
        """Move the position forward by `count` bytes, within the buffered text."""
        self._at += count

    def peek(self) -> bytes:
        """Move the position past white space and return the next byte; b"" at the end of the file."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at].encode("latin-1")
            if not self._more():
                return b""

    def skip_object(self) -> None:
        """Move the position past a JSON object. Raises ValueError if the object is broken, unterminated or too
        large."""
        while True:
            try:
                _, self._at = self._decoder.raw_decode(self._text, self._at)
                return
            except json.JSONDecodeError as error:
                problem = f"{error.msg.removesuffix(' at')}, byte {self._base + error.pos}"
                cut = error.pos >= len(self._text) - _LONGEST_MARK or error.msg.startswith("Unterminated")
                if not cut or len(self._text) - self._at > _MOST or not self._more():
                    raise ValueError(problem) from error

    def _more(self) -> bool:
        """Read more of the file into the buffer, and discard the text before the position. Returns False at the end of
        the file."""
        offset = self._base + len(self._text)
        # Double the text, so that a large object isn't parsed again for each chunk.
        chunk = os.pread(self._file, max(_CHUNK, len(self._text) - self._at), offset)
        self._base, self._text, self._at = self.place, self._text[self._at :] + chunk.decode("latin-1"), 0
        return bool(chunk)


_READ_ROWS = 8192
_KEPT_ROWS = 128
"""Maximum number of rows of a batch in the temporary file. A batch is always read whole."""
PYARROW_MISSING = "pyarrow is not installed: pip install 'relaxd[data]'"


class Table:
    """Rows of a Parquet, Arrow or CSV file, copied to a temporary file, from which each row can be read without the
    rows before it.

    The temporary file has the size of the uncompressed table and disappears with the process.
    """

    def __init__(self, path: Path, field: str) -> None:
        """Copy a table to a temporary file, batch by batch. Raises DataError, which names the setting `field`, if the
        table can't be read."""
        try:
            import pyarrow as pa
        except ImportError as error:
            raise DataError(field, f"can't read {path}: {PYARROW_MISSING}") from error
        self._path = path
        self._starts: list[int] = []
        self._rows = 0
        self._last: tuple[int, Any] | None = None
        """Number and content of the batch that was read last. Checks of evenly spread rows read several rows of a
        batch."""
        number, copy = tempfile.mkstemp(prefix="relaxd-data-")
        os.close(number)
        try:
            self._copy(path, copy)
        except (pa.ArrowException, OSError, UnicodeDecodeError, csv.Error) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise DataError(field, f"can't read {path}: {reason}") from error
        finally:
            os.unlink(copy)  # the open file stays

    def _copy(self, path: Path, copy: str) -> None:
        import pyarrow as pa

        writer = None
        with pa.OSFile(copy, "wb") as file:
            for batch in map(_without_dictionaries, _batches(path)):
                writer = writer or pa.ipc.new_file(file, batch.schema)
                for start in range(0, batch.num_rows, _KEPT_ROWS):
                    writer.write_batch(batch.slice(start, _KEPT_ROWS))
                    self._starts.append(self._rows)
                    self._rows += min(_KEPT_ROWS, batch.num_rows - start)
            if writer is not None:
                writer.close()
        if writer is not None:
            self._reader = pa.ipc.open_file(pa.OSFile(copy))  # reads by place, so threads may share it

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = bisect_right(self._starts, index) - 1
        last = self._last  # read once: threads may share it
        if last is None or last[0] != number:
            last = self._last = (number, self._reader.get_batch(number))
        row: dict[str, Any] = last[1].slice(index - self._starts[number], 1).to_pylist()[0]
        return row

    def scan(self) -> Iterator[dict[str, Any] | None]:
        for batch in range(len(self._starts)):
            yield from self._reader.get_batch(batch).to_pylist()

    def content(self, part: range) -> Iterator[bytes]:
        return file_content(self._path)

    def place(self, index: int) -> str:
        return f"{self._path} row {index + 1}"


def _batches(path: Path) -> Iterator[Any]:
    """Yield the record batches of a Parquet, CSV or Arrow file."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=_READ_ROWS)
    elif path.suffix == ".csv":
        yield from _csv_batches(path)
    else:
        yield from _arrow_batches(path)


def _csv_batches(path: Path) -> Iterator[Any]:
    """Yield the record batches of a CSV file, with every column as text: "007" is an answer and not the number 7."""
    import pyarrow as pa
    import pyarrow.csv

    with path.open(newline="", encoding="utf-8-sig") as file:
        header = next(csv.reader(file), None)
    if header is None:
        return
    options = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(header, pa.string()), strings_can_be_null=False)
    parse = pyarrow.csv.ParseOptions(newlines_in_values=True)
    yield from pyarrow.csv.open_csv(path, parse_options=parse, convert_options=options)


def _arrow_batches(path: Path) -> Iterator[Any]:
    """Yield the record batches of an Arrow file, or of a stream as the package datasets writes it."""
    import pyarrow as pa

    with pa.OSFile(str(path)) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        if is_file:
            reader = pa.ipc.open_file(source)
            yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            yield from pa.ipc.open_stream(source)


def _without_dictionaries(batch: Any) -> Any:
    """Return a record batch whose dictionary-encoded columns, such as categories of pandas, are replaced by their
    values.

    Each batch of a file may have its own dictionary; the temporary file can have only one for all batches.
    """
    import pyarrow as pa

    fields = [field.with_type(_decoded(field.type)) for field in batch.schema]
    schema = pa.schema(fields)
    if schema.equals(batch.schema):
        return batch
    columns = [column.cast(field.type) for column, field in zip(batch.columns, fields, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _decoded(kind: Any) -> Any:
    """Return an Arrow type in which each dictionary type is replaced by the type of its values."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return _decoded(kind.value_type)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_decoded(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_decoded(kind.value_type)))
    return kind


TABLES = (".parquet", ".arrow", ".feather", ".csv")
LINES = (".jsonl", ".ndjson", ".json")
_PART = re.compile(r"(.*)@\[\s*(-?[0-9]*)\s*:\s*(-?[0-9]*)\s*\]")
_LIKE_A_PART = re.compile(r".*@\[[^\]/]*\]?")


def open_rows(path: Path, field: str) -> Rows:
    """Open a file with prompts, or all files with a known ending of a folder and its subfolders, sorted by name.

    A folder that the package datasets saved has its files in the order of its state.json. "PATH@[START:END]" selects
    rows, like a slice of a Python list. A file with an unknown ending is read as JSON lines. A path that doesn't exist
    and looks like the name of a data set is loaded from the Hugging Face hub.

    Raises DataError, which names the setting `field`, if the path can't be read or has no rows.
    """
    part = _PART.fullmatch(str(path))
    if part is None and _LIKE_A_PART.fullmatch(str(path)) and not path.exists():
        raise DataError(
            field, f'{path} ends in no part of a file: write it as "PATH@[START:END]", such as "a.jsonl@[0:100]"'
        )
    rows = _open(without_part(path), field)
    if part:
        rows = Part(rows, slice(*(int(bound) if bound else None for bound in (part[2], part[3]))))
    if not len(rows):
        raise DataError(field, f'{path} is empty: it needs at least one row such as {{"prompt": "..."}}')
    return rows


def without_part(path: Path) -> Path:
    """Return a path of prompts without the selection of rows, "@[START:END]"."""
    part = _PART.fullmatch(str(path))
    return Path(part[1]) if part else path


def is_hub_path(path: Path) -> bool:
    """Return True if a path names a data set of the Hugging Face hub, or selected rows of one."""
    return is_hub_name(without_part(path))


def _open(path: Path, field: str) -> Rows:
    if is_hub_name(path):
        return HubRows(path, field)
    try:
        if path.is_dir():
            files = list(_files_of(path, field))
            if not files:
                raise DataError(field, f"the folder {path} has no file that ends in {', '.join((*LINES, *TABLES))}")
            return JoinedRows([_open(file, field) for file in files])
        if not path.is_file():
            path.stat()
            raise DataError(field, f"can't read {path}: it is neither a file nor a folder")
        if path.suffix in TABLES:
            return Table(path, field)
        return JsonArray(path, field) if path.suffix == ".json" and is_array(path) else JsonLines(path)
    except OSError as error:
        hint = "; it is one path: several files are a folder, or [[data.sources]] with a path each"
        is_list = str(path).startswith("[")
        raise DataError(field, f"can't read {path}: {error.strerror or error}{hint if is_list else ''}") from error


def _files_of(folder: Path, field: str) -> Iterator[Path]:
    saved = saved_files(folder, field)
    if saved is not None:
        yield from saved
        return
    for entry in sorted(folder.iterdir()):
        if entry.is_dir():
            if not entry.is_symlink():  # it could form a cycle
                yield from _files_of(entry, field)
        elif entry.suffix in (*TABLES, *LINES) and entry.name not in DESCRIPTIONS and entry.is_file():
            yield entry


SPLITS = "dataset_dict.json"
STATE = "state.json"
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json")
"""Names of the files that describe a saved data set, beside the files with its rows."""


def saved_files(folder: Path, field: str) -> list[Path] | None:
    """Return the files of a saved data set, in the order of its rows; None if the folder isn't a saved data set.

    Raises DataError, which names the setting `field`, if the folder has several splits or is damaged.
    """
    if (folder / SPLITS).is_file():
        splits = _read(folder / SPLITS, "splits", field)
        example = str(folder / next(iter(splits), "train"))
        raise DataError(
            field,
            f"{folder} is a saved data set with the splits {', '.join(splits) or 'none'}: name one of them, as in "
            f"{example!r}",
        )
    if not all((folder / name).is_file() for name in (STATE, DESCRIPTIONS[0])):
        return None
    if _read(folder / STATE, "_indices_data_files", field):
        raise DataError(
            field,
            f"{folder} has rows in another order than its files, as old versions of datasets saved them: load it with "
            "datasets, and save its flatten_indices()",
        )
    files = [folder / name for name in _read(folder / STATE, "_data_files", field)]
    if missing := next((file for file in files if not file.is_file()), None):
        raise DataError(field, f"{folder} is damaged: {STATE} names {missing.name}, which isn't there")
    return files


def _read(path: Path, key: str, field: str) -> list[str]:
    """Return the list of texts or file names under a key of a saved data set's JSON file."""
    try:
        found = parse_json(path.read_text(encoding="utf-8")).get(key) or ()
        return [one if isinstance(one, str) else str(one["filename"]) for one in found]
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise DataError(field, f"can't read {path}: it isn't as the package datasets writes it ({error})") from error


_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:/(\w[\w.-]*))?(?::(\w[\w.-]*))?")
_ENDINGS = frozenset((".parquet", ".arrow", ".feather", ".csv", ".jsonl", ".ndjson", ".json"))
DATASETS_MISSING = "the package datasets, which could load it from the hub, is not installed: pip install datasets"


def is_hub_name(path: Path) -> bool:
    """Return True if a path may be the name of a hub data set: "owner/name", perhaps with "/config" and ":split".

    The path must not exist on this machine, nor end like a file's.
    """
    fits = _NAME.fullmatch(str(path)) is not None and path.suffix not in _ENDINGS
    return fits and not path.exists()


class HubRows:
    """Rows of a hub data set, which the package datasets keeps in its cache as a memory-mapped file."""

    def __init__(self, path: Path, field: str) -> None:
        """Load the data set, from the local cache if possible. Raises DataError, which names the setting `field`, if it
        can't be loaded."""
        match = _NAME.fullmatch(str(path))
        assert match is not None
        name, config, split = match[1], match[2], match[3] or "train"
        try:
            import datasets
        except ImportError as error:
            raise DataError(field, f"{path} is neither a file nor a folder here, and {DATASETS_MISSING}") from error
        try:
            self._rows = datasets.load_dataset(name, config, split=split)
        except Exception as error:  # of the hub, of httpx, and whatever its readers raise
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise DataError(
                field,
                f'{path} is neither a file nor a folder here, and loading the split "{split}" of {name} from the hub '
                f'failed: {reason} (another split or configuration is named as "owner/name/config:split")',
            ) from error
        self._path = path

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = self._rows[index]
        return row

    def scan(self) -> Iterator[dict[str, Any] | None]:
        return iter(self._rows)

    def content(self, part: range) -> Iterator[bytes]:
        for one in self._rows.cache_files:
            yield from file_content(Path(one["filename"]))

    def place(self, index: int) -> str:
        return f"{self._path} row {index + 1}"
