"""The MLPs of a layer: dense, or a mixture of experts with a router, and a shared expert if the model has one.

Between the two products of each is SwiGLU (arXiv 2002.05202); for experts, rows are also multiplied by router weights.
"""

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    all_to_all,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from services.trainer.megatron.gradient_accumulation import writable
from services.trainer.transformer.activation_memory import Recompute
from services.trainer.transformer.kernels import fused_kernels
from services.trainer.transformer.kernels.products import add_grouped_products_, grouped_product
from services.trainer.transformer.router import Router, float32_logits
from services.trainer.transformer.routing import (
    CopyToRows,
    RouterInputs,
    Routing,
    SumOfRows,
    copy_to_rows,
    sort_by_expert,
    sum_of_rows,
)


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) * up for x = [gate, up]: [..., 2 n] -> [..., n]."""
    if x.dtype == torch.bfloat16 and fused_kernels():
        fused: Tensor = _SwiGLU.apply(x)
        return fused
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        from services.trainer.transformer.kernels.layer_kernels import swiglu_forward

        x = x.contiguous()
        ctx.save_for_backward(x)
        return swiglu_forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        from services.trainer.transformer.kernels.layer_kernels import swiglu_backward

        return swiglu_backward(ctx.saved_tensors[0], grads[0])


def weighted_swiglu(x: Tensor, weights: Tensor) -> Tensor:
    """Return silu(gate) * up * weight of each row.

    Args:
        x: [R, 2 n]: gate, then up.
        weights: float32 [R].

    Returns:
        [R, n].
    """
    if _fused(x):
        from services.trainer.transformer.kernels.expert_kernels import weighted_swiglu_forward

        return weighted_swiglu_forward(x, weights)
    gate, up = x.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up * weights.unsqueeze(-1)).to(x.dtype)


def weighted_swiglu_backward(x: Tensor, weights: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x and weights of `weighted_swiglu`, and its output again.

    Args:
        x: [R, 2 n].
        weights: float32 [R].
        grad: [R, n], the output's gradient.

    Returns:
        [R, 2 n], float32 [R] and [R, n].
    """
    if _fused(x):
        from services.trainer.transformer.kernels.expert_kernels import weighted_swiglu_backward

        return weighted_swiglu_backward(x, weights, grad)
    (gate, up), weight = x.float().chunk(2, dim=-1), weights.unsqueeze(-1)
    sigmoid, grad = gate.sigmoid(), grad.float()
    activated = gate * sigmoid * up
    grad_weights = (grad * activated).sum(-1)
    grad = grad * weight
    grad_x = torch.cat((grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid), -1)
    return grad_x.to(x.dtype), grad_weights, (activated * weight).to(x.dtype)


def _fused(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.is_cuda and fused_kernels()


class Experts(MegatronModule):
    """The experts of this rank, or this rank's columns of all experts.

    Attributes:
        linear_fc1: [experts, 2, ffn, hidden], gate and up.
        linear_fc2: [experts, hidden, ffn], down.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        self.expert_group = parallel_state.get_expert_model_parallel_group()
        self.tensor_group = parallel_state.get_expert_tensor_parallel_group()
        self.data_group = parallel_state.get_expert_data_parallel_group()
        assert config.num_moe_experts is not None
        assert config.moe_ffn_hidden_size is not None
        self.count = config.num_moe_experts
        here, ffn = self.count // self.expert_group.size(), config.moe_ffn_hidden_size // self.tensor_group.size()
        self.linear_fc1 = self._parameter(here, 2, ffn, config.hidden_size, cut=2)
        self.linear_fc2 = self._parameter(here, config.hidden_size, ffn, cut=2)

    def _parameter(self, *shape: int, cut: int) -> torch.nn.Parameter:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        parameter = torch.nn.Parameter(torch.empty(shape, dtype=self.config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=cut, stride=1)
        # Tells Megatron to reduce it over the ranks that have the same experts. Set for every layout, so that a
        # checkpoint's optimizer state is divided alike in all of them.
        parameter.allreduce = False  # type: ignore[attr-defined]
        return parameter

    def forward(self, x: Tensor, routing: Routing, *, recompute: bool = False) -> Tensor:
        """Compute the weighted sum of the outputs of each token's experts.

        Args:
            x: [T, hidden], this rank's tokens.
            routing: experts and weights of these tokens.
            recompute: compute the first product again in the backward pass instead of keeping it.

        Returns:
            [T, hidden].
        """
        experts, weights = routing.experts, routing.weights
        if self.expert_group.size() > 1:
            return self._forward_expert_parallel(x, experts, weights, recompute)
        if self.tensor_group.size() == 1:
            places, ends = sort_by_expert(experts, self.count)
            return self._compute(x, weights, places, ends, recompute)
        x, experts, weights = (
            gather_from_sequence_parallel_region(tensor, group=self.tensor_group) for tensor in (x, experts, weights)
        )
        places, ends = sort_by_expert(experts, self.count)
        output: Tensor = reduce_scatter_to_sequence_parallel_region(
            self._compute(x, weights, places, ends, recompute), group=self.tensor_group
        )
        return output

    def _forward_expert_parallel(self, x: Tensor, experts: Tensor, weights: Tensor, recompute: bool) -> Tensor:
        places, ends = sort_by_expert(experts, self.count)
        exchange = ExpertExchange(ends, self.expert_group)
        rows = CopyToRows.apply(x, places)  # overlaps the copy of the sizes to the host
        row_weights = CopyToRows.apply(weights.reshape(-1, 1), places.view(-1, 1))
        rows, row_weights = exchange.to_experts(rows), exchange.to_experts(row_weights)
        received_places, received_ends = exchange.sort()
        output = self._compute(rows, row_weights, received_places, received_ends, recompute)
        summed: Tensor = SumOfRows.apply(exchange.to_tokens(output), places)
        return summed

    def _compute(self, x: Tensor, weights: Tensor, places: Tensor, ends: Tensor, recompute: bool) -> Tensor:
        output: Tensor = _Experts.apply(x, weights, self.linear_fc1, self.linear_fc2, places, ends, recompute)
        return output

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the parameters as Megatron's shards, for a checkpoint that any parallel layout can load."""
        before = len(sharded_offsets)
        offsets = (
            *sharded_offsets,
            (before, self.expert_group.rank(), self.expert_group.size()),
            (before + 2, self.tensor_group.rank(), self.tensor_group.size()),
        )
        return {
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{prefix}{name}",
                parameter,
                *offsets,
                replica_id=(0, 0, self.data_group.rank()),
                prepend_axis_num=before,
            )
            for name, parameter in self.named_parameters()
        }


