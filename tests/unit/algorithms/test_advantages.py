"""Every algorithm's advantages beside formulas in Python's floats, and changes of rewards before them."""

import itertools
import math
from typing import Any, cast

import numpy as np
import pytest
import torch

from relaxd.algorithms import ALGORITHMS, Advantages, Filtered, create
from relaxd.algorithms.advantage_terms import Whitening, generalized_advantages, token_rewards
from relaxd.algorithms.base import ValuedGroup, WithCritic
from relaxd.algorithms.loss_terms import clipped_value_loss, distilled
from relaxd.board import roles_for, stages_for
from relaxd.config.algorithm import ALGORITHM
from relaxd.config.load_toml import ConfigError, load
from relaxd.reasons import DropReason
from relaxd.roles import ADVANTAGE
from tests.kit.cases import each

REWARDS = [0.5, 1.5, -1.0, 0.25]
LENGTHS = [3, 2, 4, 2]
MASK = [1, 0, 1, 1, 1, 1, 0, 1, 0, 0, 1]
SAMPLE = [sample for sample, length in enumerate(LENGTHS) for _ in range(length)]
ROLLOUT = np.random.default_rng(3).uniform(-2, 0, len(MASK)).astype(np.float32)
REFERENCE = np.random.default_rng(4).uniform(-2, 0, len(MASK)).astype(np.float32)
CURRENT = np.random.default_rng(8).uniform(-2, 0, len(MASK)).astype(np.float32)
COLUMNS = {
    "loss_mask": np.array(MASK, np.uint8),
    "rollout_logprobs": np.where(np.array(MASK) == 1, ROLLOUT, np.nan).astype(np.float32),
    "old_logprobs": np.where(np.array(MASK) == 1, CURRENT, np.nan).astype(np.float32),
    "ref_logprobs": REFERENCE,
    "finish": ["stop", "length", "length", "stop", "stop", "length"],
    "sample_of_sequence": np.array([0, 0, 1, 1, 2, 3]),
}
KL = [float(q) - float(p) if m else 0.0 for q, p, m in zip(CURRENT, REFERENCE, MASK, strict=True)]
ENGINE_KL = [float(q) - float(p) if m else 0.0 for q, p, m in zip(ROLLOUT, REFERENCE, MASK, strict=True)]


def advantages(name: str, rewards: list[float] = REWARDS, **settings: Any) -> list[float] | str:
    algorithm = create(ALGORITHM.validate_python({"name": name, **settings}))
    result = algorithm.advantages(np.array(rewards), np.array(LENGTHS, np.int32), COLUMNS)
    if isinstance(result, Filtered):
        return result.reason
    assert isinstance(result, Advantages)
    assert result.values.dtype == np.float32
    return result.values.tolist()


def per_token(values: list[float]) -> Any:
    return pytest.approx([values[sample] for sample in SAMPLE], rel=1e-6)


def centred(rewards: list[float], *, deviation: bool) -> list[float]:
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    return [(r - mean) / (std + 1e-6) if deviation else r - mean for r in rewards]


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "sapo", "cispo"])
def test_relative_to_mean_and_deviation(name: str) -> None:
    assert advantages(name) == per_token(centred(REWARDS, deviation=True))
    assert advantages(name, normalize_std=False) == per_token(centred(REWARDS, deviation=False))


@pytest.mark.parametrize("name", ["dr_grpo", "reinforce_plus_plus_baseline"])
def test_relative_to_the_mean(name: str) -> None:
    assert advantages(name) == per_token(centred(REWARDS, deviation=False))


def test_rloo_leaves_one_out() -> None:
    others = [[r for j, r in enumerate(REWARDS) if j != i] for i in range(4)]
    assert advantages("rloo") == per_token([r - sum(o) / 3 for r, o in zip(REWARDS, others, strict=True)])


