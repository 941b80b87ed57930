"""The trainer's side of the board. Writes carry its term, so that a replaced trainer commits nothing."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from relaxd.board import payload_transfer
from relaxd.board.attempts import Place, decode_sample, sample_places, samples_attempt
from relaxd.board.scripts import run_script
from relaxd.board.sides.side_base import BoardCore, GroupAttempt, reading
from relaxd.board.stages import SAMPLES, TRAIN
from relaxd.board.types import CriticOrders, GroupTimes, LedgerEntry, LedgerTrimmed, RunMissing, parse_times
from relaxd.redis_client.operations import RedisOperation, Send, ask, operation


class TrainerSide(BoardCore):
    """Operations of the trainer: commit steps to the ledger, and read what it needs to complete a step."""

    @operation
    def new_trainer_term(self) -> RedisOperation[int]:
        """Start the next trainer term (from 1) and free the groups that the last trainer held. Raises RunMissing."""
        return int((yield from run_script("start_term", self.prefix, TRAIN, self.limits.max_deliveries)))

    @operation
    def trainer_term(self) -> RedisOperation[int]:
        """Return the current trainer term; 0 before the first. Raises RunMissing."""
        return int((yield from self._state("trainer_term")))

    @operation
    def new_attempt(self, process: str, last: int) -> RedisOperation[int]:
        """Return a number for the next start of a trainer's ranks on several hosts. Numbers grow from start to start.

        `process`: unique name of the trainer's process. `last`: the number that this process got last, 0 before its
        first. Raises Fenced when another trainer's process has got a number since then, RunMissing.
        """
        return int((yield from run_script("start_attempt", self.prefix, process, last)))

    @operation
    def new_critic_term(self) -> RedisOperation[int]:
        """Start the next critic term (from 1). An earlier critic gives up when it reads the term. Raises RunMissing."""
        return int((yield from run_script("start_critic", self.prefix)))

    @operation
    def ask_critic(self, *, term: int, step: int, keep: bool) -> RedisOperation[None]:
        """Ask the critic service to save a checkpoint of the last step; with `keep`, one that is never removed.

        Call this before the next step is committed, so that the critic reads the request before it trains on that step.
        Raises Fenced when another trainer has taken over, RunMissing.
        """
        yield from run_script("ask_critic", self.prefix, term, step, int(keep))

    @operation
    def critic_orders(self) -> RedisOperation[CriticOrders]:
        """Return the current critic term, and the checkpoints that the trainer requested. Raises RunMissing."""
        names = ("critic_term", "critic_checkpoint", "critic_kept")
        term, checkpoint, kept = yield from ask("HMGET", f"{self.prefix}state", *names)
        if term is None:
            raise RunMissing(f"run {self.run_id} is not on the board")
        return CriticOrders(int(term), *(None if step is None else int(step) for step in (checkpoint, kept)))

    @operation
    def open_versions(self) -> RedisOperation[dict[str, int]]:
        """Return by group id the oldest weight version used in each open group whose generation has started.

        Until the rollout commits, this is the version with which generation started; then the oldest that wrote tokens.
        """
        started = yield from ask("HGETALL", f"{self.prefix}started")
        return {group_id.decode(): int(version) for group_id, version in started.items()}

    @operation
    def sent_weights(self) -> RedisOperation[dict[int, list[str]]]:
        """Return by version the digests of the weights that this trainer or earlier ones sent to engines.

        Versions may be missing if no step trains on their tokens any more.
        """
        found = yield from ask("HGETALL", f"{self.prefix}weights")
        return {int(version): digests.decode().split() for version, digests in found.items()}

    @operation
    def times(self, group_ids: Sequence[str]) -> RedisOperation[dict[str, GroupTimes]]:
        """Return the times of open groups, by group id: of publishing, and of each stage that has committed.

        Closed groups are left out.
        """
        stages = [stage.name for stage in self.stages if stage.name != TRAIN]
        fields = ("published", *(f"time:{stage}" for stage in stages))
        replies = yield Send([("HMGET", f"{self.prefix}group:{group_id}", *fields) for group_id in group_ids])
        result = {}
        for group_id, (published, *found) in zip(group_ids, replies, strict=True):
            if published is not None:
                committed = {stage: text for stage, text in zip(stages, found, strict=True) if text is not None}
                result[group_id] = parse_times(published, committed)
        return result

    @operation
    def commit_step(
        self,
        *,
        term: int,
        step: int,
        plan: Mapping[str, Any],
        metrics: Mapping[str, float],
        samples: Sequence[Mapping[str, Any]] = (),
    ) -> RedisOperation[None]:
        """Add a step to the ledger, close its groups as trained and free their columns, atomically.

        `plan["groups"]` lists the groups' ids in order; `plan` and `metrics` must be JSON. Repeating a commit (same
        term, step and plan) does nothing. `samples`, to show to people, are written before the script runs, up to
        relaxd.board.attempts.SHOWN_BYTES of them, but at least one. Raises Fenced when another trainer has taken over,
        StepConflict when the step is not the last plus one or a group is not open, TooLate.
        """
        count, shown = samples_attempt(self.prefix, step, samples)

        def arguments(_: list[int]) -> list[Any]:
            texts = json.dumps(plan, sort_keys=True), json.dumps(metrics)
            written = (count, shown.pointer, shown.shared) if count else (0, "", b"")
            return [term, step, *texts, *written, *plan["groups"]]

        if count:
            yield from self._commit_attempts([GroupAttempt(str(step), SAMPLES, shown)], "commit_step", arguments)
        else:
            yield from run_script("commit_step", self.prefix, *arguments([]))

    @operation
    def last_step(self) -> RedisOperation[int]:
        """Return the last committed step; 0 before the first. Raises RunMissing."""
        return int((yield from self._state("last_step")))

    @operation
    def ledger(self, after_step: int = 0, limit: int | None = None) -> RedisOperation[list[LedgerEntry]]:
        """Return the committed steps after `after_step`, in order.

        Raises LedgerTrimmed: the next step is not on the board any more (see relaxd.board.committed_steps).
        """
        most = () if limit is None else ("COUNT", limit)
        entries = yield from ask("XRANGE", f"{self.prefix}ledger", f"{after_step + 1}-0", "+", *most)
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

    @operation
    def sample_page(
        self, step: int | None = None, after: str = "", *, limit: int = 16
    ) -> RedisOperation[list[tuple[str, dict[str, Any]]]]:
        """Return samples to show to people, of a step or of all steps (None), newest first, each with its key.

        `after`: the key of the last sample of the page before. Each sample has its "step".
        """
        found: list[tuple[str, dict[str, Any]]] = []
        while len(found) < limit and (page := (yield from self._sample_keys(step, after, limit - len(found)))):
            payloads, _ = yield from payload_transfer.read([place for _, place in page])
            with reading(f"the samples of run {self.run_id}"):
                found += [
                    (key, decode_sample(data) | {"step": int(key.split("-")[0])})
                    for key, place in page
                    if (data := payloads[place.keys[0]]) is not None  # else newer ones have replaced it
                ]
            after = page[-1][0]
        return found

    def _sample_keys(self, step: int | None, after: str, limit: int) -> RedisOperation[list[tuple[str, Place]]]:
        """Return the keys of samples to show to people, newest first, and where the samples are stored."""
        lowest, highest = ("-", "+") if step is None else (f"{step}", f"{step}")
        first, below = (int(part) for part in after.split("-")) if after else (0, 0)
        if after:
            highest = f"{first}" if below else f"({first}-0"
        entries = yield from ask("XREVRANGE", f"{self.prefix}samples", highest, lowest, "COUNT", limit)
        found: list[tuple[str, Place]] = []
        with reading(f"the samples of run {self.run_id}"):
            for entry_id, fields in entries:
                of_step, count = int(entry_id.split(b"-")[0]), int(fields[b"count"])
                if after and of_step == first:
                    count = min(count, below)
                indices = range(count)[::-1][: limit - len(found)]
                where = sample_places(self.prefix, fields[b"pointer"].decode(), indices)
                found += zip((f"{of_step}-{index}" for index in indices), where, strict=True)
        return found
