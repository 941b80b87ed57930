"""Giving back the memory of a transformers model's parameters, and taking it again."""

import ctypes
import ctypes.util

import torch
from transformers import PreTrainedModel


class ParameterMemory:
    """The memory behind a model's parameters. Tied ones are one parameter here, and stay tied."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._shapes: list[tuple[torch.nn.Parameter, torch.Size]] = []

    @property
    def released(self) -> bool:
        """Whether there is none now."""
        return bool(self._shapes)

    def release(self) -> None:
        """Forget the parameters' values and free their memory. Nothing may use the model until `restore`."""
        if self.released:
            return
        for parameter in self._model.parameters():
            self._shapes.append((parameter, parameter.shape))
            parameter.data = torch.empty(0, dtype=parameter.dtype)
        _trim()

    def restore(self) -> None:
        """Take memory again; what is in it is undefined."""
        for parameter, shape in self._shapes:
            parameter.data = torch.empty(shape, dtype=parameter.dtype)
        self._shapes.clear()


def _trim() -> None:
    """Have the C library give what is free back to the system: small tensors are in its heap."""
    trim = getattr(ctypes.CDLL(ctypes.util.find_library("c")), "malloc_trim", None)
    if trim is not None:
        trim(0)
