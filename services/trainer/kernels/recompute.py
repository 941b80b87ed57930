"""Tensors that the backward pass makes anew instead of keeping."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor


class Remaking:
    """Inside, autograd keeps a recipe of each tensor that was made by calling this, and not the tensor.

    The backward pass follows the recipe when it first needs the tensor, and forgets it again after its last need. Only
    the outermost arguments of a chain of recipes are kept. It works under any operation that saves tensors the usual
    way, and costs the memory of none: an operation's own output, and what has no recipe, is saved as always.
    """

    def __init__(self, active: bool = True) -> None:
        """If not `active`, or without gradients, everything is kept as always."""
        self._hooks: Any = None
        if active and torch.is_grad_enabled():
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._made: dict[int, tuple[Tensor, _Recipe, int]] = {}
        """By storage: the tensor, which is held so that the storage stays its own, its recipe, and which of the
        recipe's tensors it is."""

    @property
    def active(self) -> bool:
        """Whether tensors are made anew."""
        return self._hooks is not None

    def __enter__(self) -> Self:
        """Begin."""
        if self._hooks is not None:
            self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End; the recipes stay with what has saved them."""
        if self._hooks is not None:
            self._hooks.__exit__(kind, error, trace)
        self._made.clear()

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return function(*arguments), one tensor or a tuple of tensors that the backward pass makes anew.

        The function must give the same again.
        """
        output = function(*arguments)
        self.offer(output, function, *arguments)
        return output

    def offer(self, output: Any, function: Callable[..., Any], *arguments: Any) -> None:
        """Have the backward pass make tensors anew, by another function than made them.

        Args:
            output: the tensor, or a tuple of them. One that is a part of an argument is kept: it costs nothing.
            function: what gives the same.
            *arguments: its arguments.
        """
        if self._hooks is None:
            return
        recipe = _Recipe(function, [self._kept(argument) for argument in arguments])
        given = {_storage(argument) for argument in arguments if isinstance(argument, Tensor)}
        for index, tensor in enumerate(output if isinstance(output, tuple) else (output,)):
            if _storage(tensor) not in given:
                self._made[_storage(tensor)] = tensor, recipe, index

    def _kept(self, argument: Any) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        made = self._made.get(_storage(argument))
        return argument.detach() if made is None else made[1].view(argument, made[2])

    def _pack(self, tensor: Tensor) -> Any:
        made = self._made.get(_storage(tensor))
        return tensor if made is None else made[1].view(tensor, made[2])


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _unpack(packed: Any) -> Tensor:
    return packed() if isinstance(packed, _View) else packed


class _Recipe:
    """How to make some tensors."""

    def __init__(self, function: Callable[..., Any], arguments: list[Any]) -> None:
        self._function = function
        self._arguments = arguments
        self._made: tuple[Tensor, ...] | None = None
        self._needs = 0

    def view(self, like: Tensor, index: int) -> "_View":
        """A need for one of the tensors, seen as `like` is."""
        self._needs += 1
        return _View(self, index, like.shape, like.stride(), int(like.storage_offset()))

    def take(self, index: int) -> Tensor:
        """Make the tensors, unless they are there, and forget them if nobody needs them after this."""
        self._needs -= 1
        if self._made is None:
            with torch.no_grad():
                made = self._function(*(a() if isinstance(a, _View) else a for a in self._arguments))
            self._made = made if isinstance(made, tuple) else (made,)
        tensor = self._made[index]
        if self._needs <= 0:
            self._made = None
        return tensor


class _View:
    """One need for a tensor that a recipe makes."""

    def __init__(self, recipe: _Recipe, index: int, shape: torch.Size, stride: tuple[int, ...], offset: int) -> None:
        self._recipe = recipe
        self._index = index
        self._geometry = shape, stride, offset

    def __call__(self) -> Tensor:
        shape, stride, offset = self._geometry
        tensor = self._recipe.take(self._index)
        if (tensor.shape, tensor.stride(), tensor.storage_offset()) == (shape, stride, offset):
            return tensor
        return tensor.as_strided(shape, stride, offset)
