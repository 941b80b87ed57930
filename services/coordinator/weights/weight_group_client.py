"""Client of a weight group's members: each call goes to all of them concurrently, with a deadline."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from relaxd.config import WeightsConfig
from relaxd.rpc.errors import explain, failed_precondition
from relaxd.rpc.message_parts import numbers
from relaxd.v1 import rollout_pb2, trainer_pb2
from relaxd.v1.replica_pb2 import WeightVersion
from relaxd.v1.rollout_pb2_grpc import RolloutStub
from relaxd.v1.trainer_pb2_grpc import TrainerStub
from relaxd.v1.weights_pb2 import Transport, WeightGroup
from relaxd.weights import WEIGHTS_CHANGED
from relaxd.weights.receipts import digest_of
from services.coordinator.fleet.peers import Peers
from services.coordinator.fleet.registry import Registry, Version
from services.coordinator.state.records import GroupRecord, Member

logger = logging.getLogger(__name__)

Call = Awaitable[Any]
"""A unary gRPC call in progress."""

PAUSE_MODES = {
    "in_place": rollout_pb2.PAUSE_MODE_IN_PLACE,
    "retract": rollout_pb2.PAUSE_MODE_RETRACT,
    "abort": rollout_pb2.PAUSE_MODE_ABORT,
    "drain": rollout_pb2.PAUSE_MODE_DRAIN,
}
SHORT_SECONDS = 3.0
"""Deadline, in seconds, of calls that only change a flag: resume, leave."""
SILENT_SECONDS = 0.5
"""Deadline, in seconds, of leave calls to a member that did not answer the last call: it may be frozen, and all members
wait for it."""
MARGIN_SECONDS = 1.0
"""Seconds by which a call's deadline exceeds the deadline that the callee enforces."""
ECHO_SECONDS = 0.2
"""Seconds after the first failure in which other calls may still fail, so that the error names every failed member."""
CALLS_TOGETHER = 16
"""Number of calls of a broadcast that start before the event loop runs other tasks."""
TO_BLAME = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
"""gRPC status codes that blame a member as dead or late. A member with another status has answered."""


class SyncFailed(Exception):
    """A weight synchronisation failed. The attributes sort the members by cause.

    `blamed`: members that are dead, late, or hold other weights than were sent; `wrong`: members with other weights,
    and the differences. `refused`: members that answered with an error, possibly caused by another member. `unfit`:
    errors of members that answered INVALID_ARGUMENT, which a restart would not cure. `silent`: members without an
    answer in time. `changed`: the trainer has newer weights, or is making them.
    """

    def __init__(
        self,
        reason: str,
        blamed: Iterable[Member] = (),
        *,
        wrong: Mapping[Member, str] | None = None,
        refused: Iterable[Member] = (),
        silent: Iterable[Member] = (),
        unfit: Mapping[Member, str] | None = None,
        changed: bool = False,
    ) -> None:
        super().__init__(reason)
        self.unfit = dict(unfit or {})
        self.changed = changed
        self.silent = frozenset(silent)
        self.refused = frozenset(refused)
        self.wrong = dict(wrong or {})
        self.blamed = frozenset(blamed) | self.wrong.keys()


@dataclass(frozen=True)
class TransferTimes:
    """Durations of a weight transfer's parts, in seconds, each for the slowest engine. The broadcast overlaps with the
    engines' parts."""

    pause: float
    """Seconds until the engine stopped generating."""
    receive: float
    """Seconds from when the engine begins to receive weights until it has committed the version."""
    send: float
    """Seconds that the trainer's broadcast took."""
    resume: float
    """Seconds to record the digest and resume the engines if their weights were compared first; otherwise engines
    resume by themselves."""
    bytes_sent: float
    """Bytes of weights that the trainer sent. Bytes for several engines count once."""


