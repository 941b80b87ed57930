"""The limit on consecutive skipped updates."""

from collections.abc import Sequence

NAMED_GROUPS = 8
"""Largest number of groups per step named in an error; the log and the ledger have all."""


class TooManySkippedUpdates(ArithmeticError):
    """More consecutive updates were skipped than trainer.max_skipped_updates allows."""


class SkippedUpdates:
    """Consecutive steps whose update was skipped. After a restart they are read from the ledger."""

    def __init__(self, max_skipped: int) -> None:
        """`max_skipped` is trainer.max_skipped_updates."""
        self._max_skipped = max_skipped
        self._row: list[tuple[int, Sequence[str]]] = []
        """Numbers and groups of the steps since the last applied update."""

    def record(self, step: int, groups: Sequence[str], *, skipped: bool) -> None:
        """Record a committed step. Call it for every step of the ledger, in order."""
        self._row = [*self._row, (step, groups)] if skipped else []

    def check(self, step: int, groups: Sequence[str]) -> None:
        """Raise TooManySkippedUpdates if skipping the update of one more, uncommitted step exceeds the limit."""
        if len(self._row) < self._max_skipped:
            return
        row = [*self._row, (step, groups)]
        steps = "; ".join(f"step {number}: {_named(names)}" for number, names in row)
        raise TooManySkippedUpdates(
            f"{len(row)} update{'s' * (len(row) > 1)} in a row had a loss or a gradient that isn't finite, more than "
            f"trainer.max_skipped_updates = {self._max_skipped} ({steps}). The weights are those of step "
            f"{row[0][0] - 1}; the groups of step {step} are dropped. Check their rewards and advantages; if they "
            "are right, export the newest checkpoint and start a run from it with a lower trainer.optimizer.lr"
        )


def _named(groups: Sequence[str]) -> str:
    more = len(groups) - NAMED_GROUPS
    return ", ".join(groups[:NAMED_GROUPS]) + (f" and {more} more" if more > 0 else "")
