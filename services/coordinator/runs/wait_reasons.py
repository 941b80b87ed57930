"""Explain what a run waits for: one sentence, from one snapshot of the run. Pure: nothing here reads or acts.

The functions in `REASONS` are called in order; the first reason returned is shown. Add a reason there, with a case in
tests/unit/coordinator/runs/test_waiting_for.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from relaxd.board import HeldGroup, QueueDepth
from relaxd.roles import ROLES, SCALABLE_ROLES
from relaxd.rpc.message_parts import words
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1 import replica_pb2
from relaxd.waiting import duration
from services.coordinator.state.retries import MEDIA_HOST

LATE_FACTOR = 2.0
"""Multiple of the usual step duration after which a step is late."""
LATE_SECONDS = 10.0
"""Minimum seconds after which a step is late, however short the usual duration is."""
FIRST_STEP_SECONDS = 30.0
"""Seconds after which the first step is late: its usual duration is unknown."""
DISK = "the disk"
"""Value of Reason.on when the run waits for free space in its folder."""


@dataclass(frozen=True)
class Peer:
    """A replica of the run at one moment."""

    replica_id: str
    role: str
    state: "replica_pb2.ReplicaState.ValueType" = replica_pb2.REPLICA_STATE_READY
    detail: str = ""
    """The replica's own description of its work, for people."""
    wait: "replica_pb2.ReplicaWait.ValueType" = replica_pb2.REPLICA_WAIT_UNSPECIFIED
    """Type of the wait that `detail` describes in words."""
    silent_seconds: float = 0.0
    """Seconds since the replica's last heartbeat."""
    version: int | None = None
    """Version of the weights that the replica serves; None if it serves none."""

    @property
    def state_word(self) -> str:
        """State of the replica in readable form. A registered replica without a heartbeat counts as starting."""
        unknown = f"in a state that this release doesn't know ({self.state})"
        return words(replica_pb2.ReplicaState).get(self.state, unknown) or "starting"


@dataclass(frozen=True)
class Named:
    """A wait of the coordinator itself (relaxd.waiting)."""

    reason: str
    on: str
    since: float
    """Unix time at which the coordinator's wait began."""
    disk: bool = False
    """True if free space in the run's folder would end the wait."""


@dataclass(frozen=True)
class RunSnapshot:
    """Everything about a run at one moment that explains what the run waits for. Times are Unix times."""

    run_id: str
    now: float
    steps: int
    groups_per_step: int
    step: int = 0
    """The last committed step."""
    step_ended: float = 0.0
    """Time of the last step's end; before the first step, time of the beginning of training."""
    usual_seconds: float | None = None
    """Median seconds of the last steps; None before the first."""
    training: bool = True
    """True once training has begun, after the first weights and the first evaluation."""
    stopping: str = ""
    """Reason why the run ends; empty while it doesn't."""
    starting: str = ""
    """Phase of the run's start; empty once the run trains."""
    paused: str | None = None
    """Reason of the pause; None if the run isn't paused."""
    paused_since: float | None = None
    rebuilding: bool = False
    """True if the pause ends by itself, once the role that failed works again."""
    redis: str = ""
    """Reason why Redis doesn't answer; empty while it does."""
    published: int = 0
    open: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Number of dropped groups, by reason."""
    queues: Sequence[QueueDepth] = ()
    """Depths of the stages' queues, in the order of the stages; the last stage is the trainer's."""
    held: Mapping[str, HeldGroup] = field(default_factory=dict)
    """The group that each stage has held for the longest."""
    lease_seconds: float = 60.0
    """Seconds after which a stage loses a group that it holds without renewal (board.lease_seconds)."""
    gate: tuple[str, str] = ("", "")
    """Why the admission gate is shut: a word (Admission.limit or "sampler") and a sentence. Both are empty while it is
    open."""
    stage_roles: Mapping[str, str] = field(default_factory=dict)
    """Role by stage, for stages whose role's name differs from the stage's."""
    missing: Sequence[str] = ()
    """Roles without a working replica."""
    peers: Sequence[Peer] = ()
    announced: int | None = None
    """Version of the newest weights that the trainer announced; None before its first announcement."""
    sync_since: float | None = None
    """Time at which the current weight synchronisation began; None if there is none."""
    sync_failure: str = ""
    """Reason why the last weight synchronisation failed; empty after a success."""
    sync_delay: str = ""
    """Reason why engines wait for weights that can't be sent now; empty if none does."""
    handoff: str = ""
    """Phase of a colocated run's GPU handoff, or why the handoff failed."""
    curriculum: Sequence[str] = ()
    """Progress of the curriculum, in lines for people; empty if no curriculum chooses prompts."""
    waits: Sequence[Named] = ()
    """Waits of the coordinator itself, longest first."""

    @property
    def lacking(self) -> int:
        """Number of groups that must still reach the trainer before the open step is complete."""
        ready = self.queues[-1].waiting + self.queues[-1].held if self.queues else 0
        return max(0, self.groups_per_step - ready)

    def role_of_stage(self, stage: str) -> str:
        """Return the name of the role whose replicas work on a stage in this run."""
        return self.stage_roles.get(stage, stage)


