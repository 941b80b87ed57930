"""The choice of a checkpoint: the newest intact one of a step in the ledger when a trainer starts, and the steps after
which one is due.
"""

import logging
from pathlib import Path

from relaxd.board import LedgerEntry
from relaxd.config import RunConfig
from relaxd.config.trainer import CheckpointConfig
from relaxd.run_folder import checkpoint_path, checkpoint_steps
from services.trainer.checkpoints import checkpoint_folders as folders
from services.trainer.checkpoints.checkpoint_folders import CheckpointBroken, CheckpointState
from services.trainer.loop.commanded_rank import CommandedRank, restore_checkpoint, verify_checkpoint

logger = logging.getLogger(__name__)


def restore(rank: CommandedRank, config: RunConfig, term: int) -> tuple[int, LedgerEntry | None]:
    """Load the newest intact checkpoint of a step in the ledger. Put the others aside, and remove unfinished ones.

    Args:
        rank: rank 0; the others run its commands.
        config: the run's configuration, with this world's layout.
        term: of this trainer.

    Returns:
        The checkpoint's step and the ledger's entry of that step. (0, None): there is none, or it is that of before
        the first step.

    Raises:
        CheckpointError: it is intact, but doesn't fit this model.
        BoardUnavailable: the ledger can't be read.
    """
    with rank.rank0_only("removing what earlier trainers did not finish"):
        folders.remove_partials(rank.run_folder, term)
    last = rank.board.last_step()
    for step in checkpoint_steps(rank.run_folder):
        path = checkpoint_path(rank.run_folder, step)
        if step > last:  # if it stayed, it would be taken for one of the step that will have this number
            _put_aside(rank, path, f"the ledger ends earlier, at step {last}")
            continue
        if not rank.run(verify_checkpoint, path):
            _put_aside(rank, path, "it is broken")
            continue
        try:
            state = folders.read_state(path)
        except CheckpointBroken as error:
            _put_aside(rank, path, str(error))
            continue
        entry = rank.steps(step - 1, 1)[0] if step else None
        if entry and state.ledger.plan_sha256 != folders.plan_sha256(entry.plan):
            _put_aside(rank, path, f"it is of another step {step} than the ledger's")
            continue
        same = same_layout(state, config)
        if not same:
            logger.warning("checkpoint %s has another parallel layout: sums will differ in their order", path.name)
        rank.run(restore_checkpoint, path, step, same_layout=same)
        logger.info("checkpoint %s is loaded", path.name)
        return step, entry
    return 0, None


def _put_aside(rank: CommandedRank, path: Path, why: str) -> None:
    with rank.rank0_only(f"putting {path} aside"):
        aside = folders.put_aside(path)
    logger.error("checkpoint %s isn't used, and was renamed to %s: %s", path.name, aside, why)


def same_layout(state: CheckpointState, config: RunConfig) -> bool:
    """Return whether the parallel layout is the checkpoint's."""
    names = ("ranks", "tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
    chunks = state.trainer.get("pipeline_chunks", 1)  # of an earlier release there is no such setting
    return chunks == config.trainer.pipeline_chunks and all(
        state.trainer.get(name) == getattr(config.trainer, name) for name in names
    )


class Schedule:
    """Counts the steps since the last checkpoint, which a restart repeats from their files."""

    def __init__(self, settings: CheckpointConfig) -> None:
        self._settings = settings
        self._seconds = 0.0
        self._bytes = 0

    def count(self, *, seconds: float, size: int) -> None:
        """Count a step, given the `seconds` of work on it without waits for groups, and the `size` of its file in
        bytes."""
        self._seconds += seconds
        self._bytes += size

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due after the counted steps."""
        settings = self._settings
        if not settings.every:
            return False
        return (
            step % settings.every == 0
            or 0 < settings.replay_seconds <= self._seconds
            or 0 < settings.replay_bytes <= self._bytes
        )

    def begun(self) -> None:
        """Restart the count at the beginning of a checkpoint."""
        self._seconds, self._bytes = 0.0, 0
