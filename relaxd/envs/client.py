"""Client of environments, which calls their host over relaxd.v1.Environment."""

import asyncio
import json
import math
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from relaxd.alerts.user_messages import Told, ignore
from relaxd.data.examples import Message
from relaxd.envs.environment import BadEnvironmentError, Reply, Sample, check_tools, read_observation
from relaxd.envs.host import REFUSED
from relaxd.media.placeholders import MediaItem
from relaxd.process.child import Child, ChildError, ChildExited
from relaxd.rpc.errors import Aborted, DeadlineExceeded, RpcError, explain, from_call
from relaxd.text import parse_json
from relaxd.v1 import environment_pb2 as pb
from relaxd.v1.environment_pb2_grpc import EnvironmentStub

GRACE_SECONDS = 2.0
"""Seconds after a call's deadline in which the environment's host can still report which call was late."""
START_SECONDS = 180.0
"""Maximum seconds for an environment's host to start and import the environment."""
_OURS = ("RELAXD_", "REDIS_URL")
"""Prefixes of environment variables that environments don't get: settings and secrets of relaxd."""


class EnvironmentFailed(Exception):
    """A call of an environment failed: it raised, took too long, is missing, or returned an invalid value. The message
    says which."""


class EnvironmentLate(EnvironmentFailed):
    """An environment took too long to answer a call."""


@dataclass(frozen=True)
class OpenedSession:
    """An environment's response to the opening of a conversation."""

    messages: list[Message]
    """Messages of the environment that follow the prompt's messages."""
    tools: list[dict[str, Any]]
    """Schemas of the tools that the model may call."""
    media: Sequence[MediaItem] = ()
    """Media of the environment's messages, in order."""


@dataclass(frozen=True)
class ModelAccess:
    """Address and key with which a user's function calls the model."""

    url: str
    key: str


@dataclass(frozen=True)
class SessionStep:
    """The environment's answer to a message of the model."""

    messages: list[Message]
    reward: float
    done: bool
    info: Mapping[str, float]
    player: int = 0
    """Number of the player whose turn is next."""
    rewards: Mapping[int, float] = field(default_factory=dict)
    """Rewards of the players who didn't speak, by the player's number."""
    media: Sequence[MediaItem] = ()
    """Media of the environment's messages, in order."""


class EnvironmentClient:
    """Client of an environment's host or service. For use in one event loop."""

    def __init__(
        self, channel: grpc.aio.Channel, call_seconds: float, lease_seconds: float, told: Told = ignore
    ) -> None:
        """Use the environment behind `channel`. `call_seconds` is the time limit of a call. After `lease_seconds`
        without calls the environment's host closes a session.

        `told` is called with the messages for the user that an environment sends.
        """
        self._stub = EnvironmentStub(channel)
        self._call_seconds = call_seconds
        self._lease_seconds = lease_seconds
        self._told = told

    async def open(self, session_id: str, sample: Sample, access: ModelAccess | None = None) -> OpenedSession:
        """Begin a conversation about a sample. `access` lets a user's function that leads the conversation call the
        model. Raises EnvironmentFailed."""
        request = pb.OpenSessionRequest(
            session_id=session_id,
            messages_json=json.dumps(list(sample.messages)),
            answer=sample.answer,
            metadata_json=json.dumps(dict(sample.metadata)),
            seed=sample.seed,
            lease_seconds=self._lease_seconds,
            call_seconds=self._call_seconds,
            tools_json=json.dumps(list(sample.tools)),
            model_url=access.url if access else "",
            model_key=access.key if access else "",
        )
        answer = await self._call(self._stub.OpenSession, request)
        self._told(answer.user_messages)
        try:
            messages, media = _messages(answer.messages_json, "OpenSession returned")
            tools = check_tools(_list("tools_json", answer.tools_json), "OpenSession returned")
            return OpenedSession(messages, tools, media)
        except BadEnvironmentError as error:
            raise EnvironmentFailed(str(error)) from error

    async def step(self, session_id: str, turn: int, reply: Reply) -> SessionStep:
        """Send a message of the model to the environment, and return its answer. Raises EnvironmentFailed."""
        request = pb.StepRequest(
            session_id=session_id,
            turn=turn,
            text=reply.text,
            tool_calls=[
                pb.EnvironmentToolCall(id=call.id, name=call.name, arguments_json=json.dumps(call.arguments))
                for call in reply.tool_calls
            ],
            problem=reply.problem,
            finish_reason=reply.finish_reason,
        )
        answer = await self._call(self._stub.Step, request)
        self._told(answer.user_messages)
        for name, number in (("reward", answer.reward), *answer.info.items(), *answer.rewards.items()):
            if not math.isfinite(number):
                raise EnvironmentFailed(f"Step returned {name} = {number}: it must be a finite number")
        try:
            messages, media = _messages(answer.messages_json, "Step returned")
        except BadEnvironmentError as error:
            raise EnvironmentFailed(str(error)) from error
        info, rewards = dict(answer.info), dict(answer.rewards)
        return SessionStep(messages, answer.reward, answer.done, info, answer.player, rewards, media)

    async def close_session(self, session_id: str) -> None:
        """End a conversation with the environment. Raises EnvironmentFailed."""
        await self._call(self._stub.CloseSession, pb.CloseSessionRequest(session_id=session_id))

    async def _call(self, call: Any, request: Any) -> Any:
        try:
            return await call(request, timeout=self._call_seconds + GRACE_SECONDS)
        except grpc.aio.AioRpcError as error:  # of a channel to an address
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED and not error.trailing_metadata():
                what = type(request).__name__.removesuffix("Request")
                raise EnvironmentLate(f"{what} took longer than {self._call_seconds:g} s") from error
            known = from_call(error)
            raise EnvironmentFailed(known.message if isinstance(known, _TOLD) else explain(error)) from error
        except DeadlineExceeded as error:  # of a host, or of its channel
            raise EnvironmentLate(error.message) from error
        except RpcError as error:  # of a host's channel
            raise EnvironmentFailed(error.message if isinstance(error, Aborted) else str(error)) from error


