"""The trainer's gRPC handlers, and its part in a run as a replica. The parent process never imports torch."""

import asyncio
import contextlib
import math
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from relaxd import telemetry
from relaxd.config import RunConfig
from relaxd.engines import ENGINES
from relaxd.replica.replica_life import advertised_address
from relaxd.replica.replica_service import ReplicaContext, ReplicaService, ServiceStatus, SyncIds
from relaxd.roles import TRAINER
from relaxd.rpc.credentials import is_loopback
from relaxd.rpc.errors import (
    Aborted,
    FailedPrecondition,
    InvalidArgument,
    RpcError,
    Unavailable,
    Violations,
)
from relaxd.rpc.message_parts import words
from relaxd.rpc.service_settings import ServiceSettings
from relaxd.v1 import coordinator_pb2, trainer_pb2_grpc, weights_pb2
from relaxd.v1 import rank_pb2 as rank_pb
from relaxd.v1 import trainer_pb2 as pb
from services.trainer.loop.weight_read_lock import HOLD_MARGIN_SECONDS
from services.trainer.service.host_ranks import HostRanks, TrainerHosts
from services.trainer.service.rank_processes import (
    RANK,
    RankEvent,
    RankPool,
    RankProcess,
    RankProcesses,
    RankSet,
    rank_environment,
    rank_gauges,
)
from services.trainer.service.rank_supervisor import RankSupervisor

MAX_NAME_BYTES = 200
"""Maximum length of a name in an export's path, in bytes. File systems allow 255; unfinished exports have a suffix."""
RESERVED = ("checkpoints", "reference", "steps")
"""Subfolders of the run folder that exports can't use."""


def export_folder(run_folder: Path, folder: str) -> Path:
    """Check the path of an export in the run folder, and return it as an absolute path.

    Raises:
        ValueError: the path isn't below the run's folder, or something other than a model exists there.
    """
    target = Path(folder)
    if not folder.isprintable() or target.is_absolute() or ".." in target.parts or target == Path("."):
        raise ValueError(f'folder is {folder!r}: it must be a relative path below the run\'s folder, such as "model"')
    if target.parts[0] in RESERVED:
        raise ValueError(f"folder is {folder!r}: {target.parts[0]} holds the run's own files")
    if any(len(os.fsencode(part)) > MAX_NAME_BYTES for part in target.parts):
        raise ValueError(f"folder is {folder!r}: no name in it may be longer than {MAX_NAME_BYTES} bytes")
    try:
        resolved = (run_folder / folder).resolve()
        if run_folder.resolve() not in resolved.parents:
            raise ValueError(f"folder is {folder!r}: a link in it leads out of the run's folder")
        if resolved.exists() and not (resolved / "config.json").is_file():
            raise ValueError(f"folder is {folder!r}: {resolved} exists and isn't a model; it will not be replaced")
    except OSError as error:
        raise ValueError(f"folder is {folder!r}: {error.strerror or error}") from error
    return resolved


T = TypeVar("T")

LEAVE_SECONDS = 5.0
"""Deadline in seconds for leaving a weight group, which only sets a flag and closes connections."""
CONTROL_SECONDS = 10.0
"""Deadline in seconds for holding weights or planning a profile, which only change a number."""
MAX_PROFILED = 100
"""Maximum number of steps that a Profile call may record. Each makes a file of up to hundreds of megabytes."""
SCRIPTED_RANK = "services.trainer.rehearsal"
"""Module that each rank process runs in a rehearsal."""