@pytest.mark.parametrize(("gamma", "kl_coef"), [(1.0, 0.0), (1.0, 0.3), (0.9, 0.3)])
def test_reinforce_plus_plus_sums_later_rewards(gamma: float, kl_coef: float) -> None:
    expected = [0.0] * len(MASK)
    for sample in range(4):
        own = [t for t in range(len(MASK)) if SAMPLE[t] == sample and MASK[t]]
        for position, t in enumerate(own):
            for later, u in enumerate(own[position:]):
                reward = -kl_coef * KL[u] + (REWARDS[sample] if u == own[-1] else 0.0)
                expected[t] += gamma**later * reward
    found = advantages("reinforce_plus_plus", gamma=gamma, kl_reward_coef=kl_coef)
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_reinforce_plus_plus_needs_a_token_for_each_reward_and_no_group() -> None:
    algorithm = create(ALGORITHM.validate_python({"name": "reinforce_plus_plus"}))
    one = algorithm.advantages(np.array([2.0]), np.array([3], np.int32), {"loss_mask": np.array([1, 0, 1])})
    assert isinstance(one, Advantages)
    assert one.values.tolist() == [2.0, 0.0, 2.0]
    assert advantages("reinforce_plus_plus", [1.0] * 4) == pytest.approx(MASK)  # equal rewards, and not dropped
    with pytest.raises(ValueError, match="sample 1 has no trained token"):
        algorithm.advantages(np.ones(2), np.array([1, 2], np.int32), {"loss_mask": np.array([1, 0, 0])})
    with pytest.raises(ValueError, match="loss_mask is missing"):
        algorithm.advantages(np.ones(2), np.array([1, 2], np.int32))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_kl_in_the_reward_counts_before_the_group_is_compared(name: str) -> None:
    less = [
        reward - 0.3 * math.fsum(KL[t] for t in range(len(MASK)) if SAMPLE[t] == sample)
        for sample, reward in enumerate(REWARDS)
    ]
    expected = centred(less, deviation=name == "grpo")
    expected = [value * (4 / 3 if name == "rloo" else 1) for value in expected]
    assert advantages(name, kl_reward_coef=0.3) == per_token(expected)
    assert advantages(name, kl_reward_coef=0.3, student_logprobs="rollout") != per_token(expected)
    # Equal rewards are dropped all the same: their divergences alone are no reason to learn.
    assert advantages(name, [1.0] * 4, kl_reward_coef=0.3) == "zero_variance"


def test_overlong_answers_are_penalised() -> None:
    shaping = {"overlong_buffer": 2, "overlong_limit": 4, "overlong_penalty": 0.8}
    # Lengths 3, 2, 4, 2: half of it, nothing, all of it, nothing.
    shaped = [0.5 - 0.4, 1.5, -1.0 - 0.8, 0.25]
    assert advantages("dapo", **shaping) == per_token(centred(shaped, deviation=True))
    assert advantages("dapo", [1.0] * 4) == "zero_variance"
    assert advantages("dapo", [1.0] * 4, **shaping) == per_token(centred([0.6, 1.0, 0.2, 1.0], deviation=True))


def test_answers_that_were_cut_have_no_advantage() -> None:
    expected = centred(REWARDS, deviation=True)
    # Of samples 0 and 1 the last sequence ended by itself or was cut; that of an earlier one doesn't matter.
    finished = ["length", "stop", "stop", "turns", "stop", "length"]
    columns = COLUMNS | {"finish": finished}
    algorithm = create(ALGORITHM.validate_python({"name": "dapo", "mask_truncated": True}))
    result = algorithm.advantages(np.array(REWARDS), np.array(LENGTHS, np.int32), columns)
    assert isinstance(result, Advantages)
    assert result.values.tolist() == per_token([expected[0], 0.0, expected[2], 0.0])
    columns = COLUMNS | {"finish": ["length"] * 6}
    for rewards in (REWARDS, [0.0] * 4):  # the cut is why there is nothing to learn, also where rewards are equal
        found = algorithm.advantages(np.array(rewards), np.array(LENGTHS, np.int32), columns)
        assert found == Filtered(DropReason.ALL_TRUNCATED)
    with pytest.raises(ValueError, match="finish is missing"):
        algorithm.advantages(np.array(REWARDS), np.array(LENGTHS, np.int32))


@each("name", sorted(set(ALGORITHMS) - {"opd"}))
def test_equal_rewards_and_single_samples(name: str) -> None:
    dropped = name not in ("reinforce_plus_plus", "ppo")
    assert (advantages(name, [0.1 + 0.2] * 4) == "zero_variance") == dropped
    if dropped:
        assert advantages(name, [0.1 + 0.2] * 4, drop_zero_variance=False) == [0.0] * len(MASK)
    algorithm = create(ALGORITHM.validate_python({"name": name}))
    columns = {"loss_mask": np.ones(2, np.uint8)}
    if name == "rloo":
        with pytest.raises(ValueError, match="the group has 1 sample: the baseline is the mean of the others"):
            algorithm.advantages(np.array([0.5]), np.array([2], np.int32), columns)
    else:
        one = algorithm.advantages(np.array([0.5]), np.array([2], np.int32), columns)
        assert isinstance(one, Advantages)
        # With a critic it is the reward of each token, which the last one has.
        assert one.values.tolist() == ([0.0, 0.5] if name == "ppo" else [0.5, 0.5])


