"""Metrics of scored answers: means, pass@k, maj@k, and confidence intervals of means over prompts."""

import logging
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from relaxd.evaluation.sets import ResolvedSet
from relaxd.media.messages import tagged
from relaxd.reasons import ENV_FAILED, TRUNCATED
from relaxd.rewards.logged import part_metrics
from relaxd.rewards.mathematics.normal_forms import last_boxed

Z95 = 1.959963984540054
"""Quantile of the normal distribution for a two-sided 95 % interval."""


def pass_at_k(n: int, right: int, k: int) -> float:
    """Return the unbiased estimate of pass@k of one prompt: 1 - C(n - right, k) / C(n, k).

    Equation 1 of Chen et al. 2021 (arXiv 2107.03374), as a product, which doesn't overflow.

    Args:
        n: number of answers to the prompt.
        right: number of right answers.
        k: number of answers to draw, at most n.

    Raises ValueError: k is not 1 to n, or right not 0 to n.
    """
    if not 1 <= k <= n or not 0 <= right <= n:
        raise ValueError(f"k = {k} must be 1 to n = {n}, and right = {right} 0 to n")
    if n - right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / place for place in range(n - right + 1, n + 1))


def interval(values: Sequence[float], samples_per_prompt: int = 1) -> tuple[float, float]:
    """Return the 95 % confidence interval of the mean of values from 0 to 1, one for each prompt.

    It is Wilson's score interval (Wilson 1927) with the effective number of samples, mean x (1 - mean) / variance of
    the mean (Korn and Graubard 1998, without the correction of degrees of freedom): prompts, not answers, are
    independent. With one answer per prompt it equals Wilson's interval for one prompt less. Unlike a bootstrap
    interval, it has a width even if all values are 0 or all are 1.

    Args:
        values: at least one.
        samples_per_prompt: answers behind each value. The effective number is at most all answers.

    Raises ValueError: there are no values.
    """
    count = len(values)
    if not count:
        raise ValueError("an interval needs at least one value")
    mean = min(max(math.fsum(values) / count, 0.0), 1.0)
    effective = float(count)
    if count > 1 and 0.0 < mean < 1.0:
        variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count
        most = float(count * samples_per_prompt)
        effective = min(mean * (1 - mean) / variance, most) if variance > 0 else most
    share = Z95**2 / effective
    middle = (mean + share / 2) / (1 + share)
    half = Z95 / (1 + share) * math.sqrt(mean * (1 - mean) / effective + share / (4 * effective))
    return max(0.0, min(middle - half, mean)), min(1.0, max(middle + half, mean))


DRAWS = 200
"""Number of times that k of a prompt's n replies are drawn at random for maj@k; k = n needs only one draw."""
LONGEST_VOTE = 200
"""Maximum length of a vote in maj@k, in characters. Longer answers would hardly agree."""

_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?")
_ANSWER = re.compile(r"answer\s*(?:is\b|:|=)\s*:?", re.IGNORECASE)


def vote_of(reply: str) -> str:
    r"""Return a reply's vote: its final answer in lower case without blanks. "" is no vote.

    The final answer is the content of the last \boxed{...}, else of the last <answer> tag, else the text after
    "answer:" or "answer is" in the last nonblank line, else the last number of that line, else that line.
    """
    found = last_boxed(reply)
    if found is None:
        tags = tagged(reply)
        found = tags[-1] if tags else _in_last_line(reply)
    vote = re.sub(r"\s+", "", found).strip(".,;:!?$*").casefold()
    if _NUMBER.fullmatch(vote):
        vote = vote.replace(",", "")
        vote = vote.rstrip("0").rstrip(".") if "." in vote else vote
    return vote if len(vote) <= LONGEST_VOTE else ""


def _in_last_line(reply: str) -> str:
    line = next((line for line in reversed(reply.splitlines()) if line.strip()), "")
    if marks := list(_ANSWER.finditer(line)):
        return line[marks[-1].end() :]
    numbers = _NUMBER.findall(line)
    return numbers[-1] if numbers else line


def maj_at_k(votes: Sequence[str], right: Sequence[bool], k: int, seed: int) -> float:
    """Return the probability that the majority vote of k replies to a prompt is right.

    Ties are broken at random. An answer counts as right by the share of right replies among its votes, which is 0 or 1
    if the reward depends only on the answer. Without any vote the result is 0. For k < n it is the mean over DRAWS
    seeded draws of k replies.

    Args:
        votes: vote of each reply; "" is no vote.
        right: True for each right reply, parallel to votes.
        k: number of replies that vote, at most len(votes).
        seed: seed of the draws.

    Raises ValueError: k is not 1 to the number of replies.
    """
    n = len(votes)
    if not 1 <= k <= n or len(right) != n:
        raise ValueError(f"k = {k} must be 1 to the number of replies, {n}, and right have one for each vote")
    cast = Counter(filter(None, votes))
    if not cast:
        return 0.0
    places = {vote: place for place, vote in enumerate(cast)}
    won = Counter(vote for vote, is_right in zip(votes, right, strict=True) if is_right)
    shares = np.array([won[vote] / count for vote, count in cast.items()])
    codes = np.array([places.get(vote, len(places)) for vote in votes])  # the last code is no vote
    draws = np.arange(n)[None, :]
    if k < n:
        draws = np.random.default_rng(seed).permuted(np.repeat(draws, DRAWS, axis=0), axis=1)[:, :k]
    rows, width = len(draws), len(places) + 1
    drawn = (np.arange(rows)[:, None] * width + codes[draws]).ravel()
    counts = np.bincount(drawn, minlength=rows * width).reshape(rows, width)[:, :-1]
    first = (counts == counts.max(axis=1, keepdims=True)) & (counts > 0)
    return float(((first * shares).sum(axis=1) / np.maximum(first.sum(axis=1), 1)).mean())


logger = logging.getLogger(__name__)

_ESTIMATE = re.compile(r"(pass|maj)_at_(\d+)(_low|_high)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredAnswer:
    """A scored answer's reward, length and other numbers. The answer's text is only in the evaluation's files."""

    index: int
    """Index of the answer's prompt in the evaluation set."""
    sample: int
    """Number of the answer among the prompt's answers."""
    reward: float
    """Reward of the answer; 0 if it couldn't be scored."""
    length: int
    """Length of the answer, in tokens."""
    finish_reason: str
    """Reason why the answer ended, as in relaxd.reasons."""
    vote: str = ""
    """The answer's vote in maj@k; "" for none."""
    parts: dict[str, float] = field(default_factory=dict)
    error: str = ""
    """Reason why the answer couldn't be scored; "" if it was scored."""
    turns: int = 0
    """Number of messages that the model wrote, if the answer is a conversation; otherwise 0."""

    def to_json(self) -> dict[str, Any]:
        """Return the answer's line in the evaluation's file, without the texts of prompt and answer."""
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
    """Return True if a metric's name, without prefix, stands for pass@k, maj@k or an end of a confidence interval."""
    return _ESTIMATE.fullmatch(name) is not None


def is_end(name: str) -> bool:
    """Return True if a metric's name, with or without prefix, stands for an end of a confidence interval."""
    return re.search(r"(?:pass|maj)_at_\d+_(?:low|high)$", name) is not None


def shown_name(name: str) -> str:
    """Return the display name of a metric: "pass_at_4" becomes pass@4."""
    found = _ESTIMATE.fullmatch(name)
    return f"{found[1]}@{found[2]}" if found and not found[3] else name
