"""Environments of the tests in interfaces of other frameworks."""

from typing import Any


class CountingEnv:
    """As Relax's BaseInteractionEnv."""

    def __init__(self, label: str, step_reward: float) -> None:
        self.label, self.step_reward = label, step_reward

    def reset(self) -> tuple[dict[str, str], dict[str, Any]]:
        return {"obs_str": "not shown", "role": "user"}, {}

    def step(self, response_text: str) -> tuple[dict[str, str], bool, dict[str, Any]]:
        done = self.label in response_text
        return {"obs_str": f"heard {response_text}", "role": "tool"}, done, {"reward": self.step_reward, "why": "text"}

    def format_observation(self, observation: dict[str, str]) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "text", "text": observation["obs_str"]}]}

    def close(self) -> None:
        pass


def build_env(sample: Any = None, args: Any = None, **_: Any) -> CountingEnv:
    return CountingEnv(sample.label, args.step_reward)


class Corridor:
    """As a text environment of gymnasium."""

    def __init__(self, length: int = 2) -> None:
        self._left = length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return f"a corridor, seed {seed}, answer {(options or {})['answer']}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._left -= action == "forward"
        return f"{self._left} left", -0.1, self._left == 0, False, {"left": self._left}


def double(number: int) -> int:
    """Double a number."""
    return 2 * number


async def later(text: str) -> str:
    """Answer later."""
    return f"later {text}"


TOOLS = [double, later]
