"""Client of an external SGLang server: waits until it is up, checks that it fits the run, and calls it.

Raises the same errors as calls to a child process, because the server replaces an engine's child process.
"""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from relaxd.config import RolloutConfig
from relaxd.process.child import ChildError
from relaxd.rpc.errors import DeadlineExceeded, FailedPrecondition
from relaxd.waiting import waiting
from services.rollout.engines.model_folder import ModelFolder

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
"""Maximum time to open a connection to the server, in seconds."""
_MAX_REASON = 500
"""Maximum length of the server's reason in an error message, in characters."""


class ServerGone(ChildError):
    """Raised when the server doesn't answer or its answer breaks off."""


class ServerRefusal(FailedPrecondition):
    """Raised when the server answers with an HTTP status other than 200, or with an error event."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class SGLangClient:
    """Client of one server. Create and close it in a running event loop."""

    def __init__(self, url: str, key: str | None) -> None:
        """`key`: the server's API key, if it requires one."""
        self.url = url.rstrip("/")
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),  # a connection per request; the engine limits the requests
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )

    async def call(self, path: str, body: Mapping[str, Any] | None = None, *, timeout: float) -> dict[str, Any]:
        """POST `body` (GET without a body) and return the answer; {} if it is empty.

        Raises ServerGone, DeadlineExceeded after `timeout` seconds, and ServerRefusal with the server's reason.
        """
        deadline = aiohttp.ClientTimeout(total=timeout, sock_connect=min(CONNECT_SECONDS, timeout))
        method = "GET" if body is None else "POST"
        try:
            async with self._session.request(method, self.url + path, json=body, timeout=deadline) as response:
                text = await response.text()
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self.url} did not answer {path} within {timeout:g} s") from error
        except aiohttp.ClientError as error:
            raise self._gone(path, error) from error
        if response.status != 200:
            raise self._refusal(path, response.status, text)
        return self._parse(path, text) if text else {}

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """POST `body` and yield the events of the answer.

        It has no deadline: the caller must watch the server meanwhile. Raises ServerGone, also if the answer breaks
        off, and ServerRefusal, also in the middle of an answer.
        """
        deadline = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        try:
            async with self._session.post(self.url + path, json=body, timeout=deadline) as response:
                if response.status != 200:
                    text = await response.text()
                    raise self._refusal(path, response.status, text)
                async for line in _lines(response.content):
                    if not line.startswith(b"data:"):
                        continue
                    data = line[len(b"data:") :].strip()
                    if data == b"[DONE]":
                        return
                    event = self._parse(path, data)
                    if "error" in event:
                        raise self._refusal(path, 400, data.decode())
                    yield event
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._gone(path, error) from error
        raise ServerGone(f"{self.url} broke off its answer to {path}")

    async def close(self) -> None:
        """Close the HTTP session, which ends all calls."""
        await self._session.close()

    def _gone(self, path: str, error: Exception) -> ServerGone:
        return ServerGone(f"{self.url} does not answer {path}: {str(error) or type(error).__name__}")

    def _parse(self, path: str, text: str | bytes) -> dict[str, Any]:
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise ServerGone(f"{self.url} answers {path} unlike SGLang: {text[:100]!r}")
        return value

    def _refusal(self, path: str, status: int, text: str) -> ServerRefusal:
        """Return an error with the message that the server's answer contains under "error", "message" or "detail"."""
        try:
            message = json.loads(text)
        except ValueError:
            message = text
        for name in ("error", "message", "detail"):
            if isinstance(message, dict) and name in message:
                message = message[name]
        if status in (401, 403):
            message = f"{message} (is RELAXD_SGLANG_KEY the server's API key?)"
        reason = f"{self.url}{path} refused ({status}): {str(message)[:_MAX_REASON]}"
        return ServerRefusal(reason, status)


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of a streamed HTTP answer; lines may have any length."""
    pieces: list[bytes] = []
    async for received in content.iter_any():
        *complete, rest = received.split(b"\n")
        for line in complete:
            yield b"".join((*pieces, line))
            pieces.clear()
        pieces.append(rest)


CALL_SECONDS = 10.0
"""Deadline of each call in `connect`, in seconds."""
RETRY_SECONDS = 1.0
"""Interval between attempts to reach the server, in seconds."""
KEEP_MEMORY = {"torch_empty_cache": False}
"""Request body of /continue_generation: keeps torch's cached memory. Freeing it costs time, and fails on a CPU."""


class ServerMismatch(ChildError):
    """Raised if the server has another model than the run, or options that don't work with relaxd."""


