"""The policy: Megatron's GPT model for a Hugging Face architecture, with hidden states instead of logits as output;
and the critic, with one value for each position.
"""

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
from collections.abc import Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as functional
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from relaxd.config import TrainerConfig
from relaxd.data.towers import TowerOutputs
from relaxd.models.layouts import Layout, problem, stage_layers
from relaxd.models.shape import read_shape
from services.trainer.megatron.gradient_accumulation import replace_apex
from services.trainer.megatron.world import World
from services.trainer.model.architecture import Architecture, ModelError
from services.trainer.model.layers import PolicyConfig, block_spec
from services.trainer.model.towers import KEPT_BYTES, DeviceMedia, build_tower, media_rows
from services.trainer.transformer.activation_memory import ActivationOffload
from services.trainer.transformer.router import Router
from services.trainer.transformer.sequence_layout import SequenceLayout

# isort: split


def check_divisible(folder: Path, config: TrainerConfig) -> None:
    """Raise ModelError unless the parallel sizes divide the model in a folder."""
    if wrong := problem(Layout.of_trainer(config), read_shape(folder)):
        raise ModelError(wrong)


def transformer_config(shape: Architecture, config: TrainerConfig) -> PolicyConfig:
    """Return Megatron's configuration for a model.

    Raises:
        ModelError: trainer.routing_replay is set, but the model has no experts.
    """
    if config.routing_replay != "none" and shape.experts is None:
        raise ModelError(
            f'trainer.routing_replay is "{config.routing_replay}", but the model ({shape.model_type}) has no experts: '
            'set "none"'
        )
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    experts = shape.experts
    # `replace_apex` is for one fusion, with bf16 on a GPU. The others need apex or Transformer Engine.
    fused = dtype is torch.bfloat16 and torch.cuda.is_available()
    if fused:
        replace_apex()
    fusions = {
        "gradient_accumulation_fusion": fused,
        "bias_activation_fusion": False,  # replaced by our SwiGLU
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
    }
    recompute = {}
    stages = stage_layers(shape.layers, config.pipeline_parallel, config.pipeline_layers)
    layers = min(config.recompute_layers or shape.layers, max(map(len, stages)))
    if config.recompute == "full":
        recompute = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": layers}
    moe = {}
    if experts is not None:
        moe = {
            "num_moe_experts": experts.count,
            "moe_router_topk": experts.per_token,
            "moe_ffn_hidden_size": experts.ffn_size,
            "moe_shared_expert_intermediate_size": experts.shared_ffn_size,
            "moe_router_pre_softmax": not experts.normalize,
            "moe_router_load_balancing_type": "none",  # replaced by our routers
            "moe_aux_loss_coeff": config.moe.aux_loss_coef,
            "moe_z_loss_coeff": config.moe.z_loss_coef,
        }
    return PolicyConfig(
        selective_layers=layers if config.recompute == "selective" else 0,
        num_layers=shape.layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_size,
        ffn_hidden_size=shape.ffn_size,
        layernorm_epsilon=shape.norm_epsilon,
        normalization="RMSNorm",
        qk_layernorm=shape.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        attention_output_bias=shape.output_bias,
        attention_output_gate=shape.output_gate,
        layernorm_zero_centered_gamma=shape.zero_centred_norms,
        delta_net=shape.delta_net,
        window_size=None if shape.window is None else (shape.window - 1, 0),
        window_attn_skip_freq=[int(windowed) for windowed in shape.windowed],
        gated_linear_unit=True,
        activation_func=functional.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=config.tensor_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        pipeline_model_parallel_layout=_megatron_layout(stages) if config.pipeline_layers else None,
        virtual_pipeline_model_parallel_size=config.pipeline_chunks if config.pipeline_chunks > 1 else None,
        # With chunks a pipeline is a ring, so each of two stages precedes and follows the other. A batched exchange
        # would mix up hidden states and gradients; separate exchanges keep their order.
        overlap_p2p_comm=config.pipeline_chunks > 1,
        batch_p2p_comm=config.pipeline_chunks == 1,
        context_parallel_size=config.context_parallel,
        expert_model_parallel_size=config.expert_parallel,
        expert_tensor_parallel_size=Layout.of_trainer(config).expert_tensor,
        sequence_parallel=config.tensor_parallel > 1,
        # Micro-batches differ in length: `StageExchange` knows the shapes.
        variable_seq_lengths=config.pipeline_parallel > 1,
        batch_p2p_sync=False,  # torch no longer needs it
        moe_token_dispatcher_type="alltoall",  # required by Megatron, though unused
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        **recompute,
        # The loss is a sum, which the learner divides once per step.
        calculate_per_token_loss=True,
        # Weights are loaded, not initialised. Megatron must still run its initialisation, which marks the parameters
        # divided among ranks; the gradient norm counts the others only once.
        init_method=_keep,
        output_layer_init_method=_keep,
        embedding_init_method=_keep,
        **fusions,
        **moe,
    )


