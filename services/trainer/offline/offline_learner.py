"""The learner without service and loop, for groups in the board's form; examples/one_page.py uses it."""

from collections.abc import Mapping
from typing import Any

from services.trainer.batch.groups import check_group
from services.trainer.batch.micro_batch import pack
from services.trainer.batch.sequence_media import GroupMediaReader
from services.trainer.learner.learner import Learner
from services.trainer.learner.update import UpdateStats


class OfflineLearner(Learner):
    """A learner of one rank, with one update in each step."""

    def train(self, groups: Mapping[str, Mapping[str, Any]], temperature: float = 1.0) -> UpdateStats:
        """Train a step on groups: check and pack each, add up gradients, update the weights.

        Args:
            groups: the columns that the stage "train" reads, by the group's id.
            temperature: sampling temperature of the answers.

        Raises MalformedGroup: a column is missing or malformed.
        """
        tokens = self.media_tokens
        media = None if tokens is None else GroupMediaReader(tokens)
        checked = [check_group(group_id, columns, columns, media=tokens) for group_id, columns in groups.items()]
        for group in checked:
            every, packed = range(len(group.lengths)), self._algorithm.needs.loss
            sequences = group.sequences(every, packed, self._algorithm, temperature, self.step, media=media)
            self.accumulate([pack(sequences)])
        trained, samples = sum(group.trained_tokens for group in checked), sum(group.samples for group in checked)
        return self.finish(self._algorithm.normalizer(trained, samples))
