"""Check the results of an algorithm's methods for real groups: a user's own class may return anything.

Errors name class and method. `algorithm_trial` makes the same checks before a run, on a made-up group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from relaxd.algorithms.base import (
    Advantages,
    AdvantagesAndReturns,
    Algorithm,
    Filtered,
    LossInputs,
    LossOutput,
    ValuedGroup,
    WithCritic,
    WithFilter,
)

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class AlgorithmError(ValueError):
    """An algorithm can't be used, or one of its methods failed. The message names the setting, or class and method."""


# --- called on real groups --------------------------------------------------------------------------------------------


def filtered_by(
    algorithm: Algorithm, rewards: NDArray[np.float64], lengths: NDArray[np.int32], columns: Mapping[str, Any]
) -> Filtered | None:
    """Return why an algorithm filters a group out before its advantages are computed; None if it keeps the group.

    Args:
        algorithm: the algorithm; without a method `filtered` it keeps every group.
        rewards: [n].
        lengths: [n], tokens of each sample.
        columns: columns of the group that exist before its advantages.

    Raises:
        AlgorithmError: `filtered` raised an exception, or returned neither Filtered nor None.
    """
    if not isinstance(algorithm, WithFilter):
        return None
    found = _called(algorithm, "filtered()", lambda: algorithm.filtered(rewards, lengths, columns))
    if found is not None and not isinstance(found, Filtered):
        raise _error(algorithm, f"filtered() returned {shown(found)}: it must be Filtered or None")
    return found


def advantages_of(
    algorithm: Algorithm, rewards: NDArray[np.float64], lengths: NDArray[np.int32], columns: Mapping[str, Any]
) -> Advantages | Filtered:
    """Return a group's advantages from `Algorithm.advantages`, checked. Raises AlgorithmError."""
    found = _called(algorithm, "advantages()", lambda: algorithm.advantages(rewards, lengths, columns))
    return _checked(algorithm, lambda: check_advantages(found, int(lengths.sum())))


def returns_of(algorithm: Algorithm, group: ValuedGroup) -> AdvantagesAndReturns:
    """Return a group's advantages and returns from `WithCritic.advantages_and_returns`, checked.

    The result may be non-finite if token rewards or values are, as after a failed forward pass.

    Raises:
        AlgorithmError: the method raises, or returns an invalid result.
    """
    with_critic = cast(WithCritic, algorithm)
    found = _called(algorithm, "advantages_and_returns()", lambda: with_critic.advantages_and_returns(group))
    trained = group.mask != 0
    finite = bool(np.isfinite(group.token_rewards[trained]).all() and np.isfinite(group.values[trained]).all())
    return _checked(algorithm, lambda: check_returns(found, group.mask.size, finite=finite))


def token_weights_of(algorithm: Algorithm, mask: NDArray[np.uint8], lengths: NDArray[np.int32]) -> NDArray[np.float32]:
    """Return each token's weight in the loss, from `Algorithm.token_weights`, checked. Raises AlgorithmError."""
    found = _called(algorithm, "token_weights()", lambda: algorithm.token_weights(mask, lengths))
    return _checked(algorithm, lambda: check_token_weights(found, mask))


def loss_of(algorithm: Algorithm, inputs: LossInputs) -> LossOutput:
    """Return the loss of a micro-batch; see `Algorithm.loss`.

    Doesn't check that the loss is finite, which would require waiting for the device: see `unexplained`.

    Raises:
        AlgorithmError: `loss` raised an exception or returned an invalid result.
    """
    found = _called(algorithm, "loss()", lambda: algorithm.loss(inputs))
    return _checked(algorithm, lambda: check_loss(found))


def unexplained(algorithm: Algorithm) -> str:
    """Return the error text for a loss that isn't finite although all inputs of `Algorithm.loss` are finite."""
    return f"{_name(algorithm)}: loss() returned NaN or infinity for inputs that are finite"


# --- checks -----------------------------------------------------------------------------------------------------------


