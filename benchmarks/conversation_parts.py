"""Services of benchmarks/conversations.py: `python -m benchmarks.conversation_parts trainer|rollout|agent`.

The trainer is that of a rehearsal, which has no model. The rollout replica has a scripted engine, whose answers are
calls of a tool, in the run's tokens. The agent replica records times, and follows orders in a file.
"""

import asyncio
import json
import os
import random
import runpy
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaxd.engines import ENGINES
from relaxd.media.prompt_media import NO_MEDIA, PromptMedia
from relaxd.v1.rollout_pb2 import GenerateRequest
from relaxd.v1.sample_pb2 import SamplingParams
from services.agent.engines import REPORT_TOKENS, EngineReply, EngineSession, RunEngines
from services.rollout.engines.engine_interface import EngineStart
from services.rollout.engines.engine_process import FLUSH_SECONDS
from services.rollout.engines.request_types import Output, Request
from services.rollout.engines.scripted_engine import ScriptedEngine
from tests.kit.models import SPECIAL_TOKENS, byte_tokenizer

ENGINE = "transformers"
"""The run's engine, by its configuration, in whose place there is one that writes calls."""
ORDERS, TIMES = "BENCHMARK_ORDERS", "BENCHMARK_TIMES"
"""Environment variables with the paths of a file with an agent replica's orders, and of one for its times."""
CORES = "BENCHMARK_CORES"
"""Environment variable with the cores of agent replicas."""
LOOK_SECONDS = 0.05
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "words to look for"}}\n</tool_call>'
BARE_TURN = 6
"""Turn whose requests are asked again, bare: ten messages stand between it and the prompt."""


@cache
def reply_tokens(length: int) -> tuple[NDArray[np.int32], str]:
    """Return an answer of `length` tokens, which ends with a call and the end token, and its text."""
    call = call_tokens()
    words = "x" * max(length - len(call), 0)
    tokens = [*word_tokens() * len(words), *call]
    return np.array(tokens[-length:], np.int32), words + CALL


@cache
def call_tokens() -> list[int]:
    """Return the tokens of a call, with the end token."""
    return [*byte_tokenizer().encode(CALL, add_special_tokens=False), SPECIAL_TOKENS.index("<|im_end|>")]


@cache
def word_tokens() -> list[int]:
    """Return the token of a letter."""
    return list(byte_tokenizer().encode("x", add_special_tokens=False))


class CallingEngine(ScriptedEngine):
    """A scripted engine whose answers are some words and a call of the tool, reported as often as by real engines."""

    def _generate(self, request: Request) -> AsyncIterator[Output]:
        every = round(self._rehearsal.sample_tokens_per_second * FLUSH_SECONDS)
        return super()._generate(replace(request, report_every=max(request.report_every, every)))

    def _output(self, sample: Any, end: int, *, aborted: bool = False) -> Output:
        start = sample.reported
        output = super()._output(sample, end, aborted=aborted)
        tokens, text = reply_tokens(sample.length)
        output.tokens = tokens[start:end]
        if output.finish_reason is not None:
            output.text = text
        return output


async def start_engine(start: EngineStart) -> CallingEngine:
    """Return an engine for a rollout replica."""
    return CallingEngine(start.config.rollout, start.config.rehearsal)


class TimedEngines(RunEngines):
    """Records when replies are asked for and there, and asks bare requests when it is told to."""

    def __init__(self, context: Any, run_id: str) -> None:
        super().__init__(context, run_id)
        self._times = open(os.environ[TIMES], "a", buffering=1)  # noqa: SIM115 - as long as the process
        self._turns: dict[str, int] = {}
        self._free = asyncio.Event()
        """Set while conversations go on."""
        self._request: tuple[list[int], SamplingParams] | None = None
        self._task = asyncio.create_task(self._follow_orders())

    async def close(self) -> None:
        self._task.cancel()
        await super().close()

    async def generate(
        self,
        session: EngineSession,
        prompt: list[int],
        sampling: SamplingParams,
        seconds: Callable[[], float],
        media: PromptMedia = NO_MEDIA,
    ) -> EngineReply:
        asked = time.monotonic()
        turn = self._turns[session.name] = self._turns.get(session.name, 0) + 1
        if turn == BARE_TURN:
            self._request = prompt, sampling
        await self._wait_until_free()
        begun = time.monotonic()
        self._record("asked", session.name, turn, asked)
        reply = await super().generate(session, prompt, sampling, seconds, media)
        self._record("reply", session.name, turn, begun, time.monotonic(), len(reply.tokens))
        return reply

    async def _wait_until_free(self) -> None:
        """Wait while bare requests are asked; then go on at a time that isn't that of all others."""
        if not self._free.is_set():
            await self._free.wait()
            await asyncio.sleep(random.random())

    def _record(self, *entry: Any) -> None:
        self._times.write(json.dumps(entry) + "\n")

    async def _follow_orders(self) -> None:
        loops: set[asyncio.Task[None]] = set()
        while True:
            bare = read_orders().get("bare", 0)
            if not bare:
                self._free.set()
            elif self._request is not None and not loops:
                self._free.clear()
                loops = {asyncio.create_task(self._ask_bare(*self._request)) for _ in range(bare)}
            if not bare and loops:
                for task in loops:
                    task.cancel()
                loops = set()
            await asyncio.sleep(LOOK_SECONDS)

    async def _ask_bare(self, prompt: list[int], sampling: SamplingParams) -> None:
        """Ask again and again, with another seed, which gives the answer another length."""
        await asyncio.sleep(random.random())
        while True:
            own = SamplingParams()
            own.CopyFrom(sampling)
            own.seed = random.getrandbits(62)
            request = GenerateRequest(prompt_tokens=prompt, n=1, sampling=own, report_every=REPORT_TOKENS)
            peer = await self._peers.choose()
            begun, count = time.monotonic(), 0
            with peer.called() as stub:
                async for message in stub.Generate(request):
                    count += len(message.tokens)
            self._record("bare", begun, time.monotonic(), count)


def read_orders() -> dict[str, Any]:
    """Return the agent replicas' orders."""
    return dict(json.loads(Path(os.environ[ORDERS]).read_text()))


def follow_number() -> None:
    """Let this agent replica take groups only while it is one of those that should."""
    from services.agent.group_conversations import GroupConversations

    number = int(os.environ["RELAXD_INSTANCE"].partition("-")[2] or 1)
    room = GroupConversations.room

    def room_if_wanted(self: GroupConversations, held: int, others: int) -> int:
        return room(self, held, others) if number <= read_orders()["agents"] else held

    GroupConversations.room = room_if_wanted  # type: ignore[method-assign]


def main() -> None:
    """Start a service."""
    (role,) = sys.argv[1:]
    sys.argv[1:] = []
    if role == "trainer":
        from services.trainer.service import server

        server.RANK = server.SCRIPTED_RANK
    elif role == "rollout":
        ENGINES[ENGINE] = replace(ENGINES[ENGINE], module="benchmarks.conversation_parts")
    else:
        from services.agent import service

        os.sched_setaffinity(0, set(map(int, os.environ[CORES].split(","))))
        service.RunEngines = TimedEngines  # type: ignore[misc]
        follow_number()
    runpy.run_module(f"services.{role}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
