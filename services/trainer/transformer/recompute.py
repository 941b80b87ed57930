"""Selective recomputation: the backward pass computes tensors again instead of keeping them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor


class Deferred(ABC):
    """Placeholder that autograd saves instead of a tensor."""

    @abstractmethod
    def __call__(self) -> Tensor:
        """Return the tensor."""


class Recompute:
    """Context in which autograd saves a recipe instead of each tensor that was computed by calling the context.

    The backward pass runs the recipe at the tensor's first use and frees the tensor after its last use. A chain of
    recipes keeps only the first one's arguments. Any operation that saves tensors with `save_for_backward` is covered.
    Tensors without a recipe are saved as usual.
    """

    def __init__(self, active: bool = True, keep: Callable[[Tensor], Tensor | Deferred] | None = None) -> None:
        """Save all tensors as usual if `active` is False or gradients are disabled.

        Args:
            active: whether tensors are recomputed.
            keep: returns the form in which other tensors are saved; None: they are saved unchanged.
        """
        self._keep = keep or (lambda tensor: tensor)
        self._hooks: Any = None
        if active and torch.is_grad_enabled():
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, unpack)
        self._made: dict[int, tuple[Tensor, _Recipe, int]] = {}
        """By storage: tensor, recipe, index among the recipe's outputs. The reference to the tensor keeps its storage
        from being reused."""

    @property
    def active(self) -> bool:
        """True if tensors are recomputed."""
        return self._hooks is not None

    def __enter__(self) -> Self:
        """Install the hooks."""
        if self._hooks is not None:
            self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the hooks; saved recipes stay alive in autograd's graph."""
        if self._hooks is not None:
            self._hooks.__exit__(kind, error, trace)
        self._made.clear()

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return function(*arguments), a tensor or a tuple of tensors that the backward pass recomputes.

        The function must be deterministic.
        """
        output = function(*arguments)
        self.register(output, function, *arguments)
        return output

    def register(self, output: Any, function: Callable[..., Any], *arguments: Any) -> None:
        """Let the backward pass recompute tensors, by a function that may differ from the forward pass's.

        Args:
            output: the tensor or tuple of tensors. A view of an argument is saved as usual, at no cost.
            function: function that returns the same values as `output`.
            *arguments: arguments of the function.
        """
        if self._hooks is None:
            return
        recipe = _Recipe(function, [self._kept(argument) for argument in arguments])
        argument_storages = {_storage(argument) for argument in arguments if isinstance(argument, Tensor)}
        for index, tensor in enumerate(output if isinstance(output, tuple) else (output,)):
            if _storage(tensor) not in argument_storages:
                self._made[_storage(tensor)] = tensor, recipe, index

    def _kept(self, argument: Any) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        made = self._made.get(_storage(argument))
        return self._keep(argument.detach()) if made is None else made[1].view(argument, made[2])

    def _pack(self, tensor: Tensor) -> Any:
        made = self._made.get(_storage(tensor))
        return self._keep(tensor) if made is None else made[1].view(tensor, made[2])


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def unpack(saved: Tensor | Deferred) -> Tensor:
    """Return the tensor that autograd saved."""
    return saved() if isinstance(saved, Deferred) else saved


class _Recipe:
    """A function and its arguments, from which tensors can be recomputed."""

    def __init__(self, function: Callable[..., Any], arguments: list[Any]) -> None:
        self._function = function
        self._arguments = arguments
        self._outputs: tuple[Tensor, ...] | None = None
        self._uses = 0

    def view(self, like: Tensor, index: int) -> "_View":
        """Return a placeholder for one output with the geometry of `like`, and count it as a use."""
        self._uses += 1
        return _View(self, index, like.shape, like.stride(), int(like.storage_offset()))

    def take(self, index: int) -> Tensor:
        """Return one output, recomputing all if necessary, and free them after the last use."""
        self._uses -= 1
        if self._outputs is None:
            with torch.no_grad():
                outputs = self._function(*(a() if isinstance(a, Deferred) else a for a in self._arguments))
            self._outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        tensor = self._outputs[index]
        if self._uses <= 0:
            self._outputs = None
        return tensor


class _View(Deferred):
    """Placeholder for one use of a recipe's output."""

    def __init__(self, recipe: _Recipe, index: int, shape: torch.Size, stride: tuple[int, ...], offset: int) -> None:
        self._recipe = recipe
        self._index = index
        self._geometry = shape, stride, offset

    def __call__(self) -> Tensor:
        """Return the tensor, recomputed if necessary."""
        shape, stride, offset = self._geometry
        tensor = self._recipe.take(self._index)
        if (tensor.shape, tensor.stride(), tensor.storage_offset()) == (shape, stride, offset):
            return tensor
        return tensor.as_strided(shape, stride, offset)
