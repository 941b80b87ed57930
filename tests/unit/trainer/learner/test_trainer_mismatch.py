"""Measures of the train/inference mismatch, beside numpy in float64 on all tokens at once."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.learner import policy_loss

torch.set_num_threads(1)


def differences(tokens: int, seed: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The trainer's and the engine's log-probs, and which are compared; differences over many orders of magnitude."""
    random = np.random.default_rng(seed)
    engine = -random.exponential(2.0, tokens)
    apart = random.normal(0, 1, tokens) * 10.0 ** random.uniform(-6, 0.5, tokens) * scale
    columns = (engine + apart, engine, random.random(tokens) < 0.4)
    trainer, engine_, compared = (torch.tensor(column.astype(np.float32)) for column in columns)
    return trainer, engine_, compared


def reference(trainer: torch.Tensor, engine: torch.Tensor, chosen: np.ndarray) -> dict[str, float]:
    apart = (trainer - engine).numpy().astype(np.float64)[chosen]
    ratio = np.exp(apart)
    return {
        "": np.abs(apart).mean(),
        "_p99": np.quantile(np.abs(apart), 0.99, method="inverted_cdf"),
        "_max": np.abs(apart).max(),
        "_kl": (ratio - 1 - np.log(ratio)).mean(),
        "_ess": ratio.mean() ** 2 / (ratio**2).mean(),
    }


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_metrics_equal_numpys(scale: float) -> None:
    trainer, engine, compared = differences(5000, 1, scale)
    found = policy_loss.mismatch_metrics(policy_loss.measure(trainer, engine, compared))
    for name, chosen in (("logprob_difference", compared.numpy() != 0), ("policy_drift", np.ones(5000, bool))):
        for suffix, expected in reference(trainer, engine, chosen).items():
            tolerance = 0.023 if suffix == "_p99" else 1e-6
            assert found[name + suffix] == pytest.approx(expected, rel=tolerance), name + suffix


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=6))
def test_parts_add_up_to_the_whole(sizes: list[int]) -> None:
    trainer, engine, compared = differences(sum(sizes), 2)
    parts = [policy_loss.measure(*columns) for columns in zip(*(c.split(sizes) for c in (trainer, engine, compared)))]  # noqa: B905
    total = parts[0]
    for part in parts[1:]:
        total = policy_loss.merge_measures(total, part)
    whole = policy_loss.mismatch_metrics(policy_loss.measure(trainer, engine, compared))
    assert policy_loss.mismatch_metrics(total) == pytest.approx(whole, rel=1e-12)


def test_every_difference_falls_into_its_bin() -> None:
    edges = policy_loss.SMALLEST * 2.0 ** (np.arange(policy_loss.BINS) / policy_loss.PER_OCTAVE)
    values = np.concatenate([[0.0, 1e-9], edges[:-1] * 1.01, [1e3, 1e6]]).astype(np.float32)
    zeros = torch.zeros(len(values))
    counts = policy_loss.measure(torch.tensor(values), zeros, zeros)[1, policy_loss.SUMS :]
    expected = np.histogram(values, bins=[-1, *edges[:-1], np.inf])[0]
    np.testing.assert_array_equal(counts.numpy(), expected)


def test_no_tokens_give_no_metrics() -> None:
    empty = torch.zeros(0)
    assert policy_loss.mismatch_metrics(policy_loss.measure(empty, empty, empty)) == {}
    one = torch.ones(1)
    assert set(policy_loss.mismatch_metrics(policy_loss.measure(one, one, 0 * one))) == {
        f"policy_drift{suffix}" for suffix in ("", "_p99", "_max", "_kl", "_ess")
    }


def test_equal_log_probs_differ_by_exactly_nothing() -> None:
    same = torch.linspace(-30, 0, 100)
    found = policy_loss.mismatch_metrics(policy_loss.measure(same, same, same + 31))
    assert {name: value for name, value in found.items() if value} == {
        "logprob_difference_ess": 1.0,
        "policy_drift_ess": 1.0,
    }


def test_a_token_left_far_behind_gives_a_finite_estimate() -> None:
    far = torch.tensor([0.0, -500.0])
    found = policy_loss.mismatch_metrics(policy_loss.measure(far, far.flip(0), torch.zeros(2)))
    assert found["policy_drift_max"] == 500.0
    assert np.isfinite(found["policy_drift_kl"])
    assert found["policy_drift_ess"] == pytest.approx(0.5)  # one of the two tokens has all of the weight


def test_no_gradient_goes_through() -> None:
    trainer = torch.zeros(3, requires_grad=True)
    assert not policy_loss.measure(trainer, torch.ones(3), torch.ones(3)).requires_grad
