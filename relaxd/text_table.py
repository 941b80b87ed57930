"""Tables of text, from which a module makes its declarations."""

import re


def table_rows(text: str) -> list[str]:
    """Return the rows of a table of text, each as one line. A line that begins with a space continues its row."""
    return [" ".join(row.split()) for row in re.split(r"\n(?=\S)", text.strip())]
