"""The trainer's gRPC handlers, and its part in a run as a replica. The parent process never imports torch."""

import asyncio
import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from relaxd import telemetry
from relaxd.config import RunConfig
from relaxd.process.child import ChildError
from relaxd.process.json_child import ChildRequestError, ChildTimeout
from relaxd.replica.context import ReplicaContext
from relaxd.replica.gpus import gpu_environment
from relaxd.replica.replica import advertised_address
from relaxd.replica.service import ReplicaService, ServiceStatus
from relaxd.replica.sync_ids import SyncIds
from relaxd.rpc.errors import (
    Aborted,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    Unavailable,
    Violations,
)
from relaxd.rpc.security import is_loopback
from relaxd.rpc.settings import ServiceSettings
from relaxd.v1 import coordinator_pb2, replica_pb2, trainer_pb2, trainer_pb2_grpc, weights_pb2
from relaxd.weights.environment import NCCL_ENVIRONMENT
from services.trainer.service.export import export_folder
from services.trainer.service.rank_supervisor import RankSupervisor

TRANSPORTS = ("gloo", "nccl", "cuda_ipc")
LEAVE_SECONDS = 5.0
"""Deadline for leaving a group, which only sets a flag and closes connections."""
HOLD_MARGIN_SECONDS = 1.0
"""The hold on the weights outlasts the broadcast's deadline by this much, so that they never change during one."""
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""Environment that makes torch allocate host memory in huge pages, which speeds up a checkpoint's copies."""


class TrainerService(ReplicaService):
    """The trainer as a replica."""

    role = replica_pb2.ROLE_TRAINER

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context
        self._settings = context.settings
        self._living: asyncio.Task[None] | None = None
        self.world: RankSupervisor | None = None
        self.run_folder = Path()

    async def start_run(self, config: RunConfig, assignment: coordinator_pb2.Assignment) -> None:
        """Start the run's ranks, which load, replay and train on their own; `status` reports their progress."""
        self.run_folder = Path(assignment.folder)
        gpus = await self._context.gpus.lease(config.trainer.ranks)
        start = {
            "config": config.model_dump_json(),
            "run_id": assignment.run_id,
            "folder": assignment.folder,
            "redis": self._settings.redis,
            "store_host": _store_host(self._settings),
            "replica_id": self._settings.replica_id,
            "log_level": self._settings.log_level,
            "ranks": config.trainer.ranks,
            "paused": False,  # pause_run follows, if it is
        }
        take_turn = self._context.take_turn if config.run.colocate else None
        environment = gpu_environment(gpus) | NCCL_ENVIRONMENT | (HUGE_PAGES if gpus else {})
        gpu_lease = self._context.gpus.child_lease if gpus else None
        self.world = RankSupervisor(self._settings, start, environment, take_turn, gpu_lease)
        self._living = asyncio.create_task(self.world.live(), name="world")

    async def stop_run(self) -> None:
        """Hand back held groups and end the ranks."""
        if self.world is not None:
            await self.world.drain(1.0)
        if self._living is not None:
            self._living.cancel()
            await asyncio.wait({self._living})  # `await` would confuse this task's cancellation with its
        self._living = self.world = None

    async def drain(self, seconds: float) -> int:
        """Stop taking groups and hand back the held ones."""
        return await self.world.drain(seconds) if self.world else 0

    async def pause_run(self) -> None:
        """Keep steps from closing."""
        if self.world:
            await self.world.set_paused(True)

    async def resume_run(self) -> None:
        """Let steps close again."""
        if self.world:
            await self.world.set_paused(False)

    def status(self) -> ServiceStatus:
        """Return the ranks' last report."""
        world = self.world
        if world is None:
            return ServiceStatus()
        return ServiceStatus(
            held_groups=world.held_groups,
            done_groups=world.done_groups,
            progress=world.iterations,
            detail=world.detail,
            state=world.state,
            weights=world.weights if world.ready else None,
            awake=world.awake,
            gauges={"ranks": float(len(world.pids)), **{f"rank{i}_pid": float(p) for i, p in enumerate(world.pids)}},
        )