@dataclass(frozen=True)
class Reason:
    """A run's wait and its cause."""

    kind: "pb.WaitKind.ValueType"
    text: str
    """Sentence that names what the run waits for and the cause, without the duration."""
    on: str = ""
    """Id of the replica that has to act, or the name of another party, such as "redis"."""
    since: float | None = None
    """Unix time at which the wait began. If None, the watcher takes the time of the first snapshot with this wait."""
    advice: tuple[str, ...] = ()
    """Advice that tells people how to end the wait; empty if the wait ends by itself."""
    always: bool = False
    """True if the wait is always shown; False if it is shown only once the step is late."""

    def sentence(self, now: float) -> str:
        """Return the wait's sentence with the duration added."""
        return self.text if self.since is None else f"{self.text}, for {duration(max(0.0, now - self.since))}"


def is_late(snapshot: RunSnapshot) -> bool:
    """Return True if the step in progress takes much longer than usual."""
    usual = snapshot.usual_seconds
    limit = FIRST_STEP_SECONDS if usual is None else max(LATE_SECONDS, LATE_FACTOR * usual)
    return snapshot.training and snapshot.now - snapshot.step_ended > limit


def explain(snapshot: RunSnapshot) -> Reason | None:
    """Return why the run waits, by the first of `REASONS` that applies; None if none applies."""
    return next((reason for find in REASONS if (reason := find(snapshot)) is not None), None)


# --- reasons --------------------------------------------------------------------------------------------------------


def _redis(run: RunSnapshot) -> Reason | None:
    """Return a wait reason if Redis does not answer."""
    if not run.redis:
        return None
    return Reason(
        pb.WAIT_KIND_REDIS,
        f"it waits for Redis: {run.redis}",
        on="redis",
        advice=("restart Redis, or make the network to it work: the run goes on by itself",),
        always=True,
    )


def _disk(run: RunSnapshot) -> Reason | None:
    """Return a wait reason if the coordinator or the trainer can't write to the run's folder."""
    advice = "make room on the disk, or let {} write to it: the run goes on by itself"
    limits = "runs with a smaller trainer.checkpoint.max_bytes or trainer.checkpoint.keep leave more room there"
    files = '"Too many open files" means that its limit (ulimit -n) is too low, not that the disk is full'
    if wait := next((wait for wait in run.waits if wait.disk), None):
        told = (advice.format("the coordinator"), limits, files)
        return Reason(
            pb.WAIT_KIND_DISK, f"it waits for {wait.reason}", on=DISK, since=wait.since, advice=told, always=True
        )
    if peer := next((peer for peer in run.peers if peer.wait == replica_pb2.REPLICA_WAIT_DISK), None):
        told = (advice.format(peer.replica_id), limits, files)
        return Reason(pb.WAIT_KIND_DISK, f"{peer.replica_id} is {peer.detail}", on=DISK, advice=told, always=True)
    return None


def _media(run: RunSnapshot) -> Reason | None:
    """Return a wait reason if a host of prompts' media doesn't answer."""
    wait = next((wait for wait in run.waits if wait.on == MEDIA_HOST), None)
    if wait is None:
        return None
    advice = (
        "make the host answer again: the run goes on by itself",
        "data.media_wait_seconds limits the wait: after the run has ended, relaxd resume continues it",
    )
    return Reason(
        pb.WAIT_KIND_MEDIA, f"it waits for {wait.reason}", on=MEDIA_HOST, since=wait.since, advice=advice, always=True
    )


