"""The algorithm's loss as output of the last pipeline stage."""

from collections.abc import Callable

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed.nn.functional import all_reduce

from relaxd.algorithms import Algorithm, LossInputs
from relaxd.algorithms.results import loss_of
from relaxd.board import CANDIDATES, OLD_LOGPROBS
from services.trainer.learner import measures
from services.trainer.learner.device_batch import DeviceBatch
from services.trainer.learner.forward import StageOutput, no_tokens
from services.trainer.learner.logprobs import TokenLogprobs

ComputeLogprobs = Callable[[Tensor, DeviceBatch, Tensor], TokenLogprobs]
"""`Forward.token_logprobs`."""


UNEXPLAINED = "unexplained"
"""Metric of the number of micro-batches whose loss isn't finite although all of its inputs are."""


class PolicyLoss:
    """Computes the loss from the hidden states of a micro-batch; an `OutputFunction`."""

    def __init__(self, algorithm: Algorithm, token_logprobs: ComputeLogprobs, *, context_parallel: bool) -> None:
        self._algorithm = algorithm
        self._token_logprobs = token_logprobs
        self._context_parallel = context_parallel

    def __call__(self, weight: Tensor, batch: DeviceBatch, hidden: Tensor) -> StageOutput:
        """Return the summed loss of the trained tokens; report its sums, their number and the mismatch measure.

        Raises:
            AlgorithmError: the algorithm fails, or returns what is no loss.
        """
        logprobs, entropy, of_candidates = self._token_logprobs(weight, batch, hidden)
        inputs = LossInputs(
            logprobs=logprobs,
            columns=batch.columns,
            mask=torch.ones_like(logprobs),
            weight=batch.weight,
            sequence=batch.sequence,
            sequences=batch.sequences,
            entropy=entropy if self._algorithm.needs_entropy else entropy.detach(),
            candidate_logprobs=of_candidates if CANDIDATES in batch.columns else None,
            sum_over_ranks=_sum_over_context_ranks if self._context_parallel else None,
        )
        output = loss_of(self._algorithm, inputs)
        sums = {"loss": output.loss.detach(), **output.sums}
        reported = {name: value.double() for name, value in sums.items()}
        reported[UNEXPLAINED] = (_finite(inputs) & ~output.loss.detach().isfinite()).double()
        reported["tokens"] = torch.tensor(float(logprobs.numel()), dtype=torch.float64)
        trainers = batch.columns.get(OLD_LOGPROBS, logprobs)
        reported["mismatch"] = measures.measure(trainers, batch.columns["rollout_logprobs"], batch.logprobs_comparable)
        return output.loss, no_tokens(), reported


def _finite(inputs: LossInputs) -> Tensor:
    """Return a bool scalar: whether all that a loss is made of is finite."""
    given = [inputs.logprobs, inputs.entropy, inputs.candidate_logprobs, inputs.weight, *inputs.columns.values()]
    return torch.stack([values.detach().isfinite().all() for values in given if values is not None]).all()


def _sum_over_context_ranks(values: Tensor) -> Tensor:
    """Sum over the context-parallel ranks; so is the gradient, because every rank's loss depends on the sum."""
    total: Tensor = all_reduce(values, group=parallel_state.get_context_parallel_group())
    return total