class TrainerServicer(trainer_pb2_grpc.TrainerServicer):
    """Handlers of relaxd.v1.Trainer."""

    def __init__(self, service: TrainerService, settings: ServiceSettings) -> None:
        self._service = service
        self._settings = settings
        self._sync_ids = SyncIds()
        self._group: tuple[int, str] | None = None
        """Term and name of the group that the source ranks are in."""

    async def GetWeightManifest(
        self, request: trainer_pb2.GetWeightManifestRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> trainer_pb2.GetWeightManifestResponse:
        """Return the manifest of a broadcast and the address of the ranks' store."""
        world = self._ready_world()
        # The store has this process's advertised host and its own port.
        host, _, _ = advertised_address(self._settings, 0).rpartition(":")
        return trainer_pb2.GetWeightManifestResponse(
            manifest=world.manifest,
            source_ranks=world.source_ranks,
            store_host=host.strip("[]"),
            store_port=world.store_port,
            weights=world.weights,
        )

    async def JoinWeightGroup(
        self, request: trainer_pb2.TrainerJoinWeightGroupRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> trainer_pb2.TrainerJoinWeightGroupResponse:
        """Connect the source ranks to the engines."""
        group = request.group
        world = self._ready_world()
        violations = Violations()
        violations.check(group.name, "group.name", "is empty: it must be a name that was never used before")
        violations.check(
            group.transport in TRANSPORTS,
            "group.transport",
            f'is "{group.transport}": it must be {" or ".join(TRANSPORTS)}',
        )
        violations.check(
            group.world_size > world.source_ranks,
            "group.world_size",
            f"is {group.world_size}: it must be above the {world.source_ranks} source ranks",
        )
        violations.check_seconds(group.timeout_seconds, "group.timeout_seconds")
        violations.check(
            0 <= group.store_port < 65536, "group.store_port", f"is {group.store_port}: it must be 0 to 65535"
        )
        violations.raise_if_any()
        self._sync_ids.take(request.sync_id)
        params = {
            "transport": group.transport,
            "host": group.store_host or "127.0.0.1",
            "port": group.store_port or world.store_port,
            "name": group.name,
            "world_size": group.world_size,
            "timeout": group.timeout_seconds,
        }
        self._group = (world.term, group.name)
        with _translate_errors(f"join weight group {group.name}"):
            try:
                await _request_all(world, world.senders, "join_group", params, group.timeout_seconds + 1.0)
            except BaseException:
                await self._leave(world, group.name)
                raise
        return trainer_pb2.TrainerJoinWeightGroupResponse()

    async def BroadcastWeights(
        self, request: trainer_pb2.BroadcastWeightsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> trainer_pb2.BroadcastWeightsResponse:
        """Broadcast the weights once. The optimizer waits until it ends."""
        world = self._ready_world()
        seconds = request.timeout_seconds
        violations = Violations()
        violations.check_seconds(seconds, "timeout_seconds")
        violations.raise_if_any()
        self._sync_ids.take(request.sync_id)
        if self._group != (world.term, request.group_name):
            raise FailedPrecondition(f'this trainer is not in weight group "{request.group_name}": join it first')
        version = {"term": request.weights.term, "version": request.weights.version}
        link = telemetry.link_from(world.step_trace)
        attributes = {"relaxd.sync_id": request.sync_id, "relaxd.version": request.weights.version}
        with (
            telemetry.tracer().start_as_current_span("broadcast", attributes=attributes, links=[link] if link else []),
            _translate_errors(f"broadcast version {request.weights.version}"),
        ):
            hold = await world.request(0, "hold", {**version, "seconds": seconds + HOLD_MARGIN_SECONDS}, 10.0)
            params = {"name": request.group_name, "timeout": seconds, "with_checksums": request.checksum}
            in_time = False
            try:
                results = await _request_all(world, world.gatherers, "broadcast", params, seconds + HOLD_MARGIN_SECONDS)
            except BaseException:
                await self._leave(world, request.group_name)
                raise
            finally:
                in_time = await world.request(0, "release", {"hold": hold}, LEAVE_SECONDS)
            if not in_time:
                raise Aborted(f"the broadcast took longer than {seconds:g} s")
        return trainer_pb2.BroadcastWeightsResponse(
            seconds=max(result["seconds"] for result in results),
            bytes=sum(result["bytes"] for result in results),
            checksums={name: value for result in results for name, value in result["checksums"].items()},
        )

    async def LeaveWeightGroup(
        self, request: trainer_pb2.TrainerLeaveWeightGroupRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> trainer_pb2.TrainerLeaveWeightGroupResponse:
        """Abort and forget a group, even during a broadcast. Do nothing if the trainer isn't in it."""
        if request.sync_id:
            self._sync_ids.take(request.sync_id)
        world = self._service.world
        if world is not None and world.ready:
            await self._leave(world, request.group_name)
        return trainer_pb2.TrainerLeaveWeightGroupResponse()

    async def ExportHuggingFace(
        self, request: trainer_pb2.ExportHuggingFaceRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> trainer_pb2.ExportHuggingFaceResponse:
        """Write the current weights as a Hugging Face folder."""
        world = self._ready_world()
        try:
            target = export_folder(self._service.run_folder, request.folder)
        except ValueError as error:
            raise InvalidArgument(str(error), [("folder", str(error))]) from error
        term = world.term
        seconds = self._seconds_left(context)
        with _translate_errors(f"export to {target}"):
            version = await world.request(0, "export", {"folder": str(target), "seconds": seconds}, seconds)
        return trainer_pb2.ExportHuggingFaceResponse(
            path=str(target), weights=replica_pb2.WeightVersion(term=term, version=version)
        )

    async def SaveCheckpoint(
        self, request: trainer_pb2.TrainerSaveCheckpointRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> trainer_pb2.TrainerSaveCheckpointResponse:
        """Take a checkpoint and wait until it is on disk."""
        world = self._ready_world()
        term = world.term
        seconds = self._seconds_left(context)
        with _translate_errors("take a checkpoint"):
            saved = await world.request(0, "checkpoint", {"seconds": seconds}, seconds)
        return trainer_pb2.TrainerSaveCheckpointResponse(
            path=saved["path"], weights=replica_pb2.WeightVersion(term=term, version=saved["step"])
        )

    async def Sleep(
        self, request: trainer_pb2.TrainerSleepRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> trainer_pb2.TrainerSleepResponse:
        """Move everything from the devices to the host's memory."""
        memory = await self._change_sleep(request, asleep=True, metrics={})
        return trainer_pb2.TrainerSleepResponse(memory=memory)

    async def Wake(
        self, request: trainer_pb2.TrainerWakeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> trainer_pb2.TrainerWakeResponse:
        """Move everything back to the devices."""
        memory = await self._change_sleep(request, asleep=False, metrics=request.metrics)
        return trainer_pb2.TrainerWakeResponse(memory=memory)

    async def _change_sleep(
        self,
        request: trainer_pb2.TrainerSleepRequest | trainer_pb2.TrainerWakeRequest,
        *,
        asleep: bool,
        metrics: Mapping[str, float],
    ) -> weights_pb2.MemoryChange:
        seconds = request.timeout_seconds
        violations = Violations()
        violations.check_seconds(seconds, "timeout_seconds")
        for name, value in metrics.items():
            violations.check(math.isfinite(value), f"metrics[{name!r}]", f"is {value}: it must be finite")
        violations.raise_if_any()
        world = self._ready_world()
        if asleep and not world.colocated:
            raise FailedPrecondition("this run isn't colocated (run.colocate): the trainer would never be woken up")
        self._sync_ids.take(request.sync_id)
        with _translate_errors("sleep" if asleep else "wake up"):
            change = await world.change_sleep(asleep=asleep, metrics=metrics, seconds=seconds)
        return weights_pb2.MemoryChange(
            before_bytes=change["before"], after_bytes=change["after"], seconds=change["seconds"]
        )

    def _seconds_left(self, context: grpc.aio.ServicerContext[Any, Any]) -> float:
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
        with contextlib.suppress(ChildError, Unavailable):  # a dead rank has left
            await _request_all(world, world.senders, "leave_group", {"name": name}, LEAVE_SECONDS)


async def _request_all(
    world: RankSupervisor, ranks: Sequence[int], method: str, params: dict[str, Any], timeout: float
) -> list[Any]:
    """Send a request to several ranks at once. The first error ends the wait for the others."""
    tasks = [asyncio.create_task(world.request(rank, method, params, timeout)) for rank in ranks]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


@contextmanager
def _translate_errors(action: str) -> Iterator[None]:
    """Translate errors of the ranks into gRPC errors."""
    try:
        yield
    except ChildRequestError as error:
        if error.kind == "Late":
            raise DeadlineExceeded(f"could not {action}: {error}") from error
        if error.kind == "HoldRefused":
            raise FailedPrecondition(f"could not {action}: {error}") from error
        if error.kind == "WeightGroupError":  # caused by other members, not by this trainer
            raise Aborted(f"could not {action}: {error}") from error
        raise Unavailable(f"could not {action}: {error.kind}: {error}") from error
    except ChildTimeout as error:
        raise DeadlineExceeded(f"could not {action}: {error}") from error
    except ChildError as error:
        raise Unavailable(f"could not {action}: {error}") from error


def _store_host(settings: ServiceSettings) -> str:
    """Return the listening host of the weight groups' store: this service's, or "" for all if it advertises another."""
    advertised = settings.advertise.rpartition(":")[0]
    return "" if advertised and not is_loopback(advertised) else settings.host.strip("[]")
