"""Stored answers of an evaluation, and their metrics."""

import logging
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from relaxd.evaluation.estimates import interval, maj_at_k, pass_at_k
from relaxd.evaluation.sets import ResolvedSet
from relaxd.reasons import ENV_FAILED, TRUNCATED
from relaxd.rewards.logged import part_metrics

logger = logging.getLogger(__name__)

_ESTIMATE = re.compile(r"(pass|maj)_at_(\d+)(_low|_high)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredAnswer:
    """The numbers of one scored answer. Its text is only in the evaluation's files."""

    index: int
    """Index of its prompt."""
    sample: int
    """Number of the answer among the prompt's answers."""
    reward: float
    """Reward of the answer; 0 if it couldn't be scored."""
    length: int
    """Number of tokens."""
    finish_reason: str
    """Finish reason, by relaxd.reasons."""
    vote: str = ""
    """The answer's vote in maj@k; "" for none."""
    parts: dict[str, float] = field(default_factory=dict)
    error: str = ""
    """Reason why the answer couldn't be scored."""
    turns: int = 0
    """Number of the model's messages, in a conversation."""

    def to_json(self) -> dict[str, Any]:
        """Return the line of an evaluation's file, without the texts."""
        names = ["index", "sample", "reward", "parts", "error", "length", "finish_reason"]
        names += ["turns"] if self.turns else []
        return {name: getattr(self, name) for name in names}


def summarise_set(one: ResolvedSet, answers: Sequence[ScoredAnswer]) -> dict[str, float]:
    """Return the metrics of a set, whose names begin with its prefix.

    Means over all answers: reward, response_length (tokens) and truncated_share. Each part of the reward, and each
    number that it logs (user/<name>), is a mean over the answers that have it. Counts: prompts, and unscored: answers
    that the reward couldn't score, whose reward counts as 0. Conversations also have turns_mean, and
    environment_failed: unscored answers whose environment failed. pass_at_K and maj_at_K (if there are several answers
    to a prompt) are means over prompts, with the ends of their 95 % confidence interval in _low and _high. Empty
    without answers.
    """
    if not answers:
        return {}
    count = len(answers)
    scored = [answer for answer in answers if not answer.error]
    parts: dict[str, list[float]] = defaultdict(list)
    for answer in scored:
        for name, value in answer.parts.items():
            parts[name].append(value)
    if len(scored) < count:
        first = next(answer.error for answer in answers if answer.error)
        logger.warning("%s: %d of %d answers could not be scored: %s", one.name, count - len(scored), count, first)
    by_prompt: dict[int, list[ScoredAnswer]] = defaultdict(list)
    for answer in answers:
        by_prompt[answer.index].append(answer)
    metrics = part_metrics(parts) | {
        "reward": sum(answer.reward for answer in scored) / count,
        "response_length": sum(answer.length for answer in answers) / count,
        "truncated_share": sum(answer.finish_reason in TRUNCATED for answer in answers) / count,
        "prompts": float(len(by_prompt)),
        "unscored": float(count - len(scored)),
    }
    if one.agent is not None:
        metrics["turns_mean"] = sum(answer.turns for answer in answers) / count
        metrics["environment_failed"] = float(sum(answer.finish_reason == ENV_FAILED for answer in answers))
    for k in one.sizes:
        metrics |= _estimate(f"pass_at_{k}", [_pass(one, group, k) for group in by_prompt.values()], one)
        if one.samples_per_prompt > 1:
            metrics |= _estimate(f"maj_at_{k}", [_maj(one, group, k) for group in by_prompt.values()], one)
    return {f"{one.prefix}{name}": value for name, value in metrics.items()}


def _estimate(name: str, values: Sequence[float], one: ResolvedSet) -> dict[str, float]:
    low, high = interval(values, one.samples_per_prompt)
    return {name: sum(values) / len(values), f"{name}_low": low, f"{name}_high": high}


def _right(one: ResolvedSet, answer: ScoredAnswer) -> bool:
    return not answer.error and answer.reward >= one.right_from


def _pass(one: ResolvedSet, group: Sequence[ScoredAnswer], k: int) -> float:
    return pass_at_k(len(group), sum(_right(one, answer) for answer in group), k)


def _maj(one: ResolvedSet, group: Sequence[ScoredAnswer], k: int) -> float:
    group = sorted(group, key=lambda answer: answer.sample)  # the draws are the same whatever ended first
    votes, right = [answer.vote for answer in group], [_right(one, answer) for answer in group]
    return maj_at_k(votes, right, k, seed=group[0].index)


def is_estimate(name: str) -> bool:
    """Return True if a metric's name, without its prefix, names pass@k, maj@k or an end of their interval."""
    return _ESTIMATE.fullmatch(name) is not None


def is_end(name: str) -> bool:
    """Return True if a metric's name, with or without prefix, names an end of an interval."""
    return re.search(r"(?:pass|maj)_at_\d+_(?:low|high)$", name) is not None


def shown_name(name: str) -> str:
    """Return the display name of a metric: "pass_at_4" becomes pass@4."""
    found = _ESTIMATE.fullmatch(name)
    return f"{found[1]}@{found[2]}" if found and not found[3] else name
