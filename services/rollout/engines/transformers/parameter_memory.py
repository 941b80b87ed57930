"""Freeing the memory of a transformers model's parameters, and allocating it again."""

import ctypes
import ctypes.util

import torch
from transformers import PreTrainedModel


class ParameterMemory:
    """The memory of a model's parameters. Tied parameters stay tied."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._shapes: list[tuple[torch.nn.Parameter, torch.Size]] = []

    @property
    def released(self) -> bool:
        """True if the memory is freed."""
        return bool(self._shapes)

    def release(self) -> None:
        """Free the parameters' memory, with their values. The model is unusable until `restore`."""
        if self.released:
            return
        for parameter in self._model.parameters():
            self._shapes.append((parameter, parameter.shape))
            parameter.data = torch.empty(0, dtype=parameter.dtype)
        _trim()

    def restore(self) -> None:
        """Allocate the memory again, with undefined values."""
        for parameter, shape in self._shapes:
            parameter.data = torch.empty(shape, dtype=parameter.dtype)
        self._shapes.clear()


def _trim() -> None:
    """Have the C library return free heap memory, which held small tensors, to the system."""
    trim = getattr(ctypes.CDLL(ctypes.util.find_library("c")), "malloc_trim", None)
    if trim is not None:
        trim(0)