class WeightGroupClient:
    """Calls the trainer and the engines in each step of a weight synchronisation. Each step raises SyncFailed if a
    member fails."""

    def __init__(self, registry: Registry, peers: Peers, config: WeightsConfig) -> None:
        self._registry = registry
        self._peers = peers
        self._config = config

    def _pause(self, sync_id: int) -> tuple[rollout_pb2.PauseGenerationRequest, float]:
        """Return a request to pause generation, with a lease as long as a synchronisation may take, and the call's
        deadline in seconds."""
        config = self._config
        wait = config.timeout_seconds if config.pause == "drain" else config.connect_timeout_seconds
        request = rollout_pb2.PauseGenerationRequest(
            sync_id=sync_id,
            mode=PAUSE_MODES[config.pause],
            lease_seconds=wait + config.timeout_seconds + 3 * SHORT_SECONDS,
        )
        return request, wait

    async def manifest(self, trainer: Member) -> trainer_pb2.GetWeightManifestResponse:
        """Return the trainer's weight manifest: the tensors that it will send, and the address of the store through
        which ranks connect."""
        request = trainer_pb2.GetWeightManifestRequest()
        try:
            stub = self._trainer(trainer)
            return await stub.GetWeightManifest(request, timeout=self._config.connect_timeout_seconds)
        except grpc.aio.AioRpcError as error:
            raise SyncFailed(f"the trainer did not return its weight manifest: {explain(error)}") from error

    async def join(self, sync_id: int, group: GroupRecord, manifest: trainer_pb2.GetWeightManifestResponse) -> None:
        """Connect the trainer's sending ranks and the engines to a new weight group."""
        ranks, next_rank = {}, manifest.source_ranks
        for engine in group.engines:
            ranks[engine] = next_rank
            next_rank += engine.ranks
        seconds = self._config.connect_timeout_seconds
        connect = WeightGroup(
            name=group.name,
            world_size=next_rank,
            store_host=manifest.store_host,
            store_port=manifest.store_port,
            transport=numbers(Transport)[self._config.transport],
            timeout_seconds=seconds,
        )

        # The manifest, of thousands of tensors, is encoded once for all engines: protobuf merges concatenated messages.
        common = rollout_pb2.JoinWeightGroupRequest(sync_id=sync_id, group=connect, manifest=manifest.manifest)
        encoded = common.SerializeToString()

        def join(member: Member) -> Call:
            if member == group.trainer:
                request = trainer_pb2.TrainerJoinWeightGroupRequest(sync_id=sync_id, group=connect)
                return self._trainer(member).JoinWeightGroup(request, timeout=seconds + MARGIN_SECONDS)
            own = rollout_pb2.JoinWeightGroupRequest(rank=ranks[member]).SerializeToString()
            return self._peers.join_weight_group(member.address, encoded + own, seconds + MARGIN_SECONDS)

        await self._broadcast("join the weight group", [group.trainer, *group.engines], join)

    async def transfer(
        self,
        sync_id: int,
        group: GroupRecord,
        version: Version,
        unverified: Collection[Member],
        recorded: "asyncio.Future[None]",
        sent: Callable[[str], Awaitable[None]],
    ) -> TransferTimes:
        """Broadcast the weights, while each engine pauses, receives and resumes on its own.

        With `unverified` engines, all engines resume only after `sent` has recorded the digest of the sent weights, and
        the checksums of the unverified engines match the trainer's. The broadcast starts once `recorded` is done.
        """
        began = time.monotonic()
        pause, wait = self._pause(sync_id)
        drain = self._config.pause == "drain"
        if drain:  # takes as long as generation, and the trainer's optimizer must not wait for it
            await self._broadcast(
                "drain", group.engines, lambda e: self._rollout(e).PauseGeneration(pause, timeout=wait)
            )
        drained = time.monotonic() - began
        weights = WeightVersion(term=version[0], version=version[1])
        seconds = self._config.timeout_seconds
        send = trainer_pb2.BroadcastWeightsRequest(
            sync_id=sync_id,
            group_name=group.name,
            weights=weights,
            timeout_seconds=seconds,
            checksum=bool(unverified),
        )

        async def broadcast() -> Any:
            await asyncio.shield(recorded)
            return await self._trainer(group.trainer).BroadcastWeights(send, timeout=seconds + MARGIN_SECONDS)

        def transfer(member: Member) -> Call:
            if member == group.trainer:
                return broadcast()
            receive = rollout_pb2.ReceiveWeightsRequest(
                sync_id=sync_id,
                group_name=group.name,
                weights=weights,
                timeout_seconds=seconds,
                checksum=member in unverified,
                pause=None if drain else pause,
                pause_timeout_seconds=wait,
                resume=not unverified,
            )
            limit = (0.0 if drain else wait) + seconds + MARGIN_SECONDS
            return self._rollout(member).ReceiveWeights(receive, timeout=limit)

        # Engines first: a call has a longer way to an engine's scheduler than to a trainer's ranks.
        answers = await self._broadcast("transfer weights", [*group.engines, group.trainer], transfer)
        checksums = answers[group.trainer].checksums
        digest, received = digest_of(checksums), time.monotonic()
        if unverified:
            await sent(digest)
        wrong = {
            engine: names for engine in unverified if (names := _differences(checksums, answers[engine].checksums))
        }
        if wrong:
            detail = "; ".join(f"{engine.replica_id}: {names}" for engine, names in wrong.items())
            raise SyncFailed(
                f"engines hold other weights than the trainer sent as version {version[1]} ({detail})", wrong=wrong
            )
        if unverified:
            resume = rollout_pb2.ResumeGenerationRequest(sync_id=sync_id, weights=weights, digest=digest)
            await self._broadcast("resume", group.engines, lambda e: self._resume(resume, e))
        return TransferTimes(
            pause=drained + max(float(answers[engine].pause_seconds) for engine in group.engines),
            receive=max(float(answers[engine].seconds) for engine in group.engines),
            send=float(answers[group.trainer].seconds),
            resume=time.monotonic() - received,
            bytes_sent=float(answers[group.trainer].bytes),
        )

    def _resume(self, request: rollout_pb2.ResumeGenerationRequest, engine: Member) -> Call:
        return self._rollout(engine).ResumeGeneration(request, timeout=SHORT_SECONDS)

    async def leave(self, sync_id: int, group: GroupRecord) -> None:
        """Make the members that are still registered leave a weight group. Paused engines stay paused."""
        members = [member for member in (group.trainer, *group.engines) if self._registry.holds(member)]
        await self._broadcast("leave the old weight group", members, lambda m: self._leave(sync_id, group, m))

    async def abort(
        self,
        sync_id: int,
        group: GroupRecord | None,
        engines: Sequence[Member],
        quiet: Collection[Member] = (),
    ) -> set[Member]:
        """Make all members leave the weight group, which aborts their collectives, and resume the engines that may
        serve.

        Engines that have received weights, or a part of them, quarantine themselves. `quiet` members may be frozen:
        their deadline is shorter. Returns the members that are gone or don't answer; never raises SyncFailed.
        """
        members = set(engines) | ({group.trainer, *group.engines} if group else set())
        there = [member for member in members if self._registry.holds(member)]
        answers = await asyncio.gather(
            *(self._release(sync_id, group, m, SILENT_SECONDS if m in quiet else SHORT_SECONDS) for m in there),
            return_exceptions=True,
        )
        silent = members - set(there)
        for member, answer in zip(there, answers, strict=True):
            if isinstance(answer, grpc.aio.AioRpcError):
                logger.info("%s did not leave the weight group: %s", member.replica_id, explain(answer))
                if answer.code() in TO_BLAME:
                    silent.add(member)
            elif isinstance(answer, BaseException):
                raise answer
        return silent

    async def _release(self, sync_id: int, group: GroupRecord | None, member: Member, seconds: float) -> None:
        if group is not None:
            answer = await self._leave(sync_id, group, member, seconds)
            if member == group.trainer or answer.quarantined:
                return
        await self._resume(rollout_pb2.ResumeGenerationRequest(sync_id=sync_id), member)

    def _leave(self, sync_id: int, group: GroupRecord, member: Member, seconds: float = SHORT_SECONDS) -> Call:
        if member == group.trainer:
            request = trainer_pb2.TrainerLeaveWeightGroupRequest(sync_id=sync_id, group_name=group.name)
            return self._trainer(member).LeaveWeightGroup(request, timeout=seconds)
        leave = rollout_pb2.LeaveWeightGroupRequest(sync_id=sync_id, group_name=group.name)
        return self._rollout(member).LeaveWeightGroup(leave, timeout=seconds)

    async def _broadcast(
        self, action: str, members: Sequence[Member], call: Callable[[Member], Call]
    ) -> dict[Member, Any]:
        """Call all members concurrently, and return their answers.

        Raises SyncFailed soon after the first failure or lost lease, and cancels the calls in progress.
        """
        tasks: dict[Member, asyncio.Task[Any]] = {}
        try:
            for number, member in enumerate(members, 1):
                tasks[member] = asyncio.create_task(_await(call(member)))
                if number % CALLS_TOGETHER == 1:  # the first call leaves at once, and hundreds hold up no heartbeat
                    await asyncio.sleep(0)  # brief: a turn of the loop
            pending = set(tasks.values())
            while pending and not any(task.done() and task.exception() for task in tasks.values()):
                if any(not task.done() and not self._registry.holds(member) for member, task in tasks.items()):
                    break
                # named: Run.waiting_for has the synchronisation
                _, pending = await asyncio.wait(pending, timeout=0.2, return_when=asyncio.FIRST_EXCEPTION)
            if pending:
                _, pending = await asyncio.wait(pending, timeout=ECHO_SECONDS)
        finally:
            for task in tasks.values():
                task.cancel()
        problems: list[str] = []
        blamed: list[Member] = []
        refused: list[Member] = []
        silent: list[Member] = []
        unfit: dict[Member, str] = {}
        changed = False
        for member, task in tasks.items():
            if task in pending:
                silent.append(member)
                if not self._registry.holds(member):
                    problems.append(f"{member.replica_id}: no heartbeat")
                    blamed.append(member)
            elif (error := task.exception()) is not None:
                if not isinstance(error, grpc.aio.AioRpcError):
                    raise error
                problems.append(f"{member.replica_id}: {explain(error)}")
                (blamed if error.code() in TO_BLAME else refused).append(member)
                if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                    silent.append(member)
                elif error.code() == grpc.StatusCode.INVALID_ARGUMENT:
                    unfit[member] = explain(error)
                changed |= bool(failed_precondition(error, WEIGHTS_CHANGED))
        if problems or pending:
            reason = f"could not {action} ({'; '.join(problems)})"
            raise SyncFailed(reason, blamed, refused=refused, silent=silent, unfit=unfit, changed=changed)
        return {member: task.result() for member, task in tasks.items()}

    def _trainer(self, member: Member) -> TrainerStub:
        return self._peers.trainer(member.address)

    def _rollout(self, member: Member) -> RolloutStub:
        return self._peers.rollout(member.address)


def _differences(sent: Mapping[str, int], received: Mapping[str, int]) -> str:
    """Describe the tensors whose checksums differ; "" if none differ, or if the engine (an external server) returned no
    checksums."""
    if not received:
        return ""
    different = sorted(name for name in {*sent, *received} if sent.get(name) != received.get(name))
    if not different:
        return ""
    return f"{different[0]}" + (f" and {len(different) - 1} more tensors" if len(different) > 1 else "")


async def _await(call: Call) -> Any:
    return await call
