"""Questions to a judge per second: `python -m benchmarks.judge`.

A reward that does nothing but ask is scored by worker processes, as in the reward service. It asks a stand-in that
replies after a fixed time, which shows what the machinery costs, and an HTTP server on this machine that replies after
the same time. "of the limit" is the ratio to the questions per second of as many clients that only wait for that time.

Then it asks a judge replica's service: one engine of transformers with a tiny random model, over gRPC. Beside it the
same engine is asked the same questions as tokens from this process without anything between, in turns with the replica.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aiohttp import web

from benchmarks.reporting import machine, report
from relaxd.config import JudgeConfig, RewardConfig, RunConfig
from relaxd.data.examples import Example
from relaxd.data.tokenizer import PromptTokenizer
from relaxd.replica.replica_service import SyncIds
from relaxd.rewards import RewardInput, RewardOutput
from relaxd.rpc.client import channel
from relaxd.rpc.server import Service, start_server
from relaxd.v1.coordinator_pb2 import Assignment
from relaxd.v1.judge_pb2 import AskRequest, AskResponse
from relaxd.v1.judge_pb2_grpc import JudgeStub, add_JudgeServicer_to_server
from services.reward.http_services import ChatCompletions
from services.reward.judge import Ask, JudgeClient
from services.reward.worker_pool import WorkerPool
from services.rollout.engines.request_types import Sampling
from services.rollout.judge import JudgeService, JudgeServicer
from tests.kit.models import make_tiny_model

REWARD = """
from relaxd.rewards import judge

async def score(sample):
    return await judge.ask(sample.response, read=float)

async def score_any(sample):
    await judge.ask(sample.response)
    return float(sample.response)
"""
ANSWER_BYTES = 8000
"""Length of the answers that are asked about: about 2000 tokens."""
SHORT_BYTES = 200
"""Length of those that the replica is asked about, whose tiny model makes a token of a byte."""
REPLY_TOKENS = 32


async def measure(
    ask: Ask, workers: int, samples: int, groups: int, *, reward: str = "score", answer_bytes: int = ANSWER_BYTES
) -> float:
    """Return the questions per second of `groups` groups of `samples`, scored by `workers`."""
    pool = WorkerPool(workers, RewardConfig(name=f"asking:{reward}"), ask)
    group = [RewardInput("?", f"{number}".ljust(answer_bytes)) for number in range(samples)]
    try:
        await asyncio.gather(*(pool.score("", group, 60.0) for _ in range(workers)))  # starts every worker
        begun = time.perf_counter()
        scored = await asyncio.gather(*(pool.score("", group, 60.0) for _ in range(groups)))
        seconds = time.perf_counter() - begun
    finally:
        children = [worker.child for worker in pool._workers if worker.child is not None]
        pool.close()
        await asyncio.gather(*(child.stop() for child in children))  # each closes its channel as it exits
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


class _Replica:
    """Judges: one replica, without the coordinator that says which there are."""

    def __init__(self, stub: JudgeStub) -> None:
        self.who, self.on = "the judge", "judge"
        self._stub = stub

    async def probe(self) -> None:
        """It is there."""

    async def ask(self, question: AskRequest, seconds: float) -> AskResponse:
        return await self._stub.Ask(question, timeout=seconds)

    async def close(self) -> None:
        """The channel is its maker's."""


@asynccontextmanager
async def judge_service(model: Path, in_flight: int) -> AsyncIterator[JudgeService]:
    """Run a judge replica's service, without registering it."""
    judge = {
        "model": str(model),
        "max_new_tokens": REPLY_TOKENS,
        "threads": 1,
        "max_running_samples": in_flight,
        "max_in_flight": in_flight,
    }
    config = RunConfig.model_validate(
        {
            "run": {"steps": 1},
            "model": {"path": str(model)},
            "data": {"source": "addition"},
            "reward": {"name": "judge"},
            "roles": {"judge": judge},
        }
    )

    async def no_gpus(count: int, share: float) -> list[str]:
        return []

    settings = SimpleNamespace(replica_id="judge", log_level="warning", engine_python="")
    gpus = SimpleNamespace(lease=no_gpus)
    service = JudgeService(SimpleNamespace(settings=settings, gpus=gpus, give_up=print))  # type: ignore[arg-type]
    await service.start_run(config, Assignment())
    try:
        yield service
    finally:
        await service.stop_run()


async def bare_engine(service: JudgeService, model: Path, options: argparse.Namespace, in_flight: int) -> float:
    """Return the questions per second of the engine alone."""
    engine = service._engine.engine
    assert engine is not None
    asked = [Example([{"role": "user", "content": f"{n}".ljust(SHORT_BYTES)}]) for n in range(options.samples)]
    prompts = [tuple(map(int, tokens)) for tokens in PromptTokenizer(model).encode(asked)]
    sampling = Sampling(REPLY_TOKENS, temperature=JudgeConfig().temperature)
    room = asyncio.Semaphore(in_flight)

    async def one(prompt: tuple[int, ...]) -> None:
        async with room:
            async for _ in engine.generate(prompt, 1, sampling):
                pass

    begun = time.perf_counter()
    await asyncio.gather(*(one(prompt) for _ in range(options.groups) for prompt in prompts))
    return options.groups * options.samples / (time.perf_counter() - begun)


async def with_replica(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure a judge replica and its engine alone, in turns."""
    in_flight = options.workers * options.samples
    found: dict[str, list[float]] = {"bare engine": [], "replica": []}
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder))
        config = JudgeConfig(model=str(model), max_in_flight=in_flight)
        async with judge_service(model, in_flight) as service:
            calls = Service(add_JudgeServicer_to_server, JudgeServicer(service, SyncIds()), "relaxd.v1.Judge")
            server = await start_server([calls], serving=True)
            async with channel(f"127.0.0.1:{server.port}") as connection:
                client = JudgeClient(config, _Replica(JudgeStub(connection)))
                form = {"reward": "score_any", "answer_bytes": SHORT_BYTES}
                for _ in range(options.rounds + 1):
                    found["bare engine"].append(await bare_engine(service, model, options, in_flight))
                    asked = measure(client.ask, options.workers, options.samples, options.groups, **form)
                    found["replica"].append(await asked)
                await client.close()
            await server.stop()
    medians = {name: statistics.median(rates[1:]) for name, rates in found.items()}  # the first ones warm up
    return [
        {
            "judge": name,
            "open at once": in_flight,
            "questions/s": medians[name],
            "x bare engine": medians[name] / medians["bare engine"],
            "rounds": " · ".join(f"{rate:.1f}" for rate in rates[1:]),
        }
        for name, rates in found.items()
    ]


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
    parser.add_argument(
        "--seconds", type=float, nargs="*", default=[0.01, 1.0], help="time that a reply takes; none: leave this out"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of the replica and its engine; 0: not this part")
    options = parser.parse_args()
    before = machine()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "asking.py").write_text(REWARD)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH", ""))))
        if options.seconds:
            rows = asyncio.run(run(options))
            report("judge", rows, machine=before, answer_bytes=ANSWER_BYTES, groups=options.groups)
        if options.rounds:
            rows = asyncio.run(with_replica(options))
            facts = {"answer_bytes": SHORT_BYTES, "reply_tokens": REPLY_TOKENS, "groups": options.groups}
            report("judge-replica", rows, machine=before, rounds=options.rounds, **facts)


if __name__ == "__main__":
    main()