def check_advantages(result: Any, tokens: int) -> Advantages | Filtered:
    """Check and return the result of `Algorithm.advantages`.

    Raises:
        AlgorithmError: the result is neither Advantages nor Filtered, or the values aren't finite float32 [tokens].
    """
    if isinstance(result, Filtered):
        return result
    if not isinstance(result, Advantages):
        raise AlgorithmError(f"advantages() returned {shown(result)}: it must be Advantages or Filtered")
    _check_array("advantages() returned values", result.values, tokens)
    return result


def check_returns(result: Any, tokens: int, *, finite: bool = True) -> AdvantagesAndReturns:
    """Check and return the result of `WithCritic.advantages_and_returns`.

    Raises:
        AlgorithmError: the type is wrong, an array isn't float32 [tokens], or isn't finite although `finite` is set.
    """
    if not isinstance(result, AdvantagesAndReturns):
        raise AlgorithmError(f"advantages_and_returns() returned {shown(result)}: it must be AdvantagesAndReturns")
    for name, values in result._asdict().items():
        _check_array(f"advantages_and_returns() returned {name}", values, tokens, finite=finite)
    return result


def check_token_weights(result: Any, mask: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Check and return the result of `Algorithm.token_weights`.

    Raises:
        AlgorithmError: it isn't finite float32 [T], or not 0 where the mask is 0.
    """
    _check_array("token_weights() returned", result, mask.size)
    if (result[mask == 0] != 0).any():
        raise AlgorithmError("token_weights() isn't 0 where the mask is 0")
    weights: NDArray[np.float32] = result
    return weights


def check_loss(result: Any) -> LossOutput:
    """Check and return the result of `Algorithm.loss`. The loss may be NaN.

    Raises:
        AlgorithmError: it is no LossOutput with a scalar loss that has a gradient, and detached scalar sums.
    """
    if not isinstance(result, LossOutput):
        raise AlgorithmError(f"loss() returned {shown(result)}: it must be LossOutput")
    if not _is_scalar(result.loss) or not result.loss.is_floating_point():
        raise AlgorithmError(
            f"loss() returned a loss {shown(result.loss)}: it must be a scalar tensor, the sum over tokens"
        )
    if not result.loss.requires_grad:
        raise AlgorithmError("loss() returned a loss without a gradient: it must depend on inputs.logprobs")
    for name, value in result.sums.items():
        if not _is_scalar(value) or value.requires_grad:
            raise AlgorithmError(f"loss() returned sums[{name!r}] {shown(value)}: it must be a detached scalar tensor")
    return result


def shown(value: Any) -> str:
    """Return a short form of a value for error texts: a tensor's or array's dtype and shape, else type and value."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"{type(value).__name__} {value!r}"[:80]


def _is_scalar(value: Any) -> bool:
    # Not isinstance: this package has no torch.
    tensor: Tensor = value
    return hasattr(value, "requires_grad") and hasattr(value, "shape") and tensor.shape == ()


def _check_array(what: str, values: Any, tokens: int, *, finite: bool = True) -> None:
    if not isinstance(values, np.ndarray) or values.shape != (tokens,) or values.dtype != np.float32:
        raise AlgorithmError(f"{what} {shown(values)}: they must be float32 [{tokens}], one for each token")
    if finite and not np.isfinite(values).all():
        index = int(np.flatnonzero(~np.isfinite(values))[0])
        raise AlgorithmError(f"{what} of which [{index}] is {values[index]}: they must be finite")


def _called(algorithm: Algorithm, method: str, function: Callable[[], T]) -> T:
    try:
        return function()
    except Exception as error:  # a user's class may raise anything
        raise _error(algorithm, f"{method} failed: {type(error).__name__}: {error}") from error


def _checked(algorithm: Algorithm, check: Callable[[], T]) -> T:
    try:
        return check()
    except AlgorithmError as error:
        raise _error(algorithm, str(error)) from error


def _error(algorithm: Algorithm, problem: str) -> AlgorithmError:
    return AlgorithmError(f"{_name(algorithm)}: {problem}")


def _name(algorithm: Algorithm) -> str:
    return f"{type(algorithm).__module__}:{type(algorithm).__qualname__}"
