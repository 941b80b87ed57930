"""Estimates: pass@k, maj@k, and confidence intervals of means over prompts."""

import math
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from relaxd.media.messages import tagged
from relaxd.rewards.mathematics.normal_forms import last_boxed

Z95 = 1.959963984540054
"""The normal distribution's quantile for a two-sided interval of 95 %."""


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
"""Number of random draws of k from a prompt's n replies; k = n needs only one."""
LONGEST_VOTE = 200
"""Maximum length of a vote, in characters: two longer answers would hardly agree."""

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
