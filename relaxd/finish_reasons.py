"""The reasons why samples end."""

from collections.abc import Mapping

MEANINGS: Mapping[str, str] = {
    "stop": "the model ended its answer, or wrote a stop string",
    "length": "an answer had rollout.max_new_tokens tokens, or a message of a conversation agent.turn_tokens",
    "abort": "it was cancelled",
    "budget": "a conversation had used up rollout.max_new_tokens",
    "turns": "a conversation had agent.max_turns messages of the model",
    "env_done": "the environment ended the conversation, or its program ended with exit code 0",
    "env_failed": "the environment raised or took too long, or the program failed",
    "timeout": "a conversation took longer than agent.conversation_seconds",
}
"""Meaning of each reason; the names are those of the FinishReason enum in sample.proto, in lower case."""
ENV_FAILED = "env_failed"
TRUNCATED = frozenset({"length", "budget", "turns", "timeout"})
"""Finish reasons of samples that a limit of the run cut off."""
