"""The decoder of Qwen3.5, dense: Qwen3-Next without experts, and with other projections in its gated delta nets."""

from services.trainer.model.architecture import Architecture
from services.trainer.model.architectures.qwen3_next import FusedKeyHeads, hybrid, rules
from services.trainer.model.family import Config, Family, layer_rule


def read(config: Config) -> Architecture:
    """Read the architecture from a Qwen3.5 decoder config.json."""
    return hybrid({"num_key_value_heads": 4, **config})


INPUT = layer_rule(
    "self_attention.linear_in.weight",
    FusedKeyHeads,
    {
        "linear_attn.in_proj_qkv.weight": "delta_keys+delta_keys+delta_values hidden",
        "linear_attn.in_proj_z.weight": "delta_values hidden",
        "linear_attn.in_proj_b.weight": "delta_heads hidden",
        "linear_attn.in_proj_a.weight": "delta_heads hidden",
    },
)

FAMILY = Family(read, rules=lambda shape, layer: rules(shape, layer, INPUT))
