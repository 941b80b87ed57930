"""Router and experts by themselves, on CPU, against formulas."""

from typing import Any

import pytest

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
import torch
from torch import Tensor

from services.trainer.model.layers import PolicyConfig
from services.trainer.transformer.mlp import _Experts
from services.trainer.transformer.router import Router
from services.trainer.transformer.routing import copy_to_rows, sort_by_expert, sum_of_rows
from tests.kit.expert_formulas import EXPERTS, LOADS, TOP_K, choose, mixture

HIDDEN, FFN = 24, 20


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("load", LOADS)
def test_rows_are_sorted_by_expert_and_come_back(load: str) -> None:
    experts = choose(load, 50)
    places, ends = sort_by_expert(experts, EXPERTS)
    assert places.flatten().sort().values.tolist() == list(range(experts.numel()))
    of_row = torch.empty(experts.numel(), dtype=torch.int64)
    of_row[places.flatten()] = experts.flatten()
    assert of_row.tolist() == sorted(experts.flatten().tolist())
    assert ends.tolist() == [int((experts <= expert).sum()) for expert in range(EXPERTS)]
    x = torch.randn(len(experts), 3)
    torch.testing.assert_close(sum_of_rows(copy_to_rows(x, places), places), x * TOP_K)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("load", LOADS)
def test_experts_and_their_gradients_equal_the_formula(load: str, recompute: bool) -> None:
    experts = choose(load, 50)
    tokens = len(experts)
    inputs = [leaf(tokens, HIDDEN), leaf(tokens, TOP_K), leaf(EXPERTS, 2, FFN, HIDDEN), leaf(EXPERTS, HIDDEN, FFN)]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = mixture(exact[0], exact[1], experts, *exact[2:])
    grad = torch.randn(tokens, HIDDEN)
    expected.backward(grad.double())
    places, ends = sort_by_expert(experts, EXPERTS)
    ours = _Experts.apply(*inputs, places, ends, recompute)
    ours.backward(grad)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-4)
    for a, b in zip(inputs, exact, strict=True):
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-4, atol=1e-4)


def test_gradients_of_matrices_are_added_where_megatron_keeps_them() -> None:
    experts = choose("even", 30)
    inputs = [leaf(30, HIDDEN), leaf(30, TOP_K), leaf(EXPERTS, 2, FFN, HIDDEN), leaf(EXPERTS, HIDDEN, FFN)]
    places, ends = sort_by_expert(experts, EXPERTS)
    _Experts.apply(*inputs, places, ends, False).sum().backward()
    alone = [tensor.grad.clone() for tensor in inputs[2:]]
    for matrix in inputs[2:]:
        matrix.grad, matrix.main_grad = None, torch.ones_like(matrix)  # type: ignore[attr-defined]
    for _ in range(2):
        _Experts.apply(*inputs, places, ends, False).sum().backward()
    for matrix, once in zip(inputs[2:], alone, strict=True):
        assert matrix.grad is None
        torch.testing.assert_close(matrix.main_grad, 1 + 2 * once)  # type: ignore[attr-defined]


def make_router(**changes: Any) -> Router:
    config = PolicyConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        moe_ffn_hidden_size=FFN,
        moe_router_load_balancing_type="none",
        add_bias_linear=False,
        **changes,
    )
    router = Router(config)
    torch.nn.init.normal_(router.weight)
    return router


