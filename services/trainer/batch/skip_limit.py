"""The limit on consecutive skipped updates."""

from collections.abc import Mapping, Sequence
from typing import Any

from services.trainer.batch.step_plan import OUTCOME, StepPlan

NAMED_GROUPS = 8
"""Largest number of groups per step named in an error; the log and the ledger have all."""


class TooManySkippedUpdates(ArithmeticError):
    """More consecutive updates were skipped than trainer.max_skipped_updates allows."""


class SkippedUpdates:
    """Consecutive updates that were skipped. After a restart they are read from the ledger."""

    def __init__(self, max_skipped: int) -> None:
        """`max_skipped` is trainer.max_skipped_updates."""
        self._max_skipped = max_skipped
        self._row: list[tuple[int, Sequence[str]]] = []
        """Steps and groups of the updates since the last applied one."""
        self._applied = 0
        """Step of the last applied update."""

    def record(self, step: int, groups: Sequence[str], *, skipped: bool) -> None:
        """Record an update of a step, on these groups. Call it for every update, in order."""
        self._row = [*self._row, (step, groups)] if skipped else []
        self._applied = self._applied if skipped else step

    def record_step(self, step: int, plan: Mapping[str, Any]) -> None:
        """Record the updates of a committed step from its plan in the ledger."""
        if not plan.get(OUTCOME):  # of most steps, so that the ledger is read quickly
            self.record(step, plan["groups"], skipped=False)
            return
        parsed = StepPlan.from_json(plan)
        for index, mini_batch in enumerate(parsed.updates):
            self.record(step, parsed.groups_of(mini_batch), skipped=index in plan[OUTCOME])

    def check(self, step: int, groups: Sequence[str], cause: str = "") -> None:
        """Raise TooManySkippedUpdates if skipping one more update, of an uncommitted step, exceeds the limit.

        Args:
            step: the step.
            groups: the update's groups.
            cause: `UpdateStats.cause` of the update.
        """
        if len(self._row) < self._max_skipped:
            return
        row = [*self._row, (step, groups)]
        by_step: dict[int, dict[str, None]] = {}
        for number, names in row:
            by_step.setdefault(number, {}).update(dict.fromkeys(names))
        steps = "; ".join(f"step {number}: {_named(list(names))}" for number, names in by_step.items())
        raise TooManySkippedUpdates(
            f"{len(row)} update{'s' * (len(row) > 1)} in a row had a loss or a gradient that isn't finite, more than "
            f"trainer.max_skipped_updates = {self._max_skipped} ({steps}). The weights are those of step "
            f"{min(self._applied, step - 1)}; the groups of step {step} are dropped. {cause + '. ' if cause else ''}"
            "Check their rewards and advantages; if they are right, export the newest checkpoint and start a run from "
            "it with a lower trainer.optimizer.lr"
        )


def _named(groups: Sequence[str]) -> str:
    more = len(groups) - NAMED_GROUPS
    return ", ".join(groups[:NAMED_GROUPS]) + (f" and {more} more" if more > 0 else "")
