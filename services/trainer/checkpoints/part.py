"""One rank's part in a run's checkpoints. Every rank has one; rank 0's `Checkpoints` says what happens."""

import logging
import threading
from pathlib import Path

from services.trainer.checkpoints.folder import CheckpointBroken, describe, verify, write_report
from services.trainer.learner.checkpoint import Snapshot
from services.trainer.learner.learner import Learner

logger = logging.getLogger(__name__)


class CheckpointPart:
    """Takes, writes, checks and loads what is this rank's. `begin`, `end`, `intact`, `restore`: all ranks together."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._snapshot: Snapshot | None = None

    def checksum(self) -> int:
        """`Learner.checksum` of this rank's weights."""
        return self._learner.checksum()

    def begin(self, partial: Path) -> None:
        """Take a snapshot and start to write it into an empty folder; a report there will say how that went."""
        snapshot = self._learner.snapshot(partial)
        self._snapshot = snapshot
        writing = threading.Thread(
            target=_write, args=(snapshot, partial, self._learner.world.rank), name="write-checkpoint", daemon=True
        )
        writing.start()

    def copied(self, seconds: float) -> bool:
        """Wait for the snapshot's copies; whether they are made, so that the weights may change."""
        return self._snapshot is None or self._snapshot.copies.wait(seconds)

    def end(self) -> None:
        """Write what describes the files, once every rank has reported that it is done."""
        snapshot, self._snapshot = self._snapshot, None
        assert snapshot is not None
        snapshot.finish()

    def abandon(self) -> None:
        """Let go of the snapshot: it could not be written."""
        self._snapshot = None

    def intact(self, path: Path) -> bool:
        """Whether this rank's share of a checkpoint's files is as it was written; says why not."""
        world = self._learner.world
        with world.disk.together(f"checking {path}") as progress:
            try:
                verify(path, world.rank, world.size, progress)
            except CheckpointBroken as error:
                logger.error("checkpoint %s can't be used: %s", path.name, error)
                return False
        return True

    def restore(self, path: Path, step: int, *, same_layout: bool) -> None:
        """Load a checkpoint.

        Raises:
            CheckpointError: it isn't one of this model.
        """
        self._learner.restore(path, step, same_layout=same_layout)


def _write(snapshot: Snapshot, partial: Path, rank: int) -> None:
    """Write this rank's files and report. Whatever goes wrong goes into the report: training doesn't end for it."""
    try:
        snapshot.write()
        written = sorted(partial.glob(f"__{rank}_*.distcp"))
        write_report(partial, rank, {"files": {path.name: describe(path) for path in written}})
    except Exception as error:
        logger.exception("rank %d could not write its part of %s", rank, partial.name)
        try:
            write_report(partial, rank, {"error": f"rank {rank}: {type(error).__name__}: {error}"})
        except OSError:
            logger.error("nor could it report that: the checkpoint is given up when its time is over")
