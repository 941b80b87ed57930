"""One rank's part in a run's checkpoints, controlled by rank 0's `Checkpoints`."""

import logging
import threading
from pathlib import Path

from services.trainer.checkpoints.folder import CheckpointBroken, describe_all, verify, write_report
from services.trainer.learner.snapshots.checkpoint import Checkpointed, Snapshot

logger = logging.getLogger(__name__)


class CheckpointPart:
    """Takes, writes and verifies this rank's part. All ranks call begin, end and intact together."""

    def __init__(self, learner: Checkpointed) -> None:
        self._learner = learner
        self._snapshot: Snapshot | None = None

    def begin(self, partial: Path) -> None:
        """Take a snapshot and start writing it to an empty folder, where a report will tell the outcome."""
        snapshot = self._learner.snapshot(partial)
        self._snapshot = snapshot
        writing = threading.Thread(
            target=_write, args=(snapshot, partial, self._learner.world.rank), name="write-checkpoint", daemon=True
        )
        writing.start()

    def copied(self, seconds: float) -> bool:
        """Wait up to `seconds` for the snapshot's copies. Return whether they are complete."""
        return self._snapshot is None or self._snapshot.copies.wait(seconds)

    def end(self, written: bool = True) -> None:
        """Write the metadata if every rank has written its part; drop the snapshot."""
        snapshot, self._snapshot = self._snapshot, None
        if written and snapshot is not None:
            snapshot.finish()

    def intact(self, path: Path) -> bool:
        """Verify this rank's share of a checkpoint's files; log the first damage."""
        world = self._learner.world
        with world.disk.all_ranks(f"checking {path}") as progress:
            try:
                verify(path, world.rank, world.size, progress)
            except CheckpointBroken as error:
                logger.error("checkpoint %s can't be used: %s", path.name, error)
                return False
        return True


def _write(snapshot: Snapshot, partial: Path, rank: int) -> None:
    """Write this rank's files and report. An error goes into the report and doesn't end training."""
    try:
        snapshot.write()
        write_report(partial, rank, {"files": describe_all(partial.glob(f"__{rank}_*.distcp"))})
    except Exception as error:
        logger.exception("rank %d could not write its part of %s", rank, partial.name)
        try:
            write_report(partial, rank, {"error": f"rank {rank}: {type(error).__name__}: {error}"})
        except OSError:
            logger.error("the failure could not be reported either; the checkpoint will time out")
