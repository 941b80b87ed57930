"""What the coordinator does on the board. Writes carry its epoch: a coordinator that was replaced changes nothing."""

import json
import re
from collections.abc import Sequence

import redis

from relaxd.board import payloads
from relaxd.board.core import BoardCore
from relaxd.board.errors import GateClosed
from relaxd.board.types import JSON, NewGroup, Retry

GROUP_ID = re.compile(r"[^\s,|]+")


class CoordinatorSide(BoardCore):
    """Creating a run, publishing its prompts through the gate, deleting it."""

    def create(self, *, epoch: int, groups_per_step: int, steps: int) -> None:
        """Make the run on the board, gate shut. Doing it again finds the run as it is (and takes the epoch over).

        `groups_per_step` and `steps` are for the gate. Raises RunExists when the run is there with other stages or
        another groups_per_step, Fenced when a later epoch coordinates.
        """
        settings = json.dumps({"groups_per_step": groups_per_step, "stages": [stage.name for stage in self.stages]})
        gate = {
            "groups_per_step": groups_per_step,
            "steps": steps,
            "max_staleness": self.limits.max_staleness,
            "oversample": self.limits.oversample,
            "high_water_bytes": self.limits.high_water_bytes,
        }
        names = json.dumps([stage.name for stage in self.stages])
        fields = [part for item in gate.items() for part in item]
        self._connection.script("create", self.prefix, epoch, settings, names, *fields)

    def set_gate(self, *, epoch: int, oldest_version: int | None, open: bool) -> None:
        """Open or shut the gate; say the oldest version on any engine that takes prompts (None: no engine has weights).

        Raises Fenced, RunMissing.
        """
        version = "" if oldest_version is None else oldest_version
        self._connection.script("gate", self.prefix, epoch, int(open), version)

    def room(self) -> int:
        """How many groups the gate would let in now; 0 while it is closed.

        It lets in while published - dropped < (oldest version + 1 + max_staleness) x groups_per_step x oversample, no
        more than the run needs in all, and while Redis's memory and the bytes expected of the open groups are below
        high_water_bytes. Raises RunMissing.
        """
        return int(self._connection.script("publish", self.prefix, -1, "", ""))

    def publish(self, *, epoch: int, groups: Sequence[NewGroup], cursor: JSON = None) -> list[str]:
        """Publish groups, all or none, and advance the data cursor (None leaves it) in the same breath.

        Saying the same again (same ids, the last thing published) does nothing. Returns the ids. Raises GateClosed,
        Fenced, RunMissing, ColumnError; BoardError for an id that is open already or a retry_of that does not wait.
        """
        attempts: list[payloads.Attempt] = []
        arguments: list[str | int | bytes] = []
        names = payloads.new_names(group.group_id for group in groups)
        for group, name in zip(groups, names, strict=True):
            if not GROUP_ID.fullmatch(group.group_id):
                raise ValueError(f"group_id {group.group_id!r}: it must not be empty or hold spaces, ',' or '|'")
            pointer, shared = "", b""
            if group.retry_of is None:
                attempts.append(payloads.Attempt(self.prefix, name, group.columns))
                pointer, shared = attempts[-1].pointer, attempts[-1].shared
            trace = json.dumps(dict(group.trace)) if group.trace else "{}"
            arguments += [group.group_id, pointer, trace, group.expected_bytes, group.retry_of or "", shared]
        if not groups:
            raise ValueError("groups is empty: there is nothing to publish")
        cursor_json = "" if cursor is None else json.dumps(cursor)
        try:
            self._write_and_run(attempts, "publish", epoch, self._routes, cursor_json, *arguments)
        except GateClosed:
            keys = [key for attempt in attempts for key, _ in attempt.large]
            if keys:
                self._connection.run(lambda client: client.unlink(*keys))
            raise
        return [group.group_id for group in groups]

    def cursor(self) -> JSON:
        """The data cursor that was last published with; None before that. Raises RunMissing."""
        value: JSON = json.loads(self._state("cursor"))
        return value

    def retries(self, limit: int = 100) -> list[Retry]:
        """Dropped groups whose prompts wait to be published again (`NewGroup.retry_of`)."""
        found = self._connection.run(lambda client: client.hgetall(f"{self.prefix}retries"))
        waiting = [Retry(id.decode(), int(value.split(b"|", 1)[0])) for id, value in found.items()]
        return sorted(waiting, key=lambda retry: retry.group_id)[:limit]

    def delete(self) -> None:
        """Delete everything under the run's prefix. Workers of the run get RunMissing from then on."""
        pattern = f"{self.prefix}*"  # a run id holds nothing that a pattern would take for a wildcard

        def operation(client: redis.Redis) -> None:
            client.unlink(f"{self.prefix}state")
            batch: list[bytes] = []
            for key in client.scan_iter(match=pattern, count=1000):
                batch.append(key)
                if len(batch) == 1000:
                    client.unlink(*batch)
                    batch.clear()
            if batch:
                client.unlink(*batch)

        self._connection.run(operation)
