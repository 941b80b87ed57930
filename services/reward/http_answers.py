"""Answers over HTTP, from services that may say anything."""

import aiohttp

SHOWN = 200
"""Characters of an answer that a message shows."""


async def read_at_most(answer: aiohttp.ClientResponse, most: int) -> bytes:
    """Return an answer's body, cut off after `most` bytes."""
    body = b""
    async for chunk in answer.content.iter_any():
        body += chunk
        if len(body) > most:
            answer.close()
            break
    return body[:most]


def shortened(text: str) -> str:
    """Return a text in one line that fits into a message."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else line[: SHOWN - 1] + "…"
