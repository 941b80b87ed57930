"""The states of a process's random generators, as plain values that JSON can hold."""

import random
from typing import Any

import services.trainer.megatron.cpu  # noqa: F401  must come before Megatron

# isort: split
import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor


def read_generators() -> dict[str, Any]:
    """Return the states of this process's random generators."""
    version, numbers, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": _text(torch.get_rng_state()),
        "cuda": _text(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
        "megatron": {name: _text(states) for name, states in get_cuda_rng_tracker().get_states().items()},
        "python": [version, list(numbers), gauss],
        "numpy": [name, np.asarray(keys).tolist(), *rest],
    }


def write_generators(states: dict[str, Any]) -> None:
    """Restore the states that `read_generators` returned."""
    torch.set_rng_state(_state(states["torch"]))
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_state(states["cuda"]))
    get_cuda_rng_tracker().set_states({name: _state(text) for name, text in states["megatron"].items()})
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.asarray(keys, np.uint32), *rest))


def _text(state: Tensor) -> str:
    """Return a generator's state, of bytes, as text."""
    return state.cpu().numpy().tobytes().hex()


def _state(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