def _stopping(run: RunSnapshot) -> Reason | None:
    """Return a wait reason if the run is stopping but still has work to finish."""
    if not run.stopping:
        return None
    wait = run.waits[0] if run.waits else None
    what = f"waiting for {wait.reason}" if wait else "writing its last records"
    since, on = (wait.since, wait.on) if wait else (None, "")
    return Reason(pb.WAIT_KIND_STOPPING, f"it is stopping ({run.stopping}): {what}", on=on, since=since, always=True)


def _paused(run: RunSnapshot) -> Reason | None:
    """Return a wait reason if the run is paused: it waits for a person, or for a role that is being rebuilt."""
    if run.paused is None:
        return None
    if run.rebuilding:
        text = f"it is paused until a role is back: {run.paused}"
        return Reason(pb.WAIT_KIND_REBUILD, text, since=run.paused_since, always=True)
    advice = (f"relaxd resume {run.run_id} continues it", f"relaxd stop {run.run_id} ends it")
    return Reason(
        pb.WAIT_KIND_PAUSED,
        f"it is paused and waits for a person: {run.paused}",
        on="a person",
        since=run.paused_since,
        advice=advice,
        always=True,
    )


def _role(run: RunSnapshot) -> Reason | None:
    """Return a wait reason if a role has no working replica."""
    if not run.missing:
        return None
    # Registered replicas may become ready by themselves; a person has to start missing ones.
    if absent := [role for role in run.missing if all(peer.role != role for peer in run.peers)]:
        starts = [(role, f"relaxd scale {role}=1" if role in SCALABLE_ROLES else "relaxd up") for role in absent]
        advice = tuple(f"{command} starts one, or: python -m {ROLES[role].module}" for role, command in starts)
        roles = " or ".join(filter(None, [", ".join(absent[:-1]), absent[-1]]))
        text = f"no {roles} replica is registered"
        return Reason(pb.WAIT_KIND_ROLE, text, on=absent[0], advice=advice, always=True)
    peer = [peer for peer in run.peers if peer.role == run.missing[0]][-1]
    said = f": {peer.detail}" if peer.detail else ""
    text = f"{peer.replica_id} is {peer.state_word}{said}"
    if peer.wait == replica_pb2.REPLICA_WAIT_GPUS:
        advice = ("relaxd status shows who holds each GPU: end that replica, or scale it in",)
        return Reason(pb.WAIT_KIND_LEASE, text, on=peer.replica_id, advice=advice, always=True)
    advice = (
        (f"see the log of {peer.replica_id}: relaxd status",) if peer.state == replica_pb2.REPLICA_STATE_FAILED else ()
    )
    return Reason(pb.WAIT_KIND_ROLE, text, on=peer.replica_id, advice=advice, always=True)


def _first_weights(run: RunSnapshot) -> Reason | None:
    """Return a wait reason if training has not begun."""
    if run.training or not run.starting:
        return None
    wait = run.waits[0] if run.waits else None
    sync = _sync(run)
    if sync is not None and wait is None:
        return replace(sync, always=True)
    what = f"{run.starting}: {wait.reason}" if wait else run.starting
    return Reason(
        pb.WAIT_KIND_STARTING, what, on=wait.on if wait else "", since=wait.since if wait else None, always=True
    )


def _data(run: RunSnapshot) -> Reason | None:
    """Return a wait reason if the user's sampler fails."""
    limit, detail = run.gate
    if limit != "sampler":
        return None
    advice = ("repair the sampler's file: it is read again by itself",)
    return Reason(pb.WAIT_KIND_DATA, f"publishing can't go on: {detail}", on="the data", advice=advice, always=True)


def _full(run: RunSnapshot) -> Reason | None:
    """Return a wait reason if Redis is full, or lacks room for the groups that the step needs."""
    limit, detail = run.gate
    if limit == "full":
        advice = ("raise Redis's maxmemory: redis-cli CONFIG SET maxmemory ...",)
        return Reason(pb.WAIT_KIND_FULL, f"publishing waits: {detail}", on="redis", advice=advice, always=True)
    if limit == "memory" and run.lacking and not _before_training(run):
        advice = (
            "raise board.high_water_bytes or Redis's maxmemory, or lower trainer.groups_per_step or "
            "rollout.max_new_tokens",
        )
        return Reason(pb.WAIT_KIND_MEMORY, f"publishing waits: {detail}", on="redis", advice=advice)
    return None


