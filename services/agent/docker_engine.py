"""The API of this machine's Docker engine, limited to containers of programs."""

import contextlib
import json
import os
from collections.abc import Mapping
from typing import Any

import aiohttp

from relaxd.rpc.errors import InvalidArgument

CALL_SECONDS = 60.0
"""Timeout of a call, except waiting for a container's end."""
MAX_ANSWER = 8 << 20
"""Maximum bytes of an answer; a longer one is truncated."""


class EngineError(OSError):
    """The engine doesn't answer, or refuses a call. The message says which."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class DockerEngine:
    """Calls the engine, with tar archives and JSON. Lives in one event loop."""

    def __init__(self, address: str = "") -> None:
        """`address` has the form of DOCKER_HOST, its default. Raises InvalidArgument."""
        self._address = address or os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
        if not self._address.startswith("unix://"):
            raise InvalidArgument(
                f'agent.container needs a Docker engine on this machine, but DOCKER_HOST is "{self._address}": it must '
                "be unix:///path/of/its/socket"
            )
        connector = aiohttp.UnixConnector(self._address.removeprefix("unix://"), limit=0)
        self._session = aiohttp.ClientSession("http://docker", connector=connector)

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def json(self, method: str, path: str, body: Any = None, query: Mapping[str, str] | None = None) -> Any:
        """Return a JSON answer; None if it is empty. Raises EngineError."""
        found = await self.bytes(method, path, None if body is None else json.dumps(body).encode(), query)
        return json.loads(found) if found.strip() else None

    async def bytes(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        query: Mapping[str, str] | None = None,
        *,
        kind: str = "application/json",
        seconds: float | None = CALL_SECONDS,
    ) -> bytes:
        """Return the content of an answer. Raises EngineError.

        Args:
            method: HTTP method.
            path: path of the call.
            body: content of the request, of the type `kind`.
            query: parameters.
            kind: type of the content.
            seconds: time for the answer; None: any.
        """
        try:
            async with self._session.request(
                method,
                path,
                params=query or {},
                data=body,
                headers={"Content-Type": kind},
                timeout=aiohttp.ClientTimeout(total=seconds),
            ) as answer:
                found = bytearray()
                async for chunk in answer.content.iter_any():
                    found += chunk
                    if len(found) > MAX_ANSWER:
                        break
        except (aiohttp.ClientError, TimeoutError) as error:
            why = str(error) or f"it is late by more than {seconds} s"
            raise EngineError(f"the Docker engine at {self._address} doesn't answer: {why}") from error
        if not answer.ok:
            said = found.decode(errors="replace")
            with contextlib.suppress(ValueError, KeyError, TypeError):
                said = json.loads(found)["message"]
            raise EngineError(f"the Docker engine refuses {method} {path}: {said}", answer.status)
        return bytes(found)
