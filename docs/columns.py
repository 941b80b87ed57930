"""Writes docs/columns.md from the table of columns: `.venv/bin/python docs/columns.py`."""

from pathlib import Path

from relaxd.board import COLUMNS, TRAIN

PAGE = Path(__file__).with_suffix(".md")
HEAD = """\
# Columns

What a group has on the board, in the order in which it comes about, written from
[`relaxd/board/schema.py`](../relaxd/board/schema.py). B is the number of bytes of media, P of prompt tokens, Q of the
teacher's prompt, n of samples, S of sequences, T of tokens of all sequences, one after the other, k of candidates in
the place of each token, m of those that the student names.

A plain answer, or a conversation with one history, is one sequence. A conversation that was branched or compacted is
several, which are neighbours and share the sample's reward. A sequence with `shares_prompt` 1 continues
`prompt_tokens`, which its tokens leave out. Any other begins with a prompt of its own, with `loss_mask` 0.

A token column that the algorithm's loss needs (`Algorithm.needs`) reaches `LossInputs.columns` by itself.

| column | written by | dtype | shape | trainer | meaning |
| --- | --- | --- | --- | --- | --- |
"""


def page() -> str:
    """Return the page."""
    rows = []
    for column in COLUMNS.values():
        shape = f"[{column.shape}]" if column.shape else ""
        takes = "takes it in, keeps it in step files" if column.trained else "leaves it"
        takes = "computes it, keeps it in step files" if column.writer == TRAIN else takes
        meaning = column.meaning + (" Only where a run asks for it." if column.optional else "")
        rows.append(f"| `{column.name}` | {column.writer} | {column.dtype} | {shape} | {takes} | {meaning} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page())