class ExpertExchange:
    """Exchanges the rows of one layer with the ranks of their experts.

    torch's all-to-all needs the sizes on the host, so the host waits for the device once per layer, in `to_experts`.
    Kernels enqueued between the constructor and that call overlap the wait.
    """

    def __init__(self, ends: Tensor, group: dist.ProcessGroup) -> None:
        """Exchange row counts with the other ranks.

        Args:
            ends: int32 [experts], the end of each expert's rows on this rank.
            group: the ranks that share the experts.
        """
        self._group = group
        self._here = len(ends) // group.size()
        counts = ends.diff(prepend=ends.new_zeros(1)).contiguous()
        mine, theirs = counts, torch.empty_like(counts)
        dist.all_to_all_single(theirs, mine, group=group)  # by rank, the rows for this rank's experts
        self._received = theirs.view(group.size(), self._here)
        sizes = torch.stack((mine.view(self._received.shape).sum(1), self._received.sum(1)))
        self._sizes, self._ready = sizes, None
        if sizes.is_cuda:  # a copy to pinned memory doesn't wait
            host = torch.empty(sizes.shape, dtype=sizes.dtype, pin_memory=True)
            self._sizes = host.copy_(sizes, non_blocking=True)
            self._ready = torch.cuda.current_stream().record_event()
        self._splits: tuple[list[int], list[int]] | None = None

    def to_experts(self, rows: Tensor) -> Tensor:
        """Send rows [R, width], sorted by expert, to the experts' ranks.

        Return the rows for this rank's experts, in order of source rank.
        """
        sent, received = self._wait_for_sizes()
        arrived: Tensor = all_to_all(self._group, rows, received, sent)
        return arrived

    def to_tokens(self, rows: Tensor) -> Tensor:
        """Send the outputs of this rank's experts back. Return the outputs of this rank's rows, sorted by expert."""
        sent, received = self._wait_for_sizes()
        arrived: Tensor = all_to_all(self._group, rows, sent, received)
        return arrived

    def sort(self) -> tuple[Tensor, Tensor]:
        """Return where each received row goes when sorted by expert, [R, 1], and the end of each expert's rows."""
        experts = torch.arange(self._here, device=self._received.device).repeat(self._group.size())
        each = experts.repeat_interleave(self._received.flatten(), output_size=sum(self._wait_for_sizes()[1]))
        return sort_by_expert(each.unsqueeze(1), self._here)

    def _wait_for_sizes(self) -> tuple[list[int], list[int]]:
        """Wait for the device. Return the numbers of rows sent to and received from each rank."""
        if self._splits is None:
            if self._ready is not None:
                self._ready.synchronize()
            sent, received = self._sizes.tolist()
            self._splits = sent, received
        return self._splits


