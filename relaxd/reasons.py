"""Reasons why groups are dropped and why samples end, and warnings of large shares of drops."""

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum


class DropReason(StrEnum):
    """Reason why a group was dropped. Names and meanings are those of the DropReason enum in group.proto."""

    ZERO_VARIANCE = "zero_variance"
    BAD_PROMPT = "bad_prompt"
    PROMPT_TOO_LONG = "prompt_too_long"
    TOO_LARGE = "too_large"
    REWARD_FAILED = "reward_failed"
    MALFORMED = "malformed"
    TOO_LONG = "too_long"
    STALE = "stale"
    NON_FINITE_GRADIENTS = "non_finite_gradients"
    POISON = "poison"
    DAMAGED = "damaged"
    MEMORY = "memory"
    RUN_ENDED = "run_ended"
    RUN_FAILED = "run_failed"
    NO_LOGPROBS = "no_logprobs"
    FILTERED = "filtered"
    FILTER_FAILED = "filter_failed"
    PAYLOAD_LOST = "payload_lost"
    NO_VALUES = "no_values"
    ALGORITHM_FAILED = "algorithm_failed"
    ALL_TRUNCATED = "all_truncated"
    ENVIRONMENT_FAILED = "environment_failed"
    WRONG_WEIGHTS = "wrong_weights"


MIN_GROUPS = 16
"""Minimum number of published groups before shares of dropped groups cause warnings."""
WARN_SHARE = 0.1

DROP_MEANINGS: dict[str, str] = {
    DropReason.ZERO_VARIANCE: "all answers to a prompt got the same reward, so there is nothing to learn from them: "
    "is the task too easy or too hard? (data.curriculum leaves such prompts out)",
    DropReason.ALL_TRUNCATED: "all answers to a prompt were cut off, and algorithm.mask_truncated learns nothing from "
    "such answers: raise rollout.max_new_tokens",
    DropReason.REWARD_FAILED: "the reward raised, hung or returned no finite number: `relaxd reward test` shows how",
    DropReason.ENVIRONMENT_FAILED: "the environment raised, took longer than agent.call_seconds, or can't begin with "
    "their prompts, or the program (agent.command) failed: their details and the logs of the agent service say where",
    DropReason.TOO_LONG: "answers are longer than the trainer's micro-batch takes (trainer.micro_batch_tokens)",
    DropReason.STALE: "answers were older than board.max_staleness allows: engines are slower than the trainer",
    DropReason.NON_FINITE_GRADIENTS: "their gradients were not finite",
    DropReason.POISON: "they were delivered board.max_deliveries times without success: see the services' logs",
    DropReason.BAD_PROMPT: "the engine refused the prompt",
    DropReason.PROMPT_TOO_LONG: "the prompt is longer than the engine takes",
    DropReason.TOO_LARGE: "they exceed board.max_group_bytes",
    DropReason.MALFORMED: "their columns are not as a stage should write them",
    DropReason.NO_LOGPROBS: "the teacher or the reference gave some of their tokens no finite log-prob: see its logs",
    DropReason.NO_VALUES: "the critic service gave some of their tokens no finite value: see its logs",
    DropReason.ALGORITHM_FAILED: "the algorithm raised on them, or returned what it must not: their details name class "
    "and method",
    DropReason.FILTERED: "the run's own filter (data.curriculum.filter) keeps them from being trained on",
    DropReason.FILTER_FAILED: "the run's own filter (data.curriculum.filter) failed on them",
    DropReason.WRONG_WEIGHTS: "engines wrote them with weights that the trainer has never sent, or that nobody "
    "knows: their details name engine and version (docs/weights.md); their prompts are tried again",
    DropReason.DAMAGED: "their entries in Redis could not be read",
    DropReason.MEMORY: "Redis was full; their prompts are tried again",
    DropReason.PAYLOAD_LOST: "some of their columns are gone from Redis; their prompts are tried again: does another "
    "program delete keys, or its maxmemory-policy evict them?",
}
"""Meaning, for warnings, of each reason for dropping groups. Reasons that aren't here, such as a run's end, cause no
warning."""


def drop_warnings(dropped_by_reason: Mapping[str, int], published: int) -> list[str]:
    """Return a warning for each reason that dropped at least a tenth of the published groups, the most frequent
    first."""
    if published < MIN_GROUPS:
        return []
    return [
        f"{count / published:.0%} of the groups were dropped as {reason}: {DROP_MEANINGS[reason]}"
        for reason, count in sorted(dropped_by_reason.items(), key=lambda item: -item[1])
        if reason in DROP_MEANINGS and count >= WARN_SHARE * published
    ]


def most_frequent(reasons: Iterable[str]) -> str:
    """Return a text of the most frequent reason for dropping groups and its meaning; "" if no reason has a meaning."""
    for reason, _ in Counter(reason for reason in reasons if reason in DROP_MEANINGS).most_common(1):
        return f"{reason}: {DROP_MEANINGS[reason]}"
    return ""


class DropWatch:
    """Warns when the share of groups that one reason dropped is high, and again whenever this share has doubled."""

    def __init__(self, dropped_before: Mapping[str, int] | None = None, published_before: int = 0) -> None:
        """Create a watch that ignores the given numbers of groups that were dropped and published before."""
        self._dropped_before = Counter(dropped_before)
        self._published_before = published_before
        self._told: dict[str, float] = {}

    def observe(self, dropped_by_reason: Mapping[str, int], published: int) -> list[str]:
        """Return new warnings about dropped groups, given the numbers of all dropped and published groups so far."""
        published -= self._published_before
        new = {
            reason: count
            for reason, count in (Counter(dropped_by_reason) - self._dropped_before).items()
            if count / max(1, published) >= 2 * self._told.get(reason, WARN_SHARE / 2)
        }
        lines = drop_warnings(new, published)
        if lines:
            self._told |= {reason: count / published for reason, count in new.items()}
        return lines


FINISH_MEANINGS: Mapping[str, str] = {
    "stop": "the model ended its answer, or wrote a stop string",
    "length": "an answer had rollout.max_new_tokens tokens, or a message of a conversation agent.turn_tokens",
    "abort": "it was cancelled",
    "budget": "a conversation had used up rollout.max_new_tokens",
    "turns": "a conversation had agent.max_turns messages of the model",
    "env_done": "the environment ended the conversation, or its program ended with exit code 0",
    "env_failed": "the environment raised or took too long, or the program failed",
    "timeout": "a conversation took longer than agent.conversation_seconds",
}
"""Meaning of each finish reason of samples. Names are those of the FinishReason enum in sample.proto, in lower case."""
ENV_FAILED = "env_failed"
TRUNCATED = frozenset({"length", "budget", "turns", "timeout"})
"""Finish reasons of samples that a limit of the run cut off."""
