"""Log-probs and entropies of given tokens from hidden states, and the likeliest tokens, over chunks of logits."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from services.trainer.megatron.gradient_accumulation import add_product_, writable
from services.trainer.transformer.kernels import fused_kernels
from services.trainer.transformer.kernels.products import float32_product

CPU_CHUNK_TOKENS = 512
"""Number of tokens per chunk of logits on a CPU."""
CHUNK_BYTES = 1 << 30
"""Approximate size of a chunk of logits on a GPU, in bytes."""
CPU_KEPT_BYTES = 256 << 20
"""Maximum size of the logits that a micro-batch keeps for its backward pass on a CPU, in bytes; others are
recomputed."""
KEPT_SHARE = 1 / 24
"""Maximum share of a GPU's memory for the logits that a micro-batch keeps for its backward pass."""


@dataclass(frozen=True)
class VocabShard:
    """Range of token ids whose logits this rank's output layer computes."""

    start: int
    """First token id of the range."""
    size: int
    """Number of token ids in the range; further rows of the output layer are padding."""
    group: dist.ProcessGroup | None
    """Process group of the ranks that share the vocabulary; None if this rank has all token ids."""


class TokenLogprobs(NamedTuple):
    """Log-probs and entropies of N predicted tokens."""

    tokens: Tensor
    """Log-probs of the predicted tokens, float32 [N]."""
    entropies: Tensor
    """Entropy of the distribution from which each token was predicted, in nats, float32 [N]."""
    candidates: Tensor
    """Log-probs of each token's k candidates, float32 [N, k]; 0 where there is no candidate."""


