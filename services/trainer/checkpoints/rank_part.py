"""One rank's part in a run's checkpoints, controlled by rank 0's `Checkpoints`."""

import json
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from services.trainer.checkpoints.checkpoint_folders import CheckpointBroken, verify
from services.trainer.learner.snapshots.part_files import rank_of
from services.trainer.learner.snapshots.snapshot import Checkpointed, Snapshot

logger = logging.getLogger(__name__)


class CheckpointPart:
    """Takes, writes and verifies this rank's part. All ranks call begin, end and intact together."""

    def __init__(self, learner: Checkpointed) -> None:
        self._learner = learner
        self._disk = learner.world.disk
        self._snapshot: Snapshot | None = None
        self._partial = Path()
        self._begun = 0

    def begin(self, partial: Path) -> int:
        """Take a snapshot, which `write` writes to an empty folder. Returns the bytes that this rank will write."""
        self._snapshot, self._partial = self._learner.snapshot(partial), partial
        self._begun += 1
        return self._snapshot.nbytes

    def write(self, problem: str = "") -> None:
        """Start writing the snapshot. A problem is only reported, on rank 0, once the copies are complete."""
        assert self._snapshot is not None, "begin comes first"
        name, rank = self._name, self._learner.world.rank

        def tell(report: dict[str, Any]) -> None:
            self._disk.tell(name, json.dumps(report))

        arguments = (self._snapshot, self._partial, rank, problem, tell)
        threading.Thread(target=_write, args=arguments, name="write-checkpoint", daemon=True).start()

    def reports(self) -> list[dict[str, Any]] | None:
        """Return each rank's files by name ("files"), or its error ("error"), once all have finished; None before."""
        results = self._disk.results(self._name)
        return None if results is None else [json.loads(report) for report in results]

    def writing(self) -> list[int]:
        """Return the ranks that haven't ended."""
        return self._disk.silent(self._name)

    def copied(self, seconds: float) -> bool:
        """Wait up to `seconds` for the snapshot's copies. Return whether they are complete."""
        return self._snapshot is None or self._snapshot.copies.wait(seconds)

    def end(self) -> None:
        """Drop the snapshot."""
        self._snapshot = None
        self._disk.forget(self._name)

    def intact(self, path: Path) -> bool:
        """Verify this rank's share of a checkpoint's files; log the first damage."""
        world = self._learner.world
        with self._disk.all_ranks(f"checking {path}") as progress:
            try:
                verify(path, world.rank, world.size, progress)
            except CheckpointBroken as error:
                logger.error("checkpoint %s can't be used: %s", path.name, error)
                return False
        return True

    @property
    def _name(self) -> str:
        """The name of the last checkpoint's work, the same on all ranks."""
        return f"checkpoint {self._begun}"


def _write(snapshot: Snapshot, partial: Path, rank: int, problem: str, tell: Callable[[dict[str, Any]], None]) -> None:
    """Write this rank's files and report them. An error is reported as well, and doesn't end training."""
    report: dict[str, Any]
    try:
        if problem:
            snapshot.give_up()
            report = {"files": {}} if rank else {"error": problem}
        else:
            report = {"files": snapshot.write()}
    except Exception as error:
        logger.exception("rank %d could not write its part of %s", rank, partial.name)
        report = {"error": f"rank {rank}: {type(error).__name__}: {error}"}
        with suppress(OSError):  # others need the room until rank 0 removes the folder
            for path in partial.iterdir():
                if rank_of(path.name) == rank:
                    path.unlink(missing_ok=True)
    tell(report)