def _handoff(run: RunSnapshot) -> Reason | None:
    """Return a wait reason if a colocated run's trainer and engines are changing places on the GPUs."""
    if not run.handoff:
        return None
    return Reason(
        pb.WAIT_KIND_HANDOFF, f"trainer and engines change places on the GPUs: {run.handoff}", since=run.step_ended
    )


def _sync(run: RunSnapshot) -> Reason | None:
    """Return a wait reason if engines don't have the newest weights."""
    engines = [peer for peer in run.peers if ROLES[peer.role].weights == "receives"]
    behind = [peer for peer in engines if peer.version != run.announced]
    if run.announced is None or not behind:
        return None
    who = ", ".join(peer.replica_id for peer in behind[:3]) + (" ..." if len(behind) > 3 else "")
    if run.sync_delay:
        return Reason(pb.WAIT_KIND_SYNC, run.sync_delay, on=behind[0].replica_id, since=run.sync_since)
    failed = f"; the last attempt failed: {run.sync_failure}" if run.sync_failure else ""
    if run.sync_since is None and not run.sync_failure:
        return None
    return Reason(
        pb.WAIT_KIND_SYNC,
        f"{who} {'wait' if len(behind) > 1 else 'waits'} for the weights of version {run.announced}{failed}",
        on=behind[0].replica_id,
        since=run.sync_since,
        advice=("docs/weights.md says what happens when a synchronisation fails",) if run.sync_failure else (),
    )


def _trainer(run: RunSnapshot) -> Reason | None:
    """Return a wait reason if all groups of the step are with the trainer."""
    if run.lacking:
        return None
    trainer = next((peer for peer in run.peers if ROLES[peer.role].weights == "sends"), None)
    said = f": {trainer.detail}" if trainer and trainer.detail else ""
    return Reason(
        pb.WAIT_KIND_TRAINER,
        f"the trainer has all {run.groups_per_step} groups of step {run.step + 1} and works on it{said}",
        on=trainer.replica_id if trainer else "trainer",
        since=run.step_ended,
    )


def _held(run: RunSnapshot) -> Reason | None:
    """Return a wait reason if one stage holds the groups that the step lacks."""
    queue = _slowest(run)
    if queue is None:
        return None
    lacks = f"step {run.step + 1} lacks {run.lacking} of its {run.groups_per_step} groups"
    count = sum(peer.role == run.role_of_stage(queue.stage) for peer in run.peers)
    group = run.held.get(queue.stage)
    peer = next((peer for peer in run.peers if group and peer.replica_id == group.holder), None)
    if group is not None and peer is None:
        left = max(0.0, run.lease_seconds - group.idle_seconds)
        return Reason(
            pb.WAIT_KIND_HELD_GROUP,
            f"{lacks}; group {group.group_id} is held at {queue.stage} by {group.holder}, which is gone: another "
            f"replica gets it within {duration(left)}, when its lease ends",
            on=group.holder,
            since=group.enqueued_at,
        )
    if group is not None and peer is not None and not queue.waiting:
        said = f": {peer.detail}" if peer.detail else ""
        is_old = run.now - group.enqueued_at > LATE_SECONDS  # a short hold is no reason to add a replica
        return Reason(
            pb.WAIT_KIND_HELD_GROUP,
            f"{lacks}; {queue.stage} works on {queue.held} groups, of which {group.group_id} is the oldest, with "
            f"{peer.replica_id}{_delivery(group)}{said}",
            on=peer.replica_id,
            since=group.enqueued_at,
            advice=_advice(run.role_of_stage(queue.stage), peer) if is_old or peer.wait else (),
        )
    said = f"; {peer.replica_id}: {peer.detail}" if peer is not None and peer.detail else ""
    return Reason(
        pb.WAIT_KIND_STAGE,
        f"{lacks}; {queue.stage} is the slow stage: {queue.waiting} groups wait for it, {queue.held} are with its "
        f"{count} {'replica' if count == 1 else 'replicas'}{said}",
        on=queue.stage,
        since=run.step_ended,
        advice=_advice(run.role_of_stage(queue.stage), peer, count),
    )