class _Experts(torch.autograd.Function):
    """Autograd function of the experts' MLPs on tokens, with a row for each token and expert.

    The backward pass keeps the inputs and, without `recompute`, the first product. It recomputes the tokens' copies and
    the second product's input, at the cost of one pass over memory each.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, fc1: Tensor, fc2: Tensor, places: Tensor, ends: Tensor, recompute: bool
    ) -> Tensor:
        first = grouped_product(copy_to_rows(x, places), fc1.flatten(1, 2).transpose(1, 2), ends)
        row_weights = copy_to_rows(weights.reshape(-1, 1), places.view(-1, 1)).squeeze(1)
        rows = grouped_product(weighted_swiglu(first, row_weights), fc2.transpose(1, 2), ends)
        ctx.save_for_backward(x, None if recompute else first, row_weights, fc1, fc2, places, ends)
        ctx.main_grads = getattr(fc1, "main_grad", None), getattr(fc2, "main_grad", None)
        return sum_of_rows(rows, places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, first, row_weights, fc1, fc2, places, ends = ctx.saved_tensors
        matrix = fc1.flatten(1, 2)
        if first is None:
            first = grouped_product(copy_to_rows(x, places), matrix.transpose(1, 2), ends)
        grad_rows = copy_to_rows(grads[0].contiguous(), places)
        grad_second = grouped_product(grad_rows, fc2, ends)
        grad_first, grad_weights, second = weighted_swiglu_backward(first, row_weights, grad_second)
        del first, grad_second
        into_fc1, into_fc2 = ctx.main_grads
        grad_fc1 = grad_fc2 = None
        if ctx.needs_input_grad[3]:
            total = torch.zeros_like(fc2, dtype=torch.float32) if into_fc2 is None else writable(into_fc2)
            add_grouped_products_(total, grad_rows, second, ends)
            grad_fc2 = total.to(fc2.dtype) if into_fc2 is None else None
        del grad_rows, second
        if ctx.needs_input_grad[2]:
            total = torch.zeros_like(fc1, dtype=torch.float32) if into_fc1 is None else writable(into_fc1)
            add_grouped_products_(total.flatten(1, 2), grad_first, copy_to_rows(x, places), ends)
            grad_fc1 = total.to(fc1.dtype) if into_fc1 is None else None
        grad_x = sum_of_rows(grouped_product(grad_first, matrix, ends), places)
        return grad_x, grad_weights[places], grad_fc1, grad_fc2, None, None, None


class DenseMLP(MLP):
    """Dense MLP: Megatron's matrix products and tensor parallelism, with our SwiGLU."""

    def __init__(self, config: TransformerConfig, ffn_size: int | None = None) -> None:
        """Create an MLP of inner width `ffn_size`, by default the configuration's."""
        if ffn_size is not None:
            config = copy(config)
            config.ffn_hidden_size = ffn_size
        backend = LocalSpecProvider()
        linear = MLPSubmodules(linear_fc1=backend.column_parallel_linear(), linear_fc2=backend.row_parallel_linear())
        super().__init__(config, linear, ffn_hidden_size=config.ffn_hidden_size)

    def forward(self, x: Tensor, recompute: Recompute) -> Tensor:
        """Run the MLP: x [T, 1, hidden] -> [T, 1, hidden]. An active `recompute` covers the inputs of both products."""
        first = recompute(self._first, x)
        output, _ = self.linear_fc2(recompute(swiglu, first))
        return output

    def _first(self, x: Tensor) -> Tensor:
        first, _ = self.linear_fc1(x)
        return first


class MixtureOfExperts(MegatronModule):
    """Mixture of experts in place of a dense MLP: router, experts, and a shared expert if configured.

    No token is dropped. The host never waits for the device; with expert parallelism it waits once per layer.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        self.router = Router(config)
        self.experts = Experts(config)
        self.shared_expert: DenseMLP | None = None
        if config.moe_shared_expert_intermediate_size is not None:
            self.shared_expert = DenseMLP(config, config.moe_shared_expert_intermediate_size)
            self.shared_expert_gate = SharedExpertGate(config)

    def forward(self, x: Tensor, inputs: RouterInputs, layer: int, recompute: Recompute) -> Tensor:
        """Run each token through its experts, and through the shared expert, if any.

        Args:
            x: [T, 1, hidden], this rank's tokens.
            inputs: inputs of the router.
            layer: number of the layer within this stage, from 0.
            recompute: the layer's recomputation context.

        Returns:
            [T, 1, hidden].
        """
        tokens = x.squeeze(1)
        given = inputs.experts[layer] if inputs.experts is not None and self.router.replays else None
        routing = self.router(tokens, inputs.weight, given)
        output: Tensor = self.experts(tokens, routing, recompute=recompute.active).unsqueeze(1)
        if self.shared_expert is not None:
            output = output + self.shared_expert_gate(x) * self.shared_expert(x, recompute)
        return output


class SharedExpertGate(MegatronModule):
    """Computes the shared expert's weight for each token (Qwen2-MoE): sigmoid(x @ weight.T), in float32."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.weight = torch.nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Return each token's weight of the shared expert: x [..., hidden] -> [..., 1]."""
        return float32_logits(x.flatten(0, -2), self.weight).view(*x.shape[:-1], 1).sigmoid().to(x.dtype)
