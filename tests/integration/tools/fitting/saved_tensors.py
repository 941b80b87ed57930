"""Bytes that autograd keeps for the backward pass of the real learner, counted by its hooks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from services.trainer.transformer.activation_memory import _RecipeOutput

HOOKS = torch.autograd.graph.saved_tensors_hooks


class SavedBytes:
    """Storages that are kept now, each counted once, and the most bytes that were kept at once."""

    def __init__(self, parameters: Iterator[torch.nn.Parameter]) -> None:
        """Don't count parameters."""
        self._left_out = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._uses: dict[int, int] = {}
        self._now = 0
        self._kept: WeakSet[_Kept] = WeakSet()
        self.peak = 0

    def keep(self, content: Any) -> "_Kept":
        """Return what autograd shall keep in place of `content`."""
        kept = _Kept(self, content)
        self._kept.add(kept)
        return kept

    def forget(self) -> None:
        """Let go of what autograd still keeps: cycles through its graph would hold the model for good."""
        for kept in list(self._kept):
            kept.content = None

    def add(self, storage: torch.UntypedStorage) -> None:
        if storage.data_ptr() in self._left_out:
            return
        before = self._uses.get(storage.data_ptr(), 0)
        self._uses[storage.data_ptr()] = before + 1
        self._now += 0 if before else storage.nbytes()
        self.peak = max(self.peak, self._now)

    def remove(self, storage: torch.UntypedStorage) -> None:
        if (place := storage.data_ptr()) not in self._uses:
            return
        self._uses[place] -= 1
        if not self._uses[place]:
            del self._uses[place]
            self._now -= storage.nbytes()


class _Kept:
    """What autograd keeps of a tensor, counted for as long as it is kept."""

    def __init__(self, counted: SavedBytes, content: Any) -> None:
        self.content = content
        self._counted = counted
        self._storages = [tensor.untyped_storage() for tensor in _tensors(content)]
        for storage in self._storages:
            counted.add(storage)

    def __del__(self) -> None:
        for storage in self._storages:
            self._counted.remove(storage)


def _tensors(content: Any) -> list[Tensor]:
    """Return the tensors that a kept object needs: itself, or the first arguments of its recipe."""
    if isinstance(content, Tensor):
        return [content]
    if isinstance(content, _RecipeOutput):
        return [tensor for argument in content._recipe._arguments for tensor in _tensors(argument)]
    return []


@contextmanager
def saved_bytes(model: torch.nn.Module) -> Iterator[SavedBytes]:
    """Count what forward and backward passes in the block keep, also within the layers' own hooks."""
    counted = SavedBytes(model.parameters())

    def counting(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Any:
        return HOOKS(lambda tensor: counted.keep(pack(tensor)), lambda kept: unpack(kept.content))

    torch.autograd.graph.saved_tensors_hooks = counting  # type: ignore[assignment, misc]
    try:
        with counting(lambda tensor: tensor, lambda tensor: tensor):
            yield counted
    finally:
        torch.autograd.graph.saved_tensors_hooks = HOOKS  # type: ignore[misc]
        counted.forget()
