"""Alarms of the active run, which people should check while the run continues, and the limits on dropped groups."""

import asyncio
import contextlib
import logging
import math
import shutil
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from relaxd.alerts.rules import RuleWatch, parse_rule
from relaxd.board import Counts, DroppedGroup, DropReason
from relaxd.config import RunConfig
from relaxd.logprob_gap import GapWatch
from relaxd.reasons import most_frequent
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.waiting import duration
from services.coordinator.fleet.run_fleet import RunContext
from services.coordinator.runs.tracking import Tracking
from services.coordinator.runs.wait_reasons import Reason
from services.coordinator.state.records import Health, HealthRecord, Phase, RunRecord
from services.coordinator.state.retries import RedisRetry

logger = logging.getLogger(__name__)

TICK_SECONDS = 1.0
DISK_SECONDS = 10.0
"""Seconds between two checks of the disk's free space."""
REFUSED_SECONDS = 600.0
"""Seconds for which the wrong-weights alarm stays open after the last group that was dropped for this reason."""
SHOWN_REPLICAS = 5
SHOWN_REASONS = 2
SHOWN_MESSAGES = 20
"""Maximum number of messages of users' code that are shown as separate alarms."""
NO_ALARM = (pb.WAIT_KIND_PAUSED, pb.WAIT_KIND_STOPPING)
"""Kinds of waits that people cause themselves, and which raise no alarm."""
Key = tuple["pb.AlarmKind.ValueType", str]
"""Identifies an alarm: its kind and its name."""


def wait_problem(reason: Reason | None, now: float, limit: float) -> dict[Key, str]:
    """Return an alarm if a wait has held the run up for at least `limit` seconds, else {}. Times are Unix times."""
    if reason is None or reason.kind in NO_ALARM or now - (reason.since or now) < limit:
        return {}
    name = pb.WaitKind.Name(reason.kind).removeprefix("WAIT_KIND_").lower()
    return {(pb.ALARM_KIND_WAIT, name): f"held up for more than {duration(limit)}: {reason.text}"}


def disk_problem(free: int, min_free_gb: float, folder: Path) -> dict[Key, str]:
    """Return an alarm if the disk's `free` bytes are below the configured minimum, else {}."""
    if free >= min_free_gb * 1e9:
        return {}
    text = f"the disk of {folder} has {free / 1e9:.1f} GB left (alerts.min_free_gb is {min_free_gb:g}): make room"
    return {(pb.ALARM_KIND_DISK, "disk"): text}


def health_problems(health: HealthRecord) -> dict[Key, str]:
    """Return an alarm for each role that is being rebuilt, has failed, or has failed replicas."""
    found: dict[Key, str] = {}
    for role in sorted({one.role for one in health.replicas.values()}):
        given_up = [one for one in health.replicas.values() if one.role == role and one.state == Health.FAILED]
        if failed := sorted(one.instance for one in given_up):
            more = f" and {len(failed) - SHOWN_REPLICAS} more" if len(failed) > SHOWN_REPLICAS else ""
            shown = ", ".join(failed[:SHOWN_REPLICAS])
            reasons = "; ".join(sorted({one.reason for one in given_up if one.reason})[:SHOWN_REASONS])
            text = f"could not be brought back: {shown}{more}" + (f" ({reasons})" if reasons else "")
            found[pb.ALARM_KIND_HEALTH, f"{role} replicas"] = text
    for one in health.roles.values():
        if one.state in (Health.REBUILDING, Health.FAILED):
            what = "is rebuilt" if one.state == Health.REBUILDING else "has failed"
            found[pb.ALARM_KIND_HEALTH, one.role] = f"role {one.role} {what}: {one.reason}"
    return found


def weight_problems(problems: Mapping[str, str]) -> dict[Key, str]:
    """Return an alarm for each engine with wrong weights, and an alarm with the name "" for groups generated with
    wrong weights."""
    return {
        (pb.ALARM_KIND_WEIGHTS, engine): f"{engine}: {text}" if engine else text for engine, text in problems.items()
    }


def user_problems(messages: Iterable[str]) -> dict[Key, str]:
    """Return an alarm for each message of users' code, up to SHOWN_MESSAGES, and an alarm that counts the rest."""
    texts = sorted(set(messages))
    found: dict[Key, str] = {
        (pb.ALARM_KIND_USER, text): f"the run's own code says: {text}" for text in texts[:SHOWN_MESSAGES]
    }
    if more := len(texts) - len(found):
        found[pb.ALARM_KIND_USER, ""] = f"{more} further messages of the run's own code are left out"
    return found