def test_whitening_is_over_all_trained_tokens_of_the_step() -> None:
    random = np.random.default_rng(0)
    groups = [random.normal(3, 2, size).astype(np.float32) for size in (5, 1, 9)]
    masks = [(random.random(group.size) < 0.7).astype(np.uint8) for group in groups]
    groups[2][masks[2] == 0] = np.nan
    trained = [
        float(a) for group, mask in zip(groups, masks, strict=True) for a, m in zip(group, mask, strict=True) if m
    ]
    mean = math.fsum(trained) / len(trained)
    std = math.sqrt(math.fsum((a - mean) ** 2 for a in trained) / len(trained))
    whitening = Whitening.of(groups, masks)
    assert (whitening.mean, whitening.deviation) == pytest.approx((mean, std), rel=1e-12)
    for order in itertools.permutations(range(3)):
        assert Whitening.of([groups[i] for i in order], [masks[i] for i in order]) == whitening
    for group, mask in zip(groups, masks, strict=True):
        expected = [(float(a) - mean) / std if m else 0.0 for a, m in zip(group, mask, strict=True)]
        np.testing.assert_allclose(whitening.apply(group, mask), expected, rtol=1e-6)
    same = np.full(4, 0.5, np.float32)
    ones = np.ones(4, np.uint8)
    assert Whitening.of([same], [ones]).apply(same, ones).tolist() == [0.0] * 4
    assert Whitening.of([same], [0 * ones]).apply(same, 0 * ones).tolist() == [0.0] * 4


@pytest.mark.parametrize(("gamma", "lambda_"), [(1.0, 1.0), (0.9, 0.95), (0.99, 0.0)])
def test_generalized_advantages_are_weighted_sums_of_differences(gamma: float, lambda_: float) -> None:
    random = np.random.default_rng(1)
    values, lengths, mask = random.normal(0, 1, len(MASK)), np.array(LENGTHS, np.int32), np.array(MASK, np.uint8)
    rewards = token_rewards(np.array(REWARDS), lengths, mask, np.array(KL), 0.1)
    found, returns = generalized_advantages(rewards, values, lengths, mask, gamma, lambda_)
    for sample in range(4):
        own = [t for t in range(len(MASK)) if SAMPLE[t] == sample and MASK[t]]
        following = [*(values[t] for t in own[1:]), 0.0]
        delta = [rewards[t] + gamma * v - values[t] for t, v in zip(own, following, strict=True)]
        for position, t in enumerate(own):
            expected = sum((gamma * lambda_) ** later * d for later, d in enumerate(delta[position:]))
            assert found[t] == pytest.approx(expected, rel=1e-12)
            assert returns[t] == pytest.approx(expected + values[t], rel=1e-12)
    assert not found[mask == 0].any()
    assert not returns[mask == 0].any()


@pytest.mark.parametrize("discount", [1.0, 0.999, 0.5, 1e-3])
def test_generalized_advantages_of_long_answers_are_those_of_the_recursion(discount: float) -> None:
    random = np.random.default_rng(2)
    lengths, mask = np.array([3000, 0, 1, 2500], np.int32), (random.random(5501) < 0.9).astype(np.uint8)
    rewards, values = random.normal(0, 1, 5501) * mask, random.normal(0, 1, 5501)
    gamma = 0.9 if discount < 0.9 else 1.0
    found, returns = generalized_advantages(rewards, values, lengths, mask, gamma, discount)
    ends = np.cumsum(lengths)
    for begin, end in zip(ends - lengths, ends, strict=True):
        next_value = next_advantage = 0.0
        for t in reversed(begin + np.flatnonzero(mask[begin:end])):
            delta = rewards[t] + gamma * next_value - values[t]
            next_advantage, next_value = delta + gamma * discount * next_advantage, values[t]
            assert found[t] == pytest.approx(next_advantage, rel=1e-9, abs=1e-11)
            assert returns[t] == pytest.approx(next_advantage + next_value, rel=1e-9, abs=1e-11)


