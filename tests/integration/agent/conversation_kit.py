"""Conversations with scripted engines: their runs, and the services of environments."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from relaxd.config import RunConfig
from relaxd.data.examples import Example
from relaxd.data.tokenizer import PromptTokenizer
from relaxd.envs.host import EnvironmentHandlers
from relaxd.envs.loading import load_environment
from relaxd.rpc.server import start_server
from relaxd.v1 import environment_pb2_grpc
from services.agent.conversation import Conversation, EnvironmentConversations
from services.agent.engines import RunEngines
from services.agent.environments import Environments
from services.agent.model_turns import PolicyModel
from tests.integration.agent.scripted_engines import STOP, encode
from tests.kit.models import byte_tokenizer

ECHO = "tests.integration.envs.conversations:Echo"
ASKED = Example([{"role": "user", "content": "hello"}], "42", {"level": 1})


def config_of(environment: str, **agent: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"steps": 1},
            "model": {"path": "none"},
            "data": {"source": "addition"},
            "reward": {"name": "environment"},
            "rollout": {"samples_per_prompt": 2},
            "agent": {"environment": environment, "call_seconds": 5, **agent},
            "eval": {"prompts": 0},
        }
    )


@asynccontextmanager
async def talks(
    config: RunConfig, tokenizer: PromptTokenizer, engines: RunEngines
) -> AsyncIterator[EnvironmentConversations]:
    environments = Environments(config.agent)
    await environments.start()
    try:
        yield EnvironmentConversations(PolicyModel(config, tokenizer, None, engines), environments)
    finally:
        await environments.close()


@asynccontextmanager
async def service_of(name: str, settings: Mapping[str, Any] | None = None) -> AsyncIterator[str]:
    """Serve an environment's class at an address, as a user's service does."""
    add = environment_pb2_grpc.add_EnvironmentServicer_to_server
    handlers = EnvironmentHandlers(load_environment(name, settings or {}))
    server = await start_server([(add, handlers, "relaxd.v1.Environment")])
    try:
        yield f"grpc://127.0.0.1:{server.port}"
    finally:
        await server.stop()


def check_tokens(held: Conversation, *replies: str) -> None:
    """Check that the model's tokens are those of the replies, each once, and have the engines' log-probs."""
    own = held.sequences[0].loss_mask == 1
    expected = [token for reply in replies for token in (*encode(reply), STOP)]
    assert held.sequences[0].tokens[own].tolist() == expected
    assert held.sequences[0].logprobs[own].tolist() == [-float(token) for token in expected]
    turn = "\n<|im_start|>user\nyou said {}<|im_end|>\n<|im_start|>assistant\n"
    observed = "".join(turn.format(reply) for reply in replies[:-1])
    after_prompt = np.flatnonzero(own)[0]
    written = byte_tokenizer().decode(held.sequences[0].tokens[after_prompt:][~own[after_prompt:]])
    assert written == observed
