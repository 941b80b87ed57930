"""The Coordinator service: requests are checked here, and answered by the parts that know."""

import re
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from relaxd import PROTOCOL_VERSION, __version__
from relaxd.rpc.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
    Violations,
    explain,
    shortened,
)
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1.coordinator_pb2_grpc import CoordinatorServicer
from relaxd.v1.replica_pb2 import ROLE_COORDINATOR, ROLE_UNSPECIFIED, DrainRequest, Role, WeightVersion
from services.coordinator.checkpoint_calls import CheckpointCalls
from services.coordinator.manager import RunManager, read_board
from services.coordinator.peers import Peers
from services.coordinator.records import Announcement
from services.coordinator.registry import Registry
from services.coordinator.scale_calls import ScalingCalls
from services.coordinator.scaling import Scaler
from services.coordinator.starting import check_run_id
from services.coordinator.view import sample_message
from services.coordinator.watch import watch

REPLICA_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
ADDRESS = re.compile(r"[A-Za-z0-9.\[\]:_-]{1,200}:[0-9]{1,5}")
GPU_UUID = re.compile(r"(GPU|MIG)-[A-Za-z0-9/_-]{1,120}")
LONGEST_LAUNCH_ID = 300
LONGEST_NAME = 300
MOST_STATUS_BYTES = 1 << 18
LONGEST_REASON = 2000
MOST_SAMPLES = 1000
MOST_RANKS = 4096
MOST_GPUS = 1024
"""Of one replica."""
DRAIN_SECONDS = 25.0


