"""The policy: Megatron's GPT model built from a Hugging Face architecture, ending in hidden states, not logits."""

import services.trainer.megatron.cpu as megatron_cpu  # must come before Megatron

# isort: split
import torch
import torch.nn.functional as functional
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from relaxd.config import TrainerConfig
from services.trainer.megatron import gpu as megatron_gpu
from services.trainer.megatron.parallel import World, expert_tensor_parallel
from services.trainer.model.architecture import Architecture, ModelError
from services.trainer.model.layers import block_spec
from services.trainer.model.sequence_layout import SequenceLayout


def transformer_config(shape: Architecture, config: TrainerConfig) -> TransformerConfig:
    """Megatron's configuration for this model.

    Raises:
        ModelError: the model can't be divided as the trainer's parallel sizes say.
    """
    _check_divisible(shape, config)
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    experts = shape.experts
    # On a GPU with bf16 there are substitutes for apex and Transformer Engine; Megatron's other fusions need those.
    fused = dtype is torch.bfloat16 and torch.cuda.is_available()
    if fused:
        megatron_gpu.install()
    fusions = {
        "gradient_accumulation_fusion": fused,
        "bias_activation_fusion": fused,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
    }
    recompute = {}
    if config.recompute == "full":
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    moe = {}
    if experts is not None:
        megatron_cpu.repair_moe()
        moe = {
            "num_moe_experts": experts.count,
            "moe_router_topk": experts.per_token,
            "moe_ffn_hidden_size": experts.ffn_size,
            # Softmax over the chosen experts only is the same as normalising the chosen ones' weights.
            "moe_router_pre_softmax": not experts.normalize,
            "moe_router_load_balancing_type": "none",
        }
    return TransformerConfig(
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
        gated_linear_unit=True,
        activation_func=functional.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=config.tensor_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        context_parallel_size=config.context_parallel,
        expert_model_parallel_size=config.expert_parallel,
        expert_tensor_parallel_size=expert_tensor_parallel(config),
        sequence_parallel=config.tensor_parallel > 1,
        # Micro-batches differ in length, so stages tell each other the shapes.
        variable_seq_lengths=config.pipeline_parallel > 1,
        moe_token_dispatcher_type="alltoall",  # the one that allows it
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        **recompute,
        # The loss is a sum; the learner divides once, at the end.
        calculate_per_token_loss=True,
        # Weights are loaded, so nothing is drawn; Megatron must still walk through its initialisation, where it marks
        # the parameters that ranks share (the gradient norm counts the others once).
        init_method=_leave,
        output_layer_init_method=_leave,
        embedding_init_method=_leave,
        **fusions,
        **moe,
    )


class PolicyModel(GPTModel):
    """One pipeline stage of the policy.

    Logits are the largest tensor of a training step, so the model doesn't compute them: the last stage returns the
    normalised hidden states, and `logprobs` turns the rows that predict a response token into log-probs, in chunks.
    """

    def forward(self, tokens: Tensor, rotary: Tensor, layout: SequenceLayout) -> Tensor:
        """Run this stage.

        Args:
            tokens: int64 [1, T], this rank's slice under context parallelism.
            rotary: `rotary_table` of the tokens' positions; of all ranks' under context parallelism.
            layout: where the sequences are.

        Returns:
            Hidden states [T, 1, hidden] (T over the tensor-parallel ranks under sequence parallelism).
        """
        hidden = self.embedding(input_ids=tokens, position_ids=None) if self.pre_process else None
        return self.decoder(hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=layout)

    def output_weight(self) -> Tensor:
        """This rank's rows of the output layer (of the embedding, if tied): [padded vocabulary / ranks, hidden]."""
        tied = self.share_embeddings_and_output_weights
        return self.shared_embedding_or_output_weight() if tied else self.output_layer.weight


def padded_vocab(vocab_size: int, tensor_parallel: int) -> int:
    """Rows of the embedding in Megatron: the next multiple of the ranks that share it. The added rows stay zero."""
    return -(-vocab_size // tensor_parallel) * tensor_parallel


def build_model(shape: Architecture, config: TransformerConfig, world: World) -> PolicyModel:
    """Make this rank's stage of the model, with weights still to be loaded."""
    model = PolicyModel(
        config=config,
        transformer_layer_spec=block_spec(config),
        vocab_size=padded_vocab(shape.vocab_size, world.tensor_size),
        max_sequence_length=shape.max_positions,
        position_embedding_type="none",  # `rotary_table` does it, from positions that begin anew in each sequence
        pre_process=world.first_stage,
        post_process=world.last_stage,
        share_embeddings_and_output_weights=shape.tied_embeddings,
    )
    return model.to(world.device)


def _leave(tensor: Tensor) -> Tensor:
    return tensor


def _check_divisible(shape: Architecture, config: TrainerConfig) -> None:
    head_ranks = config.tensor_parallel * config.context_parallel
    head_field = "tensor_parallel x trainer.context_parallel" if config.context_parallel > 1 else "tensor_parallel"
    counts = [
        (head_field, head_ranks, "query heads", shape.heads),
        (head_field, head_ranks, "key-value heads", shape.kv_heads),
        ("tensor_parallel", config.tensor_parallel, "MLP columns", shape.ffn_size),
        ("pipeline_parallel", config.pipeline_parallel, "layers", shape.layers),
    ]
    if shape.experts is None:
        counts.append(("expert_parallel", config.expert_parallel, "expert (it is a dense model)", 1))
    else:
        counts.append(("expert_parallel", config.expert_parallel, "experts", shape.experts.count))
        counts.append(("tensor_parallel", expert_tensor_parallel(config), "expert columns", shape.experts.ffn_size))
    for field, size, what, count in counts:
        if count % size:
            raise ModelError(f"trainer.{field} is {size}: it must divide the model's {count} {what}")
