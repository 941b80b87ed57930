"""Receipts of groups: whether the weights that wrote each sample are some that a trainer of the run has sent."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from relaxd.board import WEIGHT_RECEIPTS
from relaxd.weights.receipts import Receipt
from services.trainer.batch.groups import TrainGroup


class ReceiptCheck:
    """Compares the receipts of groups with the digests of sent weights.

    The board keeps those of versions that a step may still train on.
    """

    def __init__(self, sent_weights: Callable[[], Mapping[int, Sequence[str]]], *, may_be_unknown: bool) -> None:
        """`sent_weights`: Board.sent_weights; `may_be_unknown`: whether the run's engines compute no checksums."""
        self._sent_weights = sent_weights
        self._may_be_unknown = may_be_unknown
        self._sent: Mapping[int, Sequence[str]] = {}
        """The last answer of `sent_weights`, without newer versions."""

    def problem(self, group: TrainGroup, oldest: int) -> str:
        """Return which engine wrote samples with weights that were never sent; "" if none did.

        Versions before `oldest` are too old to be trained on, and the board has forgotten their digests: their receipts
        are not compared. Raises BoardError.
        """
        try:
            receipts = [[Receipt(*one) for one in sample] for sample in group.columns[WEIGHT_RECEIPTS]]
            compared = sorted({one for sample in receipts for one in sample if one.version >= oldest})
        except TypeError:
            return f"{WEIGHT_RECEIPTS} must have [version, digest, engine] for each of a sample's weights"
        for receipt in compared:
            if problem := self._refusal(receipt):
                return problem
        for sample, version in sorted(written_by(group)):
            if all(one.version != version for one in receipts[sample]):
                return f"sample {sample} has tokens of version {version}, but no receipt for it"
        return ""

    def _refusal(self, receipt: Receipt) -> str:
        version, digest, engine = receipt
        if not digest:
            unknown = f"{engine} wrote tokens of version {version}, but doesn't know the digest of its weights"
            return "" if self._may_be_unknown else unknown
        if digest not in self._sent.get(version, ()):
            self._sent = self._sent_weights()
        if digest in self._sent.get(version, ()):
            return ""
        others = [other for other, digests in self._sent.items() if digest in digests]
        since = f" since version {min(self._sent)}" if min(self._sent, default=0) > 0 else ""
        was = f"was sent as version {max(others)}" if others else f"no trainer of this run has sent{since}"
        return f"{engine} wrote tokens of version {version} with weights of digest {digest}, which {was}"


def written_by(group: TrainGroup) -> set[tuple[int, int]]:
    """Return the (sample, version) of all tokens that are trained on."""
    trained = group.columns["loss_mask"] != 0
    samples = np.repeat(group.columns["sample_of_sequence"], group.lengths)[trained]
    versions = group.columns["versions"][trained]
    # Neighbours are mostly equal: only the first of each stretch is looked at.
    first = np.ones(len(versions), bool)
    first[1:] = (versions[1:] != versions[:-1]) | (samples[1:] != samples[:-1])
    return set(zip(samples[first].tolist(), versions[first].tolist(), strict=True))
