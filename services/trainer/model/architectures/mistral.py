"""Mistral: Llama, with sliding-window attention in the first releases."""

from services.trainer.model.architecture import Architecture
from services.trainer.model.family import Config, Family, decoder, windows


def read(config: Config) -> Architecture:
    """Read the architecture from a Mistral config.json."""
    config = {"num_key_value_heads": 8, "sliding_window": 4096, **config}
    layer = "full_attention" if config["sliding_window"] is None else "sliding_attention"
    return decoder(config, **windows(config, [layer] * config["num_hidden_layers"]))


FAMILY = Family(read)
