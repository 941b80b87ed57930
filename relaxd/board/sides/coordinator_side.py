"""The coordinator's side of the board. Writes carry its term, so that a replaced coordinator changes nothing."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from relaxd.board import attempts as data_nodes
from relaxd.board import payload_transfer
from relaxd.board.attempts import Attempt, all_places, new_names
from relaxd.board.group_contents import facts_json, parse_fate
from relaxd.board.scripts import explain_limit, run_script
from relaxd.board.sides.side_base import BoardCore, GroupAttempt, reading
from relaxd.board.sizes import NO_EVICTION, RedisMemory
from relaxd.board.stages import PUBLISH, TRAIN
from relaxd.board.types import (
    DROP_COUNTERS,
    JSON,
    Admission,
    BoardError,
    BoardUnavailable,
    DropKind,
    DropReason,
    GroupOutcome,
    LedgerEntry,
    NewGroup,
    PromptRetry,
)
from relaxd.redis_client.operations import At, Command, FindKeys, RedisOperation, Send, ask, operation
from relaxd.telemetry import BatchSpan

GROUP_ID = re.compile(r"[^\s,|]+")
SWEPT_TOGETHER = 256
"""Number of attempts that a sweep frees at a time, after which it records its progress."""
LEDGER_STEPS = 256
"""Number of newest steps that stay in the board's ledger; a step's plan may have hundreds of kilobytes."""
DROPPED_TOGETHER = 64
"""Maximum number of groups that one script drops."""


class CoordinatorSide(BoardCore):
    """Operations of the coordinator: create a run, publish its prompts through the gate, keep its ledger, delete it."""

    @operation
    def create(self, *, term: int, groups_per_step: int, steps: int) -> RedisOperation[None]:
        """Create the run with its gate closed, or take over an existing run under the new term.

        `groups_per_step` and `steps` are for the gate. Raises RunExists when the run exists with other stages,
        another groups_per_step or other data nodes, Fenced when a later term coordinates.
        """
        settings = json.dumps({"groups_per_step": groups_per_step, "stages": [stage.name for stage in self.stages]})
        data_urls = json.dumps(self.limits.data_urls) if self.limits.data_urls else ""
        gate = {
            "groups_per_step": groups_per_step,
            "steps": steps,
            "max_staleness": self.limits.max_staleness,
            "oversample": self.limits.oversample,
            "high_water_bytes": self.limits.high_water_bytes,
        }
        names = json.dumps([stage.name for stage in self.stages])
        yield from run_script("create", self.prefix, term, settings, names, data_urls, *_flat(gate))

    @operation
    def restore(
        self, *, ledger: Sequence[LedgerEntry], cursor: JSON, dropped: Mapping[str, int], trainer_term: int
    ) -> RedisOperation[None]:
        """Restore the history of a run whose board was lost, right after `create`. No group is open then.

        The board's ledger gets the last LEDGER_STEPS of it.

        Args:
            ledger: every committed step, from the first. Of those before the last LEDGER_STEPS only the plans' groups
                are read.
            cursor: the data cursor.
            dropped: number of dropped groups by reason.
            trainer_term: at least the highest term of the run's trainers so far.

        Raises BoardError: the run has published groups already.
        """
        if [entry.step for entry in ledger] != list(range(1, len(ledger) + 1)):
            raise ValueError(f"ledger has steps {[entry.step for entry in ledger]}: they must be 1, 2, 3 ...")
        trained = sum(len(entry.plan["groups"]) for entry in ledger)
        all_dropped = sum(dropped.values())
        state: dict[Any, Any] = {
            "published": trained + all_dropped,
            "trained": trained,
            "dropped": all_dropped,
            "last_step": len(ledger),
            "trainer_term": trainer_term,
            "cursor": json.dumps(cursor),
        }

        # The ledger and drops may be there from a try whose reply was lost. The state comes last: until then the run
        # counts as new.
        commands: list[Command] = [("UNLINK", f"{self.prefix}ledger", f"{self.prefix}drops")]
        for entry in ledger[-LEDGER_STEPS:]:
            texts = {"plan": json.dumps(entry.plan, sort_keys=True), "metrics": json.dumps(entry.metrics)}
            fields = {"time": f"{entry.time:.6f}", "term": entry.term, **texts}
            commands.append(("XADD", f"{self.prefix}ledger", f"{entry.step}-0", *_flat(fields)))
        if dropped:
            commands.append(("HSET", f"{self.prefix}drops", *_flat(dropped)))
        commands.append(("HSET", f"{self.prefix}state", *_flat(state)))
        if (yield from self._state("published")) != b"0":
            raise BoardError(f"run {self.run_id} has published groups already: only a new run can be restored")
        yield Send(commands, how="write")

    @operation
    def set_gate(self, *, term: int, oldest_version: int | None, open: bool) -> RedisOperation[None]:
        """Open or close the gate, and set the oldest version of the engines that take prompts (None: no weights yet).

        Raises Fenced, RunMissing.
        """
        version = "" if oldest_version is None else oldest_version
        yield from run_script("set_gate", self.prefix, term, int(open), version)

    @operation
    def record_weights(self, *, term: int, version: int, digest: str) -> RedisOperation[None]:
        """Record that the trainer sends weights with this digest as this version. Raises Fenced, RunMissing."""
        yield from run_script("record_weights", self.prefix, term, version, digest)

    @operation
    def forget_weights(self, *, term: int, before: int) -> RedisOperation[int]:
        """Remove the weight digests of versions below `before`, once they are stored elsewhere. Returns their number.

        Raises Fenced, RunMissing.
        """
        return int((yield from run_script("forget_weights", self.prefix, term, before)))

    @operation
    def admission(self, worst_bytes: int) -> RedisOperation[Admission]:
        """Return the number of groups of up to `worst_bytes` bytes that the gate admits now, and the limit behind it.

        The rule is in lua/library/admission.lua. Raises RunMissing.
        """
        nodes = yield from self._node_bytes()
        room, answer = yield from run_script("room", self.prefix, *nodes, worst_bytes)
        return Admission(int(room), *explain_limit(answer.decode()))

    @operation
    def memory(self) -> RedisOperation[RedisMemory]:
        """Return use and limits of the memory for large payloads: of the data nodes if the run has any, else of Redis.

        The run need not exist.
        """
        found = yield from run_script("memory", self.prefix, self.limits.high_water_bytes)
        used, most, high_water, policy = found
        own = RedisMemory(int(used), int(most), int(high_water), policy.decode())
        nodes = yield from data_nodes.memory(len(self._nodes.data))
        if nodes is None or nodes.policy != NO_EVICTION:
            return nodes or own
        return replace(nodes, policy=own.policy)

    @operation
    def data_node_problems(self) -> RedisOperation[list[str]]:
        """Return the problems of the run's data nodes. Raises BoardUnavailable if a data node doesn't answer."""
        return (yield from data_nodes.problems(self._connection.url, [one.url for one in self._nodes.data]))

    @operation
    def relieve(self, *, term: int) -> RedisOperation[int]:
        """Drop surplus groups, the newest first, if Redis is full; their prompts wait to be retried.

        Groups that the open step needs stay. Returns the number of dropped groups. Raises Fenced, RunMissing.
        """
        nodes = yield from self._node_bytes()
        dropped = yield from run_script("relieve", self.prefix, *nodes, term)
        yield from self._sweep(term)
        return int(dropped)

    @operation
    def drop_groups(
        self,
        group_ids: Sequence[str],
        *,
        term: int,
        reason: DropReason,
        retry: bool = False,
        counts: DropKind = "failed",
    ) -> RedisOperation[int]:
        """Drop open groups, whether or not a replica holds them. Arguments have the meaning that `drop` gives them.

        Returns the number of groups that were open, and so dropped. Raises Fenced, RunMissing.
        """
        settings = (term, reason, int(retry), self.limits.max_retries, DROP_COUNTERS[counts])
        dropped = 0
        for start in range(0, len(group_ids), DROPPED_TOGETHER):
            together = group_ids[start : start + DROPPED_TOGETHER]
            dropped += int((yield from run_script("drop_groups", self.prefix, *settings, *together)))
        return dropped

    @operation
    def trim_ledger(self, *, term: int, written: int) -> RedisOperation[int]:
        """Remove old steps from the board's ledger. Returns the number of removed steps.

        The run's folder has the steps up to `written`; the last LEDGER_STEPS of them stay, and all later ones. Raises
        Fenced, RunMissing.
        """
        first_kept = max(1, written - LEDGER_STEPS + 1)
        return int((yield from run_script("trim_ledger", self.prefix, term, first_kept)))

    @operation
    def sweep(self, *, term: int) -> RedisOperation[int]:
        """Free the payloads of closed groups and of attempts that came too late. Returns the number of freed attempts.

        An interrupted sweep leaves the rest to the next one. Raises Fenced, RunMissing.
        """
        return (yield from self._sweep(term))

    def _sweep(self, term: int) -> RedisOperation[int]:
        freed: list[bytes] = []
        count = 0
        while True:
            freed = yield from run_script("sweep", self.prefix, term, SWEPT_TOGETHER, *freed)
            if not freed:
                return count
            count += len(freed)
            with reading(f"the garbage of run {self.run_id}"):
                places = [place for pointer in freed for place in all_places(self.prefix, pointer.decode())]
            yield from payload_transfer.unlink(places)

    @operation
    def publish(self, *, term: int, groups: Sequence[NewGroup], cursor: JSON = None) -> RedisOperation[list[str]]:
        """Publish groups, all or none, and atomically advance the data cursor (None leaves it).

        Repeating the last publish (same ids) does nothing. Returns the ids. Raises GateClosed, Fenced, RunMissing,
        ColumnError; BoardError for an id that is open already or a retry_of that does not wait.
        """
        if not groups:
            raise ValueError("groups is empty: there is nothing to publish")
        ids = [group.group_id for group in groups]
        if not all(ids) or not GROUP_ID.fullmatch("".join(ids)):
            wrong = next(id for id in ids if not GROUP_ID.fullmatch(id))
            raise ValueError(f"group_id {wrong!r}: it must not be empty or have spaces, ',' or '|'")
        retried = [group.retry_of for group in groups if group.retry_of is not None]
        for name, values in (("group_id", ids), ("retry_of", retried)):
            if len(set(values)) < len(values):
                raise ValueError(f"{name} {max(values, key=values.count)!r} is twice in groups: each must be unique")
        attempts: list[Attempt | None] = []
        for group, name in zip(groups, new_names(ids), strict=True):
            attempt = None
            if group.retry_of is None:
                attempt = self._attempt(name, group.columns)
                self._check_size(group.group_id, "its prompt", attempt)
            attempts.append(attempt)
        cursor_json = "" if cursor is None else json.dumps(cursor)

        nodes: Sequence[int] = ()

        def arguments(_: list[int]) -> list[Any]:
            needed: dict[str, list[Any]] = {
                "ids": ids,
                "pointers": [one.pointer if one else "" for one in attempts],
                "bytes": [one.nbytes if one else 0 for one in attempts],
                "worst_bytes": [group.worst_bytes for group in groups],
            }
            optional = {
                "traces": [json.dumps(dict(group.trace)) if group.trace else "" for group in groups],
                "retry_of": [group.retry_of or "" for group in groups],
                "facts": [facts_json(group.facts) for group in groups],
            }
            lists = needed | {name: values for name, values in optional.items() if any(values)}
            return [*nodes, term, self._routes, cursor_json, json.dumps(lists)]

        written = [GroupAttempt(id, PUBLISH, one) for id, one in zip(ids, attempts, strict=True) if one]
        traces, attributes = (group.trace for group in groups), {"relaxd.run_id": self.run_id}
        with BatchSpan("publish", "send", self.stages[0].name, traces, attributes):
            nodes = yield from self._node_bytes()
            if written:
                yield from self._commit_attempts(written, "publish", arguments, set_values=True)
            else:
                yield from run_script("publish", self.prefix, *arguments([]))
        return ids

    @operation
    def reclaim(self, *, term: int, consumer: str) -> RedisOperation[int]:
        """Free the groups that a dead replica holds, for immediate redelivery. Returns the number of freed groups.

        If the replica is alive after all, it has lost its holds, and its late commits change nothing. Each delivery
        counts towards limits.max_deliveries. The trainer's holds stay: its successor's term frees them. Raises Fenced,
        RunMissing.
        """
        stages = [stage.name for stage in self.stages if stage.name != TRAIN]
        settings = (term, consumer, self.limits.max_deliveries)
        return int((yield from run_script("free_dead_consumer", self.prefix, *settings, *stages)))

    @operation
    def cursor(self) -> RedisOperation[JSON]:
        """Return the data cursor, which `publish` and `restore` set; None before that. Raises RunMissing."""
        value: JSON = json.loads((yield from self._state("cursor")))
        return value

    @operation
    def retries(self, limit: int = 100) -> RedisOperation[list[PromptRetry]]:
        """Return dropped groups whose prompts wait to be published again (`NewGroup.retry_of`)."""
        found = yield from ask("HGETALL", f"{self.prefix}retries")
        waiting = [PromptRetry(id.decode(), int(value.split(b"|", 1)[0])) for id, value in found.items()]
        return sorted(waiting, key=lambda retry: retry.group_id)[:limit]

    @operation
    def retry_unscored(self, *, term: int) -> RedisOperation[int]:
        """Queue the prompts whose reward failed for a retry, once the reward is repaired. Returns their number.

        The board keeps the first 1024 of them since the last call. Raises Fenced, RunMissing.
        """
        return int((yield from run_script("retry_unscored", self.prefix, term)))

    @operation
    def fates(self, after: str = "", limit: int = 1000) -> RedisOperation[list[GroupOutcome]]:
        """Return at most `limit` stored outcomes of closed groups, oldest first, after the outcome with id `after`."""
        start = f"({after}" if after else "-"
        entries = yield from ask("XRANGE", f"{self.prefix}fates", start, "+", "COUNT", limit)
        with reading(f"the fates of groups of run {self.run_id}"):
            return [GroupOutcome(entry_id.decode(), parse_fate(fields)) for entry_id, fields in entries]

    @operation
    def continue_fates(self, last: str, *, term: int) -> RedisOperation[None]:
        """Make the ids of new outcomes greater than `last`, the id of the last outcome that was stored elsewhere.

        A new Redis whose clock is behind would give lower ids. Raises Fenced, RunMissing.
        """
        yield from run_script("continue_fates", self.prefix, term, last)

    @operation
    def forget_fates(self, last: str, *, term: int) -> RedisOperation[None]:
        """Remove outcomes of groups up to id `last`, once they are stored elsewhere. Raises Fenced, RunMissing."""
        milliseconds, number = last.split("-")
        first_kept = f"{milliseconds}-{int(number) + 1}"
        yield from run_script("forget_fates", self.prefix, term, first_kept)

    @operation
    def purge(self, *, term: int) -> RedisOperation[None]:
        """Delete the keys that a finished run no longer needs. Raises Fenced, RunMissing."""
        yield from run_script("purge", self.prefix, term)
        yield from self._sweep(term)

    @operation
    def measure(self) -> RedisOperation[int]:
        """Return the memory that the run takes in Redis, data nodes included, in bytes."""

        total = 0
        for server in (None, *range(len(self._nodes.data))):
            keys = yield FindKeys(self.prefix, server)
            for start in range(0, len(keys), 1000):
                sizes = yield Send([("MEMORY USAGE", key) for key in keys[start : start + 1000]], server)
                total += sum(size or 0 for size in sizes)
        return total

    @operation
    def delete(self) -> RedisOperation[None]:
        """Delete everything under the run's prefix. From then on workers of the run get RunMissing.

        The run's data nodes are those that it was created with. Raises BoardUnavailable, after deleting the rest, if a
        server is unavailable: repeat the call once it is back.
        """
        record = f"{self.prefix}data_nodes"
        text = yield from ask("GET", record)
        yield from payload_transfer.unlink_keys([f"{self.prefix}state"])
        away = None
        for server in (None, *json.loads(text or "[]")):
            try:
                yield from self._unlink_all(server, record)
            except BoardUnavailable as error:
                away = error
        if away is not None:
            raise away
        yield from payload_transfer.unlink_keys([record])

    def _unlink_all(self, server: At, spared: str) -> RedisOperation[None]:
        """Delete all Redis keys of the run on one server, except the key `spared`."""
        found = yield FindKeys(self.prefix, server)
        yield from payload_transfer.unlink_keys((key for key in found if key != spared), server)

    def _node_bytes(self) -> RedisOperation[tuple[int, int, int]]:
        """Return memory of all data nodes, in bytes: used, maximum, limit for surplus groups; zeros without nodes."""
        memory = yield from data_nodes.memory(len(self._nodes.data))
        return (0, 0, 0) if memory is None else (memory.used, memory.max_bytes, memory.high_water)


def _flat(fields: Mapping[str, Any]) -> list[Any]:
    """Return a mapping as a list in which names and values alternate, as Redis commands take it."""
    return [part for item in fields.items() for part in item]
