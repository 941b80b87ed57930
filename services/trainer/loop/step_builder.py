"""The open step: its groups, mini-batches, spans and times so far."""

import time
from collections.abc import Sequence

from opentelemetry.trace import Span

from relaxd import telemetry
from relaxd.algorithms.advantage_terms import Whitening
from relaxd.board import TRAIN, Delivery, GroupTimes, StageTime, microseconds
from services.trainer.batch.groups import TrainGroup
from services.trainer.batch.mini_batches import add_group
from services.trainer.batch.round_packer import Packer
from services.trainer.batch.step_membership import DeliveredGroup
from services.trainer.batch.step_plan import MicroBatchRound, MiniBatch, StepPlan


class StepBuilder:
    """Collects groups and mini-batches of the open step."""

    def __init__(self, number: int, packer: Packer, carrier: dict[str, str]) -> None:
        """`carrier` is the step's trace context; each group's train span links to it."""
        self.number = number
        self.packer = packer
        self.members: dict[str, DeliveredGroup] = {}
        self.rounds: list[MicroBatchRound] = []
        """Rounds that were trained while it filled."""
        self.sealed = False
        """True once the last of them is trained: the step takes no more groups."""
        self.mini_batches: tuple[MiniBatch, ...] = ()
        """Its mini-batches; known when the step closes."""
        self.whitening: Whitening | None = None
        """Normalisation of its advantages, if any; known when the step closes."""
        self.waited = 0.0
        """Seconds spent waiting for groups."""
        self.worked = 0.0
        """Seconds spent in forward and backward, and in the optimizer."""
        self.held_back = 0.0
        """Seconds that the optimizer waited for a weight broadcast."""
        self.wrote = 0.0
        """Seconds spent writing the step file."""
        self.started = time.monotonic()
        self.started_at: dict[str, int] = {}
        """Start of each group's part in the step, in microseconds of Unix time."""
        self.times: dict[str, GroupTimes] = {}
        """Times in the earlier stages, by group; known when the step closes."""
        self._carrier = carrier
        self._spans: list[Span] = []

    @property
    def groups(self) -> dict[str, TrainGroup]:
        """Columns by group id."""
        return {group_id: taken.group for group_id, taken in self.members.items()}

    def deliveries_of(self, entry: MicroBatchRound) -> tuple[Delivery, ...]:
        """Return the deliveries of a round's groups."""
        return tuple(self.members[group_id].delivery for group_id in sorted(entry.group_ids))

    def add(self, chosen: Sequence[DeliveredGroup]) -> None:
        """Add groups to the step."""
        now = microseconds()
        for taken in chosen:
            self.members[taken.group.group_id] = taken
            self.started_at[taken.group.group_id] = now
            add_group(self.packer, taken.group)
            self._spans.append(
                telemetry.open_stage_span(
                    TRAIN,
                    taken.group.group_id,
                    taken.delivery.trace,
                    waited_seconds=StageTime(taken.delivery.enqueued_at, now, now).queue_seconds,
                    started_at=now,
                    attributes={"relaxd.step": self.number},
                    links=[self._carrier],
                )
            )

    def plan(self, term: int, seed: int, epochs: int, refreshed: tuple[str, ...] = (), reference: str = "") -> StepPlan:
        """Return the plan. Call it once the mini-batches are known."""
        return StepPlan(
            step=self.number,
            term=term,
            seed=seed,
            groups=tuple(self.members),
            mini_batches=self.mini_batches,
            epochs=epochs,
            whitening=self.whitening,
            refreshed=refreshed,
            reference=reference,
        )

    def end_spans(self, ended: int | None = None) -> None:
        """End the groups' spans, at `ended` (microseconds of Unix time) or now."""
        for span in self._spans:
            span.end(None if ended is None else ended * 1000)
        self._spans.clear()
