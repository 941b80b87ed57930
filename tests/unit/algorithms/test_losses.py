"""Every algorithm's loss, reported sums and gradient beside formulas in float64 (loss_formulas.py)."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from relaxd.algorithms import ALGORITHMS, Algorithm, LossInputs, create
from relaxd.config.algorithm import ALGORITHM
from tests.kit.cases import each
from tests.unit.algorithms.loss_formulas import Micro, formula
from tests.unit.algorithms.loss_inputs import TOKENS, make_inputs

torch.set_num_threads(1)

CASES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo dual clip": {"dual_clip": 1.3},
    "grpo current": {"old_logprobs": "current"},
    "grpo unbiased k1": {"kl_coef": 0.3, "kl_estimator": "k1", "kl_unbiased": True},
    "grpo unbiased k3 current": {"kl_coef": 0.3, "kl_estimator": "k3", "kl_unbiased": True, "old_logprobs": "current"},
    "grpo k2, entropy": {"kl_coef": 0.3, "kl_estimator": "k2", "entropy_coef": 0.2, "clip_low": 0.1},
    "grpo k1": {"kl_coef": 0.3, "kl_estimator": "k1"},
    "grpo opsm": {"opsm_delta": 0.01},
    "grpo veto": {"veto_high": 1.8, "veto_low": 0.5},
    "grpo veto of unbiased kl": {"veto_high": 1.8, "veto_low": 0.5, "kl_coef": 0.3, "kl_unbiased": True},
    "grpo veto of sequences": {"veto_high": 2.1, "veto_low": 0.45, "veto_sequences": True},
    "grpo no veto": {"veto_high": 0.0},
    "grpo tis with both limits": {
        "old_logprobs": "current",
        "correction": "tis",
        "tis_clip_low": 0.8,
        "tis_clip": 1.2,
    },
    "grpo icepop, kl, entropy": {
        "old_logprobs": "current",
        "correction": "icepop",
        "icepop_low": 0.7,
        "icepop_high": 1.4,
        "kl_coef": 0.2,
        "entropy_coef": 0.1,
    },
    "dr_grpo": {},
    "dapo": {},
    "gspo": {"clip_low": 0.1, "clip_high": 0.1},
    "gspo current": {"old_logprobs": "current"},
    "gspo dual clip, opsm": {"clip_low": 0.1, "clip_high": 0.1, "dual_clip": 1.05, "opsm_delta": 0.01},
    "sapo": {"tau_negative": 1.5},
    "sapo current tis": {"old_logprobs": "current", "correction": "tis", "tis_clip": 1.1},
    "cispo": {"clip_low": 0.3, "clip_high": 0.4},
    "cispo, no lower limit": {"clip_high": 0.2},
    "rloo": {},
    "rloo tis": {"correction": "tis", "tis_clip": 1.1, "kl_coef": 0.2, "kl_estimator": "k1", "kl_unbiased": True},
    "reinforce_plus_plus": {"kl_coef": 0.1},
    "reinforce_plus_plus_baseline": {"kl_coef": 0.1},
    "opd": {},
    "opd of the engine": {"student_logprobs": "rollout"},
    "grpo with a teacher, tis": {"distill_coef": 0.4, "old_logprobs": "current", "correction": "tis", "tis_clip": 1.1},
    "opd loss form": {"distill_coef": 0.0, "distill_loss_coef": 0.7},
    "opd loss form, k3": {"distill_coef": 0.0, "distill_loss_coef": 0.7, "distill_estimator": "k3"},
    "gspo with a teacher in the loss": {"clip_low": 0.1, "clip_high": 0.1, "distill_loss_coef": 0.2, "kl_coef": 0.3},
    "ppo": {"kl_coef": 0.1},
}


def settings_of(case: str) -> dict[str, Any]:
    """Every setting of a case."""
    section = ALGORITHM.validate_python({"name": case.replace(",", "").split()[0], **CASES[case]})
    return section.model_dump()


def algorithm_of(case: str) -> Algorithm:
    return create(ALGORITHM.validate_python(settings_of(case)))


def micro_of(inputs: LossInputs) -> Micro:
    columns = {name: column.tolist() for name, column in inputs.columns.items()}
    assert inputs.entropy is not None
    return Micro(
        frozen=inputs.logprobs.tolist(),
        rollout=columns["rollout_logprobs"],
        ref=columns["ref_logprobs"],
        teacher=columns["teacher_logprobs"],
        advantage=columns["advantages"],
        mask=inputs.mask.tolist(),
        weight=inputs.weight.tolist(),
        entropy=inputs.entropy.tolist(),
        sequence=inputs.sequence.tolist(),
        old=columns.get("old_logprobs"),
    )


def test_every_algorithm_has_a_case() -> None:
    assert {case.replace(",", "").split()[0] for case in CASES} == set(ALGORITHMS)


@each("case", CASES)
@each("old", [False, True], ids=["one update", "several updates"])
def test_loss_sums_and_gradient_match_the_formula(case: str, old: bool) -> None:
    inputs, settings = make_inputs(old=old), settings_of(case)
    micro, output = micro_of(inputs), algorithm_of(case).loss(inputs)
    output.loss.backward()
    assert inputs.logprobs.grad is not None
    assert output.loss.item() == pytest.approx(formula(settings, micro, micro.frozen), rel=1e-12)
    sums = {name: value.item() for name, value in output.sums.items()}
    assert sums == pytest.approx({name: micro.sums[name] for name in sums}, rel=1e-12)
    for token in range(TOKENS):
        step = 1e-6
        above, below = ([*micro.frozen] for _ in range(2))
        above[token] += step
        below[token] -= step
        quotient = (formula(settings, micro, above) - formula(settings, micro, below)) / (2 * step)
        assert inputs.logprobs.grad[token].item() == pytest.approx(quotient, rel=1e-6, abs=1e-8), token


@each("case", CASES)
def test_each_case_shows_what_it_is_about(case: str) -> None:
    """A clip that never clips, or a mask that never masks, would test nothing."""
    inputs, settings = make_inputs(), settings_of(case)
    sums, trained = algorithm_of(case).loss(inputs).sums, float(inputs.mask.sum())
    at_one = settings.get("old_logprobs") == "current" or case.startswith("rloo")
    assert at_one or 0 < sums["clip_fraction"] < trained
    assert ("correction_fraction" in sums) == (settings["correction"] != "none")
    for name in ("correction_fraction", "opsm_fraction"):
        assert name not in sums or 0 < sums[name] < trained
    if "grpo veto" in case:
        assert 0 < sums["veto_fraction"] < trained


@each("case", CASES)
def test_float32_agrees(case: str) -> None:
    single, double = make_inputs(torch.float32), make_inputs()
    found, expected = algorithm_of(case).loss(single), algorithm_of(case).loss(double)
    assert found.loss.dtype == torch.float32
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=2e-5)


@each("case", CASES)
@each("pieces", [2, 5])
def test_the_loss_does_not_depend_on_how_sequences_are_divided(case: str, pieces: int) -> None:
    """Into micro-batches, and among data-parallel ranks: their losses and gradients add up."""
    whole, algorithm = make_inputs(), algorithm_of(case)
    output = algorithm.loss(whole)
    output.loss.backward()
    logprobs = whole.logprobs.detach().clone().requires_grad_()
    total, sums = torch.zeros((), dtype=torch.float64), dict.fromkeys(output.sums, 0.0)
    for piece in range(pieces):
        own = whole.sequence % pieces == piece
        _, sequence = torch.unique(whole.sequence[own], return_inverse=True)
        assert whole.entropy is not None
        part = algorithm.loss(
            replace(
                whole,
                logprobs=logprobs[own],
                columns={name: column[own] for name, column in whole.columns.items()},
                mask=whole.mask[own],
                weight=whole.weight[own],
                sequence=sequence,
                sequences=int(sequence.max()) + 1,
                entropy=whole.entropy[own],
            )
        )
        total = total + part.loss
        sums = {name: value + part.sums[name].item() for name, value in sums.items()}
    total.backward()
    torch.testing.assert_close(total, output.loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logprobs.grad, whole.logprobs.grad, rtol=1e-12, atol=1e-12)
    assert sums == pytest.approx({name: value.item() for name, value in output.sums.items()}, rel=1e-12)


@each("case", CASES)
def test_what_stands_where_the_mask_is_0_does_not_matter(case: str) -> None:
    clean, algorithm = make_inputs(), algorithm_of(case)
    untrained = clean.mask == 0

    def dirty(values: torch.Tensor) -> torch.Tensor:
        return values.detach().masked_fill(untrained, math.nan)

    assert clean.entropy is not None
    dirtied = replace(
        clean,
        logprobs=dirty(clean.logprobs).requires_grad_(),
        columns={name: dirty(column) for name, column in clean.columns.items()},
        weight=dirty(clean.weight),
        entropy=dirty(clean.entropy).requires_grad_(),
    )
    for inputs in (clean, dirtied):
        algorithm.loss(inputs).loss.backward()
    torch.testing.assert_close(algorithm.loss(dirtied).loss, algorithm.loss(clean).loss, rtol=0, atol=0)
    torch.testing.assert_close(dirtied.logprobs.grad, clean.logprobs.grad, rtol=0, atol=0)


@each("settings", [{}, {"kl_coef": 0.1, "kl_unbiased": True}], ids=["", "unbiased kl"])
@each("name", ALGORITHMS)
def test_one_extreme_token_does_not_own_the_step(name: str, settings: dict[str, Any]) -> None:
    """A token whose probability rose by e^10 had 22,026 times the gradient of the others; NaN isn't hidden."""
    algorithm = create(ALGORITHM.validate_python({"name": name, **settings}))
    inputs = make_inputs(spread=0.01)
    inputs = replace(inputs, sequence=torch.zeros_like(inputs.sequence), sequences=1)
    token = int(inputs.mask.argmax())
    inputs.columns["advantages"].fill_(-1.0)
    logprobs = inputs.logprobs.detach().clone()
    logprobs[token] = inputs.columns["rollout_logprobs"][token] + 10.0
    inputs = replace(inputs, logprobs=logprobs.requires_grad_())
    output = algorithm.loss(inputs)
    output.loss.backward()
    assert inputs.logprobs.grad is not None
    assert inputs.logprobs.grad.abs().max() <= 3.0
    assert output.sums["veto_fraction"] == 1
    broken = inputs.logprobs.detach().clone()
    broken[token] = math.nan
    assert algorithm.loss(replace(inputs, logprobs=broken.requires_grad_())).loss.isnan()


