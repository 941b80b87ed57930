"""The router of a mixture of experts, which chooses each token's experts and their weights, and the record of a step's
routing: for replay in updates, and for metrics of the load.
"""

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_config import TransformerConfig
from numpy.typing import NDArray
from torch import Tensor

from services.trainer.batch.micro_batch import PackedMicroBatch
from services.trainer.megatron.gradient_accumulation import add_product_, writable
from services.trainer.megatron.world import World
from services.trainer.transformer.kernels.products import float32_product
from services.trainer.transformer.routing import Routing


class Router(MegatronModule):
    """Router with softmax in float32, as in Qwen's and Mixtral's models.

    Attributes:
        load: int64 [experts], tokens routed to each expert on this rank since `reset_counters`.
        losses: float32 [3], sums over micro-batches since `reset_counters`: weight times load-balancing loss, weight
            times z-loss, and weight.
        replays: True if the router uses the experts given with a micro-batch.
        replaced: int64 [], number of given experts since `reset_counters` that the router would not have chosen.
        recorded: uint8 or int16 [T, top_k] for each pass: the chosen experts; None outside of `recording`.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        assert config.num_moe_experts is not None
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.weight = torch.nn.Parameter(
            torch.empty(config.num_moe_experts, config.hidden_size, dtype=config.params_dtype, device=device)
        )
        # Each tensor-parallel rank routes its own slice of the tokens.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.load = torch.zeros(config.num_moe_experts, dtype=torch.int64, device=device)
        self.losses = torch.zeros(3, dtype=torch.float32, device=device)
        self.replays = False
        self.replaced = torch.zeros((), dtype=torch.int64, device=device)
        self.recorded: list[Tensor] | None = None

    def forward(self, x: Tensor, weight: float = 0.0, experts: Tensor | None = None) -> Routing:
        """Choose the experts of this rank's tokens, and compute the experts' weights.

        Args:
            x: [T, hidden].
            weight: `RouterInputs.weight`.
            experts: integers [T, top_k], the experts to use; where negative, and by default, the experts with the
                highest scores are used.
        """
        logits = float32_logits(x, self.weight)
        highest = logits.detach().topk(self.config.moe_router_topk, dim=-1)
        chosen = highest.indices if experts is None else _with_given(experts, highest.indices)
        if self.recorded is not None:
            self.recorded.append(chosen.to(torch.uint8 if logits.shape[-1] <= 256 else torch.int16))
        if self.config.moe_router_pre_softmax:
            weights = logits.softmax(-1).gather(-1, chosen)
        else:  # equals normalising the chosen experts' part of the whole softmax
            weights = logits.gather(-1, chosen).softmax(-1)
        # A pass without gradients is an evaluation, or will be recomputed.
        if torch.is_grad_enabled():
            counts = torch.zeros_like(self.load).scatter_add_(0, chosen.flatten(), torch.ones_like(chosen).flatten())
            self.load += counts
            if experts is not None:
                self.replaced += (logits.detach().gather(-1, chosen) < highest.values[:, -1:]).sum()
            weights = self._with_losses(weights, logits, counts, weight)
        return Routing(chosen, weights)

    def _with_losses(self, weights: Tensor, logits: Tensor, counts: Tensor, weight: float) -> Tensor:
        """Compute the router's balance loss and z-loss. Attach both to the weights, so that the backward pass includes
        the gradients.

        A rank with a slice of the micro-batch adds its part; the sum over ranks is the micro-batch's loss.
        """
        balance, z = self.config.moe_aux_loss_coeff, self.config.moe_z_loss_coeff or 0.0
        if not balance and not z:
            return weights
        sizes = torch.full((1,), float(len(logits)), device=logits.device)
        whole = torch.cat((counts.float(), sizes))
        group = parallel_state.get_tensor_and_context_parallel_group()
        if group.size() > 1:
            dist.all_reduce(whole, group=group)
        tokens = whole[-1]
        probabilities, experts = logits.softmax(-1).sum(0), len(counts)
        balance_loss = experts * (whole[:-1] * probabilities).sum() / (self.config.moe_router_topk * tokens * tokens)
        z_loss = logits.logsumexp(-1).square().sum() / tokens
        found = torch.stack((balance_loss.detach(), z_loss.detach(), (sizes / tokens).squeeze()))
        self.losses += weight * found
        attached: Tensor = MoEAuxLossAutoScaler.apply(weights, weight * (balance * balance_loss + z * z_loss))
        return attached


def _with_given(given: Tensor, own: Tensor) -> Tensor:
    """Return the given experts, or the router's own choice where the given are negative."""
    if given.shape != own.shape:
        raise ValueError(f"experts is {list(given.shape)}: it must be [tokens, top_k] = {list(own.shape)}")
    return torch.where(given < 0, own, given.long())


