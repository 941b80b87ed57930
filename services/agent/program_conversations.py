"""Conversations led by programs, or by a user's function in its host process."""

import asyncio
import os
import stat
import time
from collections.abc import Callable, Coroutine, Mapping
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

from relaxd.data.examples import Message
from relaxd.envs.client import EnvironmentFailed, ModelAccess
from relaxd.envs.environment import MAX_BYTES, BadEnvironmentError, Reply, finite_number
from relaxd.json_text import parse_json
from relaxd.media.placeholders import AUDIO, IMAGE, VIDEO
from relaxd.sandbox.processes import describe_exit
from services.agent.chat_session import ChatSession
from services.agent.conversation import MAX_INFO, Conversation, Conversations, ConversationStart
from services.agent.endpoint import Endpoint
from services.agent.engines import OutOfTime
from services.agent.environments import Environments
from services.agent.model_turns import PolicyModel
from services.agent.programs import Programs

T = TypeVar("T")
LOOK_SECONDS = 1.0
"""Seconds between two checks of a conversation's time limit."""


class LedConversations(Conversations):
    """Base of conversations led by a program or function, which sends requests to the endpoint."""

    async def _result_of(self, leader: Coroutine[Any, Any, T], session: ChatSession, start: ConversationStart) -> T:
        """Await the leader's result. Raises OutOfTime, or the error after which the conversation can't continue."""
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
        """Do nothing: the program is already killed."""

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
    """Return a message of the prompt in OpenAI's form, which programs can send."""
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
"""By kind of media: function that returns a part in OpenAI's form; for video in vLLM's and SGLang's form."""


def _check_end(code: int, output: str, session: ChatSession, result: Conversation) -> None:
    """Raise EnvironmentFailed if a program failed. After a refusal by a limit of the run, any exit code is accepted."""
    told = f"; the end of its output:\n{output}" if output else ""
    if code and not session.limit:
        raise EnvironmentFailed(f"the program ended with {describe_exit(code)}{told}")
    if not result.turns:
        raise EnvironmentFailed(f"the program ended with {describe_exit(code)}, but never asked the model{told}")


def read_result(path: Path) -> tuple[float, dict[str, float]]:
    """Read the reward and info that a program wrote; 0 and {} without a file. Raises EnvironmentFailed."""
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
    """Return a file's content; b"" if it doesn't exist. Raises OSError, and ValueError for a special or long file."""
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
    """Holds conversations led by a function, which sends requests to the endpoint like a program."""

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
