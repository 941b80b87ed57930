"""The decoder of Qwen3.5 with a mixture of experts: the dense Qwen3.5's, with the experts of Qwen3-Next.

Its files stack all experts of a layer in one tensor, [experts, outputs, inputs].
"""

from services.trainer.model.architecture import Architecture
from services.trainer.model.architectures.phi3 import FusedGateUp
from services.trainer.model.architectures.qwen3_5_text import INPUT
from services.trainer.model.architectures.qwen3_next import hybrid, rules
from services.trainer.model.family import Config, Family, ShardedColumns, experts, refuse, stacked_expert


def read(config: Config) -> Architecture:
    """Read the architecture from a Qwen3.5-MoE decoder config.json."""
    unused = config["moe_intermediate_size"]  # no layer has a dense MLP
    config = {"num_key_value_heads": 2, "norm_topk_prob": True, "intermediate_size": unused, **config}
    refuse(config, norm_topk_prob=True)
    return hybrid(config, experts=experts(config, config["shared_expert_intermediate_size"]))


STACKED_EXPERT = stacked_expert(
    (FusedGateUp, "expert_ffn+expert_ffn hidden"), down=(ShardedColumns, "hidden expert_ffn")
)

FAMILY = Family(read, rules=lambda shape, layer: rules(shape, layer, INPUT), expert_rules=STACKED_EXPERT)
