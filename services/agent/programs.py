"""Programs that lead conversations: one process per sample, which calls the model over HTTP."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, Self

from relaxd.config import AgentConfig
from relaxd.envs.client import inherited_variables
from relaxd.process.child import KILL_SECONDS
from relaxd.rpc.errors import InvalidArgument
from relaxd.sandbox import bound_program
from relaxd.telemetry.logs import escape
from services.agent.chat_session import ChatSession
from services.agent.endpoint import Endpoint

TAIL_BYTES = 4000
"""Maximum number of last bytes to keep of a program's output."""
OUTPUT_SECONDS = 1.0
"""Maximum seconds to wait for output after a program's end; processes that left its group may keep it open."""


class RunningProgram(Protocol):
    """A program that leads a conversation."""

    async def wait(self) -> int:
        """Wait for the program's end. Returns its exit code, or minus the signal that ended it."""

    async def end(self) -> str:
        """Kill the program's remaining processes. Returns the end of its output."""


class Program:
    """A running program: its process and all children, as a process group."""

    def __init__(self, process: asyncio.subprocess.Process, output: "_Output") -> None:
        self._process = process
        self._output = output
        self._killed = False

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str]) -> Self:
        """Start a program that ends no later than this process. Raises OSError."""
        ours, theirs = os.pipe()  # asyncio's own pipe would wait until all descendants of the program close it
        with open(theirs, "wb", buffering=0) as writing, contextlib.ExitStack() as undo:
            reading = undo.enter_context(open(ours, "rb", buffering=0))
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", bound_program.__file__, str(os.getpid()), *command),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            undo.pop_all()
        _, output = await asyncio.get_running_loop().connect_read_pipe(_Output, reading)
        return cls(process, output)

    async def wait(self) -> int:
        """Wait for the program's end. Returns its exit code, or minus the signal that ended it."""
        return await self._process.wait()

    async def end(self) -> str:
        """Kill the remaining processes of the program's group. Returns the end of its output."""
        if not self._killed:
            self._killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_SECONDS):
                await self.wait()
        await asyncio.wait({self._output.ended}, timeout=OUTPUT_SECONDS)
        self._output.transport.close()
        return escape(self._output.tail.decode(errors="replace").strip(), keep="\t\n")


class _Output(asyncio.Protocol):
    """Reads a program's output and keeps its end."""

    transport: asyncio.BaseTransport

    def __init__(self) -> None:
        self.tail = b""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.tail = (self.tail + data)[-TAIL_BYTES:]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class Programs:
    """Starts a run's program for each sample, and serves its requests at an endpoint. Use it in one event loop."""

    def __init__(self, config: AgentConfig) -> None:
        self._command = config.command
        self.endpoint = Endpoint()
        """HTTP server for the programs' requests."""

    async def start(self) -> None:
        """Start the endpoint. Raises InvalidArgument if the program doesn't exist."""
        if shutil.which(self._command[0]) is None:
            raise InvalidArgument(
                f'agent.command begins with "{self._command[0]}", which is no program that this agent replica can '
                "execute: give its path, or the name of one in PATH"
            )
        await self.endpoint.start()

    async def close(self) -> None:
        """Stop the endpoint."""
        await self.endpoint.close()

    @asynccontextmanager
    async def run(self, session: ChatSession, sample: Mapping[str, Any]) -> AsyncIterator[tuple[RunningProgram, Path]]:
        """Run the program during the block; yield it and the path of its result.

        Args:
            session: answers the program's requests.
            sample: content of the file RELAXD_SAMPLE.
        """
        environment = inherited_variables()
        direct = ",".join(filter(None, (environment.get("no_proxy") or environment.get("NO_PROXY"), "127.0.0.1")))
        try:
            async with sample_folder(sample) as folder:
                environment |= self.model_variables(session) | {
                    "RELAXD_SAMPLE": str(folder / "sample.json"),
                    "RELAXD_RESULT": str(folder / "result.json"),
                    "TMPDIR": str(folder),
                    "no_proxy": direct,
                    "NO_PROXY": direct,
                }
                program = await Program.start(self._command, environment)
                try:
                    yield program, folder / "result.json"
                finally:
                    await program.end()
        finally:
            self.endpoint.close_session(session)

    def model_variables(self, session: ChatSession) -> dict[str, str]:
        """Start to serve a session. Returns the environment variables with the model's address and key."""
        address = self.endpoint.open(session)
        return {
            "OPENAI_BASE_URL": f"{address}/v1",
            "OPENAI_API_KEY": session.key,
            "ANTHROPIC_BASE_URL": address,
            "ANTHROPIC_API_KEY": session.key,
        }


@asynccontextmanager
async def sample_folder(sample: Mapping[str, Any]) -> AsyncIterator[Path]:
    """Create a folder with the file sample.json; remove it at the end of the block."""

    def make() -> Path:
        folder = Path(tempfile.mkdtemp(prefix="relaxd-"))
        (folder / "sample.json").write_text(json.dumps(sample))
        return folder

    folder = await asyncio.to_thread(make)
    try:
        yield folder
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
