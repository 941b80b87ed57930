"""Edges of GRPO's advantages and loss, which other algorithms share. test_losses.py compares with formulas."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relaxd.algorithms import Advantages, Filtered, LossInputs, create, sample_lengths
from relaxd.algorithms.loss_terms import correction_weights
from relaxd.config import GRPOConfig
from tests.kit.cases import each

torch.set_num_threads(1)
RANDOM = np.random.default_rng(7)


def advantages(rewards, lengths=None, **settings_) -> np.ndarray | str:
    rewards = np.asarray(rewards, dtype=np.float64)
    lengths = np.ones(rewards.size, dtype=np.int32) if lengths is None else np.asarray(lengths, dtype=np.int32)
    result = create(GRPOConfig(**settings_)).advantages(rewards, lengths)
    return result.reason if isinstance(result, Filtered) else result.values


# --- advantages ---------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=16), st.booleans())
def test_advantages_match_the_formula(rewards, normalize):
    epsilon = {"std_epsilon": 1e-4} if normalize else {}
    result = advantages(rewards, normalize_std=normalize, **epsilon)
    if isinstance(result, str):
        assert max(rewards) - min(rewards) <= 1e-12 * max(map(abs, rewards))
        return
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    expected = [(r - mean) / (std + 1e-4) if normalize else r - mean for r in rewards]
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    assert result.dtype == np.float32


def test_every_token_of_a_sample_has_the_same_advantage():
    result = advantages([0.0, 1.0, 2.0], lengths=[2, 0, 3], normalize_std=False)
    np.testing.assert_array_equal(result, np.float32([-1, -1, 1, 1, 1]))


@each("reward", [0.0, 1.0, -1.0, 0.1, 0.1 + 0.2, 1 / 3, 1e-300, 5e-324, 1e300, 123456.789])
@each("samples", [2, 3, 7, 10, 64])
def test_identical_rewards_are_dropped(reward, samples):
    assert advantages([reward] * samples) == "zero_variance"
    kept = advantages([reward] * samples, drop_zero_variance=False, std_epsilon=1e-30)
    np.testing.assert_array_equal(kept, np.zeros(samples, dtype=np.float32))


def test_why_the_deviation_is_no_test_of_equality():
    # The trap that this guards against: identical rewards whose computed deviation is not zero.
    assert np.std([0.1 + 0.2] * 7, ddof=1) > 0
    assert advantages([0.1 + 0.2] * 7) == "zero_variance"


@pytest.mark.parametrize(
    "rewards",
    [
        [0.3, 0.1 + 0.2],  # the same sum, rounded differently
        [0.0, -0.0],
        [0.7 + 0.2 + 0.1, 1.0, 0.1 + 0.2 + 0.7],
        [-0.3, -(0.1 + 0.2)],
    ],
)
def test_rewards_that_differ_by_rounding_only_are_equal(rewards):
    assert advantages(rewards, std_epsilon=1e-30) == "zero_variance"


@pytest.mark.parametrize("rewards", [[0.0, 1e-9], [1.0, 1.0 + 1e-9], [0.0, 5e-324], [1e-9, 2e-9], [-1e-12, 1e-12]])
def test_small_differences_are_differences(rewards):
    assert not isinstance(advantages(rewards), str)


@pytest.mark.parametrize("position", range(5))
def test_one_different_reward_anywhere_keeps_the_group(position):
    rewards = [0.1 + 0.2] * 5
    rewards[position] = 1.0
    assert not isinstance(advantages(rewards), str)


@pytest.mark.parametrize("reward", [0.0, 0.3, -2.0])
def test_a_group_of_one_has_its_reward_as_advantage(reward):
    np.testing.assert_array_equal(advantages([reward], lengths=[3]), np.float32([reward] * 3))


@pytest.mark.parametrize(
    ("rewards", "lengths", "message"),
    [
        ([], [], "rewards is empty"),
        ([1.0, 2.0], [1], "must be parallel"),
        ([1.0, math.nan], [1, 1], r"rewards\[1\] is nan: it must be finite"),
        ([math.inf, 1.0], [1, 1], r"rewards\[0\] is inf"),
        ([1.0, 2.0], [1, -1], r"lengths\[1\] is -1"),
        ([1e300, -1e300], [1, 1], "must be finite"),
        ([1.7e308, 1.6e308], [1, 1], "must be finite"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
def test_bad_groups_are_refused(rewards, lengths, message):
    with pytest.raises(ValueError, match=message):
        advantages(rewards, lengths, normalize_std=False)


# --- aggregation --------------------------------------------------------------------------------------------------


def test_token_weights_and_normalizers():
    mask = np.array([1, 1, 0, 1, 0, 0, 1], dtype=np.uint8)
    lengths = np.array([4, 2, 0, 1], dtype=np.int32)
    for aggregation, weights, normalizer in [
        ("sample_mean", [1 / 3, 1 / 3, 0, 1 / 3, 0, 0, 1], 4.0),
        ("token_mean", [1, 1, 0, 1, 0, 0, 1], 4000.0),
        ("constant_length", [1, 1, 0, 1, 0, 0, 1], 40.0),
    ]:
        length = {"constant_length": 10} if aggregation == "constant_length" else {}
        algorithm = create(GRPOConfig(loss_aggregation=aggregation, **length))
        result = algorithm.token_weights(mask, lengths)
        assert result.dtype == np.float32
        np.testing.assert_allclose(result, weights, rtol=1e-7)
        assert algorithm.normalizer(trained_tokens=4000, samples=4) == normalizer
        assert algorithm.normalizer(trained_tokens=0, samples=0) == 1.0
    with pytest.raises(ValueError, match="add up to 6, but mask has 7"):
        algorithm.token_weights(mask, np.array([4, 2], dtype=np.int32))


def test_a_samples_sequences_count_together():
    """Samples of one, three and two sequences: advantage, weights and normaliser, beside the mean written out."""
    lengths, of_sequence = np.array([3, 2, 4, 1, 2, 2], dtype=np.int32), np.array([0, 1, 1, 1, 2, 2], dtype=np.int32)
    mask = np.array([1, 1, 0, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0, 1], dtype=np.uint8)
    rewards = np.array([0.0, 1.0, 5.0])
    algorithm = create(GRPOConfig(loss_aggregation="sample_mean"))
    tokens = sample_lengths(lengths, of_sequence, 3)
    assert tokens.tolist() == [3, 7, 4]
    with pytest.raises(ValueError, match="each must be the index of one of 2 samples"):
        sample_lengths(lengths, of_sequence, 2)
    result = algorithm.advantages(rewards, tokens)
    assert isinstance(result, Advantages)
    per_sample = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    sample_of_token = [int(of_sequence[i]) for i, length in enumerate(lengths) for _ in range(length)]
    np.testing.assert_allclose(result.values, per_sample[sample_of_token], rtol=1e-6)
    values = RANDOM.normal(0, 1, mask.size)
    found = float(algorithm.token_weights(mask, tokens) @ values) / algorithm.normalizer(int(mask.sum()), 3)
    of_sample = [[v for v, m, s in zip(values, mask, sample_of_token, strict=True) if m and s == k] for k in range(3)]
    assert found == pytest.approx(np.mean([np.mean(one) for one in of_sample]), rel=1e-6)


def test_sums_of_sequences_match_the_formula_and_carry_the_gradient():
    inputs = make_inputs(6)
    sequence = torch.tensor([2, 0, 0, 2, 2, 0])
    inputs = replace(inputs, sequence=sequence, sequences=4)
    sums = inputs.segment_sum(inputs.logprobs)
    expected = [sum(v for v, s in zip(inputs.logprobs.tolist(), sequence, strict=True) if s == k) for k in range(4)]
    assert sums.tolist() == pytest.approx(expected)
    factors = torch.tensor([1.0, 10.0, 100.0, 1000.0], dtype=torch.float64)
    (sums * factors).sum().backward()
    assert inputs.logprobs.grad.tolist() == factors[sequence].tolist()


# --- loss ---------------------------------------------------------------------------------------------------------


def make_inputs(tokens: int, dtype: torch.dtype = torch.float64, spread: float = 0.5) -> LossInputs:
    def normal(scale: float) -> torch.Tensor:
        return torch.tensor(RANDOM.normal(0, scale, tokens), dtype=dtype)

    rollout = -normal(1).abs() - 1.5
    return loss_inputs(
        (rollout + normal(spread)).requires_grad_(),
        rollout,
        normal(1),
        torch.tensor(RANDOM.random(tokens) < 0.8, dtype=dtype),
        torch.tensor(RANDOM.random(tokens), dtype=dtype),
        ref_logprobs=rollout + normal(spread),
        entropy=(normal(1).abs() + 0.1).requires_grad_(),
    )


def loss_inputs(
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    weight: torch.Tensor,
    *,
    ref_logprobs: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
) -> LossInputs:
    """Inputs of tokens that are all of one sequence."""
    columns = {"rollout_logprobs": rollout_logprobs, "advantages": advantages}
    if ref_logprobs is not None:
        columns["ref_logprobs"] = ref_logprobs
    return LossInputs(logprobs, columns, mask, weight, torch.zeros(len(logprobs), dtype=torch.int64), 1, entropy)


def without(inputs: LossInputs, name: str) -> LossInputs:
    """The inputs without one column."""
    return replace(inputs, columns={other: tensor for other, tensor in inputs.columns.items() if other != name})


def test_with_current_logprobs_the_ratio_is_one_and_the_gradient_is_reinforce():
    inputs = make_inputs(100)
    output = create(GRPOConfig(old_logprobs="current")).loss(inputs)
    output.loss.backward()
    assert output.sums["ratio"].item() == inputs.mask.sum().item()
    assert output.sums["clip_fraction"].item() == 0
    torch.testing.assert_close(inputs.logprobs.grad, -inputs.weight * inputs.columns["advantages"] * inputs.mask)


CORRECTIONS = [
    {"correction": "tis", "tis_clip": 1.3},
    {"correction": "tis", "tis_clip": 0.9},
    {"correction": "icepop", "icepop_low": 0.7, "icepop_high": 1.4},
    {"correction": "icepop", "icepop_low": 0.0, "icepop_high": 2.0},
]


@given(
    st.lists(st.tuples(st.floats(-60, 0), st.floats(-60, 0)), min_size=1, max_size=50),
    st.floats(0.01, 10),
    st.floats(0, 1),
    st.floats(1.01, 10),
)
def test_correction_weights_stay_within_their_limits(pairs, clip, low, high):
    train, rollout = (torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True))
    ratio = (train - rollout).clamp(-20, 20).exp()
    tis = GRPOConfig(old_logprobs="current", correction="tis", tis_clip=clip)
    icepop = GRPOConfig(old_logprobs="current", correction="icepop", icepop_low=low, icepop_high=high)
    truncated, limited = correction_weights(train, rollout, tis)
    assert ((truncated >= 0) & (truncated <= clip)).all()
    torch.testing.assert_close(truncated[limited == 0], ratio[limited == 0], rtol=0, atol=0)
    assert (truncated[limited == 1] == clip).all()
    masked, left_out = correction_weights(train, rollout, icepop)
    outside = (ratio < low) | (ratio > high)
    assert torch.equal(left_out == 1, outside)
    assert (masked[outside] == 0).all()
    torch.testing.assert_close(masked[~outside], ratio[~outside], rtol=0, atol=0)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_corrected_gradient_is_the_policy_gradient_of_the_trainers_policy(correction):
    """Over all tokens that the engine may draw, the weighted gradient's mean is that under the trainer's own policy, as
    long as nothing is limited."""
    trainer = torch.tensor(RANDOM.normal(0, 1, 12)).requires_grad_()
    engine = (trainer.detach() + torch.tensor(RANDOM.normal(0, 0.2, 12))).log_softmax(-1)
    advantages = torch.tensor(RANDOM.normal(0, 1, 12))
    limits = {"tis": {"tis_clip": 1e3}, "icepop": {"icepop_low": 0.0, "icepop_high": 1e3}}[correction["correction"]]
    config = GRPOConfig(old_logprobs="current", **{**correction, **limits})
    ones = torch.ones(12, dtype=torch.float64)
    # Each possible token once, weighted by the engine's probability of drawing it: the exact expectation.
    inputs = loss_inputs(trainer.log_softmax(-1), engine, advantages, ones, engine.exp())
    create(config).loss(inputs).loss.backward()
    policy = trainer.detach().softmax(-1)
    torch.testing.assert_close(trainer.grad, -policy * (advantages - (policy * advantages).sum()))


def test_corrections_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r'correction is "tis" and algorithm.old_logprobs is "rollout"'):
        GRPOConfig(correction="tis")
    with pytest.raises(ValueError, match=r"icepop_low is 3: it must be less than icepop_high, 2"):
        GRPOConfig(old_logprobs="current", correction="icepop", icepop_low=3, icepop_high=2)


def one_token(log_ratio: float, advantage: float, **settings_) -> tuple[float, float, float]:
    """Loss, gradient and clip fraction of one token."""
    one = torch.ones(1, dtype=torch.float64)
    logprobs = (log_ratio * one).requires_grad_()
    inputs = loss_inputs(logprobs, 0 * one, advantage * one, one, one)
    output = create(GRPOConfig(**settings_)).loss(inputs)
    output.loss.backward()
    return output.loss.item(), logprobs.grad.item(), output.sums["clip_fraction"].item()


@each(
    ("ratio", "advantage", "clipped_to"),
    [
        (1.27, 1.0, None),
        (1.29, 1.0, 1.28),  # rewarded and already likelier: no further
        (1.29, -1.0, None),  # punished and likelier: pushed back, whatever the ratio
        (0.81, -1.0, None),
        (0.79, -1.0, 0.8),
        (0.79, 1.0, None),
        (5.0, -1.0, None),
        (1.0, 1.0, None),
    ],
)
def test_clip_boundaries(ratio, advantage, clipped_to):
    loss, gradient, clip_fraction = one_token(math.log(ratio), advantage, clip_low=0.2, clip_high=0.28)
    if clipped_to is None:
        assert (loss, gradient, clip_fraction) == pytest.approx((-ratio * advantage, -ratio * advantage, 0))
    else:
        assert (loss, gradient, clip_fraction) == pytest.approx((-clipped_to * advantage, 0, 1))


@each("log_ratio", [-1e4, -200.0, 200.0, 1e4])
@each("advantage", [-1.0, 1.0])
def test_a_token_left_far_behind_gives_a_finite_loss_and_no_gradient(log_ratio, advantage):
    loss, gradient, _ = one_token(log_ratio, advantage)
    assert math.isfinite(loss)
    assert gradient == pytest.approx(0)


@pytest.mark.parametrize(
    ("difference", "expected"), [(0.0, 0.0), (-30.0, 10.0), (-3.0, 10.0), (30.0, 10.0), (1e-4, 5e-9)]
)
def test_low_var_kl_is_clamped(difference, expected):
    one = torch.ones(1, dtype=torch.float32)
    inputs = loss_inputs(difference * one, difference * one, one, one, one, ref_logprobs=0 * one)
    output = create(GRPOConfig(kl_coef=0.1)).loss(inputs)
    assert output.sums["kl"].item() == pytest.approx(expected, rel=1e-2, abs=1e-12)


def test_missing_and_misshapen_inputs_are_named():
    inputs = make_inputs(5)
    with pytest.raises(ValueError, match="ref_logprobs is missing"):
        create(GRPOConfig(kl_coef=0.1)).loss(without(inputs, "ref_logprobs"))
    with pytest.raises(ValueError, match="entropy is missing"):
        create(GRPOConfig(entropy_coef=0.1)).loss(replace(inputs, entropy=None))
    short = {**inputs.columns, "advantages": inputs.columns["advantages"][:4]}
    with pytest.raises(ValueError, match=r"advantages is \[4\], but logprobs is \[5\]"):
        create(GRPOConfig()).loss(replace(inputs, columns=short))


def test_the_reference_and_entropy_are_asked_for_only_where_they_count():
    plain = create(GRPOConfig())
    assert ("ref_logprobs" in plain.needs.loss, plain.needs_entropy) == (False, False)
    assert "kl" not in plain.loss(replace(without(make_inputs(5), "ref_logprobs"), entropy=None)).sums
    full = create(GRPOConfig(kl_coef=0.1, entropy_coef=0.1))
    assert ("ref_logprobs" in full.needs.loss, full.needs_entropy) == (True, True)
