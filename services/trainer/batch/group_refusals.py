"""Which groups that come to the trainer may be part of a step, as the algorithm and the run's own filter say."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from relaxd.algorithms import Algorithm, AlgorithmError
from relaxd.algorithms.results import filtered_by, token_weights_of
from relaxd.board import ADVANTAGES, LOSS_MASK, DropReason, stages_for
from relaxd.board.worker import Drop
from relaxd.config import RunConfig
from relaxd.config.algorithm import OwnConfig
from relaxd.data.curriculum.own_filter import FilterError, GroupFilter
from services.trainer.batch.groups import TrainGroup


class GroupRefusals:
    """Looks at each group once, before it has a place in a step: a step that has it can only be discarded as a whole.

    Where the trainer computes the advantages, there is no advantage stage that could have filtered it.
    """

    def __init__(
        self, config: RunConfig, algorithm: Algorithm, vocab_sizes: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """Prepare for a run.

        Args:
            config: the run's configuration.
            algorithm: its algorithm.
            vocab_sizes: `Learner.vocab_sizes`.

        Raises:
            FilterError: data.curriculum.filter can't be imported, or isn't a function.
        """
        self._algorithm = algorithm
        self._vocab_sizes = vocab_sizes
        self._own = isinstance(config.algorithm, OwnConfig)
        self._filters = ADVANTAGES not in stages_for(config)[-1].needs
        own = config.data.curriculum.filter
        self._filter = GroupFilter(own) if own and self._filters else None

    def refusal(self, group: TrainGroup) -> Drop | None:
        """Return why a group is dropped; None: it may be trained on."""
        columns, lengths = group.columns, group.sample_lengths
        largest = int(columns["tokens"].max(initial=0))
        for role, size in self._vocab_sizes.items():
            if largest >= size:
                detail = f"it has token {largest}, but the {role} has only {size} tokens"
                return Drop(DropReason.NO_LOGPROBS, detail=detail)
        try:
            if self._own:
                token_weights_of(self._algorithm, columns[LOSS_MASK], lengths)
            if not self._filters:
                return None
            if self._filter is not None and not self._filter.keeps(columns):
                return Drop(DropReason.FILTERED, filtered=True)
            found = filtered_by(self._algorithm, np.asarray(columns["reward"], np.float64), lengths, columns)
        except FilterError as error:
            return Drop(DropReason.FILTER_FAILED, detail=str(error))
        except AlgorithmError as error:
            return Drop(DropReason.ALGORITHM_FAILED, detail=str(error))
        return None if found is None else Drop(found.reason, filtered=True)
