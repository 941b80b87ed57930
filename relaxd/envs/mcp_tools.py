"""Environment with the tools of an MCP server, which is started by a command (stdio) or has an address (streamable
HTTP)."""

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from relaxd.envs.environment import BadEnvironmentError, Sample, ToolCall, shorten
from relaxd.envs.function_tools import ToolsEnvironment

try:
    import httpx2
    from mcp import Client, MCPError, StdioServerParameters
    from mcp.client.streamable_http import streamable_http_client
    from mcp_types import CONNECTION_CLOSED, INVALID_REQUEST, REQUEST_TIMEOUT
except ImportError as error:
    raise ImportError(f"{error}: install the package mcp, version 2 or newer (pip install 'relaxd[mcp]')") from error

_BROKEN = (CONNECTION_CLOSED, REQUEST_TIMEOUT, INVALID_REQUEST)
"""MCP error codes after which a connection is unusable. INVALID_REQUEST: an HTTP server has forgotten the session."""
CLOSE_SECONDS = 10.0
"""Maximum seconds that closing a connection to an MCP server may take. The SDK kills a server that doesn't end within 4
s."""
_TIMEOUT = httpx2.Timeout(30.0, read=None)
"""Time limit for connecting to an MCP server over HTTP, 30 s. agent.call_seconds limits calls."""


class McpTools(ToolsEnvironment):
    """Environment that answers tool calls through an MCP server. A message without a call ends the conversation with
    the reward 0.

    The metrics are `calls`, and `errors` (the failed calls).
    """

    def __init__(
        self,
        *,
        command: str = "",
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        url: str = "",
        headers: Mapping[str, str] | None = None,
        tools: Sequence[str] = (),
        shared: bool = False,
        max_chars: int = 16_384,
    ) -> None:
        """Check the settings. The agent service's environment replaces variables such as $TOKEN in `env` and `headers`.

        Args:
            command: program of a server that speaks over its standard input and output.
            args: arguments of the command.
            env: environment variables of the command, besides PATH, HOME and the like.
            url: address of a server that speaks streamable HTTP, in place of a command.
            headers: headers of requests to `url`.
            tools: names of the tools that the model gets; empty: all.
            shared: use one connection, and so one server process, for all conversations of this host.
            max_chars: maximum length of a tool's result, in characters; longer results lose their middle.

        Raises ValueError unless exactly one of `command` and `url` is set, or if settings of the other one are set.
        """
        super().__init__([])
        if bool(command) == bool(url):
            raise ValueError(f'command is "{command}" and url "{url}": give one of them')
        if url and (args or env):
            raise ValueError("args and env belong to a command: remove them, or url")
        if command and headers:
            raise ValueError("headers belong to a url: remove them, or command")
        if max_chars < 1:
            raise ValueError(f"max_chars is {max_chars}: it must be at least 1")
        self._server = {"command": command, "args": list(args), "env": _expanded(env), "url": url}
        self._server["headers"] = _expanded(headers)
        self._wanted, self._shared, self._max_chars = list(tools), shared, max_chars
        self._connection: _Connection | None = None

    async def open(self, sample: Sample) -> None:
        """Connect to the MCP server and read its tools. Raises BadEnvironmentError if the server can't be reached or
        lacks a tool."""
        self._connection = connection = self._connect()
        client, found = await connection.opened()
        if missing := [name for name in self._wanted if name not in found]:
            raise BadEnvironmentError(f"the MCP server has no tool {missing[0]!r}; it has {', '.join(found)}")
        names = self._wanted or list(found)
        self.set_tools([_McpTool(name, found[name], client, connection, self._max_chars) for name in names])

    async def close(self) -> None:
        """Close the connection, and end the server if it was started for this conversation. A shared connection stays
        open."""
        if self._connection is not None and not self._shared:
            await self._connection.close()

    def _connect(self) -> "_Connection":
        if not self._shared:
            return _Connection(self._server)
        key = json.dumps(self._server, sort_keys=True)
        if key not in _shared or _shared[key].is_over:
            _shared[key] = _Connection(self._server)
        return _shared[key]


class _Connection:
    """A connection to an MCP server. One task holds it, because the task that opens a connection must also close it."""

    def __init__(self, server: Mapping[str, Any]) -> None:
        self.is_over = False
        """True after an error that makes the connection to the MCP server unusable."""
        self._server = server
        self._leaving = asyncio.Event()
        self._opened: asyncio.Future[tuple[Any, dict[str, Any]]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(), name="MCP connection")

    async def opened(self) -> tuple[Any, dict[str, Any]]:
        """Wait until the connection is open. Returns the client, and the MCP server's tools by name. Raises
        BadEnvironmentError if the server can't be reached."""
        return await asyncio.shield(self._opened)

    async def close(self) -> None:
        """Close the connection to the MCP server."""
        self._leaving.set()
        if not self._opened.done():
            self._task.cancel()
        await asyncio.wait({self._task}, timeout=CLOSE_SECONDS)

    async def _hold(self) -> None:
        where = self._server["url"] or self._server["command"]
        try:
            async with (
                httpx2.AsyncClient(headers=self._server["headers"], timeout=_TIMEOUT) as http,
                Client(self._transport(http)) as client,
            ):
                self._opened.set_result((client, await _tools_of(client)))
                await self._leaving.wait()
        except Exception as error:  # the SDK raises groups of exceptions, of many kinds
            self.is_over = True
            if not self._opened.done():
                self._opened.set_exception(BadEnvironmentError(f"the MCP server {where}: {_cause(error)}"))
        finally:
            self._opened.cancel()  # does nothing to one that is done

    def _transport(self, http: Any) -> Any:
        if self._server["url"]:
            return streamable_http_client(self._server["url"], http_client=http)
        return StdioServerParameters(**{name: self._server[name] for name in ("command", "args", "env")})


_shared: dict[str, _Connection] = {}
"""Connections that conversations share, by the server's settings as JSON."""


class _McpTool:
    """A tool of an MCP server that the model may call."""

    awaits = True

    def __init__(self, name: str, tool: Any, client: Any, connection: _Connection, max_chars: int) -> None:
        self.name = name
        function = {"name": name, "description": tool.description or "", "parameters": tool.input_schema}
        self.schema = {"type": "function", "function": function}
        self._client, self._connection, self._max_chars = client, connection, max_chars

    async def answer(self, call: ToolCall) -> str:
        """Have the MCP server execute a tool call, and return the result as text. Raises BadEnvironmentError if the
        connection is unusable."""
        try:
            result = await self._client.call_tool(self.name, call.arguments)
        except MCPError as error:
            if error.code not in _BROKEN:
                return f"Error: {error}"
            self._connection.is_over = True
            raise BadEnvironmentError(f"the MCP server is gone: {error} (in a call of {self.name})") from error
        text = "\n".join(map(_text, result.content))
        return shorten(f"Error: {text}" if result.is_error else text, self._max_chars)


async def _tools_of(client: Any) -> dict[str, Any]:
    tools, cursor = {}, None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools.update({tool.name: tool for tool in page.tools})
        cursor = page.next_cursor
        if not cursor:
            return tools


def _text(part: Any) -> str:
    """Return a part of a tool's result as text; for images and sound, return a note in place of the content."""
    for source in (part, getattr(part, "resource", None)):
        if isinstance(text := getattr(source, "text", None), str):
            return text
    return str(getattr(part, "uri", f"[{part.type}, which is not shown]"))


def _expanded(variables: Mapping[str, str] | None) -> dict[str, str]:
    return {name: os.path.expandvars(value) for name, value in (variables or {}).items()}


def _cause(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
