"""Conversations led by programs, one process per sample, which call the model over HTTP; or by a user's function in its
host process."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from numbers import Real
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from relaxd.config import AgentConfig
from relaxd.data.examples import Message
from relaxd.envs.client import EnvironmentFailed, ModelAccess, inherited_variables
from relaxd.envs.environment import MAX_BYTES, BadEnvironmentError, Reply, finite_number
from relaxd.media.placeholders import AUDIO, IMAGE, VIDEO
from relaxd.process.child import KILL_SECONDS
from relaxd.rpc.errors import InvalidArgument
from relaxd.sandbox import privileges
from relaxd.sandbox.processes import describe_exit
from relaxd.telemetry.logs import escape
from relaxd.text import parse_json
from services.agent.chat_session import ChatSession
from services.agent.conversation import MAX_INFO, Conversation, Conversations, ConversationStart
from services.agent.endpoint import Endpoint
from services.agent.engines import OutOfTime
from services.agent.environments import Environments
from services.agent.model_turns import PolicyModel

TAIL_BYTES = 4000
"""Number of bytes to keep of the end of a program's output."""
OUTPUT_SECONDS = 1.0
"""Maximum seconds to wait for the end of the output after a program ended: processes that left its process group may
keep the output open."""


class RunningProgram(Protocol):
    """Interface of a running program that leads a conversation."""

    async def wait(self) -> int:
        """Wait until the program ends. Return its exit code, or minus the number of the signal that ended it."""

    async def end(self) -> str:
        """Kill the program's remaining processes. Return the end of the program's output."""


class Program:
    """A running program: its process and all children, as a process group."""

    def __init__(self, process: asyncio.subprocess.Process, output: "_Output") -> None:
        self._process = process
        self._output = output
        self._killed = False

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str]) -> Self:
        """Start a program, which the system kills when this process ends. Raises OSError."""
        ours, theirs = os.pipe()  # asyncio's own pipe would wait until all descendants of the program close it
        with open(theirs, "wb", buffering=0) as writing, contextlib.ExitStack() as undo:
            reading = undo.enter_context(open(ours, "rb", buffering=0))
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", privileges.__file__, str(os.getpid()), *command),
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
        """Wait until the program ends. Return its exit code, or minus the number of the signal that ended it."""
        return await self._process.wait()

    async def end(self) -> str:
        """Kill the remaining processes of the program's process group. Return the end of the program's output."""
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
    """Reads a program's output and keeps the last TAIL_BYTES bytes."""

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
    """Starts a run's program for each sample, and answers the programs' requests at an endpoint.

    Use it in one event loop.
    """

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
        """Run the program during the block. Yield the program and the path of its result file.

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
        """Start to serve a session's requests. Return the environment variables with the model's address and key."""
        address = self.endpoint.open(session)
        return {
            "OPENAI_BASE_URL": f"{address}/v1",
            "OPENAI_API_KEY": session.key,
            "ANTHROPIC_BASE_URL": address,
            "ANTHROPIC_API_KEY": session.key,
        }


@asynccontextmanager
async def sample_folder(sample: Mapping[str, Any]) -> AsyncIterator[Path]:
    """Create a temporary folder with the file sample.json, and remove the folder at the end of the block."""

    def make() -> Path:
        folder = Path(tempfile.mkdtemp(prefix="relaxd-"))
        (folder / "sample.json").write_text(json.dumps(sample))
        return folder

    folder = await asyncio.to_thread(make)
    try:
        yield folder
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


T = TypeVar("T")
LOOK_SECONDS = 1.0
"""Seconds between two checks of a conversation's time limit."""


