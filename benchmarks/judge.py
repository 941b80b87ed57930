"""Questions to a judge per second: `python -m benchmarks.judge`.

A reward that does nothing but ask is scored by worker processes, as in the reward service. It asks a stand-in that
replies after a fixed time, which shows what the machinery costs, and an HTTP server on this machine that replies after
the same time. "of the limit" is the ratio to the questions per second of as many clients that only wait for that time.
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from benchmarks.reporting import machine, report
from relaxd.config import JudgeConfig, RewardConfig
from relaxd.rewards import RewardInput, RewardOutput
from relaxd.v1.judge_pb2 import AskRequest, AskResponse
from services.reward.judge.chat_completions import ChatCompletions
from services.reward.judge.client import JudgeClient
from services.reward.pool import WorkerPool
from services.reward.questions import Ask

REWARD = """
from relaxd.rewards import judge

async def score(sample):
    return await judge.ask(sample.response, read=float)
"""
ANSWER_BYTES = 8000
"""Length of the answers that are asked about: about 2000 tokens."""


async def measure(ask: Ask, workers: int, samples: int, groups: int) -> float:
    """Return the questions per second of `groups` groups of `samples`, scored by `workers`."""
    pool = WorkerPool(workers, RewardConfig(name="asking:score"), ask)
    group = [RewardInput("?", f"{number}".ljust(ANSWER_BYTES)) for number in range(samples)]
    try:
        await asyncio.gather(*(pool.score("", group, 60.0) for _ in range(workers)))  # starts every worker
        begun = time.perf_counter()
        scored = await asyncio.gather(*(pool.score("", group, 60.0) for _ in range(groups)))
        seconds = time.perf_counter() - begun
    finally:
        pool.close()
    assert all(outcome == RewardOutput(float(number)) for one in scored for number, outcome in enumerate(one))
    return groups * samples / seconds


async def with_stand_in(seconds: float, use: Callable[[Ask], Awaitable[float]]) -> float:
    """Measure with a judge in this process."""

    async def ask(question: AskRequest) -> AskResponse:
        await asyncio.sleep(seconds)
        return AskResponse(text=question.messages[0].content[0].text)

    return await use(ask)


async def with_server(seconds: float, in_flight: int, use: Callable[[Ask], Awaitable[float]]) -> float:
    """Measure with a server of chat completions, in this process, too."""

    async def complete(request: web.Request) -> web.Response:
        await asyncio.sleep(seconds)
        text = (await request.json())["messages"][0]["content"]
        return web.json_response({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]})

    app = web.Application(client_max_size=1 << 20)
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    config = JudgeConfig(model="none", address=f"http://127.0.0.1:{port}/v1", max_in_flight=in_flight)
    client = JudgeClient(config, ChatCompletions(config, None))
    try:
        return await use(client.ask)
    finally:
        await client.close()
        await runner.cleanup()


async def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every case."""
    rows = []
    for seconds in options.seconds:
        limit = options.workers * options.samples / seconds

        async def use(ask: Ask) -> float:
            return await measure(ask, options.workers, options.samples, options.groups)

        found = {
            "stand-in": await with_stand_in(seconds, use),
            "HTTP server": await with_server(seconds, options.workers * options.samples, use),
        }
        for judge, rate in found.items():
            rows.append(
                {
                    "judge": judge,
                    "reply after s": seconds,
                    "open at once": options.workers * options.samples,
                    "questions/s": rate,
                    "of the limit": rate / limit,
                }
            )
    return rows


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--samples", type=int, default=16, help="answers in a group")
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--seconds", type=float, nargs="+", default=[0.01, 1.0], help="time that a reply takes")
    options = parser.parse_args()
    before = machine()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "asking.py").write_text(REWARD)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH", ""))))
        rows = asyncio.run(run(options))
    report("judge", rows, machine=before, answer_bytes=ANSWER_BYTES, groups=options.groups)


if __name__ == "__main__":
    main()
