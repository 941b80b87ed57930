"""The advantage stage of a run."""

import numpy as np

from relaxd.algorithms import Filtered, sample_lengths
from relaxd.algorithms.trial import check_advantages, create_tried
from relaxd.board import Column, Delivery, Drop
from relaxd.board.worker import Process, Result
from relaxd.config import RunConfig
from relaxd.replica.stage_replica import StageReplica
from relaxd.roles import ADVANTAGE

CONCURRENCY = 8
"""Groups worked on at once. The work takes microseconds; several groups are committed in one round trip."""


class AdvantageService(StageReplica):
    """Works on the stage "advantage" of a run."""

    role = ADVANTAGE
    stage = "advantage"

    async def prepare(self, config: RunConfig) -> tuple[Process, int]:
        """See StageReplica."""
        algorithm = create_tried(config.algorithm, with_loss=False)

        def process(delivery: Delivery, columns: dict[str, Column]) -> Result:
            rewards = np.asarray(columns["reward"])
            lengths = sample_lengths(
                np.asarray(columns["lengths"]), np.asarray(columns["sample_of_sequence"]), rewards.size
            )
            result = check_advantages(algorithm.advantages(rewards, lengths, columns), int(lengths.sum()))
            if isinstance(result, Filtered):
                return Drop(result.reason, filtered=True)
            return {"advantages": result.values}

        return process, CONCURRENCY
