"""Choosing tokens: distributions, filters, log-probs, independence."""

import math

import pytest
import torch

from services.rollout.engines.request_types import EngineError, Sampling
from services.rollout.engines.transformers.batch import choose_tokens, sample_generator

LOGITS = torch.tensor([2.0, 0.5, 1.0, -1.0, 0.0])


def draw(sampling: Sampling, count: int = 20_000) -> torch.Tensor:
    """Frequencies of each token over many draws from one generator."""
    generator = sample_generator(7, 0)
    counts = torch.zeros(len(LOGITS))
    rows = 1000
    for _ in range(count // rows):
        tokens, _ = choose_tokens(LOGITS.repeat(rows, 1), [sampling] * rows, [generator] * rows)
        counts += torch.bincount(torch.tensor(tokens), minlength=len(LOGITS))
    return counts / counts.sum()


def reference(temperature: float, top_k: int = 0, top_p: float = 1.0) -> list[float]:
    """Written out in plain Python: top-k, then the smallest set that reaches top_p."""
    weights = [math.exp(logit / temperature) for logit in LOGITS.tolist()]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    if top_k:
        order = order[:top_k]
    total = sum(weights[token] for token in order)
    kept, reached = [], 0.0
    for token in order:
        kept.append(token)
        reached += weights[token] / total
        if reached >= top_p:
            break
    mass = sum(weights[token] for token in kept)
    return [weights[token] / mass if token in kept else 0.0 for token in range(len(weights))]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 3, 1.0), (1.0, 0, 0.7), (1.0, 3, 0.9), (1.0, 1, 1.0), (1.0, 0, 0.01)],
)
def test_tokens_follow_the_distribution(temperature: float, top_k: int, top_p: float) -> None:
    frequencies = draw(Sampling(1, temperature=temperature, top_k=top_k, top_p=top_p))
    expected = torch.tensor(reference(temperature, top_k, top_p))
    assert torch.allclose(frequencies, expected, atol=0.015)
    assert not frequencies[expected == 0].any()


def test_log_probs_are_those_under_the_temperature_before_the_filters() -> None:
    sampling = [
        Sampling(1, temperature=0.7),
        Sampling(1, temperature=0.7, top_k=1, top_p=0.1),
        Sampling(1, temperature=0),
    ]
    tokens, logprobs = choose_tokens(LOGITS.repeat(3, 1), sampling, [sample_generator(0, row) for row in range(3)])
    assert tokens[1:] == [0, 0]
    for token, logprob, temperature in zip(tokens, logprobs, [0.7, 0.7, 1.0], strict=True):
        weights = [math.exp(logit / temperature) for logit in LOGITS.tolist()]
        assert logprob == pytest.approx(math.log(weights[token] / sum(weights)), abs=1e-6)


def test_a_row_does_not_depend_on_the_others() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 1000)
    sampling = [Sampling(1), Sampling(1, temperature=0), Sampling(1, top_p=0.9), Sampling(1, temperature=1.3)] + [
        Sampling(1)
    ] * 2
    together, _ = choose_tokens(logits, sampling, [sample_generator(3, row) for row in range(6)])
    for row in range(6):
        alone, _ = choose_tokens(logits[row : row + 1], sampling[row : row + 1], [sample_generator(3, row)])
        assert alone == together[row : row + 1]


def test_seeds_and_samples_give_different_numbers() -> None:
    pairs = [(seed, sample) for seed in (0, 1, 12345) for sample in range(20)]
    numbers = {float(torch.rand((), generator=sample_generator(*pair))) for pair in pairs}
    assert len(numbers) == 60


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_broken_logits_are_an_error(broken: float) -> None:
    logits = torch.full((1, 5), broken)
    with pytest.raises(EngineError, match="not finite"):
        choose_tokens(logits, [Sampling(1)], [sample_generator(0, 0)])