@dataclass(frozen=True)
class ServerInfo:
    """Configuration of an external SGLang server, as far as relaxd needs it."""

    context: int
    """The server's --context-length, in tokens; 0 if unset, so that the model's limit applies."""
    device: str
    """Device of the model: "cpu" or "cuda"."""
    incremental: bool
    """True with --incremental-streaming-output: events contain only new tokens."""
    late_tokens: int
    """Number of tokens by which the server's reports lag: 1 if a token is reported during the next batch, else 0."""
    prefix_cache: bool
    """True if the server caches prompts for later requests."""
    tokenizer: bool
    """True if the server has a tokenizer, which stop strings and min_new_tokens need."""


async def connect(client: SGLangClient, model: ModelFolder, config: RolloutConfig) -> ServerInfo:
    """Wait until the server is up, check that it fits the run, and end any requests and pause of an earlier user.

    Waits without a deadline: the coordinator restarts a replica that waits longer than health.start_seconds. Raises
    ServerMismatch, which names the right options, and ServerRefusal.
    """
    info = await _wait_until_up(client)
    described = await client.call("/model_info", timeout=CALL_SECONDS)
    wrong = []
    if not described.get("is_generation"):
        wrong.append(f"its model {described.get('model_path')} does not generate")
    architectures = tuple(described.get("architectures") or ())
    if architectures != model.architectures:
        wrong.append(f"its model is {', '.join(architectures)}, the run's {', '.join(model.architectures)}")
    for option, right, why in (
        ("tp_size", config.tensor_parallel, " as rollout.tensor_parallel says"),
        ("dp_size", 1, ""),
        ("pp_size", 1, ""),
    ):
        if info.get(option) != right:
            wrong.append(f"its {option} is {info.get(option)}: it must be {right}{why}")
    if info.get("quantization"):
        wrong.append(f"its quantization is {info['quantization']}: it cannot receive the trainer's weights")
    if info.get("speculative_algorithm"):
        wrong.append("it uses speculative decoding, whose draft model relaxd cannot update")
    if not wrong:
        await _take_over(client)
        vocabulary = await _vocabulary(client)
        if vocabulary is not None and vocabulary != model.vocabulary:
            wrong.append(f"its model has {vocabulary} token ids, the run's {model.vocabulary}")
    if wrong:
        raise ServerMismatch(f"the server {client.url} does not fit the run: {'; '.join(wrong)}")
    if not info.get("incremental_streaming_output"):
        logger.warning(
            "%s was started without --incremental-streaming-output: tokens generated around an update may count as "
            "older than they are",
            client.url,
        )
    return ServerInfo(
        context=info.get("context_length") or 0,
        device=str(info.get("device")),
        incremental=bool(info.get("incremental_streaming_output")),
        late_tokens=0 if info.get("disable_overlap_schedule") else 1,
        prefix_cache=not info.get("disable_radix_cache"),
        tokenizer=not info.get("skip_tokenizer_init"),
    )


async def _wait_until_up(client: SGLangClient) -> dict[str, Any]:
    logged = ""
    with waiting("the SGLang server", on=client.url) as wait:
        while True:
            try:
                return await client.call("/server_info", timeout=CALL_SECONDS)
            except (ServerGone, DeadlineExceeded, ServerRefusal) as error:
                refused = isinstance(error, ServerRefusal) and error.status < 500
                if refused:
                    raise
                if str(error) != logged:
                    logged = str(error)
                    wait.reason = f"the SGLang server: {logged}"
                    logger.info("waiting for the server: %s", logged)
                await asyncio.sleep(RETRY_SECONDS)


async def _take_over(client: SGLangClient) -> None:
    """Abort all requests on the server and end its pause, which an earlier user may have left."""
    await client.call("/abort_request", {"abort_all": True}, timeout=CALL_SECONDS)
    await client.call("/continue_generation", KEEP_MEMORY, timeout=CALL_SECONDS)


async def _vocabulary(client: SGLangClient) -> int | None:
    """Return the size of the vocabulary; None if the server doesn't report it.

    No call returns it, but the server's refusal of a logit bias for token -1 names the range of ids.
    """
    body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "logit_bias": {"-1": 0.0}}}
    try:
        await client.call("/generate", body, timeout=CALL_SECONDS)
    except ServerRefusal as error:
        found = re.search(r"keys in \[0, (\d+)\]", str(error))
        if found:
            return int(found[1]) + 1
    logger.warning("%s does not report the size of its vocabulary", client.url)
    return None