def _gate(run: RunSnapshot) -> Reason | None:
    """Return a wait reason if no group that the step lacks is in progress, and none may be published."""
    limit, detail = run.gate
    if not limit or not run.lacking:
        return None
    lacks = f"step {run.step + 1} lacks {run.lacking} of its {run.groups_per_step} groups"
    return Reason(pb.WAIT_KIND_GATE, f"{lacks}; publishing waits: {detail}", on="the gate", since=run.step_ended)


REASONS: tuple[Callable[[RunSnapshot], Reason | None], ...] = (
    _redis,
    _disk,
    _stopping,
    _paused,
    _role,
    _media,
    _first_weights,
    _data,
    _full,
    _handoff,
    _sync,
    _trainer,
    _held,
    _gate,
)


# --- parts ----------------------------------------------------------------------------------------------------------


def _before_training(run: RunSnapshot) -> int:
    """Return the number of groups in all stages before the trainer."""
    return sum(queue.waiting + queue.held for queue in run.queues[:-1])


def _slowest(run: RunSnapshot) -> QueueDepth | None:
    """Return the longest queue before the trainer's stage; among equals the last stage's. None if all are empty."""
    queues = [queue for queue in run.queues[:-1] if queue.waiting + queue.held]
    return max(reversed(queues), key=lambda queue: queue.waiting + queue.held) if queues else None


def _delivery(group: HeldGroup) -> str:
    return f" (delivery {group.deliveries})" if group.deliveries > 1 else ""


def _advice(role: str, peer: Peer | None, count: int = 1) -> tuple[str, ...]:
    scalable = role in SCALABLE_ROLES and not 0 < ROLES[role].most <= count
    more = (f"relaxd scale {role}={count + 1} adds a replica",) if scalable else ()
    if peer is not None and peer.wait == replica_pb2.REPLICA_WAIT_SERVICE:
        return ("make it answer again: the run goes on by itself",)
    if peer is not None and peer.wait == replica_pb2.REPLICA_WAIT_SCORE:
        return ("repair the reward's file, then: relaxd pause && relaxd resume, which loads it again", *more)
    return more


def evidence(run: RunSnapshot) -> list[str]:
    """Return the numbers that support the explanation (steps, groups, queues), one line each."""
    usual = "" if run.usual_seconds is None else f"; the last steps usually took {run.usual_seconds:.3g} s"
    ago = duration(max(0.0, run.now - run.step_ended))
    began = f"step {run.step} of {run.steps} ended {ago} ago" if run.step else f"training began {ago} ago"
    lines = [f"{began}{usual}" if run.training else "it has not begun to train"]
    lines.append(f"groups: {run.published} published, {run.open} open, {sum(run.dropped.values())} dropped")
    if run.queues:
        ready = run.groups_per_step - run.lacking
        lines.append(f"step {run.step + 1}: {ready} of {run.groups_per_step} groups are with the trainer")
    for queue in run.queues[:-1]:
        line = f"{queue.stage}: {queue.waiting} groups wait, {queue.held} are held"
        if group := run.held.get(queue.stage):
            age = duration(max(0.0, run.now - group.enqueued_at))
            line += f"; {group.group_id} has been there for {age}, with {group.holder}{_delivery(group)}"
        lines.append(line)
    if run.gate[1]:
        lines.append(f"gate: {run.gate[1]}")
    lines += run.curriculum
    for peer in run.peers:
        what = [peer.state_word, peer.detail, "" if peer.version is None else f"weights of version {peer.version}"]
        silent = f"no heartbeat for {duration(peer.silent_seconds)}" if peer.silent_seconds > LATE_SECONDS / 2 else ""
        lines.append(f"{peer.replica_id}: {', '.join(filter(None, [*what, silent]))}")
    if run.announced is not None:
        lines.append(f"weights: the trainer has version {run.announced}")
    lines += [f"the coordinator waits for {one.reason}, for {duration(run.now - one.since)}" for one in run.waits]
    return lines