class PolicyModel(GPTModel):
    """One pipeline stage of the policy model, or one chunk of a stage.

    Logits would be the largest tensor of a training step, so the model doesn't compute them: the last stage returns the
    normalised hidden states, and `logprobs` computes log-probs of the trained tokens in chunks.
    """

    _offload: ActivationOffload | None = None

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.towers: torch.nn.ModuleDict | None = None
        """Vision and audio towers, in the model's first chunk; None in other chunks and in text models."""
        self.tower_outputs = TowerOutputs(KEPT_BYTES, on_host=True)
        """Cached outputs of frozen towers."""

    def forward(
        self, tokens: Tensor, rotary: Tensor, layout: SequenceLayout, media: DeviceMedia | None = None
    ) -> Tensor:
        """Run this pipeline stage's forward pass on a micro-batch.

        Args:
            tokens: int64 [1, T], this rank's slice under context parallelism.
            rotary: `rotary_table` of the tokens whose queries this rank has in attention.
            layout: the sequences.
            media: the media, if there are any; used by the first stage.

        Returns:
            Hidden states [T, 1, hidden] (T over the tensor-parallel ranks under sequence parallelism).
        """
        hidden = self.embedding(input_ids=tokens, position_ids=None) if self.pre_process else None
        if hidden is not None and self.towers is not None and media is not None:
            rows, deepstack = media_rows(self.towers, media, self.tower_outputs)
            hidden = hidden.index_copy(0, media.places, rows.unsqueeze(1).to(hidden.dtype))
            layout = replace(layout, deepstack=deepstack)
        if hidden is not None and torch.is_grad_enabled() and not hidden.requires_grad:
            # Recomputed layers get gradients only if their input requires one; a frozen embedding's output doesn't.
            hidden = hidden.detach().requires_grad_()
        with nullcontext() if self._offload is None else self._offload.saving([*self.parameters(), rotary]):
            return self.decoder(
                hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=layout
            )

    def offload_activations(self, offload: ActivationOffload | None) -> None:
        """Make the layers offload their activations to the host; None: keep them on the device."""
        self._offload = offload
        for layer in self.decoder.layers:
            layer.offload = offload

    def output_weight(self) -> Tensor:
        """Return this rank's rows of the output layer (or tied embedding): [padded vocabulary / tp_size, hidden]."""
        tied = self.share_embeddings_and_output_weights
        return self.shared_embedding_or_output_weight() if tied else self.output_layer.weight


