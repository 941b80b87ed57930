"""Adapter for environments of GEM (gem-llm), which are chosen by name."""

from typing import Any

from relaxd.envs.environment import Sample, Step
from relaxd.envs.loading import GymEnvironment
from relaxd.seeds import SEEDS, seeding

try:
    import gem
except ImportError as error:
    raise ImportError(f"{error}: install gem-llm for the interpreter that agent.python names") from error


class GemEnvironment(GymEnvironment):
    """A conversation with an environment of GEM, gem.make(env_id). The text of each message of the model is an
    action."""

    def __init__(self, env_id: str, **settings: Any) -> None:
        """Create the GEM environment `env_id` with `settings` as arguments of gem.make. Raises ValueError if it is
        unknown."""
        super().__init__(gem.make(env_id, **settings))

    def open(self, sample: Sample) -> str:
        """Reset the environment with the group's seed. Returns its first observation, which follows the prompt."""
        with seeding:
            observation, info = self._environment.reset(seed=sample.seed % SEEDS)
        return _with_suffix(observation, info)

    def step(self, reply: Any) -> Step:
        """Give the text of the model's message to the environment as an action."""
        observation, reward, terminated, truncated, info = self._environment.step(reply.text)
        return Step(_with_suffix(observation, info), reward, bool(terminated or truncated), info)


def _with_suffix(observation: str, info: dict[str, Any]) -> str:
    """Return an observation with the suffix that GEM's wrappers add."""
    return f"{observation}\n{suffix}" if (suffix := info.get("suffix")) else observation
