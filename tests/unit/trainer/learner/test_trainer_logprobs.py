"""Chunked log-probs and entropies against float64 formulas, forward and backward."""

import pytest
import torch

from services.trainer.learner.logprobs import VocabShard, likeliest_tokens, token_logprobs

ROWS, VOCAB, HIDDEN, COUNT = 53, 50, 16, 11


@pytest.fixture
def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return (
        torch.randn(COUNT, HIDDEN, dtype=torch.float64) * 2,
        torch.randn(ROWS, HIDDEN, dtype=torch.float64),
        torch.randint(0, VOCAB, (COUNT,)),
        torch.rand(COUNT, dtype=torch.float64) + 0.5,
    )


@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
def test_values_and_gradients_equal_the_formula(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], chunk: int
) -> None:
    hidden, weight, tokens, temperature = inputs
    for entropy_share in (0.0, 0.7):
        exact_hidden, exact_weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logits = exact_hidden @ exact_weight[:VOCAB].T / temperature[:, None]
        exact = torch.log_softmax(logits, -1)
        exact_logprobs = exact.gather(-1, tokens[:, None])[:, 0]
        exact_entropy = -(exact.exp() * exact).sum(-1)
        factors = torch.linspace(-1, 2, COUNT, dtype=torch.float64)
        (exact_logprobs * factors + entropy_share * exact_entropy).sum().backward()

        ours_hidden = hidden.float().requires_grad_()
        ours_weight = weight.float().requires_grad_()
        shard = VocabShard(start=0, size=VOCAB, group=None)
        logprobs, entropy, _ = token_logprobs(
            ours_hidden, ours_weight, tokens, temperature.float(), shard, chunk_tokens=chunk
        )
        (logprobs * factors.float() + entropy_share * entropy).sum().backward()

        torch.testing.assert_close(logprobs.double(), exact_logprobs, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(entropy.double(), exact_entropy, atol=1e-5, rtol=1e-5)
        assert exact_hidden.grad is not None
        assert exact_weight.grad is not None
        torch.testing.assert_close(ours_hidden.grad.double(), exact_hidden.grad, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(ours_weight.grad.double(), exact_weight.grad, atol=1e-5, rtol=1e-4)
        assert not ours_weight.grad[VOCAB:].any()


def test_extreme_logits_stay_finite(inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    hidden, weight, tokens, temperature = (x.float() if x.is_floating_point() else x for x in inputs)
    hidden = (hidden * 1000).requires_grad_()
    logprobs, entropy, _ = token_logprobs(hidden, weight, tokens, temperature, VocabShard(0, VOCAB, None))
    (logprobs + entropy).sum().backward()
    assert logprobs.isfinite().all()
    assert (entropy >= 0).all()
    assert hidden.grad.isfinite().all()


def test_bfloat16_gives_float32_results(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    hidden, weight, tokens, temperature = inputs
    ours_hidden = hidden.bfloat16().requires_grad_()
    ours_weight = weight.bfloat16().requires_grad_()
    logprobs, entropy, _ = token_logprobs(
        ours_hidden, ours_weight, tokens, temperature.float(), VocabShard(0, VOCAB, None), chunk_tokens=4
    )
    logprobs.sum().backward()
    assert logprobs.dtype == entropy.dtype == torch.float32
    exact = torch.log_softmax(hidden @ weight[:VOCAB].T / temperature[:, None], -1).gather(-1, tokens[:, None])[:, 0]
    assert (logprobs.double() - exact).abs().mean() < 0.2
    assert ours_weight.grad.dtype == torch.bfloat16


def test_no_tokens_give_no_values_but_a_gradient() -> None:
    hidden, weight = torch.zeros(0, HIDDEN, requires_grad=True), torch.randn(ROWS, HIDDEN, requires_grad=True)
    logprobs, *_ = token_logprobs(
        hidden, weight, torch.zeros(0, dtype=torch.int64), torch.zeros(0), VocabShard(0, VOCAB, None)
    )
    logprobs.sum().backward()
    assert logprobs.shape == (0,)
    assert not weight.grad.any()


def test_logits_that_are_kept_and_those_made_anew_give_the_same_bits(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    hidden, weight, tokens, temperature = (x.float() if x.is_floating_point() else x for x in inputs)
    found = []
    for kept_bytes in (0, 2 * 4 * VOCAB * 4, 1 << 20):  # no chunk, two of the three, all
        leaf = hidden.clone().requires_grad_()
        shard = VocabShard(0, VOCAB, None)
        logprobs, entropy, _ = token_logprobs(
            leaf, weight, tokens, temperature, shard, chunk_tokens=4, kept_bytes=kept_bytes
        )
        (logprobs * entropy).sum().backward()
        found.append((logprobs.detach(), entropy.detach(), leaf.grad))
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


def test_a_gradient_buffer_gets_the_weight_s_gradient(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    hidden, weight, tokens, temperature = (x.float() if x.is_floating_point() else x for x in inputs)
    plain, buffered = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    buffered.main_grad = torch.ones_like(weight)  # type: ignore[attr-defined]
    for leaf in (plain, buffered):
        logprobs, *_ = token_logprobs(hidden, leaf, tokens, temperature, VocabShard(0, VOCAB, None), chunk_tokens=4)
        logprobs.sum().backward()
    assert buffered.grad is None
    torch.testing.assert_close(buffered.main_grad - 1, plain.grad, atol=1e-6, rtol=1e-5)  # type: ignore[attr-defined]


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_candidates_have_their_own_log_probs_and_gradients(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], chunk: int
) -> None:
    """One of them is the token itself, one is missing."""
    hidden, weight, tokens, temperature = inputs
    candidates = torch.stack([(tokens + step) % VOCAB for step in (3, 0, 17, 9)], -1)
    candidates[:, 3] = -1
    factors = torch.randn(COUNT, 5, dtype=torch.float64)

    exact_hidden, exact_weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logprobs = torch.log_softmax(exact_hidden @ exact_weight[:VOCAB].T / temperature[:, None], -1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    exact = torch.cat([logprobs.gather(-1, candidates.clamp(min=0))[:, :3], logprobs.gather(-1, tokens[:, None])], -1)
    ((exact * factors[:, [0, 1, 2, 4]]).sum(-1) + 0.3 * entropy).sum().backward()

    ours_hidden, ours_weight = hidden.float().requires_grad_(), weight.float().requires_grad_()
    shard = VocabShard(start=0, size=VOCAB, group=None)
    found = token_logprobs(
        ours_hidden,
        ours_weight,
        tokens,
        temperature.float(),
        shard,
        chunk_tokens=chunk,
        kept_bytes=4 * VOCAB * 4,
        candidates=candidates,
    )
    assert not found.candidates[:, 3].any()
    together = torch.cat([found.candidates, found.tokens.unsqueeze(-1)], -1)
    ((together * factors.float()).sum(-1) + 0.3 * found.entropies).sum().backward()
    torch.testing.assert_close(together[:, [0, 1, 2, 4]].double(), exact, atol=1e-5, rtol=1e-5)
    assert exact_hidden.grad is not None
    assert exact_weight.grad is not None
    torch.testing.assert_close(ours_hidden.grad.double(), exact_hidden.grad, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(ours_weight.grad[:VOCAB].double(), exact_weight.grad[:VOCAB], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_the_likeliest_tokens_are_those_of_the_whole_vocabulary(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], chunk: int
) -> None:
    hidden, weight, _, temperature = inputs
    exact = torch.log_softmax(hidden @ weight[:VOCAB].T / temperature[:, None], -1)
    shard = VocabShard(0, VOCAB, None)
    for count, below in ((7, VOCAB), (7, 30), (30, 30)):
        expected = exact[:, :below].topk(count)
        found = likeliest_tokens(
            hidden.float(), weight.float(), temperature.float(), shard, count, ids_below=below, chunk_tokens=chunk
        )
        assert found.ids.dtype == torch.int32
        assert torch.equal(found.ids.long(), expected.indices)
        torch.testing.assert_close(found.logprobs.double(), expected.values, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kept_bytes", [0, 2 * 4 * VOCAB * 4, 1 << 20])
def test_float32_logits_are_exact_from_bfloat16_hidden_states(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], kept_bytes: int
) -> None:
    hidden, weight, tokens, temperature = inputs
    candidates = torch.stack([(tokens + step) % VOCAB for step in (3, 0)], -1)
    exact_hidden, exact_weight = (tensor.bfloat16().double().requires_grad_() for tensor in (hidden, weight))
    exact = torch.log_softmax(exact_hidden @ exact_weight[:VOCAB].T / temperature.float().double()[:, None], -1)
    entropies, shard = -(exact.exp() * exact).sum(-1), VocabShard(0, VOCAB, None)
    factors = torch.linspace(-1, 2, COUNT, dtype=torch.float64)
    of_tokens, of_candidates = exact.gather(-1, tokens[:, None])[:, 0], exact.gather(-1, candidates)
    ((of_candidates.sum(-1) + of_tokens + entropies) * factors).sum().backward()
    worst = []
    for float32_logits in (False, True):
        ours_hidden, ours_weight = (tensor.bfloat16().requires_grad_() for tensor in (hidden, weight))
        ours_weight.main_grad = of_weight = torch.zeros(ROWS, HIDDEN)  # type: ignore[attr-defined]
        found = token_logprobs(
            ours_hidden,
            ours_weight,
            tokens,
            temperature.float(),
            shard,
            chunk_tokens=4,
            kept_bytes=kept_bytes,
            candidates=candidates,
            float32_logits=float32_logits,
        )
        errors = (
            found.tokens - of_tokens,
            found.candidates - of_candidates,
            found.entropies - entropies,
        )
        worst.append([float(error.detach().abs().max()) for error in errors])
        ((found.candidates.sum(-1) + found.tokens + found.entropies) * factors.float()).sum().backward()
        for grad, expected in ((ours_hidden.grad, exact_hidden.grad), (of_weight, exact_weight.grad)):
            assert grad is not None
            assert expected is not None
            assert (grad.double() - expected).norm() < 0.02 * expected.norm()
    assert all(rounded > 1e-3 for rounded in worst[0])
    assert all(unrounded < 2e-5 for unrounded in worst[1])


def test_the_likeliest_tokens_by_float32_logits(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    hidden, weight, temperature = inputs[0].bfloat16(), inputs[1].bfloat16(), inputs[3].float()
    exact = torch.log_softmax(hidden.double() @ weight.double()[:VOCAB].T / temperature.double()[:, None], -1).topk(7)
    found = likeliest_tokens(
        hidden, weight, temperature, VocabShard(0, VOCAB, None), 7, ids_below=VOCAB, float32_logits=True
    )
    assert torch.equal(found.ids.long(), exact.indices)
    torch.testing.assert_close(found.logprobs.double(), exact.values, atol=1e-5, rtol=1e-5)
