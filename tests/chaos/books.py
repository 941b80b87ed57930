"""The books of an auditor who reads Redis, step files and checkpoints, and believes no counter that can be counted."""

import json
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import redis
from safetensors import safe_open

from relaxd.board.sides.coordinator_side import LEDGER_STEPS
from relaxd.redis_client import acknowledged, key_prefix, read

# KEYS: prefix. ARGV: last ledger id, last id of dropped. Everything at one moment; nothing is written.
SNAPSHOT = """
local P, call = KEYS[1], redis.call
local open = call('SMEMBERS', P .. 'open')
local groups = {}
for i, id in ipairs(open) do groups[i] = call('HKEYS', P .. 'group:' .. id) end
return {
  call('HMGET', P .. 'state', 'published', 'trained', 'dropped', 'last_step', 'cursor'), open, groups,
  call('HGETALL', P .. 'drops'), call('XRANGE', P .. 'ledger', '(' .. ARGV[1], '+'), call('XLEN', P .. 'ledger'),
  call('XRANGE', P .. 'dropped', '(' .. ARGV[2], '+'), call('HKEYS', P .. 'retries'), call('TIME'),
  call('HVALS', P .. 'redelivered'),
}
"""

ACKNOWLEDGED_SECONDS = 2.0
"""Limit until replicas have what was read."""


@dataclass(frozen=True)
class Step:
    """A committed step."""

    number: int
    committed: float
    """Unix time."""
    began: float
    """Unix time at which the trainer was done with the step before, or came up."""
    skipped: bool = False
    """Whether its update was skipped."""

    def updated_since(self, time: float) -> bool:
        """Whether it began after a time, and its update was done."""
        return self.began >= time and not self.skipped


ENDED = "run_ended"
"""Why groups are dropped that a run's end cuts off: the only drop after which a prompt is not tried again."""