class LikeliestTokens(NamedTuple):
    """The k likeliest tokens of the whole vocabulary at N positions, likeliest first."""

    ids: Tensor
    """Ids of the likeliest tokens, int32 [N, k]."""
    logprobs: Tensor
    """Log-probs of the likeliest tokens, float32 [N, k]."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    temperature: Tensor,
    shard: VocabShard,
    *,
    chunk_tokens: int | None = None,
    kept_bytes: int | None = None,
    candidates: Tensor | None = None,
    float32_logits: bool = False,
) -> TokenLogprobs:
    """Compute log-probs of tokens, log-probs of candidates at the same positions, and the entropy of the distributions.

    log p(t) = z_t - log(sum_j exp z_j) and H = -sum_j p_j log p_j with z = hidden @ weight.T / temperature, in float32.
    Hidden states and weights in bfloat16 give logits in bfloat16, unless `float32_logits`: then nothing is rounded
    between hidden states and log-probs. Gradients of logits are in the element type of the hidden states either way.

    Logits are computed chunk by chunk. For the backward pass the first chunks are kept, up to `kept_bytes`, and the
    others recomputed. With a sharded vocabulary, the gradient of `hidden` is this shard's part; the backward pass of
    the caller's copy or gather of `hidden` sums the parts over ranks.

    If the weight has Megatron's gradient buffer (`main_grad`), its gradient goes there in float32, and not to `grad`.

    Args:
        hidden: [N, hidden_size], the state that predicts each token.
        weight: [rows, hidden_size], this rank's rows of the output layer.
        tokens: int64 [N], the predicted tokens' ids (in the whole vocabulary).
        temperature: float32 [N], each token's sampling temperature.
        shard: the token ids of this rank's rows.
        chunk_tokens: tokens per chunk; by default chosen for the device.
        kept_bytes: maximum bytes of kept logits; by default chosen for the device.
        candidates: int64 [N, k], token ids of the whole vocabulary, no id twice in a row; -1 for none.
        float32_logits: whether logits are computed in float32 (MiniMax-M1, arXiv 2506.13585).

    Returns:
        Differentiable, the same on all ranks of the shard's group.
    """
    width = _row_bytes(hidden, shard, float32_logits)
    chunk_tokens = chunk_tokens or _chunk_tokens(hidden, width)
    if not torch.is_grad_enabled():
        kept_bytes = 0
    elif kept_bytes is None:
        memory = torch.cuda.get_device_properties(hidden.device).total_memory if hidden.is_cuda else 0
        kept_bytes = int(memory * KEPT_SHARE) if hidden.is_cuda else CPU_KEPT_BYTES
    chunks = _Chunks(chunk_tokens, kept_bytes // (chunk_tokens * width), shard, float32_logits)
    if candidates is None:
        candidates = tokens.new_zeros(len(tokens), 0)
    return TokenLogprobs(*_TokenLogprobs.apply(hidden, weight, tokens, candidates, temperature, chunks))


@torch.no_grad()
def likeliest_tokens(
    hidden: Tensor,
    weight: Tensor,
    temperature: Tensor,
    shard: VocabShard,
    count: int,
    *,
    ids_below: int,
    chunk_tokens: int | None = None,
    float32_logits: bool = False,
) -> LikeliestTokens:
    """Find the likeliest tokens at each position, and their log-probs. See `token_logprobs` for the arguments.

    Args:
        hidden: [N, hidden_size].
        weight: [rows, hidden_size].
        temperature: float32 [N].
        shard: the token ids of this rank's rows.
        count: k, at most the number of eligible ids.
        ids_below: only ids below this are eligible. Log-probs are normalised over all of the model's ids.
        chunk_tokens: tokens per chunk; by default chosen for the device.
        float32_logits: whether logits are computed in float32.

    Returns:
        The same on all ranks of the shard's group.
    """
    eligible = max(0, min(shard.size, ids_below - shard.start))
    own = min(count, eligible)
    values = hidden.new_full((len(hidden), count), float("-inf"), dtype=torch.float32)
    ids = torch.zeros(len(hidden), count, dtype=torch.int32, device=hidden.device)
    statistics = hidden.new_empty(4, len(hidden), dtype=torch.float32)
    no_token = torch.full((len(hidden),), -1, dtype=torch.int64, device=hidden.device)
    fused = hidden.dtype == torch.bfloat16 and fused_kernels()
    chunk_tokens = chunk_tokens or _chunk_tokens(hidden, _row_bytes(hidden, shard, float32_logits))
    chunks = _Chunks(chunk_tokens, 0, shard, float32_logits)
    for rows in chunks.rows(len(hidden)):
        logits = chunks.logits(hidden, weight, rows)
        logits = logits if fused else _tempered(logits, temperature[rows])
        found = logits[:, :eligible].topk(own, dim=-1)
        ids[rows, :own] = (found.indices + shard.start).int()
        if fused:
            from services.trainer.transformer.kernels.layer_kernels import vocabulary_statistics

            values[rows, :own] = _tempered(found.values, temperature[rows])
            statistics[:, rows] = vocabulary_statistics(logits, temperature[rows], no_token[rows])
        else:
            values[rows, :own] = found.values
            statistics[:, rows] = _statistics(logits, no_token[rows], keep=False)
        del logits  # free it before the next chunk is allocated
    largest, sums, _, _ = _over_shards(statistics, shard)
    if shard.group is not None:
        shards = dist.get_world_size(shard.group)
        all_values, all_ids = ([torch.empty_like(one) for _ in range(shards)] for one in (values, ids))
        dist.all_gather(all_values, values, group=shard.group)
        dist.all_gather(all_ids, ids, group=shard.group)
        values, places = torch.cat(all_values, -1).topk(count, dim=-1)
        ids = torch.cat(all_ids, -1).gather(-1, places)
    return LikeliestTokens(ids, values - (largest + sums.log()).unsqueeze(-1))


def _row_bytes(hidden: Tensor, shard: VocabShard, float32_logits: bool) -> int:
    """Return the size of one token's logits on this rank, in bytes."""
    return shard.size * (4 if float32_logits else hidden.element_size())


