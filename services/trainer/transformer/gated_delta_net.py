"""A gated delta net as a layer's attention (Gated Delta Networks, arXiv 2412.06464), as in Qwen3-Next and Qwen3.5.

The rule and the convolution before it are in torch's operations. A head has a state S, [key_size, value_size], which is
zero at the beginning of a sequence. With a token's key k, value v, decay a = exp(log_decay) and strength b,
equation 10 there, transposed, is

    S <- a (I - b k k^T) S + b k v^T,    output = S^T q.

Within a chunk, with products c of the decays up to each token, the changes of the state solve a triangular system (the
UT transform of arXiv 2406.06484, equations 10 and 11, with the decays of section 3.3 of 2412.06464):

    (I + lower(diag(b) (K K^T * C))) [U, W] = diag(b) [V, diag(c) K],    C_ij = c_i / c_j,

    outputs = diag(c) Q S + lower(Q K^T * C) (U - W S),    S <- c_last S + (diag(c_last / c) K)^T (U - W S).
"""

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from relaxd.models.shape import DeltaNetSizes
from services.trainer.transformer.sequence_layout import CHUNK, ChunkTree


class GatedDeltaNet(MegatronModule):
    """Gated delta net: projection, convolution, gated delta rule, gated norm, projection.

    Tensor-parallel ranks divide the key heads. Parameter names differ from attention's, because checkpoints require one
    shape per name over all layers.

    Attributes:
        linear_in: projection to q, k, v v ..., z z ..., b b ..., a a ... for each key head, which has several values
            (v), gates (z), strengths (b) and decays (a).
        convolution: [channels, tokens], over each key head's q, k, v v ...
        A_log, dt_bias: [value heads], parameters of the decays.
        norm: [value size].
    """

    def __init__(self, config: TransformerConfig, sizes: DeltaNetSizes, **_: object) -> None:
        super().__init__(config=config)
        backend, shared = LocalSpecProvider(), sizes.value_heads // sizes.key_heads
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        self.sizes, self.shared, self.key_heads = sizes, shared, sizes.key_heads // ranks
        self.channels = 2 * sizes.key_size + shared * sizes.value_size
        """Number of channels per key head that pass through the convolution."""
        settings: dict[str, Any] = {"config": config, "bias": False, "skip_bias_add": False, "is_expert": False}
        width = 2 * sizes.keys + 2 * sizes.values + 2 * sizes.value_heads
        self.linear_in = backend.column_parallel_linear()(
            config.hidden_size, width, init_method=config.init_method, gather_output=False, **settings
        )
        self.linear_out = backend.row_parallel_linear()(
            sizes.values, config.hidden_size, init_method=config.init_method, input_is_parallel=True, **settings
        )
        self.convolution = self._parameter(self.key_heads * self.channels, sizes.convolution)
        self.A_log = self._parameter(self.key_heads * shared)
        self.dt_bias = self._parameter(self.key_heads * shared)
        self.norm = self._parameter(sizes.value_size, divided=False)

    def _parameter(self, *shape: int, divided: bool = True) -> torch.nn.Parameter:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        parameter = torch.nn.Parameter(torch.empty(shape, dtype=self.config.params_dtype, device=device))
        if divided:
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        else:  # each rank has the gradient of its heads, which Megatron adds up
            parameter.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]
        return parameter

    def forward(self, x: Tensor, tree: ChunkTree) -> Tensor:
        """Run the gated delta net on a micro-batch. The backward pass recomputes large values between the projections.

        Args:
            x: [T, 1, hidden] (T over the tensor-parallel ranks under sequence parallelism).
            tree: the sequences' chunks.

        Returns:
            Shaped like x.
        """
        projected, _ = self.linear_in(x)
        projected = projected.view(projected.shape[0], self.key_heads, -1)
        mixed = checkpoint(self._mix, projected, tree, use_reentrant=False, preserve_rng_state=False)
        output, _ = self.linear_out(mixed)
        return output

    def _mix(self, projected: Tensor, tree: ChunkTree) -> Tensor:
        sizes, shared = self.sizes, self.shared
        convolved, gate, strength, decay = projected.split(
            [self.channels, shared * sizes.value_size, shared, shared], -1
        )
        convolved = functional.silu(causal_convolution(convolved.flatten(1), self.convolution, tree))
        heads = convolved.unflatten(-1, (self.key_heads, -1))
        precise = torch.promote_types(projected.dtype, torch.float32)
        query, key, value = heads.to(precise).split([sizes.key_size, sizes.key_size, shared * sizes.value_size], -1)
        rates = functional.softplus(decay.to(precise) + self.dt_bias.view(self.key_heads, shared))
        output = gated_delta_rule(
            unit(query) * sizes.key_size**-0.5,
            unit(key),
            value.unflatten(-1, (shared, -1)),
            -self.A_log.to(precise).exp().view(self.key_heads, shared) * rates,
            strength.sigmoid().to(precise),
            tree,
        )
        gates = gate.unflatten(-1, (shared, -1)).to(precise)
        normed = gated_norm(output, self.norm.to(precise), gates, self.config.layernorm_epsilon)
        return normed.to(projected.dtype).flatten(1).unsqueeze(1)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the parameters as Megatron's shards, for a checkpoint that any parallel layout can load."""
        own = {name: parameter for name, parameter in self.named_parameters() if "." not in name}
        divided = dict.fromkeys(own.keys() - {"norm"}, 0)
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(own, prefix, divided, sharded_offsets)
        for name, module in self.named_children():
            found |= sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata)
        return found