class TrainerService(ReplicaService):
    """Replica service of the trainer: runs the ranks of a run, and reports their state."""

    role = TRAINER

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context
        self._settings = context.settings
        self._living: asyncio.Task[None] | None = None
        self._hosts: TrainerHosts | None = None
        """Finds the other hosts of the ranks; None if all ranks are on this host."""
        self._pool: RankPool | None = None
        """Pool of this host's rank processes; None if all ranks are on this host."""
        self.world: RankSupervisor | None = None
        self.run_folder = Path()

    async def start_run(self, config: RunConfig, assignment: coordinator_pb2.Assignment) -> None:
        """Start the run's ranks, which load, replay and train by themselves; `status` reports their progress."""
        self.run_folder = Path(assignment.folder)
        has_model = ENGINES[config.rollout.engine].has_model
        gpus = await self._context.gpus.lease(config.trainer.ranks_per_host if has_model else 0)
        request = rank_pb.WorkRequest(
            run_id=assignment.run_id,
            config_json=config.model_dump_json(),
            folder=assignment.folder,
            redis=self._settings.redis,
            store_host=_store_host(self._settings),
            replica_id=self._settings.replica_id,
            log_level=self._settings.log_level,
            role=self.role,
        )
        environment = rank_environment(gpus)
        gpu_lease = self._context.gpus.child_lease if gpus else None
        if config.trainer.hosts > 1:
            advertised, listen = _advertised_host(self._settings), _store_host(self._settings)
            hosts = self._hosts = TrainerHosts(self._context, config, assignment, advertised=advertised, listen=listen)

            pool = self._pool = RankPool(environment, gpu_lease, spares=config.trainer.ranks_per_host)
            pool.prepare()  # while the other hosts are awaited

            def make(on_event: RankEvent, on_wait: Callable[[str], None]) -> RankSet:
                return HostRanks(hosts, on_event, on_wait, pool)
        else:
            pool = RankPool(environment, gpu_lease, RANK if has_model else SCRIPTED_RANK)

            def make(on_event: RankEvent, on_wait: Callable[[str], None]) -> RankSet:
                numbers, ports = range(config.trainer.ranks), config.weights.port_range
                return RankProcesses(numbers, on_event, pool, ports=ports)

        take_turn = self._context.take_turn if config.run.colocate else None
        self.world = RankSupervisor(self._settings, request, make, take_turn=take_turn)
        self._living = asyncio.create_task(self.world.live(), name="world")

    async def stop_run(self) -> None:
        """Hand back held groups and kill the ranks."""
        if self.world is not None:
            await self.world.drain(1.0)
        if self._living is not None:
            self._living.cancel()
            await asyncio.wait({self._living})  # `await` would confuse this task's cancellation with its
        if self._hosts is not None:
            await self._hosts.close()
        if self._pool is not None:
            await self._pool.close()
        self._living = self.world = self._hosts = self._pool = None

    async def drain(self, seconds: float) -> int:
        """Stop taking groups, and hand back the held ones within `seconds`. Return the number still held."""
        return await self.world.drain(seconds) if self.world else 0

    async def pause_run(self) -> None:
        """Pause training: no step closes until the run is resumed."""
        if self.world:
            await self.world.set_paused(True)

    async def resume_run(self) -> None:
        """Resume training, so that steps close again."""
        if self.world:
            await self.world.set_paused(False)

    def status(self) -> ServiceStatus:
        """Return the trainer's state and progress, as last reported by the ranks."""
        world = self.world
        if world is None:
            return ServiceStatus()
        return ServiceStatus(
            held_groups=world.held_groups,
            done_groups=world.done_groups,
            progress=world.iterations,
            detail=world.detail,
            wait=world.wait,
            state=world.state,
            start_refused=world.start_refused,
            weights=world.weights if world.ready else None,
            awake=world.awake,
            gauges={**rank_gauges(world.ranks), "changing_weights": float(world.changing_weights)},
        )


