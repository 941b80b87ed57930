"""A process of a gloo world whose ranks share the experts of one layer, under loads that no router would choose."""

from dataclasses import dataclass
from typing import Any

from relaxd.config import TrainerConfig

HIDDEN, FFN = 16, 12


@dataclass(frozen=True)
class ExpertJob:
    """Forward and backward of one layer's experts; each rank has tokens of its own."""

    load: str
    tokens: tuple[int, int]
    """Tokens of each rank."""


def tensors(job: ExpertJob, rank: int) -> dict[str, Any]:
    """What goes in on a rank, and the whole layer's matrices, the same on all ranks."""
    import torch

    from tests.kit.expert_formulas import EXPERTS, TOP_K, choose

    torch.manual_seed(0)
    fc1, fc2 = torch.randn(EXPERTS, 2, FFN, HIDDEN), torch.randn(EXPERTS, HIDDEN, FFN)
    torch.manual_seed(rank + 1)
    experts = choose(job.load, job.tokens[rank], seed=rank)
    x, weights, grad = (torch.randn(len(experts), width) for width in (HIDDEN, TOP_K, HIDDEN))
    return {"x": x, "weights": weights, "grad": grad, "experts": experts, "fc1": fc1, "fc2": fc2}


def run_job(job: ExpertJob, ranks: int) -> dict[str, Any]:
    """Run one job on this rank."""
    import torch

    from services.trainer.megatron.world import initialize
    from services.trainer.model.layers import PolicyConfig
    from services.trainer.transformer.mlp import Experts
    from services.trainer.transformer.routing import Routing
    from tests.kit.expert_formulas import EXPERTS
    from tests.kit.megatron_world import leave_layout

    world = initialize(TrainerConfig(ranks=ranks, expert_parallel=ranks, threads=1), seed=0)
    config = PolicyConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, num_moe_experts=EXPERTS, moe_ffn_hidden_size=FFN,
        expert_model_parallel_size=ranks, moe_token_dispatcher_type="alltoall", add_bias_linear=False,
    )  # fmt: skip
    given = tensors(job, world.rank)
    layer = Experts(config)
    here = slice(world.rank * EXPERTS // ranks, (world.rank + 1) * EXPERTS // ranks)
    with torch.no_grad():
        layer.linear_fc1.copy_(given["fc1"][here])
        layer.linear_fc2.copy_(given["fc2"][here])
    x, weights = given["x"].requires_grad_(), given["weights"].requires_grad_()
    output = layer(x, Routing(given["experts"], weights))
    output.backward(given["grad"])
    leave_layout()
    gradients = (x.grad, weights.grad, layer.linear_fc1.grad, layer.linear_fc2.grad)
    found = dict(zip(("x", "weights", "fc1", "fc2"), gradients, strict=True), output=output.detach())
    return {name: tensor.numpy() for name, tensor in found.items() if tensor is not None}
