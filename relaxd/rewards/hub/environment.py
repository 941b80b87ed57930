"""Reward of conversations: what the environment gave."""

from relaxd.rewards.interface import RewardInput


def environment(sample: RewardInput) -> float:
    """Sum of the rewards that the run's environment gave in the conversation.

    Raises:
        ValueError: the run has no environment.
    """
    if sample.environment_reward is None:
        raise ValueError("the reward environment needs a run with an environment: set agent.environment")
    return sample.environment_reward
