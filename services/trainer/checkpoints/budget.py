"""The limit of what a run's checkpoints take of the disk (trainer.checkpoint.max_bytes)."""

from pathlib import Path

from relaxd.run_folder import KEPT, checkpoint_path, checkpoint_steps


def size_of(run_folder: Path, step: int) -> int:
    """Return the bytes of a checkpoint's files. Raises OSError."""
    return sum(file.stat().st_size for file in checkpoint_path(run_folder, step).iterdir())


def is_marked(run_folder: Path, step: int) -> bool:
    """Return whether a checkpoint is never removed."""
    return (checkpoint_path(run_folder, step) / KEPT).exists()


def room_for_more(run_folder: Path, max_bytes: int) -> int:
    """Return the bytes of the limit that remain beside the existing checkpoints and the next one.

    The next one is taken to be as large as the newest. Negative: they take more.
    """
    steps = checkpoint_steps(run_folder)
    coming = size_of(run_folder, steps[0]) if steps else 0
    return max_bytes - coming - sum(size_of(run_folder, step) for step in steps)


def beyond(run_folder: Path, max_bytes: int) -> list[int]:
    """Return the steps of the checkpoints to remove, the oldest first, so that the next one has room within the limit.

    Neither the newest nor a marked one is among them.
    """
    room, found = room_for_more(run_folder, max_bytes), []
    for step in reversed(checkpoint_steps(run_folder)[1:]):
        if room >= 0:
            break
        if not is_marked(run_folder, step):
            room += size_of(run_folder, step)
            found.append(step)
    return found
