"""Small functions for text: format byte amounts for people, parse JSON from outside (data rows, a model's config.json),
and split text tables in source files into rows."""

import json
import re
from typing import Any

UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def byte_amount(count: float) -> str:
    """Format a number of bytes with three significant digits, such as "1.07 GB"."""
    for factor, unit in UNITS:
        if count >= 0.9995 * factor:  # 0.9995 rounds to 1.00
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def parse_json(text: str | bytes) -> Any:
    """Parse JSON text. Raises JSONDecodeError, a ValueError, also for JSON that Python can't parse: too deeply nested,
    or with numbers of too many digits."""
    try:
        return json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError("it is nested too deeply", "", 0) from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:
        raise json.JSONDecodeError("it has a number of more than 4,300 digits", "", 0) from None


def table_rows(text: str) -> list[str]:
    """Split a text table into its rows, each as one line. A line that begins with a space continues the row before."""
    return [" ".join(row.split()) for row in re.split(r"\n(?=\S)", text.strip())]