class TrainerServicer(trainer_pb2_grpc.TrainerServicer):
    """RPC handlers of relaxd.v1.Trainer: validate a request, and pass it on to the ranks concerned."""

    def __init__(self, service: TrainerService, settings: ServiceSettings, sync_ids: SyncIds) -> None:
        self._service = service
        self._settings = settings
        self._sync_ids = sync_ids
        self._group: tuple[int, str] | None = None
        """Trainer term and name of the weight group that the sending ranks are in; None if in none."""

    async def GetWeightManifest(
        self, request: pb.GetWeightManifestRequest, context: Any
    ) -> pb.GetWeightManifestResponse:
        """Return the weights' version, the manifest of their broadcast, and the address of the ranks' store."""
        world = self._ready_world()
        response = pb.GetWeightManifestResponse(weights=world.weights)
        response.MergeFrom(world.manifest)
        # The store is on this process's advertised host, with a separate port.
        response.store_host = _advertised_host(self._settings)
        return response

    async def JoinWeightGroup(
        self, request: pb.TrainerJoinWeightGroupRequest, context: Any
    ) -> pb.TrainerJoinWeightGroupResponse:
        """Connect the sending ranks to the engines in a weight group."""
        group = request.group
        world = self._ready_world()
        sources = world.manifest.source_ranks
        violations = Violations()
        violations.check(group.name, "group.name", "is empty: it must be a name that was never used before")
        known = words(weights_pb2.Transport).get(group.transport)
        violations.check(known, "group.transport", f"is {group.transport}: it must be a transport's number")
        violations.check(
            group.world_size > sources,
            "group.world_size",
            f"is {group.world_size}: it must be above the {sources} source ranks",
        )
        violations.check_seconds(group.timeout_seconds, "group.timeout_seconds")
        violations.check(
            0 <= group.store_port < 65536, "group.store_port", f"is {group.store_port}: it must be 0 to 65535"
        )
        violations.raise_if_any()
        self._sync_ids.take(request.sync_id)
        group.store_port = group.store_port or world.manifest.store_port
        self._group = (world.weights.term, group.name)
        timeout = group.timeout_seconds + 1.0
        try:
            await _first_error(rank.join(request, timeout=timeout) for rank in world.senders)
        except BaseException:
            await self._leave(world, group.name)
            raise
        return pb.TrainerJoinWeightGroupResponse()

    async def BroadcastWeights(self, request: pb.BroadcastWeightsRequest, context: Any) -> pb.BroadcastWeightsResponse:
        """Broadcast the weights to the engines once. The optimizer waits until the broadcast ends."""
        world = self._ready_world()
        seconds = request.timeout_seconds
        violations = Violations()
        violations.check_seconds(seconds, "timeout_seconds")
        violations.raise_if_any()
        self._sync_ids.take(request.sync_id)
        if self._group != (world.weights.term, request.group_name):
            raise FailedPrecondition(f'this trainer is not in weight group "{request.group_name}": join it first')
        link = telemetry.link_from(world.step_trace)
        attributes = {"relaxd.sync_id": request.sync_id, "relaxd.version": request.weights.version}
        with telemetry.tracer().start_as_current_span("broadcast", attributes=attributes, links=[link] if link else []):
            # A single rank holds its weights itself.
            async with _held(world.rank0, request) if len(world.ranks) > 1 else contextlib.nullcontext():
                try:
                    part = rank_pb.BroadcastVersionsRequest(broadcast=request)
                    results = await _first_error(
                        rank.broadcast(part, timeout=seconds + HOLD_MARGIN_SECONDS) for rank in world.gatherers
                    )
                except FailedPrecondition:  # refused before it began: the group is as it was
                    raise
                except BaseException:
                    await self._leave(world, request.group_name)
                    raise
        return pb.BroadcastWeightsResponse(
            seconds=max(result.sent.seconds for result in results),
            bytes=sum(result.sent.bytes for result in results),
            checksums={name: value for result in results for name, value in result.sent.checksums.items()},
        )

    async def LeaveWeightGroup(
        self, request: pb.TrainerLeaveWeightGroupRequest, context: Any
    ) -> pb.TrainerLeaveWeightGroupResponse:
        """Abort a weight group, even during a broadcast, and leave it. Do nothing if the trainer isn't in the group."""
        if request.sync_id:
            self._sync_ids.take(request.sync_id)
        world = self._service.world
        if world is not None and world.ready:
            await self._leave(world, request.group_name)
        return pb.TrainerLeaveWeightGroupResponse()

    async def ExportHuggingFace(
        self, request: pb.ExportHuggingFaceRequest, context: Any
    ) -> pb.ExportHuggingFaceResponse:
        """Export the current weights below the run folder, in Hugging Face's format."""
        rank0 = self._ready_world().rank0
        try:
            request.folder = str(export_folder(self._service.run_folder, request.folder))
        except ValueError as error:
            raise InvalidArgument(str(error), [("folder", str(error))]) from error
        return await rank0.trainer.ExportHuggingFace(request, timeout=self._seconds_left(context))

    async def SaveCheckpoint(
        self, request: pb.TrainerSaveCheckpointRequest, context: Any
    ) -> pb.TrainerSaveCheckpointResponse:
        """Take a checkpoint and wait until it is on disk."""
        rank0 = self._ready_world().rank0
        return await rank0.trainer.SaveCheckpoint(request, timeout=self._seconds_left(context))

    async def Sleep(self, request: pb.TrainerSleepRequest, context: Any) -> pb.TrainerSleepResponse:
        """Move the training state from the devices to the host's memory."""
        world = self._world_to_switch(request.timeout_seconds)
        if not world.colocated:
            raise FailedPrecondition("this run isn't colocated (run.colocate): the trainer would never be woken up")
        self._sync_ids.take(request.sync_id)
        response = await world.rank0.trainer.Sleep(request, timeout=request.timeout_seconds)
        world.awake = False
        return response

    async def Wake(self, request: pb.TrainerWakeRequest, context: Any) -> pb.TrainerWakeResponse:
        """Move the training state back to the devices."""
        world = self._world_to_switch(request.timeout_seconds, request.metrics)
        self._sync_ids.take(request.sync_id)
        world.awake = True
        return await world.rank0.trainer.Wake(request, timeout=request.timeout_seconds)

    async def Profile(self, request: pb.TrainerProfileRequest, context: Any) -> pb.TrainerProfileResponse:
        """Plan to profile the next steps on the requested ranks."""
        world = self._ready_world()
        violations = Violations()
        violations.check(
            1 <= request.steps <= MAX_PROFILED, "steps", f"is {request.steps}: it must be from 1 to {MAX_PROFILED}"
        )
        last = len(world.ranks) - 1
        for index, rank in enumerate(request.ranks):
            violations.check(0 <= rank <= last, f"ranks[{index}]", f"is {rank}: it must be from 0 to {last}")
        violations.raise_if_any()
        if not request.ranks:
            request.ranks.append(0)
        return await world.rank0.trainer.Profile(request, timeout=CONTROL_SECONDS)

    def _world_to_switch(self, seconds: float, metrics: Mapping[str, float] | None = None) -> RankSupervisor:
        violations = Violations()
        violations.check_seconds(seconds, "timeout_seconds")
        for name, value in (metrics or {}).items():
            violations.check(math.isfinite(value), f"metrics[{name!r}]", f"is {value}: it must be finite")
        violations.raise_if_any()
        return self._ready_world()

    def _seconds_left(self, context: Any) -> float:
        remaining = context.time_remaining()
        return self._settings.deadline_seconds if remaining is None else remaining

    def _ready_world(self) -> RankSupervisor:
        world = self._service.world
        if world is None:
            raise FailedPrecondition("the trainer has no run")
        if not world.ready:
            raise Unavailable(f"the trainer has no weights yet: {world.detail}")
        return world

    async def _leave(self, world: RankSupervisor, name: str) -> None:
        if self._group is not None and self._group[1] == name:
            self._group = None
        request = pb.TrainerLeaveWeightGroupRequest(group_name=name)
        with contextlib.suppress(RpcError):  # a dead rank has left
            await _first_error(rank.leave(request, timeout=LEAVE_SECONDS) for rank in world.senders)


