"""Decide when checkpoints are due: after some steps, or before a restart would have too much to repeat."""

from relaxd.config.trainer import CheckpointConfig


class Schedule:
    """Adds up the steps since the last checkpoint, which a restart repeats from their files."""

    def __init__(self, settings: CheckpointConfig) -> None:
        self._settings = settings
        self._seconds = 0.0
        self._bytes = 0

    def count(self, *, seconds: float, size: int) -> None:
        """Count a step: `seconds` of work on it, without waits for its groups, and a file of `size` bytes."""
        self._seconds += seconds
        self._bytes += size

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due after a step that was counted."""
        settings = self._settings
        if not settings.every:
            return False
        return (
            step % settings.every == 0
            or 0 < settings.replay_seconds <= self._seconds
            or 0 < settings.replay_bytes <= self._bytes
        )

    def begun(self) -> None:
        """Start anew: a checkpoint has begun."""
        self._seconds, self._bytes = 0.0, 0
