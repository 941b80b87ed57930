"""Parquet, Arrow and CSV files, read by the package pyarrow (extra "data")."""

import csv
import os
import tempfile
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relaxd.data.files.rows import file_content
from relaxd.models import DataError

_READ_ROWS = 8192
_KEPT_ROWS = 128
"""Maximum rows of a batch in the temporary file: the unit of reading."""
PACKAGE = "pyarrow is not installed: pip install 'relaxd[data]'"


class Table:
    """The rows of a table, copied to a temporary file, from which each can be read without the rows before it.

    The temporary file has the size of the uncompressed table and disappears with the process.
    """

    def __init__(self, path: Path, field: str) -> None:
        """Copy a file, batch by batch. Raises DataError, naming the setting `field`, if it can't be read."""
        try:
            import pyarrow as pa
        except ImportError as error:
            raise DataError(field, f"can't read {path}: {PACKAGE}") from error
        self._path = path
        self._starts: list[int] = []
        self._rows = 0
        self._last: tuple[int, Any] | None = None
        """Number and content of the last batch that was read: checks of evenly spread rows read several rows of a
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
    """Read a file's record batches."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=_READ_ROWS)
    elif path.suffix == ".csv":
        yield from _csv_batches(path)
    else:
        yield from _arrow_batches(path)


def _csv_batches(path: Path) -> Iterator[Any]:
    """Read every column as text: "007" is an answer and not the number 7."""
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
    """Read an Arrow file, or a stream as the package datasets writes it."""
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
    """Return a record batch with the values of dictionary columns, such as categories of pandas.

    Each batch of a file may have its own dictionary; the temporary file can have only one for all.
    """
    import pyarrow as pa

    fields = [field.with_type(_decoded(field.type)) for field in batch.schema]
    schema = pa.schema(fields)
    if schema.equals(batch.schema):
        return batch
    columns = [column.cast(field.type) for column, field in zip(batch.columns, fields, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _decoded(kind: Any) -> Any:
    """Return a type in which the type of each dictionary is replaced by that of its values."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return _decoded(kind.value_type)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_decoded(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_decoded(kind.value_type)))
    return kind
