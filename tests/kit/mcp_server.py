"""An MCP server of the tests: `python -m tests.kit.mcp_server [PORT]`, over stdio or streamable HTTP."""

import asyncio
import os
import sys

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("tests", log_level="CRITICAL")
notes: list[str] = []


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def note(text: str) -> str:
    """Write a note, and read all notes of this server."""
    notes.append(text)
    return " ".join(notes)


@server.tool()
async def fail(how: str) -> str:
    """Fail."""
    match how:
        case "raise":
            raise ToolError("no luck")
        case "die":
            os._exit(3)
        case "hang":
            await asyncio.Event().wait()
    return "x" * 1_000_000


@server.tool()
def picture() -> Image:
    """Draw."""
    return Image(data=b"\x89PNG", format="png")


if __name__ == "__main__":
    if sys.argv[1:]:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
