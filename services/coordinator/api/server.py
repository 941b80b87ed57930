"""The Coordinator service: every RPC checks its request here and passes the work to other modules. Also the server that
tells KEDA the desired number of rollout replicas (external_scaler.proto)."""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from relaxd import PROTOCOL_VERSION, __version__
from relaxd.client.metric_series import read_series
from relaxd.roles import REPLICA_ROLES
from relaxd.rpc.access import speak_for
from relaxd.rpc.credentials import ServerSecurity
from relaxd.rpc.errors import FailedPrecondition, NotFound, Unavailable, Violations, explain, shortened
from relaxd.rpc.message_parts import Page, newest_first, watch_seconds
from relaxd.rpc.server import RunningServer, Service, start_server
from relaxd.rpc.service_settings import ServiceSettings
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1 import external_scaler_pb2 as keda_pb
from relaxd.v1 import external_scaler_pb2_grpc, scaling_pb2
from relaxd.v1.coordinator_pb2_grpc import CoordinatorServicer
from relaxd.v1.replica_pb2 import DrainRequest, WeightVersion
from services.coordinator.api.validation import (
    autoscale_mode,
    check_announcement,
    check_gpu_request,
    check_logs_request,
    check_metrics_request,
    check_registration,
    check_role,
    check_status_size,
    checked_run_id,
    scale_filter,
    scale_in_spec,
    scale_out_spec,
)
from services.coordinator.api.watch_streams import ReplicaFeed, RunFeed
from services.coordinator.fleet.checkpoints import NoCriticCheckpoint, await_critic, save_checkpoint
from services.coordinator.fleet.peers import Peers
from services.coordinator.fleet.registry import Registry, Replica
from services.coordinator.runs.run_manager import RunManager
from services.coordinator.runs.run_messages import find_groups, group_tests, read_logs, sample_message, token_texts
from services.coordinator.runs.starting import check_run_id
from services.coordinator.scaling.autoscaler import Autoscaler
from services.coordinator.scaling.scale_log import MAX_REQUESTS, scale_message
from services.coordinator.scaling.scaler import Scaler
from services.coordinator.state.records import Announcement
from services.coordinator.state.store import read_board

MAX_REASON_BYTES = 2000
MAX_PAGE = 1000
SAMPLE = re.compile(r"[^/\n]+/[0-9]{1,18}-[0-9]{1,18}", re.ASCII)
"""Pattern of a sample's name: the run's id, a slash and the sample's key on the board."""
DRAIN_SECONDS = 25.0
"""Maximum time for a replica's drain, in seconds; also the default."""


