"""Ministral 2410: Mistral, with sliding windows in some layers (`layer_types`)."""

from services.trainer.model.architecture import Architecture
from services.trainer.model.family import Config, Family, decoder, windows


def read(config: Config) -> Architecture:
    """Read the architecture from a Ministral config.json."""
    config = {"num_key_value_heads": 8, "sliding_window": 4096, **config}
    layer = "full_attention" if config["sliding_window"] is None else "sliding_attention"
    types = config.get("layer_types") or [layer] * config["num_hidden_layers"]
    return decoder(config, **windows(config, types))


FAMILY = Family(read)
