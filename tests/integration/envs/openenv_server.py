"""An OpenEnv server of the tests: `python -m tests.integration.envs.openenv_server PORT`, with a sum to do."""

import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Said(Action):
    message: str


class Told(Observation):
    prompt: str


class Sums(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Told:
        self._answer = str(2 + (seed or 0))
        return Told(prompt=f"What is 2 + {seed}?", done=False, reward=None)

    def step(self, action: Said, timeout_s: float | None = None, **kwargs: Any) -> Told:
        right = self._answer in action.message
        return Told(prompt="Yes." if right else "No, again.", done=right, reward=1.0 if right else -0.1)

    @property
    def state(self) -> State:
        return State(episode_id="e", step_count=0)


if __name__ == "__main__":
    app = create_app(Sums, Said, Told, env_name="sums", max_concurrent_envs=4)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