class CoordinatorService(CoordinatorServicer):
    """Implements relaxd.v1.Coordinator: runs, replicas and scale requests."""

    def __init__(
        self,
        manager: RunManager,
        registry: Registry,
        replica_feed: ReplicaFeed,
        peers: Peers,
        scaler: Scaler,
        autoscaler: Autoscaler,
        *,
        logs: str = "",
    ) -> None:
        self._manager = manager
        self._feed = RunFeed(manager)
        self._registry = registry
        self._replica_feed = replica_feed
        self._peers = peers
        self._scaler = scaler
        self._autoscaler = autoscaler
        self._logs = logs

    # --- runs -----------------------------------------------------------------------------------------------------

    async def StartRun(self, request: pb.StartRunRequest, context: Any) -> pb.StartRunResponse:
        """Create a run and start it."""
        record = await self._manager.start(request.run_id, request.config_toml, request.request_id)
        return pb.StartRunResponse(run=await self._manager.message(record))

    async def GetRun(self, request: pb.GetRunRequest, context: Any) -> pb.GetRunResponse:
        """Return a run. If the request has no run id, return the newest run."""
        checked_run_id(request.run_id)
        return pb.GetRunResponse(run=await self._manager.message(await self._manager.record(request.run_id)))

    async def ListRuns(self, request: pb.ListRunsRequest, context: Any) -> pb.ListRunsResponse:
        """Return a page of the runs, newest first."""
        page = Page[pb.Run](request, "runs", default=50, maximum=MAX_PAGE)
        async for key, run in self._manager.summaries(page.after):
            if not page.add(key, run):
                break
        return pb.ListRunsResponse(runs=page.items, next_page_token=page.next_page_token)

    async def WatchRun(self, request: pb.WatchRunRequest, context: Any) -> AsyncIterator[pb.WatchRunResponse]:
        """Stream the changes of a run for a limited time."""
        async for message in self._feed.watch(self._registry.changed, request):
            yield message

    async def PauseRun(self, request: pb.PauseRunRequest, context: Any) -> pb.PauseRunResponse:
        """Pause the active run."""
        active = self._manager.require_active(checked_run_id(request.run_id))
        await active.pause(shortened(request.reason, MAX_REASON_BYTES))
        return pb.PauseRunResponse(run=await self._manager.message(active.record))

    async def ResumeRun(self, request: pb.ResumeRunRequest, context: Any) -> pb.ResumeRunResponse:
        """Resume the paused run."""
        active = self._manager.require_active(checked_run_id(request.run_id))
        await active.resume()
        return pb.ResumeRunResponse(run=await self._manager.message(active.record))

    async def StopRun(self, request: pb.StopRunRequest, context: Any) -> pb.StopRunResponse:
        """Stop the active run early."""
        active = self._manager.require_active(checked_run_id(request.run_id))
        await active.stop(shortened(request.reason, MAX_REASON_BYTES))
        return pb.StopRunResponse(run=await self._manager.message(active.record))

    async def DeleteRun(self, request: pb.DeleteRunRequest, context: Any) -> pb.DeleteRunResponse:
        """Delete an ended run from Redis. The run's folder stays."""
        await self._manager.delete(checked_run_id(request.run_id, optional=False))
        return pb.DeleteRunResponse()

    async def GetMetrics(self, request: pb.GetMetricsRequest, context: Any) -> pb.GetMetricsResponse:
        """Return metrics of a run's steps, from its metrics.jsonl."""
        check_metrics_request(request)
        record = await self._manager.record(request.run_id)
        series = await asyncio.to_thread(read_series, Path(record.folder), request)
        return pb.GetMetricsResponse(series=series)

    async def ListSamples(self, request: pb.ListSamplesRequest, context: Any) -> pb.ListSamplesResponse:
        """Return a page of a run's trained samples, newest first."""
        violations = Violations()
        check_run_id(request.run_id, violations)
        violations.check(request.step >= 0, "step", "must not be negative; 0 means the newest samples")
        listed = f"samples {request.run_id} {request.step}{' with tokens' * request.with_tokens}"
        page = Page[pb.TrainedSample](request, listed, default=16, maximum=MAX_PAGE, violations=violations)
        violations.check(not page.after or SAMPLE.fullmatch(page.after), "page_token", "is damaged")
        violations.raise_if_any()
        # If the first page is of the newest run, the following pages are of the same run.
        run_id, _, after = page.after.rpartition("/")
        record = await self._manager.record(run_id or request.run_id)
        board, full = self._manager.board(record), False
        texts = await asyncio.to_thread(token_texts, record) if request.with_tokens else None
        while not full and (samples := await read_board(board.sample_page(request.step or None, after))):
            messages = await asyncio.to_thread(lambda read: [sample_message(one, texts) for _, one in read], samples)
            full = not all(
                page.add(f"{record.run_id}/{key}", message) for (key, _), message in zip(samples, messages, strict=True)
            )
            after = samples[-1][0]
        return pb.ListSamplesResponse(samples=page.items, next_page_token=page.next_page_token)

    async def GetGroups(self, request: pb.GetGroupsRequest, context: Any) -> pb.GetGroupsResponse:
        """Return closed groups of a run, newest first, from its groups.jsonl."""
        tests = group_tests(request)
        record = await self._manager.record(request.run_id)
        return await asyncio.to_thread(find_groups, Path(record.folder), tests, request.max_groups)

    async def GetLogs(self, request: pb.GetLogsRequest, context: Any) -> pb.GetLogsResponse:
        """Return the newest log lines of the services, from the run's folder or else from this stack's logs."""
        check_logs_request(request)
        record = await self._manager.record(request.run_id)
        return await asyncio.to_thread(read_logs, record, self._logs, request)

    # --- checkpoints ----------------------------------------------------------------------------------------------

    async def SaveCheckpoint(self, request: pb.SaveCheckpointRequest, context: Any) -> pb.SaveCheckpointResponse:
        """Have the active run's trainer, and its critic service if any, save a checkpoint of the same step."""
        active = self._manager.require_active(checked_run_id(request.run_id))
        with active.trainer_awake():
            saved = await save_checkpoint(active.context, rotate=request.rotate)
        try:
            folder, step = Path(active.record.folder), saved.weights.version
            await await_critic(active.context, folder, step, kept=not request.rotate)
        except NoCriticCheckpoint as error:
            raise Unavailable(f"{error}. That of the trainer is on the disk: {saved.path}") from error
        return pb.SaveCheckpointResponse(path=saved.path, weights=saved.weights)

    async def RestoreRun(self, request: pb.RestoreRunRequest, context: Any) -> pb.RestoreRunResponse:
        """Restore a run that Redis lost, or extend an ended run, from the run's folder. Then resume the run."""
        violations = Violations()
        violations.check(request.steps >= 0, "steps", "must not be negative; 0 leaves the run's steps as they are")
        violations.raise_if_any()
        active = await self._manager.restore(request.folder, request.steps, new_data=request.new_data)
        return pb.RestoreRunResponse(run=await self._manager.message(active.record))

    # --- replicas -------------------------------------------------------------------------------------------------

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        """Register a replica and grant it a lease."""
        registration = request.registration
        check_registration(registration)
        speak_for(registration.role, f"register {registration.replica_id} as {registration.role}")
        for replica in self._registry.replaced_by(registration):
            speak_for(replica.registration.role, f"replace {replica.replica_id}")
        if registration.protocol_version != PROTOCOL_VERSION:
            raise FailedPrecondition(
                f"{registration.replica_id} (relaxd {registration.package_version or 'of unknown version'}) speaks "
                f"protocol version {registration.protocol_version}, this coordinator (relaxd {__version__}) speaks "
                f"{PROTOCOL_VERSION}: run the same release everywhere",
                reason="PROTOCOL_VERSION",
                subject=registration.replica_id,
            )
        await self._registry.register(registration)
        return pb.RegisterResponse(
            lease_seconds=self._registry.lease_seconds,
            heartbeat_seconds=self._registry.heartbeat_seconds,
            assignment=self._manager.assignment(registration.replica_id),
            gpu_lease_seconds=self._registry.gpu_lease_seconds,
            term=self._registry.term,
        )

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatResponse:
        """Renew a replica's lease."""
        check_status_size(request)
        replica = self._own_replica(request.replica_id, "report for", ": register again")
        self._registry.heartbeat(request.replica_id, request.status)
        until = replica.drain_until
        return pb.HeartbeatResponse(
            assignment=self._manager.assignment(request.replica_id),
            drain=replica.draining,
            drain_seconds=None if until is None else max(0.0, until - time.time()),
            gpu_lease_seconds=self._registry.gpu_lease_seconds,
            term=self._registry.term,
        )

    async def ListReplicas(self, request: pb.ListReplicasRequest, context: Any) -> pb.ListReplicasResponse:
        """Return a page of the replicas with a valid lease."""
        violations = Violations()
        if request.role:
            check_role(request.role, REPLICA_ROLES, violations)
        violations.raise_if_any()
        now = time.monotonic()
        page = Page[pb.RegisteredReplica](request, f"replicas {request.role}", default=100, maximum=MAX_PAGE)
        for r in self._registry.all():
            key = f"{r.registration.role} {r.replica_id}"
            if request.role not in ("", r.registration.role) or key <= page.after:
                continue
            replica = pb.RegisteredReplica(
                registration=r.registration,
                status=r.status,
                heartbeat_age_seconds=now - r.seen,
                leased_gpu_uuids=self._registry.gpus_of(r.replica_id),
                leased_gpu_share=self._registry.gpu_share_of(r.replica_id),
            )
            if not page.add(key, replica):
                break
        return pb.ListReplicasResponse(replicas=page.items, next_page_token=page.next_page_token)

    async def WatchReplicas(
        self, request: pb.WatchReplicasRequest, context: Any
    ) -> AsyncIterator[pb.WatchReplicasResponse]:
        """Stream the replicas of a role for a limited time."""
        violations = Violations()
        check_role(request.role, REPLICA_ROLES, violations)
        violations.check(request.after >= 0, "after", f"is {request.after}: it must be a change number; 0 means none")
        seconds = watch_seconds(request.max_seconds, violations)
        violations.raise_if_any()
        async for message in self._replica_feed.watch(request.role, request.after, seconds):
            yield message

    async def DrainReplica(self, request: pb.DrainReplicaRequest, context: Any) -> pb.DrainReplicaResponse:
        """Ask a replica to finish its groups and take no new ones."""
        replica = self._require_replica(request.replica_id)
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
        """Lease free GPUs, or free shares of them, to a replica."""
        check_gpu_request(request)
        self._own_replica(request.replica_id, "lease GPUs for", ": register first")
        shared = self._manager.active is not None and self._manager.active.config.run.colocate
        granted = await self._registry.lease_gpus(
            request.replica_id, request.candidate_uuids, request.count, shared=shared, share=request.share or 1.0
        )
        return pb.LeaseGpusResponse(gpu_uuids=granted)

    async def TakeTurn(self, request: pb.TakeTurnRequest, context: Any) -> pb.TakeTurnResponse:
        """Grant a colocated replica the GPU once the other role has released it."""
        replica = self._own_replica(request.replica_id, "take the turn of", ": register first")
        handoff = self._manager.require_active("").handoff
        if handoff is None:
            raise FailedPrecondition(
                "the active run is not colocated: its replicas don't take turns", reason="RUN_NOT_COLOCATED"
            )
        reason = handoff.request_gpu(replica)
        return pb.TakeTurnResponse(granted=not reason, reason=reason)

    # --- weights --------------------------------------------------------------------------------------------------

    async def AnnounceVersion(self, request: pb.AnnounceVersionRequest, context: Any) -> pb.AnnounceVersionResponse:
        """Record the trainer's new weight version; its synchronisation follows."""
        check_announcement(request)
        await self._manager.require_active(request.run_id).sync.announce(
            Announcement(
                run_id=request.run_id,
                replica_id=request.replica_id,
                term=request.weights.term,
                version=request.weights.version,
            )
        )
        return pb.AnnounceVersionResponse()

    async def SyncWeights(self, request: pb.SyncWeightsRequest, context: Any) -> pb.SyncWeightsResponse:
        """Wait until all engines have the newest weight version."""
        active = self._manager.require_active(checked_run_id(request.run_id))
        started = time.monotonic()
        if active.sync.announced is None:
            raise FailedPrecondition("the trainer has not announced any version yet")
        with active.sync.without_interval():
            while not active.sync.up_to_date():
                remaining = context.time_remaining()
                if remaining is not None and remaining < 1.0:
                    failure = active.sync.last_failure or "still under way"
                    raise Unavailable(f"not every engine serves the newest version yet: {failure}")
                self._manager.require_active(active.record.run_id)
                await self._registry.changed.wait(0.5)  # named: Run.waiting_for has the synchronisation
        announced = active.sync.announced
        return pb.SyncWeightsResponse(
            weights=WeightVersion(term=announced.term, version=announced.version),
            seconds=time.monotonic() - started,
            replica_ids=[engine.replica_id for engine in active.fleet.engines()],
        )

    async def GetWeights(self, request: pb.GetWeightsRequest, context: Any) -> pb.GetWeightsResponse:
        """Return the weight version that each engine serves."""
        active = self._manager.require_active(checked_run_id(request.run_id))
        sync = active.sync
        response = pb.GetWeightsResponse(
            last_sync_id=sync.record.last_sync_id, last_sync_seconds=sync.record.last_sync_seconds
        )
        if sync.announced is not None:
            response.announced.term, response.announced.version = sync.announced.term, sync.announced.version
        for engine in active.fleet.engines():
            served = response.engines.add(replica_id=engine.replica_id)
            if engine.version is not None:
                served.weights.term, served.weights.version = engine.version
        return response

    # --- scaling --------------------------------------------------------------------------------------------------

    async def ScaleOut(self, request: scaling_pb2.ScaleOutRequest, context: Any) -> scaling_pb2.ScaleOutResponse:
        """Begin a scale request that adds replicas."""
        record = await self._scaler.accept(request.request_id, scale_out_spec(request), dry_run=request.dry_run)
        return scaling_pb2.ScaleOutResponse(request=scale_message(record))

    async def ScaleIn(self, request: scaling_pb2.ScaleInRequest, context: Any) -> scaling_pb2.ScaleInResponse:
        """Begin a scale request that removes replicas."""
        record = await self._scaler.accept(request.request_id, scale_in_spec(request), dry_run=request.dry_run)
        return scaling_pb2.ScaleInResponse(request=scale_message(record))

    async def GetScaleRequest(
        self, request: scaling_pb2.GetScaleRequestRequest, context: Any
    ) -> scaling_pb2.GetScaleRequestResponse:
        """Return a scale request. If the request has no id, return the newest scale request."""
        return scaling_pb2.GetScaleRequestResponse(request=scale_message(self._scaler.log.get(request.request_id)))

    async def ListScaleRequests(
        self, request: scaling_pb2.ListScaleRequestsRequest, context: Any
    ) -> scaling_pb2.ListScaleRequestsResponse:
        """Return a page of the scale requests, newest first."""
        chosen = scale_filter(request.filter)
        listed = f"scale requests {chosen.role} {chosen.direction} {sorted(chosen.states)}"
        page = Page[scaling_pb2.ScaleRequest](request, listed, default=20, maximum=MAX_REQUESTS)
        records = {newest_first(r.create_time.timestamp(), r.request_id): r for r in self._scaler.log.select(chosen)}
        for key in sorted(key for key in records if key > page.after):
            if not page.add(key, scale_message(records[key])):
                break
        return scaling_pb2.ListScaleRequestsResponse(requests=page.items, next_page_token=page.next_page_token)

    async def CancelScaleRequest(
        self, request: scaling_pb2.CancelScaleRequestRequest, context: Any
    ) -> scaling_pb2.CancelScaleRequestResponse:
        """Cancel a scale request, and undo what it has done to its replicas."""
        record = await self._scaler.log.cancel(request.request_id)
        return scaling_pb2.CancelScaleRequestResponse(request=scale_message(record))

    async def CancelScaleRequests(
        self, request: scaling_pb2.CancelScaleRequestsRequest, context: Any
    ) -> scaling_pb2.CancelScaleRequestsResponse:
        """Cancel the scale requests in progress that a filter selects."""
        cancelled, skipped = await self._scaler.cancel_all(scale_filter(request.filter), dry_run=request.dry_run)
        return scaling_pb2.CancelScaleRequestsResponse(
            requests=map(scale_message, cancelled), skipped=map(scale_message, skipped)
        )

    async def GetAutoscaler(
        self, request: scaling_pb2.GetAutoscalerRequest, context: Any
    ) -> scaling_pb2.GetAutoscalerResponse:
        """Return the autoscaler's observations and decisions for the active run."""
        active = self._manager.require_active(request.run_id)
        return scaling_pb2.GetAutoscalerResponse(autoscaler=self._autoscaler.describe(active))

    async def SetAutoscaler(
        self, request: scaling_pb2.SetAutoscalerRequest, context: Any
    ) -> scaling_pb2.SetAutoscalerResponse:
        """Change the autoscaler's mode for the rest of the active run."""
        mode = autoscale_mode(request)
        active = self._manager.require_active(request.run_id)
        if active.config.run.colocate and mode != "off":
            raise FailedPrecondition(
                "run.colocate is true: its engines share the trainer's GPUs, and none can be added"
            )
        await active.set_autoscale(mode)
        return scaling_pb2.SetAutoscalerResponse(autoscaler=self._autoscaler.describe(active))

    def _own_replica(self, replica_id: str, deed: str, hint: str) -> Replica:
        """Return a replica after checking that the caller may act for it. `deed` is the intended action, for error
        messages."""
        replica = self._require_replica(replica_id, hint)
        speak_for(replica.registration.role, f"{deed} {replica_id}")
        return replica

    def _require_replica(self, replica_id: str, hint: str = "") -> Replica:
        replica = self._registry.get(replica_id)
        if replica is None:
            raise NotFound(f"no replica {replica_id!r} is registered{hint}")
        return replica


