"""The algorithm's loss as output of the last pipeline stage."""

from collections.abc import Callable

import torch
from torch import Tensor

from relaxd.algorithms import Algorithm, LossInputs
from services.trainer.learner import mismatch
from services.trainer.learner.device_batch import DeviceBatch
from services.trainer.learner.forward import StageOutput, no_tokens

TokenLogprobs = Callable[[Tensor, DeviceBatch, Tensor], tuple[Tensor, Tensor]]
"""`Forward.token_logprobs`."""


class PolicyLoss:
    """Computes the loss from the hidden states of a micro-batch; an `OutputFunction`."""

    def __init__(self, algorithm: Algorithm, token_logprobs: TokenLogprobs) -> None:
        self._algorithm = algorithm
        self._token_logprobs = token_logprobs

    def __call__(self, weight: Tensor, batch: DeviceBatch, hidden: Tensor) -> StageOutput:
        """Return the summed loss of the trained tokens; report its sums, their number and the mismatch measure."""
        logprobs, entropy = self._token_logprobs(weight, batch, hidden)
        columns = batch.columns
        output = self._algorithm.loss(
            LossInputs(
                logprobs=logprobs,
                rollout_logprobs=columns["rollout_logprobs"],
                advantages=columns["advantages"],
                mask=torch.ones_like(logprobs),
                weight=columns["weight"],
                ref_logprobs=columns.get("ref_logprobs"),
                entropy=entropy if self._algorithm.needs_entropy else entropy.detach(),
            )
        )
        sums = {"loss": output.loss.detach(), **output.sums}
        reported = {name: value.double() for name, value in sums.items()}
        reported["tokens"] = torch.tensor(float(logprobs.numel()), dtype=torch.float64)
        reported["mismatch"] = mismatch.measure(logprobs, columns["rollout_logprobs"], columns["logprobs_comparable"])
        return output.loss, no_tokens(), reported
