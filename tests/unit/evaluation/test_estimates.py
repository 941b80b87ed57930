"""pass@k, maj@k and confidence intervals against their definitions."""

import math
import random
from itertools import combinations

import pytest

from relaxd.config.load_toml import load
from relaxd.evaluation.estimates import Z95, ScoredAnswer, interval, maj_at_k, pass_at_k, summarise_set, vote_of
from relaxd.evaluation.sets import sets_of
from tests.kit.cases import each


def test_pass_at_k_is_the_share_of_draws_with_a_right_answer() -> None:
    for n in range(1, 8):
        for right in range(n + 1):
            for k in range(1, n + 1):
                draws = list(combinations(range(n), k))
                share = sum(min(draw) < right for draw in draws) / len(draws)
                assert pass_at_k(n, right, k) == pytest.approx(share, abs=1e-12)
                assert pass_at_k(n, right, k) == pytest.approx(1 - math.comb(n - right, k) / math.comb(n, k), abs=1e-12)


def test_pass_at_k_does_not_overflow() -> None:
    assert pass_at_k(1000, 1, 500) == pytest.approx(0.5)
    for n, right, k in ((4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)):
        with pytest.raises(ValueError, match="must be 1 to n"):
            pass_at_k(n, right, k)


def test_the_interval_of_shares_is_wilsons() -> None:
    # Brown, Cai and DasGupta 2001, equation 4, with the number of prompts less one.
    values = [1.0] * 30 + [0.0] * 70
    n, p, z = 99.0, 0.3, Z95
    middle, half = (
        (p + z**2 / (2 * n)) / (1 + z**2 / n),
        z / (1 + z**2 / n) * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2)),
    )
    assert interval(values) == pytest.approx((middle - half, middle + half), abs=1e-12)
    low, high = interval([0.0] * 50)
    assert low == 0.0
    assert high == pytest.approx(Z95**2 / (50 + Z95**2))
    assert interval([1.0] * 50) == pytest.approx((1 - high, 1.0))
    assert interval([0.5]) == (pytest.approx(0.0546, abs=1e-3), pytest.approx(0.9454, abs=1e-3))
    with pytest.raises(ValueError, match="at least one value"):
        interval([])


@pytest.mark.parametrize("samples", [1, 8])
def test_the_interval_holds_the_truth_as_often_as_it_says(samples: int) -> None:
    rng = random.Random(1)
    inside = 0
    for _ in range(600):
        hard = [rng.betavariate(0.5, 1.0) for _ in range(60)]  # prompts differ; their mean is a third
        values = [sum(rng.random() < p for _ in range(samples)) / samples for p in hard]
        low, high = interval(values, samples)
        inside += low <= 1 / 3 <= high
    assert 0.92 <= inside / 600 <= 0.98


def test_maj_at_k_is_the_share_of_draws_whose_majority_is_right() -> None:
    votes, right = ["a", "b", "a", "", "c", "b", "a"], [True, False, True, False, False, False, True]
    for k in range(1, 8):
        total = 0.0
        draws = list(combinations(range(7), k))
        for draw in draws:
            counts = {vote: sum(votes[i] == vote for i in draw) for vote in "abc"}
            first = [vote for vote in "abc" if counts[vote] == max(counts.values()) > 0]
            total += ("a" in first) / len(first) if first else 0.0
        exact = total / len(draws)
        assert maj_at_k(votes, right, k, seed=3) == pytest.approx(exact, abs=1e-12 if k == 7 else 0.1)
        assert maj_at_k(votes, right, k, seed=3) == maj_at_k(votes, right, k, seed=3)
    assert maj_at_k(["", ""], [True, False], 2, seed=0) == 0.0
    with pytest.raises(ValueError, match="k = 3"):
        maj_at_k(["a", "b"], [True, False], 3, seed=0)


@each(
    ("reply", "vote"),
    [
        (r"so \boxed{ 1{,}000 } or \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("<answer> Paris </answer> and so on", "paris"),
        ("Let me think.\nThe answer is 1,234.50.\n\n", "1234.5"),
        ("Answer: (B).", "(b)"),
        ("3 + 4 = 7", "7"),
        ("Yes!", "yes"),
        ("100", "100"),
        ("", ""),
        ("word " * 100, ""),
    ],
)
def test_replies_vote_for_their_final_answer(reply: str, vote: str) -> None:
    assert vote_of(reply) == vote


def test_a_part_is_averaged_over_the_answers_that_have_it() -> None:
    text = 'run.steps = 1\nmodel.path = "m"\nreward.name = "math"\ndata.source = "addition"\neval.prompts = 4\n'
    (one,) = sets_of(load(text))
    parts = ({"tests": 1.0}, {"tests": 0.5, "style": 2.0}, {})
    answers = [
        ScoredAnswer(index=index, sample=0, reward=1.0, length=3, finish_reason="stop", parts=found)
        for index, found in enumerate(parts)
    ]
    failed = ScoredAnswer(index=3, sample=0, reward=0.0, length=3, finish_reason="stop", error="it failed")
    metrics = summarise_set(one, [*answers, failed])
    assert (metrics["eval_tests"], metrics["eval_style"], metrics["eval_reward"]) == (0.75, 2.0, 0.75)
