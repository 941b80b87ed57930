"""HTTP client of an SGLang server: JSON calls with deadlines, and streamed answers.

Raises the errors of `relaxd.process.child`, because the server stands in for an engine's process.
"""

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from relaxd.process.child import ChildError
from relaxd.process.json_child import ChildRequestError, ChildTimeout

CONNECT_SECONDS = 5.0
_MAX_REASON = 500


class ServerGone(ChildError):
    """The server does not answer, or broke off an answer."""


class SGLangClient:
    """Calls one server. Create and close it in a running event loop."""

    def __init__(self, url: str, key: str | None) -> None:
        """`key` is the server's API key, if it has one."""
        self.url = url.rstrip("/")
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),  # a connection per request; the engine limits those
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )

    async def call(self, path: str, body: Mapping[str, Any] | None = None, *, timeout: float) -> dict[str, Any]:
        """POST `body` (GET without one) and return the answer; {} for an empty one.

        Raises ServerGone, ChildTimeout after `timeout` seconds, and ChildRequestError with the server's reason when it
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

        There is no deadline: the caller must watch the server meanwhile. Raises ServerGone, also when the answer breaks
        off, and ChildRequestError when the server refuses, at once or in the middle.
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
            raise ServerGone(f"{self.url} answers {path} unlike SGLang: {text[:100]!r}")
        return value

    def _refusal(self, path: str, status: int, text: str) -> ChildRequestError:
        """Return an error with the server's message, whose place varies, and the status in `details`."""
        try:
            message = json.loads(text)
        except ValueError:
            message = text
        for name in ("error", "message", "detail"):
            if isinstance(message, dict) and name in message:
                message = message[name]
        if status in (401, 403):
            message = f"{message} (is RELAXD_SGLANG_KEY the server's API key?)"
        reason = f"{self.url}{path} refused ({status}): {str(message)[:_MAX_REASON]}"
        return ChildRequestError("EngineError", reason, {"status": status})


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of an answer, of any length."""
    pieces: list[bytes] = []
    async for received in content.iter_any():
        *complete, rest = received.split(b"\n")
        for line in complete:
            yield b"".join((*pieces, line))
            pieces.clear()
        pieces.append(rest)
