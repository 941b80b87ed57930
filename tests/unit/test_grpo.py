"""GRPO's advantages and loss, beside float64 formulas written out here once more, without relaxd's code."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relaxd.algorithms import Advantages, Filtered, LossInputs, create, sample_lengths
from relaxd.algorithms.correction import correction_weights
from relaxd.config import GRPOConfig

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
    result = advantages(rewards, normalize_std=normalize, std_epsilon=1e-4)
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


@pytest.mark.parametrize("reward", [0.0, 1.0, -1.0, 0.1, 0.1 + 0.2, 1 / 3, 1e-300, 5e-324, 1e300, 123456.789])
@pytest.mark.parametrize("samples", [2, 3, 7, 10, 64])
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
        ([1e300, -1e300], [1, 1], "too large"),
        ([1.7e308, 1.6e308], [1, 1], "too large"),
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
        algorithm = create(GRPOConfig(loss_aggregation=aggregation, constant_length=10))
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


def changed(inputs: LossInputs, change: Callable[[str, torch.Tensor], torch.Tensor]) -> LossInputs:
    """The inputs with every tensor of a token's values replaced by `change(name, tensor)`."""
    own = {name: change(name, getattr(inputs, name)) for name in ("logprobs", "mask", "weight", "sequence", "entropy")}
    columns = {name: change(name, tensor) for name, tensor in inputs.columns.items()}
    return replace(inputs, **own, columns=columns)


def without(inputs: LossInputs, name: str) -> LossInputs:
    """The inputs without one column."""
    return replace(inputs, columns={other: tensor for other, tensor in inputs.columns.items() if other != name})


def formula(config: GRPOConfig, inputs: LossInputs, logprobs: list[float]) -> tuple[float, dict[str, float]]:
    """The loss, token by token, in Python's floats."""
    loss = 0.0
    sums = {"ratio": 0.0, "clip_fraction": 0.0, "kl": 0.0, "entropy": 0.0}
    columns = [inputs.columns[name].tolist() for name in ("rollout_logprobs", "advantages", "ref_logprobs")]
    columns += [inputs.mask.tolist(), inputs.weight.tolist(), inputs.entropy.tolist()]
    for new, old, advantage, ref, mask, weight, entropy in zip(logprobs, *columns, strict=True):
        if mask == 0:
            continue
        ratio = 1.0 if config.old_logprobs == "current" else math.exp(max(-20.0, min(20.0, new - old)))
        low, high = 1 - config.clip_low, 1 + config.clip_high
        surrogate = min(ratio * advantage, max(low, min(high, ratio)) * advantage)
        difference = new - ref
        kl = {
            "k1": lambda d: d,
            "k2": lambda d: d * d / 2,
            "k3": lambda d: math.exp(-d) - 1 + d,
            "low_var_kl": lambda d: max(-10.0, min(10.0, math.exp(-max(-20, min(20, d))) - 1 + max(-20, min(20, d)))),
        }[config.kl_estimator](difference)
        correction, limited = correct(config, new, old)
        loss += weight * (-surrogate * correction + config.kl_coef * kl - config.entropy_coef * entropy)
        if config.correction != "none":
            sums["correction_weight"] = sums.get("correction_weight", 0.0) + correction
            sums["correction_fraction"] = sums.get("correction_fraction", 0.0) + limited
        sums["ratio"] += ratio
        sums["clip_fraction"] += (advantage > 0 and ratio > high) or (advantage < 0 and ratio < low)
        sums["kl"] += kl
        sums["entropy"] += entropy
    return loss, sums