class InterleavedModel(MegatronModule):
    """A pipeline stage whose chunks alternate with those of other stages (`chunk_layers`).

    Gradient buffers, optimizer and checkpoints treat the chunks as one model. Only Megatron's schedule sees chunks.
    """

    def __init__(self, chunks: Sequence[PolicyModel]) -> None:
        super().__init__(chunks[0].config)
        self.chunks = torch.nn.ModuleList(chunks)
        self.pre_process, self.post_process = chunks[0].pre_process, chunks[-1].post_process
        self.share_embeddings_and_output_weights = chunks[0].share_embeddings_and_output_weights

    @property
    def parts(self) -> list[PolicyModel]:
        """The stage's model chunks, in order of their layers."""
        return [cast(PolicyModel, chunk) for chunk in self.chunks]

    def shared_embedding_or_output_weight(self) -> Tensor:
        """Return this stage's copy of the tied embedding. Only the first and last pipeline stage have a copy."""
        weight: Tensor = self.parts[0 if self.pre_process else -1].shared_embedding_or_output_weight()
        return weight

    def offload_activations(self, offload: ActivationOffload | None) -> None:
        for chunk in self.parts:
            chunk.offload_activations(offload)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return Megatron's sharded state dict of each chunk, by the chunk's number, with names in the whole model."""
        return {str(i): x.sharded_state_dict(prefix, sharded_offsets, metadata) for i, x in enumerate(self.parts)}


StageModel = PolicyModel | InterleavedModel
"""The model of one pipeline stage: a single chunk, or interleaved chunks."""


def padded_vocab(vocab_size: int, tp_size: int) -> int:
    """Return the number of rows of Megatron's embedding: `vocab_size` rounded up to a multiple of `tp_size`."""
    return -(-vocab_size // tp_size) * tp_size


def build_model(
    shape: Architecture, config: PolicyConfig, world: World, kind: type[PolicyModel] = PolicyModel
) -> StageModel:
    """Build this rank's pipeline stage of a model of class `kind`, without loading weights."""
    last = world.layout.pipeline_chunks - 1
    chunks = [
        kind(
            config=own,
            transformer_layer_spec=block_spec(own, chunk),
            vocab_size=padded_vocab(shape.vocab_size, world.tp_size),
            max_sequence_length=shape.max_positions,
            position_embedding_type="none",  # `rotary_table` replaces it, with positions per sequence
            pre_process=world.first_stage and not chunk,
            post_process=world.last_stage and chunk in (None, last),
            vp_stage=chunk,
            share_embeddings_and_output_weights=shape.tied_embeddings,
        )
        for chunk, own in _chunks(config, world)
    ]
    if shape.towers and world.first_stage:
        built = {tower.name: build_tower(tower, config.params_dtype, world.device) for tower in shape.towers}
        chunks[0].towers = torch.nn.ModuleDict(built)
    return (chunks[0] if len(chunks) == 1 else InterleavedModel(chunks)).to(world.device)


def _chunks(config: PolicyConfig, world: World) -> list[tuple[int | None, PolicyConfig]]:
    """Return each chunk's number and configuration. `recompute_num_layers` is shared out from the first chunk on."""
    if world.layout.pipeline_chunks == 1:
        return [(None, config)]
    found: list[tuple[int | None, PolicyConfig]] = []
    layers, left = config.num_layers // world.pp_size // world.layout.pipeline_chunks, config.recompute_num_layers
    for chunk in range(world.layout.pipeline_chunks):
        own = copy(config)
        if left is not None:
            own.recompute_num_layers = min(left, layers)
            left -= own.recompute_num_layers
        found.append((chunk, own))
    return found


def freeze_routers(model: StageModel) -> None:
    """Exclude expert routers from training. Gradients still pass through routers. Call this before `DataParallel`."""
    for router in routers(model):
        router.requires_grad_(False)


def routers(model: torch.nn.Module) -> list[Router]:
    """Return the expert routers of this pipeline stage, in order of layers; [] in a dense model."""
    return [module for module in model.modules() if isinstance(module, Router)]


def _megatron_layout(stages: list[range]) -> list[list[str]]:
    """Return the list of layer kinds of each pipeline stage, as Megatron wants it."""
    layout = [["decoder"] * len(layers) for layers in stages]
    layout[0].insert(0, "embedding")
    layout[-1].append("loss")
    return layout


def _keep(tensor: Tensor) -> Tensor:
    return tensor


VALUE_HEAD = "value_head.weight"
"""Name of the value head's parameter, [1, hidden], on the last pipeline stage. Tensor-parallel ranks have it whole."""


class CriticModel(PolicyModel):
    """One pipeline stage, or chunk, of the critic. In the last, a value head of zeros replaces the output layer."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "share_embeddings_and_output_weights": False})
        if self.post_process:
            del self.output_layer
            self.value_head = torch.nn.Linear(self.config.hidden_size, 1, bias=False, dtype=self.config.params_dtype)
            torch.nn.init.zeros_(self.value_head.weight)

    def output_weight(self) -> Tensor:
        """Return the value head's weight: [1, hidden]."""
        return self.value_head.weight

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return MegatronModule's sharded state dict. GPTModel's needs an output layer, which a critic lacks."""
        state: dict[str, Any] = MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)
        return state


def build_critic(shape: Architecture, config: PolicyConfig, world: World) -> StageModel:
    """Build this rank's pipeline stage of the critic, without loading weights."""
    return build_model(shape, config, world, CriticModel)
