"""Log-probs and entropies of given tokens, from hidden states, without ever holding all logits."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_TOKENS = 512
"""Tokens whose logits exist at the same time."""


@dataclass(frozen=True)
class VocabShard:
    """The part of the vocabulary that this rank's output layer has."""

    start: int
    """First token id."""
    size: int
    """Token ids; rows of the output layer beyond them are padding."""
    group: dist.ProcessGroup | None
    """The ranks that share the vocabulary; None: this one has it all."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    temperature: Tensor,
    shard: VocabShard,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each token, and entropy of the distribution that it was drawn from.

    log p(t) = z_t - log(sum_j exp z_j) and H = -sum_j p_j log p_j with z = hidden @ weight.T / temperature, in float32.
    Logits are made anew in the backward pass, chunk by chunk. With a sharded vocabulary, the gradient that goes into
    `hidden` is this shard's part: the caller's copy or gather of `hidden` over the ranks adds them up.

    Args:
        hidden: [N, hidden_size], the state that predicts each token.
        weight: [rows, hidden_size], this rank's rows of the output layer.
        tokens: int64 [N], the predicted tokens' ids (in the whole vocabulary).
        temperature: float32 [N], the temperature that each token was sampled with.
        shard: which ids this rank's rows are.
        chunk_tokens: tokens per chunk.

    Returns:
        Log-probs and entropies in nats, both float32 [N], differentiable, the same on all ranks of the shard's group.
    """
    return _TokenLogprobs.apply(hidden, weight, tokens, temperature, shard, chunk_tokens)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        tokens: Tensor,
        temperature: Tensor,
        shard: VocabShard,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        count = hidden.shape[0]
        log_sums = hidden.new_empty(count, dtype=torch.float32)
        token_logits, entropies = torch.empty_like(log_sums), torch.empty_like(log_sums)
        for rows in _chunks(count, chunk_tokens):
            logits = _logits(hidden[rows], weight, temperature[rows], shard)
            largest = logits.amax(-1)
            if shard.group is not None:
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=shard.group)
            logits.sub_(largest.unsqueeze(-1))
            index, inside = _local(tokens[rows], shard)
            of_token = logits.gather(-1, index.unsqueeze(-1)).squeeze(-1) * inside
            exponentials = logits.exp()
            sums = torch.stack((exponentials.sum(-1), logits.mul_(exponentials).sum(-1), of_token))
            if shard.group is not None:
                dist.all_reduce(sums, group=shard.group)
            log_sum = sums[0].log()
            entropies[rows] = log_sum - sums[1] / sums[0]
            token_logits[rows] = sums[2] - log_sum
            log_sums[rows] = log_sum + largest
        ctx.save_for_backward(hidden, weight, tokens, temperature, log_sums, entropies)
        ctx.shard, ctx.chunk_tokens = shard, chunk_tokens
        return token_logits, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropies = grads
        hidden, weight, tokens, temperature, log_sums, entropies = ctx.saved_tensors
        shard: VocabShard = ctx.shard
        through_entropy = bool((grad_entropies != 0).any())
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for rows in _chunks(hidden.shape[0], ctx.chunk_tokens):
            logprobs = _logits(hidden[rows], weight, temperature[rows], shard).sub_(log_sums[rows].unsqueeze(-1))
            # d logp_t / d z = onehot(t) - p and d H / d z = -p (log p + H), each divided by the temperature.
            grad_logits = logprobs.exp()
            if through_entropy:
                factor = logprobs.add_(entropies[rows].unsqueeze(-1)).mul_(grad_entropies[rows].unsqueeze(-1))
                grad_logits.mul_(factor.add_(grad_logprobs[rows].unsqueeze(-1)).neg_())
            else:
                grad_logits.mul_(-grad_logprobs[rows].unsqueeze(-1))
            index, inside = _local(tokens[rows], shard)
            grad_logits.scatter_add_(-1, index.unsqueeze(-1), (grad_logprobs[rows] * inside).unsqueeze(-1))
            grad_logits = grad_logits.div_(temperature[rows].unsqueeze(-1)).to(hidden.dtype)
            grad_hidden[rows] = grad_logits @ weight[: shard.size]
            grad_rows = grad_weight[: shard.size]
            if hidden.dtype == torch.float32:
                grad_rows.addmm_(grad_logits.t(), hidden[rows])
            else:
                grad_rows.add_(grad_logits.t() @ hidden[rows])
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, temperature: Tensor, shard: VocabShard) -> Tensor:
    """Logits of some tokens over this rank's ids, under their temperatures: float32 [n, shard.size]."""
    return (hidden @ weight[: shard.size].t()).float().div_(temperature.unsqueeze(-1))


def _local(tokens: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Index of each token among this rank's ids (0 if it isn't one of them), and 1.0 or 0.0 for whether it is."""
    local = tokens - shard.start
    inside = (local >= 0) & (local < shard.size)
    return local * inside, inside.float()


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(begin, min(begin + size, count)) for begin in range(0, count, size)]
