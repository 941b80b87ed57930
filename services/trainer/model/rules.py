"""Rules: which Hugging Face tensors make up a Megatron parameter. Families combine these, or add their own."""

from dataclasses import dataclass

from services.trainer.model.architecture import Architecture
from services.trainer.model.layouts import (
    ParameterLayout,
    QueryKeyValue,
    QueryKeyValueBias,
    Replicated,
    ShardedColumns,
    ShardedRows,
)


@dataclass(frozen=True)
class Rule:
    """One row of the table."""

    megatron: str
    """Name of the Megatron parameter; {layer} counts within the stage, or one of its chunks."""
    layout: type[ParameterLayout]
    """Its fusion and sharding."""
    parts: tuple[tuple[str, str], ...]
    """Hugging Face tensors: name ({layer} and {expert} count over the whole model) and shape, as names of
    sizes (`mapping.py`) and their sums, such as "query+kv+kv hidden"."""
    exported: bool = True
    """True if the tensor is exported by this rule; False if another rule does."""


LAYER, HF_LAYER = "decoder.layers.{layer}", "model.layers.{layer}"
_EMBEDDING = ("model.embed_tokens.weight", "vocab hidden")

FIRST = (Rule("embedding.word_embeddings.weight", ShardedRows, (_EMBEDDING,)),)
"""Rules of the first stage."""

LAST = (Rule("decoder.final_layernorm.weight", Replicated, (("model.norm.weight", "hidden"),)),)
"""Rules of the last stage."""

LAST_UNTIED = (Rule("output_layer.weight", ShardedRows, (("lm_head.weight", "vocab hidden"),)),)
"""The output layer, on the last stage."""

LAST_TIED = (Rule("output_layer.weight", ShardedRows, (_EMBEDDING,), exported=False),)
"""The last stage's copy of a tied embedding, unless it is also the first stage."""

NORMS = (
    Rule(f"{LAYER}.input_layernorm.weight", Replicated, ((f"{HF_LAYER}.input_layernorm.weight", "hidden"),)),
    Rule(f"{LAYER}.pre_mlp_layernorm.weight", Replicated, ((f"{HF_LAYER}.post_attention_layernorm.weight", "hidden"),)),
)
"""The norms before attention and MLP."""

QKV = (
    Rule(
        f"{LAYER}.self_attention.linear_qkv.weight",
        QueryKeyValue,
        (
            (f"{HF_LAYER}.self_attn.q_proj.weight", "query hidden"),
            (f"{HF_LAYER}.self_attn.k_proj.weight", "kv hidden"),
            (f"{HF_LAYER}.self_attn.v_proj.weight", "kv hidden"),
        ),
    ),
)
"""Queries, keys and values."""

OUTPUT = (
    Rule(
        f"{LAYER}.self_attention.linear_proj.weight",
        ShardedColumns,
        ((f"{HF_LAYER}.self_attn.o_proj.weight", "hidden query"),),
    ),
)
"""Attention's output projection."""

QK_NORM = tuple(
    Rule(
        f"{LAYER}.self_attention.{x}_layernorm.weight",
        Replicated,
        ((f"{HF_LAYER}.self_attn.{x}_norm.weight", "head"),),
    )
    for x in "qk"
)
"""Norms of queries and keys."""

QKV_BIAS = (
    Rule(
        f"{LAYER}.self_attention.linear_qkv.bias",
        QueryKeyValueBias,
        (
            (f"{HF_LAYER}.self_attn.q_proj.bias", "query"),
            (f"{HF_LAYER}.self_attn.k_proj.bias", "kv"),
            (f"{HF_LAYER}.self_attn.v_proj.bias", "kv"),
        ),
    ),
)
"""Biases of queries, keys and values."""

OUTPUT_BIAS = (
    Rule(
        f"{LAYER}.self_attention.linear_proj.bias",
        Replicated,
        ((f"{HF_LAYER}.self_attn.o_proj.bias", "hidden"),),
    ),
)
"""The bias of attention's output."""

GATE_UP = (
    Rule(
        f"{LAYER}.mlp.linear_fc1.weight",
        ShardedRows,
        ((f"{HF_LAYER}.mlp.gate_proj.weight", "ffn hidden"), (f"{HF_LAYER}.mlp.up_proj.weight", "ffn hidden")),
    ),
)
"""The first product of a dense layer's MLP."""

DOWN = (Rule(f"{LAYER}.mlp.linear_fc2.weight", ShardedColumns, ((f"{HF_LAYER}.mlp.down_proj.weight", "hidden ffn"),)),)
"""The second product."""

ROUTER = (Rule(f"{LAYER}.mlp.router.weight", Replicated, ((f"{HF_LAYER}.mlp.gate.weight", "experts hidden"),)),)
"""The router."""

_EXPERTS, _HF_EXPERT = f"{LAYER}.mlp.experts", f"{HF_LAYER}.mlp.experts.{{expert}}"
EXPERT = (
    Rule(
        f"{_EXPERTS}.linear_fc1",
        ShardedRows,
        (
            (f"{_HF_EXPERT}.gate_proj.weight", "expert_ffn hidden"),
            (f"{_HF_EXPERT}.up_proj.weight", "expert_ffn hidden"),
        ),
    ),
    Rule(f"{_EXPERTS}.linear_fc2", ShardedColumns, ((f"{_HF_EXPERT}.down_proj.weight", "hidden expert_ffn"),)),
)
"""One expert: its part of the parameters of all the rank's experts."""

_SHARED, _HF_SHARED = f"{LAYER}.mlp.shared_expert", f"{HF_LAYER}.mlp.shared_expert"
SHARED_EXPERT = (
    Rule(
        f"{_SHARED}.linear_fc1.weight",
        ShardedRows,
        (
            (f"{_HF_SHARED}.gate_proj.weight", "shared_ffn hidden"),
            (f"{_HF_SHARED}.up_proj.weight", "shared_ffn hidden"),
        ),
    ),
    Rule(f"{_SHARED}.linear_fc2.weight", ShardedColumns, ((f"{_HF_SHARED}.down_proj.weight", "hidden shared_ffn"),)),
    Rule(f"{_SHARED}_gate.weight", Replicated, ((f"{_HF_SHARED}_gate.weight", "one hidden"),)),
)
"""The shared expert and its gate."""


def layer_rules(shape: Architecture) -> tuple[Rule, ...]:
    """Return the rules of a layer with Llama's names, without those of its routed experts."""
    experts = shape.experts
    return (
        *NORMS,
        *QKV,
        *OUTPUT,
        *(QK_NORM if shape.qk_norm else ()),
        *(QKV_BIAS if shape.qkv_bias else ()),
        *(OUTPUT_BIAS if shape.output_bias else ()),
        *((*GATE_UP, *DOWN) if experts is None else ROUTER),
        *(SHARED_EXPERT if experts is not None and experts.shared_ffn_size is not None else ()),
    )
