"""Connecting to an external SGLang server: wait until it is up, and check that it fits the run."""

import asyncio
import logging
import re
from dataclasses import dataclass
from typing import Any

from relaxd.config import RolloutConfig
from relaxd.process.child import ChildError
from relaxd.rpc.errors import DeadlineExceeded
from relaxd.waiting import waiting
from services.rollout.engines.model_folder import ModelFolder
from services.rollout.engines.sglang_external.client import ServerGone, ServerRefusal, SGLangClient

CALL_SECONDS = 10.0
RETRY_SECONDS = 1.0
KEEP_MEMORY = {"torch_empty_cache": False}
"""Body of /continue_generation. Emptying the allocator's cache would cost time, and fails on a CPU."""

logger = logging.getLogger(__name__)


class ServerMismatch(ChildError):
    """The server has another model than the run, or options that don't work with relaxd."""


@dataclass(frozen=True)
class ServerInfo:
    """Configuration of a server."""

    context: int
    """Its --context-length; 0 when it is the model's own."""
    device: str
    """cpu or cuda."""
    incremental: bool
    """--incremental-streaming-output: events have only new tokens."""
    late_tokens: int
    """1 where its scheduler overlaps, so that it reports a token after the next batch has started; else 0."""
    prefix_cache: bool
    """True if it caches prompts for later requests."""
    tokenizer: bool
    """True if it has a tokenizer, which stop strings and min_new_tokens need."""


async def connect(client: SGLangClient, model: ModelFolder, config: RolloutConfig) -> ServerInfo:
    """Wait until the server is up, check that it fits, and end requests and a pause that an earlier user left.

    Waits without a deadline: the coordinator restarts a replica that waits longer than health.start_seconds. Raises
    ServerMismatch, which names the right options, and ServerRefusal when the server refuses the call.
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
    """End the requests and the pause that an earlier user may have left."""
    await client.call("/abort_request", {"abort_all": True}, timeout=CALL_SECONDS)
    await client.call("/continue_generation", KEEP_MEMORY, timeout=CALL_SECONDS)


async def _vocabulary(client: SGLangClient) -> int | None:
    """Return the size of the vocabulary; None if the server doesn't tell.

    No call returns it, but the refusal of a harmless bias for token -1 names the range of ids.
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
