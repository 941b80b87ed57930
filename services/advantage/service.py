"""The advantage stage of a run."""

from collections.abc import Iterable, Mapping

import numpy as np

from relaxd.algorithms import AlgorithmError, Filtered, sample_lengths
from relaxd.algorithms.algorithm_trial import create_tried
from relaxd.algorithms.results import advantages_of
from relaxd.board import COLUMNS, PLAYER, Column, Delivery, Drop, DropReason
from relaxd.board.worker import Process, Result
from relaxd.config import RunConfig
from relaxd.data.curriculum.own_filter import FilterError, GroupFilter
from relaxd.replica.stage_replica import StageReplica
from relaxd.roles import ADVANTAGE
from services.advantage.credit import advantages_by_part

CONCURRENCY = 8
"""Maximum number of concurrent groups. Each takes microseconds, and several are committed in one round trip."""


def column_problem(columns: Mapping[str, Column], names: Iterable[str], tokens: int) -> str:
    """Return the first fault of the token columns among `names`, which other services wrote; "" if there is none.

    Args:
        columns: the group's columns.
        names: names of the columns to check.
        tokens: number of tokens of the group's sequences.
    """
    of_tokens = [name for name in names if COLUMNS[name].shape == "T"]
    for name in of_tokens:
        if (size := np.asarray(columns[name]).size) != tokens:
            return f"{name}, which stage {COLUMNS[name].writer} writes, has {size} values for {tokens} tokens"
    trained = np.asarray(columns["loss_mask"]) != 0 if "loss_mask" in of_tokens else np.zeros(tokens, np.bool_)
    for name in of_tokens:
        if not np.isfinite(np.asarray(columns[name])[trained]).all():
            return f"{name}, which stage {COLUMNS[name].writer} writes, is NaN or infinite at a trained token"
    return ""


class AdvantageService(StageReplica):
    """Works on the stage "advantage" of a run."""

    role = ADVANTAGE
    stage = "advantage"

    async def prepare(self, config: RunConfig) -> tuple[Process, int]:
        algorithm = create_tried(config.algorithm, with_loss=False)
        own = config.data.curriculum.filter
        group_filter = GroupFilter(own) if own else None

        def process(delivery: Delivery, columns: dict[str, Column]) -> Result:
            rewards = np.asarray(columns["reward"])
            lengths = sample_lengths(
                np.asarray(columns["lengths"]), np.asarray(columns["sample_of_sequence"]), rewards.size
            )
            if problem := column_problem(columns, algorithm.needs.advantages, int(lengths.sum())):
                return Drop(DropReason.MALFORMED, detail=problem)
            if group_filter is not None:
                try:
                    if not group_filter.keeps(columns):
                        return Drop(DropReason.FILTERED, filtered=True)
                except FilterError as error:
                    return Drop(DropReason.FILTER_FAILED, detail=str(error))
            try:
                if PLAYER in columns:
                    result = advantages_by_part(algorithm, columns)
                else:
                    result = advantages_of(algorithm, rewards, lengths, columns)
            except AlgorithmError as error:
                return Drop(DropReason.ALGORITHM_FAILED, detail=str(error))
            if isinstance(result, Filtered):
                return Drop(result.reason, filtered=True)
            return {"advantages": result.values}

        return process, CONCURRENCY
