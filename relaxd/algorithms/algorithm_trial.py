"""Trial of a user's own algorithm on made-up tokens, before training.

`python -m relaxd.algorithms.algorithm_trial` reads the [algorithm] section as JSON and prints {"problem": text}, empty
if all is well. Services call the functions.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from relaxd.algorithms.base import (
    OF_CANDIDATES,
    Advantages,
    Algorithm,
    Filtered,
    LossInputs,
    Needs,
    ValuedGroup,
    WithCritic,
    WithFilter,
)
from relaxd.algorithms.create import create
from relaxd.algorithms.results import (
    AlgorithmError,
    check_advantages,
    check_loss,
    check_returns,
    check_token_weights,
    shown,
)
from relaxd.config import AlgorithmConfig
from relaxd.config.algorithm import ALGORITHM, OwnConfig

LENGTHS = (3, 1, 4, 2)
"""Length in tokens of each sample of the made-up group; a sample has one sequence."""
MASK = (1, 0, 1, 1, 1, 1, 0, 1, 1, 1)


def try_advantages(algorithm: Algorithm) -> None:
    """Call every method except `loss` with made-up values, and check the results.

    Raises:
        AlgorithmError: a method raises, or returns a wrong type, shape or dtype, or NaN.
    """
    needs = _call("needs", lambda: algorithm.needs)
    if not isinstance(needs, Needs):
        raise AlgorithmError(f"needs is {shown(needs)}: it must be Needs")
    group = _Group.made_up(needs)
    tokens = len(MASK)
    if isinstance(algorithm, WithFilter):
        left_out = _call("filtered()", lambda: algorithm.filtered(group.rewards, group.lengths, group.columns))
        if left_out is not None and not isinstance(left_out, Filtered):
            raise AlgorithmError(f"filtered() returned {shown(left_out)}: it must be Filtered or None")
    result = _call("advantages()", lambda: algorithm.advantages(group.rewards, group.lengths, group.columns))
    judged = check_advantages(result, tokens)
    if needs.values:
        _try_critic(cast(WithCritic, algorithm), group, judged)
    weights = _call("token_weights()", lambda: algorithm.token_weights(group.mask, group.lengths))
    check_token_weights(weights, group.mask)
    divisor = _call("normalizer()", lambda: algorithm.normalizer(int(group.mask.sum()), len(LENGTHS)))
    if not isinstance(divisor, int | float) or not 0 < divisor < float("inf"):
        raise AlgorithmError(f"normalizer() returned {shown(divisor)}: it must be a positive number")


def _try_critic(algorithm: WithCritic, group: "_Group", judged: Advantages | Filtered) -> None:
    clip = _call("value_clip", lambda: algorithm.value_clip)
    if not isinstance(clip, int | float) or not clip > 0:
        raise AlgorithmError(f"value_clip is {shown(clip)}: it must be a positive number")
    rewards = np.zeros(len(MASK), np.float32) if isinstance(judged, Filtered) else judged.values
    valued = ValuedGroup(rewards, group.logprobs, group.mask, group.lengths)
    found = _call("advantages_and_returns()", lambda: algorithm.advantages_and_returns(valued))
    check_returns(found, len(MASK))


def try_loss(algorithm: Algorithm) -> None:
    """Compute the loss of made-up values and its gradient, and check them. Needs torch.

    Raises:
        AlgorithmError: `loss` raises, or doesn't return a finite scalar that depends on the log-probs.
    """
    import torch  # only now: services without a model have no torch

    group = _Group.made_up(algorithm.needs)
    # Tokens that aren't trained must not matter, even if they are NaN.
    trained = torch.from_numpy(group.mask) != 0

    def column(values: Any) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, np.float32)).masked_fill(~trained, float("nan"))

    logprobs = column(group.logprobs).requires_grad_()
    narrow = [name for name in algorithm.needs.loss if name not in OF_CANDIDATES]
    of_candidates = {
        name: torch.from_numpy(group.columns[name]) for name in OF_CANDIDATES if name in algorithm.needs.loss
    }
    inputs = LossInputs(
        logprobs=logprobs,
        columns={**{name: column(group.columns[name]) for name in narrow}, **of_candidates},
        mask=trained.float(),
        weight=torch.from_numpy(algorithm.token_weights(group.mask, group.lengths)),
        sequence=torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)),
        sequences=len(LENGTHS),
        entropy=column(np.ones(len(MASK))).requires_grad_(algorithm.needs_entropy),
        candidate_logprobs=(
            torch.full(of_candidates["candidates"].shape, -2.0, requires_grad=True) if of_candidates else None
        ),
    )
    output = _call("loss()", lambda: algorithm.loss(inputs))
    loss = check_loss(output).loss
    if not torch.isfinite(loss):
        raise AlgorithmError(
            f"loss() returned {loss.item()}: fill what isn't trained on (mask 0), which may be NaN, before computing"
        )
    _call("the gradient of loss()", loss.backward)
    if logprobs.grad is None:
        raise AlgorithmError("the loss has no gradient to inputs.logprobs")
    if not torch.isfinite(logprobs.grad).all():
        raise AlgorithmError(
            f"the gradient of the loss is {logprobs.grad.tolist()}: it must be finite, and 0 where the mask is 0"
        )


def create_tried(config: AlgorithmConfig, *, with_loss: bool) -> Algorithm:
    """Create the algorithm of an [algorithm] section. If it is a user's own class, try it on made-up values.

    Raises:
        AlgorithmError: the algorithm can't be created, or its trial failed. The message names the class.
    """
    algorithm = create(config)
    if isinstance(config, OwnConfig):
        try:
            try_advantages(algorithm)
            if with_loss:
                try_loss(algorithm)
        except AlgorithmError as error:
            raise AlgorithmError(f"algorithm.name = {config.name!r}: {error}") from error
    return algorithm


@dataclass(frozen=True)
class _Group:
    """Made-up group for trials; its samples have one sequence each."""

    rewards: np.ndarray
    lengths: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    columns: Mapping[str, Any]

    @classmethod
    def made_up(cls, needs: Needs) -> "_Group":
        random = np.random.default_rng(0)
        lengths, mask = np.array(LENGTHS, np.int32), np.array(MASK, np.uint8)
        samples, tokens = lengths.size, mask.size
        rollout = random.uniform(-2.0, -0.1, tokens).astype(np.float32)
        columns: dict[str, Any] = {
            "reward": np.array([0.0, 1.0, 0.25, 0.5]),
            "lengths": lengths,
            "sample_of_sequence": np.arange(samples, dtype=np.int32),
            "shares_prompt": np.ones(samples, np.uint8),
            "loss_mask": mask,
            "rollout_logprobs": rollout,
            "versions": np.zeros(tokens, np.int64),
            "prompt_tokens": np.array([1], np.int32),
            "prompt": {"text": "made up"},
            "tokens": np.arange(tokens, dtype=np.int32),
            "finish": ["stop"] * samples,
            "text": ["made up"] * samples,
            "spans_weight_update": np.zeros(samples, np.uint8),
            "reward_parts": {},
        }
        if needs.candidates is not None:
            width = needs.candidates.width
            columns["candidates"] = np.tile(np.arange(width), (tokens, 1))
            columns["teacher_candidate_logprobs"] = np.full((tokens, width), -1.0 - np.log(width), np.float32)
        for name in (*needs.loss, *needs.advantages):
            columns.setdefault(name, (rollout + random.normal(0, 0.1, tokens)).astype(np.float32))
        logprobs = rollout + random.normal(0, 0.1, tokens).astype(np.float32)
        return cls(columns["reward"], lengths, mask, logprobs, columns)


def _call(what: str, function: Any) -> Any:
    try:
        return function()
    except Exception as error:  # a user's class may raise anything
        raise AlgorithmError(f"{what} failed on a made-up group: {type(error).__name__}: {error}") from error


def main() -> None:
    """Try the algorithm whose [algorithm] section is on standard input, and print the problem as JSON."""
    try:
        create_tried(ALGORITHM.validate_json(sys.stdin.read()), with_loss=True)
    except AlgorithmError as error:
        print(json.dumps({"problem": str(error)}))
    else:
        print(json.dumps({"problem": ""}))


if __name__ == "__main__":
    main()
