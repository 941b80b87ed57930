"""`python -m relaxd.envs.host NAME SETTINGS [KIND [MEMORY_BYTES]]`: serves an environment or a function to a parent."""

import asyncio
import json
import os
import resource
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from relaxd.alerts.user_messages import take_messages
from relaxd.envs.environment import BadEnvironmentError, Reply, Sample, check_step, check_tools, messages_of
from relaxd.envs.loading import load_environment
from relaxd.envs.own_function import FunctionConversation, load_function
from relaxd.envs.sessions import Session, UserCalls
from relaxd.envs.tool_calls import ToolCall
from relaxd.json_text import parse_json
from relaxd.process.child_server import ChildServer
from relaxd.rpc.errors import Aborted, DeadlineExceeded, InvalidArgument, NotFound, ResourceExhausted
from relaxd.sandbox.enclosure import lower_limit
from relaxd.v1 import environment_pb2 as pb
from relaxd.v1 import environment_pb2_grpc

REFUSED = 2
"""Exit code if the environment can't be used."""
MAX_SESSIONS = 10_000
"""Maximum number of concurrent sessions."""
Returned = TypeVar("Returned")


class EnvironmentHandlers(environment_pb2_grpc.EnvironmentServicer):
    """Answers relaxd.v1.Environment for one class. Lives in one event loop."""

    def __init__(self, make: Callable[[], Any], memory_bytes: int = 0) -> None:
        """`make` makes an instance for each conversation; `memory_bytes` is the limit that this process has, if any."""
        self._make = make
        self._calls = UserCalls(memory_bytes)
        self._sessions: dict[str, Session] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def OpenSession(self, request: pb.OpenSessionRequest, context: Any) -> pb.OpenSessionResponse:
        name, seconds = request.session_id, request.call_seconds
        if not name:
            raise InvalidArgument("session_id is empty", [("session_id", "name the conversation")])
        if not (request.lease_seconds > 0 and seconds > 0):
            raise InvalidArgument(
                f"lease_seconds is {request.lease_seconds} and call_seconds {seconds}: they must be > 0"
            )
        messages = _json_of("messages_json", request.messages_json or "[]", list)
        metadata = _json_of("metadata_json", request.metadata_json or "{}", dict)
        tools = _json_of("tools_json", request.tools_json or "[]", list)
        sample = Sample(messages, request.answer, metadata, request.seed, tools)
        if name not in self._sessions:
            if len(self._sessions) >= MAX_SESSIONS:
                raise ResourceExhausted(f"there are {MAX_SESSIONS} sessions already: close some")
            self._sessions[name] = Session(request.lease_seconds, seconds, lambda: self._end(name))
        session = self._sessions[name]

        async def open_it() -> pb.OpenSessionResponse:
            environment = session.environment = await self._calls.call("__init__()", self._make, seconds=seconds)
            opened = None
            if isinstance(environment, FunctionConversation):
                environment.connect(request.model_url, request.model_key)
            if hasattr(environment, "open"):
                opened = await self._calls.call("open()", environment.open, sample, seconds=seconds)
            said = _checked(lambda: messages_of(opened, "open() returned"))
            tools = _checked(lambda: check_tools(getattr(environment, "tools", ())))
            return pb.OpenSessionResponse(
                messages_json=json.dumps(said), tools_json=json.dumps(tools), user_messages=take_messages()
            )

        try:
            return await session.answer(0, open_it)
        except (Aborted, DeadlineExceeded):
            self._end(name)
            raise

    async def Step(self, request: pb.StepRequest, context: Any) -> pb.StepResponse:
        session = self._sessions.get(request.session_id)
        if session is None:
            raise NotFound(f'session_id is "{request.session_id}": there is no such session, or its lease has ended')
        if request.turn < 1:
            raise InvalidArgument(f"turn is {request.turn}: turns count from 1", [("turn", "must be >= 1")])
        calls = [
            ToolCall(call.name, _json_of("tool_calls.arguments_json", call.arguments_json or "{}", dict), id=call.id)
            for call in request.tool_calls
        ]
        reply = Reply(request.text, tuple(calls), request.problem, request.finish_reason)

        async def step() -> pb.StepResponse:
            returned = await self._calls.call("step()", session.environment.step, reply, seconds=session.call_seconds)
            found = _checked(lambda: check_step(returned, calls))
            return pb.StepResponse(
                messages_json=json.dumps(found.observation),
                reward=found.reward,
                done=found.done,
                info=found.info,
                user_messages=take_messages(),
                player=found.player,
                rewards=found.rewards,
            )

        return await session.answer(request.turn, step)

    async def CloseSession(self, request: pb.CloseSessionRequest, context: Any) -> pb.CloseSessionResponse:
        if (closing := self._end(request.session_id)) is not None:
            await asyncio.shield(closing)
        return pb.CloseSessionResponse()

    def _end(self, name: str) -> asyncio.Task[None] | None:
        """Start closing a session. Returns None if there is no such session."""
        session = self._sessions.pop(name, None)
        if session is None:
            return None
        task = asyncio.create_task(self._close(session), name=f"close {name}")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    async def _close(self, session: Session) -> None:
        if isinstance(session.environment, FunctionConversation):
            session.environment.cancel()
        await session.finish()
        if hasattr(session.environment, "close"):
            await self._calls.call("close()", session.environment.close, seconds=session.call_seconds)


def _json_of(field: str, text: str, kind: type[Returned]) -> Returned:
    try:
        found = parse_json(text)
    except ValueError as error:
        raise InvalidArgument(f"{field} isn't JSON: {error}", [(field, str(error))]) from error
    if not isinstance(found, kind):
        what = "a list" if kind is list else "an object"
        raise InvalidArgument(f"{field} is {text[:80]!r}: it must be {what}", [(field, f"must be {what}")])
    return found


def _checked(check: Callable[[], Returned]) -> Returned:
    try:
        return check()
    except BadEnvironmentError as error:
        raise Aborted(str(error)) from error


def end_together() -> None:
    """Fork a process that kills this one's process group once this one has ended, even if it is killed.

    Else the processes that an environment has started would stay.
    """
    if not hasattr(os, "pidfd_open"):
        return
    host = os.getpid()
    if os.fork() == 0:
        with suppress(ProcessLookupError):  # it has ended
            select.select([os.pidfd_open(host)], [], [])
        os.killpg(host, signal.SIGKILL)


def main(name: str, settings_json: str = "{}", kind: str = "environment", memory_bytes: str = "0") -> None:
    """Serve an environment, or the kind "function", until the parent ends."""
    end_together()
    if most := int(memory_bytes):
        lower_limit(resource.RLIMIT_DATA, most)
    try:
        load = load_function if kind == "function" else load_environment
        make = load(name, json.loads(settings_json))
    except BadEnvironmentError as error:
        print(error, flush=True)
        sys.exit(REFUSED)
    ChildServer((environment_pb2_grpc.add_EnvironmentServicer_to_server, EnvironmentHandlers(make, most))).serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