def test_distillation_in_the_loss_has_the_gradient_of_distillation_in_the_advantages() -> None:
    """On new samples, k2's gradient is (log π - log π_teacher) ∇ log π: what the advantages make of it."""
    gradients = []
    for settings in (
        {"distill_coef": 0.0, "distill_loss_coef": 0.7},
        {"distill_coef": 0.7},
        {"distill_coef": 0.7, "student_logprobs": "rollout"},
    ):
        inputs = make_inputs(spread=0.3)
        with torch.no_grad():
            inputs.logprobs.copy_(inputs.columns["rollout_logprobs"])
        columns = inputs.columns
        columns["advantages"].zero_()
        if "student_logprobs" in settings:  # as the advantage service does
            columns["advantages"].copy_(-0.7 * (columns["rollout_logprobs"] - columns["teacher_logprobs"]))
        create(ALGORITHM.validate_python({"name": "opd", **settings})).loss(inputs).loss.backward()
        assert inputs.logprobs.grad is not None
        gradients.append(inputs.logprobs.grad)
    assert gradients[0].abs().max() > 0.1
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
def test_distillation_of_stale_samples_has_the_gradient_of_the_divergence(noise: float) -> None:
    """Every token of a small vocabulary, weighted by the engine's probability: an expectation without sampling.

    The engine's logits differ by noise, as stale weights do. The reference is ∇ KL(student || teacher) by autograd.
    """
    random = np.random.default_rng(7)
    student, teacher = (torch.tensor(random.normal(0, 1, 30)) for _ in range(2))
    engine = (student + torch.tensor(random.normal(0, 1, 30)) * noise).log_softmax(-1)
    exact = student.clone().requires_grad_()
    p = exact.log_softmax(-1)
    (p.exp() * (p - teacher.log_softmax(-1))).sum().backward()
    assert exact.grad is not None

    def gradient(**settings: Any) -> torch.Tensor:
        logits = student.clone().requires_grad_()
        columns = {
            "rollout_logprobs": engine,
            "teacher_logprobs": teacher.log_softmax(-1),
            "advantages": torch.zeros(30, dtype=torch.float64),
        }
        if settings:
            columns["advantages"] = -(engine - teacher.log_softmax(-1))  # as the advantage service does
        wide = {"clip_low": 0.999, "clip_high": 1e6, "veto_high": 0.0}
        algorithm = create(ALGORITHM.validate_python({"name": "opd", **wide, **settings}))
        inputs = LossInputs(
            logprobs=logits.log_softmax(-1),
            columns=columns,
            mask=torch.ones(30),
            weight=engine.exp(),
            sequence=torch.arange(30),
            sequences=30,
        )
        algorithm.loss(inputs).loss.backward()
        assert logits.grad is not None
        return logits.grad

    torch.testing.assert_close(gradient(), exact.grad, rtol=1e-9, atol=1e-12)
    biased = gradient(student_logprobs="rollout")
    off = float((biased - exact.grad).norm() / exact.grad.norm())
    assert off < 1e-9 if noise == 0 else off > 0.05, "the engine's log-probs are another function of the tokens"


def test_where_algorithms_agree() -> None:
    """On new samples, with a ratio of 1, gradients are REINFORCE's, whatever clips or gates."""
    inputs = make_inputs(spread=0.0)
    expected = -inputs.weight * inputs.mask * inputs.columns["advantages"]
    for name in ALGORITHMS:
        inputs = make_inputs(spread=0.0)
        by_engine = {"student_logprobs": "rollout"} if name == "opd" else {}  # no term of a teacher in the loss
        create(ALGORITHM.validate_python({"name": name, **by_engine})).loss(inputs).loss.backward()
        found = inputs.logprobs.grad
        if name == "gspo":  # each token's share is the mean of its sequence's weights
            weight = inputs.segment_sum(inputs.weight * inputs.mask) / inputs.segment_sum(inputs.mask).clamp(min=1)
            shared = -weight[inputs.sequence] * inputs.mask * inputs.columns["advantages"]
            torch.testing.assert_close(found, shared)
        else:
            torch.testing.assert_close(found, expected)
