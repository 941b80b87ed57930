"""The trainer's Triton kernels against float64 formulas, in bf16 on a GPU."""

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from services.trainer.batch.micro_batch import TrainSequence, pack
from services.trainer.learner.logprobs import VocabShard, token_logprobs
from services.trainer.transformer.attention_kernels import attention_kernel, slice_by_varlen, varlen_attention
from services.trainer.transformer.heads import Rotary, rotary_table, rotate, split_heads
from services.trainer.transformer.kernels.products import grouped_kernels
from services.trainer.transformer.mlp import _Experts, swiglu
from services.trainer.transformer.router import float32_logits
from services.trainer.transformer.routing import sort_by_expert
from services.trainer.transformer.sequence_layout import (
    cudnn_batches,
    gather_from_sequences,
    scatter_to_sequences,
    sequence_layout,
)
from tests.kit.expert_formulas import EXPERTS, LOADS, choose, mixture

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

BF16 = {"atol": 2e-2, "rtol": 1.6e-2}
"""A bf16 number has 8 significant bits: rounding moves it by 0.4 %."""


@pytest.fixture(autouse=True)
def fused() -> None:
    from services.trainer.transformer.kernels import fused_kernels

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
    table = rotary_table(torch.arange(tokens, device="cuda"), Rotary(frequencies))
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


@pytest.mark.parametrize("float32_logits", [False, True])
@pytest.mark.parametrize("kept", [0, 1 << 30])
@pytest.mark.parametrize("entropy_share", [0.0, 0.7])
def test_log_probs(kept: int, entropy_share: float, float32_logits: bool) -> None:
    count, width, vocabulary, size = 700, 256, 20011, 20000
    hidden, weight = leaf(count, width), leaf(vocabulary, width)
    weight.main_grad = torch.ones(vocabulary, width, device="cuda")  # type: ignore[attr-defined]
    temperature = torch.rand(count, device="cuda") * 5 + 5
    tokens = torch.randint(0, size, (count,), device="cuda")
    exact_hidden, exact_weight = exact(hidden), exact(weight)
    logits = exact_hidden @ exact_weight[:size].t()
    if not float32_logits:  # they are rounded to bf16, as those of the engine are
        logits = logits + (logits.bfloat16().double() - logits).detach()
    full = torch.log_softmax(logits / temperature[:, None].double(), -1)
    expected, entropy = full.gather(-1, tokens[:, None])[:, 0], -(full.exp() * full).sum(-1)
    factors = torch.linspace(-1, 2, count, device="cuda")
    (expected * factors.double() + entropy_share * entropy).sum().backward()
    shard = VocabShard(0, size, None)
    ours, our_entropy, _ = token_logprobs(
        hidden,
        weight,
        tokens,
        temperature,
        shard,
        chunk_tokens=256,
        kept_bytes=kept,
        float32_logits=float32_logits,
    )
    (ours * factors + entropy_share * our_entropy).sum().backward() if entropy_share else (
        ours * factors
    ).sum().backward()
    # Without rounding only sums differ.
    assert not float32_logits or (ours - expected).abs().max() < 1e-3
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
    batch = pack(
        [
            TrainSequence.from_response(prompt, np.arange(20) + i, loss_mask=mask, columns={}, weight=ones)
            for i in range(5)
        ]
    )
    layout = sequence_layout(batch, torch.device("cuda"), "varlen")
    assert layout.shared
    x = leaf(len(batch.tokens), 3, 100)
    reference = exact(x)
    grad = torch.randn(len(layout.slots.token_of_slot), 3, 100, device="cuda", dtype=torch.bfloat16)
    scatter_to_sequences(x, layout.slots, sum_copies=True).backward(grad)
    reference[layout.slots.token_of_slot].backward(grad.double())
    assert x.grad is not None
    assert reference.grad is not None
    assert relative(x.grad, reference.grad) < 5e-3


def test_queries_of_a_long_shared_prompt_once() -> None:
    """As with a copy of the prompt for each answer, forward and backward."""
    mask, ones = np.ones(100, np.uint8), np.ones(100, np.float32)
    answers = [
        TrainSequence.from_response(np.arange(2000), np.arange(100) + i, loss_mask=mask, columns={}, weight=ones)
        for i in range(6)
    ]
    device, batch = torch.device("cuda"), pack(answers)
    once = sequence_layout(batch, device, "varlen", prompts_once=True).query_slice
    assert once is not None
    layout = sequence_layout(batch, device, "varlen")
    query, key, value = (leaf(len(batch.tokens), heads, 128) for heads in (8, 4, 4))
    k, v = (scatter_to_sequences(x, once.slots, sum_copies=True) for x in (key, value))
    ours = slice_by_varlen(query, k, v, once, 128**-0.5, None)
    q = scatter_to_sequences(query, layout.slots, sum_copies=False)
    k, v = (scatter_to_sequences(x, layout.slots, sum_copies=True) for x in (key, value))
    whole = varlen_attention(q, k, v, (layout.cu_seqlens,) * 2, (layout.longest,) * 2, scale=128**-0.5)
    theirs = gather_from_sequences(whole, layout.slots)
    grad = torch.randn_like(ours)
    found = [ours, *torch.autograd.grad(ours, (query, key, value), grad)]
    expected = [theirs, *torch.autograd.grad(theirs, (query, key, value), grad)]
    for one, other in zip(found, expected, strict=True):
        assert relative(one, other.double()) < 1e-2


LENGTHS = {
    "one": [3000],
    "equal": [512] * 4,
    "mixed": [2049, 1, 700, 128, 129, 30, 1500],
    "short": [1 + i * 7 % 200 for i in range(150)],
    "one long": [3000, *[200] * 40],
}