def causal_convolution(x: Tensor, weight: Tensor, tree: ChunkTree) -> Tensor:
    """Convolve each channel over the tokens of each sequence, with zeros before the first token.

    Args:
        x: [T, channels].
        weight: [channels, width]; the last column is for the token itself.
        tree: the sequences, with width - 1 ancestors.

    Returns:
        [T, channels].
    """
    padded = _with_zeros(x)
    output = x * weight[:, -1]
    for number, before in enumerate(tree.ancestors):
        output = output + padded.index_select(0, before) * weight[:, -2 - number]
    return output


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, tree: ChunkTree
) -> Tensor:
    """Apply the gated delta rule to all tokens. Each sequence starts from a state of zeros.

    A key head serves several value heads, each of which has a state.

    Args:
        query: [T, key_heads, key_size], scaled.
        key: [T, key_heads, key_size], of norm 1.
        value: [T, key_heads, values, value_size].
        log_decay: [T, key_heads, values], at most 0.
        strength: [T, key_heads, values], between 0 and 1.
        tree: the sequences' chunks.

    Returns:
        [T, key_heads, values, value_size].
    """
    query, key = (_in_chunks(x, tree).transpose(1, 2).unsqueeze(2) for x in (query, key))  # [N, heads, 1, CHUNK, size]
    value = _in_chunks(value, tree).permute(0, 2, 3, 1, 4)  # [N, heads, values, CHUNK, size]
    log_decay, strength = (_in_chunks(x, tree).permute(0, 2, 3, 1) for x in (log_decay, strength))
    total = log_decay.cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=query.device).triu(1)
    ratios = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()
    grown, strength = total.exp().unsqueeze(-1), strength.unsqueeze(-1)
    # The diagonal isn't read: `unitriangular` takes it as 1.
    system = strength * (key @ key.mT) * ratios
    sides = torch.cat((strength * value, strength * grown * key), -1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    new_values, read_keys = solved.split([value.shape[-1], key.shape[-1]], -1)
    within = (query @ key.mT) * ratios
    query = grown * query
    written_keys = (total[..., -1:] - total).exp().unsqueeze(-1) * key
    kept = grown[..., -1:, :]

    outputs: list[Tensor] = []
    state: Tensor | None = None
    parts = zip(
        *(x.split(tree.levels) for x in (new_values, read_keys, within, query, written_keys, kept)), strict=True
    )
    for (new, read, inside, asked, written, left), parents in zip(parts, tree.parents.split(tree.levels), strict=True):
        if state is None:
            outputs.append(inside @ new)
            state = written.mT @ new
        else:
            state = state.index_select(0, parents)
            new = new - read @ state
            outputs.append(asked @ state + inside @ new)
            state = left * state + written.mT @ new
    in_places = torch.cat(outputs).permute(0, 3, 1, 2, 4).flatten(0, 1)
    return in_places.index_select(0, tree.place_of_token)


def unit(x: Tensor) -> Tensor:
    """Scale each head of x [..., size] to norm 1; a head of zeros stays zero."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def gated_norm(x: Tensor, weight: Tensor, gate: Tensor, epsilon: float) -> Tensor:
    """Normalise heads and multiply them by silu(gate): x and gate [..., size], weight [size]."""
    return functional.rms_norm(x, weight.shape, weight, epsilon) * functional.silu(gate)


def _in_chunks(x: Tensor, tree: ChunkTree) -> Tensor:
    """Arrange tokens in chunks, with zeros in empty places: [T, ...] -> [N, CHUNK, ...]."""
    return _with_zeros(x).index_select(0, tree.token_of_place).unflatten(0, (-1, CHUNK))


def _with_zeros(x: Tensor) -> Tensor:
    """Append a row of zeros as row T, for places without a token."""
    return torch.cat((x, x.new_zeros(1, *x.shape[1:])))
