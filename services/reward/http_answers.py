"""Answers over HTTP from untrusted services."""

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import aiohttp

SHOWN = 200
"""Characters of an answer that a message shows."""


async def read_at_most(answer: aiohttp.ClientResponse, most: int) -> bytes:
    """Return an answer's body, truncated to `most` bytes."""
    body = b""
    async for chunk in answer.content.iter_any():
        body += chunk
        if len(body) > most:
            answer.close()
            break
    return body[:most]


def shortened(text: str) -> str:
    """Return a text in one line, short enough for a message."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else line[: SHOWN - 1] + "…"


def retry_after(value: str | None, now: datetime | None = None) -> float:
    """Return the seconds in a Retry-After header, given as a number or as a date; 0 if there are none."""
    try:
        return max(0.0, float(int(value or 0)))
    except ValueError:
        pass
    try:
        date = parsedate_to_datetime(value or "")
    except ValueError:
        return 0.0
    # A date without a zone is in UTC.
    return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - (now or datetime.now(UTC))).total_seconds())