def _chunk_tokens(hidden: Tensor, width: int) -> int:
    """Return the number of tokens per chunk; `width`: size of one token's logits, in bytes."""
    return max(CHUNK_BYTES // width // 256, 1) * 256 if hidden.is_cuda else CPU_CHUNK_TOKENS


@dataclass(frozen=True)
class _Chunks:
    tokens: int
    """Number of tokens per chunk."""
    kept: int
    """Number of chunks whose logits are kept for the backward pass."""
    shard: VocabShard
    float32: bool
    """True if logits are computed in float32."""

    def logits(self, hidden: Tensor, weight: Tensor, rows: slice) -> Tensor:
        """Return the logits of the hidden states `rows` for this rank's token ids, [rows, shard.size]."""
        weight = weight[: self.shard.size]
        return float32_product(hidden[rows], weight) if self.float32 else hidden[rows] @ weight.t()

    def rows(self, count: int) -> list[slice]:
        return [slice(begin, min(begin + self.tokens, count)) for begin in range(0, count, self.tokens)]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        tokens: Tensor,
        candidates: Tensor,
        temperature: Tensor,
        chunks: _Chunks,
    ) -> tuple[Tensor, Tensor, Tensor]:
        shard = chunks.shard
        columns, others = _columns(tokens, shard), _columns(candidates, shard)
        fused = hidden.dtype == torch.bfloat16 and fused_kernels()
        statistics = hidden.new_empty(4, hidden.shape[0], dtype=torch.float32)
        of_others = hidden.new_empty(others.shape, dtype=torch.float32)
        kept: list[Tensor] = []
        for rows in chunks.rows(hidden.shape[0]):
            logits = chunks.logits(hidden, weight, rows)
            if fused:
                from services.trainer.transformer.kernels.layer_kernels import vocabulary_statistics

                statistics[:, rows] = vocabulary_statistics(logits, temperature[rows], columns[rows])
                of_others[rows] = _tempered(_at(logits, others[rows]), temperature[rows])
            else:
                logits = _tempered(logits, temperature[rows])
                of_others[rows] = _at(logits, others[rows])
                statistics[:, rows] = _statistics(logits, columns[rows], keep=len(kept) < chunks.kept)
            if len(kept) < chunks.kept:
                kept.append(logits)
            del logits  # free it before the next chunk is allocated
        largest, sums, weighted, of_token = _over_shards(statistics, shard)
        if shard.group is not None and of_others.shape[1]:
            dist.all_reduce(of_others, group=shard.group)
        log_sums = sums.log()
        entropies = log_sums - weighted / sums
        ctx.save_for_backward(hidden, weight, columns, candidates, temperature, log_sums + largest, entropies)
        ctx.chunks, ctx.kept, ctx.fused, ctx.main_grad = chunks, kept, fused, getattr(weight, "main_grad", None)
        ctx.set_materialize_grads(False)
        of_others = (of_others - (largest + log_sums).unsqueeze(-1)).masked_fill_(candidates < 0, 0.0)
        return of_token - largest - log_sums, entropies, of_others

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropies, grad_others = grads
        hidden, weight, columns, candidates, temperature, log_sums, entropies = ctx.saved_tensors
        shard: VocabShard = ctx.chunks.shard
        grad_logprobs = torch.zeros_like(log_sums) if grad_logprobs is None else grad_logprobs.contiguous()
        grad_entropies = None if grad_entropies is None else grad_entropies.contiguous()
        others = _columns(candidates, shard)
        grad_others = None if grad_others is None else grad_others.masked_fill(candidates < 0, 0.0)
        grad_hidden = torch.empty_like(hidden)
        into: Tensor | None = ctx.main_grad
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if into is None else writable(into)
        kept: list[Tensor] = ctx.kept[::-1]
        ctx.kept = []
        for rows in ctx.chunks.rows(hidden.shape[0]):
            if kept:
                logits = kept.pop()
            else:
                logits = ctx.chunks.logits(hidden, weight, rows)
                logits = logits if ctx.fused else _tempered(logits, temperature[rows])
            through, of_tokens = grad_logprobs[rows], columns[rows]
            if grad_others is not None:
                # d logp_v / d z = onehot(v) - p. Apply -p once for all candidates and the token, and onehot(v) for each
                # of them below.
                through, of_tokens = through + grad_others[rows].sum(-1), torch.full_like(of_tokens, -1)
            arguments = (
                logits,
                temperature[rows],
                of_tokens,
                log_sums[rows],
                entropies[rows],
                through,
                None if grad_entropies is None else grad_entropies[rows],
            )
            if ctx.fused:
                from services.trainer.transformer.kernels.layer_kernels import vocabulary_gradient_

                grad_logits = vocabulary_gradient_(*arguments).to(hidden.dtype)
            else:
                grad_logits = _gradient(*arguments).to(hidden.dtype)
            if grad_others is not None:
                # In two calls: where a candidate is the token itself, both are added in this order.
                _add_at_(grad_logits, columns[rows].unsqueeze(-1), grad_logprobs[rows].unsqueeze(-1), temperature[rows])
                _add_at_(grad_logits, others[rows], grad_others[rows], temperature[rows])
            torch.mm(grad_logits, weight[: shard.size], out=grad_hidden[rows])
            add_product_(grad_weight[: shard.size], grad_logits, hidden[rows])
            del logits, arguments, grad_logits
        return grad_hidden, grad_weight.to(weight.dtype) if into is None else None, None, None, None, None


