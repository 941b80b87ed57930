"""HTTP with an SGLang server: JSON calls with deadlines, and streamed answers.

The server stands where an engine's process otherwise does, so what goes wrong with it is told by the errors of
`relaxd.process.child`.
"""

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from relaxd.process.child import ChildError, ChildRequestError, ChildTimeout

CONNECT_SECONDS = 5.0
_REASON_LENGTH = 500


class ServerGone(ChildError):
    """Nothing answers at the server's address, or it broke off in the middle of an answer."""


class SGLangClient:
    """Calls one server. Make it in a running event loop, and close it there."""

    def __init__(self, url: str, key: str | None) -> None:
        """`key` is the server's API key, where it has one."""
        self.url = url.rstrip("/")
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),  # every request in flight is a connection: the engine's to limit
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )

    async def call(self, path: str, body: Mapping[str, Any] | None = None, *, timeout: float) -> dict[str, Any]:
        """POST `body` (or GET, without one) and return the answer; an answer without content is {}.

        Raises ServerGone; ChildTimeout after `timeout` seconds; ChildRequestError with the server's reason when it
        refuses.
        """
        deadline = aiohttp.ClientTimeout(total=timeout, sock_connect=min(CONNECT_SECONDS, timeout))
        method = "GET" if body is None else "POST"
        try:
            async with self._session.request(method, self.url + path, json=body, timeout=deadline) as response:
                text = await response.text()
        except TimeoutError as error:
            raise ChildTimeout(f"{self.url} did not answer {path} within {timeout:g} s") from error
        except aiohttp.ClientError as error:
            raise self._gone(path, error) from error
        if response.status != 200:
            raise self._refusal(path, response.status, text)
        return self._parse(path, text) if text else {}

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """POST `body` and yield the events of the answer.

        An answer may take any time: whoever calls watches the server meanwhile. Raises ServerGone, also when the
        answer breaks off, and ChildRequestError when the server refuses, at first or in the middle.
        """
        deadline = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        try:
            async with self._session.post(self.url + path, json=body, timeout=deadline) as response:
                if response.status != 200:
                    text = await response.text()
                    raise self._refusal(path, response.status, text)
                async for line in _lines(response.content):
                    if not line.startswith(b"data:"):
                        continue
                    data = line[len(b"data:") :].strip()
                    if data == b"[DONE]":
                        return
                    event = self._parse(path, data)
                    if "error" in event:
                        raise self._refusal(path, 400, data.decode())
                    yield event
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._gone(path, error) from error
        raise ServerGone(f"{self.url} broke off its answer to {path}")

    async def close(self) -> None:
        """End all calls."""
        await self._session.close()

    def _gone(self, path: str, error: Exception) -> ServerGone:
        return ServerGone(f"{self.url} does not answer {path}: {str(error) or type(error).__name__}")

    def _parse(self, path: str, text: str | bytes) -> dict[str, Any]:
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise ServerGone(f"{self.url} does not answer {path} as SGLang does: {text[:100]!r}")
        return value

    def _refusal(self, path: str, status: int, text: str) -> ChildRequestError:
        """With the server's words; its error bodies come in several shapes. `details` has the status."""
        try:
            words = json.loads(text)
        except ValueError:
            words = text
        for name in ("error", "message", "detail"):
            if isinstance(words, dict) and name in words:
                words = words[name]
        if status in (401, 403):
            words = f"{words} (is RELAXD_SGLANG_KEY the server's API key?)"
        reason = f"{self.url}{path} refused ({status}): {str(words)[:_REASON_LENGTH]}"
        return ChildRequestError("EngineError", reason, {"status": status})


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The lines of an answer, however long."""
    pieces: list[bytes] = []
    async for received in content.iter_any():
        *complete, rest = received.split(b"\n")
        for line in complete:
            yield b"".join((*pieces, line))
            pieces.clear()
        pieces.append(rest)