def test_advantages_of_which_one_is_not_finite_are_not_normalised_to_anything_finite() -> None:
    ones = np.ones(3, np.uint8)
    for worst in (np.nan, np.inf):
        bad, good = np.array([1.0, worst, 2.0], np.float32), np.array([1.0, 2.0, 3.0], np.float32)
        whitening = Whitening.of([good, bad, -bad], [ones, ones, ones])
        assert whitening == Whitening(0.0, 0.0), "JSON has no NaN, and NaN isn't equal to itself"
        assert not np.isfinite(whitening.apply(good, ones)).any()
        assert Whitening.of([good, bad], [ones, np.array([1, 0, 1], np.uint8)]).deviation > 0


@pytest.mark.parametrize("whiten", [True, False])
def test_ppo_makes_advantages_from_values(whiten: bool) -> None:
    algorithm = cast(WithCritic, create(ALGORITHM.validate_python(
        {"name": "ppo", "gamma": 0.9, "gae_lambda": 0.8, "whiten_advantages": whiten, "kl_reward_coef": 0.1}
    )))  # fmt: skip
    random = np.random.default_rng(6)
    assert algorithm.needs.whitened == whiten, "by the trainer, over the whole step"
    mask, lengths = np.array(MASK, np.uint8), np.array(LENGTHS, np.int32)
    for scale in (1.0, 3.0):
        judged = algorithm.advantages(np.array(REWARDS) * scale, lengths, COLUMNS)
        assert isinstance(judged, Advantages)
        own = token_rewards(np.array(REWARDS) * scale, lengths, mask, np.array(KL), 0.1)
        assert judged.values.tolist() == own.astype(np.float32).tolist()
        values = random.normal(0, 1, len(MASK)).astype(np.float32)
        found = algorithm.advantages_and_returns(ValuedGroup(judged.values, values, mask, lengths))
        advantage, goal = generalized_advantages(own, values.astype(float), lengths, mask, 0.9, 0.8)
        np.testing.assert_allclose(found.advantages, advantage, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found.returns, goal, rtol=1e-5, atol=1e-6)
        assert found.advantages.dtype == found.returns.dtype == np.float32


def test_the_value_loss_stops_where_a_value_has_moved_far_enough() -> None:
    random = np.random.default_rng(5)
    value, old, goal = (random.normal(0, 1, 40) for _ in range(3))
    values = torch.tensor(value, requires_grad=True)
    loss, clipped = clipped_value_loss(values, torch.tensor(old), torch.tensor(goal), 0.4)
    loss.sum().backward()
    assert values.grad is not None
    assert 0 < int(clipped.sum()) < 40

    def formula(v: float, o: float, g: float) -> float:
        near = o + max(-0.4, min(0.4, v - o))
        return max((v - g) ** 2, (near - g) ** 2) / 2

    for t, (v, o, g) in enumerate(zip(value, old, goal, strict=True)):
        assert loss[t].item() == pytest.approx(formula(v, o, g), rel=1e-12)
        assert bool(clipped[t]) == (abs(v - o) > 0.4)
        slope = (formula(v + 1e-6, o, g) - formula(v - 1e-6, o, g)) / 2e-6
        assert values.grad[t].item() == pytest.approx(slope, rel=1e-6, abs=1e-8)


def test_a_teacher_counts_where_the_student_disagrees_and_never_as_agreement() -> None:
    mask, base = np.array(MASK, np.uint8), np.arange(len(MASK), dtype=np.float64)
    teacher = np.where(mask == 1, REFERENCE, np.nan).astype(np.float32)
    found = distilled(base, COLUMNS["old_logprobs"], teacher, mask, 0.5)
    expected = [a - 0.5 * d if m else 0.0 for a, d, m in zip(base, KL, MASK, strict=True)]
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    teacher[0] = np.nan
    with pytest.raises(ValueError, match="NaN or infinite at a trained token"):
        distilled(base, COLUMNS["rollout_logprobs"], teacher, mask, 0.5)
    with pytest.raises(ValueError, match=r"teacher_logprobs is \[10\], but the mask is \[11\]"):
        distilled(base, COLUMNS["rollout_logprobs"], teacher[:-1], mask, 0.5)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opd"])
