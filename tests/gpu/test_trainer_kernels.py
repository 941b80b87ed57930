"""The trainer's Triton kernels against float64 formulas, in bf16 on a GPU."""

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from services.trainer.heads import rotary_table, rotate, split_heads
from services.trainer.logprobs import VocabShard, token_logprobs
from services.trainer.packing import TrainSample, pack
from services.trainer.sequence_layout import sequence_layout, spread_out
from services.trainer.swiglu import swiglu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

BF16 = {"atol": 2e-2, "rtol": 1.6e-2}
"""A bf16 number has 8 significant bits: rounding moves it by 0.4 %."""


@pytest.fixture(autouse=True)
def fused() -> None:
    from services.trainer.fusion import fused_kernels

    torch.manual_seed(0)
    if not fused_kernels():
        pytest.skip("Triton doesn't work here")


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def exact(tensor: Tensor) -> Tensor:
    return tensor.detach().double().requires_grad_()


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.detach().double() - theirs.detach()).norm() / theirs.detach().norm())


def test_swiglu() -> None:
    x = leaf(3, 500, 2 * 1500)
    reference = exact(x)
    gate, up = reference.chunk(2, -1)
    expected, ours = functional.silu(gate) * up, swiglu(x)
    grad = torch.randn_like(ours)
    expected.backward(grad.double())
    ours.backward(grad)
    torch.testing.assert_close(ours.double(), expected, **BF16)
    assert x.grad is not None
    assert reference.grad is not None
    assert relative(x.grad, reference.grad) < 5e-3


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("groups", "queries", "size", "tokens"), [(8, 2, 128, 3001), (3, 3, 64, 7), (1, 8, 128, 50)])
def test_heads(norm: bool, groups: int, queries: int, size: int, tokens: int) -> None:
    qkv, weights = leaf(tokens, groups, (queries + 2) * size), (leaf(size), leaf(size))
    frequencies = 1e4 ** -(torch.arange(0, size, 2, device="cuda") / size)
    table = rotary_table(torch.arange(tokens, device="cuda"), frequencies)
    exact_qkv, exact_weights = exact(qkv), tuple(exact(weight) for weight in weights)
    query, key, value = exact_qkv.split([queries * size, size, size], -1)
    query = query.reshape(tokens, -1, size)
    if norm:
        query = functional.rms_norm(query, (size,), exact_weights[0], 1e-6)
        key = functional.rms_norm(key, (size,), exact_weights[1], 1e-6)
    expected = (rotate(query, table.double()), rotate(key, table.double()), value)
    ours = split_heads(qkv, weights if norm else None, table, size, 1e-6)
    grads = [torch.randn_like(x) for x in ours]
    torch.autograd.backward(expected, [grad.double() for grad in grads])
    torch.autograd.backward(ours, grads)
    for a, b in zip(ours, expected, strict=True):
        assert a.shape == b.shape
        assert relative(a, b) < 5e-3
    assert relative(qkv.grad, exact_qkv.grad) < 5e-3
    if norm:
        for a, b in zip(weights, exact_weights, strict=True):
            assert relative(a.grad, b.grad) < 5e-3


@pytest.mark.parametrize("kept", [0, 1 << 30])
@pytest.mark.parametrize("entropy_share", [0.0, 0.7])
def test_log_probs(kept: int, entropy_share: float) -> None:
    count, width, vocabulary, size = 700, 256, 20011, 20000
    hidden, weight = leaf(count, width), leaf(vocabulary, width)
    weight.main_grad = torch.ones(vocabulary, width, device="cuda")  # type: ignore[attr-defined]
    temperature = torch.rand(count, device="cuda") * 5 + 5
    tokens = torch.randint(0, size, (count,), device="cuda")
    exact_hidden, exact_weight = exact(hidden), exact(weight)
    # The logits are rounded to bf16, as those of the engine are.
    logits = exact_hidden @ exact_weight[:size].t()
    logits = logits + (logits.bfloat16().double() - logits).detach()
    full = torch.log_softmax(logits / temperature[:, None].double(), -1)
    expected, entropy = full.gather(-1, tokens[:, None])[:, 0], -(full.exp() * full).sum(-1)
    factors = torch.linspace(-1, 2, count, device="cuda")
    (expected * factors.double() + entropy_share * entropy).sum().backward()
    shard = VocabShard(0, size, None)
    ours, our_entropy = token_logprobs(hidden, weight, tokens, temperature, shard, chunk_tokens=256, kept_bytes=kept)
    (ours * factors + entropy_share * our_entropy).sum().backward() if entropy_share else (
        ours * factors
    ).sum().backward()
    assert (ours - expected).abs().max() < 0.05  # cuBLAS adds up in another order: a logit may round the other way
    assert (ours - expected).abs().mean() < 2e-3
    assert (our_entropy - entropy).abs().max() < 1e-2
    assert relative(hidden.grad, exact_hidden.grad) < 1e-2
    assert relative(weight.main_grad - 1, exact_weight.grad) < 1e-2  # type: ignore[attr-defined]
    assert weight.grad is None


def test_gradients_of_shared_prompts() -> None:
    prompt = np.arange(40)
    mask = np.ones(20, np.uint8)
    ones = np.ones(20, np.float32)
    columns = {"loss_mask": mask, "rollout_logprobs": ones, "advantages": ones, "weight": ones}
    batch = pack([TrainSample.from_response(prompt, np.arange(20) + i, **columns) for i in range(5)])
    layout = sequence_layout(batch, torch.device("cuda"), "varlen")
    assert layout.shared
    x = leaf(len(batch.tokens), 3, 100)
    reference = exact(x)
    grad = torch.randn(len(layout.spread), 3, 100, device="cuda", dtype=torch.bfloat16)
    spread_out(x, layout, add_up=True).backward(grad)
    reference[layout.spread].backward(grad.double())
    assert x.grad is not None
    assert reference.grad is not None
    assert relative(x.grad, reference.grad) < 5e-3
