"""Bytes of an inference engine on each of its GPUs, and the number of answers that its key-value cache has room for."""

from dataclasses import dataclass

from relaxd.fitting.trainer import Bytes
from relaxd.models.layouts import model_parameters
from relaxd.models.shape import ModelShape

DEFAULT_FRACTION = 0.85
"""Share of the GPU for weights and cache where SGLang decides, roughly."""
ENGINE_PROCESS_BYTES = 5_600_000_000
"""CUDA's context, graphs and work space beside weights and cache: 3.6 GB measured at 135 M, 5.6 GB at 0.6 B."""


@dataclass(frozen=True)
class EngineMemory:
    """An engine on one of its GPUs."""

    weights: int
    """Bytes."""
    cache: int
    """Bytes of the key-value cache; negative if the weights don't fit."""
    token_bytes: int
    """Bytes of a token in the cache."""
    assumed: bool
    """True if SGLang decides how much is for weights and cache (DEFAULT_FRACTION of a whole GPU)."""
    share: float = 1.0
    """Share of the GPU that is the engine's."""

    @property
    def bytes(self) -> Bytes:
        """Bytes by what they are for."""
        return {"weights": self.weights, "key-value cache": max(0, self.cache), "process": ENGINE_PROCESS_BYTES}

    @property
    def cached_tokens(self) -> int:
        """Tokens that fit into the cache."""
        return max(0, self.cache) // self.token_bytes

    def answers(self, tokens: int) -> int:
        """Return the number of sequences of `tokens` tokens that fit at once."""
        return self.cached_tokens // tokens


def engine_memory(
    shape: ModelShape, tensor: int, element: int, fraction: float, gpu_bytes: int, share: float = 1.0
) -> EngineMemory:
    """Divide a GPU's memory.

    Args:
        shape: the model.
        tensor: GPUs that share it. With more than there are key-value heads, several hold the same head.
        element: bytes of an element of weights and cache.
        fraction: share of the engine's memory for weights and cache; 0 lets SGLang decide.
        gpu_bytes: memory of the GPU.
        share: share of the GPU that is the engine's. Where SGLang decides, it keeps as many bytes free as of a whole
            GPU.
    """
    weights = model_parameters(shape) * element // tensor
    token = 2 * shape.layers * max(1, shape.kv_heads // tensor) * shape.head_size * element
    static = fraction * share if fraction else share - (1 - DEFAULT_FRACTION)
    cache = int(static * gpu_bytes) - weights
    return EngineMemory(weights, cache, token, not fraction, share)