def correct(config: GRPOConfig, new: float, rollout: float) -> tuple[float, bool]:
    """Weight of one token by the formulas of TIS and IcePop, and whether it was limited."""
    w = math.exp(max(-20.0, min(20.0, new - rollout)))
    match config.correction:
        case "tis":
            return min(w, config.tis_clip), w > config.tis_clip
        case "icepop":
            inside = config.icepop_low <= w <= config.icepop_high
            return (w if inside else 0.0), not inside
    return 1.0, False


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "low_var_kl"])
@pytest.mark.parametrize(("kl_coef", "entropy_coef"), [(0.0, 0.0), (0.3, 0.0), (0.0, 0.2), (0.3, 0.2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_loss_and_sums_match_the_formula(estimator, kl_coef, entropy_coef, dtype):
    config = GRPOConfig(
        kl_estimator=estimator, kl_coef=kl_coef, entropy_coef=entropy_coef, clip_low=0.1, clip_high=0.28
    )
    inputs = make_inputs(300, dtype)
    output = create(config).loss(inputs)
    loss, sums = formula(config, inputs, inputs.logprobs.tolist())
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert output.loss.item() == pytest.approx(loss, rel=tolerance, abs=tolerance)
    assert {name: value.item() for name, value in output.sums.items()} == pytest.approx(sums, rel=tolerance)
    assert not any(value.requires_grad for value in output.sums.values())
    assert 0 < sums["clip_fraction"] < inputs.mask.sum()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "low_var_kl"])
def test_gradients_match_finite_differences_of_the_formula(estimator):
    config = GRPOConfig(kl_estimator=estimator, kl_coef=0.3, entropy_coef=0.2, clip_low=0.1, clip_high=0.28)
    inputs = make_inputs(60)
    create(config).loss(inputs).loss.backward()
    base = inputs.logprobs.tolist()
    for token in range(60):
        step = 1e-6
        above = formula(config, inputs, [*base[:token], base[token] + step, *base[token + 1 :]])[0]
        below = formula(config, inputs, [*base[:token], base[token] - step, *base[token + 1 :]])[0]
        assert inputs.logprobs.grad[token].item() == pytest.approx((above - below) / (2 * step), abs=1e-7)
    torch.testing.assert_close(inputs.entropy.grad, -0.2 * inputs.weight * inputs.mask)


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


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_corrected_losses_sums_and_gradients_match_the_formula(correction, dtype):
    config = GRPOConfig(old_logprobs="current", kl_coef=0.3, kl_estimator="k2", entropy_coef=0.2, **correction)
    inputs = make_inputs(300, dtype)
    output = create(config).loss(inputs)
    output.loss.backward()
    logprobs = inputs.logprobs.tolist()
    loss, sums = formula(config, inputs, logprobs)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert output.loss.item() == pytest.approx(loss, rel=tolerance, abs=tolerance)
    assert {name: value.item() for name, value in output.sums.items()} == pytest.approx(sums, rel=tolerance)
    assert 0 < sums["correction_fraction"] < inputs.mask.sum()
    # d/dlogprob of -w A r + kl_coef (logprob - ref)² / 2 with r = 1 and w held fixed.
    weights = [
        correct(config, *pair)[0] for pair in zip(logprobs, inputs.columns["rollout_logprobs"].tolist(), strict=True)
    ]
    policy = -torch.tensor(weights, dtype=dtype) * inputs.columns["advantages"]
    kl = 0.3 * (inputs.logprobs.detach() - inputs.columns["ref_logprobs"])
    torch.testing.assert_close(inputs.logprobs.grad, inputs.weight * inputs.mask * (policy + kl))


@given(
    st.lists(st.tuples(st.floats(-60, 0), st.floats(-60, 0)), min_size=1, max_size=50),
    st.floats(0.01, 10),
    st.floats(0, 1),
    st.floats(1.01, 10),
)
def test_correction_weights_stay_within_their_limits(pairs, clip, low, high):
    train, rollout = (torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True))
    ratio = (train - rollout).clamp(-20, 20).exp()
    settings_ = {"old_logprobs": "current", "tis_clip": clip, "icepop_low": low, "icepop_high": high}
    truncated, limited = correction_weights(train, rollout, GRPOConfig(correction="tis", **settings_))
    assert ((truncated >= 0) & (truncated <= clip)).all()
    torch.testing.assert_close(truncated[limited == 0], ratio[limited == 0], rtol=0, atol=0)
    assert (truncated[limited == 1] == clip).all()
    masked, left_out = correction_weights(train, rollout, GRPOConfig(correction="icepop", **settings_))
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


