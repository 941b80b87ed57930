"""Meeting an external SGLang server: whether it is up, and whether it fits the run."""

import asyncio
import logging
import re
from dataclasses import dataclass
from typing import Any

from relaxd.config import RolloutConfig
from relaxd.rpc.child import ChildError, ChildRequestError, ChildTimeout
from services.rollout.model_folder import ModelFolder
from services.rollout.sglang_http import ServerGone, SGLangClient

ASK_SECONDS = 10.0
RETRY_SECONDS = 1.0
KEEP_MEMORY = {"torch_empty_cache": False}
"""With /continue_generation: emptying the allocator's cache each time costs time, and fails on a CPU."""

logger = logging.getLogger(__name__)


class ServerMismatch(ChildError):
    """The server has another model than the run, or is set up in a way that cannot work."""


@dataclass(frozen=True)
class ServerFacts:
    """How a server is set up."""

    context: int
    """Its --context-length; 0 when that is the model's own."""
    device: str
    """cpu or cuda."""
    incremental: bool
    """--incremental-streaming-output: events bring new tokens only."""
    late_tokens: int
    """1 where its scheduler overlaps, and so reports a token after the batch that follows has begun."""
    prefix_cache: bool
    """Whether prompts are kept for later requests."""


async def connect(client: SGLangClient, model: ModelFolder, config: RolloutConfig) -> ServerFacts:
    """Wait until the server is up, check that it fits, and end what an earlier user left: requests and a pause.

    A server that isn't up is waited for; the coordinator restarts a replica that waits for health.start_seconds. Raises
    ServerMismatch, which says what would be right; ChildRequestError when the server refuses to be asked.
    """
    info = await _wait_until_up(client)
    described = await client.call("/model_info", timeout=ASK_SECONDS)
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
        wrong.append(f"its quantization is {info['quantization']}: it cannot take the trainer's weights")
    if info.get("speculative_algorithm"):
        wrong.append("it uses speculative decoding, whose draft model would keep its weights")
    if not wrong:
        await _take_over(client)
        vocabulary = await _vocabulary(client)
        if vocabulary is not None and vocabulary != model.vocabulary:
            wrong.append(f"its model has {vocabulary} token ids, the run's {model.vocabulary}")
    if wrong:
        raise ServerMismatch(f"the server {client.url} does not fit the run: {'; '.join(wrong)}")
    if not info.get("incremental_streaming_output"):
        logger.warning(
            "%s was started without --incremental-streaming-output: tokens that are generated around an update count "
            "as older than they may be",
            client.url,
        )
    return ServerFacts(
        context=info.get("context_length") or 0,
        device=str(info.get("device")),
        incremental=bool(info.get("incremental_streaming_output")),
        late_tokens=0 if info.get("disable_overlap_schedule") else 1,
        prefix_cache=not info.get("disable_radix_cache"),
    )


async def _wait_until_up(client: SGLangClient) -> dict[str, Any]:
    told = ""
    while True:
        try:
            return await client.call("/server_info", timeout=ASK_SECONDS)
        except (ServerGone, ChildTimeout, ChildRequestError) as error:
            refused = isinstance(error, ChildRequestError) and error.details["status"] < 500
            if refused:
                raise
            if str(error) != told:
                told = str(error)
                logger.info("waiting for the server: %s", told)
            await asyncio.sleep(RETRY_SECONDS)


async def _take_over(client: SGLangClient) -> None:
    """Whoever used the server before may have died during a pause, and left requests behind."""
    await client.call("/abort_request", {"abort_all": True}, timeout=ASK_SECONDS)
    await client.call("/continue_generation", KEEP_MEMORY, timeout=ASK_SECONDS)


async def _vocabulary(client: SGLangClient) -> int | None:
    """How many token ids the server's model has; None if it doesn't say.

    No call tells it, but the refusal of a bias for token -1, which can do no harm, names the ids that there are.
    """
    body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "logit_bias": {"-1": 0.0}}}
    try:
        await client.call("/generate", body, timeout=ASK_SECONDS)
    except ChildRequestError as error:
        found = re.search(r"keys in \[0, (\d+)\]", str(error))
        if found:
            return int(found[1]) + 1
    logger.warning("%s does not tell how many token ids its model has", client.url)
    return None