def _columns(ids: Tensor, shard: VocabShard) -> Tensor:
    """Return the index of each token id among the shard's logits; -1 for ids of other shards."""
    columns = ids - shard.start
    return columns.masked_fill((columns < 0) | (columns >= shard.size) | (ids < 0), -1)


def _at(logits: Tensor, columns: Tensor) -> Tensor:
    """Return for each token the logits at the indices `columns` [n, k]; 0 where the index is -1."""
    return logits.gather(-1, columns.clamp(min=0)).masked_fill_(columns < 0, 0.0)


def _add_at_(gradient: Tensor, columns: Tensor, through: Tensor, temperature: Tensor) -> None:
    """Add `through` / temperature to the logits' gradient [n, ids] at the indices `columns` [n, k]; skip indices -1."""
    added = (through * (columns >= 0) / temperature.unsqueeze(-1)).to(gradient.dtype)
    gradient.scatter_add_(-1, columns.clamp(min=0), added)


def _over_shards(statistics: Tensor, shard: VocabShard) -> Tensor:
    """Combine the statistics [4, N] of the ranks' vocabulary shards into statistics of the whole vocabulary."""
    if shard.group is None:
        return statistics
    largest, sums, weighted, of_token = statistics
    overall = largest.clone()
    dist.all_reduce(overall, op=dist.ReduceOp.MAX, group=shard.group)
    shift = largest - overall
    scale = shift.exp()
    added = torch.stack((scale * sums, scale * (weighted + shift * sums), of_token))
    dist.all_reduce(added, group=shard.group)
    return torch.cat((overall.unsqueeze(0), added))


def _tempered(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return logits [n, ids] in float32, divided by each token's temperature [n]."""
    return logits.float().div_(temperature.unsqueeze(-1))


def _statistics(logits: Tensor, columns: Tensor, *, keep: bool) -> Tensor:
    """Compute `vocabulary_statistics` of logits already divided by temperature; overwrite the logits unless `keep`."""
    largest = logits.amax(-1)
    of_token = logits.gather(-1, columns.clamp(min=0).unsqueeze(-1)).squeeze(-1) * (columns >= 0)
    shifted = logits.sub(largest.unsqueeze(-1)) if keep else logits.sub_(largest.unsqueeze(-1))
    exponentials = shifted.exp()
    return torch.stack((largest, exponentials.sum(-1), shifted.mul_(exponentials).sum(-1), of_token))


def _gradient(
    logits: Tensor,
    temperature: Tensor,
    columns: Tensor,
    log_sums: Tensor,
    entropies: Tensor,
    grad_logprobs: Tensor,
    grad_entropies: Tensor | None,
) -> Tensor:
    """Compute `vocabulary_gradient_` of logits already divided by temperature; overwrite the logits."""
    logprobs = logits.sub_(log_sums.unsqueeze(-1))
    # d logp_t / d z = onehot(t) - p and d H / d z = -p (log p + H), each divided by the temperature.
    gradient = logprobs.exp()
    if grad_entropies is None:
        gradient.mul_(-grad_logprobs.unsqueeze(-1))
    else:
        factor = logprobs.add_(entropies.unsqueeze(-1)).mul_(grad_entropies.unsqueeze(-1))
        gradient.mul_(factor.add_(grad_logprobs.unsqueeze(-1)).neg_())
    inside = (columns >= 0).to(gradient.dtype)
    gradient.scatter_add_(-1, columns.clamp(min=0).unsqueeze(-1), (grad_logprobs * inside).unsqueeze(-1))
    return gradient.div_(temperature.unsqueeze(-1))
