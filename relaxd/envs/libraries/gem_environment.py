"""Environments of GEM (gem-llm), by their names."""

from typing import Any

from relaxd.envs.environment import Sample, Step
from relaxd.envs.loading import GymEnvironment
from relaxd.seeds import SEEDS, seeding

try:
    import gem
except ImportError as error:
    raise ImportError(f"{error}: install gem-llm for the interpreter that agent.python names") from error


class GemEnvironment(GymEnvironment):
    """A conversation with gem.make(env_id). An action is the text of the model's message."""

    def __init__(self, env_id: str, **settings: Any) -> None:
        """Raises ValueError for an unknown environment. `settings`: arguments of gem.make."""
        super().__init__(gem.make(env_id, **settings))

    def open(self, sample: Sample) -> str:
        """Reset the environment with the group's seed. Its first observation follows the prompt."""
        with seeding:
            observation, info = self._environment.reset(seed=sample.seed % SEEDS)
        return _with_suffix(observation, info)

    def step(self, reply: Any) -> Step:
        """Take the text of a message as an action."""
        observation, reward, terminated, truncated, info = self._environment.step(reply.text)
        return Step(_with_suffix(observation, info), reward, bool(terminated or truncated), info)


def _with_suffix(observation: str, info: dict[str, Any]) -> str:
    """Return an observation with the suffix that GEM's wrappers add."""
    return f"{observation}\n{suffix}" if (suffix := info.get("suffix")) else observation