def test_every_algorithm_can_have_a_teacher(name: str) -> None:
    columns = COLUMNS | {"teacher_logprobs": REFERENCE}
    rewarded = {"reward_coef": 0.25} if name == "opd" else {}
    own = centred(REWARDS, deviation=name in ("grpo", "opd"))
    factor = {"rloo": 4 / 3, "opd": 0.25}.get(name, 1.0)
    plain = [factor * own[s] for s in SAMPLE]
    by_engine = [a - 0.5 * d if m else 0.0 for a, d, m in zip(plain, ENGINE_KL, MASK, strict=True)]
    # By default the loss subtracts it, where log-probs are current (test_losses.py).
    for student, expected in (("current", plain), ("rollout", by_engine)):
        settings = {"distill_coef": 0.5, "student_logprobs": student, **rewarded}
        algorithm = create(ALGORITHM.validate_python({"name": name, **settings}))
        result = algorithm.advantages(np.array(REWARDS), np.array(LENGTHS, np.int32), columns)
        assert isinstance(result, Advantages)
        assert result.values.tolist() == pytest.approx(expected, rel=1e-6)


def test_a_teacher_counts_before_the_loss_where_advantages_are_normalised() -> None:
    columns = COLUMNS | {"teacher_logprobs": REFERENCE}
    settings = {"name": "reinforce_plus_plus_baseline", "distill_coef": 0.5}
    algorithm = create(ALGORITHM.validate_python(settings))
    assert {"old_logprobs", "teacher_logprobs"} <= set(algorithm.needs.advantages)
    result = algorithm.advantages(np.array(REWARDS), np.array(LENGTHS, np.int32), columns)
    assert isinstance(result, Advantages)
    own = centred(REWARDS, deviation=False)
    expected = [own[s] - 0.5 * d if m else 0.0 for s, d, m in zip(SAMPLE, KL, MASK, strict=True)]
    assert result.values.tolist() == pytest.approx(expected, rel=1e-6)


def test_distillation_alone_does_not_see_the_rewards() -> None:
    columns = COLUMNS | {"teacher_logprobs": REFERENCE}
    by_engine = [-d if m else 0.0 for d, m in zip(ENGINE_KL, MASK, strict=True)]
    for student, expected in (("current", [0.0] * len(MASK)), ("rollout", by_engine)):
        algorithm = create(ALGORITHM.validate_python({"name": "opd", "student_logprobs": student}))
        for rewards in (REWARDS, [1.0] * 4):
            result = algorithm.advantages(np.array(rewards), np.array(LENGTHS, np.int32), columns)
            assert isinstance(result, Advantages)
            assert result.values.tolist() == pytest.approx(expected)