@pytest.mark.parametrize(
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


@pytest.mark.parametrize("log_ratio", [-1e4, -200.0, 200.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
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


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 80), st.lists(st.integers(0, 80), max_size=6), st.sampled_from(["none", "tis", "icepop"]))
def test_the_loss_does_not_depend_on_how_tokens_are_cut(tokens, cuts, correction):
    old = "rollout" if correction == "none" else "current"
    config = GRPOConfig(kl_coef=0.3, entropy_coef=0.2, old_logprobs=old, correction=correction)
    algorithm = create(config)
    whole = make_inputs(tokens)
    output = algorithm.loss(whole)
    output.loss.backward()
    edges = [0, *sorted(min(cut, tokens) for cut in cuts), tokens]
    loss = torch.zeros((), dtype=torch.float64)
    sums = dict.fromkeys(output.sums, 0.0)
    pieces = whole.logprobs.detach().clone().requires_grad_()
    for start, end in itertools.pairwise(edges):
        cut = changed(whole, lambda name, tensor, start=start, end=end: tensor[start:end])
        piece = algorithm.loss(replace(cut, logprobs=pieces[start:end]))
        loss = loss + piece.loss
        sums = {name: total + piece.sums[name].item() for name, total in sums.items()}
    loss.backward()
    torch.testing.assert_close(loss, output.loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(pieces.grad, whole.logprobs.grad, rtol=1e-12, atol=1e-12)
    assert sums == pytest.approx({name: value.item() for name, value in output.sums.items()}, rel=1e-12)


@pytest.mark.parametrize("correction", [{}, *CORRECTIONS])
def test_what_stands_where_the_mask_is_0_does_not_matter(correction):
    old = "current" if correction else "rollout"
    algorithm = create(GRPOConfig(kl_coef=0.3, entropy_coef=0.2, old_logprobs=old, **correction))
    clean = make_inputs(50)
    masked = clean.mask == 0

    def dirtied(name: str, value: torch.Tensor) -> torch.Tensor:
        if name in ("mask", "sequence"):
            return value
        value = value.detach().masked_fill(masked, math.nan).clone()
        return value.requires_grad_(name in ("logprobs", "entropy"))

    dirty = changed(clean, dirtied)
    for inputs in (clean, dirty):
        algorithm.loss(inputs).loss.backward()
    torch.testing.assert_close(algorithm.loss(dirty).loss, algorithm.loss(clean).loss, rtol=0, atol=0)
    torch.testing.assert_close(dirty.logprobs.grad, clean.logprobs.grad, rtol=0, atol=0)
    torch.testing.assert_close(dirty.entropy.grad, clean.entropy.grad, rtol=0, atol=0)


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


@pytest.mark.parametrize("aggregation", ["sample_mean", "token_mean", "constant_length"])
def test_a_whole_step_is_the_textbook_mean(aggregation):
    """Two samples of unequal length, one with a masked token: weights, loss and normaliser together."""
    config = GRPOConfig(loss_aggregation=aggregation, constant_length=7, old_logprobs="current")
    algorithm = create(config)
    lengths, mask = np.array([2, 4], dtype=np.int32), np.array([1, 1, 1, 0, 1, 1], dtype=np.uint8)
    result = algorithm.advantages(np.array([0.0, 1.0]), lengths)
    assert isinstance(result, Advantages)
    logprobs = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    inputs = loss_inputs(
        logprobs,
        logprobs.detach(),
        torch.from_numpy(result.values).double(),
        torch.from_numpy(mask).double(),
        torch.from_numpy(algorithm.token_weights(mask, lengths)).double(),
    )
    (algorithm.loss(inputs).loss / algorithm.normalizer(int(mask.sum()), 2)).backward()
    a = 0.5 / (math.sqrt(0.5) + 1e-6)
    scale = {
        "sample_mean": [1 / 2 / 2] * 2 + [1 / 3 / 2] * 4,
        "token_mean": [1 / 5] * 6,
        "constant_length": [1 / 14] * 6,
    }[aggregation]
    expected = np.array([a, a, -a, 0, -a, -a]) * scale
    np.testing.assert_allclose(logprobs.grad.numpy(), expected, rtol=1e-6)