@pytest.mark.parametrize("normalize", [True, False])
def test_routing_equals_the_formula(normalize: bool) -> None:
    router, x = make_router(moe_router_pre_softmax=not normalize), leaf(40, HIDDEN)
    found = router(x)
    exact_x, exact_weight = (t.detach().double().requires_grad_() for t in (x, router.weight))
    values, experts = (exact_x @ exact_weight.t()).softmax(-1).topk(TOP_K)
    values = values / values.sum(-1, keepdim=True) if normalize else values
    assert torch.equal(found.experts, experts)
    torch.testing.assert_close(found.weights.double(), values, rtol=1e-5, atol=1e-6)
    factors = torch.randn(40, TOP_K)
    (found.weights * factors).sum().backward()
    (values * factors.double()).sum().backward()
    torch.testing.assert_close(x.grad.double(), exact_x.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(router.weight.grad.double(), exact_weight.grad, rtol=1e-4, atol=1e-5)


def test_given_experts_are_used_with_the_routers_own_weights() -> None:
    router, x = make_router(), leaf(40, HIDDEN)
    experts = choose("skewed", 40, seed=3)
    found = router(x, experts=experts)
    assert torch.equal(found.experts, experts)
    logits = x.detach().double() @ router.weight.detach().double().t()
    torch.testing.assert_close(found.weights.double(), logits.gather(1, experts).softmax(-1), rtol=1e-5, atol=1e-6)
    (found.weights[:, 0]).sum().backward()
    assert router.weight.grad.norm() > 0
    again = router(x, experts=router(x).experts)
    assert torch.equal(again.weights, router(x).weights)
    some = torch.where(torch.arange(40)[:, None] % 3 == 0, -1, experts).to(torch.int16)
    mixed, own = router(x, experts=some).experts, router(x).experts
    assert torch.equal(mixed, torch.where(some < 0, own, experts))
    with pytest.raises(ValueError, match=r"experts is \[40, 1\]: it must be \[tokens, top_k\] = \[40, 2\]"):
        router(x, experts=experts[:, :1])


def test_gradients_with_given_experts_are_finite_differences() -> None:
    """Of everything that a token's weights depend on, for experts that are not the best."""
    router, x = make_router(), leaf(6, HIDDEN)
    experts, factors = choose("even", 6, seed=5), torch.randn(6, TOP_K).double()
    (router(x, experts=experts).weights * factors).sum().backward()

    def loss(x: Tensor, weight: Tensor) -> float:
        return float(((x @ weight.t()).gather(1, experts).softmax(-1) * factors).sum())

    exact = [x.detach().double(), router.weight.detach().double()]
    for index, found in enumerate((x.grad, router.weight.grad)):
        for place in ((0, 3), (5, 1), (2, 20)):
            shifted = [[tensor.clone() for tensor in exact] for _ in range(2)]
            shifted[0][index][place] += 1e-5
            shifted[1][index][place] -= 1e-5
            difference = (loss(*shifted[0]) - loss(*shifted[1])) / 2e-5
            assert float(found[place]) == pytest.approx(difference, rel=1e-3, abs=1e-6)


def test_what_replay_changes_is_counted() -> None:
    router, x = make_router(), torch.randn(40, HIDDEN)
    own = router(x).experts
    router(x, experts=own.flip(-1))
    assert int(router.replaced) == 0, "the same experts in another order"
    worst = (x @ router.weight.t()).argmin(-1)
    router(x, experts=torch.stack((own[:, 0], worst), 1))
    assert int(router.replaced) == 40
    with torch.no_grad():
        router(x, experts=torch.stack((own[:, 0], worst), 1))
    assert int(router.replaced) == 40, "an evaluation doesn't count"


def test_load_counts_passes_with_gradients_only() -> None:
    router, x = make_router(), torch.randn(40, HIDDEN)
    with torch.no_grad():
        router(x)
    assert int(router.load.sum()) == 0
    experts = router(x).experts
    assert router.load.tolist() == experts.flatten().bincount(minlength=EXPERTS).tolist()


def test_logits_are_float32_also_in_bfloat16() -> None:
    router = make_router(params_dtype=torch.bfloat16)
    x = torch.randn(40, HIDDEN, dtype=torch.bfloat16)
    weights = router(x).weights
    logits = x.double() @ router.weight.detach().double().t()
    torch.testing.assert_close(weights.double(), logits.topk(TOP_K).values.softmax(-1), rtol=1e-5, atol=1e-6)