KEDA_METRIC = "relaxd-rollout-replicas"


class KedaServicer(external_scaler_pb2_grpc.ExternalScalerServicer):
    """Implements externalscaler.ExternalScaler with the active run's autoscaler."""

    def __init__(self, autoscaler: Autoscaler) -> None:
        self._autoscaler = autoscaler

    async def IsActive(self, request: keda_pb.ScaledObjectRef, context: Any) -> keda_pb.IsActiveResponse:
        """Return True always: rollout replicas are never scaled to zero."""
        return keda_pb.IsActiveResponse(result=True)

    async def GetMetricSpec(self, request: keda_pb.ScaledObjectRef, context: Any) -> keda_pb.GetMetricSpecResponse:
        """Return the specification of the metric: a target of 1 per replica, so that its value equals the number of
        replicas."""
        return keda_pb.GetMetricSpecResponse(
            metricSpecs=[keda_pb.MetricSpec(metricName=KEDA_METRIC, targetSize=1, targetSizeFloat=1.0)]
        )

    async def GetMetrics(self, request: keda_pb.GetMetricsRequest, context: Any) -> keda_pb.GetMetricsResponse:
        """Return the desired number of rollout replicas."""
        wanted = self._autoscaler.target()
        value = keda_pb.MetricValue(metricName=KEDA_METRIC, metricValue=wanted, metricValueFloat=wanted)
        return keda_pb.GetMetricsResponse(metricValues=[value])


async def start_keda_server(autoscaler: Autoscaler, settings: ServiceSettings) -> RunningServer:
    """Start the server for KEDA. It requires no token, because KEDA's external scaler can't send one. Raises
    ServerError."""
    service = Service(
        external_scaler_pb2_grpc.add_ExternalScalerServicer_to_server,
        KedaServicer(autoscaler),
        "externalscaler.ExternalScaler",
    )
    security = ServerSecurity(tls=settings.tls, allow_insecure=True)
    return await start_server([service], host=settings.host, port=settings.keda_port, security=security, serving=True)
