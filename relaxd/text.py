"""Small forms of text: byte amounts for people, JSON from outside such as data rows and a model's config.json, and
the rows of tables of text from which a module makes its declarations."""

import json
import re
from typing import Any

UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def byte_amount(count: float) -> str:
    """Format a number of bytes with three digits, such as "1.07 GB"."""
    for factor, unit in UNITS:
        if count >= 0.9995 * factor:  # 0.9995 rounds to 1.00
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises JSONDecodeError, a ValueError, also for JSON that Python can't represent: deep nesting, long
    numbers."""
    try:
        return json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError("it is nested too deeply", "", 0) from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:
        raise json.JSONDecodeError("it has a number of more than 4,300 digits", "", 0) from None


def table_rows(text: str) -> list[str]:
    """Return the rows of a table of text, each as one line. A line that begins with a space continues its row."""
    return [" ".join(row.split()) for row in re.split(r"\n(?=\S)", text.strip())]
