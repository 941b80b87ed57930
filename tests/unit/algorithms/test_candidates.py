"""Distillation over the likeliest tokens, beside sums over the whole vocabulary in Python's floats."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from relaxd.algorithms import LossInputs, LossOutput, create
from relaxd.config.algorithm import ALGORITHM
from tests.kit.cases import each

torch.set_num_threads(1)
TOKENS, VOCAB = 6, 9
MASK = (1, 1, 0, 1, 1, 1)
DIVERGENCES = ("reverse_kl", "forward_kl", "jensen_shannon")


def settings_of(divergence: str, top_k: int, candidates: str = "teacher") -> dict[str, Any]:
    return {
        "name": "opd",
        "distill_coef": 0.0,
        "distill_loss_coef": 0.7,
        "distill_top_k": top_k,
        "distill_divergence": divergence,
        "distill_candidates": candidates,
    }


class Case:
    """Logits of student and teacher for the whole vocabulary, and the candidates of some tokens."""

    def __init__(self, top_k: int, *, union: bool = False, seed: int = 3) -> None:
        random = np.random.default_rng(seed)
        self.student = random.normal(0, 1.5, (TOKENS, VOCAB))
        self.teacher = random.normal(0, 1.5, (TOKENS, VOCAB))
        self.weight = random.random(TOKENS)
        of_teacher = np.argsort(-self.teacher, -1)[:, :top_k]
        self.ids = of_teacher
        if union:
            of_student = np.argsort(-self.student, -1)[:, :top_k]
            repeated = (of_student[:, :, None] == of_teacher[:, None, :]).any(-1)
            self.ids = np.concatenate([of_teacher, np.where(repeated, -1, of_student)], -1)
        self.top_k = top_k

    def inputs(self, logits: torch.Tensor) -> LossInputs:
        """Inputs of a loss whose log-probs follow from the student's logits."""
        ids = torch.from_numpy(self.ids)
        logprobs, teacher = logits.log_softmax(-1), torch.from_numpy(self.teacher).log_softmax(-1)
        tokens = torch.arange(TOKENS) % VOCAB
        zeros = torch.zeros(TOKENS, dtype=torch.float64)
        own = logprobs.gather(-1, tokens[:, None])[:, 0]
        return LossInputs(
            logprobs=own,
            columns={
                "rollout_logprobs": own.detach(),
                "advantages": zeros,
                "candidates": ids,
                "teacher_candidate_logprobs": teacher.gather(-1, ids.clamp(min=0)),
            },
            mask=torch.tensor(MASK, dtype=torch.float64),
            weight=torch.from_numpy(self.weight),
            sequence=torch.zeros(TOKENS, dtype=torch.int64),
            sequences=1,
            candidate_logprobs=logprobs.gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0),
        )

    def loss(self, settings: dict[str, Any], logits: torch.Tensor) -> LossOutput:
        return create(ALGORITHM.validate_python(settings)).loss(self.inputs(logits))

    def distributions(self, token: int) -> tuple[list[float], list[float]]:
        """Student's and teacher's probabilities of a token's candidates, and of the rest."""
        found = []
        for logits in (self.student[token], self.teacher[token]):
            total = math.fsum(math.exp(z) for z in logits)
            chosen = [math.exp(logits[v]) / total for v in self.ids[token] if v >= 0]
            others = [math.exp(z) / total for v, z in enumerate(logits) if v not in self.ids[token]]
            found.append([*chosen, max(math.fsum(others), 1e-6)])
        return found[0], found[1]


def kl(one: list[float], other: list[float]) -> float:
    return math.fsum(a * math.log(a / b) for a, b in zip(one, other, strict=True))


def divergence(kind: str, student: list[float], teacher: list[float]) -> float:
    mean = [(a + b) / 2 for a, b in zip(student, teacher, strict=True)]
    return {
        "reverse_kl": kl(student, teacher),
        "forward_kl": kl(teacher, student),
        "jensen_shannon": (kl(student, mean) + kl(teacher, mean)) / 2,
    }[kind]


@each("kind", DIVERGENCES)
@each(("top_k", "union"), [(1, False), (4, False), (VOCAB, False), (3, True)])
def test_loss_sums_and_gradient_match_the_formula(kind: str, top_k: int, union: bool) -> None:
    case, settings = Case(top_k, union=union), settings_of(kind, top_k, "union" if union else "teacher")
    logits = torch.from_numpy(case.student).requires_grad_()
    output = case.loss(settings, logits)
    both = {token: case.distributions(token) for token in range(TOKENS) if MASK[token]}
    expected = math.fsum(0.7 * case.weight[token] * divergence(kind, *pair) for token, pair in both.items())
    assert output.loss.item() == pytest.approx(expected, rel=1e-9)
    sums = {name: value.item() for name, value in output.sums.items()}
    assert sums["teacher_kl"] == pytest.approx(sum(kl(*pair) for pair in both.values()), rel=1e-9)
    assert sums["student_candidate_mass"] == pytest.approx(sum(sum(p[:-1]) for p, _ in both.values()), rel=1e-9)
    assert sums["teacher_candidate_mass"] == pytest.approx(sum(sum(q[:-1]) for _, q in both.values()), rel=1e-9)
    assert ("candidate_overlap" in sums) == union
    if union:
        missing = int((case.ids[np.array(MASK) == 1] < 0).sum())
        assert missing > 0
        assert sums["candidate_overlap"] == pytest.approx(missing / top_k)

    output.loss.backward()
    assert logits.grad is not None
    for place in np.ndindex(TOKENS, VOCAB):
        quotient = 0.0
        for sign in (1, -1):
            moved = case.student.copy()
            moved[place] += sign * 1e-6
            quotient += sign * case.loss(settings, torch.from_numpy(moved)).loss.item() / 2e-6
        assert logits.grad[place].item() == pytest.approx(quotient, rel=1e-5, abs=1e-9), place


