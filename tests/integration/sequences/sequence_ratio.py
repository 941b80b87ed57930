"""A loss of whole sequences, and a program that trains with it on every rank of a world."""

from typing import Any

import relaxd.algorithms
from relaxd.algorithms import GRPO, LossInputs, LossOutput
from tests.integration.trainer import trainer_worlds


class SequenceRatio(GRPO):
    """The ratio of a whole sequence's probabilities, to the power of 1 / its trained tokens, for each of its tokens."""

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Sum over trained tokens of weight x ratio of the token's sequence x advantage."""
        difference = (inputs.logprobs - inputs.columns["rollout_logprobs"]) * inputs.mask
        mean = inputs.segment_sum(difference) / inputs.segment_sum(inputs.mask).clamp(min=1.0)
        ratio = mean.exp()[inputs.sequence]
        return LossOutput(-(inputs.weight * ratio * inputs.columns["advantages"] * inputs.mask).sum())


def run_job(job: trainer_worlds.Job, ranks: int) -> dict[str, Any]:
    """Run one job on this rank, with that loss."""
    relaxd.algorithms.ALGORITHMS["grpo"] = SequenceRatio
    return trainer_worlds.run_job(job, ranks)


if __name__ == "__main__":
    trainer_worlds.work(run_job)