@each(
    ("settings", "problem"),
    [
        ('name = "opd"', "roles.teacher.model is empty: set it to the teacher's model"),
        ("distill_coef = 1.0", "roles.teacher.model is empty: set it to the teacher's model"),
        ('name = "opd"\ndistill_coef = 0.0', "so the teacher would not count: set one of them"),
        ('name = "opd"\ndistill_loss_coef = 0.1', "the teacher counts in the advantages or in the loss"),
        ('[roles.teacher]\nmodel = "big"', 'roles.teacher.model is "big", but algorithm.distill_coef and'),
        ('[roles.reference]\nmodel = "big"', 'roles.reference.model is "big", but algorithm.kl_coef is 0'),
    ],
)
def test_a_teacher_that_makes_no_sense_is_refused(settings: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load(RUN + settings)


RUN = """
run.steps = 1
model.path = "model"
data.source = "addition"
reward.name = "addition"
[algorithm]
"""


def test_columns_that_advantages_need_reach_their_stage() -> None:
    def needs(settings: str) -> set[str]:
        stages = {stage.name: stage for stage in stages_for(load(RUN + settings))}
        return set(stages["advantage"].needs)

    plain = needs("")
    assert needs("mask_truncated = true") - plain == {"finish"}
    engine = 'student_logprobs = "rollout"'
    served = needs(f'kl_reward_coef = 0.1\n{engine}\n[roles.reference]\nplacement = "service"')
    assert served - plain == {"loss_mask", "rollout_logprobs", "ref_logprobs"}
    taught = needs(f'distill_coef = 0.1\n{engine}\n[roles.teacher]\nmodel = "big"')
    assert taught - plain == {"loss_mask", "rollout_logprobs", "teacher_logprobs"}
    assert needs('distill_coef = 0.1\n[roles.teacher]\nmodel = "big"') == plain  # the loss subtracts it
    assert needs('distill_loss_coef = 0.1\n[roles.teacher]\nmodel = "big"') == plain  # only the loss sees it


@each(
    ("settings", "taken_in"),
    [
        ("kl_reward_coef = 0.1", set()),
        ('distill_coef = 0.1\nmask_truncated = true\n[roles.teacher]\nmodel = "big"\nplacement = "trainer"', set()),
        # The trainer's own log-probs.
        ('kl_reward_coef = 0.1\n[roles.reference]\nplacement = "service"', {"ref_logprobs"}),
        # The trainer knows with which weights a group must be scored once it is part of a step.
        (
            'kl_reward_coef = 0.1\n[roles.reference]\nplacement = "service"\nrefresh_every = 5',
            {"ref_logprobs", "reference_weights"},
        ),
        (
            'name = "ppo"\nkl_reward_coef = 0.1\n[roles.critic]\nplacement = "service"',
            {"values", "critic_state"},
        ),
        # One of two columns is the trainer's: it takes in the other.
        (
            'kl_reward_coef = 0.1\ndistill_coef = 0.1\n[roles.teacher]\nmodel = "big"',
            {"teacher_logprobs"},
        ),
    ],
)
def test_a_run_whose_advantages_need_a_column_of_the_trainer_has_no_advantage_stage(
    settings: str, taken_in: set[str]
) -> None:
    config = load(RUN + settings)
    stages = {stage.name: stage for stage in stages_for(config)}
    plain = {stage.name: stage for stage in stages_for(load(RUN))}
    assert "advantage" not in stages
    assert ADVANTAGE not in roles_for(config)
    assert set(stages["train"].needs) == set(plain["train"].needs) - {"advantages"} | taken_in


# --- aggregation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", ["token_mean", "sample_mean", "group_mean", "sample_sum", "constant_length"])
def test_weights_and_normalizer_make_the_mean(aggregation: str) -> None:
    """Two groups of unequal lengths, beside the mean written out; also if they are two steps' halves."""
    random = np.random.default_rng(2)
    groups = []
    for lengths in ([3, 1, 4], [2, 6, 1]):
        mask = (random.random(sum(lengths)) < 0.7).astype(np.uint8)
        mask[[0, -1]] = 1
        groups.append((np.array(lengths, np.int32), mask, random.normal(0, 1, sum(lengths))))
    length = {"constant_length": 7} if aggregation == "constant_length" else {}
    algorithm = create(ALGORITHM.validate_python({"loss_aggregation": aggregation, **length}))
    total = sum(float(algorithm.token_weights(mask, lengths) @ loss) for lengths, mask, loss in groups)
    found = total / algorithm.normalizer(sum(int(mask.sum()) for _, mask, _ in groups), 6)
    samples = [
        [loss[t] for t in range(begin, begin + length) if mask[t]]
        for lengths, mask, loss in groups
        for begin, length in zip(np.cumsum(lengths) - lengths, lengths, strict=True)
    ]
    tokens = [value for sample in samples for value in sample]
    by_group = [[value for sample in samples[i : i + 3] for value in sample] for i in (0, 3)]
    expected = {
        "token_mean": math.fsum(tokens) / len(tokens),
        "sample_mean": math.fsum(math.fsum(one) / max(len(one), 1) for one in samples) / 6,
        "group_mean": math.fsum(math.fsum(one) / len(one) for one in by_group) / 2,
        "sample_sum": math.fsum(tokens) / 6,
        "constant_length": math.fsum(tokens) / 6 / 7,
    }[aggregation]
    assert found == pytest.approx(expected, rel=1e-6)


@each("name", ALGORITHMS)
def test_whoever_compares_the_samples_of_a_group_needs_two(name: str) -> None:
    """One sample has the raw reward as its advantage: no baseline."""
    alone = {"reinforce_plus_plus", "ppo", "opd"}
    assert ALGORITHM.validate_python({"name": name}).min_samples == (1 if name in alone else 2)


def test_distillation_with_rewards_compares_the_samples_of_a_group() -> None:
    assert ALGORITHM.validate_python({"name": "opd", "reward_coef": 0.5}).min_samples == 2