@contextlib.asynccontextmanager
async def _held(rank0: RankProcess, request: pb.BroadcastWeightsRequest) -> AsyncIterator[None]:
    """Keep the optimizers from changing the weights during the block. Raises Aborted if the block took too long."""
    hold = rank_pb.HoldWeightsRequest(weights=request.weights, seconds=request.timeout_seconds + HOLD_MARGIN_SECONDS)
    held = await rank0.control.HoldWeights(hold, timeout=CONTROL_SECONDS)
    try:
        yield
    finally:
        release = rank_pb.ReleaseWeightsRequest(hold=held.hold)
        released = await rank0.control.ReleaseWeights(release, timeout=LEAVE_SECONDS)
    if not released.in_time:
        raise Aborted(f"the broadcast took longer than {request.timeout_seconds:g} s")


async def _first_error(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await calls concurrently, and return their results. The first error is raised at once and cancels the others."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _advertised_host(settings: ServiceSettings) -> str:
    """Return the host name or address at which other services reach this process."""
    return advertised_address(settings, 0).rpartition(":")[0].strip("[]")


def _store_host(settings: ServiceSettings) -> str:
    """Return the host on which the ranks' store listens: this service's, or "" (all) if it advertises another."""
    advertised = settings.advertise.rpartition(":")[0]
    return "" if advertised and not is_loopback(advertised) else settings.host.strip("[]")