class RefusedGroups:
    """Tracks groups that the trainer drops because they were generated with wrong weights."""

    def __init__(self) -> None:
        self._count = 0
        self._detail = ""
        self._time = -math.inf
        """Monotonic time at which the last group dropped because of wrong weights was seen."""

    async def look(self, counts: Counts, dropped: Callable[[], Awaitable[Sequence[DroppedGroup]]]) -> None:
        """Check for newly dropped groups. `dropped` returns the records of dropped groups, newest first."""
        count = counts.dropped_by_reason.get(DropReason.WRONG_WEIGHTS, 0)
        if count > self._count:
            found = await dropped()
            self._detail = next((one.detail for one in found if one.reason == DropReason.WRONG_WEIGHTS), "")
            self._count, self._time = count, monotonic()

    def problems(self) -> dict[str, str]:
        """Return a problem under the key "" if groups were dropped because of wrong weights in the last
        REFUSED_SECONDS; else {}."""
        if monotonic() - self._time > REFUSED_SECONDS:
            return {}
        return {"": f"groups are dropped because of the weights that wrote them, {self._count} so far: {self._detail}"}


def too_many_drops(config: RunConfig, *, failed: int, filtered: int) -> str:
    """Return the reason to pause a run after `failed` and `filtered` drops without a trained step; "" if both are
    allowed."""
    per_step, board = config.trainer.groups_per_step, config.board
    max_failed = board.max_consecutive_drops or max(64, 2 * per_step)
    if failed > max_failed:
        return (
            f"{failed} groups in a row failed without a trained step (board.max_consecutive_drops allows {max_failed})"
        )
    max_filtered = board.max_filtered_steps * per_step
    if 0 < max_filtered < filtered:
        who = "the algorithm and data.curriculum.filter" if config.data.curriculum.filter else "the algorithm"
        return (
            f"{who} filtered {filtered} groups in a row without a trained step (board.max_filtered_steps = "
            f"{board.max_filtered_steps} allows {max_filtered})"
        )
    return ""


async def drops_to_pause_for(context: RunContext, record: RunRecord, redis: RedisRetry, counts: Counts) -> str:
    """Return the reason, with the causes of the drops, to pause a run after too many consecutive drops; "" if there is
    none."""
    problem = too_many_drops(
        context.config,
        failed=counts.consecutive_drops - record.forgiven_drops,
        filtered=counts.consecutive_filtered - record.forgiven_filtered,
    )
    if not problem:
        return ""
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.dropped_by_reason.items()))
    dropped = await redis.call(context.board.dropped)
    unexplained = most_frequent(group.reason for group in dropped if not group.detail)
    cause = f"; lately most as {unexplained}" if unexplained else ""
    failure = next((group.detail for group in dropped if group.detail), "")
    advice = f"; the last failure: {failure}; once repaired: relaxd resume {record.run_id}" if failure else ""
    return f"{problem}; dropped so far: {reasons}{cause}{advice}"