_TOLD = (Aborted, DeadlineExceeded)
"""Errors of an environment's host that are reported by their message only, without code or address."""


def _messages(text: str, what: str) -> tuple[list[Message], tuple[MediaItem, ...]]:
    """Parse an environment's messages from JSON. Returns the messages without their media, and the media."""
    read = read_observation(_list("messages_json", text), what, sent=True)
    return [message for message, _ in read], tuple(item for _, items in read for item in items)


def _list(name: str, text: str) -> list[Any]:
    try:
        found = parse_json(text or "[]")
    except ValueError as error:
        raise BadEnvironmentError(f"the environment's {name} isn't JSON: {error}") from error
    if not isinstance(found, list):
        raise BadEnvironmentError(f"the environment's {name} is {text[:80]!r}: it must be a list")
    return found


@asynccontextmanager
async def hosted(name: str, settings: Mapping[str, Any], python: str = "") -> AsyncIterator[grpc.aio.Channel]:
    """Host an environment's class in a child process, and yield the gRPC channel to this process.

    Raises BadEnvironmentError if the environment can't be used, ChildError if the process can't be started or ends at
    its start.
    """
    child = await start_host(name, settings, python)
    try:
        yield child.channel
    finally:
        await child.stop(grace_seconds=0.5)


def inherited_variables() -> dict[str, str]:
    """Return the environment variables that an environment or a program inherits: all except relaxd's, which have
    secrets."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}


async def start_host(
    name: str, settings: Mapping[str, Any], python: str = "", *, is_function: bool = False, memory_bytes: int = 0
) -> Child:
    """Start a process that hosts an environment's class or a function, and wait until it serves.

    Raises BadEnvironmentError and ChildError like `hosted`. The process doesn't inherit relaxd's environment variables,
    which have secrets.
    """
    kept = inherited_variables()
    words = [name, json.dumps(dict(settings)), "function" if is_function else "environment", str(memory_bytes)]
    child = await Child.start(
        "relaxd.envs.host", words, kept, inherit=False, python=python or None, name="the environment's host"
    )
    try:
        async with asyncio.timeout(START_SECONDS):
            await child.wait_connected()
    except ChildExited as error:
        if error.exit_code == REFUSED:
            raise BadEnvironmentError("\n".join(error.last_lines)) from error
        raise
    except asyncio.CancelledError:
        child.kill()
        raise
    except TimeoutError:
        child.kill()
        raise ChildError(f"the environment's host did not import {name} within {START_SECONDS:g} s") from None
    return child