@dataclass
class Books:
    """What was published, and what became of it."""

    client: redis.Redis
    run_id: str
    run_folder: Path
    max_staleness: int
    groups_per_step: int
    deliberate: Collection[str] = ()
    """Words in the details of drops that a fault makes on purpose, after which a prompt is not tried again, either."""
    replicas: int = 0
    """So many must have what is read: else it may be gone with the primary, and was acknowledged to nobody."""
    trained: dict[str, int] = field(default_factory=dict)
    """Group -> step."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Group -> reason."""
    steps: list[Step] = field(default_factory=list)
    recomputed: int = 0
    """Deliveries beyond a group's first at a stage, so far."""
    conversation_tokens: float = 0.0
    """Tokens of the model in trained conversations."""
    updates: list[int] = field(default_factory=list)
    """Updates of each step that were applied; one of a run with a critic is of policy and critic."""
    critic_skipped: dict[int, float] = field(default_factory=dict)
    """Updates that a critic service has skipped, by the step, as far as the ledger's later steps say it."""
    _asked_again: set[str] = field(default_factory=set)
    """Dropped groups whose prompts are to be tried again."""
    _last_dropped: str = "0-0"
    _weights_checksum: float | None = None
    """Of the last step."""
    _polled: list[str] = field(default_factory=list)
    _step_files: set[str] = field(default_factory=set)
    _checkpoints: set[str] = field(default_factory=set)

    def audit(self, *, ended: bool = False) -> list[str]:
        """Read what is new, and say everything that is wrong with the whole.

        A run that has ended tries no prompt again: those that waited for it are purged.
        """
        wrong: list[str] = []
        prefix = key_prefix(self.run_id)
        last = len(self.steps)
        since = self._last_dropped
        reply = self._read("EVAL", SNAPSHOT, 1, prefix, f"{last}-0", since)
        state, open_ids, open_fields, drops, ledger, ledger_length, dropped, retries, _, redelivered = reply
        published, trained, dropped_count, last_step = (int(value) for value in state[:4])
        open_groups = {id.decode() for id in open_ids}
        waiting = {id.decode() for id in retries}
        self.recomputed = sum(int(count) for count in redelivered)

        wrong += self._polled + self._read_ledger(ledger)
        self._polled = []
        for entry_id, fields in dropped:
            self._last_dropped = entry_id.decode()
            values = dict(zip(fields[::2], fields[1::2], strict=True))
            group = values[b"group"].decode()
            if group in self.dropped:
                wrong.append(f"group {group} was dropped twice")
            self.dropped[group] = values[b"reason"].decode()
            if values[b"retried"] == b"1":
                self._asked_again.add(group)
            elif self.dropped[group] != ENDED and not _names(values.get(b"detail", b"").decode(), self.deliberate):
                wrong.append(f"the prompt of group {group} is lost: {self.dropped[group]}, and not tried again")

        def same(what: str, one: int, other: int) -> None:
            if one != other:
                wrong.append(f"{what}: {one} is not {other}")

        same("published = open + trained + dropped", published, len(open_groups) + trained + dropped_count)
        if not min(last_step, LEDGER_STEPS) <= ledger_length <= last_step:
            wrong.append(f"the ledger has {ledger_length} of {last_step} steps")
        same("steps that were ever committed and last_step", len(self.steps), last_step)
        same("groups in the ledger and trained", len(self.trained), trained)
        same("dropped groups seen and dropped", len(self.dropped), dropped_count)
        same("drops by reason and dropped", sum(int(count) for count in drops[1::2]), dropped_count)
        for one, other, what in (
            (self.trained.keys(), self.dropped.keys(), "trained and dropped"),
            (self.trained.keys(), open_groups, "trained and open"),
            (self.dropped.keys(), open_groups, "dropped and open"),
        ):
            if both := sorted(one & other):
                wrong.append(f"groups both {what}: {', '.join(both[:5])}")
        known = self.trained.keys() | self.dropped.keys() | open_groups
        wrong += _lost(known, published, json.loads(state[4]))
        for group in [] if ended else sorted(self._asked_again - waiting):
            if _next_try(group) not in known:
                wrong.append(f"the prompt of group {group} is lost: nobody tries it again")
        wrong += _stranded(open_ids, open_fields)
        wrong += self._read_step_files()
        wrong += self._read_checkpoints()
        return wrong

    def poll(self) -> None:
        """Read new steps only; what is wrong with them, the next audit says."""
        last = len(self.steps)
        ledger = f"{key_prefix(self.run_id)}ledger"
        entries = self._read("XRANGE", ledger, f"({last}-0", "+")
        flat = [(id, [part for pair in fields.items() for part in pair]) for id, fields in entries]
        self._polled += self._read_ledger(flat)

    def _read(self, *command: Any) -> Any:
        """Return a command's reply, once replicas have what it read."""
        if self.replicas:
            return acknowledged(self.client, [command], replicas=self.replicas, seconds=ACKNOWLEDGED_SECONDS)[0]
        return read(self.client, [command])[0]

    def _read_ledger(self, entries: list) -> list[str]:
        wrong = []
        for entry_id, fields in entries:
            values = dict(zip(fields[::2], fields[1::2], strict=True))
            number = int(entry_id.split(b"-")[0])
            plan, metrics = json.loads(values[b"plan"]), json.loads(values[b"metrics"])
            if number != len(self.steps) + 1:
                wrong.append(f"step {number} follows step {len(self.steps)}")
            committed = float(values[b"time"])
            updates = len(plan.get("mini_batches", [plan])) * plan.get("epochs", 1)
            skipped = len(plan.get("skipped_updates", []))
            if metrics.get("skipped_updates", 0) != skipped:
                wrong.append(f"step {number} has other skipped updates in its metrics than in its plan")
            if "critic_step" in metrics:
                self.critic_skipped[int(metrics["critic_step"])] = metrics.get("value_skipped_updates", 0.0)
            checksum = metrics.get("weights_checksum")
            if skipped == updates and self.steps and checksum != self._weights_checksum:
                wrong.append(f"all updates of step {number} were skipped, and the weights have changed")
            self._weights_checksum = checksum
            self.updates.append(updates - skipped)
            made, due = metrics.get("optimizer_steps"), sum(self.updates)
            if made is not None and made != due:
                wrong.append(f"the trainer had made {made:g} updates after step {number}, but the ledger has {due}")
            self.conversation_tokens += metrics.get("model_tokens_mean", 0.0) * metrics.get("samples", 0.0)
            self.steps.append(Step(number, committed, committed - metrics["step_seconds"], bool(skipped)))
            if len(plan["groups"]) < self.groups_per_step:  # more where more are due (TrainingQueue)
                wrong.append(f"step {number} has {len(plan['groups'])} groups, not {self.groups_per_step}")
            for group in plan["groups"]:
                if group in self.trained:
                    wrong.append(f"group {group} was trained in step {self.trained[group]} and in step {number}")
                self.trained[group] = number
            if metrics["staleness_max"] > self.max_staleness:
                wrong.append(f"step {number} trained tokens that were {metrics['staleness_max']:g} versions old")
        return wrong

    def _read_checkpoints(self) -> list[str]:
        """How often policy and critic were trained, from the checkpoints themselves."""
        wrong = []
        for path in sorted((self.run_folder / "checkpoints").glob("step-*")):
            number = int(path.name[5:11])
            if path.name in self._checkpoints or number > len(self.steps):
                continue
            try:
                state = json.loads((path / "common.json").read_bytes())
            except FileNotFoundError:  # rotated meanwhile
                continue
            self._checkpoints.add(path.name)
            applied = self.updates[:number]
            found = {"updates": (state["optimizer_steps"], sum(applied))}
            models = {name: state[name] for name in ("policy", "critic") if name in state}
            for model, part in models.items():
                trained = sum(count > 0 for count in applied)
                found[f"steps that have trained the {model}"] = (part["schedule"]["num_steps"], trained)
            if "critic" in state:
                found["the critic's step"] = (state["critic"]["step"], number)
            for what, (has, due) in found.items():
                if has != due:
                    wrong.append(f"{path.name}: {what}: {has}, but by the ledger {due}")
        return wrong + self._read_critic()

    def _read_critic(self) -> list[str]:
        """How often a critic service was trained: less often than there are steps if it skipped all updates of one."""
        wrong = []
        for path in sorted((self.run_folder / "critic" / "checkpoints").glob("step-*")):
            number, name = int(path.name[5:11]), f"critic/{path.name}"
            # What it skipped in this step isn't known before the ledger says it: the next audit looks again.
            known = max(self.critic_skipped, default=0) >= number
            if name in self._checkpoints or number > len(self.steps) or not known:
                continue
            try:
                state = json.loads((path / "common.json").read_bytes())
            except FileNotFoundError:  # rotated meanwhile
                continue
            self._checkpoints.add(name)
            has, skipped = state["policy"]["schedule"]["num_steps"], any(self.critic_skipped.values())
            if has > number or (has < number and not skipped):
                wrong.append(f"{name}: steps that have trained the critic: {has}, but by the ledger {number}")
        return wrong

    def _read_step_files(self) -> list[str]:
        """The versions of trained tokens, from the step files themselves."""
        wrong = []
        for path in sorted((self.run_folder / "steps").glob("step-*.safetensors")):
            number = int(path.name[5:11])
            if path.name in self._step_files or number > len(self.steps):
                continue
            try:
                with safe_open(path, "numpy") as file:
                    names = [key.rpartition("/")[0] for key in file.keys() if key.endswith("/versions")]  # noqa: SIM118
                    versions = [
                        file.get_tensor(f"{name}/versions")[file.get_tensor(f"{name}/loss_mask") != 0] for name in names
                    ]
            except FileNotFoundError:  # covered by a checkpoint meanwhile
                continue
            self._step_files.add(path.name)
            oldest = min(int(np.min(column)) for column in versions if column.size)
            if number - 1 - oldest > self.max_staleness:
                wrong.append(f"step {number} trained tokens of version {oldest}")
            if {name for name in names if self.trained.get(name) == number} != set(names):
                wrong.append(f"the file of step {number} has other groups than the ledger")
        return wrong