class RunAlarms:
    """Keeps the alarms of one run. Logs their beginning and end, and informs notifiers. Lives in the event loop."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        *,
        record: Callable[[], RunRecord],
        health: Callable[[], HealthRecord],
        held_up: Callable[[], Reason | None],
        wrong_weights: Callable[[], Mapping[str, str]],
        user_messages: Callable[[], Iterable[str]],
        step: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        """Create the alarms of one run.

        Args:
            config: the run's configuration.
            folder: the run's folder.
            record: returns the run's current record.
            health: returns the run's current health record.
            held_up: returns the wait that delays the run; None if there is none.
            wrong_weights: returns weight problems by engine id, or by "" for groups generated with wrong weights.
            user_messages: returns messages of users' code.
            step: returns the number of the last committed step.
            clock: returns the Unix time, in seconds.
        """
        self._config = config
        self._folder = folder
        self._record = record
        self._health = health
        self._held_up = held_up
        self._wrong_weights = wrong_weights
        self._user_messages = user_messages
        self._step = step
        self._clock = clock
        self._gap = GapWatch(config)
        self._rules = [RuleWatch(parse_rule(rule)) for rule in config.alerts.rules]
        self._states: dict[Key, pb.Alarm] = {}
        """Open alarms about waits, the disk, health, engines' weights and users' code, by kind and name."""
        self._logged: dict[Key, tuple[float, pb.Alarm]] = {}
        """Alarms whose beginning was logged, each with the Unix time of the log line, by kind and name."""
        self._disk: dict[Key, str] = {}
        """The alarm about the disk's free space; empty if there is none."""

    def observe(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Check a step's metrics against the log-prob gap's limit and the alert rules, and log changes of alarms."""
        self._observe(step, metrics)
        self._log()

    def observe_all(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Check lines of metrics.jsonl against the log-prob gap's limit and the alert rules, without logging."""
        for line in lines:
            self._observe(line.get("step", 0), line)

    def _observe(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._gap.observe(step, metrics)
        for rule in self._rules:
            rule.observe(step, metrics)

    def current(self) -> list[pb.Alarm]:
        """Return the open alarms, except those of trackers and notifiers."""
        alarms = list(self._states.values())
        if (gap := self._gap.alarm) is not None:
            alarms.append(pb.Alarm(kind=pb.ALARM_KIND_LOGPROB_GAP, first_step=gap.first_step, text=gap.text))
        for rule in self._rules:
            if (found := rule.alarm) is not None:
                alarms.append(
                    pb.Alarm(
                        kind=pb.ALARM_KIND_METRIC,
                        name=found.rule.text,
                        first_step=found.first_step,
                        text=found.text,
                    )
                )
        return alarms

    def look(self) -> None:
        """Open and close alarms from the run's wait, disk, health, engines' weights and messages of users' code."""
        problems = wait_problem(self._held_up(), self._clock(), self._config.alerts.wait_seconds)
        problems |= self._disk | health_problems(self._health()) | weight_problems(self._wrong_weights())
        problems |= user_problems(self._user_messages())
        self._states = {
            key: self._states.get(key) or pb.Alarm(kind=key[0], name=key[1], first_step=self._step(), text=text)
            for key, text in problems.items()
        }
        self._log()

    def status(self, tracking: Tracking) -> dict[str, Any]:
        """Return the run's state, step and alarms for notifiers, as JSON values."""
        record = self._record()
        ended = record.phase in (Phase.STOPPED, Phase.FAILED)
        alarms = [*self.current(), *(one for one in tracking.alarms() if one.kind != pb.ALARM_KIND_NOTIFIER)]
        paused = record.paused is not None and not ended
        return {
            "state": "paused" if paused else record.phase.value.lower(),
            "reason": record.paused if paused else record.reason,
            "step": self._step(),
            "steps": self._config.run.steps,
            "begin_time": record.begin_time.isoformat(),
            "pause_time": record.paused_at.isoformat() if paused and record.paused_at is not None else "",
            "end_time": record.end_time.isoformat() if ended and record.end_time is not None else "",
            "alarms": [
                {
                    "name": f"{pb.AlarmKind.Name(one.kind)} {one.name}",
                    "first_step": one.first_step,
                    "text": one.text,
                }
                for one in alarms
            ],
        }

    async def run_forever(self, tracking: Tracking | None) -> None:
        """Update the alarms and inform notifiers every second, and check the disk every DISK_SECONDS, forever."""
        await asyncio.gather(self._watch(tracking), self._watch_disk())

    async def _watch(self, tracking: Tracking | None) -> None:
        while True:
            self.look()
            if tracking is not None:
                tracking.tell(self.status(tracking))
            await asyncio.sleep(TICK_SECONDS)  # idle: looks again

    async def _watch_disk(self) -> None:
        """Check the disk's free space every DISK_SECONDS, in a thread because network file systems may be slow."""
        while True:
            with contextlib.suppress(OSError):  # the run waits for the folder, and says so
                free = (await asyncio.to_thread(shutil.disk_usage, self._folder)).free
                self._disk = disk_problem(free, self._config.alerts.min_free_gb, self._folder)
            await asyncio.sleep(DISK_SECONDS)  # idle: looks again

    def _log(self) -> None:
        """Log each alarm that has begun or ended since the last call."""
        run_id, time, before = self._record().run_id, self._clock(), self._logged
        self._logged = {}
        for alarm in self.current():
            key = (alarm.kind, alarm.name)
            if key not in before:
                logger.warning("run %s: since step %d: %s", run_id, alarm.first_step, alarm.text)
            self._logged[key] = (before[key][0] if key in before else time, alarm)
        for key, (since, alarm) in before.items():
            if key not in self._logged:
                logger.info("run %s: it is over after %s: %s", run_id, duration(time - since), alarm.text)
