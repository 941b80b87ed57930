"""The last pipeline stage's output: log-probs of the trained tokens, and the algorithm's loss."""

import services.trainer.megatron.cpu  # noqa: F401  must come before Megatron

# isort: split
import torch
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor
from torch.distributed.nn.functional import all_reduce

from relaxd.algorithms import Algorithm, LossInputs
from services.trainer.learner import mismatch
from services.trainer.learner.device_batch import DeviceBatch
from services.trainer.learner.logprobs import VocabShard, token_logprobs

StageOutput = tuple[Tensor, Tensor, dict[str, Tensor]]
"""The result of a micro-batch in Megatron's schedule: loss, an unused token count, and values to report."""


class PolicyLoss:
    """Computes loss or log-probs from the hidden states of a micro-batch.

    Both methods take the output layer's weight, the micro-batch, and hidden states [T / cp_size, 1, hidden] (T over the
    tensor-parallel ranks under sequence parallelism).
    """

    def __init__(
        self, algorithm: Algorithm, vocab: VocabShard, *, sequence_parallel: bool, context_parallel: bool
    ) -> None:
        self._algorithm = algorithm
        self._vocab = vocab
        self._sequence_parallel = sequence_parallel
        self._context_parallel = context_parallel

    def loss(self, weight: Tensor, batch: DeviceBatch, hidden: Tensor) -> StageOutput:
        """Return the summed loss of the trained tokens; report its sums, their number and the mismatch measure."""
        logprobs, entropy = self._token_logprobs(weight, batch, hidden)
        output = self._algorithm.loss(
            LossInputs(
                logprobs=logprobs,
                columns=batch.columns,
                mask=torch.ones_like(logprobs),
                weight=batch.weight,
                sequence=batch.sequence,
                sequences=batch.sequences,
                entropy=entropy if self._algorithm.needs_entropy else entropy.detach(),
                sum_over_ranks=_sum_over_context_ranks if self._context_parallel else None,
            )
        )
        sums = {"loss": output.loss.detach(), **output.sums}
        reported = {name: value.double() for name, value in sums.items()}
        reported["tokens"] = torch.tensor(float(logprobs.numel()), dtype=torch.float64)
        reported["mismatch"] = mismatch.measure(logprobs, batch.columns["rollout_logprobs"], batch.logprobs_comparable)
        return output.loss, _no_tokens(), reported

    def evaluate(self, weight: Tensor, batch: DeviceBatch, hidden: Tensor) -> StageOutput:
        """Report the log-probs of the trained tokens, with their indices; the loss is 0."""
        logprobs, _ = self._token_logprobs(weight, batch, hidden)
        return hidden.new_zeros(()), _no_tokens(), {"logprobs": logprobs, "indices": batch.trained_indices}

    def _token_logprobs(self, weight: Tensor, batch: DeviceBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies of the trained tokens. No other position's logits are computed."""
        if self._sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        rows = hidden.squeeze(1).index_select(0, batch.predicting)
        if self._vocab.group is not None and not self._sequence_parallel:
            rows = tensor_parallel.copy_to_tensor_model_parallel_region(rows)
        return token_logprobs(rows, weight, batch.targets, batch.temperature, self._vocab)


def _no_tokens() -> Tensor:
    return torch.zeros((), dtype=torch.int)


def _sum_over_context_ranks(values: Tensor) -> Tensor:
    """Sum over the context-parallel ranks; so is the gradient, because every rank's loss depends on the sum."""
    total: Tensor = all_reduce(values, group=parallel_state.get_context_parallel_group())
    return total
