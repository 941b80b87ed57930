"""The open step: its groups, rounds, spans and times so far."""

import time
from collections.abc import Sequence

from opentelemetry.trace import Span

from relaxd import telemetry
from relaxd.algorithms import Algorithm
from relaxd.board import TRAIN, GroupTimes, StageTime, microseconds
from services.trainer.batch.groups import TrainGroup
from services.trainer.batch.round_packer import Packer
from services.trainer.batch.step_plan import MicroBatchRound, StepPlan
from services.trainer.loop.intake import HeldGroup


class StepBuilder:
    """Collects groups and rounds of the open step."""

    def __init__(self, number: int, packer: Packer, carrier: dict[str, str]) -> None:
        """`carrier` is the step's trace context; each group's train span links to it."""
        self.number = number
        self.packer = packer
        self.members: dict[str, HeldGroup] = {}
        self.rounds: list[MicroBatchRound] = []
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

    def add(self, chosen: Sequence[HeldGroup]) -> None:
        """Add groups to the step."""
        now = microseconds()
        for taken in chosen:
            self.members[taken.group.group_id] = taken
            self.started_at[taken.group.group_id] = now
            group = taken.group
            self.packer.add(
                group.group_id,
                len(group.columns["prompt_tokens"]),
                group.lengths.tolist(),
                group.columns["shares_prompt"].tolist(),
            )
            self._spans.append(
                telemetry.open_stage_span(
                    TRAIN,
                    taken.delivery.trace,
                    waited_seconds=StageTime(taken.delivery.enqueued_at, now, now).queue_seconds,
                    started_at=now,
                    attributes={"relaxd.group_id": taken.group.group_id, "relaxd.step": self.number},
                    links=[self._carrier],
                )
            )

    def plan(self, term: int, seed: int, algorithm: Algorithm) -> StepPlan:
        """Return the plan. Call it once all rounds are complete."""
        groups = list(self.groups.values())
        samples = sum(group.samples for group in groups)
        trained_tokens = sum(group.trained_tokens for group in groups)
        return StepPlan(
            step=self.number,
            term=term,
            seed=seed,
            groups=tuple(self.members),
            rounds=tuple(self.rounds),
            samples=samples,
            trained_tokens=trained_tokens,
            normalizer=algorithm.normalizer(trained_tokens, samples),
        )

    def end_spans(self, ended: int | None = None) -> None:
        """End the groups' spans, at `ended` (microseconds of Unix time) or now."""
        for span in self._spans:
            span.end(None if ended is None else ended * 1000)
        self._spans.clear()
