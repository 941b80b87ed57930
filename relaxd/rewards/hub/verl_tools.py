"""The reward for single-turn function calling with verl's tools: executes an answer's calls, and scores the tools'
results."""

from contextlib import suppress
from pathlib import Path

from relaxd.envs.environment import calls_in
from relaxd.envs.verl_tools import CALL_SECONDS, BadToolResult, ToolFailure, VerlTools, load_tools, tools_kwargs
from relaxd.rewards.interface import BadRewardError, RewardInput


class VerlToolsReward:
    """Reward of verl's tools for the calls in a single-turn reply: the model doesn't see the tools' answers.

    The reward is the sum of the calls' step rewards and of the tools' final calc_reward. Parts: calls: number of calls,
    and errors: number of calls of unknown tools, with bad JSON, or with a failing tool. Needs the package PyYAML.
    """

    def __init__(self, config: str, max_calls: int = 0, call_seconds: float = CALL_SECONDS) -> None:
        """Create verl's tools from their configuration file.

        Args:
            config: verl's file of tools (YAML).
            max_calls: maximum number of a reply's calls that are executed; 0: all.
            call_seconds: maximum seconds of each call. Only calls of async tools can be stopped; a tool that blocks
                runs until reward.timeout_seconds, which should be longer, ends the process.

        Raises ValueError: a setting or the file is wrong, or a tool can't be created.
        """
        if max_calls < 0 or not call_seconds > 0:
            raise ValueError(f"max_calls is {max_calls} and call_seconds {call_seconds}: they must be >= 0 and > 0")
        self._tools = load_tools(Path(config).expanduser())
        self._max_calls = max_calls
        self._call_seconds = call_seconds

    async def __call__(self, sample: RewardInput) -> dict[str, float]:
        """Execute a reply's tool calls, and score their results.

        Raises ValueError for invalid tools_kwargs in the metadata, ToolFailure and BadRewardError.
        """
        conversation = VerlTools(self._tools, tools_kwargs(sample.metadata), self._call_seconds, self._max_calls)
        try:
            await conversation.reset()
            _, info = await conversation.execute(calls_in(sample.response))
            reward = info["reward"] + await conversation.final_reward()
        except BaseException as error:
            with suppress(ToolFailure):  # the first failure says more
                await conversation.close()
            if isinstance(error, BadToolResult):
                raise BadRewardError(str(error)) from error
            raise
        await conversation.close()
        return {"reward": reward, "calls": info["calls"], "errors": info["errors"]}