class CoordinatorService(CheckpointCalls, ScalingCalls, CoordinatorServicer):
    """Answers every call of the Coordinator."""

    def __init__(self, manager: RunManager, registry: Registry, peers: Peers, scaler: Scaler) -> None:
        super().__init__(scaler)
        self._manager = manager
        self._registry = registry
        self._peers = peers

    # --- runs -----------------------------------------------------------------------------------------------------

    async def StartRun(self, request: pb.StartRunRequest, context: Any) -> pb.StartRunResponse:
        """Create a run and start it."""
        active = await self._manager.start(request.run_id, request.config_toml)
        return pb.StartRunResponse(run=await self._manager.message(active.record))

    async def GetRun(self, request: pb.GetRunRequest, context: Any) -> pb.GetRunResponse:
        """Say how a run is doing."""
        _checked_run_id(request.run_id)
        return pb.GetRunResponse(run=await self._manager.message(await self._manager.record(request.run_id)))

    async def ListRuns(self, request: pb.ListRunsRequest, context: Any) -> pb.ListRunsResponse:
        """List every run."""
        return pb.ListRunsResponse(runs=[await self._manager.message(record) for record in await self._manager.all()])

    async def WatchRun(self, request: pb.WatchRunRequest, context: Any) -> AsyncIterator[pb.WatchRunResponse]:
        """Stream what happens in a run, for a bounded time."""
        async for message in watch(self._manager, self._registry.changed, request):
            yield message

    async def PauseRun(self, request: pb.PauseRunRequest, context: Any) -> pb.PauseRunResponse:
        """Pause the active run."""
        active = self._manager.require_active(_checked_run_id(request.run_id))
        await active.pause(shortened(request.reason, LONGEST_REASON))
        return pb.PauseRunResponse(run=await self._manager.message(active.record))

    async def ResumeRun(self, request: pb.ResumeRunRequest, context: Any) -> pb.ResumeRunResponse:
        """End a pause."""
        active = self._manager.require_active(_checked_run_id(request.run_id))
        await active.resume()
        return pb.ResumeRunResponse(run=await self._manager.message(active.record))

    async def StopRun(self, request: pb.StopRunRequest, context: Any) -> pb.StopRunResponse:
        """End the active run early."""
        active = self._manager.require_active(_checked_run_id(request.run_id))
        await active.stop(shortened(request.reason, LONGEST_REASON))
        return pb.StopRunResponse(run=await self._manager.message(active.record))

    async def DeleteRun(self, request: pb.DeleteRunRequest, context: Any) -> pb.DeleteRunResponse:
        """Forget a run that has ended."""
        violations = Violations()
        check_run_id(request.run_id, violations, optional=False)
        violations.raise_if_any()
        await self._manager.delete(request.run_id)
        return pb.DeleteRunResponse()

    async def ListSamples(self, request: pb.ListSamplesRequest, context: Any) -> pb.ListSamplesResponse:
        """Show what the model wrote."""
        violations = Violations()
        check_run_id(request.run_id, violations)
        violations.check(0 <= request.limit <= MOST_SAMPLES, "limit", f"must be 0 to {MOST_SAMPLES}; 0 means 16")
        violations.check(request.step >= 0, "step", "must not be negative; 0 means the newest samples")
        violations.raise_if_any()
        board = self._manager.board(await self._manager.record(request.run_id))
        samples = await read_board(board.samples, request.step or None, request.limit or 16)
        return pb.ListSamplesResponse(samples=[sample_message(sample) for sample in reversed(samples)])

    # --- replicas -------------------------------------------------------------------------------------------------

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        """Make a replica known."""
        violations = Violations()
        violations.check(
            REPLICA_ID.fullmatch(request.replica_id),
            "replica_id",
            "must be 1 to 128 letters, digits, dots, dashes and underscores, the first one a letter or digit",
        )
        known = request.role in Role.values() and request.role not in (ROLE_UNSPECIFIED, ROLE_COORDINATOR)
        violations.check(known, "role", "must be rollout, reward, advantage or trainer")
        violations.check(ADDRESS.fullmatch(request.address), "address", "must be host:port")
        violations.check(0 <= request.engine_ranks <= MOST_RANKS, "engine_ranks", f"must be 0 to {MOST_RANKS}")
        violations.check(len(request.gpu_uuids) <= MOST_GPUS, "gpu_uuids", f"must be at most {MOST_GPUS}")
        longest = max(map(len, (*request.gpu_uuids, request.package_version)), default=0)
        wanted = f"and package_version must be at most {LONGEST_NAME} characters long"
        violations.check(longest <= LONGEST_NAME, "gpu_uuids", wanted)
        violations.check(len(request.launch_id) <= LONGEST_LAUNCH_ID, "launch_id", "must be one that was launched")
        violations.raise_if_any()
        if request.protocol_version != PROTOCOL_VERSION:
            raise FailedPrecondition(
                f"{request.replica_id} (relaxd {request.package_version or 'of unknown version'}) speaks protocol "
                f"version {request.protocol_version}, this coordinator (relaxd {__version__}) speaks "
                f"{PROTOCOL_VERSION}: run the same release everywhere"
            )
        await self._registry.register(request)
        return pb.RegisterResponse(
            lease_seconds=self._registry.lease_seconds,
            heartbeat_seconds=self._registry.heartbeat_seconds,
            assignment=self._manager.assignment(),
            gpu_lease_seconds=self._registry.gpu_lease_seconds,
        )

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatResponse:
        """Renew a lease."""
        size = request.status.ByteSize()
        if size > MOST_STATUS_BYTES:
            problem = f"has {size} bytes: at most {MOST_STATUS_BYTES} are kept"
            raise InvalidArgument(f"status {problem}", [("status", problem)])
        replica = self._registry.heartbeat(request.replica_id, request.status)
        if replica is None:
            raise NotFound(f"no replica {request.replica_id!r} is registered: register again")
        until = replica.drain_until
        return pb.HeartbeatResponse(
            assignment=self._manager.assignment(),
            drain=replica.draining,
            drain_seconds=None if until is None else max(0.0, until - time.time()),
            gpu_lease_seconds=self._registry.gpu_lease_seconds,
        )

    async def ListReplicas(self, request: pb.ListReplicasRequest, context: Any) -> pb.ListReplicasResponse:
        """List the replicas whose lease holds."""
        now = time.monotonic()
        return pb.ListReplicasResponse(
            replicas=[
                pb.ReplicaInfo(
                    registration=r.registration,
                    status=r.status,
                    heartbeat_age_seconds=now - r.seen,
                    leased_gpu_uuids=self._registry.gpus_of(r.replica_id),
                )
                for r in self._registry.all()
                if request.role in (ROLE_UNSPECIFIED, r.registration.role)
            ]
        )

    async def DrainReplica(self, request: pb.DrainReplicaRequest, context: Any) -> pb.DrainReplicaResponse:
        """Ask one replica to take nothing more and to finish what it has."""
        replica = self._registry.get(request.replica_id)
        if replica is None:
            raise NotFound(f"no replica {request.replica_id!r} is registered")
        await self._registry.drain(replica)
        try:
            stub = self._peers.replica(replica.registration.address)
            seconds = min(DRAIN_SECONDS, context.time_remaining() or DRAIN_SECONDS)
            answer = await stub.Drain(DrainRequest(), timeout=seconds)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                return pb.DrainReplicaResponse(held_groups=replica.status.held_groups)
            raise Unavailable(
                f"{request.replica_id} was asked to drain, but doesn't answer: {explain(error)}"
            ) from error
        return pb.DrainReplicaResponse(held_groups=answer.held_groups)

    async def LeaseGpus(self, request: pb.LeaseGpusRequest, context: Any) -> pb.LeaseGpusResponse:
        """Let a replica hold GPUs that nobody else holds."""
        candidates = request.candidate_uuids
        violations = Violations()
        violations.check(REPLICA_ID.fullmatch(request.replica_id), "replica_id", "must be the replica's id")
        violations.check(request.count >= 0, "count", f"is {request.count}: it must not be negative")
        violations.check(len(candidates) <= MOST_GPUS, "candidate_uuids", f"must be at most {MOST_GPUS}")
        for index, uuid in enumerate(candidates[:MOST_GPUS]):
            violations.check(
                GPU_UUID.fullmatch(uuid), f"candidate_uuids[{index}]", f"is {uuid!r}: it must be GPU-... or MIG-..."
            )
        violations.check(len(set(candidates)) == len(candidates), "candidate_uuids", "names a GPU twice")
        violations.raise_if_any()
        shared = self._manager.active is not None and self._manager.active.config.run.colocate
        granted = await self._registry.lease_gpus(request.replica_id, candidates, request.count, shared=shared)
        return pb.LeaseGpusResponse(gpu_uuids=granted)

    async def TakeTurn(self, request: pb.TakeTurnRequest, context: Any) -> pb.TakeTurnResponse:
        """Let a replica of a colocated run start what it has none of, once the other side sleeps."""
        replica = self._registry.get(request.replica_id)
        if replica is None:
            raise NotFound(f"no replica {request.replica_id!r} is registered: register first")
        turns = self._manager.require_active("").turns
        if turns is None:
            raise FailedPrecondition("the active run is not colocated: nobody takes turns")
        reason = turns.take_turn(replica)
        return pb.TakeTurnResponse(granted=not reason, reason=reason)

    # --- weights --------------------------------------------------------------------------------------------------

    async def AnnounceVersion(self, request: pb.AnnounceVersionRequest, context: Any) -> pb.AnnounceVersionResponse:
        """Remember that new weights can be fetched."""
        violations = Violations()
        check_run_id(request.run_id, violations, optional=False)
        violations.check(REPLICA_ID.fullmatch(request.replica_id), "replica_id", "must be the trainer's id")
        violations.check(request.weights.epoch > 0, "weights.epoch", "must be the trainer's epoch, at least 1")
        violations.check(request.weights.version >= 0, "weights.version", "must not be negative")
        violations.raise_if_any()
        sync = self._manager.require_active(request.run_id).sync
        before, weights = sync.announced, request.weights
        if before is not None and (weights.epoch, weights.version) < (before.epoch, before.version):
            raise FailedPrecondition(
                f"version {weights.version} of epoch {weights.epoch} is older than what was announced last: version "
                f"{before.version} of epoch {before.epoch}"
            )
        await sync.announce(
            Announcement(
                run_id=request.run_id,
                replica_id=request.replica_id,
                epoch=weights.epoch,
                version=weights.version,
            )
        )
        return pb.AnnounceVersionResponse()

    async def SyncWeights(self, request: pb.SyncWeightsRequest, context: Any) -> pb.SyncWeightsResponse:
        """Wait until every engine serves the newest version."""
        active = self._manager.require_active(_checked_run_id(request.run_id))
        started = time.monotonic()
        if active.sync.announced is None:
            raise FailedPrecondition("the trainer has not announced any version yet")
        while not active.sync.up_to_date():
            remaining = context.time_remaining()
            if remaining is not None and remaining < 1.0:
                raise Unavailable(f"not every engine serves it yet: {active.sync.last_failure or 'still under way'}")
            self._manager.require_active(active.record.run_id)
            await self._registry.changed.wait(0.5)
        announced = active.sync.announced
        return pb.SyncWeightsResponse(
            weights=WeightVersion(epoch=announced.epoch, version=announced.version),
            seconds=time.monotonic() - started,
            replica_ids=[engine.replica_id for engine in active.fleet.engines()],
        )

    async def GetWeights(self, request: pb.GetWeightsRequest, context: Any) -> pb.GetWeightsResponse:
        """Say which version each engine serves."""
        active = self._manager.require_active(_checked_run_id(request.run_id))
        sync = active.sync
        response = pb.GetWeightsResponse(
            last_sync_id=sync.record.last_sync_id, last_sync_seconds=sync.record.last_sync_seconds
        )
        if sync.announced is not None:
            response.announced.epoch, response.announced.version = sync.announced.epoch, sync.announced.version
        for engine in active.fleet.engines():
            served = response.engines.add(replica_id=engine.replica_id)
            if engine.version is not None:
                served.weights.epoch, served.weights.version = engine.version
        return response


def _checked_run_id(run_id: str) -> str:
    violations = Violations()
    check_run_id(run_id, violations)
    violations.raise_if_any()
    return run_id
