"""Reward for conversations: the sum of the environment's rewards."""

from relaxd.rewards.interface import RewardInput


def environment(sample: RewardInput) -> float:
    """Sum of the rewards that the run's environment gave in the conversation, or its program's reward.

    Raises:
        ValueError: the run has no environment.
    """
    if sample.environment_reward is None:
        raise ValueError("the reward environment needs conversations: set agent.environment or agent.command")
    return sample.environment_reward
