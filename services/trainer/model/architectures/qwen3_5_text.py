"""The decoder of Qwen3.5, dense: Qwen3-Next without experts, and with other projections in its gated delta nets."""

from services.trainer.model.architecture import Architecture
from services.trainer.model.architectures.qwen3_next import FusedKeyHeads, hybrid, rules
from services.trainer.model.family import Config, Family
from services.trainer.model.tensor_rules import HF_LAYER, LAYER, Rule


def read(config: Config) -> Architecture:
    """Read a config.json of this family."""
    return hybrid({"num_key_value_heads": 4, **config})


_THEIRS = f"{HF_LAYER}.linear_attn"
INPUT = Rule(
    f"{LAYER}.self_attention.linear_in.weight",
    FusedKeyHeads,
    (
        (f"{_THEIRS}.in_proj_qkv.weight", "delta_keys+delta_keys+delta_values hidden"),
        (f"{_THEIRS}.in_proj_z.weight", "delta_values hidden"),
        (f"{_THEIRS}.in_proj_b.weight", "delta_heads hidden"),
        (f"{_THEIRS}.in_proj_a.weight", "delta_heads hidden"),
    ),
)

FAMILY = Family(read, rules=lambda shape, layer: rules(shape, layer, INPUT))