def attend(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], window: int | None) -> Tensor:
    """Causal attention, sequence after sequence, in the inputs' precision."""
    outputs = []
    for q, k, v in zip(*(x.transpose(0, 1).split(lengths, 1) for x in (query, key, value)), strict=True):
        k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
        place = torch.arange(q.shape[1], device=q.device)
        distance = place[:, None] - place[None, :]
        mask = (distance >= 0) & (distance < (window or len(place)))
        outputs.append(functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    return torch.cat(outputs, 1).transpose(0, 1)


@pytest.mark.parametrize("heads", [(16, 8), (32, 4), (3, 3)])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("kernel", ["cudnn", "varlen"])
@pytest.mark.parametrize("window", [None, 2, 200, 1024])
def test_attention(window: int | None, kernel: str, lengths: list[int], heads: tuple[int, int]) -> None:
    if kernel == "cudnn" and attention_kernel(torch.device("cuda"), torch.bfloat16, 128, "auto", window) != "cudnn":
        pytest.skip("cuDNN's attention doesn't work here")
    tokens, scale = sum(lengths), 128**-0.5
    query, key, value = inputs = [leaf(tokens, count, 128) for count in (heads[0], heads[1], heads[1])]
    if kernel == "cudnn":
        from services.trainer.transformer.cudnn_attention import cudnn_attention

        ours = cudnn_attention(query, key, value, cudnn_batches(lengths, torch.device("cuda")), scale, window)
    else:
        cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device="cuda")
        ours = varlen_attention(query, key, value, (cu_seqlens,) * 2, (max(lengths),) * 2, scale=scale, window=window)
    exact_query, exact_key, exact_value = exact_inputs = [x.detach().float().requires_grad_() for x in inputs]
    expected = attend(exact_query, exact_key, exact_value, lengths, window)
    grad = torch.randn_like(ours)
    expected.backward(grad.float())
    ours.backward(grad)
    assert relative(ours, expected.double()) < 5e-3
    for a, b in zip(inputs, exact_inputs, strict=True):
        assert relative(a.grad, b.grad.double()) < 1e-2


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("load", LOADS)
def test_experts(load: str, recompute: bool) -> None:
    if not grouped_kernels():
        pytest.skip("grouped matrix products don't work here")
    experts = choose(load, 1000).cuda()
    hidden, ffn, tokens = 192, 136, len(experts)
    x, weights = leaf(tokens, hidden), torch.rand(tokens, 2, device="cuda", requires_grad=True)
    fc1, fc2 = leaf(EXPERTS, 2, ffn, hidden), leaf(EXPERTS, hidden, ffn)
    for matrix in (fc1, fc2):
        matrix.main_grad = torch.ones(matrix.shape, device="cuda")  # type: ignore[attr-defined]
    exact_inputs = [exact(tensor) for tensor in (x, weights, fc1, fc2)]
    expected = mixture(exact_inputs[0], exact_inputs[1], experts, *exact_inputs[2:])
    grad = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    expected.backward(grad.double())
    torch.cuda.set_sync_debug_mode("error")  # nothing waits for the GPU
    try:
        places, ends = sort_by_expert(experts, EXPERTS)
        ours = _Experts.apply(x, weights, fc1, fc2, places, ends, recompute)
        ours.backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert relative(ours, expected) < 1e-2
    for a, b in zip((x.grad, weights.grad), exact_inputs, strict=False):
        assert relative(a, b.grad) < 1e-2
    for a, b in zip((fc1, fc2), exact_inputs[2:], strict=True):
        assert a.grad is None
        assert relative(a.main_grad - 1, b.grad) < 1e-2  # type: ignore[attr-defined]
        unused = b.grad.flatten(1).norm(dim=1) == 0
        assert bool((a.main_grad[unused] == 1).all())  # type: ignore[attr-defined]


def test_router_logits() -> None:
    x, weight = leaf(3000, 512), leaf(64, 512)
    weight.main_grad = torch.ones(64, 512, device="cuda")  # type: ignore[attr-defined]
    exact_x, exact_weight = exact(x), exact(weight)
    grad = torch.randn(3000, 64, device="cuda")
    expected, ours = exact_x @ exact_weight.t(), float32_logits(x, weight)
    expected.backward(grad.double())
    ours.backward(grad)
    assert ours.dtype == torch.float32
    assert relative(ours, expected) < 1e-6
    assert relative(x.grad, exact_x.grad) < 3e-3  # rounded once, to bf16
    assert relative(weight.main_grad - 1, exact_weight.grad) < 5e-5  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [256, 2560, 4096])
@pytest.mark.parametrize("adds", [True, False])
def test_norm_of_a_sum(adds: bool, width: int) -> None:
    from services.trainer.transformer.kernels.layer_kernels import norm_backward, norm_forward

    x, addend, weight = leaf(3001, 1, width), leaf(3001, 1, width), leaf(width)
    grad_total, grad = torch.randn_like(x), torch.randn_like(x)
    total, output, inverses = norm_forward(x.detach(), addend.detach() if adds else None, weight.detach(), 1e-6)
    exact_x, exact_weight = exact(x.detach() + addend.detach() if adds else x), exact(weight)
    expected = functional.rms_norm(exact_x, (width,), exact_weight, 1e-6)
    torch.autograd.backward([exact_x * 1.0, expected], [grad_total.double(), grad.double()])
    grad_x, grad_weight = norm_backward(total, weight.detach(), inverses, grad_total, grad)
    assert torch.equal(total.double(), exact_x)
    assert relative(output, expected) < 3e-3
    assert relative(grad_x, exact_x.grad) < 3e-3
    assert relative(grad_weight, exact_weight.grad) < 3e-3
