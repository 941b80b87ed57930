"""Reads JSON from outside, such as data rows and a model's config.json."""

import json
from typing import Any


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