@pytest.mark.parametrize("top_k", [3, VOCAB])
def test_as_an_advantage_the_divergence_would_teach_nothing(top_k: int) -> None:
    """Why it is refused: its policy gradient is 0 in expectation, over all tokens that might have been sampled.

    That of the sampled token's difference is the gradient of the whole divergence.
    """
    case = Case(top_k)
    student = torch.from_numpy(case.student).requires_grad_()
    logprobs, teacher = student.log_softmax(-1), torch.from_numpy(case.teacher).log_softmax(-1)
    probabilities = logprobs.detach().exp()

    def expected_gradient(advantages: torch.Tensor) -> torch.Tensor:
        """Policy gradient of -advantages [TOKENS, VOCAB], each token weighed by its probability."""
        (gradient,) = torch.autograd.grad((-advantages * probabilities * logprobs).sum(), student, retain_graph=True)
        return gradient

    divergences = [divergence("reverse_kl", *case.distributions(token)) for token in range(TOKENS)]
    baseline = torch.tensor(divergences, dtype=torch.float64)[:, None].expand(TOKENS, VOCAB)
    assert expected_gradient(-baseline).abs().max() < 1e-12

    (whole,) = torch.autograd.grad((logprobs.exp() * (logprobs - teacher)).sum(), student, retain_graph=True)
    assert whole.abs().max() > 0.1
    torch.testing.assert_close(expected_gradient((teacher - logprobs).detach()), whole)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_more_candidates_see_more_and_all_see_everything(kind: str) -> None:
    found = [
        Case(top_k).loss(settings_of(kind, top_k), torch.from_numpy(Case(1).student)).loss.item()
        for top_k in range(1, VOCAB + 1)
    ]
    assert found[0] > 0
    assert all(few <= more + 1e-12 for few, more in itertools.pairwise(found))


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_a_student_like_its_teacher_has_nothing_to_learn(kind: str) -> None:
    case = Case(4)
    logits = torch.from_numpy(case.teacher).requires_grad_()
    loss = case.loss(settings_of(kind, 4), logits).loss
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-12)
    assert logits.grad is not None
    assert logits.grad.abs().max() < 1e-12


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_float32_stays_exact_and_finite_where_the_student_is_certain(kind: str) -> None:
    """The rest has then less probability than float32 rounds away."""
    case = Case(4)
    case.student[:] = case.teacher * 12
    case.student[:, 0] += 20
    logits = torch.from_numpy(case.student)
    exact, gradients = case.loss(settings_of(kind, 4), logits).loss.item(), []
    for dtype in (torch.float32, torch.float64):
        leaf = logits.to(dtype).requires_grad_()
        inputs = case.inputs(leaf)
        columns = {name: c.to(dtype) if c.is_floating_point() else c for name, c in inputs.columns.items()}
        given = {name: getattr(inputs, name).to(dtype) for name in ("mask", "weight")}
        loss = create(ALGORITHM.validate_python(settings_of(kind, 4))).loss(replace(inputs, columns=columns, **given))
        loss.loss.backward()
        assert loss.loss.item() == pytest.approx(exact, rel=1e-4)
        gradients.append(leaf.grad.double())
    torch.testing.assert_close(*gradients, atol=1e-3, rtol=1e-3)


def test_what_stands_where_the_mask_is_0_does_not_matter() -> None:
    case, algorithm = Case(4), create(ALGORITHM.validate_python(settings_of("reverse_kl", 4)))
    clean = case.inputs(torch.from_numpy(case.student).requires_grad_())
    assert clean.candidate_logprobs is not None
    untrained = clean.mask == 0
    dirty = replace(
        clean,
        columns={
            **clean.columns,
            "teacher_candidate_logprobs": clean.columns["teacher_candidate_logprobs"].masked_fill(
                untrained[:, None], math.nan
            ),
        },
        candidate_logprobs=clean.candidate_logprobs.masked_fill(untrained[:, None], math.nan),
    )
    assert torch.equal(algorithm.loss(dirty).loss, algorithm.loss(clean).loss)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distill_loss_coef": 0.0, "distill_coef": 1.0}, "distill_top_k is 4, but .*no gradient in expectation"),
        ({"distill_top_k": 0}, 'distill_divergence is "forward_kl", but algorithm.distill_top_k is 0'),
        ({"distill_estimator": "k3"}, 'distill_estimator is "k3", but with algorithm.distill_top_k = 4'),
    ],
)
def test_settings_that_would_not_count_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ALGORITHM.validate_python(settings_of("forward_kl", 4) | changes)
