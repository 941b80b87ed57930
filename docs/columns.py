"""Writes docs/columns.md from the table of columns: `.venv/bin/python docs/columns.py`."""

from pathlib import Path

from relaxd.board import COLUMNS

PAGE = Path(__file__).with_suffix(".md")
HEAD = """\
# Columns

What a group has on the board, in the order in which it comes about, written from
[`relaxd/board/schema.py`](../relaxd/board/schema.py). P is the number of prompt tokens, n of samples, T of response
tokens of all samples, one after the other.

| column | written by | dtype | shape | trainer | meaning |
| --- | --- | --- | --- | --- | --- |
"""


def page() -> str:
    """Return the page."""
    rows = []
    for column in COLUMNS.values():
        shape = f"[{column.shape}]" if column.shape else ""
        takes = "takes it in, keeps it in step files" if column.trained else "leaves it"
        meaning = column.meaning + (" Only where a run asks for it." if column.optional else "")
        rows.append(f"| `{column.name}` | {column.writer} | {column.dtype} | {shape} | {takes} | {meaning} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page())
