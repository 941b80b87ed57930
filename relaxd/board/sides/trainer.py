"""The trainer's side of the board. Writes carry its term, so that a replaced trainer commits nothing."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import redis

from relaxd.board.core import BoardCore, reading
from relaxd.board.errors import LedgerTrimmed, RunMissing
from relaxd.board.stages import TRAIN
from relaxd.board.times import GroupTimes, parse_times
from relaxd.board.types import CriticOrders, LedgerEntry


class TrainerSide(BoardCore):
    """The step ledger, and the state that the trainer needs to close a step."""

    def new_trainer_term(self) -> int:
        """Start the next trainer term (from 1) and free the groups that the last trainer held. Raises RunMissing."""
        return int(self._connection.script("start_term", self.prefix, TRAIN, self.limits.max_deliveries))

    def trainer_term(self) -> int:
        """Return the current trainer term; 0 before the first. Raises RunMissing."""
        return int(self._state("trainer_term"))

    def new_critic_term(self) -> int:
        """Start the next critic term (from 1): an earlier critic, which asks for it, gives up. Raises RunMissing."""
        return int(self._connection.script("start_critic", self.prefix))

    def ask_critic(self, *, term: int, step: int, keep: bool) -> None:
        """Ask the critic for a checkpoint of the last step; if `keep`, for one that is never removed.

        Call it before the next step is committed: the critic then sees it before it trains on that step. Raises Fenced
        when another trainer has taken over, RunMissing.
        """
        self._connection.script("ask_critic", self.prefix, term, step, int(keep))

    def critic_orders(self) -> CriticOrders:
        """Return the critic's term, and the checkpoints that it is asked for. Raises RunMissing."""
        names = ("critic_term", "critic_checkpoint", "critic_kept")
        term, checkpoint, kept = self._connection.run(lambda client: client.hmget(f"{self.prefix}state", names))
        if term is None:
            raise RunMissing(f"run {self.run_id} is not on the board")
        return CriticOrders(int(term), *(None if step is None else int(step) for step in (checkpoint, kept)))

    def open_versions(self) -> dict[str, int]:
        """Return the oldest weight version by id, for open groups whose generation has started.

        Until the rollout commits it is the version that generation started with, then the oldest of the tokens.
        """
        started = self._connection.run(lambda client: client.hgetall(f"{self.prefix}started"))
        return {group_id.decode(): int(version) for group_id, version in started.items()}

    def times(self, group_ids: Sequence[str]) -> dict[str, GroupTimes]:
        """Return the times of open groups in the stages that have committed; closed groups are left out."""
        stages = [stage.name for stage in self.stages if stage.name != TRAIN]

        def commands(pipe: redis.client.Pipeline) -> None:
            for group_id in group_ids:
                pipe.hmget(f"{self.prefix}group:{group_id}", ["published", *(f"time:{stage}" for stage in stages)])

        result = {}
        for group_id, (published, *found) in zip(group_ids, self._connection.pipeline(commands), strict=True):
            if published is not None:
                committed = {stage: text for stage, text in zip(stages, found, strict=True) if text is not None}
                result[group_id] = parse_times(published, committed)
        return result

    def commit_step(
        self,
        *,
        term: int,
        step: int,
        plan: Mapping[str, Any],
        metrics: Mapping[str, float],
        samples: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Add a step to the ledger, close its groups as trained and free their columns, atomically.

        `plan["groups"]` lists the groups' ids in order; `plan` and `metrics` must be JSON. Repeating a commit (same
        term, step and plan) does nothing. Raises Fenced when another trainer has taken over, StepConflict when the
        step is not the last plus one or a group is not open.
        """
        groups = list(plan["groups"])
        self._connection.script(
            "commit_step",
            self.prefix,
            term,
            step,
            json.dumps(plan, sort_keys=True),
            json.dumps(metrics),
            len(groups),
            *groups,
            *(json.dumps(sample) for sample in samples),
        )

    def last_step(self) -> int:
        """Return the last committed step; 0 before the first. Raises RunMissing."""
        return int(self._state("last_step"))

    def ledger(self, after_step: int = 0, limit: int | None = None) -> list[LedgerEntry]:
        """Return the committed steps after `after_step`, in order.

        Raises LedgerTrimmed: the next step is not on the board any more (see relaxd.committed_steps).
        """
        key = f"{self.prefix}ledger"
        entries = self._connection.run(lambda client: client.xrange(key, min=f"{after_step + 1}-0", count=limit))
        with reading(f"the ledger of run {self.run_id} after step {after_step}"):
            found = [
                LedgerEntry(
                    step=int(entry_id.split(b"-")[0]),
                    time=float(fields[b"time"]),
                    term=int(fields[b"term"]),
                    plan=json.loads(fields[b"plan"]),
                    metrics=json.loads(fields[b"metrics"]),
                )
                for entry_id, fields in entries
            ]
        if found and found[0].step != after_step + 1:
            first = found[0].step
            raise LedgerTrimmed(first, f"the ledger of run {self.run_id} begins at step {first} in Redis")
        return found

    def sample_page(
        self, step: int | None = None, after: str = "", *, limit: int = 16
    ) -> list[tuple[str, dict[str, Any]]]:
        """Return samples of a step, or of all steps, newest first, with their keys; those after the key `after`.

        Each has its "step".
        """
        lowest, highest = ("-", "+") if step is None else (f"{step}", f"{step}")
        newest = f"({after}" if after else highest
        entries = self._connection.run(
            lambda client: client.xrevrange(f"{self.prefix}samples", max=newest, min=lowest, count=limit)
        )
        with reading(f"the samples of run {self.run_id}"):
            return [
                (key.decode(), json.loads(fields[b"sample"]) | {"step": int(key.split(b"-")[0])})
                for key, fields in entries
            ]
