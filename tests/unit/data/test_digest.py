"""The digest of a run's prompts changes with every row and everything in it, however the rows are stored."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from relaxd.data.dataset import digest_of
from relaxd.data.duplicates import Chosen
from relaxd.data.examples import Example
from relaxd.data.prompt_files import open_rows
from relaxd.data.rows import Joined
from relaxd.data.sources import run_sources
from relaxd.data.sources.prompt_columns import Columns, Examples
from relaxd.data.sources.run_sources import OwnRows

Row = dict[str, Any]
COUNT = 600
"""Number of rows: more than the prompts that are made of a large source."""


def rows_of(count: int = COUNT) -> list[Row]:
    return [{"prompt": f"{number} + 1?", "answer": str(number + 1), "level": "easy"} for number in range(count)]


def write_lines(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_array(path: Path, rows: list[Row]) -> Path:
    path.with_suffix(".json").write_text(json.dumps(rows))
    return path.with_suffix(".json")


def write_parquet(path: Path, rows: list[Row]) -> Path:
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path.with_suffix(".parquet"))
    return path.with_suffix(".parquet")


def write_csv(path: Path, rows: list[Row]) -> Path:
    pyarrow.csv.write_csv(pa.Table.from_pylist(rows), path.with_suffix(".csv"))
    return path.with_suffix(".csv")


def write_folder(path: Path, rows: list[Row]) -> Path:
    folder = path.with_suffix("")
    folder.mkdir(exist_ok=True)
    write_lines(folder / "a.jsonl", rows[:300])
    write_parquet(folder / "b.jsonl", rows[300:])
    return folder


def write_part(path: Path, rows: list[Row]) -> Path:
    write_lines(path, [{"prompt": "before", "answer": str(len(rows))}, *rows, *rows])
    return path.with_name(f"{path.name}@[1:{len(rows) + 1}]")


WRITERS = (write_lines, write_array, write_parquet, write_csv, write_folder, write_part)


def changed(place: int, **values: str) -> Callable[[list[Row]], list[Row]]:
    return lambda rows: [row | values if number == place else row for number, row in enumerate(rows)]


CHANGES: dict[str, Callable[[list[Row]], list[Row]]] = {
    "a prompt": changed(301, prompt="301 + 2?"),
    "its white space": changed(301, prompt="301 + 1? "),
    "an answer": changed(1, answer="3"),
    "metadata": changed(COUNT - 1, level="hard"),
    "the order": lambda rows: [rows[1], rows[0], *rows[2:]],
    "the number": lambda rows: rows[:-1],
}


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_every_row_and_everything_in_it_counts(tmp_path: Path, write: Callable[..., Path]) -> None:
    def digests(rows: list[Row]) -> tuple[str, str]:
        examples = Examples(open_rows(write(tmp_path / "a.jsonl", rows), "data.path"), Columns())
        return digest_of(examples), digest_of(list(examples))

    rows = rows_of()
    before = digests(rows)
    assert before == digests(rows)
    for name, change in CHANGES.items():
        on_demand, in_memory = digests(change(rows))
        assert (on_demand != before[0], in_memory != before[1]) == (True, True), name


def test_rows_outside_of_a_part_of_json_lines_do_not_count(tmp_path: Path) -> None:
    def digest(rows: list[Row]) -> str:
        write_lines(tmp_path / "a.jsonl", rows)
        return digest_of(Examples(open_rows(tmp_path / "a.jsonl@[0:300]", "data.path"), Columns()))

    rows = rows_of()
    assert digest(rows) == digest(rows[:400]) != digest(rows[1:])


def test_what_is_made_of_the_same_rows_counts(tmp_path: Path) -> None:
    rows = open_rows(write_lines(tmp_path / "a.jsonl", rows_of()), "data.path")
    columns = (Columns(), Columns(system_prompt="Think."), Columns(make_prompt=lambda row: row["prompt"] + " "))
    assert len({digest_of(Examples(rows, one)) for one in columns}) == len(columns)
    chosen = (Chosen(Examples(rows, Columns()), np.array(places)) for places in ([0, 1], [1, 0], [0, 2]))
    assert len({digest_of(one) for one in chosen}) == 3


def test_sources_count_in_their_order() -> None:
    one, other = [Example("a")], [Example("b", metadata={"level": 1})]
    both: Sequence[Example] = Joined([one, other])
    assert digest_of(both) == digest_of([*one, *other]) != digest_of(Joined([other, one]))


def test_of_a_users_large_source_some_rows_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_sources, "DIGESTED", 1000)

    class Squares:
        def __init__(self, wrong: int = -1) -> None:
            self.made = 0
            self.wrong = wrong

        def __len__(self) -> int:
            return 50_000

        def __getitem__(self, index: int) -> Row:
            self.made += 1
            return {"prompt": str(index), "image": object(), "answer": index * index + (index == self.wrong)}

    def digest(source: Squares) -> str:
        return digest_of(Examples(OwnRows(source, "squares.py:Squares"), Columns(metadata="none")))

    source = Squares()
    assert digest(source) == digest(Squares()) != digest(Squares(wrong=50))
    assert 1000 <= source.made < 2000