class LedConversations(Conversations):
    """Base of conversations led by a program or function, which sends its requests to the endpoint."""

    async def _result_of(self, leader: Coroutine[Any, Any, T], session: ChatSession, start: ConversationStart) -> T:
        """Return the result of the program or function. Raises OutOfTime, or the error that ended the conversation."""
        running = asyncio.create_task(leader, name="lead a conversation")
        try:
            while True:
                self.calls += 1
                # brief: the next look at the time that is left
                await asyncio.wait((running, session.failed), timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if session.failed.done():
                    await session.failed
                if running.done():
                    return await running
                if not session.generating and start.seconds() <= 0:  # a running request applies the limit itself
                    raise OutOfTime
        finally:
            running.cancel()


class ProgramConversations(LedConversations):
    """Holds conversations that a program leads."""

    def __init__(self, model: PolicyModel, programs: Programs) -> None:
        super().__init__(model)
        self._programs = programs

    def _end(self, name: str) -> None:
        """Do nothing: the program has already been killed."""

    async def _converse(self, result: Conversation, start: ConversationStart) -> None:
        session = ChatSession(self._model, start, result)
        sample = {
            "messages": [_in_openai_form(message) for message in start.sample.messages],
            "answer": start.sample.answer,
            "metadata": dict(start.sample.metadata),
            "seed": start.sample.seed,
            "tools": list(start.sample.tools),
        }
        begun = time.monotonic()
        try:
            async with self._programs.run(session, sample) as (program, path):
                code = await self._result_of(program.wait(), session, start)
                output = await program.end()
                _check_end(code, output, session, result)
                result.reward, result.info = await asyncio.to_thread(read_result, path)
        except OSError as error:
            raise EnvironmentFailed(f"the program can't be started: {error}") from error
        finally:
            result.environment_seconds = time.monotonic() - begun - start.engine.asked_seconds
        result.finish = session.limit or session.cut_by or "env_done"


def _in_openai_form(message: Message) -> Message:
    """Return a prompt message in OpenAI's form, which programs can send unchanged."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [_OPENAI_PARTS[part["type"]](part) if part["type"] in _OPENAI_PARTS else part for part in content]
    return {**message, "content": parts}


_OPENAI_PARTS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    IMAGE: lambda part: {"type": "image_url", "image_url": {"url": part[IMAGE]}},
    VIDEO: lambda part: {"type": "video_url", "video_url": {"url": part[VIDEO]}},
    AUDIO: lambda part: {
        "type": "input_audio",
        "input_audio": {"data": part[AUDIO].partition(",")[2], "format": "wav"},
    },
}
"""Functions that convert a message part to OpenAI's form, or for video to vLLM's and SGLang's, by kind of media."""


def _check_end(code: int, output: str, session: ChatSession, result: Conversation) -> None:
    """Raise EnvironmentFailed if a program failed or never asked the model.

    Once a limit of the run has refused a request, any exit code is accepted.
    """
    told = f"; the end of its output:\n{output}" if output else ""
    if code and not session.limit:
        raise EnvironmentFailed(f"the program ended with {describe_exit(code)}{told}")
    if not result.turns:
        raise EnvironmentFailed(f"the program ended with {describe_exit(code)}, but never asked the model{told}")


def read_result(path: Path) -> tuple[float, dict[str, float]]:
    """Read the reward and the info that a program wrote; 0 and {} if there is no file. Raises EnvironmentFailed."""
    try:
        found = parse_json(_read(path) or "{}")
        if not isinstance(found, dict) or found.keys() - {"reward", "info"}:
            like = '{"reward": 1.0, "info": {"calls": 2}}'
            raise BadEnvironmentError(f"{found!r:.200} must be an object like {like}")
        info = found.get("info", {})
        if not isinstance(info, dict):
            raise BadEnvironmentError(f"info = {info!r:.200} must be an object of numbers")
        numbers = {name: value for name, value in list(info.items())[:MAX_INFO] if isinstance(value, Real)}
        checked = {name: finite_number(value, f"info[{name!r}] is") for name, value in numbers.items()}
        return finite_number(found.get("reward", 0.0), "reward is"), checked
    except (OSError, ValueError) as error:
        raise EnvironmentFailed(f"the program's result (RELAXD_RESULT) can't be used: {error}") from error


def _read(path: Path) -> bytes:
    """Return a file's content in bytes; b"" if there is no file.

    Raises OSError, and ValueError for a special or long file.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    with open(file, "rb") as opened:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ValueError("it isn't a plain file")
        content = opened.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes")
    return content


class FunctionConversations(LedConversations):
    """Holds conversations led by a user's function, which sends requests to the endpoint as a program does."""

    def __init__(self, model: PolicyModel, functions: Environments, endpoint: Endpoint) -> None:
        super().__init__(model)
        self._functions = functions
        self._endpoint = endpoint

    def _end(self, name: str) -> None:
        self._functions.close_session(name)

    async def _converse(self, result: Conversation, start: ConversationStart) -> None:
        session, name = ChatSession(self._model, start, result), start.engine.name
        access = ModelAccess(f"{self._endpoint.open(session)}/v1", session.key)
        begun = time.monotonic()
        try:
            await self._functions.open(name, start.sample, access)
            step = await self._result_of(self._functions.step(name, 1, Reply("")), session, start)
            if not result.turns:
                raise EnvironmentFailed("the function ended, but never asked the model")
            result.reward, result.info = step.reward, dict(list(step.info.items())[:MAX_INFO])
        except EnvironmentFailed:
            if not session.limit:  # after a refusal by a limit of the run, the function may fail
                raise
        finally:
            self._endpoint.close_session(session)
            result.environment_seconds = time.monotonic() - begun - start.engine.asked_seconds
        result.finish = session.limit or session.cut_by or "env_done"
