"""Requests to a server that answers unlike SGLang."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tokenizers import Tokenizer

from services.rollout.engines.model_folder import ModelFolder
from services.rollout.engines.request_types import Output, Request, RequestFailed, Sampling, Version
from services.rollout.engines.sglang_external.external_requests import ExternalRequests
from services.rollout.engines.sglang_external.server_client import ServerInfo, SGLangClient
from tests.kit.tokenizer import write_tokenizer

INFO = ServerInfo(context=0, device="cpu", incremental=True, late_tokens=0, prefix_cache=False, tokenizer=True)


class Server:
    """Answers every request with these events, and remembers what was aborted."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.aborted: asyncio.Queue[str] = asyncio.Queue()
        self.url = ""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for event in self.events:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.put_nowait((await request.json())["rid"])
        return web.Response()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server, app = Server(), web.Application()
    app.add_routes([web.post("/generate", server.generate), web.post("/abort_request", server.abort)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    await runner.cleanup()


def event(sample: int, tokens: list[int], finish: str | None = None) -> dict[str, Any]:
    meta = {
        "weight_version": "1:3",
        "finish_reason": {"type": finish} if finish else None,
        "output_token_logprobs": [[-1.0, token, None] for token in tokens],
    }
    return {"index": sample, "output_ids": tokens, "meta_info": meta}


async def test_an_answer_that_ends_before_its_samples_is_an_error(server: Server, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(write_tokenizer(tmp_path / "model") / "tokenizer.json"))
    model = ModelFolder(vocabulary=1000, context=0, architectures=(), end_ids=(2,), tokenizer=tokenizer)
    client, gone = SGLangClient(server.url, None), list[str]()

    async def is_open() -> Version:
        return Version(1, 3)

    requests = ExternalRequests(client, INFO, model, is_open, gone.append)

    async def generate(name: str) -> list[Output]:
        request = Request(name, (5, 6), 3, Sampling(max_new_tokens=8), stream=True)
        async with asyncio.timeout(10):
            return [output async for output in requests.generate(request)]

    server.events = [event(0, [7, 8]), event(1, [7], "stop"), event(0, [9])]
    with pytest.raises(RequestFailed) as failed:
        await generate("short")
    assert str(failed.value) == (
        f"{server.url} ended its answer to /generate before all samples had ended: it has sent 3 tokens of sample 0, "
        "0 tokens of sample 2 without a finish_reason"
    )
    async with asyncio.timeout(10):
        assert sorted([(await server.aborted.get())[-4:] for _ in range(2)]) == ["0000", "0002"]

    server.events = [event(sample, [7], "stop") for sample in range(3)]
    assert [output.finish_reason for output in await generate("whole")] == ["stop"] * 3
    assert not gone
    await requests.close()
    await client.close()
