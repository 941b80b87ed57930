"""Counting skipped updates: how many there may be in a row before the trainer fails."""

from collections.abc import Sequence

NAMED_GROUPS = 8
"""Most groups of each step that an error names; the log and the ledger have all."""


class TooManySkippedUpdates(ArithmeticError):
    """More updates in a row were skipped than the configuration allows; the message names steps and groups."""


class SkippedUpdates:
    """The steps since the last update that was done. They come from the ledger first: a restart forgets none."""

    def __init__(self, most: int) -> None:
        """`most` is trainer.max_skipped_updates."""
        self._most = most
        self._row: list[tuple[int, Sequence[str]]] = []
        """Numbers and groups of the steps since the last update that was done."""

    def record(self, step: int, groups: Sequence[str], *, skipped: bool) -> None:
        """Count a committed step. Call it for every step of the ledger, in order."""
        self._row = [*self._row, (step, groups)] if skipped else []

    def check(self, step: int, groups: Sequence[str]) -> None:
        """Raise TooManySkippedUpdates if the update of one more step, which isn't committed, must not be skipped."""
        if len(self._row) < self._most:
            return
        row = [*self._row, (step, groups)]
        steps = "; ".join(f"step {number}: {_named(names)}" for number, names in row)
        raise TooManySkippedUpdates(
            f"{len(row)} update{'s' * (len(row) > 1)} in a row had a loss or a gradient that isn't finite, more than "
            f"trainer.max_skipped_updates = {self._most} ({steps}). The weights are those of step {row[0][0] - 1}; the "
            f"groups of step {step} are dropped. Look at the rewards and advantages of these groups; where they are "
            "in order, export the newest checkpoint and start again with a lower trainer.optimizer.lr"
        )


def _named(groups: Sequence[str]) -> str:
    more = len(groups) - NAMED_GROUPS
    return ", ".join(groups[:NAMED_GROUPS]) + (f" and {more} more" if more > 0 else "")
