"""Adapter for environments of an OpenEnv server."""

import json
from collections.abc import Mapping
from typing import Any

from relaxd.envs.environment import BadEnvironmentError, Environment, Reply, Sample, Step
from relaxd.seeds import SEEDS

try:
    from openenv.core.generic_client import GenericEnvClient
except ImportError as error:
    raise ImportError(f"{error}: install openenv for the interpreter that agent.python names") from error


class OpenEnvServer(Environment):
    """A conversation with an OpenEnv server. The text of each message of the model is an action."""

    def __init__(
        self,
        url: str,
        *,
        action_key: str = "message",
        observation_key: str = "",
        action: Mapping[str, Any] | None = None,
        reset: Mapping[str, Any] | None = None,
    ) -> None:
        """Store the settings, without connecting to the server.

        Args:
            url: the server's address, such as "http://host:8000".
            action_key: field of an action that gets the text of the model's message.
            observation_key: field of an observation that the model sees; empty: the whole observation, as JSON.
            action: other fields of each action.
            reset: arguments of reset besides the seed.
        """
        self._client = GenericEnvClient(base_url=url, message_timeout_s=None)  # agent.call_seconds is the limit
        self._url = url
        self._action_key, self._observation_key = action_key, observation_key
        self._action, self._reset = dict(action or {}), dict(reset or {})

    async def open(self, sample: Sample) -> str:
        """Start a session on the server with the group's seed. Returns the first observation, which follows the
        prompt."""
        try:
            await self._client.connect()
        except (OSError, TimeoutError) as error:
            raise BadEnvironmentError(f"the OpenEnv server {self._url} can't be reached: {error}") from error
        return self._text((await self._client.reset(seed=sample.seed % SEEDS, **self._reset)).observation)

    async def step(self, reply: Reply) -> Step:
        """Send the text of the model's message to the server as an action."""
        result = await self._client.step({**self._action, self._action_key: reply.text})
        return Step(self._text(result.observation), result.reward or 0.0, bool(result.done))

    async def close(self) -> None:
        """End the session on the server."""
        await self._client.close()

    def _text(self, observation: Mapping[str, Any]) -> str:
        if not self._observation_key:
            return json.dumps(observation, ensure_ascii=False)
        if self._observation_key not in observation:
            there = ", ".join(observation)
            raise BadEnvironmentError(f'observation_key is "{self._observation_key}": the observation has {there}')
        return str(observation[self._observation_key])