def float32_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T in float32.

    If the weight has Megatron's gradient buffer (`main_grad`), its gradient goes there and not to `grad`.

    Args:
        x: [T, hidden].
        weight: [experts, hidden].

    Returns:
        float32 [T, experts].
    """
    logits: Tensor = _Float32Logits.apply(x, weight)
    return logits


class _Float32Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.main_grad = getattr(weight, "main_grad", None)
        return float32_product(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (x, weight), grad = ctx.saved_tensors, grads[0]
        grad_x = grad_weight = None
        if x.is_cuda and x.dtype == torch.bfloat16:  # on tensor cores
            # Split the gradient into a sum of two bf16 numbers, with 16 significant bits together: tensor cores compute
            # both products and sum them in float32.
            high = grad.bfloat16()
            grad = torch.cat((high, (grad - high).bfloat16()), 1)
            matrix = torch.cat((weight, weight))
        else:
            matrix, x = weight.float(), x.float()
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ matrix).to(ctx.saved_tensors[0].dtype)
        if ctx.needs_input_grad[1]:
            into = ctx.main_grad
            total = torch.zeros_like(weight, dtype=torch.float32) if into is None else writable(into)
            for part in grad.split(len(weight), 1):
                add_product_(total, part, x)
            grad_weight = total.to(weight.dtype) if into is None else None
        return grad_x, grad_weight


@contextmanager
def recording(routers: Sequence[Router]) -> Iterator[None]:
    """Record the experts that routers choose in the block: passes without gradients, one micro-batch after another."""
    for router in routers:
        router.recorded = []
    try:
        yield
    finally:
        for router in routers:
            router.recorded = None


def recorded_experts(
    routers: Sequence[Router], micro_batches: Sequence[PackedMicroBatch], world: World
) -> list[NDArray[np.unsignedinteger]]:
    """Return the experts that routers chose since `recording` began. Collective in a data-parallel replica.

    Args:
        routers: this stage's routers, by layer.
        micro_batches: the micro-batches of the pass.
        world: this rank's place in the world.

    Returns:
        For each micro-batch uint8 or, with more than 256 experts, uint16 [T, layers, top_k], on all ranks.
    """
    # [this rank's tokens of all micro-batches, this stage's layers, top_k]; padding may come after the micro-batches
    own = torch.stack([torch.cat(router.recorded or []) for router in routers], 1)
    counts = world.layout.pipeline_layers or (own.shape[1],) * world.pp_size
    # Padded to the layers of the largest stage, so that all ranks gather the same size.
    own = torch.cat((own, own.new_zeros(len(own), max(counts) - own.shape[1], own.shape[2])), 1)
    groups = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    )
    everything = own
    for group in groups:  # tensor-parallel ranks have neighbouring parts of a context-parallel rank's slice
        everything = _gather(everything, group)
    stages = everything.view(world.pp_size, world.cp_size * world.tp_size, *own.shape)
    stages_own = [stage[:, :, :count] for stage, count in zip(stages, counts, strict=True)]
    whole = torch.cat(stages_own, 2).cpu().numpy()  # [slices, tokens, all layers, top_k], stage after stage
    if world.layout.pipeline_chunks > 1:
        whole = whole[:, :, np.argsort([layer for stage in world.stage_layers(whole.shape[2]) for layer in stage])]
    whole = whole.view(np.uint16) if whole.dtype == np.int16 else whole
    found, begin, slices = [], 0, len(whole)
    for batch in micro_batches:
        end = begin - (-len(batch.tokens) // slices)
        found.append(whole[:, begin:end].reshape(-1, *whole.shape[2:])[: len(batch.tokens)])
        begin = end
    return found


def _gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather a tensor from all ranks of a group, stacked in order of rank: [...] -> [ranks, ...]."""
    if group.size() == 1:
        return tensor.unsqueeze(0)
    parts = torch.empty((group.size(), *tensor.shape), dtype=tensor.dtype, device=tensor.device)
    # As bytes: neither gloo nor NCCL knows int16.
    dist.all_gather(list(parts.view(torch.uint8)), tensor.contiguous().view(torch.uint8), group=group)
    return parts


def reset_counters(routers: Sequence[Router]) -> None:
    """Set the routers' counters of load, losses and replaced choices to zero."""
    for router in routers:
        router.load.zero_()
        router.losses.zero_()
        router.replaced.zero_()


def routing_metrics(routers: Sequence[Router], world: World, *, with_losses: bool) -> dict[str, float]:
    """Compute the step's metrics from the routers' counters, on all ranks. Collective.

    Args:
        routers: this stage's routers, at least one.
        world: this rank's place in the world.
        with_losses: True if the routers have losses.

    Returns:
        expert_load_max: tokens of the fullest expert relative to the mean, in the layer with the largest ratio.
        expert_load_mean: the same ratio, averaged over layers.
        expert_load_empty: share of the experts without tokens.
        expert_dropped: share of the tokens dropped for lack of capacity: always 0.
        expert_replaced: share of the choices that were replayed and differ from the routers' own; only with routing
            replay.
        expert_balance_loss, expert_z_loss: the losses without their coefficients, averaged over layers.
    """
    layers = sum(world.layout.pipeline_layers) or len(routers) * world.pp_size
    own = world.layers_of(layers)
    counts = torch.zeros(layers, len(routers[0].load), dtype=torch.float64, device=world.device)
    sums = torch.zeros(layers, 4, dtype=torch.float64, device=world.device)
    counts[own] = torch.stack([router.load for router in routers]).double()
    sums[own, :3] = torch.stack([router.losses for router in routers]).double()
    sums[own, 3] = torch.stack([router.replaced for router in routers]).double()
    everything = torch.cat((counts, sums), 1)
    if world.size > 1:
        dist.all_reduce(everything)
    everything = everything.cpu()
    counts, losses, replaced = everything[:, :-4], everything[:, -4:-1], everything[:, -1]
    fullest = counts.amax(1) / counts.mean(1).clamp(min=1e-9)
    found = {
        "expert_load_max": float(fullest.max()),
        "expert_load_mean": float(fullest.mean()),
        "expert_load_empty": float((counts == 0).double().mean()),
        "expert_dropped": 0.0,
    }
    if routers[0].replays:
        found["expert_replaced"] = float(replaced.sum() / counts.sum().clamp(min=1.0))
    if with_losses:
        averages = losses[:, :2] / losses[:, 2:].clamp(min=1e-9)
        found |= {"expert_balance_loss": float(averages[:, 0].mean()), "expert_z_loss": float(averages[:, 1].mean())}
    return found
