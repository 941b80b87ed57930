"""Sizes of gated delta nets, which some layers have in place of attention, read from config.json without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class DeltaNetSizes:
    """The gated delta nets of a model."""

    layers: tuple[bool, ...]
    """True for each layer that has one in place of attention."""
    key_heads: int
    """Heads of queries and keys."""
    value_heads: int
    """Heads of values: a multiple of `key_heads`."""
    key_size: int
    """Width of a query or key."""
    value_size: int
    """Width of a value."""
    convolution: int
    """Number of tokens that a token's convolution reads, including the token."""

    @property
    def keys(self) -> int:
        """Width of all keys, and of all queries."""
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        """Width of all values."""
        return self.value_heads * self.value_size

    @property
    def projected(self) -> int:
        """Width of the first projection: queries, keys, values, gates, strengths and decays."""
        return 2 * self.keys + 2 * self.values + 2 * self.value_heads

    def parameters(self, hidden: int, ranks: int) -> int:
        """Return the parameters of a layer's delta net on one of `ranks` tensor-parallel ranks."""
        divided = (self.projected + self.values) * hidden + (2 * self.keys + self.values) * self.convolution
        return (divided + 2 * self.value_heads) // ranks + self.value_size


def read_delta_net(config: Mapping[str, Any]) -> DeltaNetSizes:
    """Read a decoder's configuration.

    Raises:
        ValueError: a field is wrong.
    """
    count, interval = config["num_hidden_layers"], config.get("full_attention_interval", 4)
    usual = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(count)]
    types = config.get("layer_types") or usual
    if len(types) != count or set(types) - {"full_attention", "linear_attention"} or "full_attention" not in types:
        raise ValueError(
            f'layer_types is {types}: it must have "linear_attention" or "full_attention" for each of the {count} '
            'layers, and "full_attention" at least once'
        )
    sizes = {own: config.get(field, default) for own, (field, default) in _FIELDS.items()}
    for own, (field, _) in _FIELDS.items():
        if type(sizes[own]) is not int or sizes[own] < 1:
            raise ValueError(f"{field} is {sizes[own]!r}: it must be a whole number of at least 1")
    if sizes["value_heads"] % sizes["key_heads"]:
        raise ValueError(
            f"linear_num_value_heads is {sizes['value_heads']}: linear_num_key_heads, which is {sizes['key_heads']}, "
            "must divide it"
        )
    return DeltaNetSizes(layers=tuple(kind == "linear_attention" for kind in types), **sizes)


_FIELDS = {
    "key_heads": ("linear_num_key_heads", 16),
    "value_heads": ("linear_num_value_heads", 32),
    "key_size": ("linear_key_head_dim", 128),
    "value_size": ("linear_value_head_dim", 128),
    "convolution": ("linear_conv_kernel_dim", 4),
}
"""Fields of config.json, and their defaults in transformers."""