def _lost(known: set[str], published: int, cursor: dict | None) -> list[str]:
    """Every place of the sequence of prompts before the cursor must be in the books, and nothing else."""
    wrong = []
    if len(known) != published:
        wrong.append(f"published {published} groups, but {len(known)} are open, trained or dropped")
    places: dict[int, set[int]] = defaultdict(set)
    for group in known:
        epoch, _, position = group.partition("~")[0].partition("-")
        places[int(epoch)].add(int(position))
    now = cursor or {"epoch": 0, "position": 0}
    sizes = Counter(len(places[epoch]) for epoch in range(now["epoch"]))
    if len(sizes) > 1:
        wrong.append(f"epochs of different size were published: {dict(sizes)}")
    for epoch, positions in places.items():
        end = now["position"] if epoch == now["epoch"] else max(positions) + 1
        if missing := sorted(set(range(end)) - positions):
            wrong.append(f"{len(missing)} groups of epoch {epoch} are lost: {missing[:5]}")
        if beyond := sorted(positions - set(range(end))):
            wrong.append(f"groups of epoch {epoch} beyond the data cursor: {beyond[:5]}")
    return wrong


def _next_try(group: str) -> str:
    """The group that tries a dropped group's prompt again."""
    place, _, tries = group.partition("~")
    return f"{place}~{int(tries or 0) + 1}"


def _stranded(ids: list[bytes], fields: list[list[bytes]]) -> list[str]:
    """Open groups that no stage will ever see."""
    wrong = []
    for id, names in zip(ids, fields, strict=True):
        offered = {name.removeprefix(b"entry:") for name in names if name.startswith(b"entry:")}
        written = {name.removeprefix(b"@") for name in names if name.startswith(b"@")}
        if not offered - written:
            wrong.append(f"open group {id.decode()} is at no stage: {b', '.join(names).decode()}")
    return wrong


def _names(detail: str, deliberate: Collection[str]) -> bool:
    return any(words in detail for words in deliberate)
